//! The ring of commands from one rank to another.
//!
//! The receiver owns the memory; the sender writes commands, the receiver's agent carries them out. Two kinds of words in it are written by GPUs,
//! not by CPUs: `ready` in a slot (staged payload has arrived), by the sender's; and the `done` words, by the receiver's: all commands of that stream below
//! this sequence number have been carried out. Between hosts each side has a copy of its own, and two threads keep them alike.

mod bell;
mod command;

pub(crate) use bell::Bell;
pub(crate) use command::{Command, CommandError, Kind, NONE};

use crate::cuda::{Cuda, Pinned};
use crate::error::Result;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// Commands that may be under way. A power of two.
pub(crate) const SLOTS: u64 = 1024;
/// Streams of a connection; contexts are spread over them.
pub(crate) const STREAMS: usize = 4;
/// Bytes that a slot carries itself.
pub(crate) const INLINE: u64 = 64;
/// Staging memory of a directed pair.
pub(crate) const STAGING: u64 = 8 << 20;
/// Staged payload goes in pieces of this size, so that the pieces overlap.
pub(crate) const CHUNK: u64 = 1 << 20;

const LINE: usize = 64;
const DONE: usize = LINE;
const PARKED: usize = DONE + STREAMS * LINE;
const CLOSED: usize = PARKED + LINE;
const FAILED: usize = CLOSED + LINE;
const HEADER: usize = 4096;
const SLOT: usize = 256;
/// Where a slot's payload is, behind the line of the command, and where its `ready` word.
const SLOT_INLINE: usize = LINE;
const SLOT_READY: usize = SLOT_INLINE + INLINE as usize;
/// Bytes of a ring.
pub(crate) const RING: usize = HEADER + SLOTS as usize * SLOT;

const _: () =
    assert!(FAILED + LINE <= HEADER && 8 + Command::WORDS * 8 <= SLOT_INLINE && SLOT_READY + 8 <= SLOT);
const _: () = assert!(SLOTS.is_power_of_two() && STAGING.is_multiple_of(CHUNK));

/// One end of a ring.
pub(crate) struct Channel {
    ring: Pinned,
    staging: OnceLock<Pinned>,
    /// Wakes whoever works on the commands.
    bell: Bell,
}

impl Channel {
    /// Makes a ring. The context must be current.
    pub(crate) fn create(cuda: &Arc<Cuda>, bell: Bell) -> Result<Self> {
        Ok(Self { ring: Pinned::create(cuda, RING)?, staging: OnceLock::new(), bell })
    }

    /// Maps a ring that another rank made. The context must be current.
    pub(crate) fn open(cuda: &Arc<Cuda>, fd: OwnedFd, bell: Bell) -> Result<Self> {
        Ok(Self { ring: Pinned::open(cuda, fd, RING)?, staging: OnceLock::new(), bell })
    }

    pub(crate) fn ring(&self) -> &Pinned {
        &self.ring
    }

    /// Sequence number that all commands of a stream are below that have been carried out.
    pub(crate) fn done(&self, stream: usize) -> &AtomicU64 {
        self.ring.word(DONE + stream % STREAMS * LINE)
    }

    pub(crate) fn done_device(&self, stream: usize) -> u64 {
        self.ring.device(DONE + stream % STREAMS * LINE)
    }

    /// Set by the sender when it closes the connection in order.
    pub(crate) fn closed(&self) -> &AtomicU64 {
        self.ring.word(CLOSED)
    }

    /// Set by the receiver when it can work no more.
    pub(crate) fn failed(&self) -> &AtomicU64 {
        self.ring.word(FAILED)
    }

    /// Set while whoever works on the commands sleeps.
    pub(crate) fn parked(&self) -> &AtomicU64 {
        self.ring.word(PARKED)
    }

    fn slot(&self, sequence: u64) -> usize {
        HEADER + (sequence % SLOTS) as usize * SLOT
    }

    /// Puts a command into the slot of its sequence number, which must be free.
    pub(crate) fn post(&self, sequence: u64, command: &Command) {
        let slot = self.slot(sequence);
        for (index, word) in command.encode().into_iter().enumerate() {
            self.ring.word(slot + 8 + index * 8).store(word, Ordering::Relaxed);
        }
        if command.kind == Kind::Inline {
            let words: [u64; INLINE as usize / 8] = bytemuck::cast(command.inline);
            let at = self.inline_at(sequence, command.size);
            for (index, word) in words.into_iter().enumerate().take(command.size.div_ceil(8) as usize) {
                self.ring.word(at + index * 8).store(word, Ordering::Relaxed);
            }
        }
        // Release: who sees the number sees the command.
        self.ring.word(slot).store(sequence + 1, Ordering::Release);
    }

    /// Wakes the other side if it sleeps. To be called after `post`.
    pub(crate) fn ring_bell(&self) {
        // The store of the sequence number before the load of `parked`, as the sleeper stores `parked` before it looks at the ring again.
        fence(Ordering::SeqCst);
        if self.parked().load(Ordering::Relaxed) != 0 {
            self.bell.ring();
        }
    }

    /// Wakes whoever works on the commands, asleep or not.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Whether the command of this sequence number is there.
    pub(crate) fn is_posted(&self, sequence: u64) -> bool {
        // Acquire: pairs with `post`.
        self.ring.word(self.slot(sequence)).load(Ordering::Acquire) == sequence + 1
    }

    /// The words of a posted command, not checked yet: another process wrote them.
    pub(crate) fn words(&self, sequence: u64) -> [u64; Command::WORDS] {
        let slot = self.slot(sequence);
        std::array::from_fn(|index| self.ring.word(slot + 8 + index * 8).load(Ordering::Relaxed))
    }

    /// Where a payload of this size is. One word takes the place of the source's offset, which no such command has: it travels with the command's own
    /// cache line.
    fn inline_at(&self, sequence: u64, size: u64) -> usize {
        self.slot(sequence) + if size <= 8 { 8 + Command::FROM_OFFSET * 8 } else { SLOT_INLINE }
    }

    /// The payload of a slot, of a size that was checked.
    pub(crate) fn inline(&self, sequence: u64, size: u64) -> [u8; INLINE as usize] {
        let (at, count) = (self.inline_at(sequence, size), size.div_ceil(8) as usize);
        let mut words = [0u64; INLINE as usize / 8];
        for (index, word) in words.iter_mut().enumerate().take(count) {
            *word = self.ring.word(at + index * 8).load(Ordering::Relaxed);
        }
        bytemuck::cast(words)
    }

    pub(crate) fn inline_device(&self, sequence: u64, size: u64) -> u64 {
        self.ring.device(self.inline_at(sequence, size))
    }

    /// Holds `sequence + 1` once the staged payload of that command is there.
    pub(crate) fn ready(&self, sequence: u64) -> &AtomicU64 {
        self.ring.word(self.slot(sequence) + SLOT_READY)
    }

    pub(crate) fn ready_device(&self, sequence: u64) -> u64 {
        self.ring.device(self.slot(sequence) + SLOT_READY)
    }

    /// The staging memory, if this pair has needed any so far.
    pub(crate) fn staging(&self) -> Option<&Pinned> {
        self.staging.get()
    }

    /// Gives the pair its staging memory. A second one is dropped: both ends agreed on the first.
    pub(crate) fn set_staging(&self, staging: Pinned) {
        let _ = self.staging.set(staging);
    }
}
