//! Packets there and back: what batches of a few tokens take, as two kernels that take turns.

use std::ffi::CStr;

use deepep_core::layout::{GROUP_BYTES, GROUP_PACKETS, PACKET_BYTES, packet_groups};
use deepep_core::tensor::DType;

use super::board::Unit;
use super::boxes::{Boxes, Rows};
use super::{Board, Ceiling, CeilingError, Exchange, Kind, Transfer};
use crate::bench::stats::median;
use crate::gpu::{Graph, Shape};
use crate::inputs::Values;

/// Most blocks of a kernel, which count their epochs.
pub const EPOCH_BLOCKS: u32 = 1024;
/// Most warps of a block, as the kernel has it.
const WARPS: u32 = 16;
/// Pairs of kernels in a graph, as in that of the operation which is compared.
const PAIRS: usize = 50;
/// Tags come back after as many kernels of a kind.
const TAGS: usize = 65535;

/// Tokens of each device, all of which go to other devices, each to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// How many.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
}

impl Batch {
    fn values(self, dtype: DType) -> Values {
        Values { seed: 0, dtype, hidden: self.hidden as usize }
    }

    /// Bytes of a row of a dispatch, FP8 with its scales.
    fn row_bytes(self) -> usize {
        let values = self.values(DType::F8E4M3);
        values.row_bytes() + size_of::<f32>() * values.scales()
    }

    /// Bytes of each device: FP8 with scales there, BF16 back.
    pub fn bytes(self) -> [usize; 2] {
        [self.row_bytes(), self.values(DType::Bf16).row_bytes()].map(|row| row * self.tokens as usize)
    }

    /// As a ceiling.
    pub fn ceiling(self, value: f64) -> Ceiling {
        let (row_bytes, tokens) = (Some(self.row_bytes() as u32), Some(self.tokens));
        Ceiling { row_bytes, tokens, ..Ceiling::of(Kind::PacketExchange, value) }
    }
}

/// One of the two kinds of kernels: where on each device lies what it moves, in bytes from the start of a box.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Which of the two.
    kind: u32,
    /// What is sent, in the outbox.
    source: u64,
    /// Packets that come, in the inbox.
    slots: u64,
    /// What has come, in the inbox.
    out: u64,
    /// Pieces that go to each peer.
    pieces: u32,
    /// Number of peers.
    peers: u32,
}

impl Way {
    /// Bytes for a peer.
    fn part(&self) -> u64 {
        u64::from(self.pieces) * GROUP_BYTES as u64
    }

    /// Bytes of packets for a peer.
    fn slot(&self) -> u64 {
        u64::from(self.pieces) * (GROUP_PACKETS * PACKET_BYTES) as u64
    }

    /// Shares of a warp for each peer.
    fn items(&self) -> u32 {
        self.pieces.div_ceil(32)
    }

    /// Contents of what a device sends to one of its peers.
    fn rows(&self, round: u32, sender: usize, peer: usize) -> Rows {
        let round = (round * 2 + self.kind) * 64 + (sender * 8 + peer) as u32;
        Rows { rows: self.part() / 16, row_bytes: 16, round, slots: 0 }
    }
}

/// How a kernel's work is dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Blocks.
    pub blocks: u32,
    /// Warps of a block.
    pub warps: u32,
    /// Blocks that send, while the others receive; 0 if half of each block's warps do.
    pub senders: u32,
}

impl Deal {
    /// Over at most `blocks` blocks, at least 2.
    pub fn of(way: &Way, blocks: u32, apart: bool) -> Self {
        let items = way.items() * way.peers;
        let blocks = blocks.clamp(2, EPOCH_BLOCKS);
        if apart {
            let senders = items.min(blocks / 2);
            Self { blocks: 2 * senders, warps: items.div_ceil(senders).min(WARPS), senders }
        } else {
            let blocks = items.min(blocks);
            Self { blocks, warps: 2 * items.div_ceil(blocks).min(WARPS / 2), senders: 0 }
        }
    }

    fn shape(self) -> Shape {
        Shape { blocks: self.blocks, threads: self.warps * 32, shared: 0 }
    }
}

/// Both kinds in the boxes of all devices.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// There and back.
    pub ways: [Way; 2],
    /// Where in inboxes the part begins in which kernels store what has come; before it are packets.
    pub out: u64,
    /// Where it ends.
    pub end: u64,
}

impl Boxes {
    /// Room for kernels that move so many bytes of each device, shared out to its peers. `None` if there are no peers, or the boxes are too small.
    pub fn room(&self, bytes: [usize; 2]) -> Option<Room> {
        let peers = self.devices().checked_sub(1).filter(|&peers| peers > 0)?;
        let mut ways = [0, 1].map(|kind| {
            // Vectors are compared as a whole: an even number.
            let pieces = packet_groups(bytes[kind].div_ceil(peers)).next_multiple_of(2) as u32;
            Way { kind: kind as u32, source: 0, slots: 0, out: 0, pieces, peers: peers as u32 }
        });
        let place = |at: &mut u64, bytes: u64| {
            let start = *at;
            *at = (start + bytes * peers as u64).next_multiple_of(256);
            start
        };
        let (mut inbox, mut outbox) = (0, 0);
        for way in &mut ways {
            way.slots = place(&mut inbox, way.slot());
            way.source = place(&mut outbox, way.part());
        }
        let out = inbox;
        for way in &mut ways {
            way.out = place(&mut inbox, way.part());
        }
        (inbox.max(outbox) <= self.bytes).then_some(Room { ways, out, end: inbox })
    }

