//! Dispatch in rows on CPUs: other roles of blocks and warps, ranks with different numbers of sending blocks, capacities, bad ids, ranks that don't come.

use super::super::super::DispatchRoles;
use super::super::super::grid::Limits;
use super::super::Round;
use super::super::check::{self, POISON, i32_at};
use super::super::input::{Case, Routing};
use super::super::machine::Outcome;
use super::kernels::{Kernels, compiler};
use super::programs;
use super::ranks::{Call, Ranks, Tensors};
use crate::jit::Program;
use crate::layout::{CountsLayout, HandleLayout, OutputLayout, Phase, Placement, RecordKind};

const LIMITS: Limits = Limits { blocks: 4, shared_bytes: 232_448, link: 48 };
const BOTH: [Placement; 2] = [Placement::Plain, Placement::Expanded];

fn kernels(ranks: usize, placement: Placement) -> Kernels {
    Kernels::build(&programs(ranks, placement), &|_, text| text).unwrap_or_else(|e| panic!("{e}"))
}

/// Few rows for many warps, many rows for few, everything drawn, nothing drawn; a share that takes more steps than are loaded ahead.
#[test]
fn other_roles_give_the_oracles_bits_on_cpus() {
    if !compiler("other_roles_give_the_oracles_bits_on_cpus") {
        return;
    }
    let roles = |blocks, senders, row_warps, stages, ahead, drawn| {
        let (own_in_order, evict_own) = (drawn == 7, drawn % 2 == 0);
        Some(DispatchRoles {
            blocks,
            senders,
            row_warps,
            stages,
            ahead,
            drawn: Some(drawn),
            own_in_order,
            evict_own,
            senders_count: stages == 3,
        })
    };
    for placement in BOTH {
        let kernels = kernels(2, placement);
        for (seed, (dispatch_roles, topk, tokens)) in [
            (roles(3, 2, 1, 1, 1, 8), 4, 14),
            (roles(4, 3, 12, 4, 4, 0), 4, 30),
            (roles(2, 2, 3, 2, 2, 7), 4, 20),
            (roles(3, 2, 12, 2, 1, 4), 32, 150),
            // Others count than send, where there are as many.
            (roles(4, 2, 3, 2, 1, 6), 4, 33),
            (roles(4, 2, 2, 3, 2, 6), 4, 33),
            // More than a worker keeps of its tokens: of blocks that send, and of those that only count.
            (roles(2, 1, 12, 2, 1, 6), 17, 150),
            (roles(4, 2, 3, 2, 1, 6), 32, 150),
            (roles(3, 1, 5, 4, 2, 6), 17, 41),
            // Some of the first rows land, the others wait for their places.
            (roles(3, 2, 12, 4, 2, 6), 3, 80),
            (roles(2, 2, 12, 4, 2, 6), 3, 80),
        ]
        .into_iter()
        .enumerate()
        {
            let mut case = Case::new(2, tokens, placement);
            (case.dispatch_roles, case.topk, case.experts) = (dispatch_roles, topk, 34);
            (case.row_bytes, case.hidden, case.scale_packs) = (64, 8, 4 + seed % 2);
            (case.alignment, case.zero_padding) = (3, placement == Placement::Expanded);
            (case.routing, case.tokens[1]) = (Routing::Holes, tokens - 5);
            let mut ranks = Ranks::new(&case, LIMITS, 0).unwrap();
            for round in 0..2 {
                let seed = 10 * seed as u64 + round;
                ranks
                    .round(&kernels, seed)
                    .unwrap_or_else(|e| panic!("{placement:?}, {dispatch_roles:?}, seed {seed}: {e}"));
            }
        }
    }
}

/// Ranks may have different numbers of sending blocks.
#[test]
fn ranks_with_other_grids_agree_on_cpus() {
    if !compiler("ranks_with_other_grids_agree_on_cpus") {
        return;
    }
    for placement in BOTH {
        let kernels = kernels(3, placement);
        let of = |blocks, senders| {
            let mut case = Case::new(3, 13, placement);
            case.dispatch_roles = Some(DispatchRoles { blocks, senders, ..DispatchRoles::default() });
            (case.row_bytes, case.hidden, case.routing) = (48, 8, Routing::Holes);
            // Pairs of experts that two ranks share.
            case.experts = 9;
            case
        };
        for (seed, grids) in [[(1, 1), (4, 4), (4, 2)], [(4, 3), (2, 1), (1, 1)], [(4, 2), (3, 1), (3, 2)]]
            .into_iter()
            .enumerate()
        {
            let cases = grids.map(|(blocks, senders)| of(blocks, senders));
            let mut ranks = Ranks::of(&cases.each_ref(), LIMITS, 0).unwrap();
            for round in 0..2 {
                let seed = 40 + 10 * seed as u64 + round;
                ranks
                    .round(&kernels, seed)
                    .unwrap_or_else(|e| panic!("{placement:?}, {grids:?}, seed {seed}: {e}"));
            }
        }
    }
}

