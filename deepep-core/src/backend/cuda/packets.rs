//! Geometry of operations whose rows travel in packets.

use super::grid::Limits;
use super::{Engine, LaunchShape};
use crate::error::{Error, Result};
use crate::jit::params::{
    CombineParams, DispatchParams, PacketArea, PacketCombineParams, PacketDispatchParams,
};
use crate::jit::{
    JitError, PACKET_COMBINE_THREADS, PACKET_CONTROL_BYTES, PACKET_DISPATCH_THREADS, PACKET_FEW_TOKENS,
    PacketSizes, Program,
};
use crate::layout::{
    CombineShape, DispatchShape, HeapConfig, MAX_BLOCKS, PacketLayout, Placement, align_up, id_packets,
    packet_groups,
};

/// Where packets lie, for kernels.
fn area(p: &PacketLayout, max_tokens: usize) -> PacketArea {
    PacketArea {
        begun: p.begun as u64,
        heads: p.heads as u64,
        ids: p.ids as u64,
        weights: p.weights as u64,
        rows: p.rows as u64,
        back: p.back as u64,
        back_weights: p.back_weights as u64,
        id_stride: p.id_stride as u64,
        weight_stride: p.weight_stride as u64,
        row_stride: p.row_stride as u64,
        back_stride: p.back_stride as u64,
        back_weight_stride: p.back_weight_stride as u64,
        max_tokens: max_tokens as u32,
        zero: 0,
    }
}

/// Blocks of an operation in packets, and for a dispatch the maps that each holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PacketGrid {
    area: PacketArea,
    blocks: usize,
    /// Blocks that send rows, the first ones, and in a dispatch blocks that place units, the last ones.
    senders: usize,
    placers: usize,
    threads: usize,
    groups: usize,
    /// Words of a map.
    words: usize,
    all_experts: bool,
    limited: bool,
    of_expert: usize,
    start: usize,
    counts: usize,
    ids: usize,
    shared_bytes: usize,
    /// What the kernel can be compiled for.
    sizes: Option<PacketSizes>,
}

impl PacketGrid {
    /// Blocks that share the work, and one that tells what is told once, as far as there are multiprocessors.
    fn blocks(shares: usize, limits: Limits) -> usize {
        (shares + 1).clamp(1, limits.blocks.clamp(1, MAX_BLOCKS))
    }

    pub(super) fn dispatch(shape: &DispatchShape, limits: Limits, packets: &PacketLayout) -> Result<Self> {
        let expanded = shape.placement == Placement::Expanded;
        let units = shape.ranks * shape.max_tokens;
        let groups = packet_groups(shape.row_bytes + shape.scale_bytes());
        // Who waits for ids must not have a queue of rows before what it reads: so others send rows, a third of all if there are not enough. All blocks do both
        // if the warps of those that place would have more than an item each.
        let most = Self::blocks(shape.max_tokens + units, limits);
        let senders = shape.max_tokens.min(most / 3);
        let placers = (units + 1).min(most - senders);
        let items = units.div_ceil(placers) * (groups.div_ceil(32) + 1);
        let all = Self::blocks(units, limits);
        let (blocks, senders, placers) = match senders > 0 && items <= PACKET_DISPATCH_THREADS / 32 {
            true => (senders + placers, senders, placers),
            false => (all, all, all),
        };
        let local = shape.local_experts();
        let (ranks, max_tokens, topk) = (shape.ranks, shape.max_tokens, shape.topk);
        let worst = DispatchShape::worst_case_rows(ranks, max_tokens, topk, local, shape.alignment);
        let limited = shape.token_capacity < units || (expanded && shape.row_capacity < worst);
        // Whether another rank's capacity is exceeded, only its experts' maps tell.
        let all_experts = limited && expanded;
        let expert_maps = match expanded {
            false => 0,
            true if all_experts => shape.experts,
            true => local,
        };
        let words = units.div_ceil(32);
        let of_expert = align_up(PACKET_CONTROL_BYTES + words * ranks * 4, 16);
        let start = align_up(of_expert + words * expert_maps * 4, 16);
        let counts = align_up(start + (local + 1) * 4, 16);
        let ids = align_up(counts + local * 4, 16);
        let shared_bytes = ids + units.div_ceil(placers) * id_packets(topk) * 3 * 4;
        if shared_bytes > limits.shared_bytes {
            let need = format!(
                "{} experts and top-{} on {blocks} blocks need {shared_bytes} bytes of shared memory, of {}",
                shape.experts, shape.topk, limits.shared_bytes
            );
            return Err(Error::invalid("max_tokens", shape.max_tokens, need));
        }
        let (experts, row_bytes, scale_packs) = (shape.experts, shape.row_bytes, shape.scale_packs);
        Ok(Self {
            area: area(packets, max_tokens),
            blocks,
            senders,
            placers,
            threads: PACKET_DISPATCH_THREADS,
            groups,
            words,
            all_experts,
            limited,
            of_expert,
            start,
            counts,
            ids,
            shared_bytes,
            sizes: (!limited).then_some(PacketSizes { max_tokens, topk, experts, row_bytes, scale_packs }),
        })
    }

