//! The kernels on GPUs, against the oracle, bit by bit. All ranks live in this process; on a machine without a GPU the tests say so.
//!
//! `DEEPEP_TEST_RANKS=1,2,4` chooses the numbers of ranks (more than there are GPUs is fine), `DEEPEP_TEST_COMBINE` the roles of combine's
//! warps (see `roles`), `DEEPEP_TEST_DISPATCH` those of dispatch's blocks and warps, `DEEPEP_TEST_CASES=part;part` cases by parts of their names, `DEEPEP_TEST_ROUNDS` the
//! rounds of the stress test, `DEEPEP_TEST_TIMEOUT` the deadline in seconds. `times` prints end-to-end times and `timelines` when what happens inside the
//! kernels; they are run by name: `--ignored times::times`, `--ignored timeline::timelines`.

mod cases;
mod check;
mod collective;
mod control;
#[cfg(feature = "aot")]
mod embedded;
mod faults;
mod input;
mod machine;
mod on_cpu;
mod oracle;
mod parallel;
mod timeline;
mod times;

use std::io::Write as _;
use std::time::Instant;

use self::check::{POISON, Slots};
use self::input::{Case, Input, Random};
use self::machine::{Buffer, Group, Machine, Outcome};
use self::oracle::Received;
use super::{CombineLaunch, CombinePlan, CombineRoles, DispatchLaunch, DispatchPlan, DispatchRoles, Engine};
use crate::backend::Readable;
use crate::layout::{HeapConfig, HeapLayout, Placement};

const OUTPUT_SLOTS: usize = 3;
const HANDLE_SLOTS: usize = 2;

fn machine() -> Option<Machine> {
    match Machine::find().unwrap_or_else(|e| panic!("{e}")) {
        Ok(machine) => Some(machine),
        Err(reason) => {
            assert!(std::env::var_os("REQUIRE_GPU").is_none_or(|v| v != "1"), "no CUDA device ({reason})");
            // Past the test runner's capture of what passing tests print.
            writeln!(std::io::stderr(), "skipped: no CUDA device ({reason})").ok();
            None
        }
    }
}

/// `DEEPEP_TEST_COMBINE=5.2.6.9.9,5.2.6.9.9.3`: sender warps, stages, reducers, pieces of their rings and of those of senders, batches of a ring (2). In the plain
/// layout the fourth number is that of shares, or of pulled batches. Without it, the formula's.
fn roles() -> Vec<Option<CombineRoles>> {
    let Ok(text) = std::env::var("DEEPEP_TEST_COMBINE") else { return vec![None] };
    let parse = |one: &str| {
        let given = parsed(one, '.');
        let &[row_warps, stages, reducers, pieces, sender_pieces, ref rest @ ..] = given.as_slice() else {
            panic!("five numbers are needed, and not {one}")
        };
        let batches = rest.first().copied().unwrap_or(2);
        Some(CombineRoles { row_warps, stages, reducers, pieces, sender_pieces, batches })
    };
    text.split(',').map(parse).collect()
}

/// `DEEPEP_TEST_DISPATCH=32.16.7.4.2.6,0.24`: blocks, blocks that send, row warps, stages, stages ahead, eighths that are drawn, 1 for own
/// rows one by one, 1 for copies that the cache gives up first, 1 for senders that count, too. 0, and what is left out, are the formula's.
fn dispatch_roles() -> Vec<Option<DispatchRoles>> {
    let Ok(text) = std::env::var("DEEPEP_TEST_DISPATCH") else { return vec![None] };
    let parse = |one: &str| {
        let given = parsed(one, '.');
        let number = |i: usize| given.get(i).copied().unwrap_or(0);
        Some(DispatchRoles {
            blocks: number(0),
            senders: number(1),
            row_warps: number(2),
            stages: number(3),
            ahead: number(4),
            drawn: given.get(5).copied(),
            own_in_order: number(6) == 1,
            evict_own: number(7) == 1,
            senders_count: number(8) == 1,
        })
    };
    text.split(',').map(parse).collect()
}

fn parsed(text: &str, between: char) -> Vec<usize> {
    let number = |n: &str| n.trim().parse().unwrap_or_else(|_| panic!("{n:?} in {text:?} is no number"));
    text.split(between).map(number).collect()
}

/// The variable's numbers, with commas in between, or else the default.
fn numbers(variable: &str, default: &[usize]) -> Vec<usize> {
    std::env::var(variable).map_or(default.to_vec(), |text| parsed(&text, ','))
}

