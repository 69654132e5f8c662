//! Every operation of the device API, checked byte by byte inside the receiving kernel, right behind its signal.

use crate::arguments;
use crate::board::Board;
use crate::world::{DST, MIB, MISC, SRC, Shape, World, ranks};

const TWO: Shape = Shape::new(2, 2);
/// Rounds of one kernel. Where ranks share a GPU by time slices, one takes ten milliseconds.
const ROUNDS_AT_ONCE: usize = 500;
/// Environment variable: the most rounds that a test runs.
const ROUNDS: &str = "GIN_ROUNDS";

fn rounds(count: usize) -> usize {
    let most = std::env::var(ROUNDS).ok().and_then(|most| most.parse().ok());
    most.map_or(count, |most: usize| count.min(most))
}

#[test]
fn two_nodes() {
    ranks("suite::two_nodes", TWO, &[], |rank, board| suite(rank, TWO, board, 10_000));
}

#[test]
fn two_nodes_staged() {
    let staged = [("NCCL_GIN_SOFT_STAGE", "1")];
    ranks("suite::two_nodes_staged", TWO, &staged, |rank, board| suite(rank, TWO, board, 500));
}

#[test]
fn two_nodes_over_tcp() {
    let tcp = [("NCCL_GIN_SOFT_TCP", "1")];
    ranks("suite::two_nodes_over_tcp", TWO, &tcp, |rank, board| suite(rank, TWO, board, 500));
}

#[test]
fn two_nodes_without_dma_buf() {
    let plain = [("NCCL_GIN_SOFT_DMABUF", "0")];
    ranks("suite::two_nodes_without_dma_buf", TWO, &plain, |rank, board| suite(rank, TWO, board, 100));
}

#[test]
fn two_nodes_with_four_connections() {
    let many = [("NCCL_GIN_NCONNECTIONS", "4")];
    ranks("suite::two_nodes_with_four_connections", TWO, &many, |rank, board| suite(rank, TWO, board, 100));
}

#[test]
fn two_nodes_with_several_progress_threads() {
    let shape = Shape { since: 23200, ..TWO };
    let many = [("NCCL_GIN_PROXY_NTHREADS", "4")];
    ranks("suite::two_nodes_with_several_progress_threads", shape, &many, |rank, board| {
        suite(rank, shape, board, 100);
    });
}

/// By time slices: milliseconds for each round trip.
#[test]
fn two_nodes_on_one_gpu() {
    let shape = Shape::new(2, 1);
    ranks("suite::two_nodes_on_one_gpu", shape, &[], |rank, board| suite(rank, shape, board, 20));
}

#[test]
fn four_ranks_as_four_nodes() {
    let shape = Shape { since: 23000, ..Shape::new(4, 2) };
    ranks("suite::four_ranks_as_four_nodes", shape, &[], |rank, board| suite(rank, shape, board, 20));
}

#[test]
fn four_ranks_as_two_nodes() {
    let shape = Shape { node: 2, since: 23000, ..Shape::new(4, 2) };
    ranks("suite::four_ranks_as_two_nodes", shape, &[], |rank, board| suite(rank, shape, board, 20));
}

#[test]
fn eight_ranks_as_two_nodes() {
    let shape = Shape { node: 4, since: 23000, ..Shape::new(8, 2) };
    ranks("suite::eight_ranks_as_two_nodes", shape, &[], |rank, board| suite(rank, shape, board, 10));
}

#[test]
fn four_ranks_on_rails() {
    let shape = Shape { node: 2, rail: true, since: 23000, ..Shape::new(4, 2) };
    ranks("suite::four_ranks_on_rails", shape, &[], |rank, board| rails(rank, shape, board));
}

#[test]
fn two_ranks_on_a_rail() {
    let shape = Shape { rail: true, ..TWO };
    ranks("suite::two_ranks_on_a_rail", shape, &[], |rank, board| rails(rank, shape, board));
}

fn rails(rank: usize, shape: Shape, board: Board) {
    let world = World::new(rank, shape, board);
    let (gpu, w) = (&world.gpu, world.window.as_raw() as u64);
    let mut expect = [0u64; 2];
    for (salt, n) in [8usize, 1000, 65_536, MIB + 13].into_iter().enumerate() {
        let context = salt % 2;
        expect[context] += 1;
        let mut arguments = arguments![
            context as i32,
            w,
            SRC as u64,
            DST as u64,
            n as u64,
            0u32,
            expect[context],
            salt as i32,
            gpu.report()
        ];
        gpu.run(
            &format!("{n} bytes along the rail"),
            "put_rail",
            1,
            512,
            &mut with_dev(&world, &mut arguments),
        );
        world.meet();
    }
    if gpu.has("barriers") {
        let mut arguments = arguments![1i32, 20i32, gpu.report()];
        gpu.run("barriers of the rail", "barriers", 1, 64, &mut with_dev(&world, &mut arguments));
        world.meet();
    }
    world.close();
}

