//! File descriptors between the ranks of one host: Unix sockets and `SCM_RIGHTS`.
//!
//! Each rank listens on a socket in the abstract namespace whose random name, like a secret token, travels over the bootstrap.
//! Nobody waits for an answer before everybody listens, so there is no order of ranks and no deadlock; a connection without the
//! token is dropped and its descriptors are closed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::Bootstrap;
use super::agree::{agree, agree_with};
use super::frame::{self, Kind, Reader};
use crate::error::{Error, Result};

/// Most descriptors that a rank can give in one exchange.
pub const MAX_FDS: usize = 64;

const PHASE: &str = "exchange of file descriptors";
const TOKEN: usize = 16;
const RETRY: Duration = Duration::from_millis(2);

/// Gives `fds` to every rank in `neighbours` and returns theirs, in the order of `neighbours`; the entry of this rank itself is
/// empty. Every rank of the bootstrap makes the call, each with the ranks of its own host, itself included; if the step before
/// failed, with that error, which then reaches every rank.
///
/// # Errors
/// [`Io`](Error::Io) if sockets can't be made or reached: ranks in different network namespaces can't exchange descriptors this
/// way. [`PeerTimeout`](Error::PeerTimeout) for ranks that sent nothing; else as [`agree`].
pub fn exchange_fds<B: Bootstrap + ?Sized>(
    bootstrap: &B,
    neighbours: &[usize],
    fds: Result<Vec<BorrowedFd<'_>>>,
) -> Result<Vec<Vec<OwnedFd>>> {
    let listening = fds.and_then(|fds| {
        if fds.len() > MAX_FDS {
            return Err(Error::invalid("fds", fds.len(), format!("at most {MAX_FDS} go into one exchange")));
        }
        Ok((fds, Mailbox::open()?))
    });
    let ((fds, mailbox), addresses) =
        agree_with(bootstrap, PHASE, listening, |(_, mailbox)| mailbox.address.clone())?;
    let traded = (|| {
        let deadline = Instant::now() + bootstrap.timeout();
        for &peer in neighbours.iter().filter(|&&peer| peer != bootstrap.rank()) {
            let address = addresses
                .get(peer)
                .ok_or_else(|| Error::invalid("neighbours", peer, "is not a rank of this group"))?;
            send(address, peer, bootstrap.rank(), &fds, deadline)?;
        }
        mailbox.receive(neighbours, bootstrap.rank(), bootstrap.timeout(), deadline)
    })();
    agree(bootstrap, PHASE, traded)
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn send(address: &[u8], peer: usize, rank: usize, fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<()> {
    let malformed = || Error::protocol(format!("rank {peer}"), "announced a malformed mailbox");
    let (token, name) = address.split_at_checked(TOKEN).ok_or_else(malformed)?;
    let to = SocketAddrUnix::new_abstract_name(name).map_err(|_| malformed())?;
    let io =
        |what, e: Errno| Error::io(format!("{what} the socket of rank {peer} (same network namespace?)"), e);
    let socket = unix_socket().map_err(|e| io("making a socket for", e))?;
    retry(deadline, || connect(&socket, &to)).map_err(|e| io("connecting to", e))?;

    let mut payload = token.to_vec();
    payload.extend((rank as u64).to_le_bytes());
    payload.extend((fds.len() as u64).to_le_bytes());
    let bytes = frame::encode(Kind::Descriptors, &payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::invalid("fds", fds.len(), "don't fit into one message"));
    }
    retry(deadline, || sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL))
        .map_err(|e| io("sending descriptors to", e))?;
    Ok(())
}

/// Repeats a call that would block (a full backlog or buffer) until the deadline.
fn retry<T>(deadline: Instant, mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => thread::sleep(RETRY),
            other => return other,
        }
    }
}

