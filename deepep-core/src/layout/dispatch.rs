//! Output slots and handle slots of a dispatch.

use super::{Cursor, DispatchShape, MAX_RANKS, Placement};

/// What a dispatch delivers, in one output slot. "Written by peers" is meant of rows that travel as rows: what comes in packets the receiver puts here itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLayout {
    /// `[row_capacity][row_bytes]`: received rows. Written by peers.
    pub rows: usize,
    /// Scale packs of the received rows, in the shape's order. Written by peers.
    pub scales: usize,
    /// `f32[token_capacity][K]`: all weights of each received token as its rank gave them. Written by peers.
    pub lane_weight: usize,
    /// Plain: `i32` or `i64` `[token_capacity][K]`: expert ids local to this rank, −1 for lanes that live elsewhere. Written by peers.
    pub lane_expert: usize,
    /// Expanded: `f32[row_capacity]`: weight of each row. Written by the receiver.
    pub row_weight: usize,
    /// Bytes of the slot.
    pub bytes: usize,
}

impl OutputLayout {
    /// Layout for a call of this shape.
    pub fn new(shape: &DispatchShape) -> Self {
        let expanded = shape.placement == Placement::Expanded;
        let (pack, row) = shape.scale_strides();
        let scales = match shape.scale_packs {
            0 => 0,
            packs => pack.saturating_mul(packs).max(row.saturating_mul(shape.row_capacity)),
        };
        let lanes = shape.token_capacity.saturating_mul(shape.topk);
        let mut c = Cursor::at(0);
        let rows = c.take(shape.row_capacity, shape.row_bytes);
        let scales = c.take(scales, 4);
        let lane_weight = c.take(lanes, 4);
        let lane_expert = c.take(if expanded { 0 } else { lanes }, shape.index.bytes());
        let row_weight = c.take(if expanded { shape.row_capacity } else { 0 }, 4);
        Self { rows, scales, lane_weight, lane_expert, row_weight, bytes: c.bytes() }
    }
}

/// What combine and a cached dispatch need of an earlier dispatch, in one handle slot. Of a dispatch in packets the owner writes all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandleLayout {
    /// `(u32 global token id, u32 lane mask)[token_capacity]`, the id being rank · max_tokens + token. Written by peers.
    pub source: usize,
    /// Expanded: `i32[token_capacity][K]`: row of each lane, −1 for lanes that live elsewhere. Written by peers.
    pub lane_row: usize,
    /// `i32[max_tokens][K]`: expert ids of this rank's tokens, invalid ones as −1.
    pub topk: usize,
    /// `i32[max_tokens][R]`: row at each rank (expanded: of the lowest lane there; at other ranks of a dispatch in packets the token
    /// index, since they place rows themselves), −1 if the token does not go there.
    pub sent_row: usize,
    /// Expanded: `i32[max_tokens][R]`: token index at each rank, −1 if the token does not go there.
    pub sent_index: usize,
    /// Expanded: `i32[max_tokens][K]`: row of each lane whose expert lives here, else −1.
    pub own_row: usize,
    /// `i32[4]`: tokens received, rows (with padding), and for a call over capacity the tokens and rows that would be needed, else 0.
    pub counts: usize,
    /// `i32[R]`: inclusive prefix sum of received tokens over source ranks.
    pub rank_psum: usize,
    /// `i32[EL + 1]`: first row of each local expert, aligned; the last entry is the number of rows.
    pub expert_start: usize,
    /// `i32[EL]`: rows of each local expert, without padding.
    pub expert_count: usize,
    /// Of a dispatch in packets: `i32[R][max_tokens][K]`: row here of each lane of each rank's tokens, −1 for lanes that live elsewhere.
    pub lane_place: usize,
    /// Bytes of the slot.
    pub bytes: usize,
}

impl HandleLayout {
    /// Entries of [`counts`](Self::counts).
    pub const COUNTS: usize = 4;

    /// Layout for a call of this shape. `packets`: rows travel in packets (see [`PacketLayout`](super::PacketLayout)).
    pub fn new(shape: &DispatchShape, packets: bool) -> Self {
        let expanded = shape.placement == Placement::Expanded;
        let if_expanded = |count: usize| if expanded { count } else { 0 };
        let received = shape.token_capacity;
        let own = shape.max_tokens;
        let local = shape.local_experts();
        let mut c = Cursor::at(0);
        let counts = c.take(Self::COUNTS, 4);
        let rank_psum = c.take(MAX_RANKS, 4);
        let expert_start = c.take(local + 1, 4);
        let expert_count = c.take(local, 4);
        let source = c.take(received, 8);
        let lane_row = c.take(if_expanded(received * shape.topk), 4);
        let topk = c.take(own * shape.topk, 4);
        let sent_row = c.take(own * shape.ranks, 4);
        let sent_index = c.take(if_expanded(own * shape.ranks), 4);
        let own_row = c.take(if_expanded(own * shape.topk), 4);
        let lane_place = c.take(if packets { shape.ranks * own * shape.topk } else { 0 }, 4);
        Self {
            source,
            lane_row,
            topk,
            sent_row,
            sent_index,
            own_row,
            counts,
            rank_psum,
            expert_start,
            expert_count,
            lane_place,
            bytes: c.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::tests::dispatch;
    use super::super::{IndexWidth, ScaleOrder};
    use super::*;

    #[test]
    fn plain_output() {
        let o = OutputLayout::new(&dispatch(2, 4096, Placement::Plain));
        assert_eq!(o.rows, 0);
        assert_eq!(o.scales, 8192 * 7168);
        assert_eq!(o.lane_weight - o.scales, 8192 * 224);
        assert_eq!(o.lane_expert - o.lane_weight, 8192 * 8 * 4);
        assert_eq!(o.row_weight - o.lane_expert, 8192 * 8 * 8);
        assert_eq!(o.bytes, o.row_weight);
    }

    #[test]
    fn column_major_scales_need_whole_columns() {
        let mut s = dispatch(2, 1, Placement::Plain);
        (s.scale_order, s.scale_packs, s.index) = (ScaleOrder::ColumnMajor, 3, IndexWidth::Bits32);
        assert_eq!(s.scale_strides(), (4, 1));
        let o = OutputLayout::new(&s);
        assert!(o.lane_weight - o.scales >= 3 * 4 * 4);
        s.scale_packs = 0;
        let o = OutputLayout::new(&s);
        assert_eq!(o.scales, o.lane_weight);
    }

    #[test]
    fn handle_is_small() {
        let plain = HandleLayout::new(&dispatch(2, 4096, Placement::Plain), false);
        assert!(plain.bytes < 260_000, "{}", plain.bytes);
        assert_eq!(plain.lane_row, plain.topk);
        let expanded = HandleLayout::new(&dispatch(2, 4096, Placement::Expanded), false);
        assert_eq!(expanded.topk - expanded.lane_row, 8192 * 8 * 4);
        assert!(expanded.bytes < 2 << 20);
    }
}
