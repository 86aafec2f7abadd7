//! Compiled objects on disk, by everything that shaped them.
//!
//! An entry is a file named by the hash of source, headers, flags, architecture and compiler version; its first line is the
//! hash of what follows, so a truncated or altered file is compiled anew. Files are written beside and renamed, so processes may share
//! a cache. A cache that cannot be read or written costs time, never correctness: it is reported once and done without.

use std::fs;
use std::path::PathBuf;

use super::{Compiler, Object, Source, Target};
use crate::error::Result;

/// A directory of compiled objects, or none.
#[derive(Debug)]
pub(super) struct Cache {
    directory: Option<PathBuf>,
}

impl Cache {
    /// The cache that the environment names.
    pub(super) fn open() -> Cache {
        let set = |name| std::env::var_os(name).map(PathBuf::from);
        let directory = match set("CAPSTAN_CACHE") {
            Some(path) => Some(path).filter(|path| !path.as_os_str().is_empty()),
            None => {
                let home = || set("HOME").map(|home| home.join(".cache"));
                set("XDG_CACHE_HOME").filter(|path| path.is_absolute()).or_else(home).map(|base| base.join("capstan"))
            }
        };
        Cache { directory }
    }

    /// The object of a source, from disk or compiled now and kept.
    pub(super) fn object(&self, compiler: &Compiler, source: &Source, target: Target<'_>) -> Result<Object> {
        let mut key = Hash::new();
        key.part(&source.fingerprint()).part(target.arch).part(compiler.version());
        compiler.flags(target).iter().for_each(|flag| {
            key.part(flag);
        });
        let path = self.directory.as_ref().map(|directory| directory.join(format!("{}-{}", source.stem(), key.hex())));
        if let Some(bytes) = path.as_ref().and_then(read) {
            return Ok(Object { bytes, log: String::new(), origin: "cache".into() });
        }
        let object = compiler.compile(source, target)?;
        if let Some(path) = path
            && let Err(error) = write(&path, &object.bytes)
        {
            tracing::warn!(path = %path.display(), %error, "cannot keep a compiled kernel: the next start compiles it again");
        }
        Ok(object)
    }
}

/// The object of an entry; `None` if it is missing or not whole.
fn read(path: &PathBuf) -> Option<Vec<u8>> {
    let all = fs::read(path).ok()?;
    let end = all.iter().position(|&byte| byte == b'\n')?;
    let bytes = all[end + 1..].to_vec();
    let mut hash = Hash::new();
    hash.bytes(&bytes);
    (hash.hex().as_bytes() == &all[..end]).then_some(bytes)
}

fn write(path: &PathBuf, bytes: &[u8]) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)?;
    let mut hash = Hash::new();
    hash.bytes(bytes);
    let mut all = hash.hex().into_bytes();
    all.push(b'\n');
    all.extend_from_slice(bytes);
    // Process and thread make the name this writer's own.
    let beside = path.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    fs::write(&beside, all)?;
    fs::rename(&beside, path).inspect_err(|_| drop(fs::remove_file(&beside)))
}

/// FNV-1a with 128 bits: stable over versions and platforms, unlike the standard library's. Against chance, not against malice.
pub(super) struct Hash(u128);

impl Hash {
    pub(super) fn new() -> Hash {
        Hash(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Hash {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        self
    }

    /// A string and its length, so that parts cannot run into each other.
    pub(super) fn part(&mut self, text: &str) -> &mut Hash {
        self.bytes(&(text.len() as u64).to_le_bytes()).bytes(text.as_bytes())
    }

    pub(super) fn hex(&self) -> String {
        format!("{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_as_published_and_keeps_parts_apart() {
        assert_eq!(Hash::new().bytes(b"a").hex(), "d228cb696f1a8caf78912b704e4a8964");
        assert_ne!(Hash::new().part("ab").part("c").hex(), Hash::new().part("a").part("bc").hex());
    }

    #[test]
    fn an_altered_entry_is_not_taken() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("deeper/score-0");
        write(&path, b"object").expect("writes");
        assert_eq!(read(&path), Some(b"object".to_vec()));
        let whole = fs::read(&path).expect("reads");
        fs::write(&path, &whole[..whole.len() - 1]).expect("writes");
        assert_eq!(read(&path), None);
        assert_eq!(fs::read_dir(path.parent().expect("a parent")).expect("lists").count(), 1);
    }
}
