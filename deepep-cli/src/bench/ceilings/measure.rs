//! The measurements.

use std::ffi::CStr;
use std::time::Instant;

use cuda_vmm::Memory;

use super::board::{KERNEL_TIMEOUT, RING_WORDS, Unit};
use super::{Board, Ceiling, CeilingError, Kind, Ring, Transfer};
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
}

/// Rows that a device moves to or from its targets, and what it looks like on the other side.
#[derive(Clone, Copy)]
struct Pattern {
    rows: u64,
    row_bytes: u32,
    round: u32,
    /// Warps that store; 0 if rows are stored in order.
    slots: u32,
}

impl Board {
    /// Measures everything.
    ///
    /// # Errors
    /// [`CeilingError`]; among them that what arrived is not what was sent.
    pub fn measure(&self, extent: &Extent) -> Result<Vec<Ceiling>, CeilingError> {
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
        found.sort_by_key(|c| (c.kind, c.row_bytes, c.sms));
        Ok(found)
    }

    /// What goes to one peer, or with one device to itself.
    fn part_bytes(&self) -> u64 {
        let parts = (self.devices() - 1).max(1) as u64;
        let whole = self.units.iter().map(|unit| unit.inbox.size() as u64).min().unwrap_or(0);
        whole / parts / 4096 * 4096
    }

    fn next_round(&self) -> u32 {
        self.rounds.set(self.rounds.get() + 1);
        self.rounds.get()
    }

    /// Where device `from` finds the part of device `from + distance` that is its own, in order of distance.
    fn inboxes(&self, from: usize) -> Vec<u64> {
        let n = self.devices();
        let part = |distance: usize| (n - 1 - distance) as u64 * self.part_bytes();
        (1..n).map(|d| self.units[(from + d) % n].inbox.address().get() + part(d)).collect()
    }

    fn outboxes(&self, of: usize) -> Vec<u64> {
        let n = self.devices();
        (1..n).map(|d| self.units[(of + d) % n].outbox.address().get()).collect()
    }

    fn transfer(&self, unit: &Unit, targets: &[u64], pattern: Pattern) -> Transfer {
        let mut target = [0; 8];
        target[..targets.len()].copy_from_slice(targets);
        Transfer {
            target,
            source: unit.outbox.address().get(),
            rows: pattern.rows,
            wrong: unit.wrong(),
            late: unit.late(),
            timeout_ns: KERNEL_TIMEOUT.as_nanos() as u64,
            targets: targets.len() as u32,
            row_bytes: pattern.row_bytes,
            round: pattern.round,
            compare: 0,
            slots: pattern.slots,
            which: 0,
        }
    }

    fn run(&self, unit: &Unit, name: &CStr, shape: Shape, transfer: &Transfer) -> Result<(), CeilingError> {
        let function = unit.module.function(name, shape.shared)?;
        // SAFETY: the kernel takes a Transfer. Its rows lie in boxes of this board (`transfer`), whose devices reach each other, and every
        // caller waits with `settle` before the boxes can go.
        Ok(unsafe { function.launch(&unit.stream, shape, transfer) }?)
    }

    /// All of a device's threads.
    fn wide(unit: &Unit) -> Shape {
        Shape { blocks: unit.sms * 2, threads: 512, shared: 0 }
    }

    /// Fills all outboxes.
    fn fill(&self, kind: Kind, pattern: Pattern) -> Result<(), CeilingError> {
        for unit in &self.units {
            let transfer = self.transfer(unit, &[unit.outbox.address().get()], pattern);
            self.run(unit, c"ceiling_fill", Self::wide(unit), &transfer)?;
        }
        self.settle(kind)
    }

