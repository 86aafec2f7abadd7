//! Clang as an offline compiler for AMD: needs no ROCm, only lld beside it.

use std::ffi::OsString;
use std::fs;
use std::process::Command;

use super::sources::HEADERS;
use super::{Source, Target};
use crate::error::{Error, Result};

/// Names to try, newest first.
const NAMES: [&str; 7] = ["clang-23", "clang-22", "clang-21", "clang-20", "clang-19", "amdclang", "clang"];

/// A clang that compiles for AMD.
#[derive(Debug)]
pub struct Clang {
    program: OsString,
    version: String,
}

impl Clang {
    /// Finds one: `CAPSTAN_CLANG`, or the newest on the PATH.
    ///
    /// Errors: none is there.
    pub fn find() -> Result<Clang> {
        let given = std::env::var_os("CAPSTAN_CLANG").filter(|path| !path.is_empty());
        let names = given.map_or_else(|| NAMES.map(OsString::from).to_vec(), |path| vec![path]);
        let tried = names.iter().map(|name| name.to_string_lossy()).collect::<Vec<_>>().join(", ");
        names.into_iter().find_map(Clang::answering).ok_or_else(|| {
            Error::unavailable(format!("no clang ({tried})")).help("install clang and lld, or name one in CAPSTAN_CLANG")
        })
    }

    fn answering(program: OsString) -> Option<Clang> {
        let output = Command::new(&program).arg("--version").output().ok().filter(|output| output.status.success())?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next()?.trim().to_string();
        Some(Clang { program, version })
    }

    /// Its first line of `--version`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Flags for a target.
    pub fn flags(&self, target: Target<'_>) -> Vec<String> {
        let fixed = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"];
        let mut flags: Vec<String> = fixed.map(String::from).to_vec();
        flags.push(format!("--offload-arch={}", target.arch));
        flags.extend(super::rtc::LANGUAGE.map(String::from));
        flags
    }

    /// Compiles to a code object; gives it and the warnings.
    ///
    /// Errors: its messages, or what is wrong with the temporary directory.
    pub fn compile(&self, source: &Source, flags: &[String]) -> Result<(Vec<u8>, String)> {
        let directory = scratch()?;
        let outcome = self.compile_in(directory.as_path(), source, flags);
        // Best effort: a directory left behind in /tmp is no failure of a compile.
        drop(fs::remove_dir_all(&directory));
        outcome
    }

    fn compile_in(&self, directory: &std::path::Path, source: &Source, flags: &[String]) -> Result<(Vec<u8>, String)> {
        let unusable = |error: std::io::Error| Error::input(format!("{}: {error}", directory.display()));
        for (name, text) in HEADERS.iter().copied().chain([(source.name, source.text)]) {
            fs::write(directory.join(name), text).map_err(unusable)?;
        }
        let mut command = Command::new(&self.program);
        command.current_dir(directory).args(flags).args([source.name, "-I.", "-o", "object"]);
        let output = command.output().map_err(|error| Error::unavailable(format!("{:?}: {error}", self.program)))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(Error::device(format!("{} refuses {}:\n{log}", self.version, source.name))
                .help("AMD targets need clang 19 or later with lld"));
        }
        Ok((fs::read(directory.join("object")).map_err(unusable)?, log))
    }
}

/// A new directory of this process and thread.
fn scratch() -> Result<std::path::PathBuf> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("capstan-{}-{number}", std::process::id()));
    fs::create_dir(&path).map_err(|error| {
        Error::input(format!("{}: {error}", path.display())).help("set TMPDIR to a directory that can be written")
    })?;
    Ok(path)
}
