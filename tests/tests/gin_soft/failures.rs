//! Ranks that die, strangers that knock, drivers that fail.

use crate::harness::{MIB, Rank, V12, ranks, start};
use crate::memory::{Memory, pattern};
use crate::wire::{At, Wire, ok, warnings};
use cuda_vmm_emu::sys::{CUresult, Function};
use integration_tests::process::role;
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA, ResultCode};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

/// "Within seconds."
const SECONDS: Duration = Duration::from_secs(10);
const SHORT: (&str, &str) = ("NCCL_GIN_SOFT_TIMEOUT", "4");
const TCP: (&str, &str) = ("NCCL_GIN_SOFT_TCP", "1");

/// The last of three ranks is killed in the middle of traffic. The others learn of it and end.
fn killed(test: &str, environment: &[(&str, &str)]) {
    if let Some(role) = role(test) {
        survive_or_die(&role);
        return;
    }
    let (_folder, mut peers) = start(test, 3, environment);
    let victim = peers.pop().expect("three processes");
    // It kills itself with SIGKILL in the middle of its traffic: nothing is said, nothing is closed.
    let status = std::thread::spawn(move || victim.finish()).join();
    assert!(status.is_err(), "the victim ended in order");
    for peer in peers {
        peer.finish();
    }
}

fn survive_or_die(role: &str) {
    let (rank, count) = role.split_once('/').unwrap();
    let wire = Rank::from_environment(rank.parse().unwrap(), count.parse().unwrap()).connect();
    let window = Memory::device(&wire.here, 4 * MIB, true);
    let indexed = Memory::device(&wire.here, 2 * MIB, false);
    let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let target = wire.register(window, PTR_CUDA, 0);
    wire.here.barrier();
    let me = wire.here.rank;
    let send = |peer: usize| {
        wire.put_signal(0, At(target, 0), MIB, At(target, 2 * MIB as u64), peer, At(signals, 0), 1)
    };
    for _ in 0..20 {
        for peer in 0..wire.here.ranks {
            let request = send(peer);
            wire.wait(request);
        }
    }
    wire.here.barrier();
    if me == 2 {
        let _ = send(0);
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    // Rank 1 goes on sending to the victim: a request must fail. Rank 0 only waits for a signal: it must see an error all the same.
    let start = Instant::now();
    let failed = || {
        assert!(start.elapsed() < SECONDS, "rank {me} has not heard of the death within {SECONDS:?}");
        std::thread::sleep(Duration::from_millis(1));
        wire.has_error()
    };
    if me == 1 {
        let mut outcome = ResultCode::SUCCESS;
        while outcome == ResultCode::SUCCESS {
            let (code, request) = wire.try_put(0, At(target, 0), 64, At(target, 0), 2);
            outcome = code;
            let sent = Instant::now();
            while outcome == ResultCode::SUCCESS && sent.elapsed() < SECONDS {
                let (code, done) = wire.test(request);
                outcome = code;
                if done {
                    break;
                }
            }
            assert!(start.elapsed() < SECONDS, "requests to the dead are still accepted after {SECONDS:?}");
        }
        assert_eq!(outcome, ResultCode::REMOTE_ERROR);
    }
    while !failed() {}
    let before = warnings();
    for _ in 0..10_000 {
        assert_eq!(wire.progress(), ResultCode::REMOTE_ERROR);
    }
    assert!(before > 0 && warnings() - before < 10, "{before} warnings, then {}", warnings() - before);
    let (code, _) = wire.try_put(0, At(target, 0), 64, At(target, 0), 1 - me);
    assert_eq!(code, ResultCode::REMOTE_ERROR);
    let (code, handle) = wire.try_register(window, PTR_CUDA, 0);
    assert!(code != ResultCode::SUCCESS && handle.is_null());
    // Closing takes part in nothing.
    let start = Instant::now();
    let here = wire.close(&[signals, target]);
    assert!(start.elapsed() < Duration::from_secs(5), "closing took {:?}", start.elapsed());
    window.free(&here);
    indexed.free(&here);
    here.finish();
    crate::teardown::assert_no_threads_left();
}

#[test]
fn a_killed_rank() {
    killed("failures::a_killed_rank", &[]);
}

#[test]
fn a_killed_rank_over_tcp() {
    killed("failures::a_killed_rank_over_tcp", &[TCP]);
}

#[test]
fn a_killed_rank_in_version_12() {
    killed("failures::a_killed_rank_in_version_12", &[V12]);
}

/// While two ranks connect over TCP, a stranger knocks at each with noise, with a wrong token and with silence.
fn strangers(rank: Rank) {
    let mut wire = Wire::unconnected(rank, 14);
    let mut guests = Vec::new();
    let code = wire.try_connect(|handles| {
        for handle in handles.iter() {
            let port = u16::from_le_bytes([handle[12], handle[13]]);
            let mut noise = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            noise.write_all(&[0x5a; 100]).unwrap();
            let silent = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            // A hello as it should be, but for the token.
            let mut wrong = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            let mut hello = Vec::new();
            hello.extend_from_slice(b"gsct");
            hello.extend_from_slice(&[1, 0, 1, 0]);
            hello.extend_from_slice(&32u32.to_le_bytes());
            hello.extend_from_slice(&0u32.to_le_bytes());
            hello.extend_from_slice(&[0xee; 16]);
            for word in [1u32, 2, 2, 0] {
                hello.extend_from_slice(&word.to_le_bytes());
            }
            wrong.write_all(&hello).unwrap();
            guests.extend([noise, silent, wrong]);
        }
    });
    ok(code);
    // None of them was answered.
    for mut guest in guests {
        guest.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut answer = Vec::new();
        let _ = guest.read_to_end(&mut answer);
        assert!(answer.is_empty(), "a stranger was answered");
    }
    wire.here.barrier();
    wire.close(&[]).finish();
}

#[test]
fn strangers_are_turned_away() {
    ranks("failures::strangers_are_turned_away", 2, &[TCP], strangers);
}

/// A rank that does not know the token of the listen handle gets nowhere, and nobody hangs.
fn impostor(rank: Rank) {
    let mut wire = Wire::unconnected(rank, 14);
    let code = wire.try_connect(|handles| {
        for handle in handles {
            handle[20] ^= 1;
        }
    });
    assert_eq!(code, ResultCode::REMOTE_ERROR);
    wire.here.barrier();
    wire.close(&[]).finish();
    crate::teardown::assert_no_threads_left();
}

#[test]
fn an_impostor_is_refused() {
    ranks("failures::an_impostor_is_refused", 2, &[SHORT], impostor);
}

#[test]
fn an_impostor_is_refused_over_tcp() {
    ranks("failures::an_impostor_is_refused_over_tcp", 2, &[SHORT, TCP], impostor);
}

/// One rank cannot make its part of a registration: all get an error, and all can go on.
fn failed_registration(rank: Rank) {
    let wire = rank.connect();
    let private = Memory::device(&wire.here, 2 * MIB, false);
    let window = Memory::device(&wire.here, 2 * MIB, true);
    if wire.here.rank == 1 {
        // Staging memory for what cannot be shared.
        let faults = wire.here.emulator.faults();
        faults.fail_once(Function::cuMemHostRegister, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    wire.here.barrier();
    let (code, handle) = wire.try_register(private, PTR_CUDA, 0);
    assert_ne!(code, ResultCode::SUCCESS);
    assert!(handle.is_null());
    // Memory that cannot be mapped elsewhere is no error: it is staged.
    if wire.here.rank == 0 {
        let faults = wire.here.emulator.faults();
        faults.fail_once(Function::cuMemImportFromShareableHandle, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    wire.here.barrier();
    let target = wire.register(window, PTR_CUDA, 0);
    window.fill(0, 1000, pattern(wire.here.rank, 1));
    let to = 1 - wire.here.rank;
    let request = wire.put(0, At(target, 0), 1000, At(target, MIB as u64), to);
    wire.wait(request);
    wire.here.barrier();
    window.check(MIB, 1000, "a put after a failed registration", pattern(to, 1));
    wire.here.barrier();
    let here = wire.close(&[target]);
    private.free(&here);
    window.free(&here);
    here.finish();
}

#[test]
fn a_registration_that_fails_on_one_rank() {
    ranks("failures::a_registration_that_fails_on_one_rank", 2, &[], failed_registration);
}

/// A copy fails on one rank: it and the others get an error, and all end.
fn failed_copy(rank: Rank) {
    let wire = rank.connect();
    let window = Memory::device(&wire.here, 2 * MIB, true);
    let target = wire.register(window, PTR_CUDA, 0);
    if wire.here.rank == 1 {
        let faults = wire.here.emulator.faults();
        for function in [Function::cuMemcpyAsync, Function::cuMemcpyBatchAsync_v2] {
            faults.fail_once(function, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }
    wire.here.barrier();
    let start = Instant::now();
    let late = || assert!(start.elapsed() < SECONDS, "no error within {SECONDS:?}");
    if wire.here.rank == 0 {
        let request = wire.put(0, At(target, 0), 1000, At(target, MIB as u64), 1);
        let mut outcome = (ResultCode::SUCCESS, false);
        while outcome == (ResultCode::SUCCESS, false) {
            outcome = wire.test(request);
            late();
        }
        assert_eq!(outcome.0, ResultCode::REMOTE_ERROR);
    }
    while !wire.has_error() {
        late();
    }
    wire.here.barrier();
    let here = wire.close(&[target]);
    window.free(&here);
    here.finish();
}

#[test]
fn a_copy_that_fails() {
    ranks("failures::a_copy_that_fails", 2, &[], failed_copy);
}

#[test]
fn a_copy_that_fails_over_tcp() {
    // The payload is a value in a frame there, or staged: the copy is the receiver's all the same.
    ranks("failures::a_copy_that_fails_over_tcp", 2, &[TCP], failed_copy);
}
