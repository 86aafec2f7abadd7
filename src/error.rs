//! Errors by kind. Each ends with a help line that says what to change.
//!
//! A caller's bug inside the crate asserts; what the world or a user does wrong is one of these values. Hot-path outcomes
//! (no page free, step not ready) are plain enums of their own modules, not errors.

use std::fmt;

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure an [`Error`] is; callers branch on this, people read the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A limit, a model's config or a flag is unknown, contradictory or out of range.
    Config,
    /// The plan does not fit the memory budget.
    Memory,
    /// A batch breaks the contract of the step it was given to; nothing was run.
    Batch,
    /// A file is missing, truncated, or not what it claims to be.
    Input,
    /// A device call failed.
    Device,
    /// The device, driver, symbol or feature is not there.
    Unavailable,
    /// A call came in the wrong order (sealed arena, open capture, closed sequence).
    State,
    /// An invariant of ARCHITECTURE.md is broken: results may be wrong, do not continue.
    Invariant(&'static str),
    /// A rank of the context-parallel group is missing, slow or disagrees.
    Peer,
}

impl ErrorKind {
    /// Exit code of the command line: 1 failed, 2 usage, 3 invariant broken.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Config => 2,
            ErrorKind::Invariant(_) => 3,
            _ => 1,
        }
    }
}

/// A typed failure: kind, message, the device call where there is one, and what to change.
#[derive(Clone)]
pub struct Error(Box<Parts>);

#[derive(Clone)]
struct Parts {
    kind: ErrorKind,
    message: String,
    call: Option<DeviceCall>,
    help: Option<String>,
}

/// The device call behind an error: which, on what site, and the driver's own status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCall {
    /// Name of the call in the API's own words, e.g. `hipStreamBeginCapture`.
    pub call: &'static str,
    /// The driver's status code.
    pub code: i32,
    /// What the runtime was doing, e.g. `capture rows=8 op=layer3.score`.
    pub site: String,
}

impl Error {
    /// An error of `kind` with a message.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Box::new(Parts { kind, message: message.into(), call: None, help: None }))
    }

    /// Adds the help line: what to change.
    pub fn help(mut self, help: impl Into<String>) -> Error {
        self.0.help = Some(help.into());
        self
    }

    /// Adds the device call that failed.
    pub fn call(mut self, call: &'static str, code: i32, site: impl Into<String>) -> Error {
        self.0.call = Some(DeviceCall { call, code, site: site.into() });
        self
    }

    /// Puts what the error is about before its message: a file, a request.
    pub fn within(mut self, what: &str) -> Error {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// Names what was being done when a device call failed, if a call is recorded and its site is still empty.
    pub fn at(mut self, site: impl FnOnce() -> String) -> Error {
        if let Some(call) = &mut self.0.call
            && call.site.is_empty()
        {
            call.site = site();
        }
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message without call and help.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The device call behind the error.
    pub fn device_call(&self) -> Option<&DeviceCall> {
        self.0.call.as_ref()
    }

    /// The help line.
    pub fn help_line(&self) -> Option<&str> {
        self.0.help.as_deref()
    }
}

macro_rules! shorthand {
    ($($(#[$doc:meta])* $name:ident => $kind:ident;)*) => {
        impl Error {$(
            $(#[$doc])*
            pub fn $name(message: impl Into<String>) -> Error {
                Error::new(ErrorKind::$kind, message)
            }
        )*}
    };
}

shorthand! {
    /// A limit, config key or flag is wrong.
    config => Config;
    /// The plan does not fit.
    memory => Memory;
    /// A batch breaks the step's contract.
    batch => Batch;
    /// A file is not what it should be.
    input => Input;
    /// A device call failed.
    device => Device;
    /// Something is not there.
    unavailable => Unavailable;
    /// A call came in the wrong order.
    state => State;
    /// A rank is missing, slow or disagrees.
    peer => Peer;
}

impl Error {
    /// Invariant `id` (a row of ARCHITECTURE.md) is broken.
    pub fn invariant(id: &'static str, message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Invariant(id), message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let ErrorKind::Invariant(id) = self.0.kind {
            write!(f, "{id}: ")?;
        }
        f.write_str(&self.0.message)?;
        if let Some(DeviceCall { call, code, site }) = &self.0.call {
            write!(f, " ({call} returned {code}")?;
            if !site.is_empty() {
                write!(f, ", during {site}")?;
            }
            f.write_str(")")?;
        }
        if let Some(help) = &self.0.help {
            write!(f, "\n  help: {help}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_call_and_help() {
        let error = Error::device("out of memory").call("hipMalloc", 2, "").at(|| "arena".into()).help("lower --max-num-seqs");
        assert_eq!(error.to_string(), "out of memory (hipMalloc returned 2, during arena)\n  help: lower --max-num-seqs");
        assert_eq!(Error::invariant("ADDR-1", "x").kind().exit_code(), 3);
    }
}
