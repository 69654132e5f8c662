//! One directed pair of ranks, as its sender sees it.

use super::staging::Places;
use crate::cuda::{Copies, Stream, Words};
use crate::error::{Error, Result};
use crate::line::Line;
use crate::region::Region;
use crate::ring::{CHUNK, Channel, Command, INLINE, Kind, SLOTS};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An operation on its way into the ring.
pub(crate) struct Operation {
    /// What its last command says; earlier ones carry pieces of the payload and no signal.
    pub(crate) command: Command,
    /// Memory that the payload is taken from here, by [`Kind::Inline`] and [`Kind::Staged`], and where in it.
    pub(crate) source: Option<(Arc<Region>, u64)>,
    /// Bytes that are in the ring already.
    pub(crate) posted: u64,
}

impl Operation {
    /// Bytes of payload that one command takes at most.
    fn piece(&self) -> u64 {
        match self.command.kind {
            Kind::Inline => INLINE,
            Kind::Staged => CHUNK,
            _ => u64::MAX,
        }
    }

    /// Commands that it becomes.
    fn commands(&self) -> u64 {
        self.command.size.div_ceil(self.piece()).max(1)
    }
}

/// What the agent lends for payload that is staged.
pub(crate) struct Pump<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) copies: &'a mut Copies,
    pub(crate) words: &'a mut Words,
}

struct State {
    /// Sequence number that comes after all operations that were accepted.
    end: u64,
    slots: Slots,
    /// Operations that are not, or not all, in the ring.
    waiting: VecDeque<Operation>,
}

/// What is in the ring.
struct Slots {
    /// Sequence number of the next command to be posted.
    next: u64,
    /// Stream of the command that was last put into each slot.
    streams: Vec<u8>,
    places: Places,
}

/// The sender's end of a ring.
pub(crate) struct Outbound {
    pub(crate) channel: Arc<Channel>,
    state: Line<Mutex<State>>,
    /// Operations that wait, to be looked at without the lock: the agent does in every turn.
    waiting: Line<AtomicUsize>,
}

