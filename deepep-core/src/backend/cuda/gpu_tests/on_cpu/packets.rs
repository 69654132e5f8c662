//! What only small batches have: kernels for fixed sizes, capacities that the ids of all ranks are compared with, epochs and tags that come back.

use super::super::super::grid::Limits;
use super::super::Round;
use super::super::check::{self, POISON, i32_at};
use super::super::input::{Case, Input, Routing};
use super::super::machine::Outcome;
use super::super::oracle::Received;
use super::kernels::{Kernels, compiler};
use super::programs;
use super::ranks::{Call, Ranks, Tensors};
use crate::jit::Program;
use crate::layout::{HandleLayout, OutputLayout, Phase, Placement, RecordKind};

pub(super) const LIMITS: Limits = Limits { blocks: 3, shared_bytes: 232_448, link: 48 };

pub(super) fn packet_programs(ranks: usize, placement: Placement) -> Vec<Program> {
    let packets = |p: &Program| matches!(p, Program::PacketDispatch { .. } | Program::PacketCombine { .. });
    programs(ranks, placement).into_iter().filter(packets).collect()
}

pub(super) fn case(ranks: usize, tokens: usize, placement: Placement) -> Case {
    Case { packets: true, ..Case::new(ranks, tokens, placement) }
}

/// The tags of packets come back after 65535 calls, epochs after 2³²: the next ones are right, too.
#[test]
fn tags_and_epochs_wrap_on_cpus() {
    if !compiler("tags_and_epochs_wrap_on_cpus") {
        return;
    }
    let placement = Placement::Expanded;
    let kernels = Kernels::build(&packet_programs(2, placement), &|_, text| text).unwrap();
    let mut case = case(2, 12, placement);
    case.tokens = vec![12, 7];
    for epoch in [65_528, 131_064, u32::MAX - 5] {
        let mut ranks = Ranks::new(&case, LIMITS, epoch).unwrap();
        for seed in 0..4 {
            ranks.round(&kernels, seed).unwrap_or_else(|e| panic!("from epoch {epoch}, round {seed}: {e}"));
        }
    }
}

/// Kernels that are made for sizes do what those for all sizes do, on grids of one, few and enough blocks.
#[test]
fn kernels_for_sizes_give_the_oracles_bits_on_cpus() {
    if !compiler("kernels_for_sizes_give_the_oracles_bits_on_cpus") {
        return;
    }
    let mut cases = Vec::new();
    for placement in [Placement::Plain, Placement::Expanded] {
        // The shape of a decode step, narrow; then sizes that are multiples of nothing.
        let mut usual = case(2, 18, placement);
        (usual.topk, usual.experts, usual.row_bytes, usual.scale_packs) = (8, 64, 1024, 8);
        usual.routing = Routing::Holes;
        cases.push(usual);
        let mut odd = case(3, 37, placement);
        (odd.topk, odd.experts, odd.row_bytes, odd.scale_packs) = (5, 39, 2064, 5);
        (odd.tokens, odd.hidden, odd.alignment) = (vec![37, 0, 9], 264, 8);
        (odd.zero_padding, odd.biases) = (placement == Placement::Expanded, 1);
        cases.push(odd);
        // More ids than one packet has.
        let mut many = case(2, 5, placement);
        (many.topk, many.experts) = (19, 40);
        cases.push(many);
        let mut one = case(2, 1, placement);
        (one.topk, one.experts) = (3, 8);
        cases.push(one);
        // Words of a packet that nobody needs.
        for topk in [1, 2] {
            let mut small = case(2, 6, placement);
            (small.topk, small.experts, small.row_bytes, small.scale_packs, small.hidden) =
                (topk, 4, 16, 0, 8);
            cases.push(small);
        }
    }
    for mut case in cases {
        case.for_sizes = true;
        let programs = Ranks::new(&case, LIMITS, 0).unwrap().programs_for_sizes(0);
        assert_eq!(programs.len(), 2, "{case:?}");
        let kernels = Kernels::build(&programs, &|_, text| text).unwrap();
        for (seed, blocks) in [1, 3, 40].into_iter().enumerate() {
            let limits = Limits { blocks, ..LIMITS };
            let outcome = Ranks::new(&case, limits, 0)
                .and_then(|mut ranks| (0..2).try_for_each(|n| ranks.round(&kernels, 10 * seed as u64 + n)));
            outcome.unwrap_or_else(|e| panic!("{blocks} blocks, {case:?}: {e}"));
        }
    }
}

/// The lowest rank over capacity, with its tokens and rows.
pub(super) fn over(case: &Case, received: &[Received]) -> Option<(usize, [i32; 2])> {
    let shape = case.dispatch_shape();
    received.iter().enumerate().find_map(|(r, all)| {
        let tokens = all.tokens.len();
        let rows = if case.placement == Placement::Expanded { all.rows.len() } else { tokens };
        let over = tokens > shape.token_capacity || rows > shape.row_capacity;
        over.then_some((r, [tokens as i32, rows as i32]))
    })
}

