//! An agreement over Unix sockets: every member is connected to rank 0, which passes on what all say.
//!
//! A message is a header of 24 bytes and what follows it:
//!
//! | offset | bytes | field, little-endian |
//! |---|---|---|
//! | 0 | 8 | magic, with the version |
//! | 8 | 4 | kind of message |
//! | 12 | 4 | rank: the sender, or who is missing |
//! | 16 | 4 | number of the exchange |
//! | 20 | 4 | bytes that follow |

use super::agreement::Agreement;
use crate::error::{Error, Result};
use crate::share::{Deadline, receive_bytes, send_bytes};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const MAGIC: [u8; 8] = *b"CVMSTAR1";
const HEADER: usize = 24;
const STEP: &str = "exchanging with the team";
/// How long rank 0 takes to tell a member that another one is missing.
const PARTING: Duration = Duration::from_millis(100);
/// How much earlier than the others rank 0 gives up, at most, so that they hear from it who is missing.
const AHEAD: Duration = Duration::from_millis(250);
/// Bytes of the reason that goes with it.
const REASON: usize = 256;

/// Kinds of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Kind {
    /// What one member says.
    Mine = 1,
    /// What all say.
    All = 2,
    /// A member is missing: there is no answer.
    Missing = 3,
    /// A file descriptor comes with it.
    Fd = 4,
}

/// An [`Agreement`] over connected Unix stream sockets: one from rank 0 to every other member.
///
/// If a member does not take part by the deadline, or is gone, rank 0 tells the others which one it was. The star is then broken: every
/// later call returns an error.
///
/// ```
/// use cuda_vmm::multicast::{Agreement, SocketStar};
/// use std::os::unix::net::UnixStream;
/// use std::time::{Duration, Instant};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (here, there) = UnixStream::pair()?;
/// let deadline = Instant::now() + Duration::from_secs(10);
/// let other = std::thread::spawn(move || {
///     SocketStar::member(1, 2, there).exchange(b"one", deadline)
/// });
/// let all = SocketStar::root(vec![here]).exchange(b"two", deadline)?;
/// assert_eq!(all, [b"two", b"one"]);
/// assert_eq!(other.join().expect("no panic")?, all);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SocketStar {
    rank: usize,
    ranks: usize,
    /// Rank 0: to ranks 1, 2 and so on. The others: to rank 0.
    sockets: Vec<OwnedFd>,
    sequence: u32,
    broken: Option<Broken>,
}

/// Who broke the star, and how.
#[derive(Clone, Debug)]
struct Broken {
    rank: usize,
    reason: String,
}

impl Broken {
    fn error(&self) -> Error {
        Error::Member { rank: self.rank, step: STEP, status: None, reason: self.reason.clone() }
    }
}

#[derive(Debug)]
struct Header {
    kind: u32,
    rank: u32,
    sequence: u32,
    length: u32,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..8].copy_from_slice(&MAGIC);
        for (at, value) in [(8, self.kind), (12, self.rank), (16, self.sequence), (20, self.length)] {
            out[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        (bytes[..8] == MAGIC).then(|| Self {
            kind: number(8),
            rank: number(12),
            sequence: number(16),
            length: number(20),
        })
    }
}

impl SocketStar {
    /// Rank 0, with sockets to ranks 1, 2 and so on, in this order.
    #[must_use]
    pub fn root<S: Into<OwnedFd>>(members: Vec<S>) -> Self {
        let sockets: Vec<_> = members.into_iter().map(Into::into).collect();
        Self { rank: 0, ranks: sockets.len() + 1, sockets, sequence: 0, broken: None }
    }

    /// Another rank, with a socket to rank 0. A rank that does not fit the number of ranks makes rank 0 refuse the member.
    #[must_use]
    pub fn member(rank: usize, ranks: usize, root: impl Into<OwnedFd>) -> Self {
        Self { rank, ranks, sockets: vec![root.into()], sequence: 0, broken: None }
    }

    fn next(&mut self) -> Result<u32> {
        if let Some(broken) = &self.broken {
            return Err(broken.error());
        }
        self.sequence = self.sequence.wrapping_add(1);
        Ok(self.sequence)
    }

