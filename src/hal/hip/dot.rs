//! the runtime's own DOT output.

#![expect(unsafe_code, reason = "calls the runtime")]

use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Core;
use super::table::GraphHandle;
use crate::error::{Error, Result};

/// Has the runtime write DOT to a file, and gives the file's text.
pub(super) fn native_dot(core: &Core, graph: GraphHandle) -> Result<String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let print = core.table.hipGraphDebugDotPrint.ok_or_else(|| {
        Error::unavailable("native_dot: this runtime has no hipGraphDebugDotPrint").help("use `capstan dump --format dot`")
    })?;
    let name = format!("capstan-{}-{}.dot", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| Error::input("native_dot: the temporary folder's name has a zero byte"))?;
    // SAFETY: the graph is live; the path ends with a zero.
    unsafe { print(graph, file.as_ptr(), 0) }.check(&core.table, "native_dot", "hipGraphDebugDotPrint")?;
    let text = std::fs::read_to_string(&path).map_err(|error| Error::input(format!("{}: {error}", path.display())));
    // The text is read; a file that stays behind harms nobody.
    drop(std::fs::remove_file(&path));
    text
}
