//! Handing memory to other processes.
//!
//! Three ways, all with the same [`Descriptor`] that says what the memory is:
//! - [`send`] and [`receive`]: file descriptors over a connected Unix socket. Works everywhere and needs no rights; the default.
//! - [`PidExport`] and [`fetch`]: the importer takes the descriptor out of the exporter's process (`pidfd_getfd`). Needs no
//!   connection, only the exchange of a few bytes, but the right to trace the exporter.
//! - FABRIC handles, inside the same descriptor: the only way to another host. They pin nothing: the exporter must keep the memory
//!   alive until every importer is done.
//!
//! [Multicast objects](crate::multicast::Incomplete) travel over sockets and as FABRIC handles in the same way, with methods of their own.
//!
//! Once memory is imported, it lives until its last holder in any process is gone: the exporter may drop its handle, or die.
//!
//! Bytes from another process are checked before anything is done with them; what a descriptor says of location and size is then
//! compared with what the driver says of the imported memory.

mod descriptor;
mod fabric;
mod pidfd;
mod socket;
mod wire;

pub use descriptor::{Descriptor, DescriptorError, Kind, Transport};
pub use fabric::FabricHandle;
pub use pidfd::{PidExport, fetch};
pub(crate) use socket::{Arrived, receive_handle, send_handle};
pub use socket::{receive, send};
pub(crate) use wire::{Deadline, receive_bytes, send_bytes};

use crate::cuda::Cuda;
use crate::device::Uuid;
use crate::error::{Error, Result};
use crate::location::Location;
use crate::physical::PhysicalMemory;

/// Where a descriptor says that memory is.
fn memory_of(descriptor: &Descriptor) -> Result<(Location, Uuid)> {
    match descriptor.kind {
        Kind::Memory { location, device_uuid } => Ok((location, device_uuid)),
        other => Err(DescriptorError::Kind { found: other.name(), expected: "memory" }.into()),
    }
}

/// Compares imported memory with what its descriptor said. Ordinals differ between processes, so that devices are compared by
/// identity.
fn check_import(cuda: &Cuda, described: (Location, Uuid), memory: PhysicalMemory) -> Result<PhysicalMemory> {
    let same = match (described.0, memory.location()) {
        (Location::Device(_), Location::Device(ordinal)) => cuda.device(ordinal)?.uuid()? == described.1,
        (described, found) => described == found,
    };
    if same {
        Ok(memory)
    } else {
        Err(Error::ImportMismatch { described: described.0, found: memory.location() })
    }
}
