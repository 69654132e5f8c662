//! Kernels compiled at run time: sources embedded in the crate, NVRTC found when it is first needed, results kept on disk.
//!
//! A kernel is compiled for one exact architecture (`sm_90a`, `sm_100a`, …) into machine code, so that loading it later takes no
//! compiler. The sources need no header besides their own: neither a CUDA toolkit nor an include path.
//!
//! With the crate's feature `aot` kernels are compiled when the crate is built, by nvcc, and need no NVRTC at run time: see [`Embedded`].
//!
//! ```no_run
//! use deepep_core::jit::{Arch, Cache, Program, Supply};
//!
//! let supply = Supply::new(None, Cache::default_location());
//! let cubin = supply.get(Program::Barrier { ranks: 2 }, Arch::new(9, 0))?;
//! println!("{} bytes", cubin.image().len());
//! # Ok::<(), deepep_core::jit::JitError>(())
//! ```

mod cache;
mod collective;
mod compiler;
mod embedded;
mod error;
#[cfg(test)]
mod multimem_tests;
mod nvrtc;
#[cfg(test)]
mod on_cpu_tests;
pub(crate) mod params;
mod resources;
mod search;
mod sizes;
mod source;
mod supply;

pub use cache::Cache;
pub use collective::{Collective, CollectiveKind, Element, Way};
pub use compiler::{Arch, Compiler, Cubin};
pub use embedded::Embedded;
pub use error::JitError;
pub use nvrtc::NVRTC_ENV;
pub use resources::Resources;
pub use sizes::PacketSizes;
pub use source::Program;
pub(crate) use source::{
    BARRIER_THREADS, COMBINE_CONTROL_BYTES, DISPATCH_CONTROL_BYTES, PACKET_COMBINE_THREADS,
    PACKET_CONTROL_BYTES, PACKET_DISPATCH_THREADS, PACKET_FEW_TOKENS, PIECE_BYTES, PULL_PARTS, SUM_THREADS,
    THREADS,
};
#[cfg(test)]
pub(crate) use supply::Alter;
pub use supply::Supply;
