//! Memory of the collectives: all-gather, reduce-scatter, all-reduce. A heap of the same layout on every rank.

use super::{Cursor, MAX_RANKS, WorkspaceLayout};
use crate::error::{Error, Result};

/// Most blocks of a collective. Each has flags, counters and stages of its own.
pub const COLLECTIVE_BLOCKS: usize = 64;
/// Most bytes of a rank's heap: more than any device has, so that sizes don't overflow later.
const MAX_HEAP_BYTES: usize = 1 << 44;
/// Buffers of a block's stages. The kernels say why there are four.
const BUFFERS: usize = 4;

/// What the heap is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveConfig {
    /// Ranks of the domain, 2 to [`MAX_RANKS`].
    pub ranks: usize,
    /// Most bytes of a rank that travel in cells: the small-message path. A multiple of 8.
    pub cell_bytes: usize,
    /// Bytes of a slot of a stage: what a block moves at a time. A multiple of 128.
    pub slice: usize,
    /// Bytes for the callers' own tensors; 0 for none.
    pub tensor_bytes: usize,
}

impl CollectiveConfig {
    /// Sizes that suit an NVLink domain of so many ranks.
    #[must_use]
    pub const fn new(ranks: usize) -> Self {
        // A megabyte for all others together: up to there cells are faster than stages.
        let cell_bytes = match ranks {
            ..=2 => 1 << 20,
            3 => 512 << 10,
            _ => 256 << 10,
        };
        Self { ranks, cell_bytes, slice: 128 << 10, tensor_bytes: 0 }
    }
}

/// Offsets in every rank's heap. Everything in it is zero when the buffer is made, and never cleared afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveLayout {
    /// What it is made for.
    pub config: CollectiveConfig,
    /// Cells for giving up and for reports, at offset 0.
    pub workspace: WorkspaceLayout,
    /// Peer, `u32[COLLECTIVE_BLOCKS][ranks]`, one cache line a block: the last step that a rank's block has finished.
    pub flags: usize,
    /// Own, `u32[COLLECTIVE_BLOCKS]`: steps of each block.
    pub steps: usize,
    /// Own, `u32[COLLECTIVE_BLOCKS]`: epochs of calls in cells.
    pub epochs: usize,
    /// Peer, `u64[2 parities][ranks]`, one cache line each: what a rank calls.
    pub calls: usize,
    /// Own, `u32`: number of calls.
    pub call_count: usize,
    /// Peer, `u32[2]`, one cache line each: the words of a barrier over multicast.
    pub words: usize,
    /// Own, `u32`: number of such barriers.
    pub count: usize,
    /// Peer, `u64[2 parities][ranks][cells]`.
    pub cells: usize,
    /// Own and peer, `[COLLECTIVE_BLOCKS][4 buffers][slots][slice]` bytes.
    pub stages: usize,
    /// The callers' own tensors.
    pub tensors: usize,
    /// Bytes of a rank's heap.
    pub bytes: usize,
}

impl CollectiveLayout {
    /// Lays a heap out.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for a number of ranks or a size that cannot be.
    pub fn new(config: CollectiveConfig) -> Result<Self> {
        let CollectiveConfig { ranks, cell_bytes, slice, tensor_bytes } = config;
        if !(2..=MAX_RANKS).contains(&ranks) {
            return Err(Error::invalid("ranks of collectives", ranks, format!("must be 2 to {MAX_RANKS}")));
        }
        if cell_bytes == 0 || !cell_bytes.is_multiple_of(8) || cell_bytes > 64 << 20 {
            let need = "must be a multiple of 8 up to 64 MiB";
            return Err(Error::invalid("cell_bytes", cell_bytes, need));
        }
        if slice == 0 || !slice.is_multiple_of(128) || slice > 16 << 20 {
            return Err(Error::invalid("slice", slice, "must be a multiple of 128 up to 16 MiB"));
        }
        // Of everything that dispatch and combine need there is the least.
        let workspace = WorkspaceLayout::new(ranks, 1, ranks, 1, 1);
        let mut c = Cursor::at(workspace.bytes);
        let flags = c.take(COLLECTIVE_BLOCKS, WorkspaceLayout::LINE);
        let steps = c.take(COLLECTIVE_BLOCKS, 4);
        let epochs = c.take(COLLECTIVE_BLOCKS, 4);
        let calls = c.take(2 * ranks, WorkspaceLayout::LINE);
        let call_count = c.take(1, 4);
        let words = c.take(2, WorkspaceLayout::LINE);
        let count = c.take(1, 4);
        let cells = c.take(2 * ranks * (cell_bytes / 4), 8);
        let stages = c.take(COLLECTIVE_BLOCKS * BUFFERS * Self::slots(ranks), slice);
        let tensors = c.take(1, tensor_bytes);
        let bytes = c.bytes();
        if bytes > MAX_HEAP_BYTES {
            let need = format!("a rank's memory would have {bytes} bytes, more than {MAX_HEAP_BYTES}");
            return Err(Error::invalid("tensor_bytes", tensor_bytes, need));
        }
        Ok(Self {
            config,
            workspace,
            flags,
            steps,
            epochs,
            calls,
            call_count,
            words,
            count,
            cells,
            stages,
            tensors,
            bytes,
        })
    }

    /// Slots of a buffer: one for each rank, and two for a sum of two shots.
    const fn slots(ranks: usize) -> usize {
        if ranks > 2 { ranks } else { 2 }
    }

    /// Cells of one rank in one parity.
    #[must_use]
    pub const fn cell_count(&self) -> usize {
        self.config.cell_bytes / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_are_aligned() {
        for (ranks, cell_bytes) in [(2, 1 << 20), (3, 512 << 10), (8, 256 << 10)] {
            let l = CollectiveLayout::new(CollectiveConfig::new(ranks)).unwrap();
            let counters = [l.flags, l.steps, l.epochs, l.calls, l.call_count, l.words, l.count];
            let parts = [&counters[..], &[l.cells, l.stages, l.tensors, l.bytes]].concat();
            assert!(parts.is_sorted() && parts[0] == l.workspace.bytes, "{parts:?}");
            assert!(parts.iter().all(|part| part.is_multiple_of(super::super::REGION_ALIGNMENT)));
            assert_eq!(l.stages - l.cells, 2 * ranks * cell_bytes * 2);
            assert_eq!((l.tensors - l.stages, l.bytes), (64 * 4 * ranks * (128 << 10), l.tensors));
            let config = CollectiveConfig { tensor_bytes: 1000, ..CollectiveConfig::new(ranks) };
            let with_tensors = CollectiveLayout::new(config).unwrap();
            assert_eq!((with_tensors.tensors, with_tensors.bytes), (l.tensors, l.tensors + 1024));
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let good = CollectiveConfig::new(2);
        for bad in [
            CollectiveConfig { ranks: 1, ..good },
            CollectiveConfig { ranks: 9, ..good },
            CollectiveConfig { cell_bytes: 0, ..good },
            CollectiveConfig { cell_bytes: 12, ..good },
            CollectiveConfig { slice: 64, ..good },
            CollectiveConfig { slice: 1 << 30, ..good },
            CollectiveConfig { tensor_bytes: usize::MAX, ..good },
        ] {
            assert!(CollectiveLayout::new(bad).is_err(), "{bad:?}");
        }
    }
}
