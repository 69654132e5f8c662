//! What can go wrong, and which of NCCL's codes says so.

use crate::abi::ResultCode;
use cuda_vmm_sys::{CallError, LoadError};
use rustix::io::Errno;
use std::time::Duration;

/// Why an operation of the plugin failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no CUDA driver in this process.
    #[error(transparent)]
    NoDriver(#[from] LoadError),
    /// No CUDA context is current on the calling thread.
    #[error(
        "{attempt}: no CUDA context is current on the calling thread; NCCL sets one, so this is a caller other than NCCL"
    )]
    NoContext {
        /// What was attempted.
        attempt: &'static str,
    },
    /// The driver refused a call.
    #[error("{attempt}: {cause}")]
    Cuda {
        /// What was attempted.
        attempt: &'static str,
        /// What the driver said.
        cause: CallError,
    },
    /// The operating system refused a call.
    #[error("{attempt}: {cause}")]
    System {
        /// What was attempted, with its values.
        attempt: String,
        /// What came back.
        cause: Errno,
    },
    /// Something did not come in time.
    #[error(
        "{attempt}: nothing came within {waited:?}; is the other rank still there? (NCCL_GIN_SOFT_TIMEOUT sets the seconds)"
    )]
    Deadline {
        /// What was waited for.
        attempt: String,
        /// How long.
        waited: Duration,
    },
    /// A rank's process ended, or its connection was cut.
    #[error("rank {rank} is gone: {reason}; destroy the communicator, and start again without that rank")]
    PeerGone {
        /// The rank, as the connection counts.
        rank: usize,
        /// How that was noticed.
        reason: String,
    },
    /// A rank reported a failure of its own.
    #[error("rank {rank} failed; its log says why")]
    PeerFailed {
        /// The rank, as the connection counts.
        rank: usize,
    },
    /// Another rank sent something that this version cannot take.
    #[error("from rank {rank}: {reason}; all ranks need the same version of this plugin")]
    Protocol {
        /// The rank, as the connection counts.
        rank: usize,
        /// What was wrong.
        reason: String,
    },
    /// An argument is out of its bounds.
    #[error("{0}")]
    Argument(String),
    /// The connection has failed before; the first failure was logged.
    #[error("the connection has failed before: {0}")]
    Failed(String),
    /// A defect of this plugin.
    #[error("{0}; this is a defect of nccl-gin-soft")]
    Internal(String),
}

impl Error {
    /// The code that NCCL is told.
    #[must_use]
    pub fn code(&self) -> ResultCode {
        match self {
            Self::NoDriver(_) | Self::NoContext { .. } | Self::Cuda { .. } => {
                ResultCode::UNHANDLED_CUDA_ERROR
            }
            Self::System { .. } => ResultCode::SYSTEM_ERROR,
            Self::Deadline { .. }
            | Self::PeerGone { .. }
            | Self::PeerFailed { .. }
            | Self::Protocol { .. }
            | Self::Failed(_) => ResultCode::REMOTE_ERROR,
            Self::Argument(_) => ResultCode::INVALID_ARGUMENT,
            Self::Internal(_) => ResultCode::INTERNAL_ERROR,
        }
    }

    pub(crate) fn system(attempt: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        let attempt = attempt.into();
        move |cause| Self::System { attempt, cause }
    }

    pub(crate) fn io(attempt: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let attempt = attempt.into();
        move |error| Self::System { attempt, cause: Errno::from_io_error(&error).unwrap_or(Errno::IO) }
    }

    pub(crate) fn cuda(attempt: &'static str) -> impl FnOnce(CallError) -> Self {
        move |cause| Self::Cuda { attempt, cause }
    }
}

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_values_and_code() {
        let error = Error::system("mapping 4096 bytes")(Errno::NOMEM);
        assert!(error.to_string().starts_with("mapping 4096 bytes: "), "{error}");
        assert_eq!(error.code(), ResultCode::SYSTEM_ERROR);
        let error = Error::PeerGone { rank: 3, reason: "its socket was closed".into() };
        assert!(error.to_string().contains("rank 3") && error.to_string().contains("its socket"), "{error}");
        assert_eq!(error.code(), ResultCode::REMOTE_ERROR);
        let error = Error::Deadline { attempt: "rank 1's hello".into(), waited: Duration::from_secs(60) };
        assert!(error.to_string().contains("60s"), "{error}");
        assert_eq!(Error::Argument("rank 9 of 2".into()).code(), ResultCode::INVALID_ARGUMENT);
    }
}
