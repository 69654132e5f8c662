//! Connections between the ranks of one host, over which file descriptors can travel.
//!
//! Each rank listens on a Unix socket in the abstract namespace, whose random name and a secret token travel over the bootstrap. Of two ranks the
//! higher one connects. Nobody waits for an answer before everybody listens, so there is no deadlock; a connection without the
//! token is dropped.

use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};

use super::Bootstrap;
use super::agree::{agree, agree_with};
use super::frame::{self, Kind, Reader};
use crate::deadline;
use crate::error::{Error, Result};

const PHASE: &str = "connecting the ranks of the host";
const TOKEN: usize = 16;
const RETRY: Duration = Duration::from_millis(2);
/// The longest that one connection may keep the listener from others.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);

/// Connects this rank with every rank in `neighbours`, the ranks of its host, itself included. Returns a stream to each in the same order;
/// none to itself. Every rank of the bootstrap makes the call, each with its own host's ranks.
///
/// # Errors
/// [`Io`](Error::Io) if sockets can't be made or reached: ranks in different network namespaces can't meet this way.
/// [`PeerTimeout`](Error::PeerTimeout) for ranks that don't come; else as [`agree`].
pub fn connect_neighbours<B: Bootstrap + ?Sized>(
    bootstrap: &B,
    neighbours: &[usize],
) -> Result<Vec<Option<UnixStream>>> {
    let (mailbox, addresses) =
        agree_with(bootstrap, PHASE, Mailbox::open(), |mailbox| mailbox.address.clone())?;
    let rank = bootstrap.rank();
    let connected = (|| {
        let deadline = deadline::within(bootstrap.timeout());
        let mut streams = Vec::with_capacity(neighbours.len());
        for &peer in neighbours {
            let address = addresses
                .get(peer)
                .ok_or_else(|| Error::invalid("neighbours", peer, "is not a rank of this group"))?;
            streams.push(if peer < rank { Some(call(address, peer, rank, deadline)?) } else { None });
        }
        mailbox.receive(neighbours, &mut streams, rank, bootstrap.timeout(), deadline)?;
        Ok(streams)
    })();
    agree(bootstrap, PHASE, connected)
}

/// Connects to a rank's mailbox and says who calls.
fn call(address: &[u8], peer: usize, rank: usize, deadline: Instant) -> Result<UnixStream> {
    let malformed = || Error::protocol(format!("rank {peer}"), "announced a malformed mailbox");
    let (token, name) = address.split_at_checked(TOKEN).ok_or_else(malformed)?;
    let to = SocketAddrUnix::new_abstract_name(name).map_err(|_| malformed())?;
    let attempted = || format!("connecting to the socket of rank {peer} (same network namespace?)");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| Error::io(attempted(), e))?;
    loop {
        match connect(&socket, &to) {
            Ok(()) => break,
            // The listener's queue is full.
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => thread::sleep(RETRY),
            Err(e) => return Err(Error::io(attempted(), e)),
        }
    }
    let mut stream = UnixStream::from(socket);
    let mut hello = token.to_vec();
    hello.extend((rank as u64).to_le_bytes());
    stream
        .set_nonblocking(false)
        .and_then(|()| frame::write(&mut stream, Kind::Neighbour, &hello))
        .map_err(|e| Error::io(attempted(), e))?;
    Ok(stream)
}

struct Mailbox {
    listener: UnixListener,
    /// Token, then name.
    address: Vec<u8>,
}

impl Mailbox {
    fn open() -> Result<Self> {
        let attempted = "opening a Unix socket for the ranks of the host";
        let mut random = [0; 2 * TOKEN];
        let filled = getrandom(&mut random, GetRandomFlags::empty()).map_err(|e| Error::io(attempted, e))?;
        // The kernel fills requests of up to 256 bytes completely.
        if filled != random.len() {
            return Err(Error::io(attempted, Errno::IO));
        }
        let (token, nonce) = random.split_at(TOKEN);
        let nonce: String = nonce.iter().map(|b| format!("{b:02x}")).collect();
        let name = format!("deepep-{nonce}");
        let listener = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .map_err(|e| Error::io(attempted, e))?;
        listener.set_nonblocking(true).map_err(|e| Error::io(attempted, e))?;
        Ok(Self { listener, address: [token, name.as_bytes()].concat() })
    }

