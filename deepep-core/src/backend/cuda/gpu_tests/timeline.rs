//! What happens when inside the kernels: the time of each mark (kernels/common/timeline.cuh), by kernel.
//!
//! `timelines` is run by name, `--ignored timeline::timelines`, and takes the variables of `times`, and in `DEEPEP_TEST_RUNS` a number of runs. Small
//! batches: the last pair of a dispatch and a combine of a graph. Others: single calls, with an empty L2. How to read it: docs/gpu-checks.md.

use std::fmt::Write as _;

use super::input::Case;
use super::machine::{Buffer, Machine, Outcome};
use super::times::{Graph, Operation, each_case, edited};
use super::{Bench, Round, machine, numbers};
use crate::layout::MAX_BLOCKS;

const RUNS: usize = 30;
/// Runs before those, and calls of a graph: the last one's kernels follow each other as in a long one.
const WARM: usize = 3;
const CALLS: usize = 10;
/// Batches of fewer tokens are measured in graphs.
const SMALL: usize = 512;

/// A mark's name in the sources, and what has happened.
type Point = (&'static str, &'static str);

/// Every mark. The first two and the last one are those of every kernel: it is entered, the one before has ended, it ends.
const PACKET_DISPATCH: &[Point] = &[
    ("PD_ENTRY", "entered"),
    ("PD_START", "started: the kernel before has ended"),
    ("PD_EPOCH", "epoch known"),
    ("PD_SENT_IDS", "ids sent"),
    ("PD_SENT_FIRST", "first part loaded and sent"),
    ("PD_SENT_LAST", "last part loaded and sent"),
    ("PD_IDS", "all ids arrived"),
    ("PD_MET", "block has met: maps complete"),
    ("PD_COUNTED", "experts' rows counted"),
    ("PD_ROW_FIRST", "first part of a row arrived"),
    ("PD_ROW_LAST", "last part of a row arrived"),
    ("PD_PLACED_FIRST", "first item written"),
    ("PD_PLACED_LAST", "last item written"),
    ("PD_END", "end"),
];
const DISPATCH: &[Point] = &[
    ("D_ENTRY", "entered"),
    ("D_START", "started: the kernel before has ended"),
    ("D_EPOCH", "block has met: epoch known, tokens counted"),
    ("D_COUNTED", "workers: ids read and counted"),
    ("D_PUBLISHED", "counts of the block published"),
    ("D_LANDED_FIRST", "senders: first row without a place sent"),
    ("D_EXCHANGED", "counts of all blocks arrived"),
    ("D_STARTS", "starts known"),
    ("D_TABLES_KNOWN", "senders: tables of all blocks acquired"),
    ("D_SENT_FIRST", "senders: first row's store to its place"),
    ("D_TOLD_KNOWN", "announcers: all peers told (expanded)"),
    ("D_SENT_LAST", "senders: last row's store issued"),
    ("D_SEND_END", "senders: all stores complete"),
    ("D_TABLES", "workers: tables written"),
    ("D_TOLD", "workers: peers told of tokens"),
    ("D_CLOSER", "closer: told of it"),
    ("D_ANNOUNCED", "announcer or closer: all flags stored"),
    ("D_WATCHED", "watcher: all peers' rows there (plain)"),
    ("D_MOVE_START", "movers: tables acquired"),
    ("D_MOVED_FIRST", "movers: first row's store issued"),
    ("D_OWN_END", "movers: no own rows left"),
    ("D_IN_FIRST", "movers: first row from a peer found"),
    ("D_IN_LAST", "movers: last row from a peer found"),
    ("D_MOVED_LAST", "movers: last row's store issued"),
    ("D_MOVE_END", "movers: all stores complete"),
    ("D_ROLE_END", "warp's work done"),
    ("D_END", "end"),
];
const PACKET_COMBINE: &[Point] = &[
    ("PC_ENTRY", "entered"),
    ("PC_START", "started: the kernel before has ended"),
    ("PC_EPOCH", "block has met: epoch known"),
    ("PC_SUMMED", "senders: first sum"),
    ("PC_SENT_FIRST", "senders: first part summed and sent"),
    ("PC_SENT_LAST", "senders: last part summed and sent"),
    ("PC_ARRIVED_FIRST", "reducers: first part's sums arrived"),
    ("PC_ARRIVED_LAST", "reducers: last part's sums arrived"),
    ("PC_WRITTEN_FIRST", "reducers: first part written"),
    ("PC_WRITTEN_LAST", "reducers: last part written"),
    ("PC_END", "end"),
];
const COMBINE: &[Point] = &[
    ("C_ENTRY", "entered"),
    ("C_START", "started: the kernel before has ended"),
    ("C_EPOCH", "block has met: epoch known"),
    ("C_PERMITTED", "senders: peers have started"),
    ("C_SENT_FIRST", "senders: first row's or part's stores issued"),
    ("C_SENT_LAST", "senders: last row's or part's stores issued"),
    ("C_SEND_END", "senders: all stores complete, last flags told"),
    ("C_ANNOUNCED", "announcer: all flags stored"),
    ("C_ARRIVED_FIRST", "reducers: first rows from a peer there"),
    ("C_ARRIVED_LAST", "reducers: last rows from a peer there"),
    ("C_SUMMED_FIRST", "reducers: first result written"),
    ("C_SUMMED_LAST", "reducers: last result written"),
    ("C_REDUCED", "reducers: done"),
    ("C_END", "end"),
];
/// A kernel's table, and whether it is a combine's: those have the upper half of a warp's slots.
const KERNELS: [(&[Point], bool); 4] =
    [(PACKET_DISPATCH, false), (DISPATCH, false), (PACKET_COMBINE, true), (COMBINE, true)];
