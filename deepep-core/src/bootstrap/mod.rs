//! How ranks find each other and agree before they share memory.
//!
//! A [`Bootstrap`] is a small collective service: every rank contributes bytes and gets everybody's. It is used while a buffer is
//! built and never on the path of an operation. Two implementations are here: [`threads`] for ranks of one process and [`tcp`]
//! for processes, which also reads the variables that torchrun, Slurm and Open MPI set. An engine that has its own
//! communicator implements the trait over it.
//!
//! Every call is bounded by [`Bootstrap::timeout`], and an error names the ranks that are missing.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;

pub mod agree;
pub mod env;
mod frame;
mod rendezvous;
pub mod sockets;
pub mod tcp;
pub mod threads;

pub use env::Launch;
pub use tcp::TcpBootstrap;
pub use threads::{ThreadBootstrap, thread_group};

/// Longest contribution to one [`Bootstrap::all_gather`], in bytes.
pub const MAX_CONTRIBUTION: usize = 16 << 20;

/// A collective service among `world_size` ranks.
///
/// All ranks make the same calls in the same order. A call that fails on one rank fails on every rank that waits in it, or these
/// run into the timeout; after a failure the service stays failed.
pub trait Bootstrap: Send + Sync {
    /// This rank, `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// The longest that a call waits for other ranks.
    fn timeout(&self) -> Duration;

    /// Gives `bytes` to every rank and returns every rank's bytes, in rank order. Lengths may differ.
    ///
    /// # Errors
    /// [`PeerTimeout`](crate::Error::PeerTimeout) or [`PeerLeft`](crate::Error::PeerLeft) with the missing ranks;
    /// [`Invalid`](crate::Error::Invalid) for more than [`MAX_CONTRIBUTION`] bytes.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<B: Bootstrap + ?Sized> Bootstrap for $pointer {
            fn rank(&self) -> usize {
                (**self).rank()
            }
            fn world_size(&self) -> usize {
                (**self).world_size()
            }
            fn timeout(&self) -> Duration {
                (**self).timeout()
            }
            fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
                (**self).all_gather(bytes)
            }
            fn barrier(&self) -> Result<()> {
                (**self).barrier()
            }
        }
    )*};
}
forward!(&B, Box<B>, Arc<B>);
