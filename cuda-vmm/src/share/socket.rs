//! Handles over a connected Unix socket (SCM_RIGHTS).

use super::{
    Deadline, Descriptor, DescriptorError, FabricHandle, Transport, check_import, memory_of, receive_bytes,
    send_bytes,
};
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::handle::Handle;
use crate::physical::PhysicalMemory;
use crate::properties::HandleTypes;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Sends memory to the process at the other end of a connected Unix stream socket: as a file descriptor if it can be exported as
/// one, else as a FABRIC handle. The memory may be dropped as soon as this returns if a descriptor travelled (it keeps the memory
/// alive); a FABRIC handle keeps nothing alive.
///
/// After an error a part of the message may be on its way: close the socket.
///
/// # Errors
/// [`Error::NotExportable`], [`Error::TimedOut`] if the other side does not read within `timeout`, [`Error::Transport`].
pub fn send(socket: impl AsFd, memory: &PhysicalMemory, timeout: Duration) -> Result<()> {
    let describe = |transport| Descriptor::of(memory, transport);
    let deadline = Deadline::new("sending memory to another process", timeout);
    send_handle(socket.as_fd(), memory.handle(), memory.handle_types(), describe, &deadline)
}

/// Receives memory that [`send`] sent, and imports it.
///
/// # Errors
/// [`Error::TimedOut`], [`Error::PeerClosed`], [`Error::Descriptor`] for bytes that are no descriptor of memory,
/// [`Error::DescriptorCount`] if the file descriptor is missing (for example at the limit of open files) or there are several,
/// [`Error::ImportMismatch`], or [`Error::Call`] if the driver does not accept what came. Descriptors that came with a refused message are
/// closed.
pub fn receive(cuda: &Cuda, socket: impl AsFd, timeout: Duration) -> Result<PhysicalMemory> {
    let deadline = Deadline::new("receiving memory from another process", timeout);
    let (descriptor, arrived) = receive_handle(socket.as_fd(), &deadline)?;
    let described = memory_of(&descriptor)?;
    let memory = match arrived {
        Arrived::Fd(fd) => PhysicalMemory::import_fd(cuda, fd, descriptor.size())?,
        Arrived::Fabric(handle) => PhysicalMemory::import_fabric(cuda, &handle, descriptor.size())?,
    };
    check_import(cuda, described, memory)
}

/// A handle that came from another process.
pub(crate) enum Arrived {
    Fd(OwnedFd),
    Fabric(FabricHandle),
}

/// Sends what a handle stands for: as a file descriptor if it can be, else as a FABRIC handle.
pub(crate) fn send_handle(
    socket: BorrowedFd<'_>,
    handle: &Handle,
    types: HandleTypes,
    describe: impl FnOnce(Transport) -> Result<Descriptor>,
    deadline: &Deadline,
) -> Result<()> {
    if types.contains(HandleTypes::POSIX_FD) {
        let fd = handle.export_fd(types)?;
        send_bytes(socket, &describe(Transport::Socket)?.encode(), Some(fd.as_fd()), deadline)
    } else {
        let fabric = handle.export_fabric(types)?;
        send_bytes(socket, &describe(Transport::Fabric(fabric))?.encode(), None, deadline)
    }
}

/// Receives what [`send_handle`] sent.
pub(crate) fn receive_handle(socket: BorrowedFd<'_>, deadline: &Deadline) -> Result<(Descriptor, Arrived)> {
    let mut bytes = [0; Descriptor::BYTES];
    let (mut fds, truncated) = receive_bytes(socket, &mut bytes, deadline)?;
    let descriptor = Descriptor::decode(&bytes)?;
    let expected = usize::from(descriptor.transport == Transport::Socket);
    if fds.len() != expected || truncated {
        return Err(Error::DescriptorCount { received: fds.len(), expected, truncated });
    }
    let arrived = match descriptor.transport {
        Transport::Socket => {
            let none = Error::DescriptorCount { received: 0, expected, truncated };
            Arrived::Fd(fds.pop().ok_or(none)?)
        }
        Transport::Fabric(handle) => Arrived::Fabric(handle),
        Transport::Pidfd { .. } => {
            let found = descriptor.transport.name();
            return Err(DescriptorError::Transport { found, expected: Transport::Socket.name() }.into());
        }
    };
    Ok((descriptor, arrived))
}
