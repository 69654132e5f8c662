//! The order of a context: a signal that is seen vouches for everything before it, whatever the streams do.

use crate::harness::{DELAYED, MIB, Rank, ranks};
use crate::memory::Memory;
use crate::wire::{At, Request};
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA, PTR_HOST};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Places for stamps, one a put; their bytes come from memory of three kinds.
const STAMPS: usize = 2000;
/// Where the last number is written over and over.
const LAST: usize = 8 * STAMPS;
const AREA: usize = LAST + 64;
/// Large payload, so that streams have something to overtake.
const LARGE: usize = 300_000;

#[derive(Clone, Copy)]
enum Step {
    /// A stamp of its own, from memory of a kind.
    Stamp(usize),
    /// The number of this step, over the one before.
    Last,
    /// Payload, of which only the last byte is looked at.
    Large(usize),
    /// Vouches for all before it; through a word of the window, or an indexed one.
    Signal(bool),
}

/// The same on both sides: what `rank` sends in `context` of `round`.
fn program(rank: usize, context: usize, round: usize) -> Vec<Step> {
    let seed = (rank * 1000 + context * 100 + round) as u64;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..400)
        .map(|_| match random.random_range(0..10) {
            0..=4 => Step::Stamp(random.random_range(0..3)),
            5..=6 => Step::Last,
            7 => Step::Large(random.random_range(1..LARGE)),
            8 => Step::Signal(true),
            _ => Step::Signal(random.random_bool(0.2)),
        })
        .collect()
}

fn stamp(rank: usize, context: usize, round: usize, index: usize) -> u64 {
    (rank << 48 | context << 40 | round << 24 | index) as u64 | 1 << 63
}

fn programs(rank: Rank) {
    let wire = rank.connect();
    let (me, count) = (wire.here.rank, wire.here.ranks);
    let window = Memory::device(&wire.here, 8 * MIB, true);
    let private = Memory::device(&wire.here, 2 * MIB, false);
    let host = Memory::host(MIB);
    let indexed = Memory::device(&wire.here, 2 * MIB, false);
    let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let target = wire.register(window, PTR_CUDA, MR_FORCE_ORDER);
    let sources = [target, wire.register(private, PTR_CUDA, 0), wire.register(host, PTR_HOST, 0)];
    // In the window: an area for each sender and context, then words for signals, then sources.
    let area =
        |sender: usize, context: usize| (sender * 2 + context) * (AREA + LARGE + 64).next_multiple_of(4096);
    let words = 6 * MIB;
    let own = 7 * MIB;
    let word = |sender: usize, context: usize| 8 * (sender * 2 + context);

    let mut base = vec![[[0u64; 2]; 2]; count];
    for round in 0..6 {
        // Sources: each step has its number in each memory.
        for index in 0..STAMPS {
            for context in 0..2 {
                let value = stamp(me, context, round, index);
                let at = 8 * (index * 2 + context);
                private.store(at, value);
                host.store(at, value);
                window.store(own + at, value);
            }
        }
        wire.here.barrier();
        let mut requests: Vec<Request> = Vec::new();
        let to = (me + 1 + round % (count - 1)) % count;
        let from = (me + count - 1 - round % (count - 1)) % count;
        let plans: Vec<Vec<Step>> = (0..2).map(|context| program(me, context, round)).collect();
        // The contexts' steps take turns; they have no order among each other.
        for index in 0..plans[0].len() {
            for (context, plan) in plans.iter().enumerate() {
                let place = |offset: usize| At(target, (area(me, context) + offset) as u64);
                let number = 8 * (index * 2 + context);
                let source =
                    |kind: usize| At(sources[kind], (if kind == 0 { own + number } else { number }) as u64);
                let c = context as i32;
                requests.push(match plan[index] {
                    Step::Stamp(kind) => wire.put(c, source(kind), 8, place(8 * index), to),
                    Step::Last => wire.put(c, source(index % 3), 8, place(LAST), to),
                    Step::Large(size) => wire.put(c, At(sources[index % 2], 0), size, place(AREA), to),
                    Step::Signal(true) => wire.signal(c, to, At(signals, word(me, context) as u64), 1),
                    Step::Signal(false) => {
                        wire.signal(c, to, At(target, (words + word(me, context)) as u64), 1)
                    }
                });
            }
        }
        // The other side: each signal as it comes, and all that it vouches for.
        for (context, base) in base[from].iter_mut().enumerate() {
            let plan = program(from, context, round);
            let mut seen = [0u64; 2];
            let mut last = None;
            let mut checked = 0;
            for (index, step) in plan.iter().enumerate() {
                if matches!(step, Step::Last) {
                    last = Some(index);
                }
                let Step::Signal(is_indexed) = *step else { continue };
                let kind = usize::from(is_indexed);
                seen[kind] += 1;
                let at = word(from, context);
                let value = base[kind] + seen[kind];
                if is_indexed {
                    wire.await_word(indexed, at, value);
                } else {
                    wire.await_word(window, words + at, value);
                }
                for (earlier, step) in plan.iter().enumerate().take(index).skip(checked) {
                    if matches!(step, Step::Stamp(_)) {
                        let found = window.load(area(from, context) + 8 * earlier);
                        assert_eq!(
                            found,
                            stamp(from, context, round, earlier),
                            "step {earlier} before signal {index}"
                        );
                    }
                }
                checked = index;
                if let Some(last) = last {
                    let found = window.load(area(from, context) + LAST);
                    let oldest = stamp(from, context, round, last);
                    assert!(found >= oldest, "step {last} was overtaken by {found:x} before signal {index}");
                }
            }
            let total = plan.iter().filter(|step| matches!(step, Step::Signal(true))).count() as u64;
            base[1] += total;
            base[0] += plan.iter().filter(|step| matches!(step, Step::Signal(false))).count() as u64;
        }
        wire.wait_all(requests);
        wire.here.barrier();
        for (context, base) in base[from].iter().enumerate() {
            // Nothing came twice.
            assert_eq!(indexed.load(word(from, context)), base[1]);
            assert_eq!(window.load(words + word(from, context)), base[0]);
            let plan = program(from, context, round);
            if let Some(last) = plan.iter().rposition(|step| matches!(step, Step::Last)) {
                let found = window.load(area(from, context) + LAST);
                assert_eq!(found, stamp(from, context, round, last), "the last of several puts to one place");
            }
        }
        wire.here.barrier();
    }
    let here = wire.close(&[signals, target, sources[1], sources[2]]);
    for memory in [window, private, indexed] {
        memory.free(&here);
    }
    here.finish();
}

#[test]
fn random_programs_keep_their_order() {
    ranks("order::random_programs_keep_their_order", 3, &[DELAYED], programs);
}

#[test]
fn random_programs_keep_their_order_staged() {
    let staged = ("NCCL_GIN_SOFT_STAGE", "1");
    ranks("order::random_programs_keep_their_order_staged", 2, &[DELAYED, staged], programs);
}

#[test]
fn random_programs_keep_their_order_over_tcp() {
    let tcp = ("NCCL_GIN_SOFT_TCP", "1");
    ranks("order::random_programs_keep_their_order_over_tcp", 2, &[DELAYED, tcp], programs);
}
