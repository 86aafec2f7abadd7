//! The device sources, embedded.

use crate::error::{Error, Result};

/// One file of `/kernels` that compiles to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// File name, e.g. `score.hip`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

impl Source {
    /// The name without its extension.
    pub fn stem(&self) -> &'static str {
        self.name.strip_suffix(".hip").unwrap_or(self.name)
    }

    /// Identifies the text and that of all headers.
    pub fn fingerprint(&self) -> String {
        let mut hash = super::cache::Hash::new();
        hash.part(self.name).part(self.text);
        HEADERS.iter().for_each(|(name, text)| {
            hash.part(name).part(text);
        });
        hash.hex()
    }
}

macro_rules! embed {
    ($folder:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../kernels/", $folder, $name)))),*]
    };
}

/// Headers by the name that sources include them by.
pub(super) const HEADERS: &[(&str, &str)] = embed!("include/": "amd.h", "args.h", "attend_tile.h", "cell.h", "dots.h", "fp8_tile.h", "nvidia.h", "platform.h", "reduce.h", "select.h", "state.h");

const SOURCES: &[(&str, &str)] = embed!(
    "": "attend.hip", "exchange.hip", "linear.hip", "moe.hip", "norm.hip", "norm_rope.hip", "probe.hip", "sample.hip", "score.hip", "step.hip", "swiglu.hip",
    "topk.hip",
);

/// Every source.
pub fn all() -> impl Iterator<Item = Source> {
    SOURCES.iter().map(|&(name, text)| Source { name, text })
}

/// A source by its file name.
pub fn find(name: &str) -> Option<Source> {
    all().find(|source| source.name == name)
}

/// A source that a kernel names.
pub(super) fn required(name: &str) -> Result<Source> {
    find(name).ok_or_else(|| {
        Error::unavailable(format!("no device source is called {name:?}"))
            .help("build the kernel ahead and name the directory of its objects in CAPSTAN_KERNELS")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::registry;

    #[test]
    fn every_kernel_has_its_source_and_every_file_is_embedded() {
        for kernel in registry::built() {
            let source = find(kernel.source).unwrap_or_else(|| panic!("{} is not embedded", kernel.source));
            let definition = format!(" void {}(const {} a)", kernel.symbol, kernel.args.name);
            assert!(source.text.contains(&definition), "{} has no {definition}", source.name);
        }
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let count = |folder: &std::path::Path, extension: &str| {
            let files = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path());
            files.filter(|path| path.extension().is_some_and(|found| found == extension)).count()
        };
        assert_eq!(count(&folder, "hip"), SOURCES.len());
        assert_eq!(count(&folder.join("include"), "h"), HEADERS.len());
    }

    #[test]
    fn platform_is_the_only_vendor_test() {
        for (name, text) in SOURCES.iter().chain(HEADERS).filter(|(name, _)| !["platform.h", "amd.h", "nvidia.h"].contains(name))
        {
            for word in ["__AMDGCN__", "__CUDA", "__HIP", "__gfx", "__builtin_amdgcn", "asm(", "asm volatile"] {
                assert!(!text.contains(word), "{name} has {word}");
            }
        }
    }
}
