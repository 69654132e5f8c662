//! Combine, as section 3 of the protocol has it.

use std::sync::atomic::Ordering;

use super::Rank;
use super::memory::{Rows, Table};
use super::sum::Sum;
use crate::backend::{CombineCall, Readable};
use crate::error::{Error, Result};
use crate::layout::{Phase, Placement, REGION_ALIGNMENT, WorkspaceLayout};

/// One call, with the tables it works on.
struct Combine<'a, 'c> {
    rank: &'a Rank<'a>,
    call: &'c CombineCall<'c>,
    epoch: u32,
    x: Rows<'c>,
    weights: Option<Table<'c, f32>>,
    /// One per peer's set of the receive area.
    receive: Vec<Rows<'a>>,
    receive_weights: Vec<Table<'a, f32>>,
    lane_row: Table<'a, i32>,
}

/// What one rank lets the others read.
struct Source<'a> {
    x: Rows<'a>,
    weights: Table<'a, f32>,
}

pub(super) fn run(rank: &Rank<'_>, call: CombineCall<'_>, epoch: u32) -> Result<()> {
    let shape = &call.shape;
    let sets = rank.layout.receive.count;
    let set = epoch as usize % sets;
    let base = rank.layout.receive.at(set);
    let expanded = shape.placement == Placement::Expanded;
    let handle = |offset| rank.layout.handles.at(call.handle_slot) + offset;
    let lanes = if expanded { call.dispatched.token_capacity * shape.topk } else { 0 };
    let rows = shape.slots() * shape.max_tokens;
    let back = if shape.ranks > 1 { shape.max_tokens * shape.topk } else { 0 };
    let combine = Combine {
        rank,
        call: &call,
        epoch,
        x: Rows::of(&call.x),
        weights: call.topk_weights.as_ref().map(|w| Table::of(w)),
        receive: rank
            .areas
            .iter()
            .map(|area| area.rows(base + call.receive.rows, rows, shape.row_bytes))
            .collect::<Result<_>>()?,
        receive_weights: rank
            .areas
            .iter()
            .map(|area| area.table(base + call.receive.weights, back))
            .collect::<Result<_>>()?,
        lane_row: rank.own().table(handle(call.handle.lane_row), lanes)?,
    };
    combine.tell()?;
    if call.pull.is_some() {
        combine.compare()?;
        combine.reduce(set, &combine.sources()?)?;
        return combine.let_go();
    }
    combine.send(sets, set)?;
    combine.compare()?;
    combine.reduce(set, &[])
}

impl Combine<'_, '_> {
    /// Slot at `owner` for what comes from `from`, whose highest lane is `lane`.
    fn slot(&self, owner: usize, from: usize, lane: usize) -> usize {
        match (self.call.shape.by_lane(), from < owner) {
            (true, _) => lane,
            (false, true) => from,
            (false, false) => from - 1,
        }
    }

    /// Where a rank says that its call of an epoch has begun, and which one it is.
    fn begun(&self, from: usize, epoch: u32) -> usize {
        let parity = (epoch & 1) as usize * self.call.shape.ranks;
        self.rank.workspace().started + (parity + from) * WorkspaceLayout::LINE
    }

    /// Tells every peer that this rank's call has begun, which one it is, and where its rows lie if they are to be pulled.
    fn tell(&self) -> Result<()> {
        let cell = self.begun(self.rank.me, self.epoch);
        for peer in self.rank.peers() {
            let area = &self.rank.areas[peer];
            let say = |at: usize, value: u32| -> Result<()> {
                let word = u64::from(self.epoch) << 32 | u64::from(value);
                area.cell64(cell + at)?.store(word, Ordering::Release);
                Ok(())
            };
            say(0, self.call.digest)?;
            if let Some(Readable { x, weights }) = self.call.pull {
                say(8, x)?;
                say(16, weights)?;
            }
        }
        Ok(())
    }