/// Waits until the socket can be read; false at the deadline.
fn readable(fd: BorrowedFd<'_>, deadline: Instant) -> Result<bool, Errno> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

struct Mailbox {
    socket: OwnedFd,
    /// Token, then name.
    address: Vec<u8>,
}

impl Mailbox {
    fn open() -> Result<Self> {
        let io = |e: Errno| Error::io("opening a Unix socket for file descriptors", e);
        let random: [u8; 2 * TOKEN] = {
            let mut bytes = [0; 2 * TOKEN];
            let n = getrandom(&mut bytes, GetRandomFlags::empty()).map_err(io)?;
            // The kernel fills requests of up to 256 bytes completely.
            if n != bytes.len() {
                return Err(io(Errno::IO));
            }
            bytes
        };
        let (token, nonce) = random.split_at(TOKEN);
        let name: String = nonce.iter().map(|b| format!("{b:02x}")).collect();
        let name = format!("deepep-{name}");
        let socket = unix_socket().map_err(io)?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(io)?;
        bind(&socket, &address).map_err(io)?;
        listen(&socket, 128).map_err(io)?;
        Ok(Self { socket, address: [token, name.as_bytes()].concat() })
    }

    fn receive(
        &self,
        neighbours: &[usize],
        rank: usize,
        timeout: Duration,
        deadline: Instant,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        let io = |e: Errno| Error::io("receiving file descriptors over a Unix socket", e);
        let mut boxes: Vec<Option<Vec<OwnedFd>>> =
            neighbours.iter().map(|&peer| (peer == rank).then(Vec::new)).collect();
        while boxes.iter().any(Option::is_none) {
            if !readable(self.socket.as_fd(), deadline).map_err(io)? {
                let missing = neighbours
                    .iter()
                    .zip(&boxes)
                    .filter(|(_, b)| b.is_none())
                    .map(|(&peer, _)| peer)
                    .collect();
                let (expected, seen) = (None, None);
                return Err(Error::PeerTimeout {
                    phase: PHASE,
                    rank,
                    missing,
                    waited: timeout,
                    expected,
                    seen,
                });
            }
            let connection = match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(connection) => connection,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => continue,
                Err(e) => return Err(io(e)),
            };
            // Senders write right after connecting; a stranger may take a second from the deadline, not more.
            let patience = deadline.min(Instant::now() + Duration::from_secs(1));
            if !readable(connection.as_fd(), patience).map_err(io)? {
                continue;
            }
            let Some((peer, fds)) = self.read_one(connection.as_fd()) else { continue };
            if let Some(slot) = neighbours.iter().position(|&n| n == peer) {
                boxes[slot].get_or_insert(fds);
            }
        }
        Ok(boxes.into_iter().flatten().collect())
    }

    /// Reads one message; `None`, with everything in it closed, unless it carries the token and as many descriptors as it says.
    fn read_one(&self, connection: BorrowedFd<'_>) -> Option<(usize, Vec<OwnedFd>)> {
        let mut bytes = [0; 256];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let message = recvmsg(connection, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|m| match m {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return None;
        }
        let (kind, payload) = frame::decode(bytes.get(..message.bytes)?, "a Unix socket").ok()?;
        let mut reader = Reader::new(payload);
        let token = reader.bytes(TOKEN)?;
        let (peer, count) = (reader.u64()?, reader.u64()?);
        reader.end()?;
        let genuine =
            kind == Kind::Descriptors && token == &self.address[..TOKEN] && count == fds.len() as u64;
        genuine.then_some((usize::try_from(peer).ok()?, fds))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, SeekFrom, Write};

    use super::*;
    use crate::bootstrap::{ThreadBootstrap, thread_group};

    fn on_ranks<T: Send>(n: usize, timeout: Duration, f: impl Fn(&ThreadBootstrap) -> T + Sync) -> Vec<T> {
        let ranks = thread_group(n, timeout).unwrap();
        let f = &f;
        thread::scope(|scope| {
            let running: Vec<_> = ranks.iter().map(|b| scope.spawn(move || f(b))).collect();
            running.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    fn memfd(text: &str) -> File {
        let mut file =
            File::from(rustix::fs::memfd_create("deepep-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn everybody_gets_everybodys() {
        let received = on_ranks(5, Duration::from_secs(20), |b| {
            let files: Vec<File> = (0..b.rank()).map(|i| memfd(&format!("{}.{i}", b.rank()))).collect();
            let fds = files.iter().map(File::as_fd).collect();
            let all = exchange_fds(b, &[0, 1, 2, 3, 4], Ok(fds)).unwrap();
            all.into_iter()
                .map(|fds| {
                    fds.into_iter()
                        .map(|fd| {
                            let (mut file, mut text) = (File::from(fd), String::new());
                            file.seek(SeekFrom::Start(0)).unwrap();
                            file.read_to_string(&mut text).unwrap();
                            text
                        })
                        .collect::<Vec<_>>()
                })
                .collect::<Vec<_>>()
        });
        for (rank, all) in received.into_iter().enumerate() {
            for (peer, texts) in all.into_iter().enumerate() {
                let n = if peer == rank { 0 } else { peer };
                assert_eq!(texts, (0..n).map(|i| format!("{peer}.{i}")).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn two_hosts_do_not_mix() {
        on_ranks(4, Duration::from_secs(20), |b| {
            let file = memfd(&b.rank().to_string());
            let neighbours = if b.rank() < 2 { [0, 1] } else { [2, 3] };
            let got = exchange_fds(b, &neighbours, Ok(vec![file.as_fd()])).unwrap();
            let counts: Vec<_> = got.iter().map(Vec::len).collect();
            assert_eq!(counts, if b.rank() % 2 == 0 { [0, 1] } else { [1, 0] });
        });
    }

    #[test]
    fn a_failure_before_reaches_everybody() {
        let results = on_ranks(3, Duration::from_secs(20), |b| {
            let local = if b.rank() == 2 { Err(Error::invalid("size", 1, "no memory")) } else { Ok(vec![]) };
            exchange_fds(b, &[0, 1, 2], local).map(drop)
        });
        assert!(matches!(&results[0], Err(Error::PeerFailed { rank: 2, .. })), "{results:?}");
        assert!(matches!(&results[2], Err(Error::Invalid { .. })), "{results:?}");
    }

    #[test]
    fn strangers_are_ignored() {
        let mailbox = Mailbox::open().unwrap();
        let file = memfd("x");
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut forged = mailbox.address.clone();
        forged[0] ^= 1;
        send(&forged, 0, 1, &[file.as_fd()], deadline).unwrap();
        let silent = unix_socket().unwrap();
        connect(&silent, &SocketAddrUnix::new_abstract_name(&mailbox.address[TOKEN..]).unwrap()).unwrap();
        let noisy = unix_socket().unwrap();
        connect(&noisy, &SocketAddrUnix::new_abstract_name(&mailbox.address[TOKEN..]).unwrap()).unwrap();
        rustix::net::send(&noisy, &[0xff; 300], SendFlags::NOSIGNAL).unwrap();
        send(&mailbox.address, 0, 1, &[file.as_fd()], deadline).unwrap();
        let got = mailbox.receive(&[0, 1], 0, Duration::from_secs(20), deadline).unwrap();
        assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_rank_that_sends_nothing_is_named() {
        let mailbox = Mailbox::open().unwrap();
        let timeout = Duration::from_millis(30);
        let error = mailbox.receive(&[0, 1, 2], 1, timeout, Instant::now() + timeout).unwrap_err();
        assert!(matches!(&error, Error::PeerTimeout { missing, .. } if *missing == [0, 2]), "{error}");
    }
}
