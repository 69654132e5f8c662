//! Waits that end: when the cell has its value, when a rank gave up, or at the deadline.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::memory::Area;
use crate::backend::abort::gave_up;
use crate::deadline;
use crate::error::{Error, Result};
use crate::layout::{AbortWord, Operation, Phase};

/// The waits of one operation, which have one deadline.
pub(super) struct Waits<'a> {
    me: usize,
    /// The abort cell of every rank.
    aborts: Vec<&'a AtomicU64>,
    timeout: Duration,
    deadline: Instant,
    operation: Operation,
    epoch: u32,
}

/// Polls before the first yield, and yields before the first sleep.
const SPINS: u32 = 200;
const YIELDS: u32 = 2000;
const SLEEP: Duration = Duration::from_micros(50);

/// Whether `value` is `target` or a later epoch; epochs wrap.
fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) < 1 << 31
}

impl<'a> Waits<'a> {
    /// Starts an operation; an error if a rank gave up before, in an operation that this one may not even have joined.
    pub(super) fn new(
        me: usize,
        areas: &[Area<'a>],
        abort: usize,
        timeout: Duration,
        operation: Operation,
        epoch: u32,
    ) -> Result<Self> {
        let aborts = areas.iter().map(|area| area.cell64(abort)).collect::<Result<_>>()?;
        let waits = Self { me, aborts, timeout, deadline: deadline::within(timeout), operation, epoch };
        waits.aborted().map_or(Ok(waits), Err)
    }

    /// Waits until the cell holds `target` or a later epoch.
    pub(super) fn at_least(&self, cell: &AtomicU32, target: u32, phase: Phase, peer: usize) -> Result<()> {
        let poll = || {
            let seen = cell.load(Ordering::Acquire);
            (reached(seen, target), u64::from(seen))
        };
        self.until(poll, u64::from(target), phase, peer).map(drop)
    }

    /// Waits until the cell holds `target`.
    pub(super) fn equal(&self, cell: &AtomicU32, target: u32, phase: Phase, peer: usize) -> Result<()> {
        let poll = || {
            let seen = cell.load(Ordering::Acquire);
            (seen == target, u64::from(seen))
        };
        self.until(poll, u64::from(target), phase, peer).map(drop)
    }

    /// Waits until the upper half of the cell is `epoch`, and returns the lower half.
    pub(super) fn value(&self, cell: &AtomicU64, epoch: u32, phase: Phase, peer: usize) -> Result<u32> {
        let poll = || {
            let seen = cell.load(Ordering::Acquire);
            (seen >> 32 == u64::from(epoch), seen)
        };
        Ok(self.until(poll, u64::from(epoch) << 32, phase, peer)? as u32)
    }

    /// Waits until the epoch of the cell, its upper half, is at least `target`; the cell.
    pub(super) fn begun(&self, cell: &AtomicU64, target: u32, peer: usize) -> Result<u64> {
        let poll = || {
            let seen = cell.load(Ordering::Acquire);
            (reached((seen >> 32) as u32, target), seen)
        };
        self.until(poll, u64::from(target) << 32, Phase::Started, peer)
    }

    /// A peer makes another call: gives up, for all ranks.
    pub(super) fn differs(&self, peer: usize, own: u32, other: u32) -> Error {
        let word = self.abort(Phase::Parameters, peer);
        gave_up(word, self.timeout, Some([own.into(), other.into()]))
    }

    /// An error if a rank has given up by now.
    pub(super) fn nobody_gave_up(&self) -> Result<()> {
        self.aborted().map_or(Ok(()), Err)
    }

    fn until(&self, poll: impl Fn() -> (bool, u64), expected: u64, phase: Phase, peer: usize) -> Result<u64> {
        let mut polls = 0u32;
        loop {
            let (ready, seen) = poll();
            if ready {
                return Ok(seen);
            }
            if let Some(error) = self.aborted() {
                return Err(error);
            }
            polls = polls.saturating_add(1);
            if polls < SPINS {
                std::hint::spin_loop();
                continue;
            }
            if Instant::now() >= self.deadline {
                let word = self.abort(phase, peer);
                return Err(gave_up(word, self.timeout, Some([expected, seen])));
            }
            if polls < YIELDS { thread::yield_now() } else { thread::sleep(SLEEP) }
        }
    }

    /// Tells every rank that this one gives up, unless another one did before.
    fn abort(&self, phase: Phase, missing: usize) -> AbortWord {
        let word = AbortWord {
            epoch: self.epoch,
            missing: missing as u32,
            origin: self.me as u32,
            phase: phase as u32,
            operation: self.operation as u32,
        };
        for cell in &self.aborts {
            // Failure means that an earlier abort is there, which stays.
            let _ = cell.compare_exchange(0, word.encode(), Ordering::AcqRel, Ordering::Acquire);
        }
        word
    }

    /// The error of a rank that gave up, if one did.
    fn aborted(&self) -> Option<Error> {
        let word = AbortWord::decode(self.aborts[self.me].load(Ordering::Acquire))?;
        Some(gave_up(word, self.timeout, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::thread_group;
    use crate::{BackendKind, Config, ElasticBuffer};

    #[test]
    fn epochs_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(1, u32::MAX) && !reached(u32::MAX, 1));
        assert!(reached(0, u32::MAX));
    }

    #[test]
    fn the_longest_timeout_is_one() {
        let ranks = thread_group(2, Duration::MAX).unwrap();
        thread::scope(|scope| {
            for bootstrap in ranks {
                scope.spawn(move || {
                    let mut config = Config::new(4, 4, 2, 64);
                    (config.backend, config.timeout) = (BackendKind::Host, Duration::MAX);
                    let mut buffer = ElasticBuffer::with_config(config).build(bootstrap).unwrap();
                    buffer.barrier().unwrap();
                    buffer.synchronize(Duration::MAX).unwrap();
                    buffer.close().unwrap();
                });
            }
        });
    }
}