    /// `experts`: of all ranks.
    pub(super) fn combine(
        shape: &CombineShape,
        experts: usize,
        limits: Limits,
        packets: &PacketLayout,
    ) -> Self {
        let (max_tokens, topk, row_bytes) = (shape.max_tokens, shape.topk, shape.row_bytes);
        let groups = packet_groups(row_bytes);
        // A half sums what came from each peer, the other one own tokens; with one rank all do: half of the blocks if tokens are few, else half of all warps.
        let (peers, roles) = match shape.ranks {
            1 => (1, 1),
            ranks => (ranks - 1, 2),
        };
        let few = peers * max_tokens <= PACKET_FEW_TOKENS;
        let items = roles * peers * max_tokens * groups.div_ceil(32) * if few { 2 } else { 1 };
        let warps = PACKET_COMBINE_THREADS / if few { 64 } else { 32 };
        // A multiprocessor loads rows at its own pace: few items go to as many as leave room for a dispatch beside them.
        let shares = items.div_ceil(warps).max(items.min((limits.blocks / 2).saturating_sub(1)));
        let blocks = Self::blocks(shares, limits);
        Self {
            blocks,
            senders: if roles == 2 && few { blocks / 2 } else { 0 },
            placers: 0,
            threads: PACKET_COMBINE_THREADS,
            area: area(packets, max_tokens),
            groups,
            words: 0,
            all_experts: false,
            limited: false,
            of_expert: 0,
            start: 0,
            counts: 0,
            ids: 0,
            shared_bytes: 0,
            sizes: Some(PacketSizes { max_tokens, topk, experts, row_bytes, scale_packs: 0 }),
        }
    }

    /// Arguments of a dispatch.
    pub(super) fn dispatch_params(&self, call: DispatchParams) -> PacketDispatchParams {
        PacketDispatchParams {
            call,
            area: self.area,
            groups: self.groups as u32,
            words: self.words as u32,
            senders: self.senders as u32,
            first: (self.blocks - self.placers) as u32,
            per_block: match self.placers {
                1 => 0,
                placers => ((1 << 32) / placers as u64 + 1) as u32,
            },
            all_experts: u32::from(self.all_experts),
            limited: u32::from(self.limited),
            of_expert: self.of_expert as u32,
            start: self.start as u32,
            counts: self.counts as u32,
            ids: self.ids as u32,
            reserved: 0,
        }
    }

    /// Arguments of a combine.
    pub(super) fn combine_params(&self, call: CombineParams) -> PacketCombineParams {
        PacketCombineParams {
            call,
            area: self.area,
            groups: self.groups as u32,
            senders: self.senders as u32,
        }
    }

    /// The sizes that a kernel of this grid can be compiled for.
    pub(super) fn sizes(&self) -> Option<PacketSizes> {
        self.sizes
    }

    pub(super) fn launch(&self) -> LaunchShape {
        LaunchShape { blocks: self.blocks, threads: self.threads, shared_bytes: self.shared_bytes }
    }
}

impl Engine {
    /// Kernels of packets that are made for the sizes of a buffer's own shapes. Calls of other shapes take those for all sizes.
    pub(crate) fn programs_for_sizes(&self, config: &HeapConfig) -> Result<Vec<Program>> {
        let mut all = Vec::new();
        for dispatched in &config.dispatch {
            all.extend(self.setting.dispatch(dispatched)?.program_for_sizes());
            for combine in config.combine.iter().filter(|c| c.placement == dispatched.placement) {
                all.extend(self.setting.combine(combine, dispatched, false)?.program_for_sizes());
            }
        }
        Ok(all)
    }

