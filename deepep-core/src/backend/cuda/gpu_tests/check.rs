//! Comparison of what lies in a rank's slots with the oracle.

use super::input::{Case, Input, as_bytes};
use super::machine::{Group, Outcome};
use super::oracle::Received;
use super::{Buffer, parallel};
use crate::layout::{DispatchShape, HandleLayout, HeapLayout, IndexWidth, OutputLayout, Placement};

/// Bytes that nothing writes.
pub(super) const POISON: u8 = 0xa5;

/// One rank's slots, copied to the host.
pub(super) struct Slots {
    pub(super) output: Vec<u8>,
    pub(super) handle: Vec<u8>,
}

impl Slots {
    pub(super) fn read(
        group: &Group,
        rank: usize,
        shape: &DispatchShape,
        output: usize,
        handle: usize,
    ) -> Outcome<Self> {
        Self::of(&group.ranks[rank].heap, &group.layout, shape, output, handle)
    }

    /// Those in a heap.
    pub(super) fn of(
        heap: &Buffer,
        layout: &HeapLayout,
        shape: &DispatchShape,
        output: usize,
        handle: usize,
    ) -> Outcome<Self> {
        let tables = HandleLayout::new(shape, layout.workspace.packets.is_some());
        Ok(Self {
            output: heap.read(layout.outputs.at(output), OutputLayout::new(shape).bytes)?,
            handle: heap.read(layout.handles.at(handle), tables.bytes)?,
        })
    }
}

pub(super) fn i32_at(bytes: &[u8], offset: usize, index: usize) -> i32 {
    i32::from_le_bytes(bytes[offset + index * 4..][..4].try_into().unwrap_or_default())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, at: usize, got: T, want: T) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("{what}[{at}] is {got:?}, expected {want:?}")) }
}

fn same_bytes(what: &str, at: usize, got: &[u8], want: &[u8]) -> Result<(), String> {
    // One instruction for many bytes; which of them differs is looked for afterwards.
    if got == want {
        return Ok(());
    }
    match got.iter().zip(want).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(i) => {
            let bad = got.iter().zip(want).filter(|(a, b)| a != b).count();
            Err(format!(
                "{what}[{at}]: byte {i} is {:#x}, expected {:#x}; {bad} of {} bytes differ",
                got[i],
                want[i],
                got.len()
            ))
        }
    }
}

/// Everything a dispatch must have written on rank d, and nothing more.
pub(super) fn dispatched(
    case: &Case,
    d: usize,
    slots: &Slots,
    want: &[Received],
    inputs: &[Input],
    cached: bool,
) -> Outcome {
    let shape = case.dispatch_shape();
    let (o, h) = (OutputLayout::new(&shape), HandleLayout::new(&shape, case.in_packets()));
    let (topk, local) = (case.topk, case.experts / case.ranks);
    let (out, handle, mine) = (&slots.output, &slots.handle, &want[d]);
    let expanded = case.placement == Placement::Expanded;
    let rows = if expanded { mine.rows.len() } else { mine.tokens.len() };

    // Counts and tables of what came.
    let counts = [mine.tokens.len() as i32, rows as i32, 0, 0];
    for (i, want) in counts.into_iter().enumerate() {
        same("counts", i, i32_at(handle, h.counts, i), want)?;
    }
    let tables = [
        ("rank_psum", h.rank_psum, &mine.rank_psum),
        ("expert_start", h.expert_start, &mine.expert_start),
        ("expert_count", h.expert_count, &mine.expert_count),
    ];
    for (name, offset, want) in tables {
        for (i, &want) in want.iter().enumerate() {
            same(name, i, i32_at(handle, offset, i), want)?;
        }
    }
    for (i, (&(s, t), &lanes)) in mine.tokens.iter().zip(&mine.lanes).enumerate() {
        let id = (s * case.max_tokens + t) as i32;
        same("source id", i, i32_at(handle, h.source, 2 * i), id)?;
        same("source lanes", i, i32_at(handle, h.source, 2 * i + 1) as u32, lanes)?;
        for k in 0..topk {
            let at = i * topk + k;
            let expert = inputs[s].experts[t * topk + k];
            if expanded {
                same("lane_row", at, i32_at(handle, h.lane_row, at), mine.lane_row[at])?;
            } else {
                let here = expert >= 0 && expert as usize / local == d;
                let want = if here { expert - (d * local) as i64 } else { -1 };
                let got = match case.index {
                    IndexWidth::Bits32 => i64::from(i32_at(out, o.lane_expert, at)),
                    IndexWidth::Bits64 => {
                        i64::from_le_bytes(out[o.lane_expert + at * 8..][..8].try_into().unwrap_or_default())
                    }
                };
                same("lane_expert", at, got, want)?;
            }
            // In the expanded layout own tokens' weights go to their rows at once.
            if case.weights && (!expanded || s != d) {
                let want = inputs[s].weights[t * topk + k].to_bits() as i32;
                same("lane_weight", at, i32_at(out, o.lane_weight, at), want)?;
            }
        }
    }

    // Rows.
    let (pack_stride, row_stride) = shape.scale_strides();
    let poison = vec![POISON; case.row_bytes];
    let zero = vec![0; case.row_bytes];
    parallel::check(shape.row_capacity, case.row_bytes, |r| {
        let from = match () {
            () if expanded => mine.rows.get(r).copied().flatten(),
            () => (r < rows).then_some((r, 0)),
        };
        let got = &out[o.rows + r * case.row_bytes..][..case.row_bytes];
        let pack = |p: usize| i32_at(out, o.scales, r * row_stride + p * pack_stride) as u32;
        let weight = |r: usize| i32_at(out, o.row_weight, r) as u32;
        let filler = if r < rows && case.zero_padding { 0 } else { u32::from_le_bytes([POISON; 4]) };
        match from {
            Some((token, k)) => {
                let (s, t) = mine.tokens[token];
                let input = &inputs[s];
                same_bytes("row", r, got, &input.x[t * case.row_bytes..][..case.row_bytes])?;
                for p in 0..case.scale_packs {
                    let want = input.scales[t * case.scale_packs + p];
                    if pack(p) != want {
                        same(&format!("scale pack {p} of row"), r, pack(p), want)?;
                    }
                }
                if expanded && case.weights {
                    same("row_weight", r, weight(r), input.weights[t * topk + k].to_bits())?;
                }
            }
            None => {
                same_bytes("row without token", r, got, if filler == 0 { &zero } else { &poison })?;
                for p in (0..case.scale_packs).filter(|&p| pack(p) != filler) {
                    same(&format!("scale pack {p} of row without token"), r, pack(p), filler)?;
                }
                if expanded && case.weights {
                    same("row_weight of row without token", r, weight(r), filler)?;
                }
            }
        }
        Ok(())
    })?;
    if cached { Ok(()) } else { sent(case, d, handle, &h, want, &inputs[d]) }
}

