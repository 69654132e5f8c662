//! A rank that is killed: the others get an error of their communicator within seconds, and end.

use crate::arguments;
use crate::board::Board;
use crate::suite::with_dev;
use crate::world::{DST, SRC, Shape, World, rank_of, start};
use nccl_gin::sys::ncclResult_t;
use std::time::{Duration, Instant};

const SECONDS: Duration = Duration::from_secs(15);

#[test]
fn a_killed_rank() {
    killed("failures::a_killed_rank", &[]);
}

#[test]
fn a_killed_rank_over_tcp() {
    killed("failures::a_killed_rank_over_tcp", &[("NCCL_GIN_SOFT_TCP", "1")]);
}

fn killed(test: &str, environment: &[(&str, &str)]) {
    // 2.29.7 does not look at what tells it of errors.
    let shape = Shape { since: 23000, ..Shape::new(2, 2) };
    if let Some((rank, board)) = rank_of(test) {
        return survive_or_die(rank, shape, board);
    }
    let Some((_folder, mut peers)) = start(test, shape, environment) else { return };
    let victim = peers.pop().expect("two processes");
    let status = std::thread::spawn(move || victim.finish()).join();
    assert!(status.is_err(), "the victim ended in order");
    for peer in peers {
        peer.finish();
    }
}

fn survive_or_die(rank: usize, shape: Shape, board: Board) {
    let world = World::new(rank, shape, board);
    let (to, from) = world.neighbours();
    let (w, report) = (world.window.as_raw() as u64, world.gpu.report());
    let mut arguments =
        arguments![0i32, w, SRC as u64, DST as u64, 4096u64, to, from, 0u32, 1u64, 3i32, report];
    world.gpu.run("a put", "put", 1, 256, &mut with_dev(&world, &mut arguments));
    world.meet();
    if rank == 1 {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    // A kernel waits for a signal of the dead, until its own deadline: it must not be in the way of the error.
    let mut arguments = arguments![1u32, 1u64, 4_000_000_000u64, report];
    world.gpu.launch("wait_in_vain", 1, 1, &mut with_dev(&world, &mut arguments));
    let start = Instant::now();
    loop {
        let mut code = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive, and the output a local.
        let asked = unsafe { world.nccl.ncclCommGetAsyncError(world.comm.as_raw(), &mut code) }.unwrap();
        assert_eq!(asked, ncclResult_t::ncclSuccess);
        if code != ncclResult_t::ncclSuccess && code != ncclResult_t::ncclInProgress {
            eprintln!("the communicator's error after {:?}: {code}", start.elapsed());
            assert_eq!(code, ncclResult_t::ncclRemoteError);
            break;
        }
        assert!(start.elapsed() < SECONDS, "no error of the communicator within {SECONDS:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let [_, late, _] = world.gpu.take_report("the wait in vain");
    assert_eq!(late, 1);
    let start = Instant::now();
    world.comm.abort().unwrap();
    assert!(start.elapsed() < SECONDS, "aborting took {:?}", start.elapsed());
    let left = std::fs::read_dir("/proc/self/task").unwrap().flatten().any(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("gin-soft"))
    });
    assert!(!left, "a thread of the plugin is left");
}
