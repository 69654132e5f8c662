//! Dispatches right behind each other on CPUs, with nothing between that keeps the ranks together: what protects the memory that they share is the protocol alone,
//! the parities of landing slots above all.

use super::super::super::grid::Limits;
use super::super::Round;
use super::super::check::{self, POISON};
use super::super::input::{Case, Routing};
use super::super::machine::Outcome;
use super::kernels::{Kernels, compiler, replaced};
use super::ranks::{Call, Ranks, Tensors};
use crate::jit::Program;
use crate::layout::{DispatchShape, IndexWidth, OutputLayout, Placement, RecordKind};

const LIMITS: Limits = Limits { blocks: 4, shared_bytes: 232_448, link: 48 };
/// A row capacity that each rank's rows exceed.
const FEW_ROWS: usize = 3;
/// Most steps.
const SLOTS: [usize; 2] = [5; 2];

/// A fresh dispatch of all ranks.
struct Step<'a> {
    cases: Vec<&'a Case>,
    /// Over capacity: no rank is given any row.
    over: bool,
    round: Round,
}

impl<'a> Step<'a> {
    /// Of ranks that need not be given their tensors alike.
    fn new(cases: &[&'a Case], seed: u64) -> Self {
        Self { cases: cases.to_vec(), over: false, round: Round::of_dispatch(cases[0], seed) }
    }

    fn of(case: &'a Case, seed: u64) -> Self {
        Self::new(&vec![case; case.ranks], seed)
    }

    fn over(case: &'a Case, seed: u64) -> Self {
        Self { over: true, ..Self::of(case, seed) }
    }

    fn shape(&self, case: &Case) -> DispatchShape {
        let shape = case.dispatch_shape();
        DispatchShape { row_capacity: if self.over { FEW_ROWS } else { shape.row_capacity }, ..shape }
    }

    fn plan(&self, ranks: &mut Ranks<'a>) -> Outcome {
        let shapes: Vec<_> = self.cases.iter().map(|case| self.shape(case)).collect();
        ranks.cases.clone_from(&self.cases);
        ranks.plan(&shapes)
    }
}

fn kernels(
    ranks: usize,
    placements: &[Placement],
    change: &(dyn Fn(&str, String) -> String + Sync),
) -> Kernels {
    let index = IndexWidth::Bits64;
    let program = |&placement: &Placement| Program::Dispatch { ranks, placement, index };
    let programs: Vec<Program> = placements.iter().map(program).collect();
    Kernels::build(&programs, change).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs the steps without a wait, each with slots of its own, and compares what is in these with the oracle.
fn follow<'a>(ranks: &mut Ranks<'a>, kernels: &Kernels, steps: &[Step<'a>], seed: u64) -> Outcome {
    let tensors = |step: &Step<'_>| -> Vec<Tensors> {
        step.cases.iter().enumerate().map(|(r, case)| Tensors::new(case, &step.round, r)).collect()
    };
    let tensors: Vec<_> = steps.iter().map(tensors).collect();
    let mut calls: Vec<Vec<Call>> = ranks.cases.iter().map(|_| Vec::new()).collect();
    for (n, (step, tensors)) in steps.iter().zip(&tensors).enumerate() {
        step.plan(ranks)?;
        for (r, (all, t)) in calls.iter_mut().zip(tensors).enumerate() {
            all.push(ranks.dispatch(r, t, n, n, false));
        }
    }
    ranks.poison();
    ranks.run(kernels, seed, &calls)?;
    for (n, step) in steps.iter().enumerate() {
        step.plan(ranks)?;
        for (r, case) in step.cases.iter().enumerate() {
            let slots = ranks.slots(r, n, n);
            if step.over {
                let rows = &slots.output[..OutputLayout::new(&step.shape(case)).scales];
                if rows.iter().any(|&byte| byte != POISON) {
                    return Err(format!("dispatch {n}, rank {r}: there are rows").into());
                }
                continue;
            }
            check::dispatched(case, r, &slots, &step.round.received, &step.round.inputs, false)
                .map_err(|e| format!("dispatch {n}, rank {r}: {e}"))?;
        }
    }
    Ok(())
}

/// Ranks of which the first gets everything: the others, who wait for nothing but its beginning, run ahead of it.
fn uneven(ranks: usize) -> Case {
    let mut case = Case::new(ranks, 24, Placement::Expanded);
    (case.tokens[0], case.routing) = (2, Routing::OneRank(0));
    case
}

#[test]
fn dispatches_that_follow_each_other_on_cpus() {
    if !compiler("dispatches_that_follow_each_other_on_cpus") {
        return;
    }
    let kernels = kernels(3, &[Placement::Plain, Placement::Expanded], &|_, text| text);
    let bf16 = uneven(3);
    let fp8 = Case { row_bytes: 256, scale_packs: 4, routing: Routing::Holes, ..uneven(3) };
    // Its scales go pack by pack, those of the other ranks with the row.
    let by_column = Case { scales_by_column: true, ..fp8.clone() };
    let plain = Case { placement: Placement::Plain, ..uneven(3) };
    // More than a landing slot holds.
    let wide = Case { row_bytes: 4096, topk: 2, row_capacity: Some(20), tokens: vec![3, 0, 2], ..uneven(3) };
    let (one, mixed) = ([&bf16; 3], [&fp8, &by_column, &fp8]);
    for seed in 0..2 {
        let s = |n: u64| 10 * seed + n;
        // Heaps that are made for all shapes but the wide one.
        let made_for = if seed % 2 == 0 { [&bf16, &fp8, &plain] } else { [&plain, &bf16, &fp8] };
        let run = |what: &str, steps: &[Step<'_>]| {
            let mut ranks = Ranks::with_slots(&made_for, LIMITS, seed as u32, SLOTS).unwrap();
            follow(&mut ranks, &kernels, steps, seed).unwrap_or_else(|e| panic!("{what}, seed {seed}: {e}"));
            let over = steps.iter().any(|step| step.over);
            for r in 0..3 {
                let record = ranks.record(r, RecordKind::Capacity).sequence;
                assert_eq!(record != 0, over, "{what}, rank {r}");
            }
        };
        run("rows that land", &(0..5).map(|n| Step::new(&one, s(n))).collect::<Vec<_>>());
        run(
            "over capacity",
            &[Step::of(&bf16, s(0)), Step::over(&bf16, s(1)), Step::of(&bf16, s(2)), Step::of(&bf16, s(3))],
        );
        run("over capacity first", &[Step::over(&bf16, s(0)), Step::of(&bf16, s(1))]);
        run(
            "other rows and layouts",
            &[Step::of(&bf16, s(0)), Step::of(&fp8, s(1)), Step::of(&plain, s(2)), Step::new(&mixed, s(3))],
        );
        run("wide rows", &[Step::of(&bf16, s(0)), Step::of(&wide, s(1)), Step::new(&mixed, s(2))]);
    }
}

/// The negative control: with one set of landing slots instead of two, rows of a call are overwritten by those of the next.
#[test]
fn landing_slots_without_parities_are_noticed_on_cpus() {
    if !compiler("landing_slots_without_parities_are_noticed_on_cpus") {
        return;
    }
    let (file, from) = ("ops/dispatch/block.cuh", "parity() * (RANKS - 1) + rank_slot(s, r)");
    let change = replaced(file, from, "rank_slot(s, r)");
    let kernels = kernels(2, &[Placement::Expanded], &change);
    let case = uneven(2);
    let failed = (0..6).any(|seed| {
        let steps: Vec<_> = (0..4).map(|n| Step::of(&case, 10 * seed + n)).collect();
        let mut ranks = Ranks::with_slots(&[&case; 2], LIMITS, 0, SLOTS).unwrap();
        follow(&mut ranks, &kernels, &steps, seed).is_err()
    });
    assert!(failed, "{file} without parities went unnoticed");
}