/// Tables of what this rank sent.
fn sent(
    case: &Case,
    me: usize,
    handle: &[u8],
    h: &HandleLayout,
    want: &[Received],
    input: &Input,
) -> Outcome {
    let (topk, ranks) = (case.topk, case.ranks);
    let expanded = case.placement == Placement::Expanded;
    if case.in_packets() {
        lane_places(case, me, handle, h, want)?;
    }
    for (i, &expert) in input.experts.iter().enumerate() {
        same("topk", i, i32_at(handle, h.topk, i), expert as i32)?;
    }
    for (r, there) in want.iter().enumerate() {
        let mut index = vec![-1i32; input.tokens];
        for (i, &(s, t)) in there.tokens.iter().enumerate() {
            if s == me {
                index[t] = i as i32;
            }
        }
        for (t, &index) in index.iter().enumerate() {
            let lanes = |i: i32| &there.lane_row[i as usize * topk..][..topk];
            let first =
                if index < 0 { -1 } else { lanes(index).iter().copied().find(|&r| r >= 0).unwrap_or(-1) };
            // Packets are placed by their receiver: in the expanded layout the sender knows the token index only.
            let first = if expanded && r != me && case.in_packets() { index } else { first };
            same("sent_row", t * ranks + r, i32_at(handle, h.sent_row, t * ranks + r), first)?;
            if expanded {
                same("sent_index", t * ranks + r, i32_at(handle, h.sent_index, t * ranks + r), index)?;
            }
            if expanded && r == me {
                for k in 0..topk {
                    let want = if index < 0 { -1 } else { lanes(index)[k] };
                    same("own_row", t * topk + k, i32_at(handle, h.own_row, t * topk + k), want)?;
                }
            }
        }
    }
    Ok(())
}

/// Rows here of all ranks' tokens.
fn lane_places(case: &Case, me: usize, handle: &[u8], h: &HandleLayout, want: &[Received]) -> Outcome {
    let (topk, here) = (case.topk, &want[me]);
    let mut rows = vec![-1; case.ranks * case.max_tokens * topk];
    for (i, &(s, t)) in here.tokens.iter().enumerate() {
        for k in (0..topk).filter(|k| here.lanes[i] >> k & 1 == 1) {
            rows[(s * case.max_tokens + t) * topk + k] = here.lane_row[i * topk + k];
        }
    }
    for (i, &row) in rows.iter().enumerate() {
        same("lane_place", i, i32_at(handle, h.lane_place, i), row)?;
    }
    Ok(())
}

/// Result rows and weights of a combine.
pub(super) fn combined(
    case: &Case,
    got: &[u8],
    want: &[u16],
    weights: Option<&[u8]>,
    input: &Input,
) -> Outcome {
    let (want, row) = (as_bytes(want), case.hidden * 2);
    parallel::check(input.tokens, row, |t| {
        same_bytes("combined row", t, &got[t * row..][..row], &want[t * row..][..row])
    })?;
    let Some(weights) = weights else { return Ok(()) };
    for (i, (&expert, &weight)) in input.experts.iter().zip(&input.weights).enumerate() {
        let want = if expert >= 0 { weight.to_bits() } else { 0 };
        same("combined weight", i, i32_at(weights, 0, i) as u32, want)?;
    }
    Ok(())
}
