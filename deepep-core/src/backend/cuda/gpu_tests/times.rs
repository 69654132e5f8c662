//! End-to-end times of the operations, for orientation; the real benchmark is the program's.
//!
//! `DEEPEP_TEST_TOKENS`, `DEEPEP_TEST_BLOCKS`, `DEEPEP_TEST_RANKS`, `DEEPEP_TEST_COMBINE`, `DEEPEP_TEST_DISPATCH`, `DEEPEP_TEST_ONLY=combine,pair` choose what is measured;
//! `DEEPEP_TEST_PULLED=0,64,2` how many of 64 tokens combine pulls in the plain layout (0: all are sent), `DEEPEP_TEST_PARTS=1,3` in how many parts sums travel in
//! the expanded one (without it, the formula's), `DEEPEP_TEST_TICKETS=0` that sums and pulled tokens are not drawn by ticket,
//! `DEEPEP_TEST_PLACEMENT=Plain` or `Expanded` one layout, `DEEPEP_TEST_ROWS=FP8` or `BF16` one kind of rows, `DEEPEP_TEST_PACKETS=0` sends small batches as rows, `DEEPEP_TEST_FOR_SIZES=0`
//! sends them with kernels for all sizes, `DEEPEP_TEST_EARLY=0` or `1` says whether kernels are launched early (by default they are on devices with one rank), and
//! `DEEPEP_TEST_COOPERATIVE=1` says whether the driver refuses grids that can't be resident as a whole (by default if they are not early). Ranks may share a device;
//! then nothing crosses a link, and the times say what the kernels cost without one.
//!
//! L2 is emptied before each sample; with `DEEPEP_TEST_COLD=data` the call is then made once with other rows, so that instructions don't come from memory, and with
//! `DEEPEP_TEST_COLD=nothing` L2 is as the call before has left it.
//!
//! `DEEPEP_TEST_ALTER='from=>to~~from=>to'` replaces text in the kernels before they are compiled: what a part costs is seen when it is left out.
//! Results are not looked at then.

use cuda_vmm::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::input::Case;
use super::machine::{Buffer, Machine, Outcome, Rank, early};
use super::{Bench, Round, all_roles, machine, numbers, tag_of};
use crate::layout::Placement;

const ITERATIONS: usize = 31;
/// Calls of a chain: more, where each takes so little that starting the chain would show.
const fn chain(tokens: usize) -> usize {
    if tokens < 512 { 50 } else { 20 }
}
const FLUSH: usize = 256 << 20;

/// What stands before each sample, in stream order.
pub(super) struct Before {
    /// Overwritten, a buffer for each rank, so that nothing else is in L2.
    flush: Vec<Buffer>,
    /// Called then, with rows at other addresses: instructions are in the caches, and so is what calls share (workspace, a combine's handle), but no row.
    other: Option<Operation>,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Operation {
    Empty,
    Dispatch,
    Cached,
    Combine,
    /// A dispatch and a combine of what it received.
    Pair,
}

impl Operation {
    const ALL: [(&str, Self); 5] = [
        ("dispatch", Self::Dispatch),
        ("cached", Self::Cached),
        ("combine", Self::Combine),
        ("pair", Self::Pair),
        ("empty", Self::Empty),
    ];

    /// What a case is measured for, and its name.
    pub(super) fn of(case: &Case) -> impl Iterator<Item = (&'static str, Self)> {
        // Combine does not depend on what dispatch sent.
        let all = case.scale_packs == 0;
        Self::ALL.into_iter().filter(move |&(_, operation)| all || operation != Self::Combine)
    }

    pub(super) fn combines(self) -> bool {
        matches!(self, Self::Combine | Self::Pair)
    }
}

/// A graph of one rank's calls, as far as it has been made.
pub(super) struct Graph<'a> {
    rank: &'a Rank,
    graph: CUgraph,
    exec: CUgraphExec,
}

