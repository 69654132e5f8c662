//! What can go wrong: the library is not there, is not one to talk to, or lacks a function.

use crate::load::LIBRARY_ENV;
use crate::{Function, Origin, Version, ncclResult_t};
use std::error::Error;
use std::fmt;
use std::path::PathBuf;

/// Why no NCCL could be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// No file could be opened.
    NotFound {
        /// Each name that was tried, with the dynamic linker's answer.
        tried: Vec<Tried>,
    },
    /// The file was opened, but is no NCCL: it lacks a function that every version has.
    NotNccl {
        /// The file.
        origin: Origin,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// The library did not tell its version.
    Version {
        /// The file.
        origin: Origin,
        /// What `ncclGetVersion` returned.
        status: ncclResult_t,
    },
    /// The library is older than 2.28.3, or one whose struct layouts this crate does not have ([`Generation::of`](crate::Generation::of)).
    Unsupported {
        /// Its version.
        found: Version,
        /// The file.
        origin: Origin,
    },
    /// Two different NCCLs are in this process, or the one asked for would be the second.
    SeveralLibraries {
        /// The files that are loaded.
        loaded: Vec<PathBuf>,
        /// The file that was asked for, if it is none of them.
        requested: Option<PathBuf>,
    },
}

/// One attempt to open the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// File name or path.
    pub name: String,
    /// The dynamic linker's answer.
    pub reason: String,
}

impl Tried {
    /// An attempt that the dynamic linker refused: its own words, which the error keeps as its source.
    pub(crate) fn new(name: &std::ffi::OsStr, error: &libloading::Error) -> Self {
        let words = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        let name = name.to_string_lossy().into_owned();
        let reason = words.strip_prefix(&format!("{name}: ")).unwrap_or(&words).to_owned();
        Self { name, reason }
    }
}

/// Joins with `; `.
fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.reason)
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { tried } => write!(
                f,
                "no NCCL found ({}); install NCCL 2.28 or newer (for example the PyPI package nvidia-nccl-cu13), or name its \
                 libnccl.so.2 in {LIBRARY_ENV}",
                list(tried)
            ),
            Self::NotNccl { origin, symbol } => write!(f, "{origin} is no NCCL: it has no {symbol}"),
            Self::Version { origin, status } => write!(f, "{origin}: ncclGetVersion failed: {status}"),
            Self::Unsupported { found, origin } => {
                write!(f, "NCCL {found} ({origin}) is not supported: ")?;
                f.write_str(if *found < Version::OLDEST {
                    "windows and device communicators start with 2.28.3; load that or a newer one"
                } else if *found < Version::from_code(22900) {
                    "its struct layouts are not known; load 2.28.3, or 2.28.7 or newer"
                } else {
                    "2.29.0 to 2.29.4 have struct layouts of their own; load 2.28, or 2.29.5 or newer"
                })
            }
            Self::SeveralLibraries { loaded, requested } => {
                let files = list(loaded.iter().map(|path| path.display()));
                match requested {
                    Some(path) => write!(
                        f,
                        "{} would be a second NCCL in this process, which has loaded {files}; use that one, or load the other \
                         before anything else does",
                        path.display()
                    ),
                    None => write!(
                        f,
                        "this process has loaded several NCCLs ({files}); see to it that all its parts use the same file"
                    ),
                }
            }
        }
    }
}

impl Error for LoadError {}

/// A function that the loaded library does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingFunction {
    /// The function.
    pub function: Function,
    /// Version of the loaded library.
    pub version: Version,
    /// Where the library was loaded from.
    pub origin: Origin,
}

impl fmt::Display for MissingFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is not in NCCL {} ({}): NCCL {} has it",
            self.function.symbol(),
            self.version,
            self.origin,
            self.function.since(),
        )
    }
}

impl Error for MissingFunction {}

/// Why the headers of the loaded library could not be found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeadersError {
    /// Version of the loaded library.
    pub version: Version,
    /// Where the library was loaded from.
    pub origin: Origin,
    /// Each folder that was looked into, and what was wrong with it.
    pub tried: Vec<Tried>,
}

impl fmt::Display for HeadersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no headers found for NCCL {} ({})", self.version, self.origin)?;
        if !self.tried.is_empty() {
            write!(f, ": {}", list(&self.tried))?;
        }
        write!(
            f,
            "; install the development package of the same version, or load the library of a wheel, which has them beside it"
        )
    }
}

impl Error for HeadersError {}

/// Name of a result code in `nccl.h`, without asking a library; `None` for a code that no checked version has.
#[must_use]
pub const fn result_name(result: ncclResult_t) -> Option<&'static str> {
    Some(match result {
        ncclResult_t::ncclSuccess => "ncclSuccess",
        ncclResult_t::ncclUnhandledCudaError => "ncclUnhandledCudaError",
        ncclResult_t::ncclSystemError => "ncclSystemError",
        ncclResult_t::ncclInternalError => "ncclInternalError",
        ncclResult_t::ncclInvalidArgument => "ncclInvalidArgument",
        ncclResult_t::ncclInvalidUsage => "ncclInvalidUsage",
        ncclResult_t::ncclRemoteError => "ncclRemoteError",
        ncclResult_t::ncclInProgress => "ncclInProgress",
        ncclResult_t::ncclTimeout => "ncclTimeout",
        _ => return None,
    })
}

/// `ncclInvalidUsage (5)`.
impl fmt::Display for ncclResult_t {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match result_name(*self) {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "unknown result code {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_read_without_a_library() {
        assert_eq!(ncclResult_t::ncclInvalidUsage.to_string(), "ncclInvalidUsage (5)");
        assert_eq!(ncclResult_t(4711).to_string(), "unknown result code 4711");
        let missing = MissingFunction {
            function: Function::ncclCommQueryProperties,
            version: Version::from_code(22809),
            origin: Origin::File("/lib/libnccl.so.2".into()),
        };
        assert_eq!(
            missing.to_string(),
            "ncclCommQueryProperties is not in NCCL 2.28.9 (/lib/libnccl.so.2): NCCL 2.29.7 has it"
        );
    }

    #[test]
    fn load_errors_say_what_to_do() {
        let tried = vec![Tried { name: "libnccl.so.2".into(), reason: "no such file".into() }];
        let text = LoadError::NotFound { tried }.to_string();
        assert!(text.contains("libnccl.so.2: no such file") && text.contains(LIBRARY_ENV), "{text}");
        let unsupported =
            |code| LoadError::Unsupported { found: Version::from_code(code), origin: Origin::Custom };
        let text = unsupported(22703).to_string();
        assert!(
            text.contains("NCCL 2.27.3 (a custom loader)") && text.contains("start with 2.28.3"),
            "{text}"
        );
        let text = unsupported(22805).to_string();
        assert!(text.contains("NCCL 2.28.5") && text.contains("2.28.7 or newer"), "{text}");
        let text = unsupported(22903).to_string();
        assert!(text.contains("2.29.3") && text.contains("2.29.5 or newer"), "{text}");
        let text = LoadError::SeveralLibraries {
            loaded: vec!["/a/libnccl.so.2".into(), "/b/libnccl.so.2".into()],
            requested: None,
        }
        .to_string();
        assert!(text.contains("/a/libnccl.so.2; /b/libnccl.so.2"), "{text}");
        let text = LoadError::SeveralLibraries {
            loaded: vec!["/a/libnccl.so.2".into()],
            requested: Some("/b/libnccl.so.2".into()),
        }
        .to_string();
        assert!(text.starts_with("/b/libnccl.so.2 would be a second NCCL"), "{text}");
    }
}
