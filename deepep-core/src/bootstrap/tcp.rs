//! Ranks that are processes: rank 0 serves a store over TCP, the others connect to it.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{self, Kind, MAX_PAYLOAD, Reader, put_block};
use super::rendezvous::{Failure, Rendezvous, check_length};
use super::{Bootstrap, Launch, MAX_CONTRIBUTION};
use crate::deadline;
use crate::error::{Error, Result};

const PHASE: &str = "bootstrap";
/// How much longer than the store itself a rank waits for the store's answer, so that it learns who is missing.
const GRACE: Duration = Duration::from_secs(2);
/// Longest time for a stranger to introduce itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);

/// A rank that meets the others over TCP.
///
/// Rank 0 listens and serves; a connection that doesn't speak the protocol is dropped and disturbs nobody. The store has no
/// authentication: use an address that only the job's hosts can reach.
pub struct TcpBootstrap {
    rank: usize,
    world_size: usize,
    timeout: Duration,
    role: Role,
}

enum Role {
    Store { meeting: Arc<Rendezvous>, closing: Arc<AtomicBool> },
    Client { store: Mutex<Client> },
}

struct Client {
    stream: TcpStream,
    /// Set by the first failure: the byte stream may then be out of step.
    broken: bool,
}

impl TcpBootstrap {
    /// Joins the group described by `launch`. Rank 0 returns at once and lets the others in as they come; the others return when
    /// rank 0 has let them in.
    ///
    /// # Errors
    /// [`Io`](Error::Io) if rank 0 can't listen (the port may belong to torchrun's own store: set `DEEPEP_MASTER_PORT`), or the
    /// others can't reach it in time; [`Protocol`](Error::Protocol) if the store refuses this rank or isn't one.
    pub fn join(launch: &Launch, timeout: Duration) -> Result<Self> {
        launch.check()?;
        if launch.rank == 0 {
            let address = format!("{}:{}", launch.master_addr, launch.master_port);
            let attempted = || {
                format!(
                    "listening on {address} for {} ranks (another store there? set DEEPEP_MASTER_PORT)",
                    launch.world_size
                )
            };
            let listener = TcpListener::bind(&address).map_err(|e| Error::io(attempted(), e))?;
            Self::serve(listener, launch.world_size, timeout)
        } else {
            Self::connect(launch, timeout)
        }
    }

    /// Becomes rank 0 with a listener that is already bound, for example to a port chosen by the system.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) if `world_size` is 0, [`Io`](Error::Io) if the listener can't be used.
    pub fn serve(listener: TcpListener, world_size: usize, timeout: Duration) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::invalid("world_size", 0, "a group has at least one rank"));
        }
        let meeting = Rendezvous::new(world_size, timeout);
        let closing = Arc::new(AtomicBool::new(false));
        if world_size > 1 {
            listener
                .set_nonblocking(true)
                .map_err(|e| Error::io("making the store's socket non-blocking", e))?;
            let server = Server { meeting: meeting.clone(), closing: closing.clone(), world_size };
            thread::Builder::new()
                .name("deepep-store".into())
                .spawn(move || server.accept_all(&listener))
                .map_err(|e| Error::io("starting the store's thread", e))?;
        }
        Ok(Self { rank: 0, world_size, timeout, role: Role::Store { meeting, closing } })
    }

    fn connect(launch: &Launch, timeout: Duration) -> Result<Self> {
        let address = format!("{}:{}", launch.master_addr, launch.master_port);
        let deadline = deadline::within(timeout);
        let mut stream = connect_by(&address, deadline)?;
        let from = format!("the store at {address}");
        let io = |what: &str, e| Error::io(format!("{what} {from}"), e);
        stream.set_nodelay(true).map_err(|e| io("setting up the connection to", e))?;
        let mut hello = Vec::new();
        hello.extend((launch.rank as u64).to_le_bytes());
        hello.extend((launch.world_size as u64).to_le_bytes());
        frame::write(&mut stream, Kind::Hello, &hello).map_err(|e| io("greeting", e))?;
        stream
            .set_read_timeout(Some(timeout.saturating_add(GRACE)))
            .map_err(|e| io("setting up the connection to", e))?;
        match frame::read(&mut stream, MAX_PAYLOAD, &from)? {
            (Kind::Welcome, _) => {}
            (Kind::Failed, payload) => {
                return Err(parse_failure(&payload, &from).into_error(PHASE, launch.rank));
            }
            (kind, _) => return Err(Error::protocol(from, format!("answered a greeting with {kind:?}"))),
        }
        let store = Mutex::new(Client { stream, broken: false });
        Ok(Self { rank: launch.rank, world_size: launch.world_size, timeout, role: Role::Client { store } })
    }
}

