//! Bad ids, too little capacity, ranks that don't come: reported, and nothing overrun.

use std::time::{Duration, Instant};

use super::check::{POISON, Slots, i32_at};
use super::input::Case;
use super::machine::Machine;
use super::{Bench, DispatchLaunch, Round, check, engine, machine};
use crate::layout::{DispatchShape, HandleLayout, OutputLayout, Phase, Placement, RecordKind};

#[test]
fn bad_ids_are_reported_and_count_as_none() {
    let Some(machine) = machine() else { return };
    let cases = [Placement::Plain, Placement::Expanded].map(|p| Case::new(2, 100, p).both_ways());
    for case in cases.into_iter().flatten() {
        let bench = Bench::new(&machine, &case).unwrap();
        let mut round = Round::drawn(&case, 3);
        let given: Vec<Vec<i64>> = round.inputs.iter().map(|i| i.experts.clone()).collect();
        let mut bad = given.clone();
        let e = case.experts as i64;
        for (i, id) in [(4, e), (9, -2), (22, i64::MAX), (31, i64::MIN), (50, e + 1000), (77, 1 << 32)] {
            bad[0][i] = id;
        }
        bad[1][4 * 10 + 3] = bad[1][4 * 10 + 1]; // token 10 names an expert twice
        bench.poison().unwrap();
        for (input, bad) in round.inputs.iter_mut().zip(&bad) {
            input.experts.clone_from(bad);
        }
        bench.upload(0, &round).unwrap();
        bench.each(true, |r| bench.launch_dispatch(r, 0, 0, 0, false)).unwrap();
        // What the oracle is told.
        for i in [4, 9, 22, 31, 50, 77] {
            round.inputs[0].experts[i] = -1;
        }
        round.inputs[1].experts[4 * 10 + 3] = -1;
        let cleaned = Round::new(&case, round.inputs, 3);
        bench.check_dispatch(&cleaned, &cleaned.inputs, 0, 0, false).unwrap();
        let report = bench.group.ranks[0].status.report(RecordKind::BadExpert).unwrap();
        let (token, lane) = (report.index as usize, report.lane as usize);
        assert_eq!((report.rank, report.expected, report.sequence), (0, case.experts as u64, 1));
        assert_eq!(report.seen as i64, bad[0][token * case.topk + lane], "{report:?}");
        assert!(report.seen as i64 != given[0][token * case.topk + lane]);
        let report = bench.group.ranks[1].status.report(RecordKind::DuplicateExpert).unwrap();
        assert_eq!((report.rank, report.index, report.lane), (1, 10, 3), "{report:?}");
        assert_eq!(bench.group.ranks[1].status.report(RecordKind::BadExpert), None);
    }
}

fn replan(bench: &mut Bench, shape: &DispatchShape) {
    let combine = bench.case.combine_shape();
    let (ranks, pull) = (0..bench.case.ranks, bench.case.pulled > 0);
    bench.dispatch = ranks.clone().map(|r| engine(bench, r).plan_dispatch(shape).unwrap()).collect();
    bench.combine = ranks.map(|r| engine(bench, r).plan_combine(&combine, shape, pull).unwrap()).collect();
}

#[test]
fn too_little_capacity_moves_nothing_and_says_how_much_is_needed() {
    let Some(machine) = machine() else { return };
    let cases = [Placement::Plain, Placement::Expanded].map(|p| Case::new(2, 100, p).both_ways());
    for case in cases.into_iter().flatten() {
        let placement = case.placement;
        let mut bench = Bench::new(&machine, &case).unwrap();
        let round = Round::drawn(&case, 4);
        let needed = match placement {
            Placement::Plain => round.received[0].tokens.len(),
            Placement::Expanded => round.received[0].rows.len(),
        };
        let mut shape = case.dispatch_shape();
        shape.row_capacity = needed - 1;
        if placement == Placement::Plain {
            shape.token_capacity = needed - 1;
        }
        replan(&mut bench, &shape);
        bench.poison().unwrap();
        bench.upload(0, &round).unwrap();
        bench.each(true, |r| bench.launch_dispatch(r, 0, 0, 0, false)).unwrap();
        bench.each(true, |r| bench.launch_combine(r, 0, 0, 0)).unwrap();
        let h = HandleLayout::new(&shape, case.in_packets());
        for (r, rank) in bench.group.ranks.iter().enumerate() {
            let report = rank.status.report(RecordKind::Capacity).unwrap();
            assert_eq!(
                (report.peer, report.seen as usize, report.expected as usize),
                (0, needed, needed - 1)
            );
            let slots = Slots::read(&bench.group, r, &shape, 0, 0).unwrap();
            let counts: Vec<i32> = (0..4).map(|i| i32_at(&slots.handle, h.counts, i)).collect();
            assert_eq!((counts[0], counts[1], counts[3]), (0, 0, needed as i32));
            let rows = &slots.output[..OutputLayout::new(&shape).scales];
            assert!(rows.iter().all(|&b| b == POISON), "rows were written");
            // Nothing came, so nothing is summed.
            let out = bench.tensors[0][r].out.read(0, case.tokens[r] * case.hidden * 2).unwrap();
            assert!(out.iter().all(|&b| b == 0));
        }
        // Ranks are still in step.
        replan(&mut bench, &case.dispatch_shape());
        bench.round(6, true).unwrap();
    }
}

#[test]
fn exact_counts_reach_the_host() {
    let Some(machine) = machine() else { return };
    for case in Case::new(2, 64, Placement::Expanded).both_ways() {
        exact_counts(&machine, &case);
    }
}

