//! The `capstan` command: one file a subcommand, the same long flags everywhere.
//!
//! Results go to stdout (`--json` for machines), logs and progress to stderr (`RUST_LOG` says how much). Exit codes: 0 done,
//! 1 failed, 2 wrong usage or configuration, 3 an invariant is broken.

mod bench;
mod bisect;
mod demo;
mod devices;
mod diff;
mod dump;
mod generate;
mod kernels;
mod ladder;
mod launch;
mod make_model;
mod plan;
mod progress;
mod prompts;
mod ranks;
mod report;
mod run;
mod table;
mod verify;
mod verify_model;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::capture::GraphCost;
use crate::chain::StepChains;
use crate::config::{CacheBudget, Limits, LimitsInput, ModelShape};
use crate::error::{Error, Result};
use crate::hal::{self, Device, Platform};
use crate::peers::Rendezvous;

#[derive(Debug, Parser)]
#[command(
    name = "capstan",
    version,
    about = "Graph-capture-first LLM decode: capture once, replay every token",
    max_term_width = 110
)]
struct Command {
    #[command(subcommand)]
    subcommand: Job,
}

#[derive(Debug, Subcommand)]
enum Job {
    /// Show every persistent buffer that a model and limits ask for; needs no device
    Plan(plan::PlanArgs),
    /// Make a small model, capture, serve a burst of requests and check every token: the main job
    Demo(demo::DemoArgs),
    /// Generate tokens from prompts
    Generate(generate::GenerateArgs),
    /// Serve a workload on the sparse-attention chain alone, each step checked
    Run(run::RunArgs),
    /// Show the devices that are there, and why others are not
    Devices(devices::DevicesArgs),
    /// Measure replay latency by rows and nodes
    Bench(bench::BenchArgs),
    /// Compile the GPU kernels ahead of time
    Kernels(kernels::KernelsArgs),
    /// Compare the sparse-attention chain with recorded cases
    Verify(verify::VerifyArgs),
    /// Compare a checkpoint with the logits, tokens and blocks recorded of it
    VerifyModel(verify_model::VerifyModelArgs),
    /// Start a command as every rank of a group on this host
    Launch(launch::LaunchArgs),
    /// Show a captured graph by buffer names and offsets
    Dump(dump::DumpArgs),
    /// Compare two dumps; exit code 1 on a real difference
    Diff(diff::DiffArgs),
    /// Find the first node where eager and replay, or two devices, disagree; exit code 1 if there is one
    Bisect(bisect::BisectArgs),
    /// Write a random checkpoint
    MakeModel(make_model::MakeModelArgs),
}

/// Flags that every subcommand takes.
#[derive(Debug, Args)]
struct Shared {
    /// Device to use
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Model: a directory with a config.json, or a .json or .toml file
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// TOML file of limits; flags go before it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    limits: LimitsInput,
    /// Seed of everything random
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The devices a user can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceChoice {
    /// The first of hip, cuda and cpu that is there
    Auto,
    /// The host's cores
    Cpu,
    /// Records and runs nothing
    Null,
    /// AMD
    Hip,
    /// NVIDIA
    Cuda,
}

impl DeviceChoice {
    /// The name that [`hal::open`] takes.
    fn name(self) -> &'static str {
        match self {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Null => "null",
            DeviceChoice::Hip => "hip",
            DeviceChoice::Cuda => "cuda",
        }
    }

    /// The platform that was asked for; `None` for whatever is there.
    fn platform(self) -> Option<Platform> {
        match self {
            DeviceChoice::Auto => None,
            DeviceChoice::Cpu => Some(Platform::Cpu),
            DeviceChoice::Null => Some(Platform::Null),
            DeviceChoice::Hip => Some(Platform::Hip),
            DeviceChoice::Cuda => Some(Platform::Cuda),
        }
    }
}

impl Shared {
    /// The model's path; an error that names the flag if it is not given.
    fn model(&self) -> Result<&Path> {
        self.model.as_deref().ok_or_else(|| {
            Error::config("--model is missing: there is no model to plan for")
                .help("pass --model DIR, a directory with a config.json")
        })
    }

    /// The model's shape.
    fn shape(&self) -> Result<ModelShape> {
        ModelShape::read(self.model()?)
    }

    /// The shape of `--model`, or `default` without one.
    fn shape_or(&self, default: ModelShape) -> Result<ModelShape> {
        self.model.as_deref().map_or(Ok(default), ModelShape::read)
    }

