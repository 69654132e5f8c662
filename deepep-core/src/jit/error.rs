//! What can go wrong between a kernel's source and its machine code.

use std::path::PathBuf;

/// A kernel could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JitError {
    /// No NVRTC was found.
    #[error(
        "no NVRTC found ({}); install CUDA's libnvrtc (for example the Python package nvidia-cuda-nvrtc), or name the \
         library in DEEPEP_NVRTC; or build deepep-core with its feature `aot`", .tried.join("; ")
    )]
    NotFound {
        /// Each name that was tried, with the dynamic linker's answer.
        tried: Vec<String>,
    },

    /// The library lacks a function.
    #[error("{} is no usable NVRTC: it has no {symbol}; version 12.0 or newer is needed", .library.display())]
    Missing {
        /// The library.
        library: PathBuf,
        /// The function.
        symbol: &'static str,
    },

    /// The library is older than what the kernels need.
    #[error("{} is NVRTC {major}.{minor}; version {need} or newer is needed for {what}", .library.display())]
    TooOld {
        /// The library.
        library: PathBuf,
        /// Its version.
        major: i32,
        /// Its version.
        minor: i32,
        /// The version that is needed.
        need: &'static str,
        /// What it is needed for.
        what: String,
    },

    /// An NVRTC call failed.
    #[error("{call} of {} failed: {name} ({code})", .library.display())]
    Call {
        /// The library.
        library: PathBuf,
        /// The function.
        call: &'static str,
        /// NVRTC's result code.
        code: i32,
        /// NVRTC's name for it.
        name: String,
    },

    /// The compiler refused the source.
    #[error("NVRTC {major}.{minor} could not compile {program} for {arch}: {name} ({code})\n{log}")]
    Compile {
        /// Name of the program.
        program: &'static str,
        /// Architecture.
        arch: String,
        /// Version of the compiler.
        major: i32,
        /// Version of the compiler.
        minor: i32,
        /// NVRTC's result code.
        code: i32,
        /// NVRTC's name for it.
        name: String,
        /// What the compiler said.
        log: String,
    },

    /// The kernel was not compiled into this build, and there is no usable NVRTC that could compile it now.
    #[error(
        "{program} for {arch} is not among the kernels of this build ({embedded}; DEEPEP_AOT_ARCHS and DEEPEP_AOT_RANKS say at build \
         time which are), and can't be compiled now: {compiler}"
    )]
    NotEmbedded {
        /// The kernel.
        program: String,
        /// Architecture of the device.
        arch: String,
        /// What this build has.
        embedded: String,
        /// Why NVRTC is of no help.
        compiler: Box<JitError>,
    },
}