impl<'a> Graph<'a> {
    pub(super) fn capture(rank: &'a Rank, calls: impl FnOnce() -> Outcome) -> Outcome<Self> {
        let _bound = rank.context.bind()?;
        let driver = rank.context.device().cuda().driver();
        let mut made = Self { rank, graph: std::ptr::null_mut(), exec: std::ptr::null_mut() };
        // SAFETY: the stream is the rank's own and idle. Thread-local: other ranks' streams are none of this capture's business.
        unsafe {
            driver.cuStreamBeginCapture(rank.stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        }?;
        let outcome = calls();
        // SAFETY: the capture that was begun above ends on the same stream.
        let ended = unsafe { driver.cuStreamEndCapture(rank.stream, &mut made.graph) };
        outcome?;
        ended?;
        // SAFETY: the graph was just captured.
        unsafe { driver.cuGraphInstantiateWithFlags(&mut made.exec, made.graph, 0) }?;
        // SAFETY: as above; the stream is the rank's own.
        unsafe { driver.cuGraphUpload(made.exec, rank.stream) }?;
        Ok(made)
    }

    pub(super) fn launch(&self) -> Outcome {
        let _bound = self.rank.context.bind()?;
        // SAFETY: the graph is instantiated; its calls' memory lives as long as the bench.
        unsafe { self.rank.context.device().cuda().driver().cuGraphLaunch(self.exec, self.rank.stream) }?;
        Ok(())
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        let Ok(_bound) = self.rank.context.bind() else { return };
        let driver = self.rank.context.device().cuda().driver();
        if !self.exec.is_null() {
            // SAFETY: made by `capture`, destroyed once; launches of it have been waited for.
            let _ = unsafe { driver.cuGraphExecDestroy(self.exec) };
        }
        if !self.graph.is_null() {
            // SAFETY: as above.
            let _ = unsafe { driver.cuGraphDestroy(self.graph) };
        }
    }
}

fn median(n: usize, mut sample: impl FnMut() -> Outcome<f64>) -> Outcome<f64> {
    let mut all: Vec<f64> = (0..n).map(|_| sample()).collect::<Outcome<_>>()?;
    all.sort_by(f64::total_cmp);
    Ok(all[n / 2])
}

impl Bench {
    pub(super) fn launch(&self, operation: Operation, r: usize) -> Outcome {
        match operation {
            Operation::Empty => Ok(()),
            Operation::Dispatch => self.launch_dispatch(r, 0, 0, 0, false),
            Operation::Cached => self.launch_dispatch(r, 0, 1, 0, true),
            Operation::Combine => self.launch_combine(r, 0, 0, 0),
            Operation::Pair => {
                self.launch_dispatch(r, 0, 0, 0, false)?;
                self.launch_combine(r, 0, 0, 0)
            }
        }
    }

    /// The same instructions with other rows, into other slots. `launch` finds what it needs of earlier calls as it was.
    fn launch_other(&self, operation: Operation, r: usize) -> Outcome {
        match operation {
            Operation::Empty => Ok(()),
            Operation::Dispatch => self.launch_dispatch(r, 1, 1, 1, false),
            Operation::Cached => self.launch_dispatch(r, 1, 2, 0, true),
            Operation::Combine => self.launch_combine(r, 1, 0, 0),
            Operation::Pair => {
                self.launch_dispatch(r, 1, 1, 1, false)?;
                self.launch_combine(r, 1, 1, 1)
            }
        }
    }

    /// What stands before each sample of an operation.
    pub(super) fn before(&self, operation: Operation) -> Outcome<Before> {
        let cold = std::env::var("DEEPEP_TEST_COLD").unwrap_or_default();
        let (ranks, other) = match cold.as_str() {
            "" => (&self.group.ranks[..], None),
            "data" => (&self.group.ranks[..], Some(operation)),
            "nothing" => (&[][..], None),
            _ => return Err(format!("DEEPEP_TEST_COLD={cold}: \"data\" or \"nothing\" is known").into()),
        };
        let flush = ranks.iter().map(|r| Buffer::new(&r.context, FLUSH)).collect::<Outcome<_>>()?;
        Ok(Before { flush, other })
    }

