//! Driver libraries found at run time: candidate names, symbols that must be there, symbols that may be missing for a reason.
//!
//! `function_table!` declares a driver's functions once; its table is filled by name and by nothing else. A library that is
//! not there, or lacks a required symbol, is an error that says where it was looked for.

#![expect(unsafe_code, reason = "loads C libraries and takes symbols from them")]

use std::ffi::OsString;

use crate::error::{Error, Result};

/// A loaded library. Never unloaded: drivers keep threads and exit handlers of their own.
pub(super) struct Library {
    inner: &'static libloading::Library,
    /// The name that it was found by.
    pub name: String,
}

impl Library {
    /// The library that the environment's `variable` names, else the first of `names` that the system's loader finds.
    ///
    /// Errors: [`Unavailable`](crate::error::ErrorKind::Unavailable), with the loader's word on the first name.
    pub fn open(variable: &str, names: &[&str], help: &str) -> Result<Library> {
        let given = std::env::var_os(variable).filter(|name| !name.is_empty());
        let candidates: Vec<OsString> = given.map_or_else(|| names.iter().map(OsString::from).collect(), |name| vec![name]);
        let mut refused = None;
        for name in &candidates {
            // SAFETY: the initialisers of a driver library are meant to run in any process; the user names another one at will.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => {
                    return Ok(Library { inner: Box::leak(Box::new(library)), name: name.to_string_lossy().into_owned() });
                }
                Err(error) => {
                    refused.get_or_insert_with(|| loaders_word(&error));
                }
            }
        }
        let tried = candidates.iter().map(|name| name.to_string_lossy()).collect::<Vec<_>>().join(", ");
        Err(Error::unavailable(format!("no library {tried}: {}", refused.unwrap_or_default())).help(help))
    }

    /// A symbol without which the device cannot work.
    ///
    /// Errors: the library does not have it.
    ///
    /// # Safety
    /// `T` is a function pointer of the symbol's C type.
    pub unsafe fn required<T: Copy>(&self, symbol: &str) -> Result<T> {
        // SAFETY: the caller's word.
        unsafe { self.optional(symbol) }
            .ok_or_else(|| Error::unavailable(format!("{} has no {symbol}", self.name)).help("install a newer driver or runtime"))
    }

    /// A symbol that not every version has.
    ///
    /// # Safety
    /// As for `required`.
    pub unsafe fn optional<T: Copy>(&self, symbol: &str) -> Option<T> {
        // SAFETY: the caller's word; the library is never unloaded.
        unsafe { self.inner.get::<T>(symbol.as_bytes()) }.ok().map(|found| *found)
    }
}

/// What the system's loader said; `libloading` keeps it as its error's source.
fn loaders_word(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Declares a table of C functions: `required` ones, and `optional` ones each with why it may be missing.
///
/// Every function returns the driver's status newtype, unless it says otherwise. The table gets `load(&Library) -> Result<Self>` and
/// `missing() -> Vec<(symbol, reason)>`.
macro_rules! function_table {
    (
        $(#[$doc:meta])* $Table:ident -> $Status:ty;
        required { $(fn $required:ident($($rname:ident: $rtype:ty),* $(,)?) $(-> $returned:ty)?;)* }
        optional { $($reason:literal fn $optional:ident($($oname:ident: $otype:ty),* $(,)?);)* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub(super) struct $Table {
            $(pub $required: unsafe extern "C" fn($($rname: $rtype),*) -> $crate::hal::loader::returned!($Status $(, $returned)?),)*
            $(pub $optional: Option<unsafe extern "C" fn($($oname: $otype),*) -> $Status>,)*
        }

        impl $Table {
            /// Takes every symbol from the library. Errors: a required one is missing.
            pub fn load(library: &$crate::hal::loader::Library) -> $crate::error::Result<$Table> {
                // SAFETY: the types are those of the driver's headers.
                unsafe {
                    Ok($Table {
                        $($required: library.required(stringify!($required))?,)*
                        $($optional: library.optional(stringify!($optional)),)*
                    })
                }
            }

            /// Optional symbols that this library lacks, and what is not offered without each.
            pub fn missing(&self) -> Vec<(&'static str, &'static str)> {
                let mut missing = Vec::new();
                $(if self.$optional.is_none() {
                    missing.push((stringify!($optional), $reason));
                })*
                missing
            }
        }
    };
}

/// What a function returns: the status, or the type that it names.
macro_rules! returned {
    ($Status:ty) => {
        $Status
    };
    ($Status:ty, $returned:ty) => {
        $returned
    };
}

/// Declares opaque handles of a driver.
macro_rules! handles {
    ($($(#[$doc:meta])* $Handle:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub(super) struct $Handle(pub *mut std::ffi::c_void);

        impl $Handle {
            /// No object.
            pub const NULL: $Handle = $Handle(std::ptr::null_mut());
        }

        // SAFETY: the driver lets any thread use its handles, and its own locks order the uses.
        unsafe impl Send for $Handle {}
        // SAFETY: as above.
        unsafe impl Sync for $Handle {}
    )*};
}

pub(super) use {function_table, handles, returned};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_library_that_is_not_there_names_every_candidate_and_the_loaders_word() {
        let error = Library::open("CAPSTAN_NO_VARIABLE", &["libnowhere.so.2", "libnowhere.so"], "install it").err().unwrap();
        assert_eq!((error.kind(), error.help_line()), (ErrorKind::Unavailable, Some("install it")));
        assert!(error.message().starts_with("no library libnowhere.so.2, libnowhere.so: "), "{error}");
        assert!(error.message().matches("libnowhere.so.2").count() >= 2, "the loader says which file it missed: {error}");
    }

    #[test]
    fn symbols_are_found_or_named() {
        let library = Library::open("CAPSTAN_NO_VARIABLE", &["libnowhere.so", "libc.so.6"], "").unwrap();
        assert_eq!(library.name, "libc.so.6");
        // SAFETY: getpid takes nothing and gives an int.
        let getpid: unsafe extern "C" fn() -> i32 = unsafe { library.required("getpid") }.unwrap();
        // SAFETY: always callable.
        assert_eq!(unsafe { getpid() } as u32, std::process::id());
        // SAFETY: there is no such function to call wrongly.
        let error = unsafe { library.required::<unsafe extern "C" fn()>("no_such_function") }.unwrap_err();
        assert!(error.message().contains("libc.so.6 has no no_such_function"), "{error}");
    }
}
