//! The measurements.

use std::ffi::CStr;
use std::time::Instant;

use super::board::{KERNEL_TIMEOUT, RING_WORDS, Unit};
use super::boxes::Rows;
use super::{Batch, Board, Ceiling, CeilingError, Kind, Ring, Transfer};
use crate::bench::stats::median;
use crate::gpu::{Graph, Shape};

/// Bytes that one warp stores at a time, as the kernel has it.
const STORE_ROW: u32 = 2048;
/// Rows of bulk copies, and how many warps of a block have room for one.
const BULK_ROWS: [(u32, u32); 2] = [(7168, 16), (14336, 14)];
const STORE_THREADS: u32 = 512;
const CHAIN: usize = 100;
const GRAPH: usize = 50;
const RING_ROUNDS: u32 = 500;

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Numbers of multiprocessors; all of a device are measured in any case.
    pub sms: Vec<u32>,
    /// Samples, whose median counts.
    pub samples: usize,
    /// Batches that travel in packets.
    pub batches: Vec<Batch>,
    /// Kernels of these may be launched while the one before them runs.
    pub early_launch: bool,
}

/// A rate of rows in bulk.
fn bulk(kind: Kind, shape: Shape, row_bytes: u32, value: f64) -> Ceiling {
    Ceiling { sms: Some(shape.blocks), row_bytes: Some(row_bytes), ..Ceiling::of(kind, value) }
}

