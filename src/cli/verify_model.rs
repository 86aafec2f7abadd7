//! `capstan verify-model`: a checkpoint against the logits, tokens and blocks recorded of it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::progress::Bar;
use super::table::table;
use super::{Shared, print};
use crate::dtype::DType;
use crate::error::Result;
use crate::hal::Device;
use crate::measure::verify_model::{cache_deviation, verify_model};

/// Flags of `capstan verify-model`.
#[derive(Debug, Args)]
pub(super) struct VerifyModelArgs {
    #[command(flatten)]
    shared: Shared,
    /// Checkpoint directory with a reference.safetensors
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Instead, compare caches of this type with f32 caches, layer by layer
    #[arg(long, value_enum, value_name = "TYPE", conflicts_with_all = ["kv_dtype", "index_dtype"])]
    cache: Option<Cache>,
}

/// Narrow caches: of keys and values, and of index keys.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Cache {
    /// bfloat16
    Bf16,
    /// fp8 E4M3
    Fp8,
}

/// Exit code 1 past a bound; with caches narrower than f32 the deviations are a report and nothing fails.
pub(super) fn run(args: &VerifyModelArgs) -> Result<ExitCode> {
    let device = args.shared.open_device()?;
    if let Some(cache) = args.cache {
        return caches(args, &device, cache).map(|()| ExitCode::SUCCESS);
    }
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

/// What narrow caches cost, layer by layer: a report, no verdict.
fn caches(args: &VerifyModelArgs, device: &Arc<dyn Device>, cache: Cache) -> Result<()> {
    let dtype = match cache {
        Cache::Bf16 => DType::Bf16,
        Cache::Fp8 => DType::F8E4M3,
    };
    let mut bar = Bar::new();
    let found = cache_deviation(device, &args.dir, (dtype, dtype), |done, all| {
        bar.show("comparing", done as u64, all as u64, "prompts".into());
    })?;
    drop(bar);
    if args.shared.json {
        return print(&format!("{:#}", json!(found)));
    }
    let share = |share: Option<f64>| share.map_or("".into(), |share| format!("{:.1}%", 100.0 * share));
    let rows = found.layers.iter().map(|layer| {
        vec![
            layer.layer.to_string(),
            if layer.sparse { "sparse" } else { "dense" }.into(),
            format!("{:.1e}", layer.rms),
            format!("{:.1e}", layer.largest),
            share(layer.selected_too),
            share(layer.same_selection),
        ]
    });
    let text = table(&["layer", "attention", ">rms", ">largest", ">blocks kept", ">same selection"], rows);
    print(&format!(
        "{text}\n\n{dtype} caches against f32 caches, {} rows; deviations of the residual stream, relative to its own size.\n\
         Logits: {:.1e} of the largest; the same token in {:.1}% of the rows.",
        found.rows,
        found.logits,
        100.0 * found.same_token
    ))
}
