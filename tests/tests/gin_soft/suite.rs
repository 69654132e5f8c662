//! Every operation, over every way that payload takes, through every version of the table.

use crate::harness::{DELAYED, MIB, Rank, V12, V13, ranks};
use crate::memory::{Memory, pattern};
use crate::wire::{At, NOWHERE, Wire, ok};
use cuda_vmm_emu::sys::{CUmemLocation, CUmemLocationType};
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA, PTR_HOST, ResultCode, SIGNAL_INC};

const STAGED: (&str, &str) = ("NCCL_GIN_SOFT_STAGE", "1");
const TCP: (&str, &str) = ("NCCL_GIN_SOFT_TCP", "1");

#[test]
fn all_operations_inside_a_host() {
    ranks("suite::all_operations_inside_a_host", 2, &[], all_operations);
}

#[test]
fn all_operations_with_delays() {
    ranks("suite::all_operations_with_delays", 4, &[DELAYED], all_operations);
}

#[test]
fn all_operations_staged() {
    ranks("suite::all_operations_staged", 2, &[STAGED, DELAYED], all_operations);
}

#[test]
fn all_operations_over_tcp() {
    ranks("suite::all_operations_over_tcp", 3, &[TCP], all_operations);
}

#[test]
fn all_operations_over_tcp_with_delays() {
    ranks("suite::all_operations_over_tcp_with_delays", 2, &[TCP, DELAYED], all_operations);
}

#[test]
fn all_operations_through_version_13() {
    ranks("suite::all_operations_through_version_13", 2, &[V13], all_operations);
}

#[test]
fn all_operations_through_version_12() {
    ranks("suite::all_operations_through_version_12", 2, &[V12], all_operations);
}

/// Memory of all kinds, registered as NCCL does.
struct Registered {
    window: (Memory, *mut std::ffi::c_void),
    private: (Memory, *mut std::ffi::c_void),
    signals: (Memory, *mut std::ffi::c_void),
    values: (Memory, *mut std::ffi::c_void),
    host: (Memory, *mut std::ffi::c_void),
}

fn all_operations(rank: Rank) {
    let wire = rank.connect();
    let register = |memory, kind, flags| (memory, wire.register(memory, kind, flags));
    let all = Registered {
        signals: register(
            Memory::device(&wire.here, 2 * MIB, false),
            PTR_CUDA,
            MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET,
        ),
        values: register(Memory::host(4096), PTR_HOST, 0),
        window: register(Memory::device(&wire.here, 24 * MIB, true), PTR_CUDA, 0),
        private: register(Memory::device(&wire.here, 8 * MIB, false), PTR_CUDA, MR_FORCE_ORDER),
        host: register(Memory::host(3 * MIB), PTR_HOST, MR_FORCE_ORDER),
    };
    wire.here.barrier();
    sizes(&wire, &all);
    full_ring(&wire, &all);
    values(&wire, &all);
    signals(&wire, &all);
    gets(&wire, &all);
    to_oneself(&wire, &all);
    refusals(&wire, &all);
    assert!(!wire.has_error());
    wire.here.barrier();
    let here = wire.close(&[all.values.1, all.host.1, all.signals.1, all.private.1, all.window.1]);
    for memory in [all.window.0, all.private.0, all.signals.0] {
        memory.free(&here);
    }
    here.finish();
}

fn neighbours(wire: &Wire) -> (usize, usize) {
    let (rank, ranks) = (wire.here.rank, wire.here.ranks);
    ((rank + 1) % ranks, (rank + ranks - 1) % ranks)
}

/// Payload of odd sizes from memory of all kinds: complete when its signal is seen.
fn sizes(wire: &Wire, all: &Registered) {
    let (to, from) = neighbours(wire);
    let mut expected = [0u64; 2];
    for (kind, source) in [all.window, all.private, all.host].into_iter().enumerate() {
        for size in [1, 8, 63, 64, 65, 100, 4096, 70_000, MIB, MIB + 3, 5 * MIB, 7 * MIB] {
            if size > source.0.size {
                continue;
            }
            let salt = size + kind;
            source.0.fill(0, size, pattern(wire.here.rank, salt));
            let context = size & 1;
            let word = At(all.signals.1, 8 * context as u64);
            let request = wire.put_signal_as(
                context as i32,
                At(source.1, 0),
                size,
                At(all.window.1, 12 * MIB as u64),
                to,
                word,
                99,
                SIGNAL_INC,
            );
            expected[context] += 1;
            wire.await_word(all.signals.0, 8 * context, expected[context]);
            all.window.0.check(12 * MIB, size, "a put", pattern(from, salt));
            wire.wait(request);
            wire.here.barrier();
        }
    }
}