    /// What a device's kernel sends and receives.
    pub fn exchange(&self, device: usize, way: &Way, deal: Deal) -> Exchange {
        let (n, inbox) = (self.devices(), self.inboxes[device]);
        let mut target = [0; 8];
        for (d, target) in (1..n).zip(&mut target) {
            *target = self.inboxes[(device + d) % n] + way.slots + (n - 1 - d) as u64 * way.slot();
        }
        Exchange {
            target,
            source: self.outboxes[device] + way.source,
            slots: inbox + way.slots,
            out: inbox + way.out,
            epochs: self.epochs[device] + u64::from(way.kind * EPOCH_BLOCKS * 4),
            late: self.late[device],
            timeout_ns: self.timeout_ns,
            targets: way.peers,
            pieces: way.pieces,
            items: way.items(),
            senders: deal.senders,
            zero: 0,
            pad: 0,
        }
    }

    /// What fills a device's source.
    pub fn fill_exchange(&self, device: usize, way: &Way, round: u32) -> Vec<Transfer> {
        let fill = |peer: usize| {
            let to = self.outboxes[device] + way.source + peer as u64 * way.part();
            self.transfer(device, &[to], way.rows(round, device, peer))
        };
        (0..way.peers as usize).map(fill).collect()
    }

    /// What finds out whether a device has received what its peers' sources were filled with.
    pub fn check_exchange(&self, device: usize, way: &Way, round: u32) -> Vec<Transfer> {
        let n = self.devices();
        let check = |d: usize| {
            let at = self.inboxes[device] + way.out + (d - 1) as u64 * way.part();
            // The sender at this distance had this device as its peer number n − 1 − d.
            self.transfer(device, &[at], way.rows(round, (device + d) % n, n - 1 - d))
        };
        (1..n).map(check).collect()
    }
}

impl Board {
    /// The time of a pair of kernels, with the best of a few ways to deal out the work. `None` if there is no room.
    pub(super) fn exchange(
        &self,
        batch: Batch,
        early_launch: bool,
        samples: usize,
    ) -> Result<Option<Ceiling>, CeilingError> {
        let Some(room) = self.boxes.room(batch.bytes()) else { return Ok(None) };
        self.fill_parts(&room)?;
        let sms = self.units.iter().map(|unit| unit.sms).min().unwrap_or(0);
        let mut tried = Vec::new();
        let mut best = f64::INFINITY;
        for (blocks, apart) in [(sms, true), (sms, false), (sms / 2, true), (sms / 2, false)] {
            let deals = room.ways.map(|way| Deal::of(&way, blocks, apart));
            if tried.contains(&deals) {
                continue;
            }
            tried.push(deals);
            best = best.min(self.exchange_in(&room, deals, early_launch, samples)?);
        }
        Ok(Some(batch.ceiling(best)))
    }

    /// Fills the sources with other contents than before, and says which.
    fn fill_parts(&self, room: &Room) -> Result<u32, CeilingError> {
        let round = self.next_round();
        self.on_parts(c"ceiling_fill", room, |i, way| self.boxes.fill_exchange(i, way, round))?;
        Ok(round)
    }

    /// Fills or compares.
    fn on_parts(
        &self,
        kernel: &CStr,
        room: &Room,
        parts: impl Fn(usize, &Way) -> Vec<Transfer>,
    ) -> Result<(), CeilingError> {
        for (i, unit) in self.units.iter().enumerate() {
            for transfer in room.ways.iter().flat_map(|way| parts(i, way)) {
                self.run(unit, kernel, Self::wide(unit), &transfer)?;
            }
        }
        self.settle(Kind::PacketExchange)
    }

