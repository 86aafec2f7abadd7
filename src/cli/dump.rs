//! `capstan dump`: a captured graph by buffer names and offsets.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};

use super::{Shared, print};
use crate::chain::{MsaChains, StepChains};
use crate::config::{CaptureSizes, LimitsInput, ModelShape};
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::model::M3Chains;
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
    let chains: Arc<dyn StepChains> = match args.chain {
        Family::Msa => Arc::new(MsaChains::new(&shape, &limits, shared.seed)?),
        // A dump shows where weights are, not what they hold.
        Family::M3 => Arc::new(M3Chains::without_weights(&shape, &limits)?),
    };
    let mut executor = Executor::new(&shared.open_device()?, chains)?;
    executor.capture(|_| ())?;
    let graph = executor.graphs().iter().find(|graph| graph.key().rows() == args.rows).ok_or_else(|| {
        let sizes: Vec<String> = executor.ladder().sizes().iter().map(u32::to_string).collect();
        Error::config(format!("--rows {}: captured were {}", args.rows, sizes.join(", "))).help("pass a capture size")
    })?;
    let dump = Dump::of(graph)?;
    let text = match (args.format, shared.json) {
        (Format::Json, _) | (_, true) => dump.json(),
        (Format::Text, _) => dump.text(),
        (Format::Dot, _) => dump.dot(),
        (Format::Html, _) => dump.html()?,
    };
    match &args.out {
        None => print(text.trim_end()),
        Some(file) => std::fs::write(file, text.trim_end().to_string() + "\n")
            .map_err(|error| Error::input(format!("{}: {error}", file.display())).help("name a file that can be written")),
    }
}