impl Board {
    /// Measures everything. In `notes` is what could not be measured although the rest could.
    ///
    /// # Errors
    /// [`CeilingError`]; among them that what arrived is not what was sent.
    pub fn measure(&self, extent: &Extent, notes: &mut Vec<String>) -> Result<Vec<Ceiling>, CeilingError> {
        let mut found = Vec::new();
        let least = self.units.iter().map(|unit| unit.sms).min().unwrap_or(0);
        let mut counts: Vec<u32> = extent.sms.iter().copied().filter(|&n| n > 0 && n < least).collect();
        counts.push(least);
        counts.sort_unstable();
        counts.dedup();
        if self.devices() > 1 {
            found.push(self.copy_engine(extent.samples)?);
            for &sms in &counts {
                found.push(self.stores(sms, extent.samples)?);
            }
        }
        for &(row_bytes, warps) in &BULK_ROWS {
            for &sms in &counts {
                let shape = Shape { blocks: sms, threads: warps * 32, shared: warps * row_bytes };
                if self.devices() > 1 {
                    found.push(self.bulk_stores(Kind::BulkStores, shape, row_bytes, extent.samples)?);
                    found.push(self.bulk_reads(shape, row_bytes, extent.samples)?);
                }
                found.push(self.bulk_stores(Kind::LocalStores, shape, row_bytes, extent.samples)?);
                found.push(self.local_copy(shape, row_bytes, extent.samples)?);
            }
        }
        found.push(self.flag(extent.samples)?);
        found.extend(self.launches(extent.samples)?);
        for &batch in &extent.batches {
            match self.exchange(batch, extent.early_launch, extent.samples) {
                Ok(exchange) => found.extend(exchange),
                // The others are right, and only small batches are compared with it.
                Err(error @ (CeilingError::GaveUp { .. } | CeilingError::Wrong { .. })) => {
                    notes.push(format!("there is no packet exchange to compare with: {error}"));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        found.sort_by_key(Ceiling::key);
        Ok(found)
    }

    pub(super) fn next_round(&self) -> u32 {
        self.rounds.set(self.rounds.get() + 1);
        self.rounds.get()
    }

    pub(super) fn run(
        &self,
        unit: &Unit,
        name: &CStr,
        shape: Shape,
        transfer: &Transfer,
    ) -> Result<(), CeilingError> {
        let function = unit.module.function(name, shape.shared)?;
        // SAFETY: the kernel takes a Transfer. Its rows lie in boxes of this board, whose devices reach each other, and every caller waits
        // with `settle` before they can go.
        Ok(unsafe { function.launch(&unit.stream, shape, transfer) }?)
    }

    /// All of a device's threads.
    pub(super) fn wide(unit: &Unit) -> Shape {
        Shape { blocks: unit.sms * 2, threads: 512, shared: 0 }
    }

    /// Fills all outboxes.
    fn fill(&self, kind: Kind, rows: Rows) -> Result<(), CeilingError> {
        for (i, unit) in self.units.iter().enumerate() {
            self.run(unit, c"ceiling_fill", Self::wide(unit), &self.boxes.fill(i, rows))?;
        }
        self.settle(kind)
    }

    /// Compares all inboxes.
    fn check(&self, kind: Kind, rows: Rows) -> Result<(), CeilingError> {
        for (i, unit) in self.units.iter().enumerate() {
            let transfers = match kind {
                Kind::LocalStores | Kind::LocalCopy => vec![self.boxes.check_own(i, rows)],
                _ => self.boxes.check_peers(i, rows),
            };
            for transfer in transfers {
                self.run(unit, c"ceiling_check", Self::wide(unit), &transfer)?;
            }
        }
        self.settle(kind)
    }

    /// Bytes each device moves, over the slowest device's time, in GB/s: the median of samples after one that does not count.
    fn rate(
        &self,
        kind: Kind,
        samples: usize,
        bytes: u64,
        work: impl Fn(&Unit, usize) -> Result<(), CeilingError>,
    ) -> Result<f64, CeilingError> {
        let sample = || Ok(self.sample(kind, &work)?.into_iter().fold(0.0, f64::max));
        sample()?;
        let times: Vec<f64> = (0..samples.max(1)).map(|_| sample()).collect::<Result<_, CeilingError>>()?;
        Ok(bytes as f64 / median(&times) / 1e3)
    }

    /// Rows of this size that fill a part.
    fn rows(&self, row_bytes: u32, slots: u32) -> Rows {
        let rows = self.boxes.part_bytes() / u64::from(row_bytes);
        Rows { rows, row_bytes, round: self.next_round(), slots }
    }

    /// Bytes of rows for all peers.
    fn peer_bytes(&self, rows: Rows) -> u64 {
        rows.rows * u64::from(rows.row_bytes) * (self.devices() as u64 - 1)
    }

    fn copy_engine(&self, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::CopyEngine;
        let rows = self.rows(STORE_ROW, 0);
        self.fill(kind, rows)?;
        let part = (rows.rows * u64::from(rows.row_bytes)) as usize;
        let value = self.rate(kind, samples, self.peer_bytes(rows), |unit, i| {
            let transfer = self.boxes.to_peers(i, rows);
            transfer.target[..transfer.targets as usize].iter().try_for_each(|&to| {
                // SAFETY: both boxes have that many bytes, are this board's, and `sample` waits.
                unsafe { unit.stream.copy(to, transfer.source, part) }
            })?;
            Ok(())
        })?;
        self.check(kind, rows)?;
        Ok(Ceiling::of(kind, value))
    }

    fn stores(&self, sms: u32, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::Stores;
        let rows = self.rows(STORE_ROW, 0);
        let shape = Shape { blocks: sms, threads: STORE_THREADS, shared: 0 };
        let value = self.rate(kind, samples, self.peer_bytes(rows), |unit, i| {
            self.run(unit, c"ceiling_store", shape, &self.boxes.to_peers(i, rows))
        })?;
        self.check(kind, rows)?;
        Ok(Ceiling { sms: Some(sms), ..Ceiling::of(kind, value) })
    }

    fn bulk_stores(
        &self,
        kind: Kind,
        shape: Shape,
        row_bytes: u32,
        samples: usize,
    ) -> Result<Ceiling, CeilingError> {
        let rows = self.rows(row_bytes, shape.blocks * shape.threads / 32);
        let local = kind == Kind::LocalStores;
        let bytes = if local { rows.rows * u64::from(row_bytes) } else { self.peer_bytes(rows) };
        let value = self.rate(kind, samples, bytes, |unit, i| {
            let transfer = if local { self.boxes.to_own(i, rows) } else { self.boxes.to_peers(i, rows) };
            self.run(unit, c"ceiling_bulk_store", shape, &transfer)
        })?;
        self.check(kind, rows)?;
        Ok(bulk(kind, shape, row_bytes, value))
    }

    fn bulk_reads(&self, shape: Shape, row_bytes: u32, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::BulkReads;
        let rows = self.rows(row_bytes, 0);
        self.fill(kind, rows)?;
        let read = |compare: u32| {
            move |unit: &Unit, i: usize| {
                let transfer = Transfer { compare, ..self.boxes.from_peers(i, rows) };
                self.run(unit, c"ceiling_bulk_read", shape, &transfer)
            }
        };
        // Every row is compared once; the timed kernels compare each warp's last.
        self.sample(kind, read(1))?;
        let value = self.rate(kind, samples, self.peer_bytes(rows), read(0))?;
        Ok(bulk(kind, shape, row_bytes, value))
    }

    fn local_copy(&self, shape: Shape, row_bytes: u32, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::LocalCopy;
        let rows = self.rows(row_bytes, 0);
        self.fill(kind, rows)?;
        let value = self.rate(kind, samples, rows.rows * u64::from(row_bytes), |unit, i| {
            self.run(unit, c"ceiling_bulk_copy", shape, &self.boxes.to_own(i, rows))
        })?;
        self.check(kind, rows)?;
        Ok(bulk(kind, shape, row_bytes, value))
    }

    /// A word goes round all devices, or between two kernels of one.
    fn flag(&self, samples: usize) -> Result<Ceiling, CeilingError> {
        let n = self.devices();
        let (kind, places) = if n > 1 { (Kind::Flag, n) } else { (Kind::LocalFlag, 2) };
        let word = |place: usize| match n {
            1 => self.units[0].word(RING_WORDS[place % 2]),
            _ => self.units[place % n].word(RING_WORDS[0]),
        };
        let sample = || {
            let base = self.rounds.get().wrapping_mul(RING_ROUNDS);
            self.rounds.set(self.rounds.get() + 1);
            let go_round = |place: usize| Ring {
                own: word(place),
                next: word(place + 1),
                late: self.units[place % n].late(),
                timeout_ns: KERNEL_TIMEOUT.as_nanos() as u64,
                rounds: RING_ROUNDS,
                base,
                leader: u32::from(place == 0),
                pad: 0,
            };
            let shape = Shape { blocks: 1, threads: 1, shared: 0 };
            let times = self.sample(kind, |unit, place| {
                let function = unit.module.function(c"ceiling_ring", 0)?;
                if n == 1 {
                    // SAFETY: the kernel takes a Ring, whose words are this board's; `sample` waits for both streams.
                    unsafe { function.launch(&unit.second, shape, &go_round(1)) }?;
                }
                // SAFETY: as above.
                Ok(unsafe { function.launch(&unit.stream, shape, &go_round(place)) }?)
            })?;
            Ok(times[0] / f64::from(RING_ROUNDS) / places as f64)
        };
        sample()?;
        let times: Vec<f64> = (0..samples.max(1)).map(|_| sample()).collect::<Result<_, CeilingError>>()?;
        Ok(Ceiling::of(kind, median(&times)))
    }

    /// What an empty kernel costs.
    fn launches(&self, samples: usize) -> Result<Vec<Ceiling>, CeilingError> {
        let shape = Shape { blocks: 1, threads: 32, shared: 0 };
        // Looked up once: what is timed are launches.
        let kernels: Vec<_> = self
            .units
            .iter()
            .map(|unit| unit.module.function(c"ceiling_empty", 0))
            .collect::<Result<_, _>>()?;
        let empty = |unit: &Unit, i: usize| -> Result<(), CeilingError> {
            // SAFETY: the kernel takes nothing and touches nothing.
            Ok(unsafe { kernels[i].launch(&unit.stream, shape, &()) }?)
        };
        let most = |times: Vec<f64>| times.into_iter().fold(0.0, f64::max);
        let found = |kind, times: &[f64]| Ceiling::of(kind, median(times));
        let samples = samples.max(1) * 4;
        let mut all = Vec::new();

        let mut times = Vec::new();
        for _ in 0..=samples {
            times.push(most(self.sample(Kind::Launch, empty)?));
        }
        all.push(found(Kind::Launch, &times[1..]));

        times.clear();
        for _ in 0..=samples {
            let chain = |unit: &Unit, i: usize| (0..CHAIN).try_for_each(|_| empty(unit, i));
            times.push(most(self.sample(Kind::ChainedLaunch, chain)?) / CHAIN as f64);
        }
        all.push(found(Kind::ChainedLaunch, &times[1..]));

        let graphs: Vec<Graph> = self
            .units
            .iter()
            .enumerate()
            .map(|(i, unit)| Graph::capture(&unit.stream, || (0..GRAPH).try_for_each(|_| empty(unit, i))))
            .collect::<Result<_, CeilingError>>()?;
        times.clear();
        for _ in 0..=samples {
            // SAFETY: the graph's kernels touch nothing.
            let replay = |unit: &Unit, i: usize| Ok(unsafe { graphs[i].launch(&unit.stream) }?);
            times.push(most(self.sample(Kind::GraphLaunch, replay)?) / GRAPH as f64);
        }
        all.push(found(Kind::GraphLaunch, &times[1..]));

        times.clear();
        for _ in 0..=samples {
            let start = Instant::now();
            (0..CHAIN).try_for_each(|_| empty(&self.units[0], 0))?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / CHAIN as f64);
            self.settle(Kind::HostLaunch)?;
        }
        all.push(found(Kind::HostLaunch, &times[1..]));
        Ok(all)
    }
}
