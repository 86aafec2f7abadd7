//! `capstan launch`: a command as every rank of a group on this host.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use crate::error::Result;
use crate::peers::Launched;

/// Flags of `capstan launch`.
#[derive(Debug, Args)]
pub(super) struct LaunchArgs {
    /// Ranks to start
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    world: u32,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Exit code of the first rank that failed.
pub(super) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let all = Launched::start(args.world, &args.command)?.wait()?;
    let failed = all.iter().enumerate().find(|(_, status)| !status.success());
    Ok(match failed {
        None => ExitCode::SUCCESS,
        Some((rank, status)) => {
            eprintln!("rank {rank}: {status}");
            ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
        }
    })
}
