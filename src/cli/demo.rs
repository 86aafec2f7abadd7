//! `capstan demo`: the main job, with nothing but the program.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;

use super::progress::Bar;
use super::run::{ChecksArgs, WorkloadArgs};
use super::{Shared, print, report};
use crate::chain::StepChains;
use crate::config::{Limits, LimitsInput, ModelShape};
use crate::error::{Error, Result};
use crate::measure::{Check, serve};
use crate::model::{Checkpoint, M3Chains, make};

/// Flags of `capstan demo`.
#[derive(Debug, Args)]
pub(super) struct DemoArgs {
    #[command(flatten)]
    shared: Shared,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    checks: ChecksArgs,
    /// Do not serve every request again, alone, eagerly and unpadded
    #[arg(long)]
    no_check: bool,
}

pub(super) fn run(args: &DemoArgs) -> Result<()> {
    let shared = &args.shared;
    let device = shared.open_device()?;
    if !device.info().executes {
        return Err(Error::unavailable("the null device records and runs nothing: no token would come out")
            .help("use --device cpu, or `capstan bench --device null` for host times"));
    }
    let mut bar = Bar::new();
    // Without --model a random one is made, and gone again when the run ends.
    let mut made = None;
    let dir = match &shared.model {
        Some(dir) => dir.clone(),
        None => made.insert(Scratch::new(shared.seed)?).make(shared.seed, &mut bar)?,
    };
    let checkpoint = Arc::new(Checkpoint::open(&dir)?);
    let shape = checkpoint.shape().clone();
    let defaults = LimitsInput { max_num_seqs: Some(16), max_num_batched_tokens: Some(256), ..LimitsInput::default() };
    let limits = shared.limits_or(defaults, &shape)?;
    // Log-uniform up to twice 16 blocks: half of the requests grow past what is selected.
    let longest = (32 * shape.block_size).min(limits.max_model_len / 2).max(1);
    let workload = args.workload.workload(shared.seed, (32, (4, longest.max(4)), (8, 64)))?;
    let nodes = |limits: &Limits| -> Result<Arc<dyn StepChains>> { Ok(Arc::new(M3Chains::without_weights(&shape, limits)?)) };
    let limits = shared.keep_for_graphs(limits, &shape, device.info().platform, nodes)?;
    let chains: Arc<dyn StepChains> = Arc::new(M3Chains::new(checkpoint, &limits)?);
    let check = if args.no_check { Check::Off } else { Check::Alone };
    let served = serve(&device, &chains, &workload, check, args.checks.checks(), |at| bar.serving(at))?;
    drop(bar);
    if shared.json {
        return print(&serde_json::to_string_pretty(&served).expect("invariant: the report has string keys"));
    }
    let info = device.info();
    print(&format!(
        "A model of {} layers, {} channels and blocks of {} tokens, on {} ({}).\n\n{}",
        shape.layers(),
        shape.hidden,
        shape.block_size,
        info.name,
        info.platform,
        report::tables(&served)
    ))
}

/// A folder that is removed when the run ends.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(seed: u64) -> Result<Scratch> {
        let dir = std::env::temp_dir().join(format!("capstan-demo-{}-{seed}", std::process::id()));
        std::fs::create_dir_all(&dir)
            .map_err(|error| Error::input(format!("{}: {error}", dir.display())).help("set TMPDIR to a folder you can write"))?;
        Ok(Scratch(dir))
    }

    pub(super) fn make(&self, seed: u64, bar: &mut Bar) -> Result<PathBuf> {
        let shape = ModelShape::nano();
        make::make_model(&shape, seed, &self.0, |bytes| bar.show("making", bytes, bytes, "bytes of a random model".into()))?;
        Ok(self.path().to_path_buf())
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
