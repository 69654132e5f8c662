//! The first two phases of dispatch: counting, and the exchange from which every rank knows every position.

use std::sync::atomic::Ordering;

use super::Rank;
use super::memory::Table;
use crate::backend::abort::calls_differ;
use crate::backend::{Counts, DispatchCall, Problem};
use crate::error::{Error, Result};
use crate::layout::{DispatchShape, HandleLayout, Operation, Phase, Placement, WorkspaceLayout, align_up};
use crate::tensor::{DType, TensorRef};

/// Slots that a rank has named in its place cell, and its number of sending blocks.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) output: usize,
    pub(super) handle: usize,
}

impl Place {
    fn encode(output: usize, handle: usize) -> u32 {
        let blocks = 1;
        output as u32 | (handle as u32) << 8 | blocks << 20
    }

    fn decode(value: u32) -> Self {
        Self { output: (value & 0xff) as usize, handle: (value >> 8 & 0xfff) as usize }
    }
}

/// Expert ids of either width.
pub(super) enum Ids<'a> {
    Narrow(Table<'a, i32>),
    Wide(Table<'a, i64>),
}

impl Ids<'_> {
    pub(super) fn of<'t>(tensor: &'t TensorRef<'_>) -> Ids<'t> {
        if tensor.dtype() == DType::I32 {
            Ids::Narrow(Table::of(tensor))
        } else {
            Ids::Wide(Table::of(tensor))
        }
    }

    pub(super) fn get(&self, index: usize) -> Result<i64> {
        match self {
            Self::Narrow(table) => table.get(index).map(i64::from),
            Self::Wide(table) => table.get(index),
        }
    }

    pub(super) fn set(&self, index: usize, id: i32) -> Result<()> {
        match self {
            Self::Narrow(table) => table.set(index, id),
            Self::Wide(table) => table.set(index, id.into()),
        }
    }
}

/// Numbers of all ranks, from the cells of the exchange.
pub(super) struct Totals {
    /// `[source][expert]`.
    pub(super) experts: Vec<Vec<usize>>,
    /// `[source][destination]`.
    pub(super) tokens: Vec<Vec<usize>>,
}

impl Totals {
    /// Tokens and rows that rank `d` gets.
    fn received(&self, d: usize, shape: &DispatchShape) -> [usize; 2] {
        let tokens = self.tokens.iter().map(|to| to[d]).sum();
        let rows = match shape.placement {
            Placement::Plain => tokens,
            Placement::Expanded => self.starts(d, shape).last().copied().unwrap_or(0),
        };
        [tokens, rows]
    }

    pub(super) fn expert(&self, e: usize) -> usize {
        self.experts.iter().map(|of| of[e]).sum()
    }

    /// First row of each expert of rank `d`, aligned, and the end of the last one.
    pub(super) fn starts(&self, d: usize, shape: &DispatchShape) -> Vec<usize> {
        let local = shape.local_experts();
        let mut starts = vec![0];
        for e in d * local..(d + 1) * local {
            starts.push(starts[starts.len() - 1] + align_up(self.expert(e), shape.alignment));
        }
        starts
    }
}

/// Phase 1: writes the valid ids of this rank's tokens into its handle slot, and counts tokens of each expert and for each rank. Also says which id is
/// wrong: the first that is no expert, or else the first that a token names twice.
pub(super) fn count(
    rank: &Rank<'_>,
    shape: &DispatchShape,
    topk_idx: &TensorRef<'_>,
    valid: &Table<'_, i32>,
) -> Result<(Vec<u32>, Option<Problem>)> {
    let (rank, experts) = (rank.me, shape.experts);
    let (mut unknown, mut twice) = (None, None);
    let mut counts = vec![0; shape.experts + shape.ranks];
    let ids = Ids::of(topk_idx);
    let mut lanes = vec![-1; shape.topk];
    for token in 0..topk_idx.rows() {
        let mut ranks = 0u32;
        for k in 0..shape.topk {
            let expert = ids.get(token * shape.topk + k)?;
            let id = match i32::try_from(expert) {
                Ok(id) if id >= 0 && (id as usize) < experts => id,
                Ok(-1) => -1,
                _ => {
                    unknown.get_or_insert(Problem::ExpertOutOfRange {
                        rank,
                        token,
                        lane: k,
                        expert,
                        experts,
                    });
                    -1
                }
            };
            let first = lanes[..k].iter().position(|&lane| lane == id && id >= 0);
            if let Some(first) = first {
                let first = Some(first);
                twice.get_or_insert(Problem::DuplicateExpert { rank, token, first, second: k, expert });
            }
            let known = id >= 0 && first.is_none();
            lanes[k] = if known { id } else { -1 };
            valid.set(token * shape.topk + k, lanes[k])?;
            if known {
                counts[id as usize] += 1;
                ranks |= 1 << (id as usize / shape.local_experts());
            }
        }
        for d in (0..shape.ranks).filter(|d| ranks >> d & 1 == 1) {
            counts[shape.experts + d] += 1;
        }
    }
    Ok((counts, unknown.or(twice)))
}

fn cell(rank: &Rank<'_>, epoch: u32, source: usize, index: usize) -> usize {
    let w = rank.workspace();
    let parity = (epoch & 1) as usize;
    w.totals + ((parity * rank.ranks() + source) * w.cells + index) * 8
}