    /// Compiles and loads all that calls of a buffer can need, so that no later call does. All ranks do so at the same time.
    pub(crate) fn prewarm_for(&self, config: &HeapConfig) -> Result<()> {
        let for_all = self.programs();
        let for_sizes = self.programs_for_sizes(config)?;
        let failed = match self.prewarm(&[&for_all[..], &for_sizes[..]].concat()) {
            Err(error) if !for_sizes.is_empty() => error,
            done => return done,
        };
        match &failed {
            // What is compiled into the build does without a compiler, and is for all sizes.
            Error::Jit(
                JitError::NotEmbedded { .. } | JitError::NotFound { .. } | JitError::TooOld { .. },
            ) => self.prewarm(&for_all),
            _ => Err(failed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::HeapLayout;
    use crate::layout::test_shapes::{combine, dispatch};

    const HOPPER: Limits = Limits { blocks: 132, shared_bytes: 232_448, link: 367 };

    fn packets(shape: &DispatchShape) -> PacketLayout {
        let config = HeapConfig {
            dispatch: vec![*shape],
            combine: vec![],
            output_slots: 1,
            handle_slots: 1,
            receive_sets: 1,
            combine_inputs: 0,
            packets: true,
        };
        HeapLayout::new(&config).unwrap().workspace.packets.unwrap()
    }

    #[test]
    fn a_decode_batch() {
        let mut shape = dispatch(2, 128, Placement::Expanded);
        let g = PacketGrid::dispatch(&shape, HOPPER, &packets(&shape)).unwrap();
        assert_eq!((g.blocks, g.groups, g.words), (132, 132, 8));
        assert!(!g.limited && g.sizes.is_some() && g.shared_bytes < 8192, "{g:?}");
        assert_eq!((g.senders, g.placers), (132, 132));
        let few = dispatch(2, 32, Placement::Expanded);
        let few = PacketGrid::dispatch(&few, HOPPER, &packets(&few)).unwrap();
        assert_eq!((few.blocks, few.senders, few.placers), (97, 32, 65));
        let more = dispatch(2, 64, Placement::Expanded);
        let more = PacketGrid::dispatch(&more, HOPPER, &packets(&more)).unwrap();
        assert_eq!((more.blocks, more.senders, more.placers), (132, 44, 88));
        let shared = PacketGrid::dispatch(&shape, Limits { blocks: 3, ..HOPPER }, &packets(&shape)).unwrap();
        assert_eq!((shared.blocks, shared.senders, shared.placers), (3, 3, 3));
        shape.row_capacity -= 1;
        let g = PacketGrid::dispatch(&shape, HOPPER, &packets(&shape)).unwrap();
        assert!(g.limited && g.all_experts && g.sizes.is_none());
        assert_eq!(g.start - g.of_expert, 8 * 256 * 4);
        // A warp for each part of each row that is sent or summed, on up to half of the multiprocessors if that is enough.
        let mut back = combine(2, 8, Placement::Plain, true);
        for (max_tokens, blocks) in [(1, 33), (8, 66), (32, 129), (64, 66), (128, 129)] {
            back.max_tokens = max_tokens;
            let g = PacketGrid::combine(&back, 256, HOPPER, &packets(&shape));
            assert_eq!((g.blocks, g.groups), (blocks, 256));
        }
    }

    #[test]
    fn units_are_divided_by_blocks() {
        let shape = dispatch(8, 256, Placement::Plain);
        for blocks in 1..=200 {
            let limits = Limits { blocks, ..HOPPER };
            let grid = PacketGrid::dispatch(&shape, limits, &packets(&shape)).unwrap();
            let factor = u64::from(grid.dispatch_params(DispatchParams::default()).per_block);
            for unit in 0..2048u64 {
                let turn = if factor == 0 { unit } else { (unit * factor) >> 32 };
                assert_eq!(turn, unit / grid.placers as u64, "{unit} of {blocks}");
            }
        }
    }

    #[test]
    fn whatever_can_travel_in_packets_fits() {
        for (ranks, tokens, experts) in
            [(1, 256, 2048), (2, 256, 1024), (8, 256, 256), (8, 1, 2048), (8, 64, 1024)]
        {
            assert!(PacketLayout::possible(ranks, tokens, experts), "{ranks} {tokens} {experts}");
            for (blocks, topk) in [(132, 32), (20, 32), (4, 8)] {
                let mut shape = dispatch(ranks, tokens, Placement::Expanded);
                (shape.experts, shape.topk) = (experts, topk);
                shape.row_capacity = 1;
                let limits = Limits { blocks, ..HOPPER };
                let g = PacketGrid::dispatch(&shape, limits, &packets(&shape)).unwrap();
                assert!(g.shared_bytes <= HOPPER.shared_bytes && g.blocks <= blocks, "{g:?}");
            }
        }
    }
}
