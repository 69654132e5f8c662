//! All-gather, reduce-scatter and all-reduce on GPUs, on the peers' addresses: against an oracle, bit by bit.
//!
//! No multicast object is created here, nor anywhere else on a GPU by this crate's tests.

use std::time::{Duration, Instant};

use cuda_vmm::Context;
use cuda_vmm::sys::{CUevent, CUresult, CUstream};
use half::{bf16, f16};

use super::super::{CollectiveEngine, CollectiveLaunch, EngineOptions, StatusBlock};
use super::input::Random;
use super::machine::{Buffer, Machine, Outcome};
use super::{machine, numbers};
use crate::jit::{CollectiveKind, Element, Way};
use crate::layout::{CollectiveConfig, CollectiveLayout, Operation, Phase, RecordKind, StatusLayout};

const KERNEL_TIMEOUT: Duration = Duration::from_secs(4);
const ROUND_TIMEOUT: Duration = Duration::from_secs(20);
const POISON: u8 = 0xa5;
const KINDS: [CollectiveKind; 3] =
    [CollectiveKind::AllGather, CollectiveKind::ReduceScatter, CollectiveKind::AllReduce];

struct Rank {
    engine: CollectiveEngine,
    status: StatusBlock,
    context: Context,
    stream: CUstream,
    _heap: Buffer,
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by the group, destroyed once.
            let _ = unsafe { self.context.device().cuda().driver().cuStreamDestroy(self.stream) };
        }
    }
}

/// Ranks on the machine's devices, in turn.
struct Group {
    ranks: Vec<Rank>,
}

impl Group {
    fn new(machine: &Machine, config: CollectiveConfig, timeout: Duration) -> Outcome<Self> {
        let layout = CollectiveLayout::new(config)?;
        let sharing = config.ranks.div_ceil(machine.devices());
        let mut heaps = Vec::new();
        for r in 0..config.ranks {
            let heap = Buffer::new(machine.context(r), layout.bytes)?;
            heap.fill(0, layout.bytes, 0)?;
            heaps.push(heap);
        }
        let bases: Vec<u64> = heaps.iter().map(Buffer::address).collect();
        let mut ranks = Vec::new();
        for (r, heap) in heaps.into_iter().enumerate() {
            let context = machine.context(r).clone();
            let status = StatusBlock::new(&context, StatusLayout::new(1))?;
            let options = EngineOptions {
                timeout,
                max_blocks: if sharing == 1 { 0 } else { machine.share(r, sharing)? },
                cooperative: sharing == 1,
                ..EngineOptions::default()
            };
            // SAFETY: every heap has this layout, was zeroed, is reachable from all devices, and lives as long as the group; so does the status.
            let engine = unsafe {
                let status = status.device_address();
                CollectiveEngine::new(context.clone(), layout, r, &bases, None, status, options)
            }?;
            // While a kernel waits for a peer, the peer must not be compiling its own, nor loading it into the same context.
            engine.prewarm()?;
            let bound = context.bind()?;
            let mut stream = std::ptr::null_mut();
            // SAFETY: `stream` is valid for one write; flag 1 makes it independent of the default stream. Destroyed in Drop.
            unsafe { context.device().cuda().driver().cuStreamCreate(&mut stream, 1) }?;
            drop(bound);
            ranks.push(Rank { engine, status, context, stream, _heap: heap });
        }
        Ok(Self { ranks })
    }

    /// Waits for all streams, then looks for reports.
    fn wait(&self) -> Outcome {
        let deadline = Instant::now() + ROUND_TIMEOUT;
        for rank in &self.ranks {
            loop {
                let _bound = rank.context.bind()?;
                // SAFETY: the stream is this rank's own.
                match unsafe { rank.context.device().cuda().driver().cuStreamQuery(rank.stream) } {
                    Ok(()) => break,
                    Err(e) if e.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => {}
                    Err(e) => return Err(e.to_string().into()),
                }
                if Instant::now() > deadline {
                    return Err(format!("kernels still run after {ROUND_TIMEOUT:?}").into());
                }
                std::hint::spin_loop();
            }
        }
        let reports: Vec<_> = self.ranks.iter().map(|r| r.status.report(RecordKind::Abort)).collect();
        if reports.iter().all(Option::is_none) { Ok(()) } else { Err(format!("{reports:?}").into()) }
    }
}

