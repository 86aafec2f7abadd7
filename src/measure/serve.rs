//! A serving run from an empty device to a report: allocate, capture, serve a workload, check it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::memory::resident_bytes;
use super::workload::quantile;
use super::{Served, Watched, Workload};
use crate::capture::GraphCost;
use crate::chain::StepChains;
use crate::engine::{Engine, EngineLimits, Finish, Request};
use crate::error::{Error, Result};
use crate::hal::Device;
use crate::invariant::graph_cost;
use crate::runtime::{CaptureProgress, CaptureReport, Checks, Executor, Fallback, Metrics};

/// How the tokens of a run are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// Not at all.
    Off,
    /// Every step, by a second executor that repeats it eagerly and unpadded. It lies on the measured path, except for the host
    /// time of a step.
    EachStep,
    /// Every request, afterwards: it is served again alone, eagerly and unpadded, and must get the same tokens.
    Alone,
}

/// Where a run stands.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// Warming up and capturing.
    Capture(CaptureProgress),
    /// Serving: requests finished, of all.
    Serve(u32, u32),
    /// Checking afterwards: requests checked, of all.
    Check(u32, u32),
}

/// Median and 99th percentile.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Spread {
    /// Of `values`, which it sorts; zeros if there are none.
    pub fn of(values: &mut [f64]) -> Spread {
        Spread { median: quantile(values, 0.5), p99: quantile(values, 0.99) }
    }
}

/// Memory against the plan, bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MemoryReport {
    /// The plan: every slab.
    pub planned: u64,
    /// What graphs took beyond the arena, by the device's own count.
    pub graphs: u64,
    /// What they were estimated to take before anything was captured.
    pub graphs_estimated: u64,
    /// What a graph takes on this device, measured with small graphs beside those of the run; `None` where there was no room.
    pub graph_cost: Option<GraphCost>,
    /// Resident before anything was allocated: the program's own base. `None` where the system does not tell.
    pub resident_base: Option<u64>,
    /// Resident after capture.
    pub resident_captured: Option<u64>,
    /// Resident at the end of the run, checks not counted.
    pub resident_served: Option<u64>,
}

/// What a run did and took.
#[derive(Debug, Serialize)]
pub struct ServeReport {
    /// The capture.
    pub capture: CaptureReport,
    /// Requests by how they ended.
    pub finished: BTreeMap<&'static str, u32>,
    /// Generated tokens.
    pub tokens: u64,
    /// Prompt tokens prefilled, those computed again after a preemption included.
    pub prefilled: u64,
    /// Engine steps.
    pub steps: u64,
    /// Requests preempted for lack of blocks.
    pub preempted: u64,
    /// Wall time of serving, seconds.
    pub seconds: f64,
    /// Arrival to first token, seconds.
    pub first_token_seconds: Spread,
    /// Between tokens, seconds.
    pub inter_token_seconds: Spread,
    /// Host time of a decode call, microseconds.
    pub submit_us: Spread,
    /// Counters of the executor.
    pub metrics: Metrics,
    /// Share of replayed rows that were padding.
    pub padding_waste: f64,
    /// Eager decode steps by reason, those that happened.
    pub fallbacks: BTreeMap<&'static str, u64>,
    /// Why a rank of several scored alone; empty if it did not, or if there is one rank.
    pub parallel_refused: Vec<String>,
    /// Memory.
    pub memory: MemoryReport,
    /// How tokens were checked.
    pub check: Check,
    /// Steps (each step) or requests (alone) that were compared and equal.
    pub compared: u64,
}