/// Tries again until rank 0 listens.
fn connect_by(address: &str, deadline: Instant) -> Result<TcpStream> {
    let attempted = || format!("connecting to rank 0's store at {address}");
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let attempt = address.to_socket_addrs().and_then(|addresses| {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for a in addresses {
                match TcpStream::connect_timeout(&a, left.max(POLL)) {
                    Ok(stream) => return Ok(stream),
                    Err(e) => last = e,
                }
            }
            Err(last)
        });
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() >= deadline => return Err(Error::io(attempted(), e)),
            Err(_) => thread::sleep(POLL.min(left)),
        }
    }
}

impl Bootstrap for TcpBootstrap {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        check_length(bytes)?;
        match &self.role {
            Role::Store { meeting, .. } => {
                let round = meeting
                    .gather(0, bytes.to_vec(), false)
                    .map_err(|failure| failure.into_error(PHASE, self.rank));
                // Also after a failure: the others shall learn the reason before this process exits.
                meeting.wait_delivered();
                Ok(round?.to_vec())
            }
            Role::Client { store } => {
                let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
                if store.broken {
                    return Err(Error::Broken { reason: "an earlier bootstrap call failed".into() });
                }
                let result = gather_remote(&mut store.stream, bytes, self.rank, self.world_size);
                store.broken = result.is_err();
                result
            }
        }
    }
}

