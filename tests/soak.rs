//! 10,000 replays and 100 re-captures keep no memory; a device that keeps some a graph is caught.

mod lying;
mod serving;

use std::sync::{Arc, Mutex, PoisonError};

use capstan::error::ErrorKind;
use capstan::hal::{self, Device};
use capstan::measure::soak::{Soak, soak};
use capstan::runtime::Executor;
use lying::{Lie, LyingDevice};

/// 100 re-captures of every size make 2.5 MB of nodes if each of 600 graphs of 12 nodes with 350 bytes were kept.
const RESIDENT_TOLERANCE_BYTES: u64 = 1 << 20;

/// Resident memory is the process's: one soak at a time.
static ONE: Mutex<()> = Mutex::new(());

#[test]
fn a_full_soak_ends_where_it_began() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let chains = serving::msa(&serving::limits());
    let mut executor = Executor::new(&serving::device(), chains).unwrap();
    executor.capture(|_| ()).unwrap();
    let mut rounds = 0;
    let report = soak(&mut executor, Soak::FULL, |_, _| rounds += 1).unwrap();
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    assert_eq!(rounds, 100);
    assert_eq!(report.samples.iter().map(|sample| sample.recaptures).collect::<Vec<_>>(), [0, 25, 50, 75, 100]);
    report.require_none_kept(RESIDENT_TOLERANCE_BYTES).unwrap();
    assert_eq!(report.device_delta_bytes, 0);
    // The replays of the last round and the steps of the capture before it are all that its counters hold.
    let metrics = executor.metrics();
    assert_eq!(metrics.fallbacks, [0; 3], "every step of the soak replayed");
    assert!(metrics.decode_steps >= 10_000, "{}", metrics.decode_steps);
}

#[test]
fn device_memory_that_each_graph_keeps_is_caught() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device: Arc<dyn Device> = Arc::new(LyingDevice::new(hal::open("cpu").unwrap(), Lie::KeepsMemory(4096)));
    let mut executor = Executor::new(&device, serving::msa(&serving::limits())).unwrap();
    executor.capture(|_| ()).unwrap();
    let sizes = executor.ladder().sizes().len() as i64;
    let short = Soak { replays: 25, recaptures: 10, ..Soak::FULL };
    let report = soak(&mut executor, short, |_, _| ()).unwrap();
    // Each size is captured once; a second recording for BAKE-1 is not instantiated.
    assert_eq!(report.device_delta_bytes, 4096 * sizes * 10);
    let error = report.require_none_kept(RESIDENT_TOLERANCE_BYTES).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Memory);
    assert!(error.message().contains("25 replays and 10 re-captures kept"), "{error}");
}

#[test]
fn host_memory_that_each_round_keeps_is_caught() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut executor = Executor::new(&serving::device(), serving::msa(&serving::limits())).unwrap();
    executor.capture(|_| ()).unwrap();
    let mut kept = Vec::new();
    let short = Soak { replays: 25, recaptures: 10, ..Soak::FULL };
    let report = soak(&mut executor, short, |_, _| kept.push(vec![1u8; 256 << 10])).unwrap();
    // Ten times 256 KiB is beyond the tolerance; where the system does not tell there is nothing to catch.
    if report.resident_delta_bytes.is_some() {
        let error = report.require_none_kept(RESIDENT_TOLERANCE_BYTES).unwrap_err();
        assert!(error.message().contains("resident memory"), "{error}");
    }
    assert_eq!((kept.len(), report.device_delta_bytes), (10, 0));
}
