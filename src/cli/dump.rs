//! `capstan dump`: a captured graph by buffer names and offsets.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};

use super::demo::Scratch;
use super::progress::Bar;
use super::{Shared, print};
use crate::chain::{MsaChains, StepChains};
use crate::config::{CaptureSizes, LimitsInput, ModelShape};
use crate::dump::Dump;
use crate::dump::tensors::save;
use crate::error::{Error, Result};
use crate::measure::timing;
use crate::model::{Checkpoint, M3Chains};
use crate::runtime::Executor;

/// Flags of `capstan dump`.
#[derive(Debug, Args)]
pub(super) struct DumpArgs {
    #[command(flatten)]
    shared: Shared,
    /// Which chain to dump
    #[arg(long, value_enum, default_value_t = Family::Msa, value_name = "CHAIN")]
    chain: Family,
    /// Capture size, rows
    #[arg(long, default_value_t = 8, value_name = "N")]
    rows: u32,
    /// What to write
    #[arg(long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    format: Format,
    /// File to write [default: stdout]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Time each node, launched alone, and add the bytes a second that its declared reads and writes come to
    #[arg(long)]
    timing: bool,
    /// Steps to take the median time of
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Tokens in each sequence of a step that is timed or read [default: as many as fit, up to 1024]
    #[arg(long, value_name = "N")]
    kv_len: Option<u32>,
    /// File for a trace of a replay, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write these buffers as they are after these nodes, as safetensors to --out, instead of the graph
    #[arg(long, value_name = "BUFFER@NODE,...", value_delimiter = ',', value_parser = place, requires = "out",
        conflicts_with_all = ["timing", "trace"])]
    tensors: Vec<(String, String)>,
}

fn place(text: &str) -> std::result::Result<(String, String), String> {
    let parts = text.split_once('@').filter(|(buffer, node)| !buffer.is_empty() && !node.is_empty());
    parts.map(|(buffer, node)| (buffer.into(), node.into())).ok_or_else(|| format!("{text}: expected BUFFER@NODE"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Family {
    /// The sparse-attention layers alone
    Msa,
    /// The whole decode step
    M3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A line a node
    Text,
    /// For machines
    Json,
    /// For Graphviz
    Dot,
    /// One page for a browser
    Html,
}

pub(super) fn run(args: &DumpArgs) -> Result<()> {
    let shared = &args.shared;
    let shape = shared.shape_or(ModelShape::nano())?;
    let defaults = LimitsInput {
        // One for all common capture sizes, so that the dumps of two sizes show one arena.
        max_num_seqs: Some(args.rows.max(64)),
        capture_sizes: Some(CaptureSizes::List(vec![args.rows])),
        ..LimitsInput::default()
    };
    let limits = shared.limits_or(defaults, &shape)?;
    let mut made = None;
    let runs = args.timing || args.trace.is_some() || !args.tensors.is_empty();
    let chains: Arc<dyn StepChains> = match args.chain {
        Family::Msa => Arc::new(MsaChains::new(&shape, &limits, shared.seed)?),
        Family::M3 if runs => {
            // Without --model a random one is made, and gone again when the run ends.
            let dir = match &shared.model {
                Some(dir) => dir.clone(),
                None => made.insert(Scratch::new(shared.seed)?).make(shared.seed, &mut Bar::new())?,
            };
            Arc::new(M3Chains::new(Arc::new(Checkpoint::open(&dir)?), &limits)?)
        }
        // A dump shows where weights are, not what they hold.
        Family::M3 => Arc::new(M3Chains::without_weights(&shape, &limits)?),
    };
    let mut executor = Executor::new(&shared.open_device()?, chains)?;
    executor.capture(|_| ())?;
    let graph = executor.graphs().iter().find(|graph| graph.key().rows() == args.rows).ok_or_else(|| {
        let sizes: Vec<String> = executor.ladder().sizes().iter().map(u32::to_string).collect();
        Error::config(format!("--rows {}: captured were {}", args.rows, sizes.join(", "))).help("pass a capture size")
    })?;
    let (mut dump, key) = (Dump::of(graph)?, *graph.key());
    if runs {
        let kv_len = args.kv_len.unwrap_or_else(|| timing::longest(&executor, &key).min(1024));
        if let Some(file) = args.out.as_ref().filter(|_| !args.tensors.is_empty()) {
            let tensors = timing::tensors(&mut executor, &key, kv_len, shared.seed, &args.tensors)?;
            let about = [("chain", dump.chain.clone()), ("key", key.to_string()), ("kv_len", kv_len.to_string())];
            return save(file, &tensors, about.map(|(name, value)| (name.to_string(), value)).into());
        }
        let times = timing::time(&mut executor, &mut dump, kv_len, usize::from(args.steps))?;
        if let Some(file) = &args.trace {
            write(file, &dump.trace(&times))?;
        }
        if !args.timing {
            dump.device = None;
        }
    }
    let text = match (args.format, shared.json) {
        (Format::Json, _) | (_, true) => dump.json(),
        (Format::Text, _) => dump.text(),
        (Format::Dot, _) => dump.dot(),
        (Format::Html, _) => dump.html()?,
    };
    match &args.out {
        None => print(text.trim_end()),
        Some(file) => write(file, text.trim_end()),
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, format!("{text}\n"))
        .map_err(|error| Error::input(format!("{}: {error}", file.display())).help("name a file that can be written"))
}
