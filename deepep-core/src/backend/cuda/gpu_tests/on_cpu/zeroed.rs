//! Slots of packets are zeroed in turn, so that no tag that comes back after 65535 calls is taken for a new one.

use super::super::super::grid::Limits;
use super::super::Round;
use super::super::input::Case;
use super::super::machine::Outcome;
use super::kernels::{Kernels, compiler};
use super::packets::{LIMITS, case, over, packet_programs};
use super::ranks::{Call, Ranks, Tensors};
use crate::layout::{GROUP_PACKETS, PACKET_BYTES, Placement, packet_groups};

const RANKS: usize = 3;
/// Token whose slots are zeroed in the calls of these epochs, of both parities.
const TOKEN: usize = 5;
const EPOCHS: [u32; 2] = [2 * TOKEN as u32, 2 * (256 + TOKEN as u32) + 1];
/// What slots are full of before.
const OLD: u8 = 0xff;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packet {
    Old,
    Zero,
    /// Of this call.
    New,
}

fn packet(bytes: &[u8], epoch: u32) -> Outcome<Packet> {
    let tag = 1 + epoch % 65535;
    match bytes {
        _ if bytes.iter().all(|&b| b == OLD) => Ok(Packet::Old),
        _ if bytes.iter().all(|&b| b == 0) => Ok(Packet::Zero),
        _ if u32::from(u16::from_le_bytes([bytes[14], bytes[15]])) == tag => Ok(Packet::New),
        _ => Err(format!("neither old nor zero nor of epoch {epoch}: {bytes:x?}").into()),
    }
}

/// Looks at `[2 parities][slots][tokens][stride]`: `sent(slot, token)` says how many packets of a token were sent. Nothing but the slots of `TOKEN` is zeroed, and
/// those whole. `ignored`: nobody waited for packets, so that they may come behind the zeroes; says how many did.
fn look(
    area: &[u8],
    [slots, tokens, stride]: [usize; 3],
    epoch: u32,
    ignored: bool,
    sent: impl Fn(usize, usize) -> usize,
) -> Outcome<usize> {
    let mut behind = 0;
    for (n, bytes) in area.chunks_exact(PACKET_BYTES).enumerate() {
        let (number, k) = (n / (stride / PACKET_BYTES), n % (stride / PACKET_BYTES));
        let (parity, slot, token) = (number / tokens / slots, number / tokens % slots, number % tokens);
        let sent = parity == epoch as usize % 2 && k < sent(slot, token);
        let want = match parity == epoch as usize % 2 && token == TOKEN {
            true => Packet::Zero,
            false if sent => Packet::New,
            false => Packet::Old,
        };
        match packet(bytes, epoch).map_err(|e| format!("slot {slot}, token {token}, packet {k}: {e}"))? {
            Packet::New if want == Packet::Zero && sent && ignored => behind += 1,
            found if found == want => {}
            found => {
                let at = format!("parity {parity}, slot {slot}, token {token}, packet {k}");
                return Err(format!("{at} is {found:?}, not {want:?}").into());
            }
        }
    }
    Ok(behind)
}

/// What is to be said of the slots of rows after one dispatch, and after one combine, if they were full before. Slots have the size of the largest case's rows.
fn after_one_call(
    kernels: &Kernels,
    [largest, case]: [&Case; 2],
    limits: Limits,
    epoch: u32,
) -> Outcome<[Outcome<usize>; 2]> {
    let mut round = Round::drawn(case, u64::from(epoch));
    // One of the tokens goes to one rank only, one to all, and one rank has fewer.
    for (rank, experts) in [(0, [8, 9, -1, -1]), (2, [0, 8, 16, 17])] {
        round.inputs[rank].experts[TOKEN * case.topk..][..4].copy_from_slice(&experts);
    }
    let round = Round::new(case, round.inputs, 1);
    let over = over(case, &round.received).is_some();
    let mut ranks = Ranks::new(largest, limits, epoch - 1)?;
    ranks.cases = vec![case; RANKS];
    ranks.plan(&[case.dispatch_shape(); RANKS])?;
    let p = ranks.packets()?;
    let rows = [RANKS, case.max_tokens, p.row_stride];
    let back = [RANKS - 1, case.max_tokens, p.back_stride];
    let bytes = |[slots, tokens, stride]: [usize; 3]| 2 * slots * tokens * stride;
    for r in 0..RANKS {
        ranks.part(r, p.rows, bytes(rows)).fill(OLD);
        ranks.part(r, p.back, bytes(back)).fill(OLD);
    }
    let tensors: Vec<Tensors> = (0..RANKS).map(|r| Tensors::new(case, &round, r)).collect();
    let calls: Vec<Vec<Call>> = tensors
        .iter()
        .enumerate()
        .map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false), ranks.combine(r, t, 0, 0)])
        .collect();
    ranks.run(kernels, u64::from(epoch), &calls)?;
    // Packets of a row that rank `from` sends for a token of rank s, if one of the token's experts lives on rank `on`.
    let packets = |bytes: usize, s: usize, token: usize, on: usize| {
        let lanes = round.inputs[s].experts.get(token * case.topk..(token + 1) * case.topk);
        let local = (case.experts / RANKS) as i64;
        let there = |&e: &i64| e >= 0 && e / local == on as i64;
        match lanes.is_some_and(|lanes| lanes.iter().any(there)) {
            true => GROUP_PACKETS * packet_groups(bytes),
            false => 0,
        }
    };
    let mut outcome = [Ok(0), Ok(0)];
    for r in 0..RANKS {
        let of_row = case.row_bytes + 4 * case.scale_packs;
        let dispatched = look(ranks.part(r, p.rows, bytes(rows)), rows, epoch, over, |s, token| {
            packets(of_row, s, token, r)
        });
        let combined = look(ranks.part(r, p.back, bytes(back)), back, epoch, false, |slot, token| {
            let from = if slot < r { slot } else { slot + 1 };
            if over { 0 } else { packets(2 * case.hidden, r, token, from) }
        });
        for (all, one) in outcome.iter_mut().zip([dispatched, combined]) {
            let one = one.map_err(|e| format!("rank {r}: {e}"));
            *all = std::mem::replace(all, Ok(0)).and_then(|n| Ok(n + one?));
        }
    }
    Ok(outcome)
}