/// More small puts than a ring has places, of all kinds, and one strong signal behind them.
fn full_ring(wire: &Wire, all: &Registered) {
    const COUNT: usize = 3000;
    let (to, from) = neighbours(wire);
    let stamp = |rank: usize, context: usize, index: usize| (rank << 40 | context << 32 | index) as u64;
    for context in 0..2 {
        for index in 0..COUNT {
            let value = stamp(wire.here.rank, context, index);
            all.private.0.store(8 * index, value);
            all.window.0.store(8 * index, value);
        }
        let mut requests = Vec::new();
        for index in 0..COUNT {
            if index % 3 == 0 && index >= 512 * 3 {
                // NCCL writes a value anew only when the put before it is done.
                wire.wait(requests[index - 512 * 3]);
            }
            let to_place = At(all.window.1, (20 * MIB + 8 * index) as u64);
            let (source, offset) = match index % 3 {
                0 => {
                    all.values.0.store(8 * (index % 512), stamp(wire.here.rank, context, index));
                    (all.values.1, 8 * (index % 512))
                }
                1 => (all.window.1, 8 * index),
                _ => (all.private.1, 8 * index),
            };
            requests.push(wire.put(context as i32, At(source, offset as u64), 8, to_place, to));
        }
        let word = 8 * (8 + context);
        requests.push(wire.signal(context as i32, to, At(all.signals.1, word as u64), 77));
        wire.await_word(all.signals.0, word, 77);
        for index in 0..COUNT {
            let found = all.window.0.load(20 * MIB + 8 * index);
            assert_eq!(found, stamp(from, context, index), "put {index} of context {context}");
        }
        wire.wait_all(requests);
        wire.here.barrier();
    }
}

/// Values of 8, 4, 2 and 1 bytes at odd places.
fn values(wire: &Wire, all: &Registered) {
    let (to, from) = neighbours(wire);
    let base = 19 * MIB;
    all.values.0.fill(0, 64, pattern(wire.here.rank, 5));
    let mut requests = Vec::new();
    let mut places = Vec::new();
    for (index, (offset, size)) in
        [(0, 8), (8, 4), (14, 2), (17, 1), (21, 8), (33, 4)].into_iter().enumerate()
    {
        let source = At(all.values.1, 8 * index as u64);
        requests.push(wire.put(1, source, size, At(all.window.1, (base + offset) as u64), to));
        places.push((offset, size, 8 * index));
    }
    requests.push(wire.signal(1, to, At(all.signals.1, 8 * 20), 3));
    wire.await_word(all.signals.0, 8 * 20, 3);
    for (offset, size, source) in places {
        let sent = pattern(from, 5);
        all.window.0.check(base + offset, size, "a value", |index| sent(source + index));
    }
    wire.wait_all(requests);
    wire.here.barrier();
}

/// Everybody to everybody: indexed signals, words of a window, words that the CPU sees; and a word that its owner resets.
fn signals(wire: &Wire, all: &Registered) {
    const ROUNDS: u64 = 100;
    let ranks = wire.here.ranks as u64;
    let host_word = 2 * MIB;
    let window_word = 23 * MIB;
    all.host.0.store(host_word, 1000);
    all.window.0.store(window_word, 0);
    wire.here.barrier();
    let mut requests = Vec::new();
    for round in 0..ROUNDS {
        let context = (round & 1) as i32;
        for peer in 0..wire.here.ranks {
            requests.push(wire.signal(context, peer, At(all.signals.1, 8 * (16 + (round & 1))), 2));
            requests.push(wire.signal(context, peer, At(all.window.1, window_word as u64), 3));
            if round % 10 == 0 {
                let word = At(all.host.1, host_word as u64);
                requests.push(wire.put_signal_as(context, NOWHERE, 0, NOWHERE, peer, word, 50, SIGNAL_INC));
            }
        }
    }
    wire.wait_all(requests);
    wire.here.barrier();
    assert_eq!(all.host.0.load(host_word), 1000 + ROUNDS / 10 * ranks);
    assert_eq!(all.signals.0.load(8 * 16), ROUNDS * ranks);
    assert_eq!(all.signals.0.load(8 * 17), ROUNDS * ranks);
    assert_eq!(all.window.0.load(window_word), 3 * ROUNDS * ranks);
    all.window.0.store(window_word, 0);
    wire.here.barrier();
    let (to, _) = neighbours(wire);
    let request = wire.signal(0, to, At(all.window.1, window_word as u64), 5);
    wire.await_word(all.window.0, window_word, 5);
    assert_eq!(all.window.0.load(window_word), 5, "added to what the owner had reset it to");
    wire.wait(request);
    wire.here.barrier();
}

fn gets(wire: &Wire, all: &Registered) {
    if !wire.has_gets() {
        return;
    }
    let (_, from) = neighbours(wire);
    for (kind, source) in [all.window, all.private, all.host].into_iter().enumerate() {
        source.0.fill(0, 3 * MIB, pattern(wire.here.rank, kind));
        wire.here.barrier();
        let mut requests = Vec::new();
        let places = [(100, 8, 10 * MIB), (500, 99_000, 11 * MIB), (MIB, 2 * MIB - 1, 12 * MIB)];
        for (offset, size, to) in places {
            let request = wire.get(1, At(source.1, offset as u64), size, At(all.window.1, to as u64), from);
            requests.push(request);
        }
        wire.wait_all(requests);
        let flushed = wire.flush(1, all.signals.1, wire.here.rank);
        if !flushed.is_null() {
            wire.wait(flushed);
        }
        for (offset, size, to) in places {
            let theirs = pattern(from, kind);
            all.window.0.check(to, size, "a get", |index| theirs(offset + index));
        }
        wire.here.barrier();
    }
}

