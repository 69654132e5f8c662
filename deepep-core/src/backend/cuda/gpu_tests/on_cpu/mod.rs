//! The kernels of dispatch and combine on CPUs, against the oracle, bit by bit: the sources as they are, with the files of `arch/` replaced by CPU
//! versions. One fiber is one thread; at accesses that others see, at meetings and waits a seed draws who goes on, and bulk copies
//! and packets happen late. So these tests see wrong positions, waits that nobody ends, and shared memory that is used again too early; they don't
//! see what a weak memory order does.

mod dispatch;
mod following;
mod kernels;
mod late;
mod packets;
mod pull;
mod ranks;
mod zeroed;

use self::kernels::{Kernels, compiler, replaced};
use self::ranks::{Call, Ranks, Tensors};
use super::super::CombineRoles;
use super::super::grid::Limits;
use super::input::Case;
use super::machine::Outcome;
use super::{Round, cases};
use crate::jit::Program;
use crate::layout::{IndexWidth, Phase, Placement};

fn programs(ranks: usize, placement: Placement) -> Vec<Program> {
    let index = IndexWidth::Bits64;
    let mut all = vec![
        Program::Dispatch { ranks, placement, index },
        Program::PacketDispatch { ranks, placement, index, sizes: None },
        Program::Combine { ranks, placement, reduce_first: true },
        Program::PacketCombine { ranks, placement, sizes: None },
    ];
    if placement == Placement::Plain && ranks > 1 {
        all.push(Program::PullCombine { ranks });
    }
    if placement == Placement::Expanded {
        all.push(Program::Combine { ranks, placement, reduce_first: false });
    }
    all
}

/// Names of cases that are run here, or parts of them.
const WANTED: [&str; 15] = [
    "as it comes",
    "one token",
    "last rank has none",
    "nobody has tokens",
    "holes",
    "all to rank 0",
    "scales of odd length",
    "scales to columns",
    "top-17",
    "rows of 2064",
    "hidden 2056",
    "one bias",
    "sum at the source",
    "sums in 3",
    "alignment",
];

fn all_cases(test: &str, ranks: usize, placement: Placement, seeds: u64) {
    if !compiler(test) {
        return;
    }
    let kernels =
        Kernels::build(&programs(ranks, placement), &|_, text| text).unwrap_or_else(|e| panic!("{e}"));
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    let small = Limits { blocks: 2, shared_bytes: 100_000, link: 367 };
    let few =
        Some(CombineRoles { row_warps: 2, stages: 2, reducers: 2, pieces: 3, sender_pieces: 4, batches: 2 });
    let (mut count, mut failures) = (0, Vec::new());
    for (name, mut case) in cases::all(ranks) {
        let wanted = WANTED.iter().any(|part| name.contains(part));
        if !wanted || case.placement != placement || case.index != IndexWidth::Bits64 {
            continue;
        }
        // Enough for several turns of every ring, and no more.
        case.max_tokens = case.max_tokens.min(18);
        case.tokens.iter_mut().for_each(|n| *n = (*n).min(18));
        for seed in 0..seeds {
            (case.roles, case.sets) = if seed % 2 == 0 { (None, 2) } else { (few, 1) };
            case.parts = [None, Some(1), Some(4), Some(2)][(count + seed as usize) % 4];
            let limits = if seed % 2 == 0 { limits } else { small };
            let outcome = Ranks::new(&case, limits, 0).and_then(|mut ranks| {
                ranks.round(&kernels, seed).and_then(|()| ranks.round(&kernels, seed + 100))
            });
            if let Err(error) = outcome {
                failures.push(format!("{name}, seed {seed}: {error}"));
            }
            count += 1;
        }
        assert!(failures.len() < 3, "{failures:#?}");
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(count >= 20, "only {count} cases were run");
}

/// One dispatch on each rank, and a combine behind it.
fn one_call(ranks: &mut Ranks<'_>, kernels: &Kernels, seed: u64) -> Outcome {
    let rounds: Vec<Round> = ranks.cases.iter().map(|case| Round::drawn(case, seed)).collect();
    let tensors: Vec<Tensors> =
        rounds.iter().enumerate().map(|(r, round)| Tensors::new(ranks.cases[r], round, r)).collect();
    let calls: Vec<Vec<Call>> = tensors
        .iter()
        .enumerate()
        .map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false), ranks.combine(r, t, 0, 0)])
        .collect();
    ranks.run(kernels, seed, &calls)
}