/// One dispatch, checked, of rows that fit or don't.
fn limited_dispatch(ranks: &mut Ranks<'_>, kernels: &Kernels, case: &Case, seed: u64) -> Outcome<bool> {
    let round = Round::drawn(case, seed);
    let over = over(case, &round.received);
    ranks.poison();
    let tensors: Vec<Tensors> = (0..case.ranks).map(|r| Tensors::new(case, &round, r)).collect();
    let calls: Vec<Vec<Call>> =
        tensors.iter().enumerate().map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false)]).collect();
    ranks.run(kernels, seed, &calls)?;
    let shape = case.dispatch_shape();
    let (o, h) = (OutputLayout::new(&shape), HandleLayout::new(&shape, true));
    for r in 0..case.ranks {
        let slots = ranks.slots(r, 0, 0);
        let Some((rank, needed)) = over else {
            check::dispatched(case, r, &slots, &round.received, &round.inputs, false)?;
            continue;
        };
        let counts: Vec<i32> = (0..4).map(|i| i32_at(&slots.handle, h.counts, i)).collect();
        assert_eq!(counts, [0, 0, needed[0], needed[1]], "rank {r}");
        let rows = &slots.output[o.rows..][..shape.row_capacity * case.row_bytes];
        assert!(rows.iter().all(|&byte| byte == POISON), "rank {r}: a row was moved");
        let places =
            (0..case.ranks * case.max_tokens * case.topk).map(|i| i32_at(&slots.handle, h.lane_place, i));
        assert!(places.into_iter().all(|row| row == -1), "rank {r}");
        let record = ranks.record(r, RecordKind::Capacity);
        assert_eq!(
            (record.peer as usize, record.seen_tokens as i32, record.seen as i32),
            (rank, needed[0], needed[1])
        );
    }
    Ok(over.is_some())
}

/// If one rank's capacity is exceeded no rank is given a row, all know by how much, and the next call is as if nothing had happened.
#[test]
fn a_capacity_holds_on_all_ranks_on_cpus() {
    if !compiler("a_capacity_holds_on_all_ranks_on_cpus") {
        return;
    }
    for placement in [Placement::Plain, Placement::Expanded] {
        let kernels = Kernels::build(&packet_programs(3, placement), &|_, text| text).unwrap();
        let mut case = case(3, 12, placement);
        (case.experts, case.topk, case.alignment) = (24, 4, 4);
        (case.token_capacity, case.row_capacity) = match placement {
            Placement::Plain => (Some(31), None),
            Placement::Expanded => (None, Some(90)),
        };
        let routings =
            [Routing::OneRank(1), Routing::Holes, Routing::OneRank(2), Routing::OneRank(0), Routing::Holes];
        let cases: Vec<Case> = routings.map(|routing| Case { routing, ..case.clone() }).into();
        for blocks in [1, 4] {
            let mut ranks = Ranks::new(&cases[0], Limits { blocks, ..LIMITS }, 7).unwrap();
            let mut seen = [0, 0];
            for (seed, case) in cases.iter().enumerate() {
                let over = limited_dispatch(&mut ranks, &kernels, case, seed as u64)
                    .unwrap_or_else(|e| panic!("{placement:?}, {blocks} blocks, {:?}: {e}", case.routing));
                seen[usize::from(over)] += 1;
            }
            assert_eq!(seen, [2, 3], "{placement:?}");
        }
    }
}

/// One dispatch, and combines of other rows behind it with nothing in between.
fn combines_in_a_row(ranks: &Ranks<'_>, kernels: &Kernels, seed: u64) -> Outcome {
    let case = ranks.cases[0];
    let inputs = || (0..case.ranks).map(|r| Input::new(case, r, seed)).collect();
    let rounds: Vec<Round> = (0..4).map(|n| Round::new(case, inputs(), 10 * seed + n)).collect();
    let tensors = Tensors::of_rounds(case, &rounds);
    let calls: Vec<Vec<Call>> = tensors
        .iter()
        .enumerate()
        .map(|(r, all)| {
            let combines = all.iter().map(|t| ranks.combine(r, t, 0, 0));
            std::iter::once(ranks.dispatch(r, &all[0], 0, 0, false)).chain(combines).collect()
        })
        .collect();
    ranks.run(kernels, seed, &calls)?;
    // Without the weights the comparison would be less than what it is for.
    assert!(case.weights_go_back());
    Tensors::check_all(&tensors, case, &rounds)
}

/// A rank without tokens waits for nobody's rows in combine, and still does not overwrite what a peer has not read; without the permission it does.
#[test]
fn a_rank_without_tokens_asks_before_it_writes_on_cpus() {
    if !compiler("a_rank_without_tokens_asks_before_it_writes_on_cpus") {
        return;
    }
    let placement = Placement::Expanded;
    let mut case = case(2, 12, placement);
    case.tokens = vec![0, 12];
    let asks = "b.begun().compare_all();";
    let without =
        |name: &str, text: String| match name == "kernel.cu" && text.contains("deepep_packet_combine(") {
            true => {
                assert_eq!(text.matches(asks).count(), 1, "the combine has no longer {asks:?}");
                text.replace(asks, ";")
            }
            false => text,
        };
    let run = |kernels: &Kernels, seed: u64| -> (Outcome, Vec<(u32, u32)>) {
        let mut ranks = Ranks::new(&case, LIMITS, 0).unwrap();
        ranks.turns = 5_000_000;
        ranks.plan(&[case.dispatch_shape(); 2]).unwrap();
        let outcome = combines_in_a_row(&ranks, kernels, seed);
        (outcome, ranks.gave_up())
    };
    let kernels = Kernels::build(&packet_programs(2, placement), &|_, text| text).unwrap();
    for seed in 0..8 {
        run(&kernels, seed).0.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
    let kernels = Kernels::build(&packet_programs(2, placement), &without).unwrap();
    // Rank 1 waits for rows that are no longer there.
    let lost = (0..8).any(|seed| {
        let (outcome, gave_up) = run(&kernels, seed);
        outcome.is_err() && gave_up[1] == (Phase::Arrival as u32, 0)
    });
    assert!(lost, "without {asks:?} everything went well");
}
