//! What can go wrong.

use nccl_gin_sys::{Function, HeadersError, LoadError, MissingFunction, Version, ncclResult_t};
use std::fmt;
use std::time::Duration;

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed: what was attempted, what came back, and what to do about it. All of that is in its text; none of them has a
/// [source](std::error::Error::source) whose text would come twice.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No NCCL could be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The loaded NCCL lacks a function.
    #[error(transparent)]
    Missing(#[from] Box<MissingFunction>),
    /// The headers of the loaded NCCL were not found.
    #[error(transparent)]
    Headers(#[from] HeadersError),
    /// No CUDA driver could be loaded.
    #[error(transparent)]
    LoadDriver(#[from] cuda_vmm_sys::LoadError),
    /// A call of the CUDA driver failed.
    #[error("{attempt}: {cause}")]
    Driver {
        /// What was attempted.
        attempt: String,
        /// What the driver said.
        cause: cuda_vmm_sys::CallError,
    },
    /// A call of NCCL failed, at once or in the background.
    #[error(transparent)]
    Nccl(#[from] Box<NcclError>),
    /// NCCL reported success and handed out nothing.
    #[error("{attempt}: {} succeeded, but gave no {missing}; {advice}", .function.symbol())]
    Nothing {
        /// What was attempted.
        attempt: String,
        /// The function.
        function: Function,
        /// What it should have given.
        missing: &'static str,
        /// What to do about it.
        advice: &'static str,
    },
    /// An operation did not end within its time.
    #[error(
        "{attempt} did not end within {after:?} ({}), so the communicator {}; see whether every rank takes part and is alive",
        .function.symbol(),
        if *.aborted { "was aborted" } else { "was given up, and could not be aborted" }
    )]
    Timeout {
        /// What was attempted.
        attempt: String,
        /// The function that started it.
        function: Function,
        /// How long it was waited for.
        after: Duration,
        /// Whether NCCL gave everything back.
        aborted: bool,
    },
    /// An argument is refused before NCCL sees it.
    #[error("{what} is {value}, but must be {expected}")]
    Argument {
        /// The argument.
        what: &'static str,
        /// What was given.
        value: String,
        /// What is accepted.
        expected: String,
    },
    /// Memory cannot become a window.
    #[error("memory at {address:#x} ({length} bytes) cannot become a window: {reason}")]
    Memory {
        /// Its address.
        address: usize,
        /// Its length in bytes.
        length: usize,
        /// Why not.
        reason: String,
    },
    /// A requirement or option that the loaded version or the communicator cannot give.
    #[error("{what} cannot be had: {reason}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// Multicast is switched off for this process.
    #[error("{what} would create multicast objects, but {setting} switches multicast off for this process")]
    MulticastOff {
        /// What was asked for.
        what: &'static str,
        /// The environment's setting.
        setting: &'static str,
    },
    /// The environment contradicts itself or what this crate promises.
    #[error("{setting} is set: {reason}; {advice}")]
    Environment {
        /// The setting.
        setting: &'static str,
        /// What is wrong with it.
        reason: &'static str,
        /// What to do about it.
        advice: &'static str,
    },
    /// The communicator cannot be closed while something is made from it.
    #[error(
        "the communicator is still in use by {windows} windows and {device_communicators} device communicators; close them first"
    )]
    InUse {
        /// Windows that are alive.
        windows: usize,
        /// Device communicators that are alive.
        device_communicators: usize,
    },
    /// The communicator has been closed or aborted.
    #[error("{attempt}: the communicator was aborted or revoked; make a new one")]
    Gone {
        /// What was attempted.
        attempt: String,
    },
    /// Another operation of the same communicator is under way.
    #[error("{attempt}: another operation of this communicator is under way; wait for it first")]
    Busy {
        /// What was attempted.
        attempt: String,
    },
    /// The operation's group has not ended.
    #[error("{attempt}: the group on this thread is open; end it first, nothing starts before that")]
    GroupOpen {
        /// What was attempted.
        attempt: String,
    },
    /// A struct that NCCL filled does not say what it must.
    #[error(
        "NCCL {version} filled {what} with another layout than expected ({detail}); this version of the crate cannot use it"
    )]
    Layout {
        /// The struct.
        what: &'static str,
        /// The loaded version.
        version: Version,
        /// What is wrong in it.
        detail: String,
    },
}

