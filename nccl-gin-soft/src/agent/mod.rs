//! The agent: one thread of a connection, which carries out what the other ranks command, with this rank's copy engines.
//!
//! It is the only thread that makes CUDA calls on the data path, in streams of its own that never wait for anything: kernels that spin
//! for a signal are not in its way, and it is not in theirs.

mod adds;
mod queue;
mod watch;

use crate::comm::Comm;
use crate::cuda::{Copies, Stream, Words, warm_up};
use crate::error::{Error, Result};
use crate::idle::Idle;
use crate::log::warning;
use crate::region::{Followed, Region};
use crate::ring::{Command, Kind, NONE, STREAMS};
use crate::send::Pump;
use adds::Adder;
use queue::{Queue, Route};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use watch::Watch;

/// Commands that are taken from one rank before the next one's turn.
const TURN: usize = 32;
/// How long streams may take to come to rest, when a registration ends or the connection is closed.
pub(crate) const REST: Duration = Duration::from_secs(10);
/// How long the agent sleeps at most: what it does not hear of by its bell it sees then.
const NAP: Duration = Duration::from_millis(20);

pub(crate) struct Agent {
    comm: Arc<Comm>,
    /// One for each stream.
    queues: Vec<Queue>,
    /// Sequence number of the next command of each rank.
    next: Vec<u64>,
    regions: Followed,
    adder: Adder,
    watch: Watch,
    /// Copies into the staging memories.
    staging: Stream,
    copies: Copies,
    words: Words,
}

impl Agent {
    /// The context must be current.
    pub(crate) fn new(comm: Arc<Comm>) -> Result<Self> {
        let queues: Vec<Queue> = (0..STREAMS)
            .map(|index| Ok(Queue::new(Stream::new(&comm.cuda)?, index)))
            .collect::<Result<_>>()?;
        let staging = Stream::new(&comm.cuda)?;
        let streams = queues.iter().map(|queue| &queue.stream).chain([&staging]);
        warm_up(&comm.cuda, streams, comm.settings.timeout)?;
        Ok(Self {
            queues,
            next: vec![0; comm.ranks()],
            regions: Followed::default(),
            adder: Adder::new(&comm.cuda, comm.settings.timeout)?,
            watch: Watch::new(comm.ranks()),
            staging,
            copies: Copies::default(),
            words: Words::default(),
            comm,
        })
    }

    /// The thread.
    pub(crate) fn run(mut self) {
        let comm = Arc::clone(&self.comm);
        let work = catch_unwind(AssertUnwindSafe(|| comm.cuda.adopt_thread().and_then(|()| self.work())));
        match work {
            Ok(Ok(())) => {}
            Ok(Err(error)) => comm.failure.set(error),
            Err(_) => comm.failure.set(Error::Internal("the agent panicked".into())),
        }
        if comm.failure.has_failed() {
            // Whoever waits for this rank is told. NCCL destroys the connection some time.
            for channel in &comm.inbound {
                channel.failed().store(1, Ordering::Release);
            }
            for outbound in &comm.outbound {
                outbound.channel.bell().ring();
            }
            while !self.stopped() {
                if let Err(error) = self.rest_if_wanted() {
                    warning!("rank {}: {error}", comm.rank);
                }
                comm.bell.wait(&[], NAP);
                comm.bell.hush();
            }
        }
        if let Err(error) = self.drain() {
            warning!("rank {}: {error}", comm.rank);
        }
        self.regions = Followed::default();
        comm.rested.store(u64::MAX, Ordering::Release);
        self.adder.forget();
    }

    /// Waits until all streams have done their work.
    fn drain(&self) -> Result<()> {
        let end = Instant::now() + REST;
        for stream in self.queues.iter().map(|queue| &queue.stream).chain([&self.staging]) {
            if !stream.drain(end.saturating_duration_since(Instant::now()))? {
                return Err(Error::Deadline { attempt: "waiting for copies to end".into(), waited: REST });
            }
        }
        Ok(())
    }

    /// Tells whoever ends a registration that nothing is under way that was taken before. In a broken stream there is nothing under way either.
    fn rest_if_wanted(&mut self) -> Result<()> {
        // Acquire: what was registered no more before is seen to be so.
        let wanted = self.comm.rest_wanted.load(Ordering::Acquire);
        if wanted > self.comm.rested.load(Ordering::Relaxed) {
            self.regions.follow(&self.comm.regions);
            let rested = self.drain();
            if !matches!(rested, Err(Error::Deadline { .. })) {
                self.comm.rested.store(wanted, Ordering::Release);
            }
            rested?;
        }
        Ok(())
    }