/// A fresh dispatch and a cached one of each rank, against the oracle.
fn dispatch_twice(cases: &[&Case], placement: Placement, seed: u64) {
    let programs = programs(cases.len(), placement);
    let programs: Vec<_> = programs.into_iter().filter(|p| matches!(p, Program::Dispatch { .. })).collect();
    let kernels = Kernels::build(&programs, &|_, text| text).unwrap_or_else(|e| panic!("{e}"));
    let mut ranks = Ranks::of(cases, Limits { blocks: 64, ..LIMITS }, 0).unwrap();
    ranks.count_tag = 3;
    let round = Round::drawn(cases[0], seed);
    let tensors: Vec<Tensors> =
        cases.iter().enumerate().map(|(r, case)| Tensors::new(case, &round, r)).collect();
    let calls: Vec<Vec<Call>> = tensors
        .iter()
        .enumerate()
        .map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false), ranks.dispatch(r, t, 1, 0, true)])
        .collect();
    ranks.poison();
    ranks.run(&kernels, seed, &calls).unwrap_or_else(|e| panic!("{placement:?}: {e}"));
    for (r, case) in cases.iter().enumerate() {
        for (output, cached) in [(0, false), (1, true)] {
            check::dispatched(case, r, &ranks.slots(r, output, 0), &round.received, &round.inputs, cached)
                .unwrap_or_else(|e| panic!("{placement:?}, rank {r}, cached {cached}: {e}"));
        }
        for (j, &n) in round.received[r].expert_count.iter().enumerate() {
            let count = ranks.count(r, CountsLayout::EXPERT_COUNT + j, 3);
            assert_eq!(count, Some(n as u32), "{placement:?}, rank {r}, expert {j}");
        }
    }
}

/// Eight ranks of twelve sending blocks: 96 blocks' counts, which take two turns of the exchange, and more experts than its warps take at once.
#[test]
fn blocks_of_eight_ranks_exchange_counts_on_cpus() {
    if !compiler("blocks_of_eight_ranks_exchange_counts_on_cpus") {
        return;
    }
    for placement in BOTH {
        let mut case = Case::new(8, 20, placement);
        case.dispatch_roles =
            Some(DispatchRoles { blocks: 12, senders: 12, stages: 1, ..DispatchRoles::default() });
        (case.experts, case.row_bytes, case.hidden) = (8 * 33, 16, 8);
        // Some chunks are empty.
        (case.routing, case.tokens) = (Routing::Holes, vec![20, 3, 12, 0, 19, 20, 7, 13]);
        dispatch_twice(&[&case; 8], placement, 71);
    }
}

/// Forty sending blocks and ten: two turns, in which blocks are absent that each rank knows of by the other's place, and a run for blocks that only the
/// other rank has. More than 256 experts in a rank, of which one gets everything.
#[test]
fn many_blocks_and_few_exchange_counts_of_one_expert_on_cpus() {
    if !compiler("many_blocks_and_few_exchange_counts_of_one_expert_on_cpus") {
        return;
    }
    for placement in BOTH {
        let [many, few] = [40, 10].map(|senders| {
            let mut case = Case::new(2, 45, placement);
            case.dispatch_roles =
                Some(DispatchRoles { blocks: senders, senders, stages: 1, ..DispatchRoles::default() });
            (case.experts, case.row_bytes, case.hidden) = (600, 16, 8);
            (case.topk, case.routing, case.tokens[1]) = (1, Routing::Hot, 31);
            case
        });
        dispatch_twice(&[&many, &few], placement, 72);
    }
}

/// One dispatch of each rank that is in `who`.
fn dispatches(ranks: &mut Ranks<'_>, kernels: &Kernels, round: &Round, seed: u64, who: &[usize]) -> Outcome {
    let tensors: Vec<Tensors> =
        ranks.cases.iter().enumerate().map(|(r, case)| Tensors::new(case, round, r)).collect();
    let call = |r: usize| match who.contains(&r) {
        true => vec![ranks.dispatch(r, &tensors[r], 0, 0, false)],
        false => Vec::new(),
    };
    let calls: Vec<Vec<Call>> = (0..tensors.len()).map(call).collect();
    ranks.run(kernels, seed, &calls)
}

