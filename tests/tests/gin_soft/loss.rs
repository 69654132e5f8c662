//! A million operations: none is lost, none comes twice. And sixteen ranks.

use crate::board::Board;
use crate::harness::{MIB, Rank, ranks};
use crate::memory::Memory;
use crate::wire::{At, Request, Wire};
use integration_tests::process::scratch;
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA, PTR_HOST};
use std::collections::VecDeque;

/// Operations under way in a context, as NCCL's queues allow.
const DEPTH: usize = 256;

fn million(rank: Rank) {
    const COUNT: u64 = 500_000;
    let wire = rank.connect();
    let window = Memory::device(&wire.here, 8 * MIB, true);
    let indexed = Memory::device(&wire.here, 2 * MIB, false);
    let values = Memory::host(8 * DEPTH * 2);
    let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let target = wire.register(window, PTR_CUDA, 0);
    let source = wire.register(values, PTR_HOST, 0);
    let to = 1 - wire.here.rank;
    wire.here.barrier();
    // Each rank sends half of the million: values with a signal that adds, and plain signals.
    let mut under_way: [VecDeque<Request>; 2] = Default::default();
    let mut sum = 0u64;
    for index in 0..COUNT {
        let context = (index & 1) as usize;
        let slot = (index as usize / 2) % DEPTH;
        if under_way[context].len() == DEPTH
            && let Some(oldest) = under_way[context].pop_front()
        {
            wire.wait(oldest);
        }
        let at = 8 * (slot * 2 + context);
        let word = At(signals, 8 * context as u64);
        sum = sum.wrapping_add(index);
        let request = if index % 4 < 2 {
            values.store(at, index);
            let place = At(target, 8 * (index / 4 * 2 + index % 2) % (4 * MIB as u64));
            wire.put_signal(context as i32, At(source, at as u64), 8, place, to, word, index)
        } else {
            wire.signal(context as i32, to, word, index)
        };
        under_way[context].push_back(request);
    }
    wire.wait_all(under_way.into_iter().flatten());
    wire.here.barrier();
    assert_eq!(indexed.load(0).wrapping_add(indexed.load(8)), sum, "the sum of what was added");
    // The last values that went to each place.
    let places = 4 * MIB as u64 / 8;
    let mut expected = vec![0u64; places as usize];
    for index in (0..COUNT).filter(|index| index % 4 < 2) {
        expected[((index / 4 * 2 + index % 2) % places) as usize] = index;
    }
    for (place, &value) in expected.iter().enumerate() {
        assert_eq!(window.load(8 * place), value, "place {place}");
    }
    let here = wire.close(&[signals, target, source]);
    window.free(&here);
    indexed.free(&here);
    here.finish();
}

#[test]
fn a_million_operations() {
    ranks("loss::a_million_operations", 2, &[], million);
}

#[test]
fn a_million_operations_over_tcp() {
    ranks("loss::a_million_operations_over_tcp", 2, &[("NCCL_GIN_SOFT_TCP", "1")], million);
}

/// Sixteen ranks, threads of one process, all with all.
#[test]
fn sixteen_ranks_in_one_process() {
    const RANKS: usize = 16;
    let (_folder, path) = scratch("board");
    Board::create(&path);
    let first = Rank::new(0, RANKS, Board::open(&path));
    let emulator = first.emulator.clone();
    std::thread::scope(|scope| {
        for rank in 1..RANKS {
            let board = Board::open(&path);
            let (emulator, driver) = (first.emulator.clone(), first.driver.clone());
            scope.spawn(move || {
                let here = Rank { rank, ranks: RANKS, board, emulator, driver };
                here.enter();
                all_with_all(here.connect()).leave();
            });
        }
        all_with_all(first.connect()).leave();
    });
    emulator.assert_empty();
}

fn all_with_all(wire: Wire) -> Rank {
    let (me, count) = (wire.here.rank, wire.here.ranks);
    let window = Memory::device(&wire.here, 2 * MIB, true);
    let indexed = Memory::device(&wire.here, 2 * MIB, false);
    let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let target = wire.register(window, PTR_CUDA, 0);
    let mut requests = Vec::new();
    for round in 1..=20u64 {
        for peer in 0..count {
            let stamp = (me as u64) << 32 | round << 16 | peer as u64;
            let from = MIB + 8 * (peer * 32 + round as usize);
            window.store(from, stamp);
            let to = At(target, 8 * (me * 32 + round as usize) as u64);
            let word = At(signals, 8 * me as u64);
            requests.push(wire.put_signal((round & 1) as i32, At(target, from as u64), 8, to, peer, word, 1));
        }
    }
    for sender in 0..count {
        wire.await_word(indexed, 8 * sender, 20);
        for round in 1..=20u64 {
            let found = window.load(8 * (sender * 32 + round as usize));
            // The contexts have an order of their own: a signal vouches for its own context's puts, so wait for all of them.
            let stamp = (sender as u64) << 32 | round << 16 | me as u64;
            wire.until("a put", || window.load(8 * (sender * 32 + round as usize)) == stamp);
            assert!(found == 0 || found == stamp);
        }
        assert_eq!(indexed.load(8 * sender), 20);
    }
    wire.wait_all(requests);
    wire.here.barrier();
    let here = wire.close(&[signals, target]);
    window.free(&here);
    indexed.free(&here);
    here.barrier();
    here
}
