//! The status block: what a rank's kernels tell its host, in host memory that the device can write.

use super::{Cursor, MAX_RANKS};

/// Bytes of a record in the status block.
pub const STATUS_RECORD_BYTES: usize = 128;

/// What a record of the status block reports. Each kind has one place; the newest wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum RecordKind {
    /// A wait reached its deadline, or a peer's did: the buffer is broken.
    Abort = 0,
    /// An expert id is neither −1 nor an expert; the lane was treated as −1.
    BadExpert = 1,
    /// A token names an expert twice; the second lane was treated as −1.
    DuplicateExpert = 2,
    /// More tokens or rows than the capacity; no row was moved.
    Capacity = 3,
}

impl RecordKind {
    /// Number of kinds.
    pub const COUNT: usize = 4;
    /// All kinds, in the order of their places.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Abort, Self::BadExpert, Self::DuplicateExpert, Self::Capacity];
}

/// Offsets in the status block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusLayout {
    /// `[RecordKind::COUNT][STATUS_RECORD_BYTES]`.
    pub records: usize,
    /// Exact counts of the newest dispatch that was asked for them; see [`CountsLayout`].
    pub counts: usize,
    /// Bytes of the block.
    pub bytes: usize,
}

impl StatusLayout {
    /// Layout for a buffer with at most `local_experts` experts on each rank.
    pub fn new(local_experts: usize) -> Self {
        let mut c = Cursor::at(0);
        let records = c.take(RecordKind::COUNT, STATUS_RECORD_BYTES);
        let counts = c.take(CountsLayout::cells(local_experts), 8);
        Self { records, counts, bytes: c.bytes() }
    }

    /// Offset of the record of a kind.
    pub const fn record(&self, kind: RecordKind) -> usize {
        self.records + kind as usize * STATUS_RECORD_BYTES
    }
}

/// Indices of the `u64` cells in which a dispatch reports exact counts. A cell is `tag << 32 | value`, and valid when the tag is the
/// one the host gave to the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountsLayout;

impl CountsLayout {
    /// Tokens received.
    pub const TOKENS: usize = 0;
    /// Rows, padding included.
    pub const ROWS: usize = 1;
    /// Tokens that would be needed, if the call was over capacity; else 0.
    pub const NEEDED_TOKENS: usize = 2;
    /// Rows that would be needed, if the call was over capacity; else 0.
    pub const NEEDED_ROWS: usize = 3;
    /// First of the inclusive prefix sums of received tokens over source ranks.
    pub const RANK_PSUM: usize = 4;
    /// First of the unpadded rows of each local expert.
    pub const EXPERT_COUNT: usize = 4 + MAX_RANKS;

    /// Number of cells.
    pub const fn cells(local_experts: usize) -> usize {
        Self::EXPERT_COUNT + local_experts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_places_of_their_own() {
        let s = StatusLayout::new(128);
        for (i, kind) in RecordKind::ALL.into_iter().enumerate() {
            assert_eq!(s.record(kind), i * STATUS_RECORD_BYTES);
        }
        assert_eq!(s.counts, 512);
        assert_eq!(s.bytes, 512 + 1280);
    }
}
