//! The heap as a window of an NCCL communicator, for kernels that go through GIN or take NCCL's own handles.
//!
//! NVLink needs none of it: the heap's own addresses are all that its kernels use. Nothing in NCCL or in the environment is changed for a
//! window. What a process's environment keeps out of windows (`NCCL_ELASTIC_BUFFER_REGISTER`, `NCCL_WIN_STRIDE`,
//! `NCCL_SYM_REUSE_SYSMEM_HANDLES`, which NCCL reads once for all communicators) is refused with what to set; what belongs to one window, strict ordering, is a flag of that window.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nccl_gin::sys::Version;
use nccl_gin::{Communicator, Window, WindowFlags, WindowMemory};

use super::{Heap, Segments};
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree;
use crate::error::{Error, Result};

/// The first NCCL whose windows may keep the order of writes through GIN.
const STRICT_SINCE: Version = Version::from_code(22907);

/// A library that takes a heap in for kernels of its own.
///
/// [`Communicator`] of `nccl-gin` is one; an engine with another library implements it over that.
pub trait Registrar {
    /// What comes of it. It keeps the heap's memory alive.
    type Registration;

    /// Takes this rank's range of `heap` in. Collective among the ranks of `bootstrap`, which are those of the buffer: if any step fails on
    /// any rank, every rank gets an error.
    ///
    /// # Errors
    /// What the library refuses, on this rank or on another one.
    fn register(&self, heap: &Arc<Heap>, bootstrap: &dyn Bootstrap) -> Result<Self::Registration>;
}

/// A heap that is a window of a communicator (`ncclWindow_t`).
///
/// It keeps the heap's memory alive. Close it when no kernel of any rank uses the window any more, and before the communicator is closed; one that
/// is dropped instead is given back when its communicator is closed, and the memory with it.
#[doc(alias = "ncclCommWindowRegister")]
pub struct HeapWindow {
    window: Window,
    heap: Arc<Heap>,
}

impl HeapWindow {
    /// The window: its handle for kernels, peers' addresses as NCCL maps them.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// The heap. An offset in it is the same offset in the window.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Whether writes through GIN arrive in the order in which they were made, which signals by address need. NCCL before 2.29.7 has no such
    /// windows.
    pub fn is_strictly_ordered(&self) -> bool {
        self.window.flags().contains(WindowFlags::STRICT_ORDERING)
    }

    /// Gives the window back. Local, but no kernel of any rank may use it any more.
    ///
    /// # Errors
    /// [`Nccl`](Error::Nccl); the window is then kept until its communicator is closed.
    #[doc(alias = "ncclCommWindowDeregister")]
    pub fn close(self) -> Result<()> {
        Ok(self.window.close()?)
    }
}

impl fmt::Debug for HeapWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapWindow")
            .field("heap", &self.heap)
            .field("strictly_ordered", &self.is_strictly_ordered())
            .finish_non_exhaustive()
    }
}

/// This rank's range.
struct Range {
    base: NonNull<c_void>,
    heap: Arc<Heap>,
}

// SAFETY: the address is only told; what lies there belongs to the heap, which may be used from any thread.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Range {
    fn new(heap: &Arc<Heap>) -> Result<Self> {
        let base = ptr::with_exposed_provenance_mut(heap.base() as usize);
        let base = NonNull::new(base)
            .ok_or_else(|| Error::invalid("heap", "at address 0", "a heap has memory at an address"))?;
        Ok(Self { base, heap: heap.clone() })
    }
}

// SAFETY: a heap's range stays mapped, for the device of its rank, until the heap is dropped (what `Heap::from_parts` asks for), and neither its base nor
// its length changes.
unsafe impl WindowMemory for Range {
    fn address(&self) -> NonNull<c_void> {
        self.base
    }

    fn len(&self) -> usize {
        self.heap.bytes()
    }
}

impl Registrar for Communicator {
    type Registration = HeapWindow;

    /// Makes a window of the heap, strictly ordered where NCCL has that. The communicator's ranks are the buffer's, in the same order.
    ///
    /// Host memory in the heap needs NCCL 2.30. That of a [hybrid](Segments::HybridElastic) heap is the same on all ranks and imported on all but
    /// one, which the driver does not export again: it needs NCCL 2.30.4 and `NCCL_SYM_REUSE_SYSMEM_HANDLES=1`, with which NCCL maps what each
    /// rank has already. [Elastic](Segments::Elastic) heaps, whose host memory is each rank's own, need that setting to be off. Waits for other ranks as long as the communicator's configuration says.
    fn register(&self, heap: &Arc<Heap>, bootstrap: &dyn Bootstrap) -> Result<HeapWindow> {
        let strict = self.nccl().version() >= STRICT_SINCE;
        let flags = if strict { WindowFlags::STRICT_ORDERING } else { WindowFlags::empty() };
        let memory = agree(bootstrap, "preparing an NCCL window", prepare(self, heap, flags, bootstrap))?;
        let window = nccl_gin::Communicator::register(self, memory, flags);
        let registered = window.map(|window| HeapWindow { window, heap: heap.clone() }).map_err(Error::from);
        // A window of this rank whose peers have none is given back when it is dropped, with the communicator.
        agree(bootstrap, "registering the heap as an NCCL window", registered)
    }
}

/// What can be refused before any rank waits in NCCL.
fn prepare(
    communicator: &Communicator,
    heap: &Arc<Heap>,
    flags: WindowFlags,
    bootstrap: &dyn Bootstrap,
) -> Result<Arc<dyn WindowMemory>> {
    let here = (communicator.rank() as usize, communicator.size() as usize);
    let wanted = (bootstrap.rank(), bootstrap.world_size());
    if here != wanted {
        let (rank, size) = here;
        let need = format!("the buffer has rank {} of {}", wanted.0, wanted.1);
        return Err(Error::invalid("communicator", format!("rank {rank} of {size}"), need));
    }
    if heap.segments() == Segments::Elastic && heap.ranks() > 1 && communicator.reuses_host_memory() {
        return Err(Error::Nccl(nccl_gin::Error::Environment {
            setting: "NCCL_SYM_REUSE_SYSMEM_HANDLES",
            reason: "NCCL would map this rank's host memory in place of every other rank's, and in this heap each has its own",
            advice: "unset it before each process's first call of NCCL, or make the heap a hybrid one",
        }));
    }
    let range = Range::new(heap)?;
    communicator.check_memory(&range, flags)?;
    Ok(Arc::new(range))
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
