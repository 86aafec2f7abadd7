//! What is alive on a checked device: allocations, functions, captures.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use super::broken;
use crate::error::{Error, Result};
use crate::hal::{Allocation, CaptureMode, DeviceInfo, DevicePtr, FunctionHandle, LaunchShape};

/// Objects alive on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alive {
    /// Allocations, opened peer memory included.
    pub allocations: usize,
    /// Kernels of loaded modules that were asked for.
    pub functions: usize,
    /// Open captures.
    pub captures: usize,
}

#[derive(Debug)]
struct Function {
    module: u64,
    symbol: String,
    args_bytes: usize,
}

/// An open capture.
#[derive(Clone, Debug)]
pub(super) struct Capture {
    pub thread: ThreadId,
    pub mode: CaptureMode,
    /// Symbol of the kernel recorded last.
    pub last: String,
}

#[derive(Debug, Default)]
struct Inner {
    allocations: BTreeMap<u64, Allocation>,
    functions: HashMap<FunctionHandle, Function>,
    /// By the number of the stream that began it.
    captures: BTreeMap<u64, Capture>,
}

/// The tables of one device.
#[derive(Debug)]
pub(super) struct Tables {
    info: DeviceInfo,
    next: AtomicU64,
    inner: Mutex<Inner>,
}

impl Tables {
    pub fn new(info: DeviceInfo) -> Tables {
        Tables { info, next: AtomicU64::new(1), inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a stream or module.
    pub fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub fn alive(&self) -> Alive {
        let inner = self.lock();
        Alive { allocations: inner.allocations.len(), functions: inner.functions.len(), captures: inner.captures.len() }
    }

    pub fn insert_allocation(&self, allocation: Allocation) {
        self.lock().allocations.insert(allocation.ptr.0, allocation);
    }

    pub fn remove_allocation(&self, allocation: &Allocation) -> Result<()> {
        self.check_allocation("free", allocation)?;
        self.lock().allocations.remove(&allocation.ptr.0);
        Ok(())
    }

    pub fn check_allocation(&self, call: &'static str, allocation: &Allocation) -> Result<()> {
        match self.lock().allocations.get(&allocation.ptr.0) {
            Some(found) if found == allocation => Ok(()),
            Some(found) => Err(broken(call, format!("{allocation:?} was changed: the device gave {found:?}"))),
            None => {
                Err(broken(call, format!("{allocation:?} is no live allocation of this device: freed already, or another's")))
            }
        }
    }

    /// A range must lie inside one live allocation.
    pub fn check_range(&self, call: &'static str, what: &str, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let inner = self.lock();
        let holder = inner.allocations.range(..=ptr.0).next_back().map(|(_, allocation)| allocation);
        let inside = holder.filter(|holder| ptr.0 - holder.ptr.0 < holder.bytes);
        match inside {
            Some(holder) if bytes <= holder.bytes - (ptr.0 - holder.ptr.0) => Ok(()),
            Some(holder) => Err(broken(
                call,
                format!(
                    "{what}: {bytes} bytes from offset {} leave an allocation of {} bytes",
                    ptr.0 - holder.ptr.0,
                    holder.bytes
                ),
            )),
            None => Err(broken(call, format!("{what}: {bytes} bytes at an address in no live allocation"))),
        }
    }

    pub fn insert_function(&self, function: FunctionHandle, module: u64, symbol: &str, args_bytes: usize) {
        self.lock().functions.insert(function, Function { module, symbol: symbol.to_owned(), args_bytes });
    }

    pub fn remove_module(&self, module: u64) {
        self.lock().functions.retain(|_, function| function.module != module);
    }

    /// A launch must name a live kernel, bring its whole argument struct, and have a shape the device can run. Gives the symbol.
    pub fn check_launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<String> {
        let inner = self.lock();
        let Some(known) = inner.functions.get(&function) else {
            return Err(broken("launch", format!("{function:?} is no kernel of a loaded module: dropped, or another device's")));
        };
        let bad = |what: String| Err(broken("launch", format!("{}: {what}", known.symbol)));
        if args.len() != known.args_bytes {
            return bad(format!("{} bytes of arguments, its struct has {}", args.len(), known.args_bytes));
        }
        if shape.grid.iter().chain(&shape.workgroup).any(|&dim| dim == 0) {
            return bad(format!("empty {shape:?}"));
        }
        // Limits of both vendors' launches: 2^31 - 1 by 65535 by 65535 workgroups of at most 1024 lanes.
        let lanes: u64 = shape.workgroup.iter().map(|&dim| u64::from(dim)).product();
        if shape.grid[0] > i32::MAX as u32 || shape.grid[1] > 65_535 || shape.grid[2] > 65_535 || lanes > 1024 {
            return bad(format!("{shape:?} is past what devices launch"));
        }
        if shape.lds_bytes > self.info.lds_bytes_max {
            return bad(format!("{} bytes of LDS, the device has {}", shape.lds_bytes, self.info.lds_bytes_max));
        }
        Ok(known.symbol.clone())
    }

    pub fn begin_capture(&self, stream: u64, mode: CaptureMode) {
        let capture = Capture { thread: thread::current().id(), mode, last: "nothing yet".to_owned() };
        self.lock().captures.insert(stream, capture);
    }

    pub fn end_capture(&self, stream: u64) -> Option<Capture> {
        self.lock().captures.remove(&stream)
    }

    pub fn recorded(&self, stream: u64, symbol: String) {
        if let Some(capture) = self.lock().captures.get_mut(&stream) {
            capture.last = symbol;
        }
    }

    /// A stream's own capture.
    pub fn capture_of(&self, stream: u64) -> Option<Capture> {
        self.lock().captures.get(&stream).cloned()
    }

    /// Calls that no capture in this thread's sight allows: of any thread in global mode, of this thread in thread-local mode.
    pub fn forbid_in_capture(&self, call: &'static str) -> Result<()> {
        let inner = self.lock();
        let here = thread::current().id();
        let sees = |capture: &Capture| match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == here,
            CaptureMode::Relaxed => false,
        };
        match inner.captures.iter().find(|(_, capture)| sees(capture)) {
            None => Ok(()),
            Some((&stream, capture)) => Err(forbidden(call, stream, capture)),
        }
    }
}

/// CAP-1: a call inside a capture window that would break it.
pub(super) fn forbidden(call: &'static str, stream: u64, capture: &Capture) -> Error {
    Error::invariant(
        "CAP-1",
        format!(
            "{call} while stream {stream} captures (mode {:?}, last recorded: {}): the call is forbidden there",
            capture.mode, capture.last
        ),
    )
    .call(call, 1, "checked")
    .help("make the call before the capture begins or after it ends")
}
