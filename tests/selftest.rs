//! The self-test passes on a device that is right, and names the public report on devices that lie in its way.

mod serving;

use std::sync::Arc;

use capstan::error::ErrorKind;
use capstan::hal::{self, Device};
use capstan::invariant::{SelfTestReport, issues, self_test};
use capstan::runtime::{Checks, Executor};
use lying::{Lie, LyingDevice};

#[path = "lying/mod.rs"]
mod lying;

fn on_a_device_that(lie: Lie) -> SelfTestReport {
    let device: Arc<dyn Device> = Arc::new(LyingDevice::new(hal::open("cpu").unwrap(), lie));
    self_test(&device).expect("a lie is a fault in the report, not an error")
}

/// Exactly the named checks fail, and the first one names the report.
fn caught(report: &SelfTestReport, checks: &[&str], issue: issues::KnownIssue) -> String {
    let failed: Vec<_> = report.checks.iter().filter_map(|check| Some((check.name, check.fault.clone()?))).collect();
    assert_eq!(failed.iter().map(|(name, _)| *name).collect::<Vec<_>>(), checks, "{failed:#?}");
    assert_eq!(failed[0].1.issue, issue);
    let error = report.require().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.help_line().unwrap().contains(issue.id), "{error}");
    failed[0].1.message.clone()
}

#[test]
fn a_device_that_is_right_passes() {
    let report = self_test(&serving::device()).unwrap();
    report.require().unwrap();
    assert!(report.passed() && report.checks.len() == 5, "{report:#?}");
    assert!(report.checks.iter().all(|check| check.replays >= 16));
}

#[test]
fn a_wrapper_that_does_not_lie_passes() {
    on_a_device_that(Lie::None).require().unwrap();
}

#[test]
fn a_device_that_runs_nothing_is_refused() {
    assert_eq!(self_test(&hal::open("null").unwrap()).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn stale_pointers_past_200_nodes_name_the_node_and_the_report() {
    let message = caught(&on_a_device_that(Lie::StalePastNode(200)), &["long_chain"], issues::STALE_PAST_200_NODES);
    assert!(message.contains("node 200 of 512"), "{message}");
}

#[test]
fn pinned_memory_read_stale_names_the_report() {
    let message = caught(&on_a_device_that(Lie::StalePinned), &["pinned_ingest"], issues::STALE_BEFORE_LAUNCH);
    assert!(message.contains("the write before's"), "{message}");
}

#[test]
fn a_copy_read_stale_names_the_report() {
    let report = on_a_device_that(Lie::StaleWrites);
    let copied = report.checks.iter().find(|check| check.name == "copied_ingest").unwrap();
    let fault = copied.fault.as_ref().expect("the copied buffer was read stale");
    assert_eq!(fault.issue, issues::STALE_BEFORE_LAUNCH);
    assert!(fault.message.contains("the write before's"), "{}", fault.message);
    assert!(report.checks.iter().find(|check| check.name == "pinned_ingest").unwrap().fault.is_none());
}

#[test]
fn a_replay_of_the_wrong_graph_is_caught() {
    let message = caught(&on_a_device_that(Lie::WrongExec), &["alternation"], issues::CORRUPT_REPLAY);
    assert!(message.contains("two graphs in turn"), "{message}");
}

#[test]
fn a_second_instance_that_does_nothing_is_caught() {
    let message = caught(&on_a_device_that(Lie::DeadInstance), &["reinstantiation"], issues::CORRUPT_REPLAY);
    assert!(message.contains("instance"), "{message}");
}

#[test]
fn a_capture_that_swallows_a_launch_is_caught() {
    let report = on_a_device_that(Lie::SwallowedLaunch);
    let fault = report.checks[0].fault.as_ref().unwrap();
    assert_eq!(fault.issue, issues::SWALLOWED_ERRORS);
    assert!(fault.message.contains("512 kernels were launched, the graph holds 511"), "{}", fault.message);
}

#[test]
fn an_executor_that_is_asked_to_captures_nothing_on_a_device_that_lies() {
    let device: Arc<dyn Device> = Arc::new(LyingDevice::new(hal::open("cpu").unwrap(), Lie::WrongExec));
    let mut executor = Executor::new(&device, serving::msa(&serving::limits())).unwrap();
    executor.set_checks(Checks { self_test: Some(true), ..executor.checks() });
    let error = executor.capture(|_| ()).unwrap_err();
    assert!(error.help_line().unwrap().contains(issues::CORRUPT_REPLAY.id), "{error}");
    assert!(executor.graphs().is_empty());
    // Where nobody asks, the CPU device is trusted.
    executor.set_checks(Checks { self_test: None, ..executor.checks() });
    executor.capture(|_| ()).unwrap();
    assert!(!executor.graphs().is_empty());
}