/// Every choice of one with every choice of the other.
fn all_roles() -> Vec<(Option<CombineRoles>, Option<DispatchRoles>)> {
    roles().into_iter().flat_map(|c| dispatch_roles().into_iter().map(move |d| (c, d))).collect()
}

fn tag_of(combine: Option<CombineRoles>, dispatch: Option<DispatchRoles>) -> String {
    let combine = combine.map_or(String::new(), |r| format!(" {r:?}"));
    combine + &dispatch.map_or(String::new(), |r| format!(" {r:?}"))
}

/// Device memory for what the ranks give and get.
struct Tensors {
    x: Buffer,
    scales: Buffer,
    experts: Buffer,
    weights: Buffer,
    rows: Buffer,
    biases: [Buffer; 2],
    out: Buffer,
    out_weights: Buffer,
}

impl Tensors {
    fn new(group: &Group, rank: usize, case: &Case) -> Outcome<Self> {
        let context = &group.ranks[rank].context;
        let (m, shape) = (case.max_tokens, case.dispatch_shape());
        let bytes = |count: usize, each: usize| Buffer::new(context, count * each);
        Ok(Self {
            x: bytes(m, case.row_bytes)?,
            scales: bytes(m, case.scale_packs * 4)?,
            experts: bytes(m * case.topk, 8)?,
            weights: bytes(m * case.topk, 4)?,
            rows: bytes(shape.row_capacity, case.hidden * 2)?,
            biases: [bytes(m, case.hidden * 2)?, bytes(m, case.hidden * 2)?],
            out: bytes(m, case.hidden * 2)?,
            out_weights: bytes(m * case.topk, 4)?,
        })
    }
}

/// Ranks with plans and memory for rounds of one case. Two sets of tensors, so that calls can follow each other without a wait.
struct Bench {
    case: Case,
    group: Group,
    dispatch: Vec<DispatchPlan>,
    combine: Vec<CombinePlan>,
    tensors: [Vec<Tensors>; 2],
}

/// One dispatch and combine: what goes in, and what must come out.
struct Round {
    inputs: Vec<Input>,
    received: Vec<Received>,
    /// What each rank's experts make of their rows.
    rows: Vec<Vec<u16>>,
    biases: Vec<Vec<Vec<u16>>>,
}

impl Round {
    /// What a seed gives.
    fn drawn(case: &Case, seed: u64) -> Self {
        Self::new(case, (0..case.ranks).map(|r| Input::new(case, r, seed)).collect(), seed)
    }

    /// The same without anything for a combine.
    fn of_dispatch(case: &Case, seed: u64) -> Self {
        let inputs: Vec<_> = (0..case.ranks).map(|r| Input::new(case, r, seed)).collect();
        let received = oracle::dispatch(case, &inputs);
        Self { inputs, received, rows: vec![vec![]; case.ranks], biases: vec![vec![]; case.ranks] }
    }

    fn new(case: &Case, inputs: Vec<Input>, seed: u64) -> Self {
        let received = oracle::dispatch(case, &inputs);
        let row_count = |r: &Received| match case.placement {
            Placement::Plain => r.tokens.len(),
            Placement::Expanded => r.rows.len(),
        };
        let values = |what: u64, rank: usize, rows: usize| {
            Random::new(&[seed, what, rank as u64]).bf16(rows * case.hidden, case.wild)
        };
        let rows = received.iter().enumerate().map(|(r, all)| values(7, r, row_count(all))).collect();
        let biases = (0..case.ranks)
            .map(|r| (0..case.biases).map(|b| values(8 + b as u64, r, inputs[r].tokens)).collect())
            .collect();
        Self { inputs, received, rows, biases }
    }
}

