//! Bytes and file descriptors over a Unix stream socket, under a deadline.

use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Sends bytes, and a file descriptor with the first of them.
pub(crate) fn send_bytes(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
    deadline: &Deadline,
) -> Result<()> {
    let fds: Vec<_> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut sent = 0;
    while sent < bytes.len() {
        deadline.wait(socket, PollFlags::OUT)?;
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        // The descriptor goes with the first byte.
        if sent == 0 && !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            let cause = std::io::Error::other("no space for one file descriptor");
            return Err(Error::Transport { step: deadline.step, cause });
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[IoSlice::new(&bytes[sent..])], &mut ancillary, flags) {
            Ok(count) => sent += count,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(errno) => return Err(Error::Transport { step: deadline.step, cause: errno.into() }),
        }
    }
    Ok(())
}

/// Fills `bytes`, and returns the file descriptors that came with them and whether the kernel dropped some.
pub(crate) fn receive_bytes(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    deadline: &Deadline,
) -> Result<(Vec<OwnedFd>, bool)> {
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
                Err(errno) => return Err(Error::Transport { step: deadline.step, cause: errno.into() }),
            };
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(owned) = part {
                fds.extend(owned);
            }
        }
        truncated |= message.flags.contains(rustix::net::ReturnFlags::CTRUNC);
        if message.bytes == 0 {
            return Err(Error::PeerClosed { step: deadline.step, received, expected: bytes.len() });
        }
        received += message.bytes;
    }
    Ok((fds, truncated))
}

/// A bounded wait for a socket.
pub(crate) struct Deadline {
    step: &'static str,
    end: Instant,
    after: Duration,
}

impl Deadline {
    pub(crate) fn new(step: &'static str, after: Duration) -> Self {
        // A timeout beyond the clock's range is a year, so that arithmetic cannot overflow.
        let after = after.min(Duration::from_secs(365 * 24 * 3600));
        Self { step, end: Instant::now() + after, after }
    }

    /// Ends at a moment.
    pub(crate) fn until(step: &'static str, end: Instant) -> Self {
        Self { step, end, after: end.saturating_duration_since(Instant::now()) }
    }

    /// Waits until the socket can be read or written.
    fn wait(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<()> {
        loop {
            let left = self.end.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) as _ };
            match poll(&mut [PollFd::from_borrowed_fd(socket, flags)], Some(&left)) {
                Ok(0) => return Err(Error::TimedOut { step: self.step, after: self.after }),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::Transport { step: self.step, cause: errno.into() }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    const SHORT: Duration = Duration::from_millis(50);
    const LENGTH: usize = 128;

    fn short() -> Deadline {
        Deadline::new("a short test", SHORT)
    }

    fn long() -> Deadline {
        Deadline::new("a test", Duration::from_secs(10))
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let (here, _there) = UnixStream::pair().unwrap();
        let error = receive_bytes(here.as_fd(), &mut [0; LENGTH], &short()).unwrap_err();
        assert!(matches!(error, Error::TimedOut { after: SHORT, .. }), "{error}");
    }

    #[test]
    fn a_truncated_message_says_how_much_came() {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(&[0; 100]).unwrap();
        drop(there);
        let error = receive_bytes(here.as_fd(), &mut [0; LENGTH], &long()).unwrap_err();
        assert!(matches!(error, Error::PeerClosed { received: 100, expected: 128, .. }), "{error}");
    }

    #[test]
    fn bytes_and_a_descriptor_arrive_together() {
        let (here, there) = UnixStream::pair().unwrap();
        let bytes = [5; LENGTH];
        send_bytes(there.as_fd(), &bytes, Some(here.as_fd()), &long()).unwrap();
        let mut got = [0; LENGTH];
        let (fds, truncated) = receive_bytes(here.as_fd(), &mut got, &long()).unwrap();
        assert_eq!((got, fds.len(), truncated), (bytes, 1, false));
    }

    #[test]
    fn a_receiver_that_never_reads_ends_the_send() {
        let (here, there) = UnixStream::pair().unwrap();
        let bytes = [5; LENGTH];
        let error = loop {
            if let Err(error) = send_bytes(there.as_fd(), &bytes, None, &short()) {
                break error;
            }
        };
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        drop(here);
        let error = send_bytes(there.as_fd(), &bytes, None, &long()).unwrap_err();
        assert!(matches!(error, Error::Transport { .. }), "{error}");
    }
}