#[test]
fn too_little_capacity_moves_nothing_on_cpus() {
    if !compiler("too_little_capacity_moves_nothing_on_cpus") {
        return;
    }
    for placement in BOTH {
        let kernels = kernels(2, placement);
        let case = Case::new(2, 17, placement);
        let mut ranks = Ranks::new(&case, LIMITS, 0).unwrap();
        let round = Round::drawn(&case, 4);
        let mine = &round.received[1];
        let (tokens, rows) = (mine.tokens.len(), mine.rows.len().max(mine.tokens.len()));
        let needed = if placement == Placement::Plain { tokens } else { rows };
        let mut shape = case.dispatch_shape();
        shape.row_capacity = needed - 1;
        if placement == Placement::Plain {
            shape.token_capacity = needed - 1;
        }
        // Rank 0 gets less than rank 1, or is named itself.
        let first = &round.received[0];
        let over = match placement {
            Placement::Plain => first.tokens.len() >= needed,
            Placement::Expanded => first.rows.len() >= needed,
        };
        let (named, needed) = match (over, placement) {
            (false, _) => (1, needed),
            (true, Placement::Plain) => (0, first.tokens.len()),
            (true, Placement::Expanded) => (0, first.rows.len()),
        };
        ranks.plan(&[shape, shape]).unwrap();
        ranks.count_tag = 9;
        dispatches(&mut ranks, &kernels, &round, 5, &[0, 1]).unwrap();
        let h = HandleLayout::new(&shape, false);
        for r in 0..2 {
            let record = ranks.record(r, RecordKind::Capacity);
            assert_eq!((record.peer, record.seen as usize), (named, needed), "{placement:?}");
            let slots = ranks.slots(r, 0, 0);
            let counts: Vec<i32> = (0..4).map(|i| i32_at(&slots.handle, h.counts, i)).collect();
            assert_eq!((counts[0], counts[1], counts[3]), (0, 0, needed as i32));
            assert_eq!(ranks.count(r, CountsLayout::NEEDED_ROWS, 9), Some(needed as u32));
            let rows = &slots.output[..OutputLayout::new(&shape).scales];
            assert!(rows.iter().all(|&b| b == POISON), "rows were written");
        }
        // The ranks are still in step.
        ranks.plan(&[case.dispatch_shape(), case.dispatch_shape()]).unwrap();
        ranks.round(&kernels, 6).unwrap();
    }
}

#[test]
fn bad_ids_count_as_none_and_counts_are_exact_on_cpus() {
    if !compiler("bad_ids_count_as_none_and_counts_are_exact_on_cpus") {
        return;
    }
    for placement in BOTH {
        let kernels = kernels(2, placement);
        let case = Case::new(2, 15, placement);
        let mut ranks = Ranks::new(&case, LIMITS, 0).unwrap();
        let mut round = Round::drawn(&case, 3);
        round.inputs[0].experts[9] = case.experts as i64;
        round.inputs[0].experts[22] = i64::MIN;
        let twice = round.inputs[1].experts[4 * 6 + 1];
        round.inputs[1].experts[4 * 6 + 3] = twice;
        ranks.count_tag = 7;
        dispatches(&mut ranks, &kernels, &round, 8, &[0, 1]).unwrap();
        round.inputs[0].experts[9] = -1;
        round.inputs[0].experts[22] = -1;
        round.inputs[1].experts[4 * 6 + 3] = -1;
        let cleaned = Round::new(&case, round.inputs, 3);
        for r in 0..2 {
            let want = &cleaned.received[r];
            check::dispatched(&case, r, &ranks.slots(r, 0, 0), &cleaned.received, &cleaned.inputs, false)
                .unwrap_or_else(|e| panic!("{placement:?}, rank {r}: {e}"));
            let count = |cell| ranks.count(r, cell, 7).map(|n| n as usize);
            assert_eq!(count(CountsLayout::TOKENS), Some(want.tokens.len()));
            assert_eq!(count(CountsLayout::RANK_PSUM + 1), Some(want.rank_psum[1] as usize));
            for (j, &n) in want.expert_count.iter().enumerate() {
                assert_eq!(
                    count(CountsLayout::EXPERT_COUNT + j),
                    Some(n as usize),
                    "{placement:?}, expert {j}"
                );
            }
        }
        let bad = ranks.record(0, RecordKind::BadExpert);
        assert!([(2, 1), (5, 2)].contains(&(bad.index, bad.lane)), "{bad:?}");
        let twice = ranks.record(1, RecordKind::DuplicateExpert);
        assert_eq!((twice.rank, twice.index, twice.lane), (1, 6, 3), "{twice:?}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_on_cpus() {
    if !compiler("a_rank_that_does_not_come_is_named_on_cpus") {
        return;
    }
    for placement in BOTH {
        let kernels = kernels(3, placement);
        let case = Case::new(3, 9, placement);
        let mut ranks = Ranks::new(&case, Limits { blocks: 2, ..LIMITS }, 0).unwrap();
        let round = Round::drawn(&case, 3);
        let error = dispatches(&mut ranks, &kernels, &round, 8, &[0, 2]).unwrap_err().to_string();
        assert!(error.contains("gave up"), "{placement:?}: {error}");
        let gave_up = ranks.gave_up();
        for r in [0, 2] {
            assert_eq!(gave_up[r], (Phase::Totals as u32, 1), "{placement:?}, rank {r}");
        }
        // It learns of it when it comes, and starts nothing.
        dispatches(&mut ranks, &kernels, &round, 9, &[1]).unwrap_err();
        let slots = ranks.slots(1, 0, 0);
        assert!(slots.output.iter().all(|&b| b == POISON));
    }
}
