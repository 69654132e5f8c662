//! What the runtime promises of packets, by kernels of a few lines: they are late, and come in any order, but for what orders them.

use super::super::Round;
use super::super::machine::Outcome;
use super::kernels::{Kernels, compiler};
use super::packets::{LIMITS, case};
use super::ranks::{Call, Ranks, Tensors};
use crate::jit::Program;
use crate::layout::Placement;

/// In place of a combine: the digest of a call says what its kernel does. Rank 0 sends, rank 1 looks.
const KERNEL: &str = r#"
#include "ops/packets/back.cuh"

extern "C" __global__ void deepep_packet_combine(const __grid_constant__ PacketCombineParams q) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    Back b(q);
    Vec16 *one = b.packets.back(1, 0, 0), *two = one + 1;
    u64* word = b.begun().cell(1, 0, 0);
    const auto send = [](Vec16* to, u32 value) { arch::st_packet(to, {value, value, value, value}); };
    const auto wait = [](const Vec16* at, u32 value) {
        while (arch::ld_packet(at).x != value) {}
    };
    const auto there = [](const Vec16* at, u32 value) {
        if (arch::ld_packet(at).x != value) fiber_fail("an old packet", value);
    };
    switch (b.p.call) {
        case SEND_TWO: send(one, 1), send(two, 1); break;
        case SEND_WITH_FENCE: send(one, 1), arch::fence_sys(), send(two, 1); break;
        case LOOK_AT_BOTH: wait(two, 1), there(one, 1); break;
        case SEND_AND_RELEASE: send(one, 1), arch::st_release_sys(word, 1); break;
        case LOOK_BEHIND_WORD:
            while (arch::ld_acquire_sys(word) != 1) {}
            there(one, 1);
            break;
        case SEND_ONE: send(one, 1); return;
        case SEND_OTHER: send(two, 1); break;
        case SEND_TWICE: send(one, 1), send(one, 2); break;
        case LOOK_OFTEN:
            wait(one, 2);
            for (u32 i = 0; i < 1000; i++) there(one, 2);
            break;
        case SEND_AND_LOOK: send(one, 1), there(one, 1), send(two, 1); break;
    }
    // At its end all would be there.
    if (b.me == 0)
        for (u32 i = 0; i < 500; i++) fiber_yield();
}
"#;

const NAMES: [&str; 10] = [
    "SEND_TWO",
    "SEND_WITH_FENCE",
    "LOOK_AT_BOTH",
    "SEND_AND_RELEASE",
    "LOOK_BEHIND_WORD",
    "SEND_ONE",
    "SEND_OTHER",
    "SEND_TWICE",
    "LOOK_OFTEN",
    "SEND_AND_LOOK",
];

/// How many of 200 runs see an old packet.
fn old(kernels: &Kernels, sends: &[&str], looks: &[&str]) -> Outcome<usize> {
    let case = case(2, 1, Placement::Plain);
    let round = Round::drawn(&case, 1);
    let tensors: Vec<Tensors> = (0..2).map(|r| Tensors::new(&case, &round, r)).collect();
    let mut count = 0;
    for seed in 0..200 {
        let mut ranks = Ranks::new(&case, LIMITS, 0)?;
        let mut calls: Vec<Vec<Call>> = vec![Vec::new(), Vec::new()];
        for (r, names) in [sends, looks].into_iter().enumerate() {
            for name in names {
                ranks.digests[r] = NAMES.iter().position(|n| n == name).ok_or("no such kernel")? as u32;
                let (program, mut shape, arguments) = ranks.combine(r, &tensors[r], 0, 0);
                (shape.blocks, shape.threads) = (1, 32);
                calls[r].push((program, shape, arguments));
            }
        }
        match ranks.run(kernels, seed, &calls) {
            Ok(()) => {}
            Err(error) if error.to_string().contains("an old packet") => count += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// Packets of a thread come in any order, but not past a fence, a release or the end of their kernel, and not past each other at one address; a thread sees its
/// own.
#[test]
fn packets_are_late_on_cpus() {
    if !compiler("packets_are_late_on_cpus") {
        return;
    }
    let numbers: String =
        NAMES.iter().enumerate().map(|(n, name)| format!("constexpr u32 {name} = {n};\n")).collect();
    let kernel = KERNEL.replacen("\n\n", &format!("\n\n{numbers}\n"), 1);
    let change = |name: &str, text: String| if name == "kernel.cu" { kernel.clone() } else { text };
    let program = Program::PacketCombine { ranks: 2, placement: Placement::Plain, sizes: None };
    let kernels = Kernels::build(&[program], &change).unwrap();
    let old = |sends: &[&str], looks: &[&str]| old(&kernels, sends, looks).unwrap();
    let seen = old(&["SEND_TWO"], &["LOOK_AT_BOTH"]);
    assert!(seen > 20, "{seen} of 200");
    assert_eq!(old(&["SEND_WITH_FENCE"], &["LOOK_AT_BOTH"]), 0, "a fence");
    assert_eq!(old(&["SEND_AND_RELEASE"], &["LOOK_BEHIND_WORD"]), 0, "a release");
    assert_eq!(old(&["SEND_ONE", "SEND_OTHER"], &["LOOK_AT_BOTH"]), 0, "the end of a kernel");
    assert_eq!(old(&["SEND_TWICE"], &["LOOK_OFTEN"]), 0, "one address");
    assert_eq!(old(&["SEND_AND_LOOK"], &["LOOK_AT_BOTH"]), 0, "a packet that its thread has seen");
}