    /// Accepts connections until every higher neighbour is there.
    fn receive(
        &self,
        neighbours: &[usize],
        streams: &mut [Option<UnixStream>],
        rank: usize,
        timeout: Duration,
        deadline: Instant,
    ) -> Result<()> {
        loop {
            let awaited =
                neighbours.iter().zip(streams.iter()).filter(|(peer, s)| **peer > rank && s.is_none());
            let missing: Vec<usize> = awaited.map(|(&peer, _)| peer).collect();
            if missing.is_empty() {
                return Ok(());
            }
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let patience = deadline.saturating_duration_since(Instant::now()).min(HELLO_TIMEOUT);
                    let Some((peer, stream)) = self.identify(stream, patience) else { continue };
                    if let Some(i) = neighbours.iter().position(|&n| n == peer).filter(|_| peer > rank) {
                        streams[i].get_or_insert(stream);
                    }
                }
                Err(_) if Instant::now() < deadline => thread::sleep(RETRY),
                Err(_) => {
                    let (expected, seen) = (None, None);
                    return Err(Error::PeerTimeout {
                        phase: PHASE.into(),
                        rank,
                        missing,
                        waited: timeout,
                        expected,
                        seen,
                    });
                }
            }
        }
    }

    /// Who is at the other end; `None` unless it knows the token.
    fn identify(&self, mut stream: UnixStream, patience: Duration) -> Option<(usize, UnixStream)> {
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(patience.max(RETRY))).ok()?;
        let (kind, hello) = frame::read(&mut stream, TOKEN + 8, "a Unix socket").ok()?;
        let mut reader = Reader::new(&hello);
        let (token, peer) = (reader.bytes(TOKEN)?, reader.u64()?);
        reader.end()?;
        stream.set_read_timeout(None).ok()?;
        let genuine = kind == Kind::Neighbour && *token == self.address[..TOKEN];
        genuine.then_some((usize::try_from(peer).ok()?, stream))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::bootstrap::agree::tests::on_ranks;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn everybody_reaches_everybody() {
        on_ranks(5, |b| {
            let mut streams = connect_neighbours(b, &[0, 1, 2, 3, 4]).unwrap();
            assert!(streams[b.rank()].is_none());
            for stream in streams.iter_mut().flatten() {
                stream.write_all(&[b.rank() as u8]).unwrap();
            }
            for (peer, stream) in streams.iter_mut().enumerate() {
                let Some(stream) = stream else { continue };
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                assert_eq!(usize::from(byte[0]), peer);
            }
        });
    }

    #[test]
    fn two_hosts_do_not_mix() {
        on_ranks(4, |b| {
            let neighbours = if b.rank() < 2 { [0, 1] } else { [2, 3] };
            let streams = connect_neighbours(b, &neighbours).unwrap();
            let there: Vec<_> = streams.iter().map(Option::is_some).collect();
            assert_eq!(there, [b.rank() % 2 == 1, b.rank() % 2 == 0]);
        });
    }

    #[test]
    fn strangers_are_ignored() {
        let mailbox = Mailbox::open().unwrap();
        let deadline = Instant::now() + LONG;
        let mut forged = mailbox.address.clone();
        forged[0] ^= 1;
        let _forger = call(&forged, 0, 1, deadline).unwrap();
        let to = SocketAddr::from_abstract_name(&mailbox.address[TOKEN..]).unwrap();
        let _silent = UnixStream::connect_addr(&to).unwrap();
        let mut noisy = UnixStream::connect_addr(&to).unwrap();
        noisy.write_all(&[0xff; 300]).unwrap();
        let _one = call(&mailbox.address, 0, 1, deadline).unwrap();
        let mut streams = vec![None, None];
        mailbox.receive(&[0, 1], &mut streams, 0, LONG, deadline).unwrap();
        assert!(streams[1].is_some());
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let mailbox = Mailbox::open().unwrap();
        let timeout = Duration::from_millis(30);
        let mut streams = vec![None, None, None];
        let error =
            mailbox.receive(&[0, 1, 2], &mut streams, 0, timeout, Instant::now() + timeout).unwrap_err();
        assert!(matches!(&error, Error::PeerTimeout { missing, .. } if *missing == [1, 2]), "{error}");
    }
}