const START: usize = 1;

const HALF: usize = 32;
const WARPS: usize = 16;
const SLOTS: usize = MAX_BLOCKS * WARPS * 2 * HALF;
/// Bytes of all marks of a rank, in front of its heap.
pub(super) const BYTES: usize = SLOTS * 8;
const _: () = assert!(BYTES.is_multiple_of(2 << 20) && crate::jit::THREADS / 32 <= WARPS);

/// Kernels with marks, and with what `times` alters: an [`Alter`](crate::jit::Alter).
pub(super) fn marked(name: &str, text: String) -> String {
    let mut text = edited(name, text);
    if name == "generated.cuh" {
        let _ = writeln!(
            text,
            "#define DEEPEP_TIMELINE\nconstexpr u32 TIMELINE_BYTES = {BYTES}, TIMELINE_WARPS = {WARPS}, TIMELINE_POINTS = {};",
            2 * HALF
        );
        for (points, combine) in KERNELS {
            for (i, (name, _)) in points.iter().enumerate() {
                let _ = writeln!(text, "constexpr u32 {name} = {};", i + HALF * usize::from(combine));
            }
        }
    }
    text
}

/// The marks of one run on one rank: `[block][warp][point]`, in ns of the device's clock; 0 if nobody came by.
struct Marks(Vec<u64>);

impl Marks {
    fn read(heap: &Buffer) -> Outcome<Self> {
        let mut bytes = vec![0; BYTES];
        heap.memory().context().download(heap.memory(), 0, &mut bytes)?;
        Ok(Self(
            bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default())).collect(),
        ))
    }

    fn at(&self, warp: usize, point: usize, combine: bool) -> u64 {
        self.0[warp * 2 * HALF + HALF * usize::from(combine) + point]
    }

    fn all(&self, point: usize, combine: bool) -> impl Iterator<Item = u64> + '_ {
        let at = move |warp| self.at(warp, point, combine);
        (0..MAX_BLOCKS * WARPS).map(at).filter(|&time| time != 0)
    }

    /// When the first warp of the last call has started.
    fn start(&self, combine: bool) -> Option<u64> {
        self.all(START, combine).min()
    }
}

