//! Combines that read rows where they are: what the table of cases does not do.

use super::super::super::CombineRoles;
use super::super::super::grid::Limits;
use super::super::Round;
use super::super::input::{Case, Random};
use super::super::machine::Outcome;
use super::kernels::{Kernels, compiler, replaced};
use super::programs;
use super::ranks::{Call, Given, Ranks, Tensors};
use crate::jit::{PULL_PARTS, Program};
use crate::layout::{Phase, Placement};

const LIMITS: Limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };

/// Kernels for rows that travel as rows.
fn kernels(ranks: usize, change: &(dyn Fn(&str, String) -> String + Sync)) -> Kernels {
    let wanted = |p: &Program| {
        matches!(p, Program::Dispatch { .. } | Program::Combine { .. } | Program::PullCombine { .. })
    };
    let programs: Vec<Program> = programs(ranks, Placement::Plain).into_iter().filter(wanted).collect();
    Kernels::build(&programs, change).unwrap_or_else(|e| panic!("{e}"))
}

/// Experts that return what they got: a combine of a dispatch's rows.
fn case(ranks: usize, tokens: usize, pulled: usize) -> Case {
    let mut case = Case::new(ranks, tokens, Placement::Plain);
    (case.hidden, case.row_bytes, case.pulled) = (256, 512, pulled);
    case.experts = 4 * ranks;
    case
}

fn one_round(case: &Case, seed: u64) -> Round {
    let mut round = Round::drawn(case, seed);
    for (rows, received) in round.rows.iter_mut().zip(&round.received) {
        let row = |&(rank, token): &(usize, usize)| {
            let bytes = &round.inputs[rank].x[token * case.row_bytes..][..case.row_bytes];
            bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<_>>()
        };
        *rows = received.tokens.iter().flat_map(row).collect();
    }
    round
}

/// Rounds without a wait between the ranks, all through the same output slot, which each rank overwrites when its combine has ended. `pull` says how the
/// rows of a round go back.
fn rounds(
    ranks: &Ranks<'_>,
    kernels: &Kernels,
    seed: u64,
    count: u64,
    pull: impl Fn(u64) -> bool,
) -> Outcome {
    let case = ranks.cases[0];
    let rounds: Vec<Round> = (0..count).map(|n| one_round(case, seed * 1000 + n)).collect();
    let tensors = Tensors::of_rounds(case, &rounds);
    let calls: Vec<Vec<Call>> = tensors
        .iter()
        .enumerate()
        .map(|(r, all)| {
            let round = |(n, t): (usize, &Tensors)| {
                let given = Given::Output { slot: 0, pull: pull(n as u64) };
                [
                    ranks.dispatch(r, t, 0, 0, false),
                    ranks.combine_of(r, t, 0, 0, given),
                    ranks.overwrite(r, 0),
                ]
            };
            all.iter().enumerate().flat_map(round).collect()
        })
        .collect();
    ranks.run(kernels, seed, &calls)?;
    // Without the weights the comparison would be less than what it is for.
    assert!(case.weights_go_back());
    Tensors::check_all(&tensors, case, &rounds)
}

/// Results of dispatches go back from where they are, call after call, pulled and sent in turn, from any epoch, also by ranks without tokens.
#[test]
fn rows_are_read_before_they_are_overwritten_on_cpus() {
    if !compiler("rows_are_read_before_they_are_overwritten_on_cpus") {
        return;
    }
    let roles = |row_warps, reducers, batches| {
        Some(CombineRoles { row_warps, stages: 2, reducers, pieces: batches, sender_pieces: 0, batches: 2 })
    };
    for ranks in [2, 3] {
        let kernels = kernels(ranks, &|_, text| text);
        for pulled in [PULL_PARTS, 20] {
            let mut case = case(ranks, 40, pulled);
            case.tokens = (0..ranks).map(|r| [40, 0, 33][r]).collect();
            for (n, epoch) in [0, i32::MAX as u32 - 3].into_iter().enumerate() {
                (case.roles, case.tickets) = ([None, roles(1, 2, 3)][n], n == 0);
                let all = Ranks::new(&case, LIMITS, epoch).unwrap();
                for seed in 0..2 {
                    let mixed = |n: u64| Random::new(&[seed, n]).below(3) > 0;
                    rounds(&all, &kernels, seed, 6, mixed)
                        .unwrap_or_else(|e| panic!("{ranks} ranks, {pulled}/64, epoch {epoch}: {e}"));
                }
            }
            // Few blocks, many tokens: by ticket.
            case.tokens = vec![40; ranks];
            (case.roles, case.tickets) = (roles(1, 1, 2), true);
            let all = Ranks::new(&case, LIMITS, 7).unwrap();
            rounds(&all, &kernels, 9, 4, |_| true).unwrap_or_else(|e| panic!("{ranks} ranks: {e}"));
        }
    }
}

