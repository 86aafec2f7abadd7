//! `capstan run`: a serving-like workload on the sparse-attention chain alone.

use std::sync::Arc;

use clap::Args;

use super::progress::Bar;
use super::{Shared, print, report};
use crate::chain::{MsaChains, StepChains};
use crate::config::{Limits, LimitsInput, ModelShape};
use crate::error::{Error, Result};
use crate::measure::{Check, Workload, serve};
use crate::runtime::Checks;

/// Flags of a workload.
#[derive(Debug, Args)]
pub(super) struct WorkloadArgs {
    /// Requests in all
    #[arg(long, value_name = "N")]
    requests: Option<u32>,
    /// Requests that arrive before a step, on average
    #[arg(long, default_value_t = 0.5, value_name = "N")]
    arrivals: f64,
    /// Prompt lengths, tokens: MIN..MAX
    #[arg(long, value_name = "MIN..MAX", value_parser = range)]
    prompt_len: Option<(u32, u32)>,
    /// Tokens to generate: MIN..MAX
    #[arg(long, value_name = "MIN..MAX", value_parser = range)]
    max_new: Option<(u32, u32)>,
    /// Share of requests that sample instead of taking the largest logit
    #[arg(long, default_value_t = 0.25, value_name = "SHARE")]
    sampled: f64,
}

impl WorkloadArgs {
    /// The workload, with a command's own defaults: requests, prompt lengths, tokens to generate.
    pub(super) fn workload(&self, seed: u64, defaults: (u32, (u32, u32), (u32, u32))) -> Result<Workload> {
        if !(self.arrivals > 0.0 && self.arrivals.is_finite() && (0.0..=1.0).contains(&self.sampled)) {
            return Err(Error::config(format!("--arrivals {} --sampled {}: no such workload", self.arrivals, self.sampled))
                .help("arrivals above 0, sampled from 0 to 1"));
        }
        Ok(Workload {
            seed,
            requests: self.requests.unwrap_or(defaults.0),
            arrivals_a_step: self.arrivals,
            prompt_len: self.prompt_len.unwrap_or(defaults.1),
            max_new: self.max_new.unwrap_or(defaults.2),
            sampled: self.sampled,
        })
    }
}

fn range(text: &str) -> std::result::Result<(u32, u32), String> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    match (low.parse(), high.parse()) {
        (Ok(low), Ok(high)) if 1 <= low && low <= high => Ok((low, high)),
        _ => Err(format!("{text}: expected MIN..MAX, whole numbers from 1, the smaller first")),
    }
}

/// Flags of checks beyond those of every step.
#[derive(Debug, Args)]
pub(super) struct ChecksArgs {
    /// Audit every n-th replay: graphs, memory, outputs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    audit_every: Option<u32>,
    /// Repeat every n-th replay eagerly and compare all that it wrote
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    shadow_every: Option<u32>,
}

impl ChecksArgs {
    pub(super) fn checks(&self) -> Checks {
        let defaults = Checks::default();
        Checks { audit_every: self.audit_every.or(defaults.audit_every), shadow_every: self.shadow_every, ..defaults }
    }
}

/// Flags of `capstan run`.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    shared: Shared,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    checks: ChecksArgs,
    /// Do not repeat each step eagerly and unpadded
    #[arg(long)]
    no_shadow: bool,
}

pub(super) fn run(args: &RunArgs) -> Result<()> {
    let shared = &args.shared;
    let shape = shared.shape_or(ModelShape::nano())?;
    let defaults = LimitsInput { max_num_seqs: Some(16), max_num_batched_tokens: Some(512), ..LimitsInput::default() };
    let limits = shared.limits_or(defaults, &shape)?;
    let longest = limits.max_model_len;
    let workload = args.workload.workload(shared.seed, (48, (1, (longest / 2).max(1)), (4, 48)))?;
    let device = shared.open_device()?;
    if !device.info().executes {
        return Err(Error::unavailable("the null device records and runs nothing: there is nothing to serve")
            .help("use --device cpu, or `capstan bench --device null` for host times"));
    }
    let chains = |limits: &Limits| -> Result<Arc<dyn StepChains>> { Ok(Arc::new(MsaChains::new(&shape, limits, shared.seed)?)) };
    let limits = shared.keep_for_graphs(limits, &shape, device.info().platform, chains)?;
    let chains = chains(&limits)?;
    let check = if args.no_shadow { Check::Off } else { Check::EachStep };
    let mut bar = Bar::new();
    let served = serve(&device, &chains, &workload, check, args.checks.checks(), |at| bar.serving(at))?;
    drop(bar);
    print(&match shared.json {
        true => serde_json::to_string_pretty(&served).expect("invariant: the report has string keys"),
        false => report::tables(&served),
    })
}
