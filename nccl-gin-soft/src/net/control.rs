//! Messages between two ranks: fixed sizes, a kind each, and file descriptors inside a host. Never part of the data path.

use super::Deadline;
use super::handle::VERSION;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const MAGIC: u32 = u32::from_le_bytes(*b"gsct");
/// File descriptors that one message may carry.
pub(crate) const MAX_FDS: usize = 16;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Message {
    /// Who connects.
    Hello = 1,
    /// Who answers.
    Welcome = 2,
    /// The ring that the receiver of commands made.
    Ring = 3,
    /// How a step went on one rank.
    Outcome = 4,
    /// A registration, on one rank.
    Offer = 5,
    /// What another rank made of it.
    Verdict = 6,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u32,
    version: u16,
    message: u16,
    length: u32,
    fds: u32,
}

/// A connected stream socket to another rank.
pub(crate) struct Control {
    socket: OwnedFd,
    rank: usize,
}

impl Control {
    /// `rank` is that of the other side, for errors.
    pub(crate) fn new(socket: OwnedFd, rank: usize) -> Self {
        Self { socket, rank }
    }

    pub(crate) fn set_rank(&mut self, rank: usize) {
        self.rank = rank;
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Sends a message, with descriptors (inside a host only).
    pub(crate) fn send<T: Pod>(
        &self,
        message: Message,
        body: &T,
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let header = Header {
            magic: MAGIC,
            version: VERSION as u16,
            message: message as u16,
            length: size_of::<T>() as u32,
            fds: fds.len() as u32,
        };
        let bytes = [bytemuck::bytes_of(&header), bytemuck::bytes_of(body)].concat();
        let mut sent = 0;
        while sent < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(self.protocol(format!("{} descriptors in a message", fds.len())));
            }
            let part = [IoSlice::new(&bytes[sent..])];
            match sendmsg(&self.socket, &part, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, message, deadline)?,
                Err(errno) => return Err(self.gone(errno)),
            }
        }
        Ok(())
    }

    /// Receives the message that must come next, with at most `max_fds` descriptors.
    pub(crate) fn receive<T: Pod>(
        &self,
        message: Message,
        max_fds: usize,
        deadline: Deadline,
    ) -> Result<(T, Vec<OwnedFd>)> {
        let mut header = Header::zeroed();
        let mut fds = Vec::new();
        self.fill(bytemuck::bytes_of_mut(&mut header), &mut fds, message, deadline)?;
        if header.magic != MAGIC || u32::from(header.version) != VERSION {
            return Err(self.protocol(format!("{message:?} expected, and what came is of another protocol")));
        }
        if header.message != message as u16 || header.length as usize != size_of::<T>() {
            return Err(self.protocol(format!(
                "{message:?} of {} bytes expected, and message {} of {} bytes came",
                size_of::<T>(),
                header.message,
                header.length
            )));
        }
        if header.fds as usize != fds.len() || fds.len() > max_fds {
            return Err(self.protocol(format!(
                "{message:?} with {} descriptors, of which {} came; is the limit of open files reached?",
                header.fds,
                fds.len()
            )));
        }
        let mut body = T::zeroed();
        self.fill(bytemuck::bytes_of_mut(&mut body), &mut Vec::new(), message, deadline)?;
        Ok((body, fds))
    }

    fn fill(
        &self,
        bytes: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        message: Message,
        deadline: Deadline,
    ) -> Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut bytes[filled..])];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            match recvmsg(&self.socket, &mut part, &mut ancillary, flags) {
                Ok(received) => {
                    for message in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            fds.extend(rights);
                        }
                    }
                    if received.bytes == 0 {
                        return Err(Error::PeerGone {
                            rank: self.rank,
                            reason: format!("it closed its connection where {message:?} was expected"),
                        });
                    }
                    filled += received.bytes;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, message, deadline)?,
                Err(errno) => return Err(self.gone(errno)),
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, message: Message, deadline: Deadline) -> Result<()> {
        loop {
            let left = deadline.left();
            if left.is_zero() {
                let attempt = format!("waiting for {message:?} with rank {}", self.rank);
                return Err(Error::Deadline { attempt, waited: deadline.whole() });
            }
            match poll(&mut [PollFd::new(&self.socket, flags)], Some(&timespec(left))) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(Error::system("polling a socket")(errno)),
            }
        }
    }

    fn gone(&self, errno: Errno) -> Error {
        Error::PeerGone { rank: self.rank, reason: errno.to_string() }
    }

    fn protocol(&self, reason: String) -> Error {
        Error::Protocol { rank: self.rank, reason }
    }
}

/// For `poll`.
pub(crate) fn timespec(time: std::time::Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    fn pair() -> (Control, Control) {
        let (one, other) = UnixStream::pair().unwrap();
        (Control::new(one.into(), 1), Control::new(other.into(), 0))
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(200))
    }

    #[test]
    fn messages_and_descriptors_arrive() {
        let (one, other) = pair();
        let (pipe, _writer) = std::io::pipe().unwrap();
        one.send(Message::Ring, &[7u64, 9], &[pipe.as_fd()], soon()).unwrap();
        one.send(Message::Outcome, &1u64, &[], soon()).unwrap();
        let (body, fds) = other.receive::<[u64; 2]>(Message::Ring, 1, soon()).unwrap();
        assert_eq!((body, fds.len()), ([7, 9], 1));
        assert_eq!(other.receive::<u64>(Message::Outcome, 0, soon()).unwrap().0, 1);
    }

    #[test]
    fn what_does_not_belong_is_refused() {
        let (one, other) = pair();
        one.send(Message::Ring, &7u64, &[], soon()).unwrap();
        assert!(matches!(
            other.receive::<u64>(Message::Offer, 0, soon()),
            Err(Error::Protocol { rank: 0, .. })
        ));
        let (one, other) = pair();
        one.send(Message::Ring, &7u64, &[], soon()).unwrap();
        assert!(matches!(other.receive::<u32>(Message::Ring, 0, soon()), Err(Error::Protocol { .. })));
        let (one, other) = pair();
        let (pipe, _writer) = std::io::pipe().unwrap();
        one.send(Message::Ring, &7u64, &[pipe.as_fd()], soon()).unwrap();
        assert!(matches!(other.receive::<u64>(Message::Ring, 0, soon()), Err(Error::Protocol { .. })));
        let (raw, other) = UnixStream::pair().unwrap();
        let other = Control::new(other.into(), 0);
        (&raw).write_all(&[0xa5; 64]).unwrap();
        assert!(matches!(other.receive::<u64>(Message::Ring, 0, soon()), Err(Error::Protocol { .. })));
    }

    #[test]
    fn silence_and_an_end_are_told_apart() {
        let (one, other) = pair();
        assert!(matches!(other.receive::<u64>(Message::Ring, 0, soon()), Err(Error::Deadline { .. })));
        drop(one);
        assert!(matches!(
            other.receive::<u64>(Message::Ring, 0, soon()),
            Err(Error::PeerGone { rank: 0, .. })
        ));
    }
}