/// Whether a dispatch, and a combine, behind a call that failed on all ranks write anything into the memory through which packets travel.
fn write_behind_a_failure(ranks: &mut Ranks<'_>, kernels: &Kernels) -> Outcome<[bool; 2]> {
    let rounds: Vec<Round> = ranks.cases.iter().map(|case| Round::drawn(case, 8)).collect();
    let tensors: Vec<Tensors> =
        rounds.iter().enumerate().map(|(r, round)| Tensors::new(ranks.cases[r], round, r)).collect();
    let mut wrote = [false; 2];
    for (n, wrote) in wrote.iter_mut().enumerate() {
        let calls: Vec<Vec<Call>> = tensors
            .iter()
            .enumerate()
            .map(|(r, t)| match n {
                0 => vec![ranks.dispatch(r, t, 0, 0, false)],
                _ => vec![ranks.combine(r, t, 0, 0)],
            })
            .collect();
        let before = ranks.all_packets()?;
        let error = ranks.run(kernels, 8, &calls).expect_err("it is known that a call failed").to_string();
        assert!(error.contains("gave up"), "{error}");
        *wrote = ranks.all_packets()? != before;
    }
    Ok(wrote)
}

/// Ranks that make different calls all learn of it, whatever differs, and nothing is parsed as what it is not.
#[test]
fn calls_that_differ_end_on_cpus() {
    if !compiler("calls_that_differ_end_on_cpus") {
        return;
    }
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    for placement in [Placement::Plain, Placement::Expanded] {
        let kernels = Kernels::build(&programs(2, placement), &|_, text| text).unwrap();
        for packets in [false, true] {
            let case = |topk: usize, hidden: usize| {
                let mut case = Case { packets, topk, hidden, ..Case::new(2, 12, placement) };
                case.experts = 16;
                case
            };
            let same = case(8, 256);
            for (name, other, digests) in [
                ("top-k in dispatch", case(4, 256), [55, 56]),
                ("top-k in dispatch, the other way round", case(11, 256), [55, 56]),
            ] {
                let mut ranks = Ranks::of(&[&same, &other], limits, 0).unwrap();
                ranks.digests = digests.to_vec();
                let error = one_call(&mut ranks, &kernels, 3).unwrap_err().to_string();
                assert!(error.contains("gave up"), "{name}: {error}");
                for (phase, _) in ranks.gave_up() {
                    assert_eq!(phase, Phase::Parameters as u32, "{placement:?}, packets {packets}, {name}");
                }
                if packets {
                    let wrote = write_behind_a_failure(&mut ranks, &kernels).unwrap();
                    assert_eq!(wrote, [false; 2], "{placement:?}, {name}");
                }
            }
            // Nothing differs in dispatch: combine is what finds it.
            let mut ranks = Ranks::of(&[&same, &same], limits, 0).unwrap();
            let other = case(8, 512);
            let round = Round::drawn(&same, 4);
            let tensors: Vec<Tensors> = (0..2).map(|r| Tensors::new(&same, &round, r)).collect();
            let dispatches: Vec<Vec<Call>> =
                tensors.iter().enumerate().map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false)]).collect();
            ranks.run(&kernels, 4, &dispatches).unwrap();
            ranks.digests = vec![1, 2];
            let combines: Vec<Vec<Call>> =
                tensors.iter().enumerate().map(|(r, t)| vec![ranks.combine(r, t, 0, 0)]).collect();
            let error = ranks.run(&kernels, 5, &combines).unwrap_err().to_string();
            assert!(error.contains("gave up"), "{error}");
            for (r, (phase, peer)) in ranks.gave_up().into_iter().enumerate() {
                assert_eq!(phase, Phase::Parameters as u32, "{placement:?}, packets {packets}, rank {r}");
                assert!(peer < 2);
            }
            if packets {
                let wrote = write_behind_a_failure(&mut ranks, &kernels).unwrap();
                assert_eq!(wrote, [false; 2], "{placement:?}, combine");
            }
            // Other rows and slots: the ranks wait for different things, and still learn why.
            let mut ranks = Ranks::of(&[&same, &other], limits, 0).unwrap();
            let error = {
                let rounds = [&same, &other].map(|case| Round::drawn(case, 6));
                let tensors: Vec<Tensors> =
                    (0..2).map(|r| Tensors::new(ranks.cases[r], &rounds[r], r)).collect();
                let calls = |ranks: &Ranks<'_>, combine: bool| -> Vec<Vec<Call>> {
                    let call = |(r, t): (usize, &Tensors)| match combine {
                        true => vec![ranks.combine(r, t, 0, 0)],
                        false => vec![ranks.dispatch(r, t, 0, 0, false)],
                    };
                    tensors.iter().enumerate().map(call).collect()
                };
                ranks.run(&kernels, 6, &calls(&ranks, false)).unwrap();
                ranks.digests = vec![1, 2];
                ranks.run(&kernels, 7, &calls(&ranks, true)).unwrap_err().to_string()
            };
            assert!(error.contains("gave up"), "{error}");
            assert!(ranks.gave_up().iter().all(|&(phase, _)| phase == Phase::Parameters as u32));
        }
    }
}

