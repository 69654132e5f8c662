//! Mixture-of-experts communication over memory that all ranks of a host share.
//!
//! Every rank holds tokens. *Dispatch* sends each token to the ranks that own its top-k experts; the experts work; *combine*
//! brings their outputs back to where the tokens came from and sums them. All of it goes through one symmetric heap: a range
//! of memory of the same layout on every rank, which every other rank can read and write.
//!
//! # Backends
//!
//! On GPUs (Hopper or later, linked by NVLink or shared) operations are kernels on the caller's streams; where there is none they run on CPUs over a
//! driver in software, with the same protocol and the same bits. [`BackendKind::Auto`] takes GPUs if it finds some. Ranks are threads or
//! processes of one host; several may share a GPU.
//!
//! On GPUs a call returns before it has run, and its tensors belong to it until then: its [`Event`] says when, and
//! [`ElasticBuffer::synchronize`] when everything has. A dispatch waits only for its counts, and [without
//! them](DispatchArgs::without_counts) for nothing: then calls can be captured in a CUDA graph and replayed, with other routes each time. What
//! goes wrong on the device is reported by the first wait after it. Without a stream of the caller's, operations run on one
//! of the buffer's own, which is not ordered with the device's default stream.
//!
//! # Feature `aot`
//!
//! By default the build needs no CUDA, and kernels are compiled when they are first needed, by NVRTC. With the feature `aot` nvcc compiles them when
//! the crate is built, and NVRTC is needed for those only that the build was not asked for; [`jit::Embedded`] says how to choose. All of them,
//! for two architectures, are some 700 kernels and tens of megabytes, and take minutes of processor time: who needs few numbers of ranks names them.

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
mod left_behind;
mod ops;
mod stream;
pub mod symmetric;
pub mod tensor;
mod tune;

pub use backend::Counts;
pub use bootstrap::Bootstrap;
pub use buffer::{Builder, ElasticBuffer};
pub use collectives::{Collectives, CollectivesBuilder};
pub use config::{BackendKind, Config, Reduction};
pub use error::{Error, Result};
pub use handle::{Dispatched, Handle};
pub use ops::{CombineArgs, DispatchArgs};
pub use stream::{Event, EventRef, StreamRef};
pub use tune::CollectiveLimits;
