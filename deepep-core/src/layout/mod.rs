//! Where everything lies: regions of the symmetric heap, of the slots inside it, and of the status block.
//!
//! Pure functions from shapes to offsets and bytes. Kernels and the host backend get these numbers from here, as arguments or as
//! generated constants; none is written down a second time. The protocol that uses the regions is described in
//! `docs/protocol.md`.
//!
//! All offsets and sizes are bytes unless a name says otherwise. Offsets in [`HeapLayout`] count from the start of a rank's heap,
//! offsets in slot layouts from the start of the slot.

pub(crate) mod abi;
#[cfg(test)]
pub(crate) use shape::tests as test_shapes;
mod collective;
mod combine;
mod dispatch;
mod heap;
mod packets;
mod plan;
mod shape;
mod status;
mod workspace;

pub use collective::{COLLECTIVE_BLOCKS, CollectiveConfig, CollectiveLayout};
pub use combine::{InputLayout, ReceiveLayout};
pub use dispatch::{HandleLayout, OutputLayout};
pub use heap::{HeapConfig, HeapLayout, SlotArray};
pub use packets::{
    GROUP_BYTES, GROUP_PACKETS, MAX_PACKET_TOKENS, PACKET_BYTES, PacketLayout, id_packets, packet_groups,
    weight_packets,
};
pub use plan::{Plan, PlanItem};
pub use shape::{CombineShape, DispatchShape, IndexWidth, Placement, ScaleOrder};
pub use status::{
    AbortWord, CountsLayout, Operation, Phase, RecordKind, STATUS_RECORD_BYTES, StatusLayout, StatusRecord,
};
pub use workspace::{Ticket, WorkspaceLayout};

/// Most ranks of one NVLink domain.
pub const MAX_RANKS: usize = 8;
/// Most top-k lanes of a token: a lane mask is one 32-bit word.
pub const MAX_TOPK: usize = 32;
/// Most experts over all ranks.
pub const MAX_EXPERTS: usize = 2048;
/// Most tokens a rank may give to one dispatch.
pub const MAX_TOKENS: usize = 1 << 17;
/// Largest row in bytes: one row must fit into a multiprocessor's shared memory.
pub const MAX_ROW_BYTES: usize = 128 << 10;
/// Most 4-byte scale packs of a row.
pub const MAX_SCALE_PACKS: usize = 4096;
/// Most parts in which the sum of a token travels.
pub const MAX_SUM_PARTS: usize = 4;
/// Most blocks of one kernel.
pub const MAX_BLOCKS: usize = 256;
/// Most blocks of one kernel that send.
pub const MAX_SENDERS: usize = 64;
/// Rows that the ranks send to one rank before their places are known, at most.
pub const LANDING_SLOTS: usize = 1024;
/// Rows are multiples of this.
pub const ROW_GRANULARITY: usize = 16;
/// Alignment of a heap and of its total size: the granularity of device memory mappings.
pub const HEAP_ALIGNMENT: usize = 2 << 20;
/// Alignment of regions.
pub const REGION_ALIGNMENT: usize = 256;

/// `value` rounded up to a multiple of `multiple`.
///
/// Saturates instead of wrapping, so that a size that can't exist fails the caller's limit check.
pub(crate) const fn align_up(value: usize, multiple: usize) -> usize {
    match value % multiple {
        0 => value,
        rest => value.saturating_add(multiple - rest),
    }
}

/// Hands out consecutive, aligned regions.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    end: usize,
}

impl Cursor {
    pub(crate) const fn at(offset: usize) -> Self {
        Self { end: offset }
    }

    /// Offset of the next region, which is `count` elements of `bytes` long. An empty region has an offset, too.
    pub(crate) fn take(&mut self, count: usize, bytes: usize) -> usize {
        let offset = align_up(self.end, REGION_ALIGNMENT);
        self.end = offset.saturating_add(count.saturating_mul(bytes));
        offset
    }

    /// Bytes up to here, a multiple of [`REGION_ALIGNMENT`].
    pub(crate) const fn bytes(&self) -> usize {
        align_up(self.end, REGION_ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_follow_each_other() {
        let mut c = Cursor::at(0);
        assert_eq!(c.take(3, 4), 0);
        assert_eq!(c.take(0, 8), 256);
        assert_eq!(c.take(257, 1), 256);
        assert_eq!(c.take(1, 1), 768);
        assert_eq!(c.bytes(), 1024);
    }

    #[test]
    fn sizes_saturate() {
        let mut c = Cursor::at(16);
        c.take(usize::MAX, 8);
        assert!(c.bytes() >= usize::MAX - REGION_ALIGNMENT);
        assert_eq!(align_up(usize::MAX, 256), usize::MAX);
        assert_eq!(align_up(512, 256), 512);
    }
}