    /// Compares all inboxes.
    fn check(&self, kind: Kind, pattern: Pattern) -> Result<(), CeilingError> {
        let n = self.devices();
        for unit in &self.units {
            let local = matches!(kind, Kind::LocalStores | Kind::LocalCopy);
            let distances = if local { 1..2 } else { 1..n };
            for d in distances {
                let part = if local { 0 } else { (n - 1 - d) as u64 * self.part_bytes() };
                let mut transfer = self.transfer(unit, &[unit.inbox.address().get() + part], pattern);
                transfer.which = d as u32 - 1;
                transfer.targets = if local { 1 } else { n as u32 - 1 };
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

    fn copy_engine(&self, samples: usize) -> Result<Ceiling, CeilingError> {
        let (kind, part) = (Kind::CopyEngine, self.part_bytes());
        let row_bytes = STORE_ROW;
        let pattern =
            Pattern { rows: part / u64::from(row_bytes), row_bytes, round: self.next_round(), slots: 0 };
        self.fill(kind, pattern)?;
        let bytes = part * (self.devices() as u64 - 1);
        let value = self.rate(kind, samples, bytes, |unit, i| {
            let from = unit.outbox.address().get();
            self.inboxes(i).into_iter().try_for_each(|to| {
                // SAFETY: both boxes have that many bytes, are this board's, and `sample` waits.
                unsafe { unit.stream.copy(to, from, part as usize) }
            })?;
            Ok(())
        })?;
        self.check(kind, pattern)?;
        Ok(Ceiling { kind, sms: None, row_bytes: None, value })
    }

    fn stores(&self, sms: u32, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::Stores;
        let rows = self.part_bytes() / u64::from(STORE_ROW);
        let pattern = Pattern { rows, row_bytes: STORE_ROW, round: self.next_round(), slots: 0 };
        let shape = Shape { blocks: sms, threads: STORE_THREADS, shared: 0 };
        let bytes = rows * u64::from(STORE_ROW) * (self.devices() as u64 - 1);
        let value = self.rate(kind, samples, bytes, |unit, i| {
            self.run(unit, c"ceiling_store", shape, &self.transfer(unit, &self.inboxes(i), pattern))
        })?;
        self.check(kind, pattern)?;
        Ok(Ceiling { kind, sms: Some(sms), row_bytes: None, value })
    }

    fn bulk_stores(
        &self,
        kind: Kind,
        shape: Shape,
        row_bytes: u32,
        samples: usize,
    ) -> Result<Ceiling, CeilingError> {
        let local = kind == Kind::LocalStores;
        let rows = self.part_bytes() / u64::from(row_bytes);
        let slots = shape.blocks * shape.threads / 32;
        let pattern = Pattern { rows, row_bytes, round: self.next_round(), slots };
        let targets = |unit: &Unit, i| match local {
            true => vec![unit.inbox.address().get()],
            false => self.inboxes(i),
        };
        let receivers = if local { 1 } else { self.devices() as u64 - 1 };
        let bytes = rows * u64::from(row_bytes) * receivers;
        let value = self.rate(kind, samples, bytes, |unit, i| {
            self.run(unit, c"ceiling_bulk_store", shape, &self.transfer(unit, &targets(unit, i), pattern))
        })?;
        self.check(kind, pattern)?;
        Ok(Ceiling { kind, sms: Some(shape.blocks), row_bytes: Some(row_bytes), value })
    }

    fn bulk_reads(&self, shape: Shape, row_bytes: u32, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::BulkReads;
        let rows = self.part_bytes() / u64::from(row_bytes);
        let pattern = Pattern { rows, row_bytes, round: self.next_round(), slots: 0 };
        self.fill(kind, pattern)?;
        let read = |compare: u32| {
            move |unit: &Unit, i: usize| {
                let mut transfer = self.transfer(unit, &self.outboxes(i), pattern);
                transfer.compare = compare;
                self.run(unit, c"ceiling_bulk_read", shape, &transfer)
            }
        };
        // Every row is compared once; the timed kernels compare each warp's last.
        self.sample(kind, read(1))?;
        let bytes = rows * u64::from(row_bytes) * (self.devices() as u64 - 1);
        let value = self.rate(kind, samples, bytes, read(0))?;
        Ok(Ceiling { kind, sms: Some(shape.blocks), row_bytes: Some(row_bytes), value })
    }

    fn local_copy(&self, shape: Shape, row_bytes: u32, samples: usize) -> Result<Ceiling, CeilingError> {
        let kind = Kind::LocalCopy;
        let rows = self.part_bytes() / u64::from(row_bytes);
        let pattern = Pattern { rows, row_bytes, round: self.next_round(), slots: 0 };
        self.fill(kind, pattern)?;
        let value = self.rate(kind, samples, rows * u64::from(row_bytes), |unit, _| {
            let transfer = self.transfer(unit, &[unit.inbox.address().get()], pattern);
            self.run(unit, c"ceiling_bulk_copy", shape, &transfer)
        })?;
        self.check(kind, pattern)?;
        Ok(Ceiling { kind, sms: Some(shape.blocks), row_bytes: Some(row_bytes), value })
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
        Ok(Ceiling { kind, sms: None, row_bytes: None, value: median(&times) })
    }

    /// What an empty kernel costs.
    fn launches(&self, samples: usize) -> Result<Vec<Ceiling>, CeilingError> {
        let shape = Shape { blocks: 1, threads: 32, shared: 0 };
        let empty = |unit: &Unit| -> Result<(), CeilingError> {
            let function = unit.module.function(c"ceiling_empty", 0)?;
            // SAFETY: the kernel takes nothing and touches nothing.
            Ok(unsafe { function.launch(&unit.stream, shape, &()) }?)
        };
        let most = |times: Vec<f64>| times.into_iter().fold(0.0, f64::max);
        let found = |kind, times: &[f64]| Ceiling { kind, sms: None, row_bytes: None, value: median(times) };
        let samples = samples.max(1) * 4;
        let mut all = Vec::new();

        let mut times = Vec::new();
        for _ in 0..=samples {
            times.push(most(self.sample(Kind::Launch, |unit, _| empty(unit))?));
        }
        all.push(found(Kind::Launch, &times[1..]));

        times.clear();
        for _ in 0..=samples {
            let chain = |unit: &Unit, _: usize| (0..CHAIN).try_for_each(|_| empty(unit));
            times.push(most(self.sample(Kind::ChainedLaunch, chain)?) / CHAIN as f64);
        }
        all.push(found(Kind::ChainedLaunch, &times[1..]));

        let graphs: Vec<Graph> = self
            .units
            .iter()
            .map(|unit| Graph::capture(&unit.stream, || (0..GRAPH).try_for_each(|_| empty(unit))))
            .collect::<Result<_, CeilingError>>()?;
        times.clear();
        for _ in 0..=samples {
            // SAFETY: the graph's kernels touch nothing.
            let replay = |unit: &Unit, i: usize| Ok(unsafe { graphs[i].launch(&unit.stream) }?);
            times.push(most(self.sample(Kind::GraphLaunch, replay)?) / GRAPH as f64);
        }
        all.push(found(Kind::GraphLaunch, &times[1..]));

        let unit = &self.units[0];
        let function = unit.module.function(c"ceiling_empty", 0)?;
        times.clear();
        for _ in 0..=samples {
            let start = Instant::now();
            for _ in 0..CHAIN {
                // SAFETY: as above.
                unsafe { function.launch(&unit.stream, shape, &()) }?;
            }
            times.push(start.elapsed().as_secs_f64() * 1e6 / CHAIN as f64);
            self.settle(Kind::HostLaunch)?;
        }
        all.push(found(Kind::HostLaunch, &times[1..]));
        Ok(all)
    }
}