    /// Slowest rank, from event to event around `calls` on every rank, ranks aligned by a barrier before.
    pub(super) fn sample(&self, before: &Before, calls: impl Fn(usize) -> Outcome) -> Outcome<f64> {
        let events: Vec<_> =
            self.group.ranks.iter().map(|r| Ok((r.event()?, r.event()?))).collect::<Outcome<_>>()?;
        for (rank, buffer) in self.group.ranks.iter().zip(&before.flush) {
            rank.overwrite(buffer.address(), FLUSH)?;
        }
        if let Some(operation) = before.other {
            (0..self.group.ranks.len()).try_for_each(|r| self.launch_other(operation, r))?;
        }
        for (r, rank) in self.group.ranks.iter().enumerate() {
            let _bound = rank.context.bind()?;
            // SAFETY: the stream is the rank's own, and its context current.
            unsafe { rank.engine.barrier(rank.stream) }?;
            rank.record(events[r].0)?;
            calls(r)?;
            rank.record(events[r].1)?;
        }
        self.group.wait()?;
        let times: Outcome<Vec<f64>> = self
            .group
            .ranks
            .iter()
            .zip(&events)
            .map(|(rank, (from, to))| rank.microseconds(*from, *to))
            .collect();
        Ok(times?.into_iter().fold(0.0, f64::max))
    }

