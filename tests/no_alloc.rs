//! A decode step by replay touches the host heap not once, on any thread (SEAL-1).

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, Limits, ModelShape};
use capstan::hal;
use capstan::runtime::{Executor, Sampling, SequenceStep};

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards to the system allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(u64::from(COUNTS.load(Ordering::Relaxed)), Ordering::Relaxed);
        // SAFETY: the caller keeps GlobalAlloc's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.fetch_add(u64::from(COUNTS.load(Ordering::Relaxed)), Ordering::Relaxed);
        // SAFETY: the caller keeps GlobalAlloc's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decode_steps_touch_no_heap() {
    let limits =
        Limits { max_model_len: 512, max_num_seqs: 4, max_num_batched_tokens: 64, cache: CacheBudget::Blocks(64), ..Limits::default() };
    for device in ["cpu", "null"] {
        let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), &limits, 7).expect("plans"));
        let mut executor = Executor::new(&hal::open(device).expect("always there"), chains).expect("builds");
        executor.capture(|_| ()).expect("captures");
        let ids: Vec<_> = (0..3).map(|_| executor.open_sequence().expect("room")).collect();
        for (at, &id) in ids.iter().enumerate() {
            executor.grant_blocks(id, &(at as u32 * 8..at as u32 * 8 + 8).collect::<Vec<_>>()).expect("free");
        }
        let mut run = |from: u32, to: u32| {
            for kv_len in from..to {
                let step = |sequence| SequenceStep { sequence, tokens: &[5], kv_len, sampling: Sampling::GREEDY };
                let batch = [step(ids[0]), step(ids[1]), step(ids[2])];
                let ticket = executor.decode(&batch).expect("replays");
                match device {
                    "cpu" => executor.wait(ticket).map(drop).expect("ends"),
                    _ => executor.drain().expect("idle"),
                }
            }
        };
        run(1, 20);
        COUNTS.store(true, Ordering::SeqCst);
        run(20, 120);
        COUNTS.store(false, Ordering::SeqCst);
        assert_eq!(CALLS.swap(0, Ordering::SeqCst), 0, "heap calls in 100 decode steps on {device}");
    }
}