impl Bench {
    fn new(machine: &Machine, case: &Case) -> Outcome<Self> {
        let config = HeapConfig {
            dispatch: vec![case.dispatch_shape()],
            combine: vec![case.combine_shape()],
            output_slots: OUTPUT_SLOTS,
            handle_slots: HANDLE_SLOTS,
            receive_sets: case.sets,
            combine_inputs: case.combine_inputs(),
            packets: case.packets,
        };
        let (combine, dispatch) = (case.choices(), case.dispatch_roles);
        let group = Group::new(machine, &config, case.blocks, combine, dispatch, case.alter)?;
        for rank in &group.ranks {
            // Kernels that nobody else has: loading one later may have to wait for a kernel that waits for the loading rank.
            if case.alter.is_some() {
                rank.engine.prewarm_for(&config)?;
            } else if case.for_sizes {
                rank.engine.prewarm(&rank.engine.programs_for_sizes(&config)?)?;
            }
        }
        let (dispatch, combine) = (case.dispatch_shape(), case.combine_shape());
        let plan = |r: &machine::Rank| {
            let pull = case.pulled > 0;
            Ok((r.engine.plan_dispatch(&dispatch)?, r.engine.plan_combine(&combine, &dispatch, pull)?))
        };
        let plans: Outcome<Vec<_>> = group.ranks.iter().map(plan).collect();
        let (dispatch, combine) = plans?.into_iter().unzip();
        let tensors = |_| (0..case.ranks).map(|r| Tensors::new(&group, r, case)).collect::<Outcome<Vec<_>>>();
        let tensors = [tensors(0)?, tensors(1)?];
        Ok(Self { case: case.clone(), group, dispatch, combine, tensors })
    }

    fn layout(&self) -> &HeapLayout {
        &self.group.layout
    }

    fn upload(&self, set: usize, round: &Round) -> Outcome {
        let (case, tensors) = (&self.case, &self.tensors[set]);
        parallel::each(tensors.len(), |r| {
            let (t, input) = (&tensors[r], &round.inputs[r]);
            t.x.write(&input.x)?;
            t.scales.write(&input.scale_bytes(case))?;
            t.experts.write(&input.expert_bytes(case.index))?;
            t.weights.write(&input::bytes_of(&input.weights, f32::to_le_bytes))?;
            t.rows.write(input::as_bytes(&round.rows[r]))?;
            for (buffer, values) in t.biases.iter().zip(&round.biases[r]) {
                buffer.write(input::as_bytes(values))?;
            }
            t.out.fill(0, input.tokens * case.hidden * 2, POISON)?;
            t.out_weights.fill(0, input.tokens * case.topk * 4, POISON)
        })
    }

    /// Nothing of an earlier round is left in the slots and the receive area.
    fn poison(&self) -> Outcome {
        let l = self.layout();
        for rank in &self.group.ranks {
            rank.heap.fill(l.handles.offset, l.bytes - l.handles.offset, POISON)?;
        }
        Ok(())
    }

    fn launch_dispatch(&self, r: usize, set: usize, output: usize, handle: usize, cached: bool) -> Outcome {
        let (case, t, rank) = (&self.case, &self.tensors[set][r], &self.group.ranks[r]);
        let (row, pack) =
            if case.scales_by_column { (1, case.tokens[r] as i64) } else { (case.scale_packs as i64, 1) };
        let call = DispatchLaunch {
            x: t.x.address(),
            scales: if case.scale_packs > 0 { t.scales.address() } else { 0 },
            scale_row_stride: row,
            scale_pack_stride: pack,
            topk_idx: if cached { 0 } else { t.experts.address() },
            weights: if case.weights { t.weights.address() } else { 0 },
            tokens: case.tokens[r],
            output_slot: output,
            handle_slot: handle,
            zero_padding: case.zero_padding,
            digest: 77 + u32::from(cached),
            ..DispatchLaunch::default()
        };
        let _bound = rank.context.bind()?;
        // SAFETY: the plan is this engine's, whose context is current; the tensors have the case's sizes and outlive the round, which waits; slots exist; the stream
        // is the rank's own.
        unsafe { rank.engine.dispatch(&self.dispatch[r], &call, rank.stream) }?;
        Ok(())
    }

    /// Puts rows that are pulled where peers read them, in stream order: what comes before the combine, as experts' work does. Until then the poison is there.
    fn give_rows(&self, r: usize, set: usize) -> Outcome {
        let (to, bytes) = self.rows(r, set);
        let from = self.tensors[set][r].rows.address();
        if to == from || bytes == 0 {
            return Ok(());
        }
        let rank = &self.group.ranks[r];
        let bound = rank.context.bind()?;
        // SAFETY: both ranges have these bytes and outlive the round, which waits; the stream is the rank's own.
        unsafe { rank.context.device().cuda().driver().cuMemcpyDtoDAsync(to, from, bytes, rank.stream) }?;
        drop(bound);
        Ok(())
    }