/// The tests see packets of a kernel that does not look whether one before it has failed.
#[test]
fn packets_behind_a_failure_are_noticed_on_cpus() {
    if !compiler("packets_behind_a_failure_are_noticed_on_cpus") {
        return;
    }
    let (file, looks) = ("comm/packets.cuh", "return abort != 0;");
    let change = replaced(file, looks, "return false;");
    let placement = Placement::Plain;
    let kernels = Kernels::build(&packets::packet_programs(2, placement), &change).unwrap();
    let case = packets::case(2, 12, placement);
    let mut ranks = Ranks::new(&case, packets::LIMITS, 0).unwrap();
    ranks.digests = vec![55, 56];
    one_call(&mut ranks, &kernels, 3).unwrap_err();
    assert_eq!(write_behind_a_failure(&mut ranks, &kernels).unwrap(), [true; 2]);
}

/// A rank whose rows were not all sent announces none of them: its peer gives up and does not take old rows for new ones.
#[test]
fn rows_that_were_not_sent_are_not_announced_on_cpus() {
    if !compiler("rows_that_were_not_sent_are_not_announced_on_cpus") {
        return;
    }
    let programs = [Program::Dispatch { ranks: 2, placement: Placement::Plain, index: IndexWidth::Bits64 }];
    let (call, changed) = ("sent = sender.run(known);", "sent = sender.run(known) && (b.me != 0 || !known);");
    let change = |name: &str, text: String| {
        assert!(name != "kernel.cu" || text.matches(call).count() == 1);
        text.replace(call, changed)
    };
    let kernels = Kernels::build(&programs, &change).unwrap();
    let case = Case::new(2, 12, Placement::Plain);
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    let ranks = Ranks::new(&case, limits, 0).unwrap();
    let round = Round::drawn(&case, 1);
    let tensors: Vec<Tensors> = (0..2).map(|r| Tensors::new(&case, &round, r)).collect();
    let calls: Vec<Vec<Call>> =
        tensors.iter().enumerate().map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false)]).collect();
    let error = ranks.run(&kernels, 1, &calls).unwrap_err().to_string();
    assert!(error.contains("rank 1 gave up"), "{error}");
    assert_eq!(ranks.gave_up()[1], (Phase::Done as u32, 0));
}

/// The tests see what they are for: stages that are used again before their stores have read them.
#[test]
fn shared_memory_that_is_used_too_early_is_noticed_on_cpus() {
    if !compiler("shared_memory_that_is_used_too_early_is_noticed_on_cpus") {
        return;
    }
    let placement = Placement::Expanded;
    let programs: Vec<Program> = programs(2, placement)
        .into_iter()
        .filter(|p| matches!(p, Program::Dispatch { .. } | Program::Combine { .. }))
        .collect();
    let mistakes = [
        ("ops/combine/send_sum.cuh", "if (b.lane == slot) arch::bulk_wait_read();", ""),
        ("ops/combine/send.cuh", "arch::bulk_wait_read();", ""),
    ];
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    for (file, from, to) in mistakes {
        let change = replaced(file, from, to);
        let kernels = Kernels::build(&programs, &change).unwrap();
        let mut case = Case::new(2, 24, placement);
        (case.hidden, case.topk, case.experts) = (8192, 6, 16);
        case.reduce_first = file.ends_with("send_sum.cuh");
        case.roles = Some(CombineRoles {
            row_warps: 1,
            stages: 1,
            reducers: 2,
            pieces: 3,
            sender_pieces: 4,
            batches: 2,
        });
        let failed = (0..5).any(|seed| Ranks::new(&case, limits, 0).unwrap().round(&kernels, seed).is_err());
        assert!(failed, "{file} without {from:?} went unnoticed");
    }
}

#[test]
fn plain_kernels_give_the_oracles_bits_on_cpus() {
    all_cases("plain_kernels_give_the_oracles_bits_on_cpus", 2, Placement::Plain, 2);
}

#[test]
fn expanded_kernels_give_the_oracles_bits_on_cpus() {
    all_cases("expanded_kernels_give_the_oracles_bits_on_cpus", 3, Placement::Expanded, 2);
}
