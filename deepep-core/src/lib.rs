//! Mixture-of-experts communication over memory that all ranks of a host share.
//!
//! Every rank holds tokens. *Dispatch* sends each token to the ranks that own its top-k experts; the experts work; *combine*
//! brings their outputs back to where the tokens came from and sums them. All of it goes through one symmetric heap: a range
//! of memory of the same layout on every rank, which every other rank can read and write.
//!
//! # Feature `aot`
//!
//! By default the build needs no CUDA, and kernels are compiled when they are first needed, by NVRTC. With the feature `aot` nvcc compiles them when
//! the crate is built, and NVRTC is needed for those only that the build was not asked for; [`jit::Embedded`] says how to choose. All of them,
//! for two architectures, are 576 kernels and 25 MB, and take two processor cores three to four minutes.

mod backend;
pub mod bootstrap;
mod buffer;
mod collectives;
mod config;
pub mod device;
pub mod domain;
pub mod error;
mod handle;
pub mod jit;
pub mod layout;
mod ops;
mod stream;
pub mod symmetric;
pub mod tensor;

pub use backend::Counts;
pub use bootstrap::Bootstrap;
pub use buffer::{Builder, ElasticBuffer};
pub use collectives::{Collectives, CollectivesBuilder};
pub use config::{BackendKind, Config, Reduction};
pub use error::{Error, Result};
pub use handle::{Dispatched, Handle};
pub use ops::{CombineArgs, DispatchArgs};
pub use stream::{Event, EventRef, StreamRef};
