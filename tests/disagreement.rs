//! Ranks that differ, are late, or are gone: an error on every rank, soon, that names both sides; never a hang.

#[allow(dead_code, clippy::allow_attributes, reason = "this test uses a part of it")]
mod parallel {
    pub mod ranks;
}
mod serving;

use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan::chain::MsaChains;
use capstan::config::{CaptureSizes, Limits, ModelShape};
use capstan::error::{Error, ErrorKind, Result};
use capstan::hal::Device;
use capstan::hal::cpu::CpuDevice;
use capstan::peers::{Group, ThreadGroup};
use capstan::runtime::{Executor, Sampling, SequenceStep};
use parallel::ranks::{Step, decode, shape};

fn limits(group: &ThreadGroup) -> Limits {
    let (rank, world) = (group.rank(), group.world());
    Limits { rank, world, max_num_seqs: 4, max_model_len: 256, peer_timeout_ms: 400, ..serving::limits() }
}

fn executor(group: &Arc<ThreadGroup>, shape: &ModelShape, limits: &Limits) -> Executor {
    let device: Arc<dyn Device> = CpuDevice::new(1).unwrap();
    Executor::join(&device, Arc::new(MsaChains::new(shape, limits, 1).unwrap()), group.clone()).unwrap()
}

/// Runs `each` on every rank, its executor captured.
fn on_ranks<T: Send>(world: u32, each: impl Fn(&mut Executor, u32) -> T + Sync) -> Vec<T> {
    on_groups(world, |group| {
        let mut executor = executor(&group, &shape(), &limits(&group));
        executor.capture(|_| ()).unwrap();
        each(&mut executor, group.rank())
    })
}

fn on_groups<T: Send>(world: u32, each: impl Fn(Arc<ThreadGroup>) -> T + Sync) -> Vec<T> {
    let groups = ThreadGroup::all(world, Duration::from_secs(60));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| each(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn step(lens: &[u32]) -> Step {
    Step { lens: lens.to_vec(), tokens: lens.iter().map(|_| vec![3]).collect() }
}

fn is_mismatch(error: &Error, ours: &str, theirs: &str) -> bool {
    error.kind() == ErrorKind::Invariant("RANK-1") && error.message().contains(ours) && error.message().contains(theirs)
}

#[test]
fn other_rows_lengths_or_steps_are_an_error_on_every_rank_and_the_next_step_runs() {
    let errors: Vec<Vec<Error>> = on_ranks(4, |executor, rank| {
        let odd = rank == 3;
        let rows = decode(executor, &step(if odd { &[40, 50, 60] } else { &[40] })).unwrap_err();
        decode(executor, &step(&[100, 30])).unwrap();
        let lens = decode(executor, &step(if odd { &[100, 31] } else { &[100, 30] })).unwrap_err();
        decode(executor, &step(&[100, 30])).unwrap();
        if odd {
            let sequence = executor.open_sequence().unwrap();
            executor.grant_blocks(sequence, &[0]).unwrap();
            let prefill = SequenceStep { sequence, tokens: &[1, 2], kv_len: 2, sampling: Sampling::GREEDY };
            let ticket = executor.prefill(&[prefill]).unwrap();
            executor.wait(ticket).unwrap();
            executor.close_sequence(sequence, |_| ()).unwrap();
        }
        let number = decode(executor, &step(&[100, 30])).unwrap_err();
        vec![rows, lens, number]
    });
    for (rank, errors) in errors.iter().enumerate() {
        let (ours, theirs) = if rank == 3 { ("this rank 4,", "rank 0 1:") } else { ("this rank 1,", "rank 3 4:") };
        assert!(is_mismatch(&errors[0], ours, theirs), "{}", errors[0]);
        assert!(is_mismatch(&errors[1], "batch of lengths", if rank == 3 { "rank 0" } else { "rank 3" }), "{}", errors[1]);
        assert!(is_mismatch(&errors[2], "step of that number", if rank == 3 { "rank 0" } else { "rank 3" }), "{}", errors[2]);
    }
}

#[test]
fn an_absent_rank_is_named_and_every_rank_ends_within_a_second() {
    let errors = on_ranks(4, |executor, rank| -> (Duration, Error, Result<()>) {
        decode(executor, &step(&[100, 30])).unwrap();
        if rank == 2 {
            std::thread::sleep(Duration::from_millis(1000));
        }
        let start = Instant::now();
        let error = decode(executor, &step(&[100, 30])).unwrap_err();
        (start.elapsed(), error, decode(executor, &step(&[100, 30])))
    });
    for (rank, (took, error, after)) in errors.iter().enumerate() {
        assert!(*took < Duration::from_millis(1000), "rank {rank} took {took:?}");
        assert_eq!(error.kind(), ErrorKind::Peer);
        let named = error.message().contains("rank 2 did not come");
        let ended = error.message().contains("the group was ended by rank");
        assert!(if rank == 2 { ended } else { named || ended }, "rank {rank}: {error}");
        assert_eq!(after.as_ref().unwrap_err().kind(), ErrorKind::State, "an ended executor refuses steps");
    }
    assert!(errors.iter().any(|(_, error, _)| error.message().contains("rank 2 did not come to step")));
}

#[test]
fn ranks_that_would_capture_other_graphs_do_not() {
    let errors = on_groups(2, |group| {
        let limits =
            Limits { capture: CaptureSizes::List([vec![1, 2], vec![1, 4]][group.rank() as usize].clone()), ..limits(&group) };
        executor(&group, &shape(), &limits).capture(|_| ()).unwrap_err()
    });
    assert!(errors.iter().all(|error| is_mismatch(error, "2,1", "4,1")), "{errors:?}");
    let errors = on_groups(2, |group| {
        let shape = ModelShape { init_blocks: group.rank(), ..shape() };
        executor(&group, &shape, &limits(&group)).capture(|_| ()).unwrap_err()
    });
    assert!(errors.iter().all(|error| is_mismatch(error, "init_blocks=0", "init_blocks=1")), "{errors:?}");
    let alone = Limits { world: 2, ..serving::limits() };
    let device: Arc<dyn Device> = CpuDevice::new(1).unwrap();
    let error = Executor::new(&device, Arc::new(MsaChains::new(&shape(), &alone, 1).unwrap())).unwrap_err();
    assert!(error.message().contains("other ranks") && error.help_line().is_some());
}