fn microseconds(time: u64, from: u64) -> f64 {
    (time as i64 - from as i64) as f64 / 1e3
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Number of warps that came by in any run, and the lowest, mean and highest time of a run's warps, each by its median over the runs: the highest is
/// when the last one came, whichever it was.
fn of_point(runs: &[Marks], point: usize, combine: bool) -> Option<(usize, [f64; 3])> {
    let mut came = vec![false; MAX_BLOCKS * WARPS];
    let mut all = [const { Vec::new() }; 3];
    for marks in runs {
        let Some(start) = marks.start(combine) else { continue };
        let mut times = Vec::new();
        for (warp, came) in came.iter_mut().enumerate() {
            let time = marks.at(warp, point, combine);
            // Earlier calls of a chain have left theirs, and a kernel may be entered before its start.
            if time >= start || (point < START && time != 0) {
                *came = true;
                times.push(microseconds(time, start));
            }
        }
        let Some(low) = times.iter().copied().reduce(f64::min) else { continue };
        let high = times.iter().copied().fold(low, f64::max);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        for (all, one) in all.iter_mut().zip([low, mean, high]) {
            all.push(one);
        }
    }
    // Work that is drawn goes to other warps every time.
    let warps = came.into_iter().filter(|&came| came).count();
    (warps > 0).then(|| (warps, all.map(median)))
}

fn header(operation: &str) -> String {
    format!("\n  {operation:44} |warps    min   mean    max |   of rank 1, µs after its start")
}

/// One line a point, the ranks side by side.
fn table(ranks: &[Vec<Marks>], points: &[Point], combine: bool) -> String {
    let mut text = String::new();
    for (i, (_, what)) in points.iter().enumerate() {
        let cells: Vec<_> = ranks.iter().map(|runs| of_point(runs, i, combine)).collect();
        if cells.iter().all(Option::is_none) {
            continue;
        }
        let _ = write!(text, "\n  {what:44}");
        for cell in cells {
            let _ = match cell {
                Some((warps, [low, mean, high])) => {
                    write!(text, " |{warps:5} {low:6.1} {mean:6.1} {high:6.1}")
                }
                None => write!(text, " |{:26}", ""),
            };
        }
        text += " µs";
    }
    text
}

/// From the end of the last dispatch to the start of the combine behind it.
fn gap(runs: &[Marks], dispatch: &[Point]) -> Option<f64> {
    let of_run = |marks: &Marks| {
        let end = marks.all(dispatch.len() - 1, false).max()?;
        Some(microseconds(marks.start(true)?, end))
    };
    let all: Vec<f64> = runs.iter().filter_map(of_run).collect();
    (!all.is_empty()).then(|| median(all))
}

impl Bench {
    /// The marks of each of the first two ranks, of the last call of each run.
    fn marks(&self, mut run: impl FnMut() -> Outcome) -> Outcome<Vec<Vec<Marks>>> {
        let heaps: Vec<_> = self.group.ranks.iter().map(|rank| &rank.heap).take(2).collect();
        let mut all: Vec<Vec<Marks>> = heaps.iter().map(|_| Vec::new()).collect();
        for turn in 0..WARM + numbers("DEEPEP_TEST_RUNS", &[RUNS])[0].max(1) {
            for heap in &heaps {
                heap.memory().context().fill(heap.memory(), 0, BYTES, 0)?;
            }
            run()?;
            for (heap, runs) in heaps.iter().zip(&mut all).filter(|_| turn >= WARM) {
                runs.push(Marks::read(heap)?);
            }
        }
        Ok(all)
    }

    fn timeline(&self, operation: Operation) -> Outcome<String> {
        let before = self.before(operation)?;
        let calls = if self.case.max_tokens < SMALL { CALLS } else { 1 };
        let ranks = self.group.ranks.iter().enumerate();
        let launch = |r| (0..calls).try_for_each(|_| self.launch(operation, r));
        let graphs: Vec<Graph<'_>> = match calls {
            1 => Vec::new(),
            _ => ranks.map(|(r, rank)| Graph::capture(rank, || launch(r))).collect::<Outcome<_>>()?,
        };
        self.group.wait()?;
        let mut times = Vec::new();
        let marks = self.marks(|| {
            let call = |r: usize| graphs.get(r).map_or_else(|| launch(r), Graph::launch);
            times.push(self.sample(&before, call)? / calls as f64);
            Ok(())
        })?;
        let (dispatches, combines) = match operation {
            Operation::Combine => (false, true),
            Operation::Pair => (true, true),
            _ => (true, false),
        };
        let (of_dispatch, of_combine) = match self.case.in_packets() {
            true => (PACKET_DISPATCH, PACKET_COMBINE),
            false => (DISPATCH, COMBINE),
        };
        let how = if calls > 1 { "in a graph" } else { "single" };
        let mut text = format!(" {:.1} µs {how}, with marks", median(times));
        if dispatches {
            text += &header("dispatch");
            text += &table(&marks, of_dispatch, false);
        }
        if dispatches && combines {
            let gaps: Vec<_> = marks.iter().filter_map(|runs| gap(runs, of_dispatch)).collect();
            let _ = write!(text, "\n  from dispatch's end to combine's start: {gaps:.1?} µs");
        }
        if combines {
            text += &header("combine");
            text += &table(&marks, of_combine, true);
        }
        Ok(text)
    }
}

