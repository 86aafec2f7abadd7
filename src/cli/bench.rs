//! `capstan bench`: replay latency by rows and nodes, with the eager step beside it.

use std::sync::Arc;

use clap::Args;
use serde_json::json;

use super::progress::Bar;
use super::table::table;
use super::{Shared, print};
use crate::chain::{MsaChains, StepChains};
use crate::config::{CaptureSizes, Limits, LimitsInput, ModelShape};
use crate::error::{Error, Result};
use crate::invariant::Lint;
use crate::measure::serve::Progress;
use crate::measure::{ReplayLatency, replay_latency};
use crate::runtime::Executor;

/// Flags of `capstan bench`.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    shared: Shared,
    /// Batch sizes, rows
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32], value_name = "LIST")]
    rows: Vec<u32>,
    /// Numbers of layers; each makes another number of nodes
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 57], value_name = "LIST")]
    layers: Vec<u32>,
    /// Tokens a sequence holds
    #[arg(long, default_value_t = 64, value_name = "TOKENS")]
    kv_len: u32,
    /// Steps measured
    #[arg(long, default_value_t = 1000, value_name = "N")]
    steps: usize,
}

/// A line of the table: one number of rows and layers.
#[derive(Debug, serde::Serialize)]
struct Line {
    layers: u32,
    replay: ReplayLatency,
    eager: ReplayLatency,
    lints: Vec<Lint>,
}

pub(super) fn run(args: &BenchArgs) -> Result<()> {
    if args.rows.contains(&0) || args.layers.contains(&0) || args.steps == 0 || args.kv_len == 0 {
        return Err(Error::config("--rows, --layers, --kv-len and --steps count from 1").help("leave out the zero"));
    }
    let shared = &args.shared;
    let base = shared.shape_or(ModelShape::nano())?;
    let device = shared.open_device()?;
    let mut bar = Bar::new();
    let mut lines = Vec::new();
    for &layers in &args.layers {
        let all = vec![true; layers as usize];
        let shape = ModelShape { sparse_attention: all.clone(), moe: all, ..base.clone() };
        let rows_max = args.rows.iter().copied().max().unwrap_or(1);
        let blocks = args.kv_len.div_ceil(shape.block_size).saturating_mul(rows_max);
        let defaults = LimitsInput {
            max_num_seqs: Some(rows_max),
            max_num_batched_tokens: Some(rows_max.max(256)),
            cache_blocks: Some(blocks),
            capture_sizes: Some(CaptureSizes::List(args.rows.clone())),
            ..LimitsInput::default()
        };
        let limits = shared.limits_or(defaults, &shape)?;
        let chains =
            |limits: &Limits| -> Result<Arc<dyn StepChains>> { Ok(Arc::new(MsaChains::new(&shape, limits, shared.seed)?)) };
        let chains = chains(&shared.keep_for_graphs(limits, &shape, device.info().platform, chains)?)?;
        let mut captured = Executor::new(&device, chains.clone())?;
        let lints = captured.capture(|at| bar.serving(Progress::Capture(at)))?.lints;
        let mut eager = Executor::new(&device, chains)?;
        for (at, &rows) in args.rows.iter().enumerate() {
            bar.show("measuring", at as u64, args.rows.len() as u64, format!("{rows} rows, {layers} layers"));
            lines.push(Line {
                layers,
                replay: replay_latency(&mut captured, rows, args.kv_len, args.steps)?,
                eager: replay_latency(&mut eager, rows, args.kv_len, args.steps.div_ceil(10))?,
                lints: lints.clone(),
            });
        }
    }
    drop(bar);
    let info = device.info();
    if shared.json {
        let report = json!({ "device": info, "model": base, "kv_len": args.kv_len, "steps": args.steps, "lines": lines });
        return print(&format!("{report:#}"));
    }
    let columns = [">rows", ">nodes", ">submit us", ">p99", ">visible us", ">p99", ">eager submit us", ">eager visible us"];
    let us = |value: f64| format!("{value:.1}");
    let maybe = |value: Option<f64>| value.map_or("-".into(), us);
    let rows = lines.iter().map(|Line { replay, eager, .. }| {
        vec![
            replay.rows.to_string(),
            replay.nodes.to_string(),
            us(replay.submit_us),
            us(replay.submit_p99_us),
            maybe(replay.visible_us),
            maybe(replay.visible_p99_us),
            us(eager.submit_us),
            maybe(eager.visible_us),
        ]
    });
    print(&format!(
        "{} ({}), {} tokens a sequence, {} steps: median and 99th percentile\n\n{}",
        info.name,
        info.platform,
        args.kv_len,
        args.steps,
        table(&columns, rows)
    ))
}