    fn send(
        &self,
        socket: &OwnedFd,
        kind: Kind,
        body: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<()> {
        let header = Header {
            kind: kind as u32,
            rank: self.rank as u32,
            sequence: self.sequence,
            length: body.len() as u32,
        };
        let mut message = header.encode().to_vec();
        message.extend_from_slice(body);
        send_bytes(socket.as_fd(), &message, fd, &Deadline::until(STEP, deadline))
    }

    /// Receives a message of a kind and length from a rank, with the file descriptors that came with its header.
    fn receive(
        &self,
        socket: &OwnedFd,
        from: usize,
        kind: Kind,
        length: usize,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>, bool)> {
        let deadline = Deadline::until(STEP, deadline);
        let mut bytes = [0; HEADER];
        let (mut fds, mut truncated) = receive_bytes(socket.as_fd(), &mut bytes, &deadline)?;
        let bad = |why| Error::BadMessage { rank: from, why };
        let header = Header::decode(&bytes).ok_or_else(|| bad("it does not start like one"))?;
        if header.kind == Kind::Missing as u32 && self.rank != 0 {
            let mut reason = vec![0; (header.length as usize).min(REASON)];
            receive_bytes(socket.as_fd(), &mut reason, &deadline)?;
            let reason = printable(&reason);
            return Err(Error::Member { rank: header.rank as usize, step: STEP, status: None, reason });
        }
        if header.kind != kind as u32 {
            return Err(bad("it is doing something else"));
        }
        if header.rank as usize != from {
            return Err(bad("it says that it is another rank"));
        }
        if header.sequence != self.sequence {
            return Err(bad("it is at another exchange"));
        }
        if header.length as usize != length {
            return Err(bad("its message has another length than this rank's"));
        }
        let mut body = vec![0; length];
        let (more, lost) = receive_bytes(socket.as_fd(), &mut body, &deadline)?;
        fds.extend(more);
        truncated |= lost;
        Ok((body, fds, truncated))
    }

    /// Notes who broke the star, tells the others if this is rank 0, and returns the error.
    fn break_off(&mut self, rank: usize, error: Error) -> Error {
        let broken = match &error {
            Error::Member { rank, reason, .. } => Broken { rank: *rank, reason: reason.clone() },
            other => Broken { rank, reason: other.to_string() },
        };
        if self.rank == 0 {
            let mut reason = broken.reason.clone().into_bytes();
            reason.truncate(REASON);
            let header = Header {
                kind: Kind::Missing as u32,
                rank: broken.rank as u32,
                sequence: self.sequence,
                length: reason.len() as u32,
            };
            let mut message = header.encode().to_vec();
            message.extend_from_slice(&reason);
            for (index, socket) in self.sockets.iter().enumerate() {
                if index + 1 != broken.rank {
                    // Whoever cannot be told waits for the deadline.
                    send_bytes(socket.as_fd(), &message, None, &Deadline::new(STEP, PARTING)).ok();
                }
            }
        }
        let error = broken.error();
        self.broken = Some(broken);
        error
    }

    fn exchange_as_root(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, (usize, Error)> {
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline = deadline.checked_sub(AHEAD.min(left / 4)).unwrap_or(deadline);
        let mut all = vec![mine.to_vec()];
        for (socket, rank) in self.sockets.iter().zip(1..) {
            let (theirs, fds, _) = self
                .receive(socket, rank, Kind::Mine, mine.len(), deadline)
                .map_err(|error| (rank, error))?;
            drop(fds);
            all.push(theirs);
        }
        let together = all.concat();
        for (socket, rank) in self.sockets.iter().zip(1..) {
            self.send(socket, Kind::All, &together, None, deadline).map_err(|error| (rank, error))?;
        }
        Ok(all)
    }

    fn exchange_as_member(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let socket = &self.sockets[0];
        let length = mine.len() * self.ranks;
        let sent = self.send(socket, Kind::Mine, mine, None, deadline);
        let received = self.receive(socket, 0, Kind::All, length, deadline);
        let (together, fds, _) = match (sent, received) {
            // Rank 0 that is gone may have said before who is missing, which tells more than that nothing could be sent to it.
            (Err(_), Err(missing @ Error::Member { .. })) => return Err(missing),
            (Err(error), _) => return Err(error),
            (Ok(()), received) => received?,
        };
        drop(fds);
        Ok(together.chunks(mine.len()).map(<[u8]>::to_vec).collect())
    }
}

impl Agreement for SocketStar {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn exchange(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        if mine.is_empty() || u32::try_from(mine.len().saturating_mul(self.ranks)).is_err() {
            let (why, what) =
                (format!("{} bytes for {} ranks", mine.len(), self.ranks), "a message of this length");
            return Err(Error::Unsupported { what, why });
        }
        self.next()?;
        if self.rank == 0 {
            self.exchange_as_root(mine, deadline).map_err(|(rank, error)| self.break_off(rank, error))
        } else {
            self.exchange_as_member(mine, deadline).map_err(|error| self.break_off(0, error))
        }
    }

    fn carries_fds(&self) -> bool {
        true
    }

    fn distribute(&mut self, fd: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Option<OwnedFd>> {
        if fd.is_some() != (self.rank == 0) {
            let why = "rank 0 gives the descriptor, and the others none".into();
            return Err(Error::Unsupported { what: "distributing a file descriptor", why });
        }
        self.next()?;
        if self.rank == 0 {
            let sent = self.sockets.iter().zip(1..).try_for_each(|(socket, rank)| {
                self.send(socket, Kind::Fd, &[], fd, deadline).map_err(|error| (rank, error))
            });
            return sent.map(|()| None).map_err(|(rank, error)| self.break_off(rank, error));
        }
        let received = self.receive(&self.sockets[0], 0, Kind::Fd, 0, deadline);
        let (_, mut fds, truncated) = received.map_err(|error| self.break_off(0, error))?;
        let count = Error::DescriptorCount { received: fds.len(), expected: 1, truncated };
        // The exchange went well: the star is not broken, whatever became of the descriptor.
        if fds.len() == 1 && !truncated { Ok(fds.pop()) } else { Err(count) }
    }
}

fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