#[test]
#[ignore = "prints times, for a machine of its own"]
fn timelines() {
    let Some(machine) = machine() else { return };
    let only = std::env::var("DEEPEP_TEST_ONLY").unwrap_or_default();
    let what = "µs since the first warp of the rank has started";
    each_case(&machine, what, &[0], |case| {
        let case = Case { alter: Some(marked), ..case.clone() };
        of_case(&machine, &case, &only)
    });
}

fn of_case(machine: &Machine, case: &Case, only: &str) -> Outcome<String> {
    let small = case.max_tokens < SMALL;
    // Without a choice: pairs of small batches, and large ones' operations for themselves.
    let chosen = |name: &str| match only {
        "" => (name == "pair") == small && name != "cached",
        _ => only.split(',').any(|o| o == name),
    };
    let wanted: Vec<_> =
        Operation::of(case).filter(|&(name, o)| o != Operation::Empty && chosen(name)).collect();
    if wanted.is_empty() {
        return Ok(String::new());
    }
    let combines = wanted.iter().any(|(_, operation)| operation.combines());
    let bench = Bench::new(machine, case)?;
    let round = if combines { Round::drawn(case, 1) } else { Round::of_dispatch(case, 1) };
    bench.upload(0, &round)?;
    bench.upload(1, &round)?;
    bench.each(true, |r| bench.give_rows(r, 0))?;
    bench.each(true, |r| bench.launch_dispatch(r, 0, 0, 0, false))?;
    let mut text = String::new();
    for (name, operation) in wanted {
        let _ = write!(text, " {name}{}", bench.timeline(operation)?);
    }
    Ok(text)
}

/// Every point of the tables is marked somewhere, and no other is.
#[test]
fn tables_name_the_marks_of_the_sources() {
    use crate::jit::Program;
    let program = Program::Barrier { ranks: 2 };
    let mut sources: Vec<String> = program.headers().into_iter().map(|(_, text)| text).collect();
    sources.extend(Program::all(2).iter().map(|p| p.source().to_owned()));
    let mut marked: Vec<String> = Vec::new();
    for line in sources.iter().flat_map(|s| s.lines()).filter(|l| l.trim_start().starts_with("MARK")) {
        if let Some((_, point)) = line.trim_end_matches(");").rsplit_once(", ") {
            marked.push(point.to_owned());
        }
    }
    let all: Vec<&str> = KERNELS.iter().flat_map(|(points, _)| points.iter().map(|p| p.0)).collect();
    for name in &all {
        assert!(marked.iter().any(|m| m == name), "{name} is marked nowhere");
    }
    for name in &marked {
        assert!(all.contains(&name.as_str()), "{name} is in no table");
    }
    assert!(KERNELS.iter().all(|(points, _)| points.len() <= HALF));
}
