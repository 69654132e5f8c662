//! What can go wrong: the driver is not there, it lacks a function, or a call failed.

use crate::{CUresult, Function, Origin, result_name};
use std::error::Error;
use std::ffi::OsStr;
use std::fmt;

/// Why no driver could be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// No file could be opened.
    NotFound {
        /// Each name that was tried, with the dynamic linker's answer.
        tried: Vec<Tried>,
    },
    /// The file was opened, but it is the toolkit's stub, not a driver.
    Stub {
        /// The file.
        origin: Origin,
    },
    /// The file was opened, but is no CUDA driver: it lacks a function that every driver has.
    NotADriver {
        /// The file.
        origin: Origin,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// The driver did not tell its version.
    Version {
        /// The file.
        origin: Origin,
        /// What `cuDriverGetVersion` returned.
        status: CUresult,
    },
}

/// One attempt to open the driver's library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// File name or path.
    pub name: String,
    /// The dynamic linker's answer.
    pub reason: String,
}

impl Tried {
    pub(crate) fn new(name: &OsStr, error: &libloading::Error) -> Self {
        let name = name.to_string_lossy().into_owned();
        // The linker's own words are behind the library's error, and often begin with the name.
        let words = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        let reason = words.strip_prefix(&format!("{name}: ")).unwrap_or(&words).to_owned();
        Self { name, reason }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { tried } => {
                f.write_str("no CUDA driver found (")?;
                for (index, attempt) in tried.iter().enumerate() {
                    let separator = if index == 0 { "" } else { "; " };
                    write!(f, "{separator}{}: {}", attempt.name, attempt.reason)?;
                }
                write!(
                    f,
                    "); install the NVIDIA driver, or name its libcuda.so.1 in {}",
                    crate::load::DRIVER_ENV
                )
            }
            Self::Stub { origin } => {
                write!(
                    f,
                    "{origin} is the CUDA toolkit's stub, not a driver; remove it from the library path"
                )
            }
            Self::NotADriver { origin, symbol } => {
                write!(f, "{origin} is no CUDA driver: it has no {symbol}")
            }
            Self::Version { origin, status } => {
                write!(f, "{origin}: cuDriverGetVersion failed: {}", Status(*status))
            }
        }
    }
}

impl Error for LoadError {}

/// A function that the loaded driver does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingFunction {
    /// The function.
    pub function: Function,
    /// CUDA version that the loaded driver supports.
    pub driver: i32,
    /// Where the driver was loaded from.
    pub origin: Origin,
}

impl fmt::Display for MissingFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is not in the driver: it needs CUDA {}, and {} supports CUDA {}",
            self.function.symbol(),
            Version(self.function.since() as i32),
            self.origin,
            Version(self.driver),
        )
    }
}

impl Error for MissingFunction {}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallError {
    /// The driver lacks the function.
    Missing(Box<MissingFunction>),
    /// The driver returned something else than `CUDA_SUCCESS`. Asynchronous functions may report the failure of earlier work.
    Status {
        /// The function.
        function: Function,
        /// What it returned.
        status: CUresult,
    },
}

impl CallError {
    /// The code that the driver returned; `None` if the function is missing.
    #[must_use]
    pub fn status(&self) -> Option<CUresult> {
        match self {
            Self::Missing(_) => None,
            Self::Status { status, .. } => Some(*status),
        }
    }

    /// The function that was called.
    #[must_use]
    pub fn function(&self) -> Function {
        match self {
            Self::Missing(missing) => missing.function,
            Self::Status { function, .. } => *function,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(missing) => missing.fmt(f),
            Self::Status { function, status } => {
                write!(f, "{} failed: {}", function.symbol(), Status(*status))
            }
        }
    }
}

// Its text holds that of what is missing: that is no source besides.
impl Error for CallError {}

/// `CUDA_ERROR_OUT_OF_MEMORY (2)`, without asking a driver.
struct Status(CUresult);

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match result_name(self.0) {
            Some(name) => write!(f, "{name} ({})", self.0.0),
            None => write!(f, "unknown result code {}", self.0.0),
        }
    }
}

impl fmt::Display for CUresult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Status(*self).fmt(f)
    }
}

/// `12.1` for 12010.
struct Version(i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_read_without_a_driver() {
        let status =
            CallError::Status { function: Function::cuMemCreate, status: CUresult::CUDA_ERROR_OUT_OF_MEMORY };
        assert_eq!(status.to_string(), "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
        assert_eq!(status.status(), Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY));

        let unknown = CallError::Status { function: Function::cuMemFree, status: unnamed(54321) };
        assert_eq!(unknown.to_string(), "cuMemFree_v2 failed: unknown result code 54321");

        let missing = CallError::Missing(Box::new(MissingFunction {
            function: Function::cuMulticastCreate,
            driver: 12000,
            origin: Origin::File("/lib/libcuda.so.1".into()),
        }));
        assert_eq!(
            missing.to_string(),
            "cuMulticastCreate is not in the driver: it needs CUDA 12.1, and /lib/libcuda.so.1 supports CUDA 12.0"
        );
        assert!(missing.source().is_none(), "its text comes once");
        assert_eq!(missing.status(), None);
        assert_eq!(missing.function(), Function::cuMulticastCreate);
    }

    fn unnamed(code: u32) -> CUresult {
        let mut status = CUresult::CUDA_SUCCESS;
        status.0 = code;
        status
    }

    #[test]
    fn load_errors_say_what_to_do() {
        let tried = vec![Tried { name: "libcuda.so.1".into(), reason: "no such file".into() }];
        let text = LoadError::NotFound { tried }.to_string();
        assert!(text.contains("libcuda.so.1: no such file") && text.contains(crate::DRIVER_ENV), "{text}");
        let text = LoadError::Stub { origin: Origin::File("/stubs/libcuda.so".into()) }.to_string();
        assert!(text.contains("/stubs/libcuda.so is the CUDA toolkit's stub"), "{text}");
    }
}
