//! `capstan verify --ranks`: context parallelism against one rank alone, with ranks as threads or processes.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::table::table;
use super::{Shared, print};
use crate::config::{CacheBudget, Limits, LimitsInput, ModelShape};
use crate::error::{Error, Result};
use crate::gates;
use crate::hal::{self, Device, Platform};
use crate::measure::ranks::{RanksReport, RanksRun};
use crate::peers::{Group, Launched, Rendezvous, TcpGroup, ThreadGroup};

/// What the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Ranks {
    /// Threads of this process
    Threads,
    /// Processes of this host
    Processes,
}

/// Flags of `capstan verify` for ranks.
#[derive(Debug, Args)]
pub(super) struct RanksArgs {
    /// Compare --world ranks with one rank alone, on random steps, instead of recorded cases
    #[arg(long, value_enum, value_name = "KIND")]
    pub(super) ranks: Option<Ranks>,
    /// Steps that the ranks replay
    #[arg(long, default_value_t = 500, value_name = "N")]
    steps: u32,
    /// Compare every n-th step
    #[arg(long, default_value_t = 1, value_name = "N")]
    compare_every: u32,
    /// Longest random delay of a rank before a step, microseconds
    #[arg(long, default_value_t = 0, value_name = "US")]
    skew_us: u32,
    /// Longest wait of ranks for each other at the start and around captures, milliseconds
    #[arg(long, default_value_t = 120_000, value_name = "MS")]
    join_timeout_ms: u32,
}

/// Exit code 1 if a rank failed.
pub(super) fn run(args: &RanksArgs, ranks: Ranks, shared: &Shared) -> Result<ExitCode> {
    let nano = ModelShape { q_heads: 8, kv_heads: 4, index_heads: 4, ..ModelShape::nano() };
    let shape = shared.shape_or(nano)?;
    let defaults = LimitsInput {
        max_model_len: Some(512.min(shape.max_position_embeddings)),
        max_num_seqs: Some(6),
        max_num_batched_tokens: Some(256),
        ..LimitsInput::default()
    };
    let limits = shared.limits_or(defaults, &shape)?;
    let blocks = limits.max_num_seqs * limits.max_model_len.div_ceil(shape.block_size);
    let run = RanksRun {
        shape,
        limits: Limits { cache: CacheBudget::Blocks(blocks), ..limits.clone() },
        steps: args.steps,
        compare_every: args.compare_every,
        seed: shared.seed,
        skew: Duration::from_micros(u64::from(args.skew_us)),
    };
    if let Some(refused) = gates::context_parallel(&run.shape, &run.limits, gates::Sharing::Heads).first() {
        return Err(Error::config(format!("context parallelism does not run: {refused}"))
            .help("pass --world 2 or more, with limits and a model that suit"));
    }
    let patience = Duration::from_millis(u64::from(args.join_timeout_ms));
    match ranks {
        Ranks::Threads => show(shared, &as_threads(shared, &run, limits.world, patience)?),
        Ranks::Processes => match Rendezvous::from_env()? {
            Some(rendezvous) => {
                let device = device(shared, rendezvous.world)?;
                let group: Arc<dyn Group> = Arc::new(TcpGroup::join(&rendezvous, patience)?);
                let own = run.run(&device, group.clone())?;
                let reports = own.of_all(&*group)?;
                if rendezvous.rank == 0 { show(shared, &reports) } else { Ok(ExitCode::SUCCESS) }
            }
            None => {
                let program = std::env::current_exe().map_err(|error| Error::input(format!("this program: {error}")))?;
                let command: Vec<OsString> = [program.into_os_string()].into_iter().chain(std::env::args_os().skip(1)).collect();
                let all = Launched::start(limits.world, &command)?.wait()?;
                Ok(if all.iter().all(|status| status.success()) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }
        },
    }
}

/// Longest wait of ranks for each other at the start and around captures.
const PATIENCE: Duration = Duration::from_secs(120);

/// The limits of a rank that runs a whole model, and its group, if this process was started as one of several.
///
/// Errors: the ranks do not meet, or the limits ask for a group that nobody started.
pub(super) fn joined(limits: Limits) -> Result<(Limits, Option<Arc<dyn Group>>)> {
    let Some(rendezvous) = Rendezvous::from_env()? else {
        return match limits.world {
            1 => Ok((limits, None)),
            world => Err(Error::config(format!("--world {world}, but this process is no rank of a group"))
                .help("start it under `capstan launch --world N -- ...`, torchrun, mpirun or srun")),
        };
    };
    let limits = Limits { rank: rendezvous.rank, world: rendezvous.world, ..limits };
    let group: Arc<dyn Group> = Arc::new(TcpGroup::join(&rendezvous, PATIENCE)?);
    Ok((limits, Some(group)))
}

/// The cores of the host divide over the ranks of a CPU device.
fn device(shared: &Shared, world: u32) -> Result<Arc<dyn Device>> {
    let device = shared.open_device()?;
    if device.info().platform != Platform::Cpu {
        return Ok(device);
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    Ok(hal::cpu::CpuDevice::new((cores / world as usize).max(1))?)
}

fn as_threads(shared: &Shared, run: &RanksRun, world: u32, patience: Duration) -> Result<Vec<RanksReport>> {
    let groups = ThreadGroup::all(world, patience);
    std::thread::scope(|scope| {
        let start = |group: Arc<ThreadGroup>| scope.spawn(move || run.run(&device(shared, world)?, group as Arc<dyn Group>));
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        let join = |rank: std::thread::ScopedJoinHandle<'_, Result<RanksReport>>| {
            rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        ranks.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
    })
}

fn show(shared: &Shared, reports: &[RanksReport]) -> Result<ExitCode> {
    if shared.json {
        print(&format!("{:#}", json!({ "equal": true, "ranks": reports })))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = reports.iter().map(|report| {
        let steps_a_second = f64::from(report.steps) / report.seconds;
        vec![
            format!("{} of {}", report.rank, report.world),
            report.steps.to_string(),
            report.rows_compared.to_string(),
            format!("{steps_a_second:.0}"),
            "yes".into(),
        ]
    });
    print(&table(&["rank", ">steps", ">rows compared", ">steps a second", "equal"], rows))?;
    Ok(ExitCode::SUCCESS)
}