    /// Opens the device of `--device`.
    fn open_device(&self) -> Result<Arc<dyn Device>> {
        hal::open(self.device.name())
    }

    /// The device of this rank, if this process was started as one of several.
    fn open_device_of_rank(&self) -> Result<Arc<dyn Device>> {
        let local_rank = Rendezvous::from_env()?.map_or(0, |rendezvous| rendezvous.local_rank);
        hal::open_for(self.device.name(), local_rank)
    }

    /// What the user gave: flags, then the file of `--config`.
    fn input(&self) -> Result<LimitsInput> {
        let file = self.config.as_deref().map(LimitsInput::read).transpose()?.unwrap_or_default();
        Ok(self.limits.clone().or(file))
    }

    /// The limits with a command's own defaults below flags and file.
    fn limits_or(&self, defaults: LimitsInput, shape: &ModelShape) -> Result<Limits> {
        self.input()?.or(defaults).resolve(shape)
    }

    /// The limits (flags, then the file of `--config`, then defaults that suit the model), and the device memory the plan has
    /// to fit, if it was given.
    fn limits(&self, shape: &ModelShape) -> Result<(Limits, Option<u64>)> {
        let input = self.input()?;
        Ok((input.resolve(shape)?, input.memory.map(|memory| memory.0)))
    }

    /// Keeps a part of `--memory` for the graphs of `chains` on `platform`, by an estimate, unless `--graph-memory` says how much.
    fn keep_for_graphs(
        &self,
        limits: Limits,
        shape: &ModelShape,
        platform: Platform,
        chains: impl FnOnce(&Limits) -> Result<Arc<dyn StepChains>>,
    ) -> Result<Limits> {
        let input = self.input()?;
        if input.memory.is_none() || input.graph_memory.is_some() {
            return Ok(limits);
        }
        // The nodes do not depend on how many blocks there are: those of one longest sequence do.
        let blocks = limits.max_model_len.div_ceil(shape.block_size);
        let smallest = Limits { cache: CacheBudget::Blocks(blocks), ..limits.clone() };
        let graph_bytes = GraphCost::of(platform).of_ladder(&*chains(&smallest)?)?;
        Ok(Limits { graph_bytes, ..limits })
    }
}

/// Parses the command line, runs it, and says how it went.
pub fn main() -> ExitCode {
    let command = Command::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    let outcome = match command.subcommand {
        Job::Plan(args) => done(plan::run(&args)),
        Job::Demo(args) => done(demo::run(&args)),
        Job::Generate(args) => generate::run(&args),
        Job::Run(args) => done(run::run(&args)),
        Job::Devices(args) => devices::run(&args),
        Job::Bench(args) => done(bench::run(&args)),
        Job::Kernels(args) => done(kernels::run(&args)),
        Job::Verify(args) => verify::run(&args),
        Job::Launch(args) => launch::run(&args),
        Job::VerifyModel(args) => verify_model::run(&args),
        Job::Dump(args) => done(dump::run(&args)),
        Job::Diff(args) => diff::run(&args),
        Job::Bisect(args) => bisect::run(&args),
        Job::MakeModel(args) => done(make_model::run(&args)),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.kind().exit_code())
        }
    }
}

/// The exit code of a command that has nothing to report but its errors. Commands that compare something choose their own.
fn done(outcome: Result<()>) -> Result<ExitCode> {
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Writes a result and a line break to stdout. A reader that has gone away (`| head`) ends the program quietly, as it would any other.
fn print(text: &str) -> Result<()> {
    write(&format!("{text}\n")).map(drop)
}

/// Writes a part of a result to stdout at once; false if the reader has gone away.
fn write(text: &str) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::input(format!("stdout: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::KEYS;

    #[test]
    fn the_command_line_is_sound_and_every_key_of_a_file_is_a_flag() {
        Command::command().debug_assert();
        let command = Command::command();
        // Compiling kernels, comparing files and starting ranks need no model and no limits of their own.
        for sub in command.get_subcommands().filter(|sub| !["kernels", "diff", "launch"].contains(&sub.get_name())) {
            let flags: Vec<_> = sub.get_arguments().filter_map(|arg| arg.get_long()).collect();
            for key in KEYS {
                assert!(flags.contains(&key.replace('_', "-").as_str()), "{} has no flag for {key}", sub.get_name());
            }
        }
    }
}