/// One call on all ranks: what each gives, and where its tensors lie.
struct Round {
    kind: CollectiveKind,
    element: Element,
    way: Option<Way>,
    bytes: usize,
    inputs: Vec<Vec<u8>>,
    /// Device memory, `shift` bytes before the tensors.
    memory: Vec<(Buffer, Buffer)>,
    shift: usize,
    in_place: bool,
}

fn numbers_of(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Element::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Element::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
    }
}

fn bytes_of(element: Element, numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|&x| match element {
            Element::F32 => x.to_le_bytes().to_vec(),
            Element::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
            Element::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        })
        .collect()
}

/// FP32, in ascending rank order, rounded once.
fn sum(element: Element, terms: &[&[u8]]) -> Vec<u8> {
    let terms: Vec<_> = terms.iter().map(|bytes| numbers_of(element, bytes)).collect();
    let sums: Vec<f32> =
        (0..terms[0].len()).map(|i| terms[1..].iter().fold(terms[0][i], |sum, t| sum + t[i])).collect();
    bytes_of(element, &sums)
}

impl Round {
    fn new(group: &Group, kind: CollectiveKind, element: Element, bytes: usize, seed: u64) -> Outcome<Self> {
        let ranks = group.ranks.len();
        let given = if kind == CollectiveKind::ReduceScatter { bytes * ranks } else { bytes };
        let got = if kind == CollectiveKind::AllGather { bytes * ranks } else { bytes };
        let inputs: Vec<Vec<u8>> = (0..ranks)
            .map(|r| match kind {
                CollectiveKind::AllGather => Random::new(&[seed, r as u64]).bytes(given),
                _ => {
                    let numbers = Random::new(&[seed, r as u64]).f32(given / element.size());
                    let centred: Vec<f32> = numbers.iter().map(|x| x * 8.0 - 4.0).collect();
                    bytes_of(element, &centred)
                }
            })
            .collect();
        let mut memory = Vec::new();
        for rank in &group.ranks {
            // In place, both are the first one.
            let most = given.max(got) + 64;
            memory.push((Buffer::new(&rank.context, most)?, Buffer::new(&rank.context, most)?));
        }
        Ok(Self { kind, element, way: None, bytes, inputs, memory, shift: 0, in_place: false })
    }

    fn way(mut self, way: Way) -> Self {
        self.way = Some(way);
        self
    }

    fn shifted(mut self, shift: usize) -> Self {
        self.shift = shift;
        self
    }

    fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// Where a rank's tensors lie.
    fn addresses(&self, rank: usize) -> (u64, u64) {
        let (input, output) = &self.memory[rank];
        let at = |buffer: &Buffer| buffer.address() + self.shift as u64;
        let part = (rank * self.bytes) as u64;
        match (self.in_place, self.kind) {
            (false, _) => (at(input), at(output)),
            (true, CollectiveKind::AllGather) => (at(input) + part, at(input)),
            (true, CollectiveKind::ReduceScatter) => (at(input), at(input) + part),
            (true, CollectiveKind::AllReduce) => (at(input), at(input)),
        }
    }

    fn upload(&self) -> Outcome {
        for (rank, (input, output)) in self.memory.iter().enumerate() {
            let own =
                if self.in_place && self.kind == CollectiveKind::AllGather { rank * self.bytes } else { 0 };
            let most = self.inputs[rank].len().max(self.expected(rank).len()) + 64;
            for buffer in [input, output] {
                buffer.fill(0, most, POISON)?;
            }
            input.write_at(self.shift + own, &self.inputs[rank])?;
        }
        Ok(())
    }

