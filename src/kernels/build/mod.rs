//! Compiles the device sources for an exact architecture: NVRTC, hiprtc or clang, with a cache on disk; takes objects built ahead.
//!
//! [`load`] is what a device's modules come from. It looks, in this order, into the directory that `CAPSTAN_KERNELS` names
//! (written by `capstan kernels build`; objects of other sources are refused), into the cache, and asks a compiler. Sources are
//! embedded, so an installed binary needs no files but the compiler's library.
//!
//! Environment: `CAPSTAN_KERNELS` directory of objects built ahead; `CAPSTAN_CACHE` the cache's directory (else
//! `$XDG_CACHE_HOME/capstan`, `~/.cache/capstan`), empty for none; `CAPSTAN_NVRTC`, `CAPSTAN_HIPRTC` library file or directory;
//! `CAPSTAN_CLANG` clang's path.

mod ahead;
mod cache;
mod clang;
mod rtc;
mod sources;

use std::fmt;

pub use ahead::{Built, build_ahead};
pub use sources::{Source, all as sources, find as source};

use crate::error::{Error, Result};

/// What is compiled for which architecture.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// `gfx950`, `gfx942:sramecc+:xnack-`, `sm_90`.
    pub arch: &'a str,
}

impl<'a> Target<'a> {
    /// Checks the name.
    ///
    /// Errors: neither AMD's (`gfx...`) nor NVIDIA's (`sm_...`).
    pub fn new(arch: &'a str) -> Result<Target<'a>> {
        let known = |prefix: &str| {
            arch.strip_prefix(prefix)
                .is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_ascii_alphanumeric() || ":+-".contains(c)))
        };
        if known("gfx") || known("sm_") {
            return Ok(Target { arch });
        }
        Err(Error::config(format!("no architecture is called {arch:?}")).help("name one like gfx950, gfx942 or sm_90"))
    }

    /// True for AMD.
    pub fn is_amd(&self) -> bool {
        self.arch.starts_with("gfx")
    }

    /// The name without AMD's feature suffixes.
    pub fn base(&self) -> &'a str {
        self.arch.split(':').next().unwrap_or(self.arch)
    }

    /// File extension of its objects.
    pub fn extension(&self) -> &'static str {
        if self.is_amd() { "hsaco" } else { "cubin" }
    }
}

/// A compiled source.
pub struct Object {
    /// The code object or cubin.
    pub bytes: Vec<u8>,
    /// What the compiler said; empty from the cache.
    pub log: String,
    /// Where it comes from: a compiler's name and version, the cache, a directory.
    pub origin: String,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object").field("bytes", &self.bytes.len()).field("origin", &self.origin).finish_non_exhaustive()
    }
}

/// A compiler that was found.
#[derive(Debug)]
pub enum Compiler {
    /// NVIDIA's or AMD's runtime compiler.
    Rtc(rtc::Rtc),
    /// An offline clang for AMD.
    Clang(clang::Clang),
}

impl Compiler {
    /// Finds a compiler for `target`: NVRTC; hiprtc, else clang.
    ///
    /// Errors: none is there, with every place that was looked at.
    pub fn find(target: Target<'_>) -> Result<Compiler> {
        if !target.is_amd() {
            return rtc::Rtc::nvrtc().map(Compiler::Rtc);
        }
        rtc::Rtc::hiprtc().map(Compiler::Rtc).or_else(|no_hiprtc| {
            clang::Clang::find().map(Compiler::Clang).map_err(|no_clang| {
                Error::unavailable(format!("no compiler for {}: {}; {}", target.arch, no_hiprtc.message(), no_clang.message()))
                    .help("install ROCm's hiprtc or clang 19 or later, or give objects built ahead (CAPSTAN_KERNELS)")
            })
        })
    }

    /// Finds a compiler for `target` to build ahead: clang before hiprtc, as it is the one whose output is checked.
    ///
    /// Errors: as [`Compiler::find`].
    pub fn find_offline(target: Target<'_>) -> Result<Compiler> {
        match clang::Clang::find() {
            Ok(clang) if target.is_amd() => Ok(Compiler::Clang(clang)),
            _ => Compiler::find(target),
        }
    }

    /// Name and version; part of the cache's key.
    pub fn version(&self) -> &str {
        match self {
            Compiler::Rtc(rtc) => rtc.version(),
            Compiler::Clang(clang) => clang.version(),
        }
    }

    /// The flags of a target; part of the cache's key.
    pub fn flags(&self, target: Target<'_>) -> Vec<String> {
        match self {
            Compiler::Rtc(rtc) => rtc.flags(target),
            Compiler::Clang(clang) => clang.flags(target),
        }
    }

    /// Compiles a source, without the cache.
    ///
    /// Errors: the compiler's log, if it refuses.
    pub fn compile(&self, source: &Source, target: Target<'_>) -> Result<Object> {
        let (bytes, log) = match self {
            Compiler::Rtc(rtc) => rtc.compile(source, &self.flags(target)),
            Compiler::Clang(clang) => clang.compile(source, &self.flags(target)),
        }?;
        Ok(Object { bytes, log, origin: self.version().to_string() })
    }
}

/// The objects of some sources for one architecture, in the order of `names`: built ahead, cached, or compiled now.
///
/// Errors: a source this crate does not have, no compiler, a compiler's refusal, objects built ahead from other sources.
pub fn load(arch: &str, names: &[&str]) -> Result<Vec<Object>> {
    let target = Target::new(arch)?;
    if let Some(directory) = std::env::var_os("CAPSTAN_KERNELS").filter(|directory| !directory.is_empty()) {
        return names.iter().map(|name| ahead::load(directory.as_ref(), target, name)).collect();
    }
    let wanted = names.iter().map(|name| sources::required(name)).collect::<Result<Vec<_>>>()?;
    let compiler = Compiler::find(target)?;
    let cache = cache::Cache::open();
    // Compilers are happy to run side by side, and the first start is the slow one.
    std::thread::scope(|scope| {
        let threads: Vec<_> = wanted
            .iter()
            .map(|source| {
                let (cache, compiler) = (&cache, &compiler);
                scope.spawn(move || cache.object(compiler, source, target))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_named_or_refused() {
        let amd = Target::new("gfx942:sramecc+:xnack-").expect("a target");
        assert!(amd.is_amd() && amd.base() == "gfx942" && amd.extension() == "hsaco");
        assert!(!Target::new("sm_90").expect("a target").is_amd());
        for bad in ["", "gfx", "sm_", "x86_64", "gfx950/../..", "sm_90 "] {
            assert!(Target::new(bad).is_err(), "{bad}");
        }
    }
}
