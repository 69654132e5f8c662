//! What the kernels of a rank have told its host, as errors and counts.

use std::time::{Duration, Instant};

use super::events::CudaEvent;
use super::status::StatusBlock;
use super::wait::until;
use crate::backend::Counts;
use crate::backend::abort::gave_up;
use crate::error::{Error, Result};
use crate::layout::{CountsLayout, DispatchShape, RecordKind, StatusRecord};

/// How often a wait for counts asks the driver whether the device has failed.
const QUERY: Duration = Duration::from_millis(10);

/// A rank's status block and how to read it.
pub(crate) struct Reports {
    status: StatusBlock,
    rank: usize,
    timeout: Duration,
}

/// Exact counts, and the tokens and rows that would be needed if the call was over capacity, else zeroes.
pub(crate) struct Told {
    pub(crate) counts: Counts,
    pub(crate) needed: [u32; 2],
}

impl Reports {
    /// `timeout` is the longest wait of a kernel.
    pub(crate) fn new(status: StatusBlock, rank: usize, timeout: Duration) -> Self {
        Self { status, rank, timeout }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The longest that the host waits for what kernels do within `timeout` each: for the kernel before, and for the one it is about.
    pub(crate) fn patience(&self) -> Duration {
        self.timeout.saturating_mul(3).saturating_add(Duration::from_secs(1))
    }

    /// An error if some rank gave up.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(record) = self.status.report(RecordKind::Abort) else { return Ok(()) };
        let waited = match record.expected_tokens {
            0 => self.timeout,
            nanoseconds => Duration::from_nanos(nanoseconds),
        };
        Err(gave_up(record.abort_word(), waited, record.values()))
    }

    /// The newest record of a kind.
    pub(crate) fn newest(&self, kind: RecordKind) -> Option<StatusRecord> {
        self.status.report(kind)
    }

    /// Waits for the counts of the dispatch that was given `tag`, whose kernel ends at `end`. The context is current.
    pub(crate) fn counts(&self, tag: u32, shape: &DispatchShape, end: &CudaEvent) -> Result<Told> {
        type C = CountsLayout;
        let (ranks, experts) = (shape.ranks, shape.local_experts());
        let cells = [0..C::RANK_PSUM, C::RANK_PSUM..C::RANK_PSUM + ranks];
        let mut missing =
            cells.into_iter().flatten().chain(C::EXPERT_COUNT..C::EXPERT_COUNT + experts).peekable();
        let mut values = Vec::with_capacity(C::RANK_PSUM + ranks + experts);
        let mut asked = Instant::now();
        let come = until(self.patience(), || {
            while let Some(&cell) = missing.peek() {
                let Some(value) = self.status.count(cell, tag) else { break };
                values.push(value);
                missing.next();
            }
            if missing.peek().is_none() {
                return Ok(Some(()));
            }
            self.check()?;
            // A device that failed writes no record.
            if asked.elapsed() > QUERY {
                asked = Instant::now();
                end.reached()?;
            }
            Ok(None)
        })?;
        if come.is_none() {
            let (what, waited) = ("a dispatch", self.patience());
            return Err(Error::StillRunning { what, rank: self.rank, waited });
        }
        let number = |cell: usize| values[cell] as usize;
        let sizes = |cells: &[u32]| cells.iter().map(|&n| n as usize).collect();
        Ok(Told {
            counts: Counts {
                tokens: number(C::TOKENS),
                rows: number(C::ROWS),
                rank_prefix: sizes(&values[C::RANK_PSUM..C::RANK_PSUM + ranks]),
                expert_counts: sizes(&values[C::RANK_PSUM + ranks..]),
            },
            needed: [values[C::NEEDED_TOKENS], values[C::NEEDED_ROWS]],
        })
    }
}