/// The tests see a rank that does not wait until all have read, one that reads before it knows where, and one that says too early that it has read.
#[test]
fn rows_that_are_read_at_the_wrong_time_are_noticed_on_cpus() {
    if !compiler("rows_that_are_read_at_the_wrong_time_are_noticed_on_cpus") {
        return;
    }
    let file = "ops/combine/pull.cuh";
    let mistakes = [
        ("wait_equal(b.d, b.place(PHASE_READING, b.lane, 0), b.read_cell(b.me, b.lane));", ";"),
        ("return seen == b.epoch;", "return true;"),
        ("while (arch::ld_acquire_cta_shared(&b.control.reading) != 0) arch::sleep_ns(20);", ""),
        ("== gridDim.x - 1;", "== 0;"),
    ];
    let mut case = case(3, 40, PULL_PARTS);
    case.tokens = vec![40, 3, 40];
    for (from, to) in mistakes {
        let change = replaced(file, from, to);
        let kernels = kernels(3, &change);
        let failed = (0..8)
            .any(|seed| rounds(&Ranks::new(&case, LIMITS, 0).unwrap(), &kernels, seed, 6, |_| true).is_err());
        assert!(failed, "without {from:?} everything went well");
    }
}

/// One rank sends what the others pull, or they call with other digests, or one does not come: all learn of it.
#[test]
fn ranks_that_do_not_agree_to_pull_learn_of_it_on_cpus() {
    if !compiler("ranks_that_do_not_agree_to_pull_learn_of_it_on_cpus") {
        return;
    }
    let kernels = kernels(3, &|_, text| text);
    for pulled in [PULL_PARTS, 20] {
        let case = case(3, 12, pulled);
        let round = one_round(&case, 3);
        let tensors: Vec<Tensors> = (0..3).map(|r| Tensors::new(&case, &round, r)).collect();
        for missing in [false, true] {
            let mut ranks = Ranks::new(&case, LIMITS, 0).unwrap();
            let dispatches: Vec<Vec<Call>> =
                tensors.iter().enumerate().map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false)]).collect();
            ranks.run(&kernels, 1, &dispatches).unwrap();
            ranks.digests[1] = 56;
            let combines: Vec<Vec<Call>> = tensors
                .iter()
                .enumerate()
                .map(|(r, t)| match (r, missing) {
                    (1, true) => Vec::new(),
                    _ => vec![ranks.combine_of(r, t, 0, 0, Given::Output { slot: 0, pull: r != 1 })],
                })
                .collect();
            let error = ranks.run(&kernels, 2, &combines).unwrap_err().to_string();
            assert!(error.contains("gave up"), "{error}");
            for (r, (phase, peer)) in ranks.gave_up().into_iter().enumerate() {
                if missing && r == 1 {
                    continue;
                }
                let expected = if missing { Phase::Started } else { Phase::Parameters };
                assert_eq!(phase, expected as u32, "{pulled}/64, missing: {missing}, rank {r}");
                assert!(!missing || peer == 1);
            }
        }
    }
}

/// A rank that leaves before all have read has told them first: what others have read of it by then is not taken for good.
#[test]
fn rows_of_a_rank_that_gave_up_are_not_good_on_cpus() {
    if !compiler("rows_of_a_rank_that_gave_up_are_not_good_on_cpus") {
        return;
    }
    // Rank 0 does not wait for rank 1, but gives up at once, as at its deadline.
    let file = "ops/combine/pull.cuh";
    let from = "wait_equal(b.d, b.place(PHASE_READING, b.lane, 0), b.read_cell(b.me, b.lane));";
    let to = "{ if (b.me == 0) give_up(b.d, b.place(PHASE_READING, b.lane, 0), true, 1, 2, 3); else \
              wait_equal(b.d, b.place(PHASE_READING, b.lane, 0), b.read_cell(b.me, b.lane)); }";
    let change = replaced(file, from, to);
    let kernels = kernels(2, &change);
    let mut case = case(2, 40, PULL_PARTS);
    case.tokens = vec![0, 40];
    for seed in 0..6 {
        let round = one_round(&case, seed);
        let tensors: Vec<Tensors> = (0..2).map(|r| Tensors::new(&case, &round, r)).collect();
        let ranks = Ranks::new(&case, LIMITS, 0).unwrap();
        let calls: Vec<Vec<Call>> = tensors
            .iter()
            .enumerate()
            .map(|(r, t)| {
                let given = Given::Output { slot: 0, pull: true };
                vec![ranks.dispatch(r, t, 0, 0, false), ranks.combine_of(r, t, 0, 0, given)]
            })
            .collect();
        ranks.run(&kernels, seed, &calls).unwrap_err();
        let [(first, _), (second, _)] = ranks.gave_up()[..] else { panic!("two ranks") };
        assert_eq!(first, Phase::Reading as u32);
        // Rank 1 reads all the while, and says at its end that it is not good.
        assert_eq!(second, Phase::Reading as u32, "seed {seed}");
    }
}
