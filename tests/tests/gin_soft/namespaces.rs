//! Two network namespaces with a cable between them: two hosts, as far as sockets can tell.

use crate::board::Board;
use crate::harness::{MIB, Rank, start};
use crate::memory::{Memory, pattern};
use crate::wire::At;
use integration_tests::gpu::skipped;
use integration_tests::process::{eventually, role};
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const NAMESPACE: &str = "GIN_TEST_NAMESPACE";

/// A process that keeps a network namespace alive.
struct Namespace(Child);

impl Namespace {
    fn new() -> Result<Self, String> {
        let own = std::fs::read_link("/proc/self/ns/net").map_err(|error| error.to_string())?;
        let child = Command::new("unshare")
            .args(["--net", "sleep", "100"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let mut namespace = Self(child);
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            if let Ok(Some(status)) = namespace.0.try_wait() {
                return Err(format!("a network namespace is not permitted here ({status})"));
            }
            if std::fs::read_link(namespace.path()).is_ok_and(|link| link != own) {
                return Ok(namespace);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err("no network namespace came within 5 s".into())
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    fn run(&self, command: &[&str]) -> Result<(), String> {
        let inside = ["nsenter".to_owned(), format!("--net={}", self.path())];
        let words: Vec<&str> = inside.iter().map(String::as_str).chain(command.iter().copied()).collect();
        run(&words)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn run(command: &[&str]) -> Result<(), String> {
    let output = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", command[0]))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", command.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Two namespaces and the cable.
fn cable() -> Result<[Namespace; 2], String> {
    let ends = [Namespace::new()?, Namespace::new()?];
    let ids = [ends[0].0.id().to_string(), ends[1].0.id().to_string()];
    run(&[
        "ip", "link", "add", "gin0", "netns", &ids[0], "type", "veth", "peer", "name", "gin1", "netns",
        &ids[1],
    ])?;
    for (index, end) in ends.iter().enumerate() {
        let (address, name) = (format!("10.213.77.{}/24", index + 1), format!("gin{index}"));
        end.run(&["ip", "address", "add", &address, "dev", &name])?;
        end.run(&["ip", "link", "set", &name, "up"])?;
    }
    Ok(ends)
}

#[test]
fn two_hosts() {
    const TEST: &str = "namespaces::two_hosts";
    if let Some(role) = role(TEST) {
        one_host(&role);
        return;
    }
    let ends = match cable() {
        Ok(ends) => ends,
        Err(reason) => return skipped(TEST, &reason),
    };
    let paths = [ends[0].path(), ends[1].path()];
    let list = paths.join(",");
    let (_folder, peers) = start(TEST, 2, &[(NAMESPACE, &list)]);
    for peer in peers {
        peer.finish();
    }
    // And with the cable cut in the middle of it.
    let (folder, peers) = start(TEST, 2, &[(NAMESPACE, &list), ("GIN_TEST_CUT", "1")]);
    let board = Board::open(&folder.path().join("board"));
    eventually("the silence before the cut", || board.word(0).load(Ordering::Acquire) == 2);
    ends[0].run(&["ip", "link", "set", "gin0", "down"]).unwrap();
    for peer in peers {
        peer.finish();
    }
}

fn one_host(role: &str) {
    let (rank, count) = role.split_once('/').unwrap();
    let rank: usize = rank.parse().unwrap();
    let list = std::env::var(NAMESPACE).unwrap();
    let file = std::fs::File::open(list.split(',').nth(rank).unwrap()).unwrap();
    let kind = rustix::thread::LinkNameSpaceType::Network;
    // Of this thread, and of all that it starts: the plugin's.
    rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(kind)).unwrap();

    let wire = Rank::from_environment(rank, count.parse().unwrap()).connect();
    let window = Memory::device(&wire.here, 8 * MIB, true);
    let indexed = Memory::device(&wire.here, 2 * MIB, false);
    let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let target = wire.register(window, PTR_CUDA, 0);
    let peer = 1 - rank;
    for round in 1..=10 {
        window.fill(0, 3 * MIB, pattern(rank, round));
        let to = At(target, 4 * MIB as u64);
        let request = wire.put_signal(0, At(target, 0), 3 * MIB, to, peer, At(signals, 0), 1);
        wire.await_word(indexed, 0, round as u64);
        window.check(4 * MIB, 3 * MIB, "a put to another host", pattern(peer, round));
        wire.wait(request);
        wire.here.barrier();
    }
    if std::env::var_os("GIN_TEST_CUT").is_some() {
        // Nothing is under way: the silence alone must be noticed.
        wire.here.board.word(0).fetch_add(1, Ordering::AcqRel);
        let start = Instant::now();
        while !wire.has_error() {
            assert!(start.elapsed() < Duration::from_secs(25), "the cut was not noticed within 25 s");
            std::thread::sleep(Duration::from_millis(10));
        }
        let start = Instant::now();
        wire.close(&[signals, target]);
        assert!(start.elapsed() < Duration::from_secs(5), "closing took {:?}", start.elapsed());
        return;
    }
    let here = wire.close(&[signals, target]);
    window.free(&here);
    indexed.free(&here);
    here.finish();
}
