//! The workspace: every cell ranks and blocks synchronise through. Zero when the buffer is made, never cleared afterwards.

use super::{Cursor, MAX_BLOCKS, MAX_SENDERS, PacketLayout, align_up};

/// What tickets are drawn for. Each has its own cache line in each parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Ticket {
    /// Rows of a dispatch that blocks share among themselves.
    Send = 0,
    /// Rows of the own rank.
    Own = 1,
    /// Rows that came in and are duplicated.
    Incoming = 2,
    /// Rows of a combine.
    Return = 3,
    /// Tokens that a combine sums from rows that it pulls.
    Sum = 4,
    /// Blocks of a combine that have read all that they pull.
    Read = 5,
}

impl Ticket {
    /// Number of kinds.
    pub const COUNT: usize = 6;
}

/// Offsets of the workspace's cells.
///
/// "Peer" cells are written by other ranks, "own" cells only by the owner. Sizes follow the buffer's maxima, so that they are the
/// same for every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Peer, `u64[2 parities][ranks][cells]`: call, place, and (of a rank on a CPU) totals of a dispatch: E experts, R ranks.
    pub totals: usize,
    /// Cells of one rank in [`totals`](Self::totals).
    pub cells: usize,
    /// Peer, `u64[2 parities][ranks][MAX_SENDERS][count_cells]`: what a sending block of a dispatch has counted: tokens for each rank, and from
    /// [`count_pairs`](Self::count_pairs) on tokens of two experts a cell.
    pub counts: usize,
    /// Cells of one block in [`counts`](Self::counts).
    pub count_cells: usize,
    /// Peer, `u64[ranks * max_tokens]`, by token index: a row of an expanded dispatch is in its first place, or has landed.
    pub ready: usize,
    /// Peer, `u32[ranks][MAX_BLOCKS]`: a sending block of a plain dispatch is done.
    pub done: usize,
    /// Peer, `u64[2 parities][ranks]`, one cache line each: a combine kernel has started, and with what call. In a call that pulls two more words of the
    /// line say where that rank's rows and weights lie in its heap.
    pub started: usize,
    /// Peer, `u32[ranks]`, one cache line each: a rank has read all that it pulls from here in a combine.
    pub read: usize,
    /// Peer, `u32[sets][slots][max_tokens][parts]`: a row of a combine, or a part of it, has arrived.
    pub arrived: usize,
    /// Cells of one set in [`arrived`](Self::arrived).
    pub arrived_set: usize,
    /// Peer, `u32[ranks]`, one cache line each: barriers.
    pub barrier: usize,
    /// Peer, `u64`: a rank gave up; zero as long as all is well.
    pub abort: usize,
    /// Own, `u32[5][MAX_BLOCKS]`: epochs of dispatch, combine, barrier, and of dispatch and combine in packets.
    pub epochs: usize,
    /// Own, `u32[2 parities][Ticket::COUNT]`, one cache line each. See [`Ticket`].
    pub tickets: usize,
    /// Own, `u64[2][MAX_SENDERS]`: a sending block has written its tables; it has told other ranks of its tokens.
    pub chunks: usize,
    /// Own, `u32[record kinds]`: epoch of the newest record of each kind in the status block.
    pub reported: usize,
    /// What small batches travel through, if they travel in packets.
    pub packets: Option<PacketLayout>,
    /// Bytes of the workspace.
    pub bytes: usize,
}

impl WorkspaceLayout {
    /// Bytes between two cells that must not share a cache line.
    pub const LINE: usize = 128;
    /// Kinds of [`epochs`](Self::epochs).
    const EPOCHS: usize = 5;
    /// The call cell of a rank in [`totals`](Self::totals).
    pub const CELL_CALL: usize = 0;
    /// The place cell.
    pub const CELL_PLACE: usize = 1;
    /// First of the E + R count cells.
    pub const CELL_COUNTS: usize = 2;

    /// First cell of the experts among those of a block in [`counts`](Self::counts); an even number.
    pub const fn count_pairs(ranks: usize) -> usize {
        ranks.next_multiple_of(2)
    }

    /// Layout for a buffer with these maxima. `flags` is the most flags that a token has in combine's receive area.
    pub fn new(ranks: usize, max_tokens: usize, experts: usize, flags: usize, sets: usize) -> Self {
        let cells = align_up(Self::CELL_COUNTS + experts + ranks, 16);
        let count_cells = align_up(Self::count_pairs(ranks) + experts.div_ceil(2), 16);
        let arrived_set = flags * max_tokens;
        let mut c = Cursor::at(0);
        let abort = c.take(1, Self::LINE);
        let barrier = c.take(ranks, Self::LINE);
        let started = c.take(2 * ranks, Self::LINE);
        let read = c.take(ranks, Self::LINE);
        let totals = c.take(2 * ranks * cells, 8);
        let counts = c.take(2 * ranks * MAX_SENDERS * count_cells, 8);
        let done = c.take(ranks * MAX_BLOCKS, 4);
        let ready = c.take(ranks * max_tokens, 8);
        let arrived = c.take(sets * arrived_set, 4);
        let epochs = c.take(Self::EPOCHS * MAX_BLOCKS, 4);
        let tickets = c.take(2 * Ticket::COUNT, Self::LINE);
        let chunks = c.take(2 * MAX_SENDERS, 8);
        let reported = c.take(super::RecordKind::COUNT, 4);
        Self {
            totals,
            cells,
            counts,
            count_cells,
            ready,
            done,
            started,
            read,
            arrived,
            arrived_set,
            barrier,
            abort,
            epochs,
            tickets,
            chunks,
            reported,
            packets: None,
            bytes: c.bytes(),
        }
    }

    /// With room for packets; `place` puts it behind the cells.
    pub(super) fn with_packets(mut self, place: impl FnOnce(&mut Cursor) -> PacketLayout) -> Self {
        let mut cursor = Cursor::at(self.bytes);
        self.packets = Some(place(&mut cursor));
        self.bytes = cursor.bytes();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_beside_the_data() {
        let w = WorkspaceLayout::new(8, 8192, 256, 8, 2);
        assert_eq!(w.cells, 272);
        assert_eq!(w.abort, 0);
        assert_eq!(w.barrier, 256);
        assert_eq!(w.totals, 256 + 4 * 8 * 128);
        assert_eq!(w.counts - w.totals, 2 * 8 * 272 * 8);
        assert_eq!(w.count_cells, 144);
        assert_eq!(w.done - w.counts, 2 * 8 * 64 * 144 * 8);
        assert_eq!(w.arrived - w.ready, 8 * 8192 * 8);
        assert!(w.bytes < 5 << 19, "{}", w.bytes);
        assert_eq!(w.bytes % super::super::REGION_ALIGNMENT, 0);
    }

    #[test]
    fn one_rank_needs_no_receive_cells() {
        let w = WorkspaceLayout::new(1, 1, 1, 0, 2);
        assert_eq!(w.arrived, w.epochs);
    }
}
