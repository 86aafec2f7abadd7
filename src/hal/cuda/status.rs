//! Status codes of libcuda as a newtype: a newer driver may return numbers that no header of ours lists.

#![expect(unsafe_code, reason = "asks the driver for the text of a code")]

use std::ffi::{CStr, c_char, c_int};

use super::table::Table;
use crate::error::{Error, Result};

/// A `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Status(pub c_int);

impl Status {
    pub const SUCCESS: Status = Status(0);
    pub const DEINITIALIZED: Status = Status(4);
    pub const NO_DEVICE: Status = Status(100);
    pub const NO_BINARY_FOR_GPU: Status = Status(209);
    pub const NOT_FOUND: Status = Status(500);
    pub const NOT_READY: Status = Status(600);

    /// What the driver says of the code.
    pub fn text(self, table: &Table) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver writes the address of a static string, or leaves null for a code it does not know.
        let found = unsafe { (table.cuGetErrorString)(self, &mut text) };
        if found != Status::SUCCESS || text.is_null() {
            return "a code that the driver has no text for".to_owned();
        }
        // SAFETY: a static string, as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// An error unless the call succeeded: `what` is the HAL's word for what was asked, `call` the driver's.
    #[inline]
    pub fn check(self, table: &Table, what: &str, call: &'static str) -> Result<()> {
        if self == Status::SUCCESS { Ok(()) } else { Err(self.error(table, what, call)) }
    }

    /// As `check`, of a question: true for yes, false for "not ready".
    pub fn ready(self, table: &Table, what: &str, call: &'static str) -> Result<bool> {
        if self == Status::NOT_READY { Ok(false) } else { self.check(table, what, call).map(|()| true) }
    }

    #[cold]
    fn error(self, table: &Table, what: &str, call: &'static str) -> Error {
        Error::device(format!("{what}: {}", self.text(table))).call(call, self.0, "").help(self.help())
    }

    fn help(self) -> &'static str {
        match self.0 {
            1 | 400 => "hand the device its own live objects and ranges; `hal::checked` names the one that is not",
            2 => "lower max_num_seqs, max_model_len or the cache blocks, or end what else holds the device's memory",
            100 | 101 => "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            200 | 209 | 222 => {
                "compile for this device's architecture: `capstan kernels build --arch`, as `capstan devices` shows it"
            }
            201 | 709 => "something else destroyed the device's primary context; open the device again",
            700 | 702 | 714..=719 => {
                "a kernel failed and the context is lost: run under compute-sanitizer, then start the process again"
            }
            802..=804 => "install a driver that fits the CUDA libraries, or end the CUDA compatibility package's use",
            900..=908 => "make the call before the capture begins or after it ends",
            _ => "look the code up in the CUDA driver API's CUresult; `dmesg` may say more",
        }
    }
}

/// Calls a function of a table and checks its status: `call!(table, "what", name(arguments))`. For use in `unsafe` blocks.
macro_rules! call {
    ($table:expr, $what:literal, $name:ident($($argument:expr),* $(,)?)) => {
        ($table.$name)($($argument),*).check(&$table, $what, stringify!($name))
    };
}

pub(super) use call;

/// The help line for a machine without a usable driver.
pub(super) const NO_DRIVER: &str = "install NVIDIA's driver 525 or later, name its libcuda in CAPSTAN_CUDA, or use --device cpu";
