//! Objects built ahead: `DIR/<arch>/<source>.<hsaco|cubin>` and a `manifest.json` that says what they were built from.
//!
//! An object takes the argument structs of its time. So one that was built from other sources than this binary's is refused
//! by its fingerprint; a source this binary does not have (a user's kernel) is taken as it is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Compiler, Object, Target, sources};
use crate::error::{Error, Result};

/// What a directory of objects was built from and with.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    compiler: String,
    flags: Vec<String>,
    /// Source to fingerprint.
    sources: BTreeMap<String, String>,
}

/// One object that [`build_ahead`] wrote.
#[derive(Debug, Serialize)]
pub struct Built {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// What the compiler said.
    pub log: String,
}

/// Compiles every source for an architecture into `directory`.
///
/// Errors: no compiler, a compiler's refusal, a directory that cannot be written.
pub fn build_ahead(directory: &Path, arch: &str) -> Result<(String, Vec<Built>)> {
    let target = Target::new(arch)?;
    let compiler = Compiler::find_offline(target)?;
    let folder = directory.join(target.base());
    let unwritable = |path: &Path, error: std::io::Error| Error::input(format!("{}: {error}", path.display()));
    fs::create_dir_all(&folder).map_err(|error| unwritable(&folder, error))?;
    let (mut built, mut fingerprints) = (Vec::new(), BTreeMap::new());
    for source in sources::all() {
        let object = compiler.compile(&source, target)?;
        let path = path(directory, target, source.name);
        fs::write(&path, &object.bytes).map_err(|error| unwritable(&path, error))?;
        fingerprints.insert(source.name.to_string(), source.fingerprint());
        built.push(Built { path, bytes: object.bytes.len() as u64, log: object.log });
    }
    let compiled_by = compiler.version().to_string();
    let manifest = Manifest { compiler: compiled_by.clone(), flags: compiler.flags(target), sources: fingerprints };
    let path = folder.join("manifest.json");
    let text = serde_json::to_string_pretty(&manifest).map_err(|error| Error::state(error.to_string()))?;
    fs::write(&path, text + "\n").map_err(|error| unwritable(&path, error))?;
    Ok((compiled_by, built))
}

/// Loads the object of a source.
pub(super) fn load(directory: &Path, target: Target<'_>, name: &str) -> Result<Object> {
    let path = path(directory, target, name);
    let rebuild = |error: Error| {
        let arch = target.base();
        error.help(format!("run `capstan kernels build --arch {arch} --out {}`, or unset CAPSTAN_KERNELS", directory.display()))
    };
    let missing = |path: &Path, error: std::io::Error| rebuild(Error::unavailable(format!("{}: {error}", path.display())));
    if let Some(source) = sources::find(name) {
        let manifest = path.with_file_name("manifest.json");
        let text = fs::read_to_string(&manifest).map_err(|error| missing(&manifest, error))?;
        let read: Manifest =
            serde_json::from_str(&text).map_err(|error| rebuild(Error::input(format!("{}: {error}", manifest.display()))))?;
        if read.sources.get(name) != Some(&source.fingerprint()) {
            return Err(rebuild(Error::input(format!("{} was built from other sources than this binary's", path.display()))));
        }
    }
    let bytes = fs::read(&path).map_err(|error| missing(&path, error))?;
    Ok(Object { bytes, log: String::new(), origin: path.display().to_string() })
}

fn path(directory: &Path, target: Target<'_>, name: &str) -> PathBuf {
    let stem = name.strip_suffix(".hip").unwrap_or(name);
    directory.join(target.base()).join(format!("{stem}.{}", target.extension()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_other_sources_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let target = Target::new("gfx950").expect("a target");
        let folder = directory.path().join("gfx950");
        fs::create_dir(&folder).expect("a folder");
        let source = sources::find("score.hip").expect("a source");
        fs::write(folder.join("score.hsaco"), b"code").expect("writes");
        let error = load(directory.path(), target, "score.hip").expect_err("no manifest");
        assert!(error.to_string().contains("capstan kernels build --arch gfx950"), "{error}");
        let put = |fingerprint: String| {
            let manifest = Manifest {
                compiler: "clang".into(),
                flags: vec![],
                sources: BTreeMap::from([("score.hip".to_string(), fingerprint)]),
            };
            fs::write(folder.join("manifest.json"), serde_json::to_string(&manifest).expect("json")).expect("writes");
        };
        put("another".into());
        let error = load(directory.path(), target, "score.hip").expect_err("another source");
        assert!(error.to_string().contains("other sources"), "{error}");
        put(source.fingerprint());
        assert_eq!(load(directory.path(), target, "score.hip").expect("loads").bytes, b"code");
        // A user's kernel has no source here.
        fs::write(folder.join("theirs.hsaco"), b"user").expect("writes");
        assert_eq!(load(directory.path(), target, "theirs.hip").expect("loads").bytes, b"user");
    }
}