    fn launch(&self, group: &Group, rank: usize) -> Outcome {
        let (input, output) = self.addresses(rank);
        let Self { kind, element, bytes, way, .. } = *self;
        let call = CollectiveLaunch { kind, element, input, output, bytes, digest: 7, way };
        let _bound = group.ranks[rank].context.bind()?;
        // SAFETY: the stream is the rank's own, and its context current; the tensors have these sizes on all ranks and live until the round has been waited for.
        unsafe { group.ranks[rank].engine.run(&call, group.ranks[rank].stream) }?;
        Ok(())
    }

    fn expected(&self, rank: usize) -> Vec<u8> {
        let part = |input: &'_ Vec<u8>| input[rank * self.bytes..][..self.bytes].to_vec();
        match self.kind {
            CollectiveKind::AllGather => self.inputs.concat(),
            CollectiveKind::ReduceScatter => {
                let parts: Vec<_> = self.inputs.iter().map(part).collect();
                sum(self.element, &parts.iter().map(Vec::as_slice).collect::<Vec<_>>())
            }
            CollectiveKind::AllReduce => {
                sum(self.element, &self.inputs.iter().map(Vec::as_slice).collect::<Vec<_>>())
            }
        }
    }

    fn check(&self) -> Outcome {
        for rank in 0..self.memory.len() {
            let expected = self.expected(rank);
            let (input, output) = &self.memory[rank];
            let (from, start) = if self.in_place {
                let part = if self.kind == CollectiveKind::ReduceScatter { rank * self.bytes } else { 0 };
                (input, self.shift + part)
            } else {
                (output, self.shift)
            };
            let got = from.read(start, expected.len())?;
            if let Some(at) = (0..expected.len()).find(|&i| got[i] != expected[i]) {
                let Self { kind, element, way, bytes, shift, in_place, .. } = self;
                let what =
                    format!("{kind:?} {element:?} {way:?} {bytes} B shift {shift} in place {in_place}");
                return Err(format!("{what}: rank {rank} differs first at byte {at}").into());
            }
            // Nothing is written beyond the end, nor before the start.
            if !self.in_place {
                let after = output.read(self.shift + expected.len(), 32)?;
                let before = output.read(0, self.shift)?;
                if before.iter().chain(&after).any(|&byte| byte != POISON) {
                    return Err(
                        format!("{:?} of {} B wrote outside of its output", self.kind, self.bytes).into()
                    );
                }
            }
        }
        Ok(())
    }
}

/// Launches rounds one after the other on all ranks, without a wait between them, and checks them all.
fn run(group: &Group, rounds: &[Round]) -> Outcome {
    rounds.iter().try_for_each(Round::upload)?;
    for round in rounds {
        (0..group.ranks.len()).try_for_each(|rank| round.launch(group, rank))?;
    }
    group.wait()?;
    rounds.iter().try_for_each(Round::check)
}

fn ranks() -> Vec<usize> {
    numbers("DEEPEP_TEST_RANKS", &[2, 4]).into_iter().filter(|&n| n > 1).collect()
}

fn ways(kind: CollectiveKind, bytes: usize, cells: usize) -> Vec<Way> {
    let mut all = vec![Way::OneShot];
    if kind == CollectiveKind::AllReduce {
        all.push(Way::TwoShot);
    }
    if bytes <= cells {
        all.push(Way::Cells);
    }
    all
}

#[test]
fn every_way_gives_the_oracles_bits() {
    let Some(machine) = machine() else { return };
    for n in ranks() {
        let config = CollectiveConfig::new(n);
        let group = Group::new(&machine, config, KERNEL_TIMEOUT).unwrap();
        let mut seed = 0;
        for bytes in [4, 8, 12, 100, 4096, 70_000, 262_144, (1 << 20) + 4, 5 << 20] {
            for kind in KINDS {
                // Large ones once: the oracle takes its time.
                for element in Element::ALL.into_iter().filter(|&e| bytes < 1 << 20 || e == Element::Bf16) {
                    for way in ways(kind, bytes, config.cell_bytes) {
                        seed += 1;
                        let round = || Round::new(&group, kind, element, bytes, seed).unwrap().way(way);
                        // Aligned; not aligned to a vector; in place.
                        let rounds = [round(), round().shifted(element.size()), round().in_place()];
                        run(&group, &rounds).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
                    }
                }
            }
        }
    }
}

