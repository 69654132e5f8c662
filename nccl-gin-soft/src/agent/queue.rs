//! What is to be done in one stream, until it is handed to the driver.
//!
//! A batch becomes: all copies, then values, then signals, then the words that report what is done. Signals and reports are absolute values, so that
//! several on one word need one write. While two batches are under way the next one collects: one command alone costs the GPU
//! about twice as much as one of a batch, and with fewer under way nothing would be gained by waiting.
//!
//! The GPU starts when a call of the driver ends, and each word makes the call longer. So where nothing is under way that the stream would
//! wait for, signals go in a call of their own, and the reports, which nobody waits for as urgently, in the next.

use super::adds::Adder;
use crate::comm::Comm;
use crate::cuda::{Copies, Stream, Words};
use crate::error::Result;
use crate::ring::{Channel, INLINE};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Copies and words after which a batch is handed over.
const FULL: usize = 64;
/// Payload after which it is: signals must not wait for much more.
const FULL_BYTES: u64 = 16 << 20;

/// A report that will be there when its batch is done: rank, and sequence number.
type Marker = Option<(usize, u64)>;

/// In cache lines of its own: the agent writes it for each command.
#[repr(align(128))]
pub(crate) struct Queue {
    pub(crate) stream: Stream,
    index_of_marker: usize,
    copies: Copies,
    values: Words,
    signals: Words,
    dones: Words,
    adds: Vec<Add>,
    /// Ranges that the collected copies write, and those of the values: a later copy to the same bytes must not overtake.
    copied: Vec<Range<u64>>,
    valued: Vec<Range<u64>>,
    /// What the last copy was between: one that goes on from it there becomes part of it.
    route: Option<Route>,
    /// Commands that were collected; some copies may be with the driver already.
    commands: usize,
    bytes: u64,
    marker: Marker,
    running: [Marker; 2],
}

/// What a copy is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Registration that it writes.
    pub(crate) to: u64,
    /// Rank and registration that it reads; staging memory has none.
    pub(crate) from: (usize, u64),
    /// Whether it is from the device to itself.
    pub(crate) inside: bool,
}

/// A word that must be read before it can be added to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Add {
    pub(crate) word: u64,
    pub(crate) add: u64,
    /// Whether the CPU can do it.
    pub(crate) cpu: bool,
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Queue {
    pub(crate) fn new(stream: Stream, index: usize) -> Self {
        Self {
            stream,
            index_of_marker: index,
            copies: Copies::default(),
            values: Words::default(),
            signals: Words::default(),
            dones: Words::default(),
            adds: Vec::new(),
            copied: Vec::new(),
            valued: Vec::new(),
            route: None,
            commands: 0,
            bytes: 0,
            marker: None,
            running: [None; 2],
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        // Every command ends with its report.
        self.dones.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.copies.len() + self.values.len() + self.signals.len() + self.adds.len() >= FULL
            || self.commands >= 2 * FULL
            || self.bytes >= FULL_BYTES
    }

    /// Whether fewer than two batches are under way.
    pub(crate) fn may_flush(&self, inbound: &[Arc<Channel>]) -> bool {
        self.is_reached(self.running[0], inbound)
    }

    fn is_reached(&self, marker: Marker, inbound: &[Arc<Channel>]) -> bool {
        marker.is_none_or(|(rank, sequence)| {
            inbound[rank].done(self.index_of_marker).load(Ordering::Acquire) >= sequence
        })
    }

    /// Looks whether all batches are done. In a turn without work: the words that tell it come from memory, as the GPU wrote them, and who has
    /// a command in hand does not wait for them then.
    pub(crate) fn settle(&mut self, inbound: &[Arc<Channel>]) {
        if self.running[1].is_some() && self.is_reached(self.running[1], inbound) {
            self.running = [None; 2];
        }
    }

    /// Whether nothing was under way when that was last looked at.
    pub(crate) fn is_settled(&self) -> bool {
        self.running[1].is_none()
    }

    /// Whether one of the words that are to be added to is among these bytes: the batch must be handed over before they are written.
    pub(crate) fn adds_to(&self, to: u64, size: u64) -> bool {
        self.adds.iter().any(|one| overlap(&(one.word..one.word + 8), &(to..to + size)))
    }

    /// Copies that were collected have no order. One to the same bytes goes behind them. One that goes on where the last one ended becomes part
    /// of it: each costs the driver and the GPU microseconds, whatever its length.
    pub(crate) fn copy(&mut self, route: Option<Route>, to: u64, from: u64, size: u64) -> Result<()> {
        let target = to..to + size;
        let over_value = self.valued.iter().any(|one| overlap(one, &target));
        if over_value || self.copied.iter().any(|one| overlap(one, &target)) {
            self.stream.copy(&mut self.copies)?;
            self.copied.clear();
        }
        self.bytes += size;
        if route.is_some() && route == self.route && self.copies.extend(to, from, size) {
            if let Some(last) = self.copied.last_mut() {
                last.end = target.end;
            }
            return Ok(());
        }
        self.route = route;
        if over_value {
            self.stream.write(&mut self.values)?;
            self.valued.clear();
        }
        self.copied.push(target);
        self.copies.push(to, from, size, route.is_some_and(|route| route.inside));
        Ok(())
    }

    /// A small value that the slot holds, at `from` for the device. Values are written in order, behind all copies.
    pub(crate) fn value(
        &mut self,
        to: u64,
        from: u64,
        size: u64,
        bytes: [u8; INLINE as usize],
    ) -> Result<()> {
        let [low, ..]: [u64; INLINE as usize / 8] = bytemuck::cast(bytes);
        match size {
            8 if to.is_multiple_of(8) => self.values.push64(to, low),
            4 if to.is_multiple_of(4) => self.values.push32(to, low as u32),
            _ => return self.copy(None, to, from, size),
        }
        self.valued.push(to..to + size);
        Ok(())
    }

    /// A signal whose new value is known.
    pub(crate) fn signal(&mut self, word: u64, value: u64) {
        self.signals.set64(word, value);
    }

    /// A signal that someone else may write as well.
    pub(crate) fn add(&mut self, word: u64, add: u64, cpu: bool) {
        match self.adds.iter_mut().find(|one| one.word == word) {
            Some(one) => one.add = one.add.wrapping_add(add),
            None => self.adds.push(Add { word, add, cpu }),
        }
    }

    /// The report of a command.
    pub(crate) fn done(&mut self, rank: usize, word: u64, below: u64) {
        self.commands += 1;
        self.dones.set64(word, below);
        self.marker = Some((rank, below));
    }

    /// Hands the batch to the driver.
    pub(crate) fn flush(&mut self, comm: &Comm, adder: &mut Adder) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let alone = self.is_settled() && self.copies.is_empty();
        self.stream.copy(&mut self.copies)?;
        if !self.adds.is_empty() {
            self.stream.write(&mut self.values)?;
            adder.apply(comm, &self.stream, &mut self.adds)?;
        }
        let mut words = std::mem::take(&mut self.values);
        words.append(&mut self.signals);
        if alone {
            self.stream.write(&mut words)?;
        }
        words.append(&mut self.dones);
        self.stream.write(&mut words)?;
        self.values = words;
        self.running = [self.running[1], self.marker.take()];
        (self.commands, self.bytes) = (0, 0);
        self.copied.clear();
        self.valued.clear();
        Ok(())
    }
}