/// Puts the device communicator in front.
pub fn with_dev(world: &World, arguments: &mut [*mut std::ffi::c_void]) -> Vec<*mut std::ffi::c_void> {
    std::iter::once(world.dev()).chain(arguments.iter().copied()).collect()
}

fn suite(rank: usize, shape: Shape, board: Board, count: usize) {
    let world = World::new(rank, shape, board);
    let (w, strict) = (world.window.as_raw() as u64, world.strict.as_raw() as u64);
    let (to, from) = world.neighbours();
    let (src, dst, report) = (SRC as u64, DST as u64, world.gpu.report());
    let run = |what: &str, name: &str, grid: u32, block: u32, arguments: &mut [*mut std::ffi::c_void]| {
        let nanoseconds = world.gpu.run(what, name, grid, block, &mut with_dev(&world, arguments));
        world.meet();
        nanoseconds
    };

    let mut expect = [0u64; 2];
    let sizes =
        [1, 4, 8, 16, 64, 255, 1000, 4096, 4097, 65_536, 262_144, MIB, MIB + 13, 4 * MIB, 8 * MIB, 64 * MIB];
    for (salt, n) in sizes.into_iter().enumerate() {
        let context = salt % 2;
        expect[context] += 1;
        let what = format!("{n} bytes in context {context}");
        let mut arguments = arguments![
            context as i32,
            w,
            src,
            dst,
            n as u64,
            to,
            from,
            0u32,
            expect[context],
            salt as i32,
            report
        ];
        run(&what, "put", 1, 512, &mut arguments);
    }
    let mut arguments = arguments![2i32, w, src, dst, 4096u64, 300i32, to, from, 2u32, 0u64, 0i32, report];
    run("2 contexts x 300 puts of 4 KiB", "order", 2, 256, &mut arguments);
    let mut arguments = arguments![2i32, w, src, dst, 262_144u64, 60i32, to, from, 4u32, 0u64, 0i32, report];
    run("2 contexts x 60 puts of 256 KiB", "order", 2, 256, &mut arguments);
    for storm in 0..3u64 {
        let base = 40 * storm;
        let mut arguments =
            arguments![2i32, w, src, dst, 8192u64, 40i32, to, from, 32u32, base, 11 * storm as i32, report];
        run("32 blocks x 40 puts of 8 KiB", "order", 32, 64, &mut arguments);
    }
    let me = rank as i32;
    let mut arguments = arguments![1i32, w, src, dst, 100_000u64, me, me, 22u32, 1u64, 5i32, report];
    run("a put to oneself", "put", 1, 256, &mut arguments);
    let mut arguments = arguments![w, src, dst, 65_536u64, 100i32, to, from, 6u32, 1000u64, report];
    run("100 puts and one signal", "strong", 1, 256, &mut arguments);
    let mut arguments = arguments![w, MISC as u64, to, from, 7u32, 3u64, report];
    run("values", "values", 1, 64, &mut arguments);
    for (by_counter, signal) in [(0i32, 8u32), (1, 9)] {
        let mut arguments =
            arguments![w, src, dst, MIB as u64, to, from, signal, 1u64, 0u32, 1u64, by_counter, report];
        run("local completion", "local", 1, 256, &mut arguments);
    }
    for round in 0..2 {
        let mut arguments = arguments![w, strict, src, dst, 4096u64, 65_536u64, to, from, 0u64, report];
        run("signals at an address", "va_signals", 1, 128, &mut arguments);
        let mut arguments = arguments![strict, 4096u64];
        run("the reset of a word", "reset_va", 1, 1, &mut arguments);
        let mut arguments = arguments![to, 10u32, report];
        run(&format!("an indexed signal with its reset, {round}"), "reset_indexed", 1, 1, &mut arguments);
    }
    let mut arguments = arguments![w, src, dst, dst + 8 * MIB as u64, MIB as u64, report];
    run("stores, a put on the rail, and the barrier of all", "hybrid", 1, 256, &mut arguments);
    if world.gpu.has("get") {
        for n in [8u64, 65_536, 4 * MIB as u64] {
            world.gpu.run("filling", "fill_bytes", 1, 512, &mut arguments![w, src, n, me, 77i32]);
            world.meet();
            let mut arguments = arguments![w, src, dst, n, to, 77i32, report];
            run(&format!("a get of {n} bytes"), "get", 1, 256, &mut arguments);
        }
    }
    if world.gpu.has("barriers") {
        for rail in 0..2i32 {
            run("barriers", "barriers", 1, 64, &mut arguments![rail, 20i32, report]);
        }
    }
    let count = rounds(count);
    let start = std::time::Instant::now();
    for first in (0..count).step_by(ROUNDS_AT_ONCE) {
        let part = ROUNDS_AT_ONCE.min(count - first);
        let mut arguments =
            arguments![w, src, dst, 4096u64, part as i32, to, from, 28u32, first as u64, report];
        run(&format!("rounds from {first} of {count}"), "rounds", 1, 256, &mut arguments);
    }
    if rank == 0 {
        eprintln!("{count} rounds with 4 KiB in {:?}", start.elapsed());
    }
    world.close();
}
