//! Dispatch, as section 2 of the protocol has it: metadata, rows, and word that they are there.

use std::sync::atomic::Ordering;

use super::Rank;
use super::exchange::{
    Ids, Over, Place, Totals, count, exchange, gather, over_capacity, read_counts, write_counts,
};
use super::memory::{Rows, Table};
use crate::backend::{Counts, DispatchCall, Positions, Problem};
use crate::error::{Error, Result};
use crate::layout::{DispatchShape, IndexWidth, Phase, Placement};
use crate::tensor::TensorRef;

/// Where one rank's output and handle slots of this call lie.
struct Destination<'a> {
    rows: Rows<'a>,
    scales: Table<'a, u32>,
    lane_weight: Table<'a, f32>,
    lane_expert: Ids<'a>,
    row_weight: Table<'a, f32>,
    source: Table<'a, [u32; 2]>,
    lane_row: Table<'a, i32>,
    rank_psum: Table<'a, i32>,
}

impl<'a> Destination<'a> {
    fn new(rank: &Rank<'a>, d: usize, place: Place, call: &DispatchCall<'_>) -> Result<Self> {
        let (area, shape) = (&rank.areas[d], &call.shape);
        let (outputs, handles) = (&rank.layout.outputs, &rank.layout.handles);
        if place.output >= outputs.count || place.handle >= handles.count {
            let problem = format!("names output slot {} and handle slot {}", place.output, place.handle);
            return Err(Error::protocol(format!("rank {d}"), problem));
        }
        let output = |offset| outputs.at(place.output) + offset;
        let handle = |offset| handles.at(place.handle) + offset;
        let expanded = shape.placement == Placement::Expanded;
        let lanes = shape.token_capacity * shape.topk;
        let (plain_lanes, expanded_lanes) = if expanded { (0, lanes) } else { (lanes, 0) };
        let (pack_stride, row_stride) = shape.scale_strides();
        let packs = match shape.scale_packs {
            0 => 0,
            packs => (pack_stride * packs).max(row_stride * shape.row_capacity),
        };
        Ok(Self {
            rows: area.rows(output(call.output.rows), shape.row_capacity, shape.row_bytes)?,
            scales: area.table(output(call.output.scales), packs)?,
            lane_weight: area.table(output(call.output.lane_weight), lanes)?,
            lane_expert: match shape.index {
                IndexWidth::Bits32 => Ids::Narrow(area.table(output(call.output.lane_expert), plain_lanes)?),
                IndexWidth::Bits64 => Ids::Wide(area.table(output(call.output.lane_expert), plain_lanes)?),
            },
            row_weight: area
                .table(output(call.output.row_weight), if expanded { shape.row_capacity } else { 0 })?,
            source: area.table(handle(call.handle.source), shape.token_capacity)?,
            lane_row: area.table(handle(call.handle.lane_row), expanded_lanes)?,
            rank_psum: area.table(handle(call.handle.rank_psum), shape.ranks)?,
        })
    }

    /// First token index of the tokens that come from `source`.
    fn token_base(&self, source: usize) -> Result<usize> {
        if source == 0 { Ok(0) } else { Ok(self.rank_psum.get(source - 1)?.max(0) as usize) }
    }
}

/// What this rank's handle slot says about its own tokens.
struct Sent<'a> {
    topk: Table<'a, i32>,
    row: Table<'a, i32>,
    index: Table<'a, i32>,
    own_row: Table<'a, i32>,
}

/// What a dispatch leaves to the host.
pub(super) struct Outcome {
    pub(super) counts: Counts,
    pub(super) over: Option<Over>,
    /// About this rank's ids.
    pub(super) wrong: Option<Problem>,
}