    /// Where the experts' rows of a set lie, and their bytes.
    fn rows(&self, r: usize, set: usize) -> (u64, usize) {
        let address = match self.case.pulled {
            0 => self.tensors[set][r].rows.address(),
            _ => self.group.ranks[r].heap.address() + self.layout().inputs.at(set) as u64,
        };
        (address, self.case.dispatch_shape().row_capacity * self.case.hidden * 2)
    }

    fn launch_combine(&self, r: usize, set: usize, output: usize, handle: usize) -> Outcome {
        let (case, t, rank) = (&self.case, &self.tensors[set][r], &self.group.ranks[r]);
        let slot = rank.heap.address() + self.layout().outputs.at(output) as u64;
        let o = self.dispatch[r].output();
        // Weights go back as dispatch delivered them.
        let weights = match case.placement {
            Placement::Plain => o.lane_weight,
            Placement::Expanded => o.row_weight,
        };
        let back = case.weights_go_back();
        let bias = |b: usize| if case.biases > b { t.biases[b].address() } else { 0 };
        let unit = |address: u64| Readable::unit(address - rank.heap.address()).unwrap_or_default();
        let readable = || Readable { x: unit(self.rows(r, set).0), weights: unit(slot + weights as u64) };
        let pull = (case.pulled > 0).then(readable);
        let call = CombineLaunch {
            x: self.rows(r, set).0,
            pull,
            weights: if back { slot + weights as u64 } else { 0 },
            biases: [bias(0), bias(1)],
            out: t.out.address(),
            out_weights: if back { t.out_weights.address() } else { 0 },
            tokens: case.tokens[r],
            handle_slot: handle,
            digest: 55,
        };
        let _bound = rank.context.bind()?;
        // SAFETY: as above; the handle slot was filled by the dispatch before it on the same stream.
        unsafe { rank.engine.combine(&self.combine[r], &call, rank.stream) }?;
        Ok(())
    }

    fn check_dispatch(
        &self,
        round: &Round,
        inputs: &[Input],
        output: usize,
        handle: usize,
        cached: bool,
    ) -> Outcome {
        let (case, layout) = (&self.case, &self.group.layout);
        let heaps: Vec<_> = self.group.ranks.iter().map(|rank| &rank.heap).collect();
        let shapes: Vec<_> = self.dispatch.iter().map(DispatchPlan::shape).collect();
        parallel::each(case.ranks, |r| {
            let slots = Slots::of(heaps[r], layout, shapes[r], output, handle)?;
            check::dispatched(case, r, &slots, &round.received, inputs, cached).map_err(|e| {
                format!("{} dispatch, rank {r}: {e}", if cached { "cached" } else { "fresh" }).into()
            })
        })
    }

    fn check_combine(&self, set: usize, round: &Round) -> Outcome {
        let (case, tensors) = (&self.case, &self.tensors[set]);
        let back = case.weights_go_back();
        parallel::each(case.ranks, |r| {
            let t = &tensors[r];
            let got = t.out.read(0, case.tokens[r] * case.hidden * 2)?;
            let weights = t.out_weights.read(0, case.tokens[r] * case.topk * 4)?;
            let want =
                oracle::combine(case, &round.received, &round.inputs[r], r, &round.rows, &round.biases[r]);
            check::combined(case, &got, &want, back.then_some(&weights[..]), &round.inputs[r])
                .map_err(|e| format!("combine, rank {r}: {e}").into())
        })
    }

    /// Enqueues one operation on every rank; `careful` waits for it.
    fn each(&self, careful: bool, operation: impl Fn(usize) -> Outcome) -> Outcome {
        (0..self.case.ranks).try_for_each(operation)?;
        if careful { self.group.wait() } else { Ok(()) }
    }

