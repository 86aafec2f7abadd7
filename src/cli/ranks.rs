//! `capstan verify --ranks`: context parallelism against one rank alone, with ranks as threads or processes.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::table::table;
use super::{Shared, print};
use crate::config::{CacheBudget, Limits, LimitsInput, ModelShape};
use crate::error::{Error, Result};
use crate::gates;
use crate::hal::{self, Device, Platform};
use crate::measure::ranks::{RanksReport, RanksRun};
use crate::measure::verify::{RankCase, verify_case_as_rank};
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

/// What every rank runs; gives what it found, as JSON.
type Run<'a> = dyn Fn(&Arc<dyn Device>, Arc<dyn Group>) -> Result<Value> + Sync + 'a;

/// Exit code 1 if a rank failed.
pub(super) fn run(args: &RanksArgs, ranks: Ranks, shared: &Shared, files: &[PathBuf]) -> Result<ExitCode> {
    let nano = ModelShape { q_heads: 8, kv_heads: 4, index_heads: 4, ..ModelShape::nano() };
    let shape = shared.shape_or(nano)?;
    let defaults = LimitsInput {
        max_model_len: Some(512.min(shape.max_position_embeddings)),
        max_num_seqs: Some(6),
        max_num_batched_tokens: Some(256),
        ..LimitsInput::default()
    };
    let mut limits = shared.limits_or(defaults, &shape)?;
    if ranks == Ranks::Processes
        && let Some(rendezvous) = Rendezvous::from_env()?
    {
        rendezvous.check_world(limits.world)?;
        limits.world = rendezvous.world;
    }
    let (world, timeout_ms) = (limits.world, limits.peer_timeout_ms);
    let patience = Duration::from_millis(u64::from(args.join_timeout_ms));
    if !files.is_empty() {
        if world == 1 {
            return Err(Error::config("--ranks with one rank: there is nothing to exchange").help("pass --world 2 or more"));
        }
        let cases = |device: &Arc<dyn Device>, group: Arc<dyn Group>| {
            let cases = files.iter().map(|file| verify_case_as_rank(device, file, &group, timeout_ms));
            Ok(json!(cases.collect::<Result<Vec<_>>>()?))
        };
        return on_ranks(shared, ranks, world, patience, &cases, show_cases);
    }
    let blocks = limits.max_num_seqs * limits.max_model_len.div_ceil(shape.block_size);
    let run = RanksRun {
        shape,
        limits: Limits { cache: CacheBudget::Blocks(blocks), ..limits },
        steps: args.steps,
        compare_every: args.compare_every,
        seed: shared.seed,
        skew: Duration::from_micros(u64::from(args.skew_us)),
    };
    if let Some(refused) = gates::context_parallel(&run.shape, &run.limits, gates::Sharing::Heads).first() {
        return Err(Error::config(format!("context parallelism does not run: {refused}"))
            .help("pass --world 2 or more, with limits and a model that suit"));
    }
    let steps = |device: &Arc<dyn Device>, group: Arc<dyn Group>| Ok(json!(run.run(device, group)?));
    on_ranks(shared, ranks, world, patience, &steps, show_steps)
}

/// Runs every rank, or this one if the process was started as one of several; the first rank shows what all found.
fn on_ranks(
    shared: &Shared,
    ranks: Ranks,
    world: u32,
    patience: Duration,
    run: &Run<'_>,
    show: fn(&Shared, Vec<Value>) -> Result<ExitCode>,
) -> Result<ExitCode> {
    match ranks {
        Ranks::Threads => show(shared, as_threads(shared, world, patience, run)?),
        Ranks::Processes => match Rendezvous::from_env()? {
            Some(rendezvous) => {
                let device = device(shared, rendezvous.world)?;
                let group: Arc<dyn Group> = Arc::new(TcpGroup::join(&rendezvous, patience)?);
                let own = run(&device, group.clone())?;
                let all = group.all_gather("reports", own.to_string().as_bytes())?;
                let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes);
                let all = all.iter().map(read).collect::<std::result::Result<Vec<Value>, _>>();
                let all = all.map_err(|error| Error::peer(format!("a rank's report: {error}")))?;
                if rendezvous.rank == 0 { show(shared, all) } else { Ok(ExitCode::SUCCESS) }
            }
            None => {
                let program = std::env::current_exe().map_err(|error| Error::input(format!("this program: {error}")))?;
                let command: Vec<OsString> = [program.into_os_string()].into_iter().chain(std::env::args_os().skip(1)).collect();
                let all = Launched::start(world, &command)?.wait()?;
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
    rendezvous.check_world(limits.world)?;
    let limits = Limits { rank: rendezvous.rank, world: rendezvous.world, ..limits };
    let group: Arc<dyn Group> = Arc::new(TcpGroup::join(&rendezvous, PATIENCE)?);
    Ok((limits, Some(group)))
}

/// The cores of the host divide over the ranks of a CPU device.
fn device(shared: &Shared, world: u32) -> Result<Arc<dyn Device>> {
    let device = shared.open_device_of_rank()?;
    if device.info().platform != Platform::Cpu {
        return Ok(device);
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    Ok(hal::cpu::CpuDevice::new((cores / world as usize).max(1))?)
}

fn as_threads(shared: &Shared, world: u32, patience: Duration, run: &Run<'_>) -> Result<Vec<Value>> {
    let platform = shared.open_device()?.info().platform;
    if !matches!(platform, Platform::Cpu | Platform::Null) {
        // A driver opens a handle of peer memory in other processes only.
        return Err(Error::config("ranks as threads share memory on the CPU device alone").help("pass --ranks processes"));
    }
    let groups = ThreadGroup::all(world, patience);
    std::thread::scope(|scope| {
        let start = |group: Arc<ThreadGroup>| scope.spawn(move || run(&device(shared, world)?, group as Arc<dyn Group>));
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        let join = |rank: std::thread::ScopedJoinHandle<'_, Result<Value>>| {
            rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        ranks.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
    })
}

/// What ranks reported, read back.
fn reports<T: DeserializeOwned>(all: Vec<Value>) -> Result<Vec<T>> {
    let read = all.into_iter().map(serde_json::from_value).collect::<std::result::Result<_, _>>();
    read.map_err(|error| Error::peer(format!("a rank's report: {error}")).help("run the same version on every rank"))
}

fn show_steps(shared: &Shared, all: Vec<Value>) -> Result<ExitCode> {
    if shared.json {
        print(&format!("{:#}", json!({ "equal": true, "ranks": all })))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = reports::<RanksReport>(all)?.into_iter().map(|report| {
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

/// Exit code 1 if the ranks could share no case at all.
fn show_cases(shared: &Shared, all: Vec<Value>) -> Result<ExitCode> {
    let cases: Vec<RankCase> = reports::<Vec<RankCase>>(all)?.into_iter().flatten().collect();
    let shared_any = cases.iter().any(|case| case.refused.is_empty());
    if shared.json {
        print(&format!("{:#}", json!({ "equal": shared_any, "cases": cases })))?;
    } else {
        let rows = cases.iter().map(|case| {
            let equal = if case.refused.is_empty() { "yes".to_string() } else { format!("not run: {}", case.refused.join("; ")) };
            let name = case.file.rsplit('/').next().unwrap_or(&case.file);
            vec![name.to_string(), format!("{} of {}", case.rank, case.world), case.compared.to_string(), equal]
        });
        print(&table(&["case", "rank", ">rows and heads compared", "equal"], rows))?;
    }
    if !shared_any {
        eprintln!("no case can be shared by these ranks");
    }
    Ok(if shared_any { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