/// A call of NCCL that failed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NcclError {
    /// What was attempted, with its values.
    pub attempt: String,
    /// The function; for a failure in the background, the one that started the operation.
    pub function: Function,
    /// The code.
    pub result: ncclResult_t,
    /// What `ncclGetLastError` said. NCCL keeps one text for the whole process, which may belong to something else.
    pub text: String,
    /// What to do about it.
    pub hint: Option<&'static str>,
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} failed: {}", self.attempt, self.function.symbol(), self.result)?;
        if !self.text.is_empty() {
            write!(f, " ({})", self.text)?;
        }
        if let Some(hint) = self.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for NcclError {}

impl Error {
    /// The code that NCCL returned, if this error is one of its calls.
    #[must_use]
    pub fn result(&self) -> Option<ncclResult_t> {
        match self {
            Self::Nccl(error) => Some(error.result),
            _ => None,
        }
    }

    pub(crate) fn argument(
        what: &'static str,
        value: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Argument { what, value: value.to_string(), expected: expected.into() }
    }

    pub(crate) fn driver(attempt: impl Into<String>) -> impl FnOnce(cuda_vmm_sys::CallError) -> Self {
        let attempt = attempt.into();
        |cause| Self::Driver { attempt, cause }
    }
}

/// Closing failed.
///
/// If nothing was torn down yet, the communicator comes back in it and can be closed again or aborted.
#[derive(Debug, thiserror::Error)]
#[error("closing the communicator: {error}")]
#[non_exhaustive]
pub struct NotClosed {
    /// Why.
    pub error: Error,
    /// The communicator, if it is still whole.
    pub communicator: Option<crate::Communicator>,
}

impl From<NotClosed> for Error {
    fn from(failure: NotClosed) -> Self {
        failure.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_gin_sys::Origin;

    #[test]
    fn each_error_says_what_happened_and_what_to_do() {
        let nccl = NcclError {
            attempt: "creating rank 1 of 2".into(),
            function: Function::ncclCommInitRankConfig,
            result: ncclResult_t::ncclInvalidUsage,
            text: "Duplicate GPU detected".into(),
            hint: Some("set NCCL_MULTI_RANK_GPU_ENABLE=1"),
        };
        let cases = [
            (
                Error::from(Box::new(nccl)),
                "creating rank 1 of 2: ncclCommInitRankConfig failed: ncclInvalidUsage (5) (Duplicate GPU detected); set \
                 NCCL_MULTI_RANK_GPU_ENABLE=1",
            ),
            (
                Error::Nothing {
                    attempt: "registering 4096 bytes".into(),
                    function: Function::ncclCommWindowRegister,
                    missing: "window",
                    advice: "do something",
                },
                "registering 4096 bytes: ncclCommWindowRegister succeeded, but gave no window; do something",
            ),
            (
                Error::Timeout {
                    attempt: "closing rank 0".into(),
                    function: Function::ncclCommFinalize,
                    after: Duration::from_secs(3),
                    aborted: true,
                },
                "closing rank 0 did not end within 3s (ncclCommFinalize), so the communicator was aborted; see whether every rank \
                 takes part and is alive",
            ),
            (Error::argument("rank", 4, "less than 2"), "rank is 4, but must be less than 2"),
            (
                Error::MulticastOff { what: "lsa_multimem", setting: "NCCL_NVLS_ENABLE=0" },
                "lsa_multimem would create multicast objects, but NCCL_NVLS_ENABLE=0 switches multicast off for this process",
            ),
            (
                Error::InUse { windows: 2, device_communicators: 1 },
                "the communicator is still in use by 2 windows and 1 device communicators; close them first",
            ),
            (
                Error::Load(LoadError::NotNccl { origin: Origin::Custom, symbol: "ncclGetVersion" }),
                "a custom loader is no NCCL: it has no ncclGetVersion",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
            assert!(std::error::Error::source(&error).is_none(), "nothing of it comes twice");
        }
    }
}
