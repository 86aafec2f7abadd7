//! `capstan kernels build`: compiles every device source for the named architectures; needs a compiler and no GPU.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::print;
use crate::error::{Error, Result};
use crate::kernels::build::{Built, build_ahead};

/// Arguments of `kernels`.
#[derive(Debug, Args)]
pub(super) struct KernelsArgs {
    #[command(subcommand)]
    job: Job,
}

#[derive(Debug, Subcommand)]
enum Job {
    /// Compile every kernel into a directory that CAPSTAN_KERNELS may name
    Build(BuildArgs),
}

#[derive(Debug, Args)]
struct BuildArgs {
    /// Architectures, e.g. gfx950,gfx942,sm_90
    #[arg(long, value_name = "ARCH", value_delimiter = ',', required = true)]
    arch: Vec<String>,
    /// Directory to write to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Print JSON, compilers' logs included
    #[arg(long)]
    json: bool,
}

/// What was built for one architecture.
#[derive(Debug, Serialize)]
struct Report {
    arch: String,
    compiler: String,
    objects: Vec<Built>,
}

pub(super) fn run(args: &KernelsArgs) -> Result<()> {
    let Job::Build(args) = &args.job;
    let mut reports = Vec::new();
    for arch in &args.arch {
        let (compiler, objects) = build_ahead(&args.out, arch)?;
        reports.push(Report { arch: arch.clone(), compiler, objects });
    }
    if args.json {
        let text = serde_json::to_string_pretty(&reports).map_err(|error| Error::state(error.to_string()))?;
        return print(&text);
    }
    for Report { arch, compiler, objects } in &reports {
        let bytes: u64 = objects.iter().map(|object| object.bytes).sum();
        print(&format!("{arch}: {} objects, {bytes} bytes, by {compiler}", objects.len()))?;
    }
    print(&format!("use them with CAPSTAN_KERNELS={}", args.out.display()))
}