    fn stopped(&self) -> bool {
        self.comm.stop.load(Ordering::Acquire)
    }

    fn work(&mut self) -> Result<()> {
        let comm = Arc::clone(&self.comm);
        let mut idle = Idle::new(comm.settings.spin);
        let mut turns = 0u32;
        while !self.stopped() {
            if comm.rest_wanted.load(Ordering::Acquire) > comm.rested.load(Ordering::Relaxed) {
                self.queues.iter_mut().try_for_each(|queue| queue.flush(&comm, &mut self.adder))?;
                self.rest_if_wanted()?;
            }
            let mut worked = self.take_all()?;
            let mut held = false;
            for queue in &mut self.queues {
                if queue.is_empty() {
                    queue.settle(&comm.inbound);
                    continue;
                }
                if queue.may_flush(&comm.inbound) {
                    queue.flush(&comm, &mut self.adder)?;
                    worked = true;
                } else {
                    held = true;
                }
            }
            for outbound in comm.outbound.iter().filter(|outbound| outbound.has_waiting()) {
                let pump = Pump { stream: &self.staging, copies: &mut self.copies, words: &mut self.words };
                worked |= outbound.pump(Some(pump))?.0 > 0;
                held = true;
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(256) {
                self.look_around()?;
            }
            if worked {
                idle.reset();
            } else if idle.turn() && !held {
                self.sleep()?;
            }
        }
        // What was commanded before the end is still carried out.
        self.take_all()?;
        for queue in &mut self.queues {
            queue.flush(&comm, &mut self.adder)?;
        }
        Ok(())
    }

    /// Who has left, and whether the streams are well.
    fn look_around(&mut self) -> Result<()> {
        if self.watch.is_due() {
            self.watch.look(&self.comm)?;
            self.comm.failure.check()?;
            for queue in &self.queues {
                queue.stream.is_idle()?;
            }
            self.staging.is_idle()?;
        }
        Ok(())
    }

    fn sleep(&mut self) -> Result<()> {
        let comm = Arc::clone(&self.comm);
        for channel in &comm.inbound {
            channel.parked().store(1, Ordering::SeqCst);
        }
        // Before the last look, as senders post before they look whether anybody sleeps.
        fence(Ordering::SeqCst);
        let quiet = !self.has_commands() && !comm.outbound.iter().any(|outbound| outbound.has_waiting());
        if quiet && !self.stopped() {
            comm.bell.wait(&self.watch.sockets(&comm), NAP);
        }
        for channel in &comm.inbound {
            channel.parked().store(0, Ordering::SeqCst);
        }
        comm.bell.hush();
        self.look_around()
    }

    fn has_commands(&self) -> bool {
        self.comm.inbound.iter().zip(&self.next).any(|(channel, &next)| channel.is_posted(next))
    }

    /// Takes commands of all ranks. Returns whether there were any.
    fn take_all(&mut self) -> Result<bool> {
        let mut worked = false;
        for rank in 0..self.next.len() {
            for _ in 0..TURN {
                if !self.take(rank)? {
                    break;
                }
                worked = true;
            }
        }
        Ok(worked)
    }

    /// Takes the next command of a rank, if it is there.
    fn take(&mut self, rank: usize) -> Result<bool> {
        let sequence = self.next[rank];
        let channel = &self.comm.inbound[rank];
        if !channel.is_posted(sequence) {
            return Ok(false);
        }
        let command = Command::decode(&channel.words(sequence))
            .map_err(|error| Error::Protocol { rank, reason: error.to_string() })?;
        if command.kind == Kind::Staged && channel.ready(sequence).load(Ordering::Acquire) != sequence + 1 {
            return Ok(false);
        }
        self.next[rank] += 1;
        self.execute(rank, sequence, &command)?;
        Ok(true)
    }

    fn execute(&mut self, rank: usize, sequence: u64, command: &Command) -> Result<()> {
        let comm = &*self.comm;
        let channel = &comm.inbound[rank];
        let stream = usize::from(command.stream);
        let lost = |what: &str| Error::Protocol {
            rank,
            reason: format!("{what} out of bounds, or not registered here: {}", command.describe()),
        };
        self.regions.follow(&comm.regions);
        let regions = &self.regions;
        let region = |id| regions.get(id);
        match command.kind {
            Kind::Signal => {}
            Kind::Fetch => {
                let source = region(command.from.0).filter(|r| r.at(command.from.1, command.size).is_some());
                comm.reply(rank, command, Arc::clone(source.ok_or_else(|| lost("a get"))?))?;
            }
            _ => {
                let target = region(command.to.0).ok_or_else(|| lost("a put"))?;
                let to = target.at(command.to.1, command.size).ok_or_else(|| lost("a put"))?;
                let (from, route) = match command.kind {
                    Kind::Inline => (channel.inline_device(sequence, command.size), None),
                    Kind::Staged => {
                        let staging = channel.staging().ok_or_else(|| lost("staged payload"))?;
                        (
                            staging.device(command.from.1 as usize),
                            Some(Route { to: command.to.0, from: (rank, NONE), inside: false }),
                        )
                    }
                    // Only this rank itself commands it to fetch from a third one's memory; a pull is from the sender's own.
                    kind => {
                        let own_get = kind == Kind::Get && rank == comm.rank;
                        let owner = if own_get { usize::from(command.source_rank) } else { rank };
                        let (from, inside) = region(command.from.0)
                            .and_then(|region| source(region, comm.rank, owner, command))
                            .ok_or_else(|| lost("a source"))?;
                        let from_registration = (owner, command.from.0);
                        (from, Some(Route { to: command.to.0, from: from_registration, inside }))
                    }
                };
                let pageable = !target.device;
                if pageable && !target.cpu {
                    return Err(lost("memory that cannot be written"));
                }
                let queue = &mut self.queues[stream];
                if pageable || queue.adds_to(to, command.size) {
                    queue.flush(comm, &mut self.adder)?;
                }
                if pageable {
                    self.adder.reach(comm, &queue.stream)?;
                }
                if pageable && command.kind == Kind::Inline {
                    let bytes = channel.inline(sequence, command.size);
                    // SAFETY: inside a registration of memory that this process can write; `size` is at most the array's (it was decoded).
                    unsafe {
                        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, command.size as usize);
                    }
                } else if command.kind == Kind::Inline {
                    queue.value(to, from, command.size, channel.inline(sequence, command.size))?;
                } else {
                    queue.copy(route, to, from, command.size)?;
                }
            }
        }
        if command.has_signal() {
            let target = region(command.signal.0).ok_or_else(|| lost("a signal"))?;
            let word = target.at(command.signal.1, 8).filter(|word| word.is_multiple_of(8));
            let word = word.ok_or_else(|| lost("a signal"))?;
            match &target.shadow {
                Some(shadow) => {
                    let shadow =
                        shadow.get((command.signal.1 / 8) as usize).ok_or_else(|| lost("a signal"))?;
                    if let Some(other) = shadow.other_stream(stream) {
                        // NCCL gives each context signals of its own. If two share one all the same, the older value must not come last.
                        let queue = &mut self.queues[other];
                        queue.flush(comm, &mut self.adder)?;
                        self.adder.reach(comm, &queue.stream)?;
                    }
                    self.queues[stream].signal(word, shadow.add(command.add, stream));
                }
                None => self.queues[stream].add(word, command.add, target.cpu),
            }
        }
        if command.answers {
            comm.answer(rank, command.ticket, sequence + 1)?;
        }
        let queue = &mut self.queues[stream];
        queue.done(rank, channel.done_device(stream), sequence + 1);
        // One that comes alone is not kept waiting by a look for more.
        if queue.is_full() || queue.is_settled() {
            queue.flush(comm, &mut self.adder)?;
        }
        Ok(())
    }
}

/// Address here, on rank `here`, of the source of a copy, and whether it is memory of this rank's device.
fn source(region: &Region, here: usize, owner: usize, command: &Command) -> Option<(u64, bool)> {
    let (offset, size) = (command.from.1, command.size);
    if owner == here {
        return Some((region.at(offset, size)?, true));
    }
    let inside = region.peers.get(owner)?.mapping.as_ref()?.is_own_device();
    Some((region.at_peer(owner, offset, size)?, inside))
}

/// Waits for a word that the GPU writes, for as long as the connection lasts and the deadline allows.
fn wait_for(
    stream: &Stream,
    comm: &Comm,
    word: &std::sync::atomic::AtomicU64,
    value: u64,
    timeout: Duration,
) -> Result<()> {
    let mut idle = Idle::new(Duration::from_millis(20));
    let start = Instant::now();
    // Acquire: what the GPU wrote before it is visible.
    while word.load(Ordering::Acquire) < value {
        if idle.turn() {
            idle.reset();
            stream.is_idle()?;
            if start.elapsed() > timeout {
                let attempt = "waiting for the GPU to read a signal".to_owned();
                return Err(Error::Deadline { attempt, waited: timeout });
            }
            comm.failure.check()?;
        }
    }
    Ok(())
}
