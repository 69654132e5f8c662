//! A connection: the ranks, their rings, their registrations, and the threads that work for it.

use crate::agent::{Agent, REST};
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::log::{info, warning};
use crate::net::tcp::Bridge;
use crate::net::{Control, Deadline, Handle, Listener, Message, connect};
use crate::region::{Partner, Regions, Registration, conclude, handle_of, prepare};
use crate::ring::{Bell, Channel, Command};
use crate::send::Outbound;
use crate::settings::Settings;
use crate::ticket::MAX_RANKS;
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Another rank.
pub(crate) struct Peer {
    pub(crate) control: Control,
    pub(crate) bridge: Option<Arc<Bridge>>,
    /// It has closed the connection in order, or was found to be gone.
    pub(crate) left: AtomicBool,
}

/// Fetches under way.
#[derive(Default)]
pub(crate) struct Fetches {
    /// For each: 0 while the answer is not here, then the sequence number that the stream from the answering rank must have passed.
    pub(crate) answers: Vec<u64>,
    pub(crate) free: VecDeque<u32>,
}

/// A connection of this rank to all others.
pub(crate) struct Comm {
    pub(crate) rank: usize,
    pub(crate) settings: Settings,
    pub(crate) cuda: Arc<Cuda>,
    /// Empty at the own rank.
    pub(crate) peers: Vec<Option<Peer>>,
    pub(crate) inbound: Vec<Arc<Channel>>,
    pub(crate) outbound: Vec<Outbound>,
    pub(crate) regions: Regions,
    pub(crate) fetches: Mutex<Fetches>,
    pub(crate) failure: Arc<Failure>,
    /// The agent's.
    pub(crate) bell: Bell,
    pub(crate) stop: AtomicBool,
    /// How often the agent was asked to bring its streams to rest, and how often it has.
    pub(crate) rest_wanted: AtomicU64,
    pub(crate) rested: AtomicU64,
    contexts: AtomicUsize,
    /// Registrations come one at a time.
    collective: Mutex<()>,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    agent: Option<JoinHandle<()>>,
    bridges: Vec<JoinHandle<()>>,
}

impl Comm {
    /// Connects; collective.
    pub(crate) fn connect(handles: &[Handle], rank: usize, listener: &Listener) -> Result<Arc<Self>> {
        let ranks = handles.len();
        if rank >= ranks || ranks > MAX_RANKS {
            return Err(Error::Argument(format!("rank {rank} of {ranks} (at most {MAX_RANKS})")));
        }
        let settings = Settings::from_env();
        let cuda = Arc::new(Cuda::current()?);
        let links = connect(&settings, handles, rank, listener)?;
        let deadline = Deadline::after(settings.timeout);
        let bell = Bell::new()?;
        let failure = Arc::new(Failure::default());

        // The receiver makes the ring. Inside a host the sender maps it; to another host each side makes one of its own.
        let inbound: Vec<Arc<Channel>> =
            (0..ranks).map(|_| Channel::create(&cuda, bell.clone()).map(Arc::new)).collect::<Result<_>>()?;
        for (link, channel) in links.iter().zip(&inbound) {
            if let Some(link) = link {
                let fds = [channel.ring().fd(), bell.fd()];
                let fds = if link.data.is_none() { &fds[..] } else { &[] };
                link.control.send(Message::Ring, &(rank as u64), fds, deadline)?;
            }
        }
        let mut outbound = Vec::new();
        let mut peers = Vec::new();
        for (other, link) in links.into_iter().enumerate() {
            let Some(link) = link else {
                outbound.push(Outbound::new(Arc::clone(&inbound[other])));
                peers.push(None);
                continue;
            };
            let (_, mut fds) = link.control.receive::<u64>(Message::Ring, 2, deadline)?;
            let channel = match (link.data.is_none(), fds.pop(), fds.pop()) {
                (true, Some(bell), Some(ring)) => Channel::open(&cuda, ring, Bell::of(bell))?,
                (true, ..) => {
                    return Err(Error::Protocol { rank: other, reason: "its ring did not come".into() });
                }
                (false, ..) => Channel::create(&cuda, Bell::new()?)?,
            };
            let channel = Arc::new(channel);
            let bridge = match link.data {
                Some(socket) => Some(Arc::new(Bridge::new(
                    other,
                    socket,
                    Arc::clone(&inbound[other]),
                    Arc::clone(&channel),
                    Arc::clone(&failure),
                    settings.spin,
                )?)),
                None => None,
            };
            outbound.push(Outbound::new(channel));
            peers.push(Some(Peer { control: link.control, bridge, left: AtomicBool::new(false) }));
        }
        let comm = Arc::new(Self {
            rank,
            settings,
            cuda,
            peers,
            inbound,
            outbound,
            regions: Regions::default(),
            fetches: Mutex::default(),
            failure,
            bell,
            stop: AtomicBool::new(false),
            rest_wanted: AtomicU64::new(0),
            rested: AtomicU64::new(0),
            contexts: AtomicUsize::new(0),
            collective: Mutex::new(()),
            threads: Mutex::default(),
        });
        let started = comm.start().and_then(|()| comm.barrier(deadline));
        if let Err(error) = started {
            comm.close();
            return Err(error);
        }
        let far = comm.peers().filter(|(_, peer)| peer.bridge.is_some()).count();
        info!(
            "rank {rank} of {ranks} connected: device {}, {far} ranks over TCP{}",
            comm.cuda.device(),
            if comm.settings.stage { ", staging forced" } else { "" }
        );
        Ok(comm)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.inbound.len()
    }

