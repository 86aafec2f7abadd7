//! SEAL-1 on the host: a decode step allocates nothing, on any thread.
#![expect(unsafe_code, reason = "a global allocator that counts")]

mod serving;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use capstan::chain::StepChains;
use capstan::hal;
use capstan::measure::Probe;
use capstan::runtime::{Checks, Executor};

struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn calls_of_steps(name: &str, chains: &Arc<dyn StepChains>) -> u64 {
    let device = hal::open(name).unwrap();
    let mut executor = Executor::new(&device, chains.clone()).unwrap();
    executor.capture(|_| ()).unwrap();
    // Under `strict` every step is audited, and an audit allocates.
    executor.set_checks(Checks { audit_every: None, ..Checks::default() });
    let probe = Probe::open(&mut executor, 5, 100).unwrap();
    // The first steps carry the block table.
    probe.run(&mut executor, 5).unwrap();
    let before = CALLS.load(Ordering::Relaxed);
    probe.run(&mut executor, 200).unwrap();
    let calls = CALLS.load(Ordering::Relaxed) - before;
    probe.close(&mut executor).unwrap();
    calls
}

/// One test: a second one in this process would be counted, too.
#[test]
fn a_decode_step_allocates_nothing() {
    let limits = serving::limits();
    for (family, chains) in [("msa", serving::msa(&limits)), ("m3", serving::m3(&limits))] {
        for device in ["null", "cpu"] {
            assert_eq!(calls_of_steps(device, &chains), 0, "{family} on {device}: allocator calls in 200 steps");
        }
    }
    let counted = CALLS.load(Ordering::Relaxed);
    drop(std::hint::black_box(vec![0u8; 100]));
    assert_eq!(CALLS.load(Ordering::Relaxed), counted + 2, "the counter counts");
}