/// Phase 2, first half: tells every rank this rank's counts and slots, and returns every rank's slots.
pub(super) fn exchange(
    rank: &Rank<'_>,
    call: &DispatchCall<'_>,
    epoch: u32,
    counts: Option<&[u32]>,
) -> Result<Vec<Place>> {
    let word = |value: u32| u64::from(epoch) << 32 | u64::from(value);
    for area in &rank.areas {
        let store = |index, value, order| -> Result<()> {
            area.cell64(cell(rank, epoch, rank.me, index))?.store(word(value), order);
            Ok(())
        };
        for (q, &value) in counts.unwrap_or_default().iter().enumerate() {
            store(WorkspaceLayout::CELL_COUNTS + q, value, Ordering::Relaxed)?;
        }
        store(WorkspaceLayout::CELL_CALL, call.digest, Ordering::Relaxed)?;
        store(
            WorkspaceLayout::CELL_PLACE,
            Place::encode(call.output_slot, call.handle_slot),
            Ordering::Release,
        )?;
    }
    let read = |source, index| {
        rank.waits.value(rank.own().cell64(cell(rank, epoch, source, index))?, epoch, Phase::Totals, source)
    };
    let all = |index| (0..rank.ranks()).map(|s| read(s, index)).collect::<Result<Vec<u32>>>();
    let places = all(WorkspaceLayout::CELL_PLACE)?;
    let digests = all(WorkspaceLayout::CELL_CALL)?;
    if digests.iter().any(|&digest| digest != call.digest) {
        return Err(calls_differ(Operation::Dispatch, &digests));
    }
    Ok(places.into_iter().map(Place::decode).collect())
}

/// Phase 2, second half: every rank's counts.
pub(super) fn gather(rank: &Rank<'_>, shape: &DispatchShape, epoch: u32) -> Result<Totals> {
    let read = |source, index| {
        let cell = rank.own().cell64(cell(rank, epoch, source, index))?;
        rank.waits.value(cell, epoch, Phase::Totals, source).map(|n| n as usize)
    };
    let mut totals = Totals { experts: Vec::new(), tokens: Vec::new() };
    for s in 0..shape.ranks {
        totals.experts.push(
            (0..shape.experts).map(|e| read(s, WorkspaceLayout::CELL_COUNTS + e)).collect::<Result<_>>()?,
        );
        totals.tokens.push(
            (0..shape.ranks)
                .map(|d| read(s, WorkspaceLayout::CELL_COUNTS + shape.experts + d))
                .collect::<Result<_>>()?,
        );
    }
    // Positions follow from these numbers, so they must be possible.
    for (s, to) in totals.tokens.iter().enumerate() {
        if to.iter().any(|&n| n > shape.max_tokens) || totals.experts[s].iter().any(|&n| n > shape.max_tokens)
        {
            let problem = format!("announces more than the {} tokens it may send", shape.max_tokens);
            return Err(Error::protocol(format!("rank {s}"), problem));
        }
    }
    Ok(totals)
}

/// A rank that would get more than fits, and the tokens and rows that it needs.
#[derive(Clone, Copy)]
pub(super) struct Over {
    pub(super) rank: usize,
    pub(super) needed: [u32; 2],
}

/// The first such rank. Every rank finds the same one.
pub(super) fn over_capacity(shape: &DispatchShape, totals: &Totals) -> Option<Over> {
    (0..shape.ranks).find_map(|rank| {
        let [tokens, rows] = totals.received(rank, shape);
        let is_over = tokens > shape.token_capacity || rows > shape.row_capacity;
        is_over.then_some(Over { rank, needed: [tokens, rows].map(|n| n as u32) })
    })
}

/// Writes what this rank receives into its handle slot; nothing, and what would have been needed, if the call is over capacity.
pub(super) fn write_counts(
    rank: &Rank<'_>,
    call: &DispatchCall<'_>,
    totals: &Totals,
    over: Option<Over>,
) -> Result<()> {
    let shape = &call.shape;
    let slot = rank.layout.handles.at(call.handle_slot);
    let own = rank.own();
    let counts = own.table::<i32>(slot + call.handle.counts, HandleLayout::COUNTS)?;
    let rank_psum = own.table::<i32>(slot + call.handle.rank_psum, shape.ranks)?;
    let expert_start = own.table::<i32>(slot + call.handle.expert_start, shape.local_experts() + 1)?;
    let expert_count = own.table::<i32>(slot + call.handle.expert_count, shape.local_experts())?;
    let starts = totals.starts(rank.me, shape);
    let told = match over {
        None => [totals.received(rank.me, shape).map(|n| n as u32), [0, 0]],
        Some(over) => [[0, 0], over.needed],
    };
    for (i, &value) in told.as_flattened().iter().enumerate() {
        counts.set(i, value as i32)?;
    }
    let unless_over = |value: usize| if over.is_some() { 0 } else { value as i32 };
    let mut sum = 0;
    for (s, to) in totals.tokens.iter().enumerate() {
        sum += to[rank.me];
        rank_psum.set(s, unless_over(sum))?;
    }
    for (j, &start) in starts.iter().enumerate() {
        expert_start.set(j, unless_over(start))?;
    }
    for j in 0..shape.local_experts() {
        expert_count.set(j, unless_over(totals.expert(rank.me * shape.local_experts() + j)))?;
    }
    Ok(())
}

pub(super) fn read_counts(rank: &Rank<'_>, call: &DispatchCall<'_>) -> Result<Counts> {
    let shape = &call.shape;
    let slot = rank.layout.handles.at(call.handle_slot);
    let read = |offset, len| -> Result<Vec<usize>> {
        let table = rank.own().table::<i32>(slot + offset, len)?;
        (0..len).map(|i| Ok(table.get(i)?.max(0) as usize)).collect()
    };
    let counts = read(call.handle.counts, HandleLayout::COUNTS)?;
    Ok(Counts {
        tokens: counts[0],
        rows: counts[1],
        rank_prefix: read(call.handle.rank_psum, shape.ranks)?,
        expert_counts: read(call.handle.expert_count, shape.local_experts())?,
    })
}
