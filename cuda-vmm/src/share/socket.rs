//! Handles over a connected Unix socket (SCM_RIGHTS).

use super::{Descriptor, DescriptorError, Transport, check_import};
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::physical::PhysicalMemory;
use crate::properties::HandleTypes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const SENDING: &str = "sending memory to another process";
const RECEIVING: &str = "receiving memory from another process";

/// Sends memory to the process at the other end of a connected Unix stream socket: as a file descriptor if it can be exported as
/// one, else as a FABRIC handle. The memory may be dropped as soon as this returns if a descriptor travelled (it keeps the memory
/// alive); a FABRIC handle keeps nothing alive.
///
/// # Errors
/// [`Error::NotExportable`], [`Error::TimedOut`] if the other side does not read within `timeout`, [`Error::Transport`].
pub fn send(socket: impl AsFd, memory: &PhysicalMemory, timeout: Duration) -> Result<()> {
    let socket = socket.as_fd();
    if memory.handle_types().contains(HandleTypes::POSIX_FD) {
        let fd = memory.export_fd()?;
        let bytes = Descriptor::of(memory, Transport::Socket)?.encode();
        send_bytes(socket, &bytes, Some(fd.as_fd()), timeout)
    } else {
        let handle = memory.export_fabric()?;
        let bytes = Descriptor::of(memory, Transport::Fabric(handle))?.encode();
        send_bytes(socket, &bytes, None, timeout)
    }
}

/// Receives memory that [`send`] sent, and imports it.
///
/// # Errors
/// [`Error::TimedOut`], [`Error::PeerClosed`], [`Error::Descriptor`] for bytes that are no descriptor, [`Error::DescriptorCount`] if
/// the file descriptor is missing (for example at the limit of open files) or there are several, [`Error::ImportMismatch`], or
/// [`Error::Call`] if the driver does not accept what came. Descriptors that came with a refused message are closed.
pub fn receive(cuda: &Cuda, socket: impl AsFd, timeout: Duration) -> Result<PhysicalMemory> {
    let (bytes, mut fds, truncated) = receive_bytes(socket.as_fd(), timeout)?;
    let descriptor = Descriptor::decode(&bytes)?;
    let expected = usize::from(descriptor.transport == Transport::Socket);
    if fds.len() != expected || truncated {
        return Err(Error::DescriptorCount { received: fds.len(), expected, truncated });
    }
    let memory = match descriptor.transport {
        Transport::Socket => {
            let fd = fds.pop().ok_or(Error::DescriptorCount { received: 0, expected, truncated })?;
            PhysicalMemory::import_fd(cuda, fd, descriptor.size())?
        }
        Transport::Fabric(handle) => PhysicalMemory::import_fabric(cuda, &handle, descriptor.size())?,
        Transport::Pidfd { .. } => {
            let found = descriptor.transport.name();
            return Err(DescriptorError::Transport { found, expected: Transport::Socket.name() }.into());
        }
    };
    check_import(cuda, &descriptor, memory)
}

fn send_bytes(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
    timeout: Duration,
) -> Result<()> {
    let deadline = Deadline::new(SENDING, timeout);
    let fds: Vec<_> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut sent = 0;
    while sent < bytes.len() {
        deadline.wait(socket, PollFlags::OUT)?;
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        // The descriptor goes with the first byte.
        if sent == 0 && !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            let source = std::io::Error::other("no space for one file descriptor");
            return Err(Error::Transport { step: SENDING, source });
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[IoSlice::new(&bytes[sent..])], &mut ancillary, flags) {
            Ok(count) => sent += count,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(errno) => return Err(Error::Transport { step: SENDING, source: errno.into() }),
        }
    }
    Ok(())
}

/// One descriptor's bytes, the file descriptors that came with them, and whether the kernel dropped some.
fn receive_bytes(
    socket: BorrowedFd<'_>,
    timeout: Duration,
) -> Result<([u8; Descriptor::BYTES], Vec<OwnedFd>, bool)> {
    let deadline = Deadline::new(RECEIVING, timeout);
    let mut bytes = [0; Descriptor::BYTES];
    let (mut received, mut fds, mut truncated) = (0, Vec::new(), false);
    // Room for more than the one that may come: superfluous ones are to be seen and closed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    while received < bytes.len() {
        deadline.wait(socket, PollFlags::IN)?;
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message =
            match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes[received..])], &mut ancillary, flags) {
                Ok(message) => message,
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(errno) => return Err(Error::Transport { step: RECEIVING, source: errno.into() }),
            };
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(owned) = part {
                fds.extend(owned);
            }
        }
        truncated |= message.flags.contains(rustix::net::ReturnFlags::CTRUNC);
        if message.bytes == 0 {
            return Err(Error::PeerClosed { step: RECEIVING, received, expected: bytes.len() });
        }
        received += message.bytes;
    }
    Ok((bytes, fds, truncated))
}

/// A bounded wait for a socket.
struct Deadline {
    step: &'static str,
    end: Instant,
    after: Duration,
}

impl Deadline {
    fn new(step: &'static str, after: Duration) -> Self {
        // A timeout beyond the clock's range is a year, so that arithmetic cannot overflow.
        let after = after.min(Duration::from_secs(365 * 24 * 3600));
        Self { step, end: Instant::now() + after, after }
    }

    fn wait(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<()> {
        loop {
            let left = self.end.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) as _ };
            match poll(&mut [PollFd::from_borrowed_fd(socket, flags)], Some(&left)) {
                Ok(0) => return Err(Error::TimedOut { step: self.step, after: self.after }),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::Transport { step: self.step, source: errno.into() }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(10);

    #[test]
    fn silence_ends_at_the_deadline() {
        let (here, _there) = UnixStream::pair().unwrap();
        let error = receive_bytes(here.as_fd(), SHORT).unwrap_err();
        assert!(matches!(error, Error::TimedOut { after: SHORT, .. }), "{error}");
    }

    #[test]
    fn a_truncated_message_says_how_much_came() {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(&[0; 100]).unwrap();
        drop(there);
        let error = receive_bytes(here.as_fd(), LONG).unwrap_err();
        assert!(matches!(error, Error::PeerClosed { received: 100, expected: 128, .. }), "{error}");
    }

    #[test]
    fn bytes_and_a_descriptor_arrive_together() {
        let (here, there) = UnixStream::pair().unwrap();
        let bytes = [5; Descriptor::BYTES];
        send_bytes(there.as_fd(), &bytes, Some(here.as_fd()), LONG).unwrap();
        let (got, fds, truncated) = receive_bytes(here.as_fd(), LONG).unwrap();
        assert_eq!((got, fds.len(), truncated), (bytes, 1, false));
    }

    #[test]
    fn a_receiver_that_never_reads_ends_the_send() {
        let (here, there) = UnixStream::pair().unwrap();
        let bytes = [5; Descriptor::BYTES];
        let error = loop {
            if let Err(error) = send_bytes(there.as_fd(), &bytes, None, SHORT) {
                break error;
            }
        };
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        drop(here);
        let error = send_bytes(there.as_fd(), &bytes, None, LONG).unwrap_err();
        assert!(matches!(error, Error::Transport { .. }), "{error}");
    }
}