    /// The other ranks.
    pub(crate) fn peers(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    fn start(self: &Arc<Self>) -> Result<()> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let agent = Agent::new(Arc::clone(self))?;
        threads.agent = Some(spawn(format!("gin-soft {}", self.rank), move || agent.run())?);
        for (other, peer) in self.peers() {
            if let Some(bridge) = &peer.bridge {
                let (reader, writer) = (Arc::clone(bridge), Arc::clone(bridge));
                // The writer ends the reader: never the reader alone.
                threads.bridges.push(spawn(format!("gin-soft >{other}"), move || writer.write())?);
                threads.bridges.push(spawn(format!("gin-soft <{other}"), move || reader.read())?);
            }
        }
        Ok(())
    }

    fn barrier(&self, deadline: Deadline) -> Result<()> {
        for (_, peer) in self.peers() {
            peer.control.send(Message::Outcome, &1u64, &[], deadline)?;
        }
        for (_, peer) in self.peers() {
            peer.control.receive::<u64>(Message::Outcome, 0, deadline)?;
        }
        Ok(())
    }

    /// Number of the first of some contexts.
    pub(crate) fn new_contexts(&self, count: usize) -> usize {
        self.contexts.fetch_add(count.max(1), Ordering::Relaxed)
    }

    /// Registers memory; collective. Returns the handle.
    ///
    /// # Errors
    /// A rank could not do its part: none has the registration then. If the ranks have lost each other, the connection has failed.
    pub(crate) fn register(&self, base: usize, size: usize, kind: i32, flags: u64) -> Result<usize> {
        let _one_at_a_time = self.collective.lock().unwrap_or_else(PoisonError::into_inner);
        self.failure.check()?;
        let _entered = self.cuda.enter("registering memory")?;
        let id = self.regions.next();
        if id >= Command::REGISTRATIONS {
            return Err(Error::Argument(format!("registration {id} of at most {}", Command::REGISTRATIONS)));
        }
        let partners: Vec<Partner<'_>> = self
            .peers()
            .map(|(rank, peer)| Partner {
                rank,
                control: &peer.control,
                local: peer.bridge.is_none(),
                inbound: &self.inbound[rank],
                outbound: &self.outbound[rank].channel,
            })
            .collect();
        let registration = Registration { id, base: base as u64, size: size as u64, kind, flags };
        let deadline = Deadline::after(self.settings.timeout);
        let share = !self.settings.stage;
        let lost = |error: &Error| self.failure.set(error.clone());
        let prepared = prepare(&self.cuda, self.ranks(), &partners, registration, share, deadline);
        let own = match prepared.inspect_err(lost)? {
            Ok(mut region) => {
                // The own rank sees the whole of it.
                region.peers[self.rank].size = region.size;
                let mapped = region.peers.iter().filter(|view| view.mapping.is_some()).count();
                info!(
                    "rank {}: registration {id}: {base:#x} + {size}, kind {kind}, flags {flags}, {mapped} peers mapped",
                    self.rank
                );
                self.regions.insert(region);
                Ok(())
            }
            Err(error) => Err(error),
        };
        let other = conclude(&partners, id, own.is_ok(), deadline).inspect_err(lost);
        let outcome = own.and_then(|()| match other? {
            Some(rank) => Err(Error::PeerFailed { rank }),
            None => Ok(handle_of(id)),
        });
        if outcome.is_err() {
            // The agent may have come across it.
            let removed = self.regions.remove(id);
            if removed.is_some() && !self.rest() {
                std::mem::forget(removed);
            }
        }
        outcome
    }

    /// Ends a registration on this rank. When it returns, nothing reads or writes the memory any more, not even for a rank that sends without leave.
    pub(crate) fn deregister(&self, handle: usize) -> Result<()> {
        let region = self.regions.of_handle(handle)?;
        self.regions.remove(region.id);
        if !self.rest() {
            warning!(
                "rank {}: a stream did not come to rest within {REST:?}; memory of other ranks stays mapped",
                self.rank
            );
            std::mem::forget(region);
        }
        Ok(())
    }

    /// Waits until the GPU has done all that the agent has taken so far, and the agent has let go of what is registered no more. Returns whether it has.
    fn rest(&self) -> bool {
        let wanted = self.rest_wanted.fetch_add(1, Ordering::AcqRel) + 1;
        self.bell.ring();
        let end = Instant::now() + REST;
        while self.rested.load(Ordering::Acquire) < wanted {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        true
    }

    /// Ends all threads, tells the others, and lets go of what they share. Never waits for another rank for longer than a second.
    pub(crate) fn close(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(agent) = threads.agent.take()
            && agent.join().is_err()
        {
            warning!("rank {}: the agent's thread panicked", self.rank);
        }
        for (rank, peer) in self.peers() {
            match &peer.bridge {
                Some(bridge) => bridge.close(),
                None => self.outbound[rank].channel.closed().store(1, Ordering::Release),
            }
        }
        for thread in threads.bridges.drain(..) {
            if thread.join().is_err() {
                warning!("rank {}: a thread of a link panicked", self.rank);
            }
        }
        for (_, peer) in self.peers() {
            let _ = rustix::net::shutdown(peer.control.fd().as_fd(), rustix::net::Shutdown::Both);
        }
        self.regions.clear();
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(run).map_err(Error::io("starting a thread"))
}
