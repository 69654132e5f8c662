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

    /// What a kernel does that gives up.
    #[cfg(test)]
    pub(super) fn write_abort(&self) {
        let record = StatusRecord {
            sequence: 1,
            operation: crate::layout::Operation::Dispatch as u32,
            phase: crate::layout::Phase::Totals as u32,
            peer: 1,
            ..StatusRecord::default()
        };
        self.status.write_record(RecordKind::Abort, record);
    }

    /// The newest record of a kind.
    pub(crate) fn newest(&self, kind: RecordKind) -> Option<StatusRecord> {
        self.status.report(kind)
    }

    /// Waits for the counts of the dispatch that was given `tag`, whose kernel ends at `end`.
    pub(crate) fn counts(&self, tag: u32, shape: &DispatchShape, end: &CudaEvent) -> Result<Told> {
        type C = CountsLayout;
        let (ranks, experts) = (shape.ranks, shape.local_experts());
        let mut totals = [0; C::RANK_PSUM];
        let mut counts = Counts {
            tokens: 0,
            rows: 0,
            rank_prefix: Vec::with_capacity(ranks),
            expert_counts: Vec::with_capacity(experts),
        };
        let (mut taken, mut asked, mut ended) = (0, Instant::now(), false);
        let come = until(self.patience(), || {
            // Each once, in order.
            while taken < C::RANK_PSUM
                && let Some(value) = self.status.count(taken, tag)
            {
                totals[taken] = value;
                taken += 1;
            }
            if taken == C::RANK_PSUM {
                self.take(&mut counts.rank_prefix, C::RANK_PSUM, ranks, tag);
                self.take(&mut counts.expert_counts, C::EXPERT_COUNT, experts, tag);
            }
            if counts.rank_prefix.len() == ranks && counts.expert_counts.len() == experts {
                return Ok(Some(()));
            }
            self.check()?;
            // Whatever a kernel has written can be seen when it has ended: looked for above, after that was known.
            if ended {
                let reason = "a dispatch has ended and not written its counts".into();
                return Err(Error::Broken { reason });
            }
            // A device that failed writes no record.
            if asked.elapsed() > QUERY {
                asked = Instant::now();
                ended = end.has_run()?;
            }
            Ok(None)
        })?;
        if come.is_none() {
            let (what, waited) = ("a dispatch", self.patience());
            return Err(Error::StillRunning { what, rank: self.rank, waited });
        }
        (counts.tokens, counts.rows) = (totals[C::TOKENS] as usize, totals[C::ROWS] as usize);
        Ok(Told { counts, needed: [totals[C::NEEDED_TOKENS], totals[C::NEEDED_ROWS]] })
    }

    /// Takes those of `count` cells from `first` on that have come and were not taken yet.
    fn take(&self, values: &mut Vec<usize>, first: usize, count: usize, tag: u32) {
        while values.len() < count
            && let Some(value) = self.status.count(first + values.len(), tag)
        {
            values.push(value as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::events::EventPool;
    use super::super::pinned::free_all;
    use super::super::stream::Stream;
    use super::*;
    use crate::layout::{Operation, Phase, Placement, StatusLayout, test_shapes};
    use cuda_vmm::{Cuda, Memory, PlainMemory};
    use cuda_vmm_emu::{Config, Emulator};
    use std::sync::Arc;

    /// Two ranks, four experts each.
    fn shape() -> DispatchShape {
        let mut shape = test_shapes::dispatch(2, 64, Placement::Plain);
        shape.experts = 8;
        shape
    }

    /// Runs a body with a status block, and the end of a kernel that runs until it is told to end.
    fn on_emulator(timeout: Duration, body: impl FnOnce(&Reports, &CudaEvent, &(dyn Fn() + Sync))) {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        {
            let device = Cuda::with_driver(emulator.driver()).unwrap().device(0).unwrap();
            let context = device.primary_context().unwrap();
            let status = StatusBlock::new(&context, StatusLayout::new(4)).unwrap();
            let reports = Arc::new(Reports::new(status, 1, timeout));
            let (stream, gate) = (Stream::new(&context).unwrap(), PlainMemory::new(&context, 256).unwrap());
            context.fill(&gate, 0, 256, 0).unwrap();
            let _bound = context.bind().unwrap();
            let driver = device.cuda().driver();
            // SAFETY: the gate is there until it was opened and passed.
            unsafe { driver.cuStreamWaitValue32(stream.raw(), gate.address().get(), 1, 0) }.unwrap();
            let events = EventPool::new(context.clone(), reports.clone());
            let end = events.record(&stream).unwrap();
            let open = || context.upload(&gate, 0, &1_u32.to_ne_bytes()).unwrap();
            body(&reports, &end, &open);
            open();
            end.wait_reached("the gate", Duration::from_secs(10)).unwrap();
            drop((end, events, reports));
            free_all(&context);
        }
        emulator.assert_empty();
    }

    #[test]
    fn counts_are_taken_when_all_have_come() {
        on_emulator(Duration::from_secs(10), |reports, end, _| {
            type C = CountsLayout;
            let cells = [(C::TOKENS, 9), (C::ROWS, 12), (C::NEEDED_TOKENS, 0), (C::NEEDED_ROWS, 0)];
            let psum = [(C::RANK_PSUM, 4), (C::RANK_PSUM + 1, 9)];
            let experts = (0..4).map(|j| (C::EXPERT_COUNT + j, 1 + j as u32));
            let all: Vec<_> = cells.into_iter().chain(psum).chain(experts).collect();
            // Those of an earlier call don't count.
            all.iter().for_each(|&(cell, _)| reports.status.write_count(cell, 6, 77));
            let told = std::thread::scope(|scope| {
                scope.spawn(|| {
                    for &(cell, value) in all.iter().rev() {
                        std::thread::sleep(Duration::from_millis(1));
                        reports.status.write_count(cell, 7, value);
                    }
                });
                reports.counts(7, &shape(), end)
            })
            .unwrap();
            assert_eq!(told.needed, [0, 0]);
            let expert_counts = vec![1, 2, 3, 4];
            let counts = Counts { tokens: 9, rows: 12, rank_prefix: vec![4, 9], expert_counts };
            assert_eq!(told.counts, counts);
        });
    }

    #[test]
    fn a_wait_for_counts_ends_when_a_rank_gives_up() {
        on_emulator(Duration::from_secs(10), |reports, end, _| {
            reports.check().unwrap();
            let mut record = StatusRecord {
                sequence: 5,
                operation: Operation::Dispatch as u32,
                phase: Phase::Totals as u32,
                rank: 1,
                peer: 3,
                expected: 5,
                seen: 4,
                expected_tokens: 2_500_000_000,
                ..StatusRecord::default()
            };
            reports.status.write_record(RecordKind::Abort, record);
            let error = reports.counts(7, &shape(), end).err().unwrap().to_string();
            assert_eq!(error, "dispatch, token counts: rank 1 waited 2.5s for rank 3 (expected 5, saw 4)");
            // A rank that was told by another knows who and when, but no values.
            (record.rank, record.expected, record.seen, record.expected_tokens) = (0, 0, 0, 0);
            reports.status.write_record(RecordKind::Abort, record);
            let error = reports.check().unwrap_err().to_string();
            assert_eq!(error, "dispatch, token counts: rank 0 waited 10s for rank 3");
            // Other calls.
            (record.phase, record.expected, record.seen) = (Phase::Parameters as u32, 0xa, 0xb);
            reports.status.write_record(RecordKind::Abort, record);
            assert!(matches!(reports.check(), Err(Error::RanksDisagree { .. })));
        });
    }

    #[test]
    fn a_wait_for_counts_is_bounded() {
        on_emulator(Duration::from_millis(10), |reports, end, _| {
            let start = Instant::now();
            let error = reports.counts(7, &shape(), end).err().unwrap();
            assert!(matches!(error, Error::StillRunning { what: "a dispatch", rank: 1, .. }), "{error}");
            assert!(start.elapsed() >= reports.patience());
        });
    }

    #[test]
    fn a_wait_for_counts_ends_with_the_kernel() {
        on_emulator(Duration::from_secs(10), |reports, end, open| {
            let start = Instant::now();
            let error = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    open();
                });
                reports.counts(7, &shape(), end).err().unwrap()
            });
            assert!(matches!(error, Error::Broken { .. }), "{error}");
            assert!(start.elapsed() >= Duration::from_millis(30) && start.elapsed() < reports.patience());
        });
    }

    #[test]
    fn records_of_a_kind_replace_each_other() {
        on_emulator(Duration::from_secs(10), |reports, _, _| {
            assert_eq!(reports.newest(RecordKind::Capacity), None);
            for sequence in [3, 4] {
                let record = StatusRecord { sequence, seen: u64::from(sequence), ..StatusRecord::default() };
                reports.status.write_record(RecordKind::Capacity, record);
                assert_eq!(reports.newest(RecordKind::Capacity), Some(record));
            }
            assert_eq!(reports.newest(RecordKind::BadExpert), None);
            reports.check().unwrap();
        });
    }
}
