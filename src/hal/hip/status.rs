//! Status codes of libamdhip64 as a newtype: a newer runtime may return numbers that no header of ours lists.

#![expect(unsafe_code, reason = "asks the runtime for the text of a code")]

use std::ffi::{CStr, c_int};

use super::table::Table;
use crate::error::{Error, Result};

/// A `hipError_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Status(pub c_int);

impl Status {
    pub const SUCCESS: Status = Status(0);
    pub const DEINITIALIZED: Status = Status(4);
    pub const NO_DEVICE: Status = Status(100);
    pub const INVALID_DEVICE: Status = Status(101);
    pub const NO_BINARY_FOR_GPU: Status = Status(209);
    pub const NOT_FOUND: Status = Status(500);
    pub const NOT_READY: Status = Status(600);

    /// What the runtime says of the code: the name of the error, from 5.5 on a sentence.
    pub fn text(self, table: &Table) -> String {
        // SAFETY: gives a static string for any code.
        let text = unsafe { (table.hipGetErrorString)(self) };
        if text.is_null() {
            return "a code that the runtime has no text for".to_owned();
        }
        // SAFETY: a static string, as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// An error unless the call succeeded: `what` is the HAL's word for what was asked, `call` the runtime's.
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
            1 | 17 | 400 => "hand the device its own live objects and ranges; `hal::checked` names the one that is not",
            2 => "lower max_num_seqs, max_model_len or the cache blocks, or end what else holds the device's memory",
            100 | 101 => "check `rocminfo`, HIP_VISIBLE_DEVICES and the access to /dev/kfd and /dev/dri",
            98 | 200 | 209 | 218 => {
                "compile for this device's architecture: `capstan kernels build --arch`, as `capstan devices` shows it"
            }
            201 | 709 => "something else reset the device; open it again",
            700 | 702 | 710 | 719 => {
                "a kernel failed and the device is lost: run with AMD_LOG_LEVEL=3, then start the process again"
            }
            801 => "the runtime does not offer this: install a newer ROCm",
            900..=908 => "make the call before the capture begins or after it ends",
            _ => "look the code up in HIP's hipError_t; `dmesg` and AMD_LOG_LEVEL=3 may say more",
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

/// The help line for a machine without a usable runtime.
pub(super) const NO_RUNTIME: &str = "install ROCm 5.2 or later, name its libamdhip64 in CAPSTAN_HIP_LIBRARY, or use --device cpu";
