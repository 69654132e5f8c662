//! Rows of small batches: data and flag in one packet.

use super::{CombineShape, Cursor, DispatchShape, MAX_EXPERTS, WorkspaceLayout};

/// Most tokens of a rank for which rows travel in packets.
pub const MAX_PACKET_TOKENS: usize = 256;
/// Bytes of a packet: 14 bytes of a row and a tag of 16 bits, or three words and an epoch.
pub const PACKET_BYTES: usize = 16;
/// Packets that a thread makes of one piece of a row.
pub const GROUP_PACKETS: usize = 4;
/// Bytes of such a piece.
pub const GROUP_BYTES: usize = 56;
// An id has 12 bits in a packet, and all of them set for none.
const _: () = assert!(MAX_EXPERTS < (1 << 12));
/// Bytes of bit maps that a block can hold: a bit for each expert and token.
const MAX_MAP_BYTES: usize = 64 << 10;

/// Pieces of a row of so many bytes, a multiple of 4.
pub const fn packet_groups(bytes: usize) -> usize {
    bytes.div_ceil(GROUP_BYTES)
}

/// Packets of the ids of a token: eight of 12 bits in three words.
pub const fn id_packets(topk: usize) -> usize {
    topk.div_ceil(8)
}

/// Packets of the weights of a token: three words a packet.
pub const fn weight_packets(topk: usize) -> usize {
    topk.div_ceil(3)
}

/// The part of a workspace through which small batches travel. All of it consists of packets, except `begun`.
///
/// Everything is there twice, once for each parity of the epoch. Rows that come in have a slot for each rank, the own one included; rows that come back
/// one for each peer: that of rank s at rank r is s for s < r, else s − 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketLayout {
    /// Peer, `u64[2][2 parities][ranks]`, one cache line each: a kernel of dispatch, or of combine, has started, and with what call.
    pub begun: usize,
    /// Peer, `[2 parities][ranks]`, one cache line each: digest of a dispatch's call.
    pub heads: usize,
    /// Peer, `[2 parities][ranks][packets of a token][max_tokens]`: ids.
    pub ids: usize,
    /// Bytes of a rank there.
    pub id_stride: usize,
    /// Peer, `[2 parities][ranks][max_tokens]`: weights of a token.
    pub weights: usize,
    /// Bytes of a token there.
    pub weight_stride: usize,
    /// Peer, `[2 parities][ranks][max_tokens]`: rows and scales of a dispatch.
    pub rows: usize,
    /// Bytes of a row there.
    pub row_stride: usize,
    /// Peer, `[2 parities][ranks − 1][max_tokens]`: rows of a combine.
    pub back: usize,
    /// Bytes of a row there.
    pub back_stride: usize,
    /// Peer, `[2 parities][ranks − 1][max_tokens]`: weights of a combine.
    pub back_weights: usize,
    /// Bytes of a token there.
    pub back_weight_stride: usize,
    /// Bytes of all of it.
    pub bytes: usize,
}

impl PacketLayout {
    /// Whether dispatches of this size can travel in packets.
    pub const fn possible(ranks: usize, max_tokens: usize, experts: usize) -> bool {
        max_tokens <= MAX_PACKET_TOKENS
            && experts.saturating_mul((ranks * max_tokens).div_ceil(32) * 4) <= MAX_MAP_BYTES
    }

    /// Layout from `cursor` on, for the largest of these shapes, which have the same ranks and max_tokens.
    pub(super) fn place(
        cursor: &mut Cursor,
        ranks: usize,
        max_tokens: usize,
        dispatch: &[DispatchShape],
        combine: &[CombineShape],
    ) -> Self {
        let start = cursor.bytes();
        let most = |all: &mut dyn Iterator<Item = usize>| all.max().unwrap_or(0);
        let topk = most(&mut dispatch.iter().map(|s| s.topk));
        let id_stride = PACKET_BYTES * id_packets(topk) * max_tokens;
        let weight_stride = PACKET_BYTES * weight_packets(topk);
        let group = PACKET_BYTES * GROUP_PACKETS;
        let row_stride =
            group * most(&mut dispatch.iter().map(|s| packet_groups(s.row_bytes + s.scale_bytes())));
        let back_stride = group * most(&mut combine.iter().map(|s| packet_groups(s.row_bytes)));
        let back_weight_stride = PACKET_BYTES * most(&mut combine.iter().map(|s| weight_packets(s.topk)));
        let line = WorkspaceLayout::LINE;
        let (slots, peers) = (2 * ranks * max_tokens, 2 * (ranks - 1) * max_tokens);
        let begun = cursor.take(4 * ranks, line);
        let heads = cursor.take(2 * ranks, line);
        let ids = cursor.take(2 * ranks, id_stride);
        let weights = cursor.take(slots, weight_stride);
        let rows = cursor.take(slots, row_stride);
        let back = cursor.take(peers, back_stride);
        let back_weights = cursor.take(peers, back_weight_stride);
        Self {
            begun,
            heads,
            ids,
            id_stride,
            weights,
            weight_stride,
            rows,
            row_stride,
            back,
            back_stride,
            back_weights,
            back_weight_stride,
            bytes: cursor.bytes() - start,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Placement;
    use super::super::shape::tests::{combine, dispatch};
    use super::*;

    #[test]
    fn usual_rows() {
        // 7168 bytes and 56 scales: 132 pieces without a rest.
        assert_eq!(packet_groups(7168 + 224), 132);
        assert_eq!(packet_groups(14336), 256);
        assert_eq!((id_packets(8), weight_packets(8)), (1, 3));
        assert_eq!((id_packets(1), weight_packets(1)), (1, 1));
        assert_eq!((id_packets(32), weight_packets(32)), (4, 11));
    }

    #[test]
    fn a_decode_batch() {
        let mut cursor = Cursor::at(0);
        let (d, c) = (dispatch(2, 128, Placement::Expanded), combine(2, 8, Placement::Expanded, true));
        let p = PacketLayout::place(&mut cursor, 2, 128, &[d], &[c]);
        assert_eq!(
            (p.id_stride, p.weight_stride, p.row_stride, p.back_stride, p.back_weight_stride),
            (2048, 48, 8448, 16384, 48)
        );
        assert_eq!(p.back - p.rows, 2 * 2 * 128 * 8448);
        assert!(p.bytes < 9 << 20, "{}", p.bytes);
    }

    #[test]
    fn what_can_travel_in_packets() {
        assert!(PacketLayout::possible(2, 128, 256) && PacketLayout::possible(8, 256, 256));
        assert!(!PacketLayout::possible(2, 257, 256));
        assert!(!PacketLayout::possible(8, 256, 512));
        assert!(PacketLayout::possible(1, 1, 2048));
    }
}
