//! `capstan verify-model`: a checkpoint against the logits, tokens and blocks recorded of it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::progress::Bar;
use super::table::table;
use super::{Shared, print};
use crate::dtype::DType;
use crate::error::Result;
use crate::measure::verify_model::verify_model;

/// Flags of `capstan verify-model`.
#[derive(Debug, Args)]
pub(super) struct VerifyModelArgs {
    #[command(flatten)]
    shared: Shared,
    /// Checkpoint directory with a reference.safetensors
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Exit code 1 past a bound; with caches narrower than f32 the deviations are a report and nothing fails.
pub(super) fn run(args: &VerifyModelArgs) -> Result<ExitCode> {
    let device = args.shared.open_device()?;
    let limits = &args.shared.limits;
    let dtypes = (limits.kv_dtype.unwrap_or(DType::F32), limits.index_dtype.unwrap_or(DType::F32));
    let mut bar = Bar::new();
    let verified = verify_model(&device, &args.dir, dtypes, |done, all| {
        bar.show("verifying", done as u64, all as u64, "prompts".into());
    })?;
    drop(bar);
    let exact = dtypes == (DType::F32, DType::F32);
    let first = verified.first_difference();
    if args.shared.json {
        let report = json!({ "within_bounds": first.is_none(), "first_difference": first, "kv_dtype": dtypes.0, "index_dtype": dtypes.1, "model": verified });
        print(&format!("{report:#}"))?;
    } else {
        let rows = verified.deviations.iter().map(|found| {
            vec![
                found.tensor.clone(),
                found.rows.to_string(),
                if found.bound == 0.0 { "equal".into() } else { format!("{:.0e}", found.bound) },
                format!("{:.1e}", found.largest),
                if found.first.is_none() { "yes" } else { "NO" }.into(),
            ]
        });
        let text = table(&["tensor", ">rows", ">bound", ">largest deviation", "holds"], rows);
        let caches = format!("kv cache {}, index keys {}", dtypes.0, dtypes.1);
        print(&format!("{text}\n\n{caches}; {} decode steps replayed, equal to the eager run bit for bit", verified.replayed))?;
    }
    match first {
        Some(first) if exact => {
            eprintln!("first difference: {first}");
            Ok(ExitCode::FAILURE)
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