pub(super) fn run(rank: &Rank<'_>, mut call: DispatchCall<'_>, epoch: u32) -> Result<Outcome> {
    let shape = call.shape;
    let (n, k, me) = (call.x.rows(), shape.topk, rank.me);
    let handle = |offset| rank.layout.handles.at(call.handle_slot) + offset;
    let expanded = shape.placement == Placement::Expanded;
    let if_expanded = |len: usize| if expanded { len } else { 0 };
    let sent = Sent {
        topk: rank.own().table(handle(call.handle.topk), n * k)?,
        row: rank.own().table(handle(call.handle.sent_row), n * shape.ranks)?,
        index: rank.own().table(handle(call.handle.sent_index), if_expanded(n * shape.ranks))?,
        own_row: rank.own().table(handle(call.handle.own_row), if_expanded(n * k))?,
    };

    let (counted, wrong) = match &call.positions {
        Positions::Fresh { topk_idx } => {
            let (counts, wrong) = count(rank, &shape, topk_idx, &sent.topk)?;
            (Some(counts), wrong)
        }
        Positions::Cached => (None, None),
    };
    let places = exchange(rank, &call, epoch, counted.as_deref())?;
    let totals = match counted {
        Some(_) => Some(gather(rank, &shape, epoch)?),
        None => None,
    };

    let mut over = None;
    if let Some(totals) = &totals {
        over = over_capacity(&shape, totals);
        write_counts(rank, &call, totals, over)?;
        if over.is_some() {
            (0..n * k).try_for_each(|i| sent.topk.set(i, -1))?;
            (0..n * shape.ranks).try_for_each(|i| sent.row.set(i, -1))?;
        } else if let Some(statistics) = &mut call.statistics {
            let table = Table::<i32>::of(statistics);
            for j in 0..shape.local_experts() {
                let more = totals.expert(me * shape.local_experts() + j) as i32;
                table.set(j, table.get(j)?.wrapping_add(more))?;
            }
        }
    }
    let counts = read_counts(rank, &call)?;
    if over.is_none() {
        let destinations: Vec<_> = places
            .iter()
            .enumerate()
            .map(|(d, &place)| Destination::new(rank, d, place, &call))
            .collect::<Result<_>>()?;
        send(rank, &call, epoch, totals.as_ref(), &sent, &destinations)?;
        receive(rank, &call, epoch, &counts, &destinations[me])?;
    }
    Ok(Outcome { counts, over, wrong })
}

