//! Geometry of operations whose rows travel in packets.

use super::LaunchShape;
use super::grid::Limits;
use crate::error::{Error, Result};
use crate::jit::params::{
    CombineParams, DispatchParams, PacketArea, PacketCombineParams, PacketDispatchParams,
};
use crate::jit::{PACKET_CONTROL_BYTES, THREADS};
use crate::layout::{
    CombineShape, DispatchShape, MAX_BLOCKS, PacketLayout, Placement, align_up, packet_groups,
};

/// Where packets lie, for kernels.
fn area(p: &PacketLayout, max_tokens: usize) -> PacketArea {
    PacketArea {
        begun: p.begun as u64,
        heads: p.heads as u64,
        lanes: p.lanes as u64,
        rows: p.rows as u64,
        back: p.back as u64,
        back_weights: p.back_weights as u64,
        lane_stride: p.lane_stride as u64,
        row_stride: p.row_stride as u64,
        back_stride: p.back_stride as u64,
        back_weight_stride: p.back_weight_stride as u64,
        max_tokens: max_tokens as u32,
        reserved: 0,
    }
}

/// Blocks of an operation in packets, and for a dispatch the maps that each holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PacketGrid {
    area: PacketArea,
    blocks: usize,
    groups: usize,
    /// Words of a map, and number of maps.
    words: usize,
    maps: usize,
    all_experts: bool,
    limited: bool,
    start: usize,
    counts: usize,
    ids: usize,
    shared_bytes: usize,
}

impl PacketGrid {
    /// One block for each token of each rank, as far as there are multiprocessors.
    fn blocks(units: usize, limits: Limits) -> usize {
        units.clamp(1, limits.blocks.clamp(1, MAX_BLOCKS))
    }

    pub(super) fn dispatch(shape: &DispatchShape, limits: Limits, packets: &PacketLayout) -> Result<Self> {
        let expanded = shape.placement == Placement::Expanded;
        let units = shape.ranks * shape.max_tokens;
        let blocks = Self::blocks(units, limits);
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
        let (words, maps) = (units.div_ceil(32), shape.ranks + expert_maps);
        let start = align_up(PACKET_CONTROL_BYTES + words * maps * 4, 16);
        let counts = align_up(start + (local + 1) * 4, 16);
        let ids = align_up(counts + local * 4, 16);
        let shared_bytes = ids + units.div_ceil(blocks) * shape.topk * 2;
        if shared_bytes > limits.shared_bytes {
            let need = format!(
                "{} experts and top-{} on {blocks} blocks need {shared_bytes} bytes of shared memory, of {}",
                shape.experts, shape.topk, limits.shared_bytes
            );
            return Err(Error::invalid("max_tokens", shape.max_tokens, need));
        }
        let groups = packet_groups(shape.row_bytes + shape.scale_bytes());
        Ok(Self {
            area: area(packets, max_tokens),
            blocks,
            groups,
            words,
            maps,
            all_experts,
            limited,
            start,
            counts,
            ids,
            shared_bytes,
        })
    }

    pub(super) fn combine(shape: &CombineShape, limits: Limits, packets: &PacketLayout) -> Self {
        // Tokens that come from others, or own ones.
        let units = (shape.ranks - 1).max(1) * shape.max_tokens;
        Self {
            blocks: Self::blocks(units, limits),
            area: area(packets, shape.max_tokens),
            groups: packet_groups(shape.row_bytes),
            words: 0,
            maps: 0,
            all_experts: false,
            limited: false,
            start: 0,
            counts: 0,
            ids: 0,
            shared_bytes: 0,
        }
    }

    /// Arguments of a dispatch.
    pub(super) fn dispatch_params(&self, call: DispatchParams) -> PacketDispatchParams {
        PacketDispatchParams {
            call,
            area: self.area,
            groups: self.groups as u32,
            words: self.words as u32,
            maps: (self.words * self.maps) as u32,
            all_experts: u32::from(self.all_experts),
            limited: u32::from(self.limited),
            start: self.start as u32,
            counts: self.counts as u32,
            ids: self.ids as u32,
        }
    }

    /// Arguments of a combine.
    pub(super) fn combine_params(&self, call: CombineParams) -> PacketCombineParams {
        PacketCombineParams { call, area: self.area, groups: self.groups as u32, reserved: 0 }
    }

    pub(super) fn launch(&self) -> LaunchShape {
        LaunchShape { blocks: self.blocks, threads: THREADS, shared_bytes: self.shared_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::HeapConfig;
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
            packets: true,
        };
        HeapLayout::new(&config).unwrap().workspace.packets.unwrap()
    }

    #[test]
    fn a_decode_batch() {
        let mut shape = dispatch(2, 128, Placement::Expanded);
        let g = PacketGrid::dispatch(&shape, HOPPER, &packets(&shape)).unwrap();
        assert_eq!((g.blocks, g.groups, g.words, g.maps), (132, 132, 8, 130));
        assert!(!g.limited && g.shared_bytes < 8192, "{g:?}");
        shape.row_capacity -= 1;
        let g = PacketGrid::dispatch(&shape, HOPPER, &packets(&shape)).unwrap();
        assert!(g.limited && g.all_experts && g.maps == 258);
        let g = PacketGrid::combine(&combine(2, 8, Placement::Plain, true), HOPPER, &packets(&shape));
        assert_eq!((g.blocks, g.groups), (64, 256));
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