impl Outbound {
    pub(crate) fn new(channel: Arc<Channel>) -> Self {
        let slots = Slots { next: 0, streams: vec![0; SLOTS as usize], places: Places::default() };
        let state = State { end: 0, slots, waiting: VecDeque::with_capacity(64) };
        Self { channel, state: Line(Mutex::new(state)), waiting: Line::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether operations wait for room or for the agent.
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Accepts an operation. Returns the sequence number that its stream will have passed when it is done, and whether the agent has to do something.
    pub(crate) fn submit(&self, mut operation: Operation) -> Result<(u64, bool)> {
        let mut state = self.lock();
        state.end += operation.commands();
        let (end, first) = (state.end, state.slots.next);
        // Mostly nothing waits, and there is room.
        if !state.waiting.is_empty() || !self.post(&mut state.slots, &mut operation, &mut None)? {
            state.waiting.push_back(operation);
            self.post_waiting(&mut state, &mut None)?;
        }
        Ok((end, self.finish(&state, first)))
    }

    /// Posts what can be posted by now. Only the agent can stage. Returns how many commands that were, and whether the agent has to do something.
    pub(crate) fn pump(&self, mut agent: Option<Pump<'_>>) -> Result<(u64, bool)> {
        let mut state = self.lock();
        let first = state.slots.next;
        self.post_waiting(&mut state, &mut agent)?;
        if let Some(agent) = agent {
            agent.stream.copy(agent.copies)?;
            agent.stream.write(agent.words)?;
        }
        Ok((state.slots.next - first, self.finish(&state, first)))
    }

    /// What was posted from `first` on is made known.
    fn finish(&self, state: &State, first: u64) -> bool {
        // Written by who holds the lock only. Mostly it is 0 and stays so: then the agent's copy of the line is left alone.
        if self.waiting.load(Ordering::Relaxed) != state.waiting.len() {
            self.waiting.store(state.waiting.len(), Ordering::Release);
        }
        if state.slots.next > first {
            self.channel.ring_bell();
        }
        state.waiting.front().is_some_and(|one| one.command.kind == Kind::Staged)
    }

    /// Whether the command of a sequence number is done.
    fn is_done(&self, streams: &[u8], sequence: u64) -> bool {
        let stream = usize::from(streams[(sequence % SLOTS) as usize]);
        self.channel.done(stream).load(Ordering::Acquire) > sequence
    }

    fn post_waiting(&self, state: &mut State, agent: &mut Option<Pump<'_>>) -> Result<()> {
        while let Some(operation) = state.waiting.front_mut() {
            if !self.post(&mut state.slots, operation, agent)? {
                break;
            }
            state.waiting.pop_front();
        }
        Ok(())
    }

    /// Posts the commands of an operation, as far as there is room. Returns whether that were all.
    fn post(
        &self,
        slots: &mut Slots,
        operation: &mut Operation,
        agent: &mut Option<Pump<'_>>,
    ) -> Result<bool> {
        loop {
            let sequence = slots.next;
            if sequence >= SLOTS && !self.is_done(&slots.streams, sequence - SLOTS) {
                return Ok(false);
            }
            let left = operation.command.size - operation.posted;
            let size = left.min(operation.piece());
            let last = size == left;
            let mut command = operation.command;
            if matches!(command.kind, Kind::Inline | Kind::Staged) {
                command.size = size;
                command.to.1 += operation.posted;
                if !last {
                    command.signal.0 = crate::ring::NONE;
                    command.answers = false;
                }
            }
            match command.kind {
                Kind::Inline => fill_inline(&mut command, operation.source.as_ref(), operation.posted)?,
                Kind::Staged => {
                    let Some(agent) = agent else { return Ok(false) };
                    let streams = &slots.streams;
                    slots.places.reclaim(|done| self.is_done(streams, done));
                    let Some(offset) = slots.places.take(sequence, size) else { return Ok(false) };
                    command.from = (crate::ring::NONE, offset);
                    self.stage(sequence, offset, operation, size, agent)?;
                }
                _ => {}
            }
            operation.posted += size;
            slots.streams[(sequence % SLOTS) as usize] = command.stream;
            self.channel.post(sequence, &command);
            slots.next += 1;
            if last {
                return Ok(true);
            }
        }
    }

    /// Starts the copy of one piece into the staging memory; the GPU marks the slot when it is there.
    fn stage(
        &self,
        sequence: u64,
        offset: u64,
        operation: &Operation,
        size: u64,
        agent: &mut Pump<'_>,
    ) -> Result<()> {
        let lost =
            || Error::Argument("payload that is to be staged has no source or no staging memory".into());
        let (region, start) = operation.source.as_ref().ok_or_else(lost)?;
        let staging = self.channel.staging().ok_or_else(lost)?;
        let from = region.at(start + operation.posted, size).ok_or_else(lost)?;
        if region.cpu {
            let to = staging.bytes(offset as usize, size as usize).ok_or_else(lost)?;
            // SAFETY: the source is inside a registration that this process can read (checked when it was made), the target inside the staging memory,
            // in a place that nobody else uses until this command is done. The two do not overlap: the plugin's memory is registered nowhere.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_ptr(), size as usize) };
            self.channel.ready(sequence).store(sequence + 1, Ordering::Release);
        } else {
            agent.copies.push(staging.device(offset as usize), from, size, false);
            agent.words.push64(self.channel.ready_device(sequence), sequence + 1);
        }
        Ok(())
    }
}

fn fill_inline(command: &mut Command, source: Option<&(Arc<Region>, u64)>, posted: u64) -> Result<()> {
    let from = source.and_then(|(region, start)| region.at(start + posted, command.size));
    let readable = source.is_some_and(|(region, _)| region.cpu);
    let Some(from) = from.filter(|_| readable && command.size <= INLINE) else {
        return Err(Error::Argument("a value that is to travel in a slot cannot be read".into()));
    };
    // SAFETY: inside a registration that this process can read (checked when it was made), and no longer than the array. NCCL leaves the source
    // alone until the request is done.
    unsafe {
        std::ptr::copy_nonoverlapping(from as *const u8, command.inline.as_mut_ptr(), command.size as usize);
    }
    Ok(())
}