    /// By rank, what all let this one read; they have begun (`compare`), and their words stay as they are until this call has ended.
    fn sources(&self) -> Result<Vec<Source<'_>>> {
        let (rank, shape) = (self.rank, &self.call.shape);
        let source = |peer: usize| -> Result<Source<'_>> {
            let cell = self.begun(peer, self.epoch);
            let word = |at: usize| -> Result<usize> {
                let cell = rank.own().cell64(cell + at)?;
                Ok(rank.waits.value(cell, self.epoch, Phase::Started, peer)? as usize * REGION_ALIGNMENT)
            };
            let (x, weights) = (word(8)?, word(16)?);
            // As far as the heap goes: which rows there are the handle says, and nothing beyond the heap is read.
            let left = |from: usize| rank.layout.bytes.saturating_sub(from);
            Ok(Source {
                x: rank.areas[peer].rows(x, left(x) / shape.row_bytes, shape.row_bytes)?,
                weights: rank.areas[peer].table(weights, left(weights) / size_of::<f32>())?,
            })
        };
        // The own rank's are in the call.
        let own = || Source { x: self.x, weights: Table::none() };
        (0..rank.ranks()).map(|r| if r == rank.me { Ok(own()) } else { source(r) }).collect()
    }

    /// Tells every peer that this rank has read what it needs, and waits until all of them have. A rank that gave up has not waited for this one:
    /// what was read of it is good only if it had not given up by now.
    fn let_go(&self) -> Result<()> {
        let rank = self.rank;
        let cell = |r: usize| rank.workspace().read + r * WorkspaceLayout::LINE;
        for peer in rank.peers() {
            rank.areas[peer].cell32(cell(rank.me))?.store(self.epoch, Ordering::Release);
        }
        for peer in rank.peers() {
            rank.waits.equal(rank.own().cell32(cell(peer))?, self.epoch, Phase::Reading, peer)?;
        }
        rank.waits.nobody_gave_up()
    }

    /// All ranks make the same call. One that is two calls ahead has put a newer word there, and is not compared.
    fn compare(&self) -> Result<()> {
        let (rank, digest) = (self.rank, self.call.digest);
        for peer in rank.peers() {
            let cell = rank.own().cell64(self.begun(peer, self.epoch))?;
            let seen = rank.waits.begun(cell, self.epoch, peer)?;
            if (seen >> 32) as u32 == self.epoch && seen as u32 != digest {
                return Err(rank.waits.differs(peer, digest, seen as u32));
            }
        }
        Ok(())
    }

    fn arrived(&self, set: usize, slot: usize, token: usize) -> usize {
        let w = self.rank.workspace();
        w.arrived + (set * w.arrived_set + slot * self.call.shape.max_tokens + token) * 4
    }

    /// Sends what was received from each peer back to it.
    fn send(&self, sets: usize, set: usize) -> Result<()> {
        let (rank, call, shape) = (self.rank, self.call, &self.call.shape);
        let slot = rank.layout.handles.at(call.handle_slot);
        let source =
            rank.own().table::<[u32; 2]>(slot + call.handle.source, call.dispatched.token_capacity)?;
        let psum = rank.own().table::<i32>(slot + call.handle.rank_psum, shape.ranks)?;
        let mut sum = Sum::new(shape.row_bytes / 2);
        for peer in rank.peers() {
            let first = if peer == 0 { 0 } else { psum.get(peer - 1)?.max(0) as usize };
            let end = psum.get(peer)?.max(0) as usize;
            if first < end {
                // The last call that used this set has ended at the peer.
                let target = self.epoch.wrapping_sub(sets as u32 - 1);
                rank.waits.begun(rank.own().cell64(self.begun(peer, target))?, target, peer)?;
            }
            for index in first..end {
                let [global, mask] = source.get(index)?;
                let token = (global as usize).wrapping_sub(peer * shape.max_tokens);
                if mask == 0 || token >= shape.max_tokens || mask >> (shape.topk - 1) > 1 {
                    let problem =
                        format!("received token {index} claims to be token {token}, lanes {mask:#x}");
                    return Err(Error::protocol(format!("rank {peer}"), problem));
                }
                self.send_token(peer, index, token, mask, set, &mut sum)?;
            }
        }
        Ok(())
    }

    fn send_token(
        &self,
        peer: usize,
        index: usize,
        token: usize,
        mask: u32,
        set: usize,
        sum: &mut Sum,
    ) -> Result<()> {
        let (rank, shape) = (self.rank, &self.call.shape);
        let to = &self.receive[peer];
        if let Some(weights) = &self.weights {
            for lane in lanes(mask) {
                let at = match shape.placement {
                    Placement::Plain => index * shape.topk + lane,
                    Placement::Expanded => self.row(index, lane)?,
                };
                self.receive_weights[peer].set(token * shape.topk + lane, weights.get(at)?)?;
            }
        }
        let highest = mask.ilog2() as usize;
        let announce = |slot| -> Result<()> {
            rank.areas[peer].cell32(self.arrived(set, slot, token))?.store(self.epoch, Ordering::Release);
            Ok(())
        };
        match shape.placement {
            Placement::Plain => {
                let slot = self.slot(peer, rank.me, highest);
                to.copy_from(slot * shape.max_tokens + token, &self.x, index)?;
                announce(slot)
            }
            Placement::Expanded if shape.reduce_first => {
                let slot = self.slot(peer, rank.me, highest);
                sum.clear();
                for lane in lanes(mask) {
                    sum.add(self.x.read(self.row(index, lane)?)?);
                }
                let row = to.at(slot * shape.max_tokens + token)?;
                // SAFETY: a row of the receive area; the set is free (its `started` cell was waited for), and this rank alone writes this
                // slot.
                unsafe { sum.write(row) };
                announce(slot)
            }
            Placement::Expanded => lanes(mask).try_for_each(|lane| {
                to.copy_from(lane * shape.max_tokens + token, &self.x, self.row(index, lane)?)?;
                announce(lane)
            }),
        }
    }

    /// The expanded row of a lane of a received token.
    fn row(&self, index: usize, lane: usize) -> Result<usize> {
        let row = self.lane_row.get(index * self.call.shape.topk + lane)?;
        usize::try_from(row).map_err(|_| {
            let problem = format!("lane {lane} of received token {index} has no row");
            Error::protocol("the handle", problem)
        })
    }

    /// Adds up what comes back for each of this rank's tokens, or what it reads from `sources` if it pulls.
    fn reduce(&self, set: usize, sources: &[Source<'_>]) -> Result<()> {
        let (rank, call, shape) = (self.rank, self.call, &self.call.shape);
        let (k, local) = (shape.topk, call.dispatched.local_experts());
        let slot = rank.layout.handles.at(call.handle_slot);
        let own = rank.own();
        let topk = own.table::<i32>(slot + call.handle.topk, call.tokens * k)?;
        let sent_row = own.table::<i32>(slot + call.handle.sent_row, call.tokens * shape.ranks)?;
        let expanded = shape.placement == Placement::Expanded;
        let own_row =
            own.table::<i32>(slot + call.handle.own_row, if expanded { call.tokens * k } else { 0 })?;
        let biases: Vec<_> = call.biases.iter().flatten().map(|bias| Rows::of(bias)).collect();
        let out = Rows::of(&call.out);
        let out_weights = call.out_weights.as_ref().map(|w| Table::<f32>::of(w));
        let (mut sum, mut here) = (Sum::new(shape.row_bytes / 2), Sum::new(shape.row_bytes / 2));
        let mut scratch = vec![0u16; shape.row_bytes / 2];
        for token in 0..call.tokens {
            let mut masks = [0u32; crate::layout::MAX_RANKS];
            for lane in 0..k {
                let id = topk.get(token * k + lane)?;
                if let Ok(id) = usize::try_from(id) {
                    *masks.get_mut(id / local).ok_or_else(|| {
                        Error::protocol("the handle", format!("token {token} names expert {id}"))
                    })? |= 1 << lane;
                }
            }
            sum.clear();
            for bias in &biases {
                sum.bias(bias.read(token)?);
            }
            for lane in 0..k {
                let Some(d) = masks.iter().position(|mask| mask >> lane & 1 == 1) else { continue };
                // A rank's contribution stands at its highest lane, unless each lane travels on its own.
                let alone = expanded && !shape.reduce_first;
                if !alone && lane != masks[d].ilog2() as usize {
                    continue;
                }
                let sent = || Ok::<_, Error>(sent_row.get(token * shape.ranks + d)?.max(0) as usize);
                if let (false, Some(source)) = (d == rank.me, sources.get(d)) {
                    sum.add(source.x.read(sent()?)?);
                } else if d != rank.me {
                    let slot = self.slot(rank.me, d, lane);
                    let cell = own.cell32(self.arrived(set, slot, token))?;
                    rank.waits.equal(cell, self.epoch, Phase::Arrival, d)?;
                    sum.add(self.receive[rank.me].read(slot * shape.max_tokens + token)?);
                } else if !expanded {
                    sum.add(self.x.read(sent()?)?);
                } else if alone {
                    sum.add(self.x.read(own_row.get(token * k + lane)?.max(0) as usize)?);
                } else {
                    here.clear();
                    for lane in lanes(masks[d]) {
                        here.add(self.x.read(own_row.get(token * k + lane)?.max(0) as usize)?);
                    }
                    // SAFETY: the scratch row has room for every column.
                    unsafe { here.write(scratch.as_mut_ptr().cast()) };
                    sum.add(&scratch);
                }
            }
            // SAFETY: a row of the caller's tensor, which is `[tokens, hidden]` of BF16 and exclusively borrowed.
            unsafe { sum.write(out.at(token)?) };
            if let (Some(out), Some(weights)) = (&out_weights, &self.weights) {
                for lane in 0..k {
                    let value = match masks.iter().position(|mask| mask >> lane & 1 == 1) {
                        None => 0.0,
                        Some(d) if d != rank.me && !sources.is_empty() => {
                            let row = sent_row.get(token * shape.ranks + d)?.max(0) as usize;
                            sources[d].weights.get(row * k + lane)?
                        }
                        Some(d) if d != rank.me => self.receive_weights[rank.me].get(token * k + lane)?,
                        Some(_) if expanded => weights.get(own_row.get(token * k + lane)?.max(0) as usize)?,
                        Some(d) => {
                            let row = sent_row.get(token * shape.ranks + d)?.max(0) as usize;
                            weights.get(row * k + lane)?
                        }
                    };
                    out.set(token * k + lane, value)?;
                }
            }
        }
        Ok(())
    }
}

/// The lanes of a mask, ascending.
fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}