fn gather_remote(
    stream: &mut TcpStream,
    bytes: &[u8],
    rank: usize,
    world_size: usize,
) -> Result<Vec<Vec<u8>>> {
    let from = "rank 0's store";
    // Whatever cuts the connection to rank 0 leaves nothing to wait for.
    let left = |_| Error::PeerLeft { phase: PHASE.into(), rank: 0 };
    frame::write(stream, Kind::Contribution, bytes).map_err(left)?;
    match frame::read(stream, MAX_PAYLOAD, from) {
        Ok((Kind::Gathered, payload)) => parse_gathered(&payload, world_size)
            .ok_or_else(|| Error::protocol(from, "the gathered contributions don't parse")),
        Ok((Kind::Failed, payload)) => Err(parse_failure(&payload, from).into_error(PHASE, rank)),
        Ok((kind, _)) => Err(Error::protocol(from, format!("answered a contribution with {kind:?}"))),
        Err(Error::Io { cause, .. }) if is_timeout(&cause) => Err(Error::PeerTimeout {
            phase: PHASE.into(),
            rank,
            missing: vec![0],
            waited: stream.read_timeout().ok().flatten().unwrap_or_default(),
            expected: None,
            seen: None,
        }),
        Err(Error::Io { cause, .. }) => Err(left(cause)),
        Err(other) => Err(other),
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn parse_gathered(payload: &[u8], world_size: usize) -> Option<Vec<Vec<u8>>> {
    let mut reader = Reader::new(payload);
    let all = (0..world_size).map(|_| reader.block().map(<[u8]>::to_vec)).collect::<Option<_>>()?;
    reader.end()?;
    Some(all)
}

impl Drop for TcpBootstrap {
    fn drop(&mut self) {
        match &self.role {
            Role::Store { meeting, closing } => {
                closing.store(true, Ordering::Relaxed);
                meeting.fail(Failure::Left { rank: 0 });
            }
            Role::Client { store } => {
                let store = store.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = store.stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// The store's side of the connections.
#[derive(Clone)]
struct Server {
    meeting: Arc<Rendezvous>,
    closing: Arc<AtomicBool>,
    world_size: usize,
}

impl Server {
    /// Lets every rank in once, then stops listening.
    fn accept_all(&self, listener: &TcpListener) {
        let joined = Arc::new(Mutex::new(vec![false; self.world_size]));
        loop {
            let everybody = joined.lock().unwrap_or_else(PoisonError::into_inner).iter().skip(1).all(|&j| j);
            if everybody || self.closing.load(Ordering::Relaxed) {
                return;
            }
            match listener.accept() {
                Ok((stream, peer)) => {
                    let (server, joined) = (self.clone(), joined.clone());
                    // A stranger that says nothing must not keep the ranks out: each connection has its own thread.
                    let spawned = thread::Builder::new()
                        .name("deepep-store-rank".into())
                        .spawn(move || server.admit(stream, peer, &joined));
                    if spawned.is_err() {
                        thread::sleep(POLL);
                    }
                }
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    fn admit(&self, mut stream: TcpStream, peer: SocketAddr, joined: &Mutex<Vec<bool>>) {
        let from = peer.to_string();
        let ready = stream.set_nonblocking(false).and(stream.set_nodelay(true));
        if ready.and(stream.set_read_timeout(Some(HELLO_TIMEOUT))).is_err() {
            return;
        }
        let Ok((Kind::Hello, payload)) = frame::read(&mut stream, 16, &from) else { return };
        let mut reader = Reader::new(&payload);
        let (Some(rank), Some(world_size)) = (reader.u64(), reader.u64()) else { return };
        let rank = usize::try_from(rank).unwrap_or(usize::MAX);
        let problem = {
            let mut joined = joined.lock().unwrap_or_else(PoisonError::into_inner);
            if world_size != self.world_size as u64 {
                Some(format!("was started for {world_size} ranks, rank 0 for {}", self.world_size))
            } else if rank == 0 || rank >= self.world_size {
                Some(format!("is not a rank of 1..{}", self.world_size))
            } else if std::mem::replace(&mut joined[rank], true) {
                Some("has already joined: two processes have this rank".into())
            } else {
                None
            }
        };
        if let Some(problem) = problem {
            let _ = frame::write(
                &mut stream,
                Kind::Failed,
                &encode_failure(&Failure::Protocol { rank, problem }),
            );
            return;
        }
        // From here on the connection is this rank: losing it means losing the rank.
        if frame::write(&mut stream, Kind::Welcome, &[]).is_ok() && stream.set_read_timeout(None).is_ok() {
            while self.serve_round(&mut stream, rank, &from) {}
        }
        self.meeting.fail(Failure::Left { rank });
    }

    /// One contribution and its answer; false when the connection has ended.
    fn serve_round(&self, stream: &mut TcpStream, rank: usize, from: &str) -> bool {
        let bytes = match frame::read(stream, MAX_CONTRIBUTION, from) {
            Ok((Kind::Contribution, bytes)) => bytes,
            Ok((kind, _)) => {
                let problem = format!("sent {kind:?} instead of a contribution");
                self.meeting.fail(Failure::Protocol { rank, problem });
                return false;
            }
            Err(Error::Io { .. }) => return false,
            Err(e) => {
                self.meeting.fail(Failure::Protocol { rank, problem: e.to_string() });
                return false;
            }
        };
        let (kind, payload) = match self.meeting.gather(rank, bytes, true) {
            Ok(round) => {
                let mut payload = Vec::new();
                round.iter().for_each(|block| put_block(&mut payload, block));
                (Kind::Gathered, payload)
            }
            Err(failure) => (Kind::Failed, encode_failure(&failure)),
        };
        let sent = stream
            .set_write_timeout(Some(self.meeting.timeout().saturating_add(GRACE)))
            .and_then(|()| frame::write(stream, kind, &payload));
        self.meeting.delivered();
        sent.is_ok()
    }
}

fn encode_failure(failure: &Failure) -> Vec<u8> {
    let mut bytes = Vec::new();
    match failure {
        Failure::Missing { ranks, waited } => {
            bytes.extend(1u32.to_le_bytes());
            bytes.extend((waited.as_nanos() as u64).to_le_bytes());
            ranks.iter().for_each(|&rank| bytes.extend((rank as u64).to_le_bytes()));
        }
        Failure::Left { rank } => {
            bytes.extend(2u32.to_le_bytes());
            bytes.extend((*rank as u64).to_le_bytes());
        }
        Failure::Protocol { rank, problem } => {
            bytes.extend(3u32.to_le_bytes());
            bytes.extend((*rank as u64).to_le_bytes());
            put_block(&mut bytes, problem.as_bytes());
        }
    }
    bytes
}

fn parse_failure(payload: &[u8], from: &str) -> Failure {
    let mut reader = Reader::new(payload);
    let parsed = match reader.u32() {
        Some(1) => reader.u64().map(|nanos| {
            let ranks = std::iter::from_fn(|| reader.u64()).map(|rank| rank as usize).collect();
            Failure::Missing { ranks, waited: Duration::from_nanos(nanos) }
        }),
        Some(2) => reader.u64().map(|rank| Failure::Left { rank: rank as usize }),
        Some(3) => reader.u64().and_then(|rank| {
            Some(Failure::Protocol { rank: rank as usize, problem: reader.text()?.to_owned() })
        }),
        _ => None,
    };
    parsed.unwrap_or_else(|| Failure::Protocol {
        rank: 0,
        problem: format!("a failure from {from} doesn't parse"),
    })
}

#[cfg(test)]
mod tests;