#[test]
fn odd_lengths_end_where_they_end() {
    let Some(machine) = machine() else { return };
    for n in ranks() {
        let config = CollectiveConfig { slice: 8192, cell_bytes: 4096, ..CollectiveConfig::new(n) };
        let group = Group::new(&machine, config, KERNEL_TIMEOUT).unwrap();
        for (bytes, element) in
            [(2, Element::Bf16), (14, Element::F16), (8190, Element::Bf16), (99_998, Element::F16)]
        {
            for kind in KINDS {
                for way in ways(kind, bytes, config.cell_bytes) {
                    let round = || Round::new(&group, kind, element, bytes, 5).unwrap().way(way);
                    run(&group, &[round(), round().shifted(2)]).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
                }
            }
        }
        // All-gather moves bytes of any number.
        for bytes in [1, 3, 17, 8191] {
            for way in ways(CollectiveKind::AllGather, bytes, config.cell_bytes) {
                let round = Round::new(&group, CollectiveKind::AllGather, Element::F32, bytes, 6).unwrap();
                run(&group, &[round.way(way).shifted(1)]).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
            }
        }
    }
}

#[test]
fn calls_of_all_kinds_and_sizes_follow_each_other() {
    let Some(machine) = machine() else { return };
    for n in ranks() {
        // Small stages, so that every call goes around the buffers many times.
        let config = CollectiveConfig { slice: 16384, ..CollectiveConfig::new(n) };
        let group = Group::new(&machine, config, KERNEL_TIMEOUT).unwrap();
        let mut random = Random::new(&[n as u64, 99]);
        for _ in 0..numbers("DEEPEP_TEST_ROUNDS", &[8])[0] {
            let rounds: Vec<Round> = (0..12)
                .map(|_| {
                    let kind = KINDS[random.below(3)];
                    let element = Element::ALL[random.below(3)];
                    let most = 1 << [4, 10, 16, 18][random.below(4)];
                    let bytes = 4 * (1 + random.below(most));
                    let ways = ways(kind, bytes, config.cell_bytes);
                    let way = ways[random.below(ways.len())];
                    Round::new(&group, kind, element, bytes, random.next()).unwrap().way(way)
                })
                .collect();
            run(&group, &rounds).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let Some(machine) = machine() else { return };
    for (kind, way, phase) in [
        (CollectiveKind::AllReduce, Way::Cells, Phase::Cells),
        (CollectiveKind::AllGather, Way::OneShot, Phase::Stage),
        (CollectiveKind::AllReduce, Way::TwoShot, Phase::Stage),
    ] {
        let group = Group::new(&machine, CollectiveConfig::new(2), Duration::from_millis(200)).unwrap();
        let round = Round::new(&group, kind, Element::F32, 64 << 10, 1).unwrap().way(way);
        round.upload().unwrap();
        round.launch(&group, 0).unwrap();
        let start = Instant::now();
        assert!(group.wait().is_err(), "rank 1 did not take part");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        let report = group.ranks[0].status.report(RecordKind::Abort).unwrap();
        assert_eq!((report.rank, report.peer), (0, 1), "{report:?}");
        // Another thread waits for the other rank's start at the same time.
        assert!([phase, Phase::Started].iter().any(|&p| p as u32 == report.phase), "{report:?}");
        assert!(Operation::from_code(report.operation).is_some());
        // Whoever comes later is told at once.
        let start = Instant::now();
        round.launch(&group, 1).unwrap();
        assert!(group.wait().is_err());
        assert!(start.elapsed() < Duration::from_millis(150), "{:?}", start.elapsed());
        assert!(group.ranks[1].status.report(RecordKind::Abort).is_some());
    }
}

/// Microseconds of each way at each size: the slowest rank, median of single calls. Run by name.
#[test]
#[ignore = "prints times; run by name"]
fn collective_times() {
    let Some(machine) = machine() else { return };
    for n in numbers("DEEPEP_TEST_RANKS", &[2]).into_iter().filter(|&n| n > 1) {
        let group = Group::new(&machine, CollectiveConfig::new(n), KERNEL_TIMEOUT).unwrap();
        for kind in KINDS {
            for power in [3, 10, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28] {
                let bytes = 1_usize << power;
                let mut round = Round {
                    kind,
                    element: Element::Bf16,
                    way: None,
                    bytes,
                    inputs: Vec::new(),
                    memory: allocate(&group, kind, bytes),
                    shift: 0,
                    in_place: false,
                };
                let mut line = format!("{n} ranks {kind:?} {bytes:>10} B:");
                for way in ways(kind, bytes, CollectiveConfig::new(n).cell_bytes) {
                    round.way = Some(way);
                    let us = time(&group, &round).unwrap();
                    // Bytes that cross a rank's link in one direction.
                    let wire = match (kind, way) {
                        (CollectiveKind::AllReduce, Way::TwoShot) => 2 * bytes * (n - 1) / n,
                        _ => bytes * (n - 1),
                    };
                    line += &format!("  {way:?} {us:.1} us ({:.0} GB/s)", wire as f64 / us / 1e3);
                }
                println!("{line}");
            }
        }
    }
}

fn allocate(group: &Group, kind: CollectiveKind, bytes: usize) -> Vec<(Buffer, Buffer)> {
    let n = group.ranks.len();
    let given = if kind == CollectiveKind::ReduceScatter { bytes * n } else { bytes };
    let got = if kind == CollectiveKind::AllGather { bytes * n } else { bytes };
    let buffer = |context: &Context, bytes| {
        let buffer = Buffer::new(context, bytes).unwrap();
        buffer.fill(0, bytes, 0).unwrap();
        buffer
    };
    group.ranks.iter().map(|r| (buffer(&r.context, given), buffer(&r.context, got))).collect()
}

fn time(group: &Group, round: &Round) -> Outcome<f64> {
    let event = |rank: &Rank| -> Outcome<CUevent> {
        let _bound = rank.context.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is valid for one write; a context is current. Left to the context's end: this is a test.
        unsafe { rank.context.device().cuda().driver().cuEventCreate(&mut event, 0) }?;
        Ok(event)
    };
    let events: Vec<_> =
        group.ranks.iter().map(|r| Ok((event(r)?, event(r)?))).collect::<Outcome<Vec<_>>>()?;
    let record = |rank: &Rank, event| -> Outcome {
        let _bound = rank.context.bind()?;
        // SAFETY: event and stream belong to this context.
        unsafe { rank.context.device().cuda().driver().cuEventRecord(event, rank.stream) }?;
        Ok(())
    };
    let n = group.ranks.len();
    let mut times = Vec::new();
    for _ in 0..25 {
        // A call before aligns the ranks.
        (0..n).try_for_each(|r| round.launch(group, r))?;
        for (r, rank) in group.ranks.iter().enumerate() {
            record(rank, events[r].0)?;
            round.launch(group, r)?;
            record(rank, events[r].1)?;
        }
        group.wait()?;
        let mut slowest = 0.0_f64;
        for (rank, (from, to)) in group.ranks.iter().zip(&events) {
            let _bound = rank.context.bind()?;
            let mut ms = 0f32;
            // SAFETY: both events were recorded and have completed.
            unsafe { rank.context.device().cuda().driver().cuEventElapsedTime(&mut ms, *from, *to) }?;
            slowest = slowest.max(f64::from(ms) * 1e3);
        }
        times.push(slowest);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
