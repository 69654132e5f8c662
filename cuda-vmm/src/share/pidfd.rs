//! Handles taken out of the exporter's process (`pidfd_getfd`).

use super::{Descriptor, DescriptorError, Transport, check_import, memory_of};
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::physical::PhysicalMemory;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::os::fd::{AsRawFd, OwnedFd};

/// Memory that other processes may fetch by the bytes of [`descriptor`](Self::descriptor). It holds the file descriptor open: drop it
/// when every importer is done.
#[derive(Debug)]
pub struct PidExport {
    /// Open for the importers; its number is in the descriptor.
    _fd: OwnedFd,
    descriptor: [u8; Descriptor::BYTES],
}

impl PidExport {
    /// Exports memory.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if it cannot be exported as a file descriptor, or [`Error::Call`].
    pub fn new(memory: &PhysicalMemory) -> Result<Self> {
        let fd = memory.export_fd()?;
        let pid = getpid().as_raw_nonzero().get().unsigned_abs();
        let transport = Transport::Pidfd { pid, fd: fd.as_raw_fd() };
        let descriptor = Descriptor::of(memory, transport)?.encode();
        Ok(Self { _fd: fd, descriptor })
    }

    /// What importers need, to be sent to them in any way. It names this process: both sides must see the same process ids.
    #[must_use]
    pub fn descriptor(&self) -> &[u8; Descriptor::BYTES] {
        &self.descriptor
    }
}

/// Imports memory from a [`PidExport`]'s descriptor.
///
/// Only take descriptors from a process that you trust: the bytes name a process and one of its file descriptors, and whichever
/// descriptor that is, the driver is asked to import it.
///
/// # Errors
/// [`Error::Descriptor`]; [`Error::Transport`] if the exporter is gone or this process may not trace it (in containers, or with
/// `kernel.yama.ptrace_scope` of 1 or more); [`Error::ImportMismatch`]; [`Error::Call`].
pub fn fetch(cuda: &Cuda, bytes: &[u8]) -> Result<PhysicalMemory> {
    let descriptor = Descriptor::decode(bytes)?;
    let described = memory_of(&descriptor)?;
    let Transport::Pidfd { pid, fd } = descriptor.transport else {
        let found = descriptor.transport.name();
        return Err(DescriptorError::Transport { found, expected: "pidfd_getfd" }.into());
    };
    let impossible = DescriptorError::Field { field: "process id", value: pid.into() };
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(impossible)?;
    let failed = |step| move |errno: rustix::io::Errno| Error::Transport { step, cause: errno.into() };
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed("opening the exporting process"))?;
    let fd = pidfd_getfd(&process, fd, PidfdGetfdFlags::empty())
        .map_err(failed("taking a file descriptor out of the exporting process"))?;
    let memory = PhysicalMemory::import_fd(cuda, fd, descriptor.size())?;
    check_import(cuda, described, memory)
}