    /// A single call, a call of a chain, and a call of a chain replayed as a graph; L2 emptied before each chain.
    fn time(&self, operation: Operation) -> Outcome<[f64; 3]> {
        let before = self.before(operation)?;
        let single = || self.sample(&before, |r| self.launch(operation, r));
        let calls = chain(self.case.max_tokens);
        let chained = || {
            let all = self.sample(&before, |r| (0..calls).try_for_each(|_| self.launch(operation, r)))?;
            Ok(all / calls as f64)
        };
        median(5, single)?;
        let (single, chained) = (median(ITERATIONS, single)?, median(5, chained)?);
        if operation == Operation::Empty {
            return Ok([single, chained, 0.0]);
        }
        let graphs: Vec<Graph<'_>> = self
            .group
            .ranks
            .iter()
            .enumerate()
            .map(|(r, rank)| Graph::capture(rank, || (0..calls).try_for_each(|_| self.launch(operation, r))))
            .collect::<Outcome<_>>()?;
        self.group.wait()?;
        let replay = || Ok(self.sample(&before, |r| graphs[r].launch())? / calls as f64);
        median(3, replay)?;
        Ok([single, chained, median(11, replay)?])
    }
}

#[test]
#[ignore = "prints times, for a machine of its own"]
fn times() {
    let Some(machine) = machine() else { return };
    let quick = std::env::var("DEEPEP_TEST_ONLY").unwrap_or_default();
    let what = "µs: single (chained, graph)";
    each_case(&machine, what, &[0, 64, 32, 16], |case| times_of(&machine, case, &quick));
}

/// Prints `tell` of every case that the environment asks for.
pub(super) fn each_case(
    machine: &Machine,
    what: &str,
    blocks: &[usize],
    tell: impl Fn(&Case) -> Outcome<String>,
) {
    let blocks = numbers("DEEPEP_TEST_BLOCKS", blocks);
    let chosen = |variable: &str, name: &str| match std::env::var(variable) {
        Ok(names) => names.is_empty() || names.split(',').any(|n| n == name),
        Err(_) => true,
    };
    let wanted = |name: &str| chosen("DEEPEP_TEST_PLACEMENT", name);
    let kind = |name: &str| chosen("DEEPEP_TEST_ROWS", name);
    let packets = std::env::var("DEEPEP_TEST_PACKETS").map_or(true, |value| value != "0");
    let for_sizes = std::env::var("DEEPEP_TEST_FOR_SIZES").map_or(true, |value| value != "0");
    let tell = |case: &Case, how: &str| {
        let (tokens, blocks, placement) = (case.max_tokens, case.blocks, case.placement);
        let rows = if case.scale_packs > 0 { "FP8" } else { "BF16" };
        let head = format!("T {tokens:5}, blocks {blocks:3}, {placement:?}, {rows}{how}:");
        let text = tell(case).unwrap_or_else(|e| panic!("{head} {e}"));
        if !text.is_empty() {
            eprintln!("{head}{text}");
        }
    };
    for ranks in numbers("DEEPEP_TEST_RANKS", &[machine.devices().clamp(2, 8)]) {
        let early = early(ranks.div_ceil(machine.devices())).unwrap_or_else(|e| panic!("{ranks} ranks: {e}"));
        eprintln!("kernels are {}launched early", if early { "" } else { "not " });
        eprintln!("{ranks} ranks on {} GPUs, H 7168, top-8 of 256; {what}", machine.devices());
        for tokens in numbers("DEEPEP_TEST_TOKENS", &[4096, 128]) {
            for &blocks in &blocks {
                for placement in
                    [Placement::Plain, Placement::Expanded].into_iter().filter(|p| wanted(&format!("{p:?}")))
                {
                    for (how, mut case) in variants(ranks, tokens, placement) {
                        (case.experts, case.topk, case.hidden) = (256 / ranks * ranks, 8, 7168);
                        (case.packets, case.for_sizes) = (packets && case.pulled == 0, for_sizes);
                        case.blocks = blocks;
                        if case.pulled == 0 && kind("FP8") {
                            tell(&Case { row_bytes: 7168, scale_packs: 56, ..case.clone() }, &how);
                        }
                        if kind("BF16") {
                            tell(&Case { row_bytes: 14336, ..case }, &how);
                        }
                    }
                }
            }
        }
    }
}

/// The ways to combine that the environment asks for, with what to call them. Only combines of BF16 rows differ.
fn variants(ranks: usize, tokens: usize, placement: Placement) -> Vec<(String, Case)> {
    let plain = placement == Placement::Plain;
    let tickets = std::env::var("DEEPEP_TEST_TICKETS").map_or(true, |value| value != "0");
    let mut all = Vec::new();
    for (roles, dispatch_roles) in all_roles() {
        for pulled in numbers("DEEPEP_TEST_PULLED", &[0]) {
            for parts in numbers("DEEPEP_TEST_PARTS", &[0]) {
                if (!plain || ranks == 1) && pulled > 0 || plain && parts > 1 {
                    continue;
                }
                let mut how = String::new();
                if pulled > 0 {
                    how += &format!(", {pulled}/64 pulled");
                }
                if parts > 0 && !plain {
                    how += &format!(", {parts} parts");
                }
                how += &tag_of(roles, dispatch_roles);
                let parts = (parts > 0).then_some(parts);
                all.push((
                    how,
                    Case {
                        roles,
                        dispatch_roles,
                        pulled,
                        parts,
                        tickets,
                        ..Case::new(ranks, tokens, placement)
                    },
                ));
            }
        }
    }
    all
}

/// What is to be replaced in the kernels.
fn edits() -> Option<String> {
    std::env::var("DEEPEP_TEST_ALTER").ok()
}

pub(super) fn edited(_: &str, mut text: String) -> String {
    for edit in edits().iter().flat_map(|all| all.split("~~")) {
        let (from, to) = edit.split_once("=>").unwrap_or_else(|| panic!("{edit:?} is no `from=>to`"));
        text = text.replace(from, to);
    }
    text
}

/// `only`: names of operations, or nothing for all.
fn times_of(machine: &Machine, case: &Case, only: &str) -> Outcome<String> {
    let mut line = String::new();
    let chosen = |name: &str| only.is_empty() || only.split(',').any(|o| o == name);
    let wanted: Vec<_> = Operation::of(case).filter(|(name, _)| chosen(name)).collect();
    if wanted.is_empty() {
        return Ok(line);
    }
    let altered = Case { alter: case.alter.or(edits().map(|_| edited as crate::jit::Alter)), ..case.clone() };
    let case = &altered;
    let bench = Bench::new(machine, case)?;
    let combines = wanted.iter().any(|(_, operation)| operation.combines());
    let round = if combines { Round::drawn(case, 1) } else { Round::of_dispatch(case, 1) };
    bench.upload(0, &round)?;
    bench.upload(1, &round)?;
    bench.each(true, |r| bench.give_rows(r, 0))?;
    bench.each(true, |r| bench.launch_dispatch(r, 0, 0, 0, false))?;
    for (name, operation) in wanted {
        let [single, chained, graph] = bench.time(operation)?;
        line += &format!(" {name} {single:.1} ({chained:.1}, {graph:.1});");
    }
    if edits().is_some() {
        return Ok(line + " of altered kernels, unchecked");
    }
    if case.roles.is_none() {
        bench.check_dispatch(&round, &round.inputs, 0, 0, false)?;
    }
    if case.roles.is_none() && combines {
        bench.each(true, |r| bench.launch_combine(r, 0, 0, 0))?;
        bench.check_combine(0, &round)?;
    }
    Ok(line)
}
