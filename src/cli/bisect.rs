//! `capstan bisect`: the first node where two runs of the same steps disagree.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde_json::json;

use super::demo::Scratch;
use super::dump::Family;
use super::progress::Bar;
use super::run::WorkloadArgs;
use super::{DeviceChoice, Shared, print};
use crate::chain::{MsaChains, StepChains};
use crate::config::{LimitsInput, ModelShape};
use crate::engine::{Engine, EngineLimits};
use crate::error::{Error, Result};
use crate::hal;
use crate::measure::Pair;
use crate::measure::serve::Progress;
use crate::model::{Checkpoint, M3Chains};
use crate::runtime::Executor;

/// Flags of `capstan bisect`.
#[derive(Debug, Args)]
pub(super) struct BisectArgs {
    #[command(flatten)]
    shared: Shared,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Which chain to run
    #[arg(long, value_enum, default_value_t = Family::Msa, value_name = "CHAIN")]
    chain: Family,
    /// Device of the eager run [default: that of --device, whose replay is compared]
    #[arg(long, value_enum, value_name = "DEVICE")]
    against: Option<DeviceChoice>,
    /// Floats may differ by this share of the largest magnitude in an output; 0 asks for equal bits
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    tolerance: f64,
    /// safetensors file for the node's inputs and both outputs
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Exit code 1 if there is such a node.
pub(super) fn run(args: &BisectArgs) -> Result<ExitCode> {
    let shared = &args.shared;
    if !(0.0..1.0).contains(&args.tolerance) {
        return Err(Error::config(format!("--tolerance {}: no share", args.tolerance)).help("from 0 to less than 1"));
    }
    let devices = [shared.device, args.against.unwrap_or(shared.device)].map(|choice| hal::open(choice.name()));
    let [left, right] = devices;
    let (left, right) = (left?, right?);
    if !(left.info().executes && right.info().executes) {
        return Err(Error::unavailable("the null device records and runs nothing: there is nothing to compare")
            .help("use --device cpu, or capstan diff to compare two dumps"));
    }
    let mut bar = Bar::new();
    let mut made = None;
    let chains = chains(args, &mut made, &mut bar)?;
    let limits = EngineLimits::of(&*chains);
    let longest = limits.max_model_len;
    let workload = args.workload.workload(shared.seed, (6, (1, (longest / 4).max(1)), (4, 12)))?;
    let requests = workload.requests(limits.vocab, longest);
    let mut captured = |device| -> Result<Executor> {
        let mut executor = Executor::new(device, chains.clone())?;
        executor.capture(|at| bar.serving(Progress::Capture(at)))?;
        Ok(executor)
    };
    let pair = Pair::new(captured(&left)?, captured(&right)?, args.tolerance);
    let mut engine = Engine::new(pair, limits);
    let served = workload.serve(&mut engine, requests, |done, all| bar.serving(Progress::Serve(done, all)));
    drop(bar);
    let sides = match args.against {
        None => ["in the graph".to_string(), "in the eager run".to_string()],
        Some(_) => [&left, &right].map(|device| format!("on {}", device.info().name)),
    };
    let Some(found) = engine.steps().found() else {
        served?;
        let (steps, replayed, nodes) = engine.steps().counts();
        print(&match shared.json {
            true => format!("{:#}", json!({ "same": true, "steps": steps, "replayed": replayed, "nodes": nodes })),
            false => format!("no node differs: {nodes} nodes of {steps} steps, {replayed} of them from captured graphs"),
        })?;
        return Ok(ExitCode::SUCCESS);
    };
    if let Some(file) = &args.out {
        found.save(file, &sides)?;
    }
    print(&match shared.json {
        true => format!(
            "{:#}",
            json!({ "same": false, "step": found.step, "prefill": found.prefill,
            "sequences": found.sequences, "difference": found.node.difference })
        ),
        false => found.told(&sides),
    })?;
    Ok(ExitCode::FAILURE)
}

fn chains(args: &BisectArgs, made: &mut Option<Scratch>, bar: &mut Bar) -> Result<Arc<dyn StepChains>> {
    let shared = &args.shared;
    let defaults = LimitsInput { max_num_seqs: Some(4), max_num_batched_tokens: Some(256), ..LimitsInput::default() };
    if args.chain == Family::Msa {
        let shape = shared.shape_or(ModelShape::nano())?;
        let limits = shared.limits_or(defaults, &shape)?;
        return Ok(Arc::new(MsaChains::new(&shape, &limits, shared.seed)?));
    }
    // Without --model a random one is made, and gone again when the run ends.
    let dir = match &shared.model {
        Some(dir) => dir.clone(),
        None => made.insert(Scratch::new(shared.seed)?).make(shared.seed, bar)?,
    };
    let checkpoint = Arc::new(Checkpoint::open(&dir)?);
    let limits = shared.limits_or(defaults, checkpoint.shape())?;
    Ok(Arc::new(M3Chains::new(checkpoint, &limits)?))
}