    /// Microseconds of a pair; what one more replay stores is compared.
    fn exchange_in(
        &self,
        room: &Room,
        deals: [Deal; 2],
        early_launch: bool,
        samples: usize,
    ) -> Result<f64, CeilingError> {
        let kind = Kind::PacketExchange;
        // No slot holds a packet, and no kernel runs.
        self.clear(0, room.end)?;
        self.units.iter().try_for_each(Unit::clear_epochs)?;
        let capture = |(i, unit): (usize, &Unit)| {
            let function = unit.module.function(c"ceiling_exchange", 0)?;
            let pair = |way: &Way| -> Result<(), CeilingError> {
                let deal = deals[way.kind as usize];
                let (shape, exchange) = (deal.shape(), self.boxes.exchange(i, way, deal));
                // SAFETY: the kernel takes an Exchange, and waits for its predecessor before all else. What it names lies in boxes and words of this
                // board, whose devices reach each other, and `sample` waits.
                let launched = unsafe {
                    match early_launch {
                        true => function.launch_early(&unit.stream, shape, &exchange),
                        false => function.launch(&unit.stream, shape, &exchange),
                    }
                };
                Ok(launched?)
            };
            Graph::capture(&unit.stream, || (0..PAIRS).try_for_each(|_| room.ways.iter().try_for_each(pair)))
        };
        let graphs: Vec<Graph> =
            self.units.iter().enumerate().map(capture).collect::<Result<_, CeilingError>>()?;
        let sample = || -> Result<f64, CeilingError> {
            // SAFETY: the graph's kernels use boxes and words of this board, and `sample` waits.
            let times = self.sample(kind, |unit, i| Ok(unsafe { graphs[i].launch(&unit.stream) }?))?;
            Ok(times.into_iter().fold(0.0, f64::max) / PAIRS as f64)
        };
        sample()?;
        let samples = samples.clamp(1, TAGS / PAIRS - 3);
        let times: Vec<f64> = (0..samples).map(|_| sample()).collect::<Result<_, _>>()?;
        // Slots have other contents from before.
        let round = self.fill_parts(room)?;
        self.clear(room.out, room.end)?;
        sample()?;
        self.on_parts(c"ceiling_check", room, |i, way| self.boxes.check_exchange(i, way, round))?;
        Ok(median(&times))
    }

    /// Zeroes a part of all inboxes. Nothing else is under way.
    fn clear(&self, start: u64, end: u64) -> Result<(), CeilingError> {
        let clear = |unit: &Unit| unit.context.fill(&unit.inbox, start as usize, (end - start) as usize, 0);
        Ok(self.units.iter().try_for_each(clear)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boxes(devices: u64, bytes: u64) -> Boxes {
        let of = |start: u64| (0..devices).map(|d| d << 40 | start).collect();
        Boxes {
            inboxes: of(0),
            outboxes: of(1 << 32),
            bytes,
            wrong: of(2 << 32),
            late: of(3 << 32),
            epochs: of(4 << 32),
            timeout_ns: 1,
        }
    }

    #[test]
    fn a_batch_has_the_bytes_of_its_rows() {
        let batch = Batch { tokens: 32, hidden: 7168 };
        assert_eq!(batch.bytes(), [32 * 7392, 32 * 14336]);
        let [there, back] = boxes(2, 64 << 20).room(batch.bytes()).unwrap().ways;
        assert_eq!((there.pieces, back.pieces), (32 * 132, 32 * 256));
        let ceiling = batch.ceiling(8.0);
        assert_eq!((ceiling.row_bytes, ceiling.tokens, ceiling.sms), (Some(7392), Some(32), None));
        // Among three devices half of the tokens go to each peer.
        let [there, _] = boxes(3, 64 << 20).room(batch.bytes()).unwrap().ways;
        assert_eq!((there.pieces, there.peers), (16 * 132, 2));
        assert!(boxes(1, 64 << 20).room(batch.bytes()).is_none());
        assert!(boxes(2, 1 << 20).room(batch.bytes()).is_none());
    }

    #[test]
    fn work_is_dealt_out_to_blocks_that_are_all_resident() {
        for (tokens, sms) in [(1, 132), (8, 132), (32, 132), (128, 132), (128, 2), (1, 160)] {
            let room = boxes(2, 64 << 20).room(Batch { tokens, hidden: 7168 }.bytes()).unwrap();
            for way in &room.ways {
                let items = way.items();
                for apart in [true, false] {
                    let deal = Deal::of(way, sms, apart);
                    assert!(deal.blocks <= sms && deal.warps <= WARPS, "{deal:?}");
                    let sending =
                        if apart { deal.senders * deal.warps } else { deal.blocks * deal.warps / 2 };
                    assert!(sending > 0 && (sending >= items || deal.warps == WARPS), "{deal:?}");
                }
            }
        }
        // One round of 16 warps a block.
        let room = boxes(2, 64 << 20).room(Batch { tokens: 128, hidden: 7168 }.bytes()).unwrap();
        let back = Deal::of(&room.ways[1], 132, false);
        assert_eq!(back, Deal { blocks: 132, warps: 16, senders: 0 });
    }

    #[test]
    fn what_one_device_sends_another_looks_for() {
        for devices in [2, 3, 8] {
            let boxes = boxes(devices, 1 << 20);
            let room = boxes.room([5000, 9000]).unwrap();
            for way in &room.ways {
                let deal = Deal::of(way, 4, true);
                for device in 0..devices as usize {
                    let sent = boxes.exchange(device, way, deal);
                    for d in 1..devices as usize {
                        let peer = (device + d) % devices as usize;
                        let slot = sent.target[d - 1] - boxes.exchange(peer, way, deal).slots;
                        // Slots of the peer are in order of its own distance to others.
                        assert_eq!(slot, (devices as usize - d - 1) as u64 * way.slot());
                    }
                }
                assert!(way.slots + way.slot() * u64::from(way.peers) <= room.out && way.out >= room.out);
            }
            assert!(room.end <= boxes.bytes);
        }
    }
}