    /// Fresh dispatch, combine, cached dispatch with other rows, fresh dispatch with other routes, combine; then checks all of it.
    fn round(&self, seed: u64, careful: bool) -> Outcome {
        let case = &self.case;
        let first = Round::drawn(case, seed);
        let second = Round::drawn(case, seed ^ 0xdead);
        self.poison()?;
        self.upload(0, &first)?;
        self.upload(1, &second)?;
        // The cached call sends the second set's rows along the first set's routes.
        let refreshed: Vec<Input> =
            first.inputs.iter().enumerate().map(|(r, i)| i.refreshed(case, r, seed ^ 0xdead)).collect();
        self.each(careful, |r| self.launch_dispatch(r, 0, 0, 0, false))?;
        if careful {
            self.check_dispatch(&first, &first.inputs, 0, 0, false)?;
        }
        // Once a rank's combine has ended, its rows may be overwritten.
        let combine = |r, set, output, handle| {
            self.give_rows(r, set)?;
            self.launch_combine(r, set, output, handle)?;
            let (address, bytes) = self.rows(r, set);
            self.group.ranks[r].overwrite(address, bytes)
        };
        self.each(careful, |r| combine(r, 0, 0, 0))?;
        self.each(careful, |r| self.launch_dispatch(r, 1, 1, 0, true))?;
        self.each(careful, |r| self.launch_dispatch(r, 1, 2, 1, false))?;
        self.each(careful, |r| combine(r, 1, 2, 1))?;
        self.group.wait()?;
        self.check_dispatch(&first, &first.inputs, 0, 0, false)?;
        self.check_combine(0, &first)?;
        self.check_dispatch(&first, &refreshed, 1, 0, true)?;
        self.check_dispatch(&second, &second.inputs, 2, 1, false)?;
        self.check_combine(1, &second)
    }
}

#[test]
fn every_case_matches_the_oracle() {
    let Some(machine) = machine() else { return };
    let mut failures = 0;
    for ranks in numbers("DEEPEP_TEST_RANKS", &[1, 2, 3, 4, 8]) {
        let mut all = Vec::new();
        for (roles, dispatch_roles) in all_roles() {
            let tag = tag_of(roles, dispatch_roles);
            let cases = cases::all(ranks).into_iter();
            all.extend(cases.map(|(name, case)| (name + &tag, Case { roles, dispatch_roles, ..case })));
        }
        let chosen = std::env::var("DEEPEP_TEST_CASES").unwrap_or_default();
        all.retain(|(name, _)| chosen.split(';').any(|part| name.contains(part)));
        let (count, start) = (all.len(), Instant::now());
        assert!(count > 0, "no case of {ranks} ranks is named {chosen:?}");
        let mut bad = 0;
        for (name, case) in all {
            let outcome =
                Bench::new(&machine, &case).and_then(|b| b.round(1, true).and_then(|()| b.round(2, false)));
            if let Err(e) = outcome {
                eprintln!("FAILED {ranks} ranks, {name}: {e}\n  {case:?}");
                bad += 1;
            }
            if bad > 5 {
                break;
            }
        }
        eprintln!(
            "{ranks} ranks on {} GPUs: {count} cases, {bad} failed, {:.1?}",
            machine.devices(),
            start.elapsed()
        );
        failures += bad;
    }
    assert_eq!(failures, 0);
}

#[test]
fn a_planted_error_is_found() {
    let Some(machine) = machine() else { return };
    let case = Case::new(2, 33, Placement::Expanded);
    let bench = Bench::new(&machine, &case).unwrap();
    bench.round(5, true).unwrap();
    let round = Round::drawn(&case, 5);
    let mut slots = Slots::read(&bench.group, 1, bench.dispatch[1].shape(), 0, 0).unwrap();
    check::dispatched(&case, 1, &slots, &round.received, &round.inputs, false).unwrap();
    slots.output[case.row_bytes + 5] ^= 1;
    let error = check::dispatched(&case, 1, &slots, &round.received, &round.inputs, false).unwrap_err();
    assert!(error.to_string().contains("row[1]: byte 5"), "{error}");
}

#[test]
fn rounds_without_waits_in_between() {
    let Some(machine) = machine() else { return };
    let rounds = numbers("DEEPEP_TEST_ROUNDS", &[200])[0] as u64;
    for ranks in numbers("DEEPEP_TEST_RANKS", &[1, 2, 3, 4, 8]) {
        for (name, case) in cases::stress(ranks) {
            let bench = Bench::new(&machine, &case).unwrap_or_else(|e| panic!("{name}: {e}"));
            let start = Instant::now();
            for seed in 0..rounds {
                bench
                    .round(1000 + seed, false)
                    .unwrap_or_else(|e| panic!("{ranks} ranks, {name}, round {seed}: {e}"));
            }
            eprintln!("{ranks} ranks, {name}: {rounds} rounds, {:.1?}", start.elapsed());
        }
    }
}

/// The engine of a rank, for tests that need no slots.
fn engine(bench: &Bench, rank: usize) -> &Engine {
    &bench.group.ranks[rank].engine
}