/// Rows of two parts that fill their slots, and rows that leave most of them free.
fn two_sizes() -> [Case; 2] {
    let mut largest = case(RANKS, 12, Placement::Expanded);
    (largest.tokens, largest.alignment) = (vec![12, 3, 12], 4);
    (largest.row_bytes, largest.scale_packs, largest.hidden) = (2064, 5, 1000);
    let mut small = largest.clone();
    (small.row_bytes, small.scale_packs, small.hidden) = (144, 1, 72);
    [largest, small]
}

/// By kernels for all sizes and for these, whether the token comes, or another, or none.
#[test]
fn slots_are_zeroed_in_turn_on_cpus() {
    if !compiler("slots_are_zeroed_in_turn_on_cpus") {
        return;
    }
    let cases = two_sizes();
    let mut programs = packet_programs(RANKS, Placement::Expanded);
    for case in &cases {
        programs.extend(Ranks::new(case, LIMITS, 0).unwrap().programs_for_sizes(0));
    }
    assert_eq!(programs.len(), 6);
    let kernels = Kernels::build(&programs, &|_, text| text).unwrap();
    let [largest, _] = &cases;
    let mut behind = 0;
    for case in &cases {
        let for_sizes = Case { for_sizes: true, ..case.clone() };
        let limited = Case { row_capacity: Some(20), ..case.clone() };
        for (name, case) in [("for all", case), ("for sizes", &for_sizes), ("over capacity", &limited)] {
            for (blocks, epoch) in [(3, EPOCHS[0]), (40, EPOCHS[1])] {
                let limits = Limits { blocks, ..LIMITS };
                let [dispatched, combined] = after_one_call(&kernels, [largest, case], limits, epoch)
                    .unwrap_or_else(|e| panic!("{name}, {blocks} blocks, epoch {epoch}: {e}"));
                let at = format!("{name}, {blocks} blocks, epoch {epoch}, rows of {}", case.row_bytes);
                behind += dispatched.unwrap_or_else(|e| panic!("dispatch, {at}: {e}"));
                combined.unwrap_or_else(|e| panic!("combine, {at}: {e}"));
            }
        }
    }
    assert!(behind > 0, "no packet of a call over capacity came behind the zeroes");
}

/// The tests see what is not zeroed: what a warp has read, and what rows of their size leave free.
#[test]
fn slots_that_are_not_zeroed_are_noticed_on_cpus() {
    if !compiler("slots_that_are_not_zeroed_are_noticed_on_cpus") {
        return;
    }
    let (place, incoming, back) =
        ("ops/packets/place.cuh", "ops/packets/incoming.cuh", "ops/packets/back.cuh");
    let read = "half * PACKETS, PACKETS, b.groups()";
    // One for a dispatch and one for a combine, which are compiled together.
    let mistakes = [
        [(place, "in.scrub();", ";"), (back, read, "half * PACKETS, 0, b.groups()")],
        [
            (incoming, "b.q.area.row_stride, 0, ROW_PACKETS", "0, 0, ROW_PACKETS"),
            (back, "if (t != b.packets.scrubbed()) return true;", "return true;"),
        ],
        [
            (incoming, "b.q.area.row_stride, 0, ROW_PACKETS", "b.q.area.row_stride, 0, 0"),
            (back, "b.q.area.back_stride", "0"),
        ],
    ];
    let [largest, small] = &two_sizes();
    for all in mistakes {
        let change = |name: &str, text: String| {
            let mut text = text;
            for (_, from, to) in all.iter().filter(|(file, ..)| *file == name) {
                assert_eq!(text.matches(from).count(), 1, "{name} has no longer {from:?}");
                text = text.replace(from, to);
            }
            text
        };
        let kernels = Kernels::build(&packet_programs(RANKS, Placement::Expanded), &change).unwrap();
        for (what, outcome) in
            all.iter().zip(after_one_call(&kernels, [largest, small], LIMITS, EPOCHS[0]).unwrap())
        {
            assert!(outcome.is_err(), "{what:?} went unnoticed");
        }
    }
}
