//! Streams, events, graphs and kernels on a GPU, as far as measuring needs them, over the raw driver of `cuda-vmm`.
//!
//! Everything that waits does so for a limited time. Work that is enqueued must end before what it uses is dropped: the functions that
//! enqueue work on memory are unsafe for that reason alone.

mod event;
mod graph;
mod kernel;
mod pinned;
mod stream;

pub use event::Event;
pub use graph::Graph;
pub use kernel::{Function, Module, Shape};
pub use pinned::PinnedWord;
pub use stream::Stream;

use cuda_vmm::sys::CallError;

/// A failure on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The driver refused a call, or reports the failure of earlier work.
    #[error(transparent)]
    Driver(#[from] cuda_vmm::Error),
    /// Work did not end in time. It may still be running: what it uses must not be freed.
    #[error("{what} did not end within {seconds} s; another process on the device, or a rank that is gone?")]
    Late {
        /// What was waited for.
        what: String,
        /// For how long.
        seconds: f64,
    },
}

/// Result of this module.
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

/// Says what was attempted.
trait Attempt<T> {
    fn attempt(self, attempt: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Attempt<T> for Result<T, CallError> {
    fn attempt(self, attempt: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|cause| cuda_vmm::Error::Call { attempt: attempt(), cause }.into())
    }
}
