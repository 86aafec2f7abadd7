//! `capstan verify`: the sparse-attention chain against recorded cases.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::ranks::{self, RanksArgs};
use super::table::table;
use super::{Shared, print};
use crate::error::Result;
use crate::measure::verify::{Verified, verify_case};

/// Flags of `capstan verify`.
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    shared: Shared,
    #[command(flatten)]
    ranks: RanksArgs,
    /// Recorded cases, .safetensors; with --ranks each rank is held against one rank alone on them instead of on random steps
    #[arg(required_unless_present = "ranks", value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Exit code 1 if a case differs.
pub(super) fn run(args: &VerifyArgs) -> Result<ExitCode> {
    if let Some(kind) = args.ranks.ranks {
        return ranks::run(&args.ranks, kind, &args.shared, &args.files);
    }
    let device = args.shared.open_device()?;
    let cases = args.files.iter().map(|file| verify_case(&device, file)).collect::<Result<Vec<_>>>()?;
    let first = cases.iter().find_map(Verified::first_difference);
    if args.shared.json {
        print(&format!("{:#}", json!({ "equal": first.is_none(), "first_difference": first, "cases": cases })))?;
    } else {
        let rows = cases.iter().flat_map(|case| {
            let name = case.file.rsplit('/').next().unwrap_or(&case.file);
            case.comparisons.iter().map(move |found| {
                let bound = if found.bound == 0.0 { "equal".to_string() } else { format!("{:.0e}", found.bound) };
                vec![
                    name.to_string(),
                    found.tensor.to_string(),
                    found.mode.to_string(),
                    found.elements.to_string(),
                    bound,
                    format!("{:.1e}", found.largest),
                    found.near_ties.to_string(),
                    if found.first.is_none() { "yes" } else { "NO" }.to_string(),
                ]
            })
        });
        print(&table(&["case", "tensor", "run", ">elements", ">bound", ">largest deviation", ">near ties", "holds"], rows))?;
    }
    match first {
        None => Ok(ExitCode::SUCCESS),
        Some(first) => {
            eprintln!("first difference: {first}");
            Ok(ExitCode::FAILURE)
        }
    }
}
