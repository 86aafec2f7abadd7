//! `capstan make-model`: a random checkpoint that transformers loads as well.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::progress::Bar;
use super::{Shared, print};
use crate::config::ByteCount;
use crate::error::Result;
use crate::model::make;

/// Flags of `capstan make-model`.
#[derive(Debug, Args)]
pub(super) struct MakeModelArgs {
    #[command(flatten)]
    shared: Shared,
    /// Shape: nano, tiny or m3-slice (full width, 4 layers, 33 GiB)
    #[arg(long, value_name = "SHAPE")]
    shape: String,
    /// Directory to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub(super) fn run(args: &MakeModelArgs) -> Result<()> {
    let shape = make::named_shape(&args.shape)?;
    let all = make::model_bytes(&shape);
    let mut bar = Bar::new();
    let bytes = make::make_model(&shape, args.shared.seed, &args.out, |done| {
        bar.show("writing", done >> 20, all >> 20, format!("MiB, {} left", ByteCount(all.saturating_sub(done))));
    })?;
    drop(bar);
    match args.shared.json {
        true => print(&json!({ "dir": args.out, "shape": args.shape, "seed": args.shared.seed, "bytes": bytes }).to_string()),
        false => print(&format!("{} of weights in {}", ByteCount(bytes), args.out.display())),
    }
}