/// Phases 3 to 5 of the sender: metadata, rows, and word that they are there.
fn send(
    rank: &Rank<'_>,
    call: &DispatchCall<'_>,
    epoch: u32,
    totals: Option<&Totals>,
    sent: &Sent<'_>,
    destinations: &[Destination<'_>],
) -> Result<()> {
    let shape = &call.shape;
    let (me, ranks, k, local) = (rank.me, shape.ranks, shape.topk, shape.local_experts());
    let expanded = shape.placement == Placement::Expanded;
    let w = rank.workspace();
    let x = Rows::of(&call.x);
    let weights = call.topk_weights.as_ref().map(|w| Table::<f32>::of(w));

    // First free token slot for each destination, and first free row of each expert.
    let mut next_slot = vec![0; ranks];
    let mut next_row = vec![0; shape.experts];
    if let (Some(totals), true) = (totals, expanded) {
        for d in 0..ranks {
            for (e, start) in (d * local..(d + 1) * local).zip(totals.starts(d, shape)) {
                next_row[e] = start + totals.experts[..me].iter().map(|of| of[e]).sum::<usize>();
            }
        }
    }
    let token_base: Vec<usize> = match totals {
        Some(totals) => (0..ranks).map(|d| (0..me).map(|s| totals.tokens[s][d]).sum()).collect(),
        None => destinations.iter().map(|to| to.token_base(me)).collect::<Result<_>>()?,
    };

    let mut ids = vec![-1; k];
    let mut lane_rows = vec![-1; k];
    for token in 0..call.x.rows() {
        for (lane, id) in ids.iter_mut().enumerate() {
            *id = sent.topk.get(token * k + lane)?;
        }
        for (d, to) in destinations.iter().enumerate() {
            let local_id = |lane: usize| {
                let id = ids[lane] as usize;
                if ids[lane] >= 0 && id / local == d { (id % local) as i32 } else { -1 }
            };
            let mask = (0..k).filter(|&lane| local_id(lane) >= 0).fold(0u32, |mask, lane| mask | 1 << lane);
            let at = token * ranks + d;
            if mask == 0 {
                if totals.is_some() {
                    sent.row.set(at, -1)?;
                    if expanded {
                        sent.index.set(at, -1)?;
                    }
                }
                continue;
            }
            let slot = next_slot[d];
            next_slot[d] += 1;
            let index = token_base[d] + slot;
            if totals.is_some() {
                for (lane, row) in lane_rows.iter_mut().enumerate() {
                    *row = -1;
                    if expanded && local_id(lane) >= 0 {
                        let next = &mut next_row[ids[lane] as usize];
                        *row = *next as i32;
                        *next += 1;
                    }
                }
                let global = (me * shape.max_tokens + token) as u32;
                to.source.set(index, [global, mask])?;
                if expanded {
                    for (lane, &row) in lane_rows.iter().enumerate() {
                        to.lane_row.set(index * k + lane, row)?;
                        if d == me {
                            sent.own_row.set(token * k + lane, row)?;
                        }
                    }
                    sent.index.set(at, index as i32)?;
                    sent.row.set(at, lane_rows[mask.trailing_zeros() as usize])?;
                } else {
                    sent.row.set(at, index as i32)?;
                }
            }
            for lane in 0..k {
                if let Some(weights) = &weights {
                    to.lane_weight.set(index * k + lane, weights.get(token * k + lane)?)?;
                }
                if !expanded {
                    to.lane_expert.set(index * k + lane, local_id(lane))?;
                }
            }
            let row = sent.row.get(at)?.max(0) as usize;
            to.rows.copy_from(row, &x, token)?;
            if let Some(scales) = &call.scales {
                copy_scales(shape, scales, token, &to.scales, row)?;
            }
            if expanded {
                let flag = w.ready + index * 8;
                rank.areas[d].cell64(flag)?.store(u64::from(epoch) << 32, Ordering::Release);
            }
        }
        if expanded && totals.is_some() && sent.row.get(token * ranks + me)? < 0 {
            (0..k).try_for_each(|lane| sent.own_row.set(token * k + lane, -1))?;
        }
    }
    if !expanded {
        for area in &rank.areas {
            let flag = w.done + me * crate::layout::MAX_BLOCKS * 4;
            area.cell32(flag)?.store(epoch, Ordering::Release);
        }
    }
    Ok(())
}

fn copy_scales(
    shape: &DispatchShape,
    scales: &TensorRef<'_>,
    token: usize,
    to: &Table<'_, u32>,
    row: usize,
) -> Result<()> {
    let (pack_stride, row_stride) = shape.scale_strides();
    for pack in 0..shape.scale_packs {
        // SAFETY: the tensor is `[tokens, scale_packs]` of 4-byte elements in host memory, all readable: checked before the call.
        let value = unsafe { scales.element(token, pack).cast::<u32>().read() };
        to.set(row * row_stride + pack * pack_stride, value)?;
    }
    Ok(())
}

/// Phase 5 of the receiver: waits for everything that comes in; in the expanded layout duplicates rows and zeroes gaps.
fn receive(
    rank: &Rank<'_>,
    call: &DispatchCall<'_>,
    epoch: u32,
    counts: &Counts,
    own: &Destination<'_>,
) -> Result<()> {
    let shape = &call.shape;
    let w = rank.workspace();
    let k = shape.topk;
    if shape.placement == Placement::Plain {
        for s in 0..shape.ranks {
            let flag = rank.own().cell32(w.done + s * crate::layout::MAX_BLOCKS * 4)?;
            rank.waits.equal(flag, epoch, Phase::Done, s)?;
        }
        return Ok(());
    }
    let (pack_stride, row_stride) = shape.scale_strides();
    let mut first = 0;
    for (s, &end) in counts.rank_prefix.iter().enumerate() {
        for index in first..end {
            let flag = rank.own().cell64(w.ready + index * 8)?;
            rank.waits.value(flag, epoch, Phase::Arrival, s)?;
            let mut first_row = None;
            for lane in 0..k {
                let Ok(row) = usize::try_from(own.lane_row.get(index * k + lane)?) else { continue };
                if call.topk_weights.is_some() {
                    own.row_weight.set(row, own.lane_weight.get(index * k + lane)?)?;
                }
                let Some(from) = first_row else {
                    first_row = Some(row);
                    continue;
                };
                own.rows.copy_from(row, &own.rows, from)?;
                for pack in 0..shape.scale_packs {
                    let value = own.scales.get(from * row_stride + pack * pack_stride)?;
                    own.scales.set(row * row_stride + pack * pack_stride, value)?;
                }
            }
        }
        first = end;
    }
    if call.zero_padding {
        let slot = rank.layout.handles.at(call.handle_slot) + call.handle.expert_start;
        let starts = rank.own().table::<i32>(slot, shape.local_experts() + 1)?;
        for (j, &count) in counts.expert_counts.iter().enumerate() {
            let end = starts.get(j + 1)?.max(0) as usize;
            for row in starts.get(j)?.max(0) as usize + count..end {
                own.rows.zero(row)?;
                own.row_weight.set(row, 0.0)?;
                for pack in 0..shape.scale_packs {
                    own.scales.set(row * row_stride + pack * pack_stride, 0)?;
                }
            }
        }
    }
    Ok(())
}