fn to_oneself(wire: &Wire, all: &Registered) {
    let me = wire.here.rank;
    for (kind, source) in [all.window, all.private, all.host].into_iter().enumerate() {
        source.0.fill(0, 100_000, pattern(me, 30 + kind));
        let word = At(all.signals.1, 8 * (30 + kind as u64));
        let to = At(all.window.1, 16 * MIB as u64);
        let request = wire.put_signal(0, At(source.1, 0), 100_000, to, me, word, 4);
        wire.await_word(all.signals.0, 8 * (30 + kind), 4);
        all.window.0.check(16 * MIB, 100_000, "a put to oneself", pattern(me, 30 + kind));
        wire.wait(request);
    }
    if wire.has_gets() {
        let request = wire.get(0, At(all.private.1, 10), 1000, At(all.window.1, 17 * MIB as u64), me);
        wire.wait(request);
        let mine = pattern(me, 31);
        all.window.0.check(17 * MIB, 1000, "a get from oneself", |index| mine(10 + index));
    }
    wire.here.barrier();
}

/// What is wrong is refused before anything is sent, and nothing else suffers.
fn refusals(wire: &Wire, all: &Registered) {
    let (to, _) = neighbours(wire);
    let end = all.window.0.size as u64;
    let at = |offset| At(all.window.1, offset);
    let refused = |from, size, to_place, rank| {
        let (code, request) = wire.try_put(0, from, size, to_place, rank);
        assert_eq!(code, ResultCode::INVALID_ARGUMENT);
        assert!(request.is_null());
    };
    refused(at(0), 8, at(0), wire.here.ranks);
    refused(at(end - 4), 8, at(0), to);
    refused(at(0), 8, at(end - 4), to);
    refused(at(0), 8, at(u64::MAX), to);
    refused(NOWHERE, 8, at(0), to);
    refused(at(0), 8, At(9999 as *mut _, 0), to);
    let (code, _) = wire.test(0x77 as *mut _);
    assert_eq!(code, ResultCode::INVALID_ARGUMENT);
    // A put of nothing is done at once.
    let (code, request) = wire.try_put(0, NOWHERE, 0, NOWHERE, to);
    ok(code);
    wire.wait(request);
    assert!(!wire.has_error());
    wire.here.barrier();
}

fn location(type_: CUmemLocationType, id: i32) -> CUmemLocation {
    CUmemLocation { type_, id }
}

/// A window of device and host memory, as one registration and as the two that NCCL makes of it.
fn segments(rank: Rank) {
    let wire = rank.connect();
    let parts = [
        (2 * MIB, location(CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, wire.here.device())),
        (4 * MIB, location(CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0)),
    ];
    let memory = Memory::segments(&wire.here, &parts, true);
    let device = Memory { base: memory.base, size: 2 * MIB };
    let host = Memory { base: memory.base + 2 * MIB as u64, size: 4 * MIB };
    // A part of it, which begins and ends inside an allocation.
    let middle = Memory { base: memory.base + 4096, size: 5 * MIB };
    let signals = Memory::device(&wire.here, 2 * MIB, false);
    let signal = wire.register(signals, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let handles = [
        wire.register(device, PTR_CUDA, 0),
        wire.register(host, PTR_HOST, 0),
        wire.register(middle, PTR_CUDA, 0),
    ];
    let (to, from) = neighbours(&wire);
    let exchanges = [
        // From the device's segment to the host's, back, and across the border.
        (handles[0], device, 0, handles[1], host, 0),
        (handles[1], host, 3 * MIB, handles[0], device, MIB),
        (handles[2], middle, MIB, handles[2], middle, 3 * MIB),
    ];
    for (index, (source, from_memory, offset, target, to_memory, at)) in exchanges.into_iter().enumerate() {
        let size = MIB - 8;
        from_memory.fill(offset, size, pattern(wire.here.rank, index));
        wire.here.barrier();
        let word = At(signal, 8 * index as u64);
        let request = wire.put_signal(0, At(source, offset as u64), size, At(target, at as u64), to, word, 1);
        wire.await_word(signals, 8 * index, 1);
        to_memory.check(at, size, "a put between segments", pattern(from, index));
        wire.wait(request);
        // Signals in the host's segment.
        to_memory.store(to_memory.size - 8, 0);
        wire.here.barrier();
        let request = wire.signal(1, to, At(target, to_memory.size as u64 - 8), 6);
        wire.await_word(to_memory, to_memory.size - 8, 6);
        wire.wait(request);
        wire.here.barrier();
    }
    let here = wire.close(&[signal, handles[0], handles[1], handles[2]]);
    memory.free(&here);
    signals.free(&here);
    here.finish();
}

#[test]
fn windows_of_several_segments() {
    ranks("suite::windows_of_several_segments", 2, &[], segments);
}

#[test]
fn windows_of_several_segments_over_tcp() {
    ranks("suite::windows_of_several_segments_over_tcp", 2, &[TCP, DELAYED], segments);
}
