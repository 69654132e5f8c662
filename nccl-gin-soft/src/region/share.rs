//! Memory of one process in another: exported allocation by allocation, mapped in one piece.

use crate::cuda::Cuda;
use crate::error::Result;
use crate::net::MAX_FDS;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Addresses are reserved with this alignment, and the owner's offset inside it is kept: every allocation stays as aligned as it was.
const ALIGNMENT: u64 = 2 << 20;

/// What a range consists of.
pub(crate) struct Exported {
    /// Of the first allocation, inside [`ALIGNMENT`].
    pub(crate) lead: u64,
    /// Of the range, inside the first allocation.
    pub(crate) offset: u64,
    /// Length and descriptor of each allocation.
    pub(crate) parts: Vec<(u64, OwnedFd)>,
}

/// Exports the allocations that a range consists of; `None` if they are not all of a kind that can be shared, or too many. The context must be current.
pub(crate) fn export(cuda: &Cuda, base: u64, size: u64) -> Option<Exported> {
    let end = base.checked_add(size)?;
    let mut at = base;
    let mut out: Option<Exported> = None;
    while at < end {
        let (start, length) = cuda.allocation(at)?;
        let exported = out.get_or_insert_with(|| Exported {
            lead: start % ALIGNMENT,
            offset: base - start,
            parts: Vec::new(),
        });
        let first = exported.parts.is_empty();
        if length == 0 || (!first && start != at) || exported.parts.len() == MAX_FDS {
            return None;
        }
        exported.parts.push((length, cuda.export(start)?));
        at = start + length;
    }
    out
}

/// Another rank's memory, mapped here.
pub(crate) struct Mapping {
    cuda: Arc<Cuda>,
    reserved: (u64, u64),
    parts: Vec<(u64, u64)>,
    offset: u64,
    own_device: bool,
}

impl Mapping {
    /// Maps allocations one behind the other. The context must be current.
    pub(crate) fn import(cuda: &Arc<Cuda>, exported: &Exported) -> Result<Self> {
        let whole: u64 = exported.parts.iter().map(|(length, _)| length).sum();
        let size = (exported.lead + whole).next_multiple_of(ALIGNMENT);
        let address = cuda.reserve(size, ALIGNMENT)?;
        let mut mapping = Self {
            cuda: Arc::clone(cuda),
            reserved: (address, size),
            parts: Vec::new(),
            offset: exported.lead + exported.offset,
            own_device: false,
        };
        let mut at = address + exported.lead;
        for (length, fd) in &exported.parts {
            // A failure drops `mapping`, which undoes what is there.
            mapping.own_device |= cuda.map_import(fd.as_fd(), at, *length)?;
            mapping.parts.push((at, *length));
            at += length;
        }
        Ok(mapping)
    }

    /// Whether some of it is memory of the very device that it is mapped for: the other rank shares this rank's GPU.
    pub(crate) fn is_own_device(&self) -> bool {
        self.own_device
    }

    /// Address of the registration's start.
    pub(crate) fn start(&self) -> u64 {
        self.reserved.0 + self.offset
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Whoever drops a registration has quiesced it: that is NCCL's rule, and the agent was stopped before the rest goes.
        let Ok(_entered) = self.cuda.enter("unmapping another rank's memory") else { return };
        for (address, size) in self.parts.drain(..) {
            self.cuda.unmap(address, size);
        }
        self.cuda.free_reservation(self.reserved.0, self.reserved.1);
    }
}
