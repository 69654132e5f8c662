//! Handing memory to other processes.
//!
//! Three ways, all with the same [`Descriptor`] that says what the memory is:
//! - [`send`] and [`receive`]: file descriptors over a connected Unix socket. Works everywhere and needs no rights; the default.
//! - [`PidExport`] and [`fetch`]: the importer takes the descriptor out of the exporter's process (`pidfd_getfd`). Needs no
//!   connection, only the exchange of a few bytes, but the right to trace the exporter.
//! - FABRIC handles, inside the same descriptor: the only way to another host. They pin nothing: the exporter must keep the memory
//!   alive until every importer is done.
//!
//! Once memory is imported, it lives until its last holder in any process is gone: the exporter may drop its handle, or die.
//!
//! Bytes from another process are checked before anything is done with them; what a descriptor says of location and size is then
//! compared with what the driver says of the imported memory.

mod descriptor;
mod fabric;
mod pidfd;
mod socket;

pub use descriptor::{Descriptor, DescriptorError, Kind, Transport};
pub use fabric::FabricHandle;
pub use pidfd::{PidExport, fetch};
pub use socket::{receive, send};

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::location::Location;
use crate::physical::PhysicalMemory;

/// Compares imported memory with its descriptor. Ordinals differ between processes, so that devices are compared by identity.
fn check_import(cuda: &Cuda, descriptor: &Descriptor, memory: PhysicalMemory) -> Result<PhysicalMemory> {
    let same = match (descriptor.location, memory.location()) {
        (Location::Device(_), Location::Device(ordinal)) => {
            cuda.device(ordinal)?.uuid()? == descriptor.device_uuid
        }
        (described, found) => described == found,
    };
    if same {
        Ok(memory)
    } else {
        Err(Error::ImportMismatch { described: descriptor.location, found: memory.location() })
    }
}
