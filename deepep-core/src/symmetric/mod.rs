//! Symmetric memory: ranges of the same layout on every rank, each mapped by all ranks of the host.
//!
//! A range is made of [segments](Segments): device memory, and host memory if asked for. Each rank creates its own, sends it to its neighbours over Unix
//! sockets, and maps everybody's; the [`Heap`] then translates between ranks, offsets and addresses. Where a communicator of NCCL is given, the heap
//! becomes a [window](HeapWindow) of it.

mod heap;
mod memory;
mod multicast;
mod window;

pub use heap::Heap;
pub use memory::{Request, Segments, allocate};
pub(crate) use multicast::{Multicast, join};
pub use window::{HeapWindow, Registrar};
