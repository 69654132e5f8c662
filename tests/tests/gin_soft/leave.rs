//! A registration that ends while others still write to its memory: they are wrong, and the memory is its owner's again all the same.

use crate::harness::{DELAYED, MIB, Rank, ranks};
use crate::memory::{Memory, pattern};
use crate::wire::At;
use integration_tests::process::eventually;
use nccl_gin_soft::abi::{PTR_CUDA, ResultCode};
use std::time::{Duration, Instant};

const PUTS: u64 = 400;
const SIZE: usize = 4096;
const MINE: u8 = 0xee;

fn leave(rank: Rank) {
    let mut here = rank;
    for round in 0..6 {
        let wire = here.connect();
        let window = Memory::device(&wire.here, 4 * MIB, true);
        let target = wire.register(window, PTR_CUDA, 0);
        window.fill(0, 2 * MIB, pattern(wire.here.rank, round));
        wire.here.barrier();
        if wire.here.rank == 0 {
            for index in 0..PUTS {
                let offset = index * SIZE as u64;
                let (code, _) = wire.try_put(
                    (index % 4) as i32,
                    At(target, offset),
                    SIZE,
                    At(target, 2 * MIB as u64 + offset),
                    1,
                );
                if code != ResultCode::SUCCESS {
                    break;
                }
            }
            let start = Instant::now();
            while !wire.has_error() && start.elapsed() < Duration::from_millis(500) {
                wire.progress();
            }
        } else {
            eventually("the first bytes", || window.load(2 * MIB) != 0);
            wire.deregister(target);
            window.fill(0, 4 * MIB, |_| MINE);
            std::thread::sleep(Duration::from_millis(50));
            window.check(0, 4 * MIB, "memory after its registration", |_| MINE);
        }
        wire.here.barrier();
        let still = if wire.here.rank == 0 { &[target][..] } else { &[] };
        here = wire.close(still);
        window.free(&here);
        here.barrier();
    }
    here.finish();
}

#[test]
fn nothing_is_written_behind_the_end_of_a_registration() {
    ranks("leave::nothing_is_written_behind_the_end_of_a_registration", 2, &[DELAYED], leave);
}

#[test]
fn nothing_is_written_behind_the_end_of_a_registration_over_tcp() {
    let tcp = ("NCCL_GIN_SOFT_TCP", "1");
    ranks("leave::nothing_is_written_behind_the_end_of_a_registration_over_tcp", 2, &[DELAYED, tcp], leave);
}