/// Runs `workload` over `chains` on `device`, its steps under `checks`.
///
/// Errors: whatever the executor or engine reports; [`ErrorKind::Invariant`](crate::error::ErrorKind) PAD-3 if a token differs
/// from the eager unpadded run's.
pub fn serve(
    device: &Arc<dyn Device>,
    chains: &Arc<dyn StepChains>,
    workload: &Workload,
    check: Check,
    checks: Checks,
    mut progress: impl FnMut(Progress),
) -> Result<ServeReport> {
    let limits = EngineLimits::of(&**chains);
    let requests = workload.requests(limits.vocab, limits.max_model_len);
    let resident_base = resident_bytes();
    let mut executor = Executor::new(device, chains.clone())?;
    executor.set_checks(checks);
    let capture = executor.capture(|at| progress(Progress::Capture(at)))?;
    let resident_captured = resident_bytes();
    let shadow = match check {
        Check::EachStep => Some(Executor::new(device, chains.clone())?),
        Check::Off | Check::Alone => None,
    };
    let mut engine = Engine::new(Watched::new(executor, shadow)?, limits);
    let served = workload.serve(&mut engine, requests.clone(), |done, all| progress(Progress::Serve(done, all)))?;
    let resident_served = resident_bytes();
    let watched = engine.steps();
    let memory = MemoryReport {
        planned: chains.plan().total_bytes(),
        graphs: capture.graph_bytes,
        graphs_estimated: capture.estimated_graph_bytes,
        graph_cost: graph_cost(device).inspect_err(|error| tracing::warn!(%error, "the cost of a graph was not measured")).ok(),
        resident_base,
        resident_captured,
        resident_served,
    };
    let compared = match check {
        Check::Off => 0,
        Check::EachStep => watched.compared(),
        Check::Alone => {
            check_alone(device, chains, requests, &served, |done, all| progress(Progress::Check(done, all)))?;
            served.outcomes.len() as u64
        }
    };
    Ok(report(capture, &served, watched, memory, check, compared))
}

fn report(
    capture: CaptureReport,
    served: &Served,
    watched: &Watched,
    memory: MemoryReport,
    check: Check,
    compared: u64,
) -> ServeReport {
    let metrics = watched.primary().metrics().clone();
    let mut finished = BTreeMap::new();
    for outcome in &served.outcomes {
        *finished.entry(outcome.finish.name()).or_default() += 1;
    }
    let mut first: Vec<f64> = served.outcomes.iter().map(|outcome| outcome.first_token_seconds).collect();
    let mut between: Vec<f64> = served.outcomes.iter().flat_map(|outcome| outcome.inter_token_seconds.iter().copied()).collect();
    let fallbacks = Fallback::ALL.iter().zip(metrics.fallbacks).filter(|&(_, count)| count > 0);
    ServeReport {
        capture,
        finished,
        tokens: served.tokens(),
        prefilled: served.prefilled,
        steps: served.steps,
        preempted: served.preempted,
        seconds: served.seconds,
        first_token_seconds: Spread::of(&mut first),
        inter_token_seconds: Spread::of(&mut between),
        submit_us: Spread::of(&mut watched.submit_us().to_vec()),
        padding_waste: metrics.padding_waste(),
        fallbacks: fallbacks.map(|(why, count)| (why.reason(), count)).collect(),
        parallel_refused: watched.primary().chains().parallel_refused().iter().map(ToString::to_string).collect(),
        metrics,
        memory,
        check,
        compared,
    }
}

/// Serves each request alone on an executor that never captures, and compares its tokens.
fn check_alone(
    device: &Arc<dyn Device>,
    chains: &Arc<dyn StepChains>,
    requests: Vec<Request>,
    served: &Served,
    mut progress: impl FnMut(u32, u32),
) -> Result<()> {
    let mut engine = Engine::new(Executor::new(device, chains.clone())?, EngineLimits::of(&**chains));
    for (request, outcome) in requests.into_iter().zip(&served.outcomes) {
        let cancelled = outcome.finish == Finish::Cancelled;
        let tokens = engine.run(request)?.0;
        let differs = tokens.iter().zip(&outcome.tokens).position(|(alone, together)| alone != together);
        if differs.is_some() || (tokens.len() != outcome.tokens.len() && !cancelled) {
            let at = differs.unwrap_or(tokens.len().min(outcome.tokens.len()));
            return Err(Error::invariant(
                "PAD-3",
                format!(
                    "request {}, token {at}: served together it got {:?}, alone, eagerly and unpadded {:?}",
                    outcome.index,
                    outcome.tokens.get(at),
                    tokens.get(at)
                ),
            )
            .help("run `capstan bisect` to find the first node that differs"));
        }
        progress(outcome.index + 1, served.outcomes.len() as u32);
    }
    Ok(())
}