fn exact_counts(machine: &Machine, case: &Case) {
    use crate::layout::CountsLayout as C;
    let bench = Bench::new(machine, case).unwrap();
    let round = Round::drawn(case, 8);
    bench.upload(0, &round).unwrap();
    for (r, rank) in bench.group.ranks.iter().enumerate() {
        let t = &bench.tensors[0][r];
        let call = DispatchLaunch {
            x: t.x.address(),
            topk_idx: t.experts.address(),
            tokens: case.tokens[r],
            count_tag: 41,
            ..DispatchLaunch::default()
        };
        assert_eq!(rank.status.count(C::TOKENS, 41), None);
        let _bound = rank.context.bind().unwrap();
        // SAFETY: the plan is this engine's, whose context is current; the tensors have the case's sizes and outlive the wait below.
        unsafe { rank.engine.dispatch(&bench.dispatch[r], &call, rank.stream) }.unwrap();
    }
    bench.group.wait().unwrap();
    for (r, rank) in bench.group.ranks.iter().enumerate() {
        let want = &round.received[r];
        let count = |cell: usize| rank.status.count(cell, 41).unwrap() as usize;
        assert_eq!((count(C::TOKENS), count(C::ROWS)), (want.tokens.len(), want.rows.len()));
        assert_eq!(rank.status.count(C::TOKENS, 40), None);
        assert_eq!(count(C::RANK_PSUM + 1), want.rank_psum[1] as usize);
        for (j, &n) in want.expert_count.iter().enumerate() {
            assert_eq!(count(C::EXPERT_COUNT + j), n as usize);
        }
    }
}

/// A rank that does not come, in each operation: the others give up in time, name it, and the device goes on.
#[test]
fn a_missing_rank_is_named() {
    let Some(machine) = machine() else { return };
    // A combine waits for a peer's start and for its rows at the same time.
    let operations = [
        ("dispatch", &[Phase::Totals][..]),
        ("combine", &[Phase::Started, Phase::Arrival]),
        ("barrier", &[Phase::Barrier]),
    ];
    let cases = Case::new(3, 64, Placement::Plain).both_ways();
    for (case, (operation, phases)) in cases.iter().flat_map(|case| operations.map(|o| (case.clone(), o))) {
        let bench = Bench::new(&machine, &case).unwrap();
        let round = Round::drawn(&case, 9);
        bench.upload(0, &round).unwrap();
        bench.each(true, |r| bench.launch_dispatch(r, 0, 0, 0, false)).unwrap();
        let start = Instant::now();
        for r in [0, 2] {
            match operation {
                "dispatch" => bench.launch_dispatch(r, 0, 1, 1, false).unwrap(),
                "combine" => bench.launch_combine(r, 0, 0, 0).unwrap(),
                _ => {
                    let rank = &bench.group.ranks[r];
                    let _bound = rank.context.bind().unwrap();
                    // SAFETY: the stream is the rank's own, and its context current.
                    unsafe { rank.engine.barrier(rank.stream) }.unwrap();
                }
            }
        }
        let error = bench.group.wait().unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(8), "{error}");
        for r in [0, 2] {
            let report = bench.group.ranks[r].status.report(RecordKind::Abort).unwrap();
            assert!(
                report.peer == 1 && phases.iter().any(|&p| p as u32 == report.phase),
                "{operation}: {report:?}"
            );
        }
        // The contexts have survived.
        let other = Bench::new(&machine, &case).unwrap();
        other.round(10, true).unwrap();
        // A late rank of the broken group learns of it and leaves.
        bench.launch_dispatch(1, 0, 1, 1, false).unwrap();
        let error = bench.group.wait().unwrap_err().to_string();
        assert!(!error.contains("still run"), "{error}");
        let report = bench.group.ranks[1].status.report(RecordKind::Abort).unwrap();
        assert!(
            report.peer == 1 && phases.iter().any(|&p| p as u32 == report.phase),
            "{operation}: {report:?}"
        );
    }
}

/// Ranks that call with different parameters find out before a row moves.
#[test]
fn different_calls_are_found() {
    let Some(machine) = machine() else { return };
    for case in Case::new(2, 32, Placement::Plain).both_ways() {
        different_calls(&machine, &case);
    }
}

fn different_calls(machine: &Machine, case: &Case) {
    let bench = Bench::new(machine, case).unwrap();
    let round = Round::drawn(case, 9);
    bench.upload(0, &round).unwrap();
    bench.poison().unwrap();
    for (r, rank) in bench.group.ranks.iter().enumerate() {
        let t = &bench.tensors[0][r];
        let call = DispatchLaunch {
            x: t.x.address(),
            topk_idx: t.experts.address(),
            tokens: case.tokens[r],
            digest: 5 + r as u32,
            ..DispatchLaunch::default()
        };
        let _bound = rank.context.bind().unwrap();
        // SAFETY: the plan is this engine's, whose context is current; the tensors have the case's sizes and outlive the wait below.
        unsafe { rank.engine.dispatch(&bench.dispatch[r], &call, rank.stream) }.unwrap();
    }
    bench.group.wait().unwrap_err();
    let phases: Vec<u32> =
        bench.group.ranks.iter().map(|rank| rank.status.report(RecordKind::Abort).unwrap().phase).collect();
    assert_eq!(phases, vec![Phase::Parameters as u32; 2]);
    let slots = Slots::read(&bench.group, 0, bench.dispatch[0].shape(), 0, 0).unwrap();
    assert!(slots.output.iter().all(|&b| b == check::POISON));
}
