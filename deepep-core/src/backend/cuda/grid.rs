//! How many blocks a kernel gets, what each does, and how its shared memory is divided.

use crate::error::{Error, Result};
use crate::jit::{DISPATCH_CONTROL_BYTES, THREADS};
use crate::layout::{DispatchShape, MAX_BLOCKS, MAX_SENDERS, Placement, ScaleOrder, align_up};

pub(super) const WARPS: usize = THREADS / 32;
/// Alignment of a stage: a bulk copy's is 16, a cache line's 128.
pub(super) const STAGE_ALIGNMENT: usize = 128;
/// Stages of a row warp at most: eight lanes share one.
const MAX_STAGES: usize = 4;
/// Warps of a block that carry rows, at most. The others read ids and write tables; small rows need no more.
const MOST_ROW_WARPS: usize = WARPS / 2;
/// Warps that don't carry rows, at least: one announces or says that rows are there, one waits for other ranks.
const LEAST_WORKERS: usize = 4;
/// Rows of a block that leave before there are tables, at most: one for each stage.
pub(super) const MOST_FIRST_TOKENS: usize = (WARPS - LEAST_WORKERS) * MAX_STAGES;
/// Tokens of one sending block at most: it counts them in 16 bits, and in the expanded layout counts of eight blocks are summed in 16 bits.
const fn most_tokens(placement: Placement) -> usize {
    match placement {
        Placement::Plain => u16::MAX as usize,
        Placement::Expanded => u16::MAX as usize / 8,
    }
}

/// What a device offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Multiprocessors that operations may use: each holds one block.
    pub(super) blocks: usize,
    /// Shared memory of a block.
    pub(super) shared_bytes: usize,
    /// What multiprocessors can put on the device's link, in GB/s.
    pub(super) link: usize,
}

impl Limits {
    /// What stores of one multiprocessor move, in GB/s. Measured on H200: 48 by bulk copies, 45 by plain stores.
    const STORES: usize = 48;

    /// GB/s that stores put on the link of a device with this major compute capability. Measured on H200 (367 of 450); later links have twice
    /// the lanes' speed.
    pub(super) const fn link_of(major: u32) -> usize {
        if major >= 10 { 734 } else { 367 }
    }

    /// Multiprocessors whose stores fill the link.
    const fn fill(self) -> usize {
        self.link.div_ceil(Self::STORES)
    }
}

/// Geometry of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DispatchGrid {
    pub(super) blocks: usize,
    pub(super) senders: usize,
    /// The first of as many blocks as send that count in a fresh call; 0 if those that send do it themselves.
    pub(super) counters: usize,
    pub(super) row_warps: usize,
    pub(super) stages: usize,
    pub(super) stage_bytes: usize,
    /// Stages of a row warp whose rows are not on their way yet, at most.
    pub(super) ahead: usize,
    /// Eighths of the rows that are drawn by ticket.
    pub(super) drawn: usize,
    /// Chunks that movers walk side by side, and whether the cache is to keep what they write.
    pub(super) own_parts: usize,
    pub(super) keep_own: bool,
    pub(super) control: usize,
    pub(super) base: usize,
    pub(super) total: usize,
    pub(super) start: usize,
    pub(super) worker_counts: usize,
    pub(super) first_tokens: usize,
    pub(super) shared_bytes: usize,
}

/// How the tokens of one call are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// First block that counts.
    pub(super) counters: usize,
    /// Tokens of a chunk, and how many chunks have one more.
    pub(super) chunk_tokens: usize,
    pub(super) chunk_rest: usize,
    /// Tokens of a worker, and of one that looks at a chunk's first tokens only.
    pub(super) worker_tokens: usize,
    pub(super) first_share: usize,
    /// Of a chunk's first tokens, how many land before their places are known.
    pub(super) landed: usize,
}

/// What the blocks and warps of a dispatch do, if the formula's choice is not wanted. Each is taken as far as it fits; 0 leaves it to the formula.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DispatchRoles {
    /// Blocks of the grid, and how many of them send.
    pub(crate) blocks: usize,
    pub(crate) senders: usize,
    /// Row warps of a block, stages of each, and stages whose rows are not on their way.
    pub(crate) row_warps: usize,
    pub(crate) stages: usize,
    pub(crate) ahead: usize,
    /// Eighths of the rows that are drawn by ticket.
    pub(crate) drawn: Option<usize>,
    /// Movers walk the tokens one by one, not as senders do.
    pub(crate) own_in_order: bool,
    /// The cache gives up what movers write before other lines.
    pub(crate) evict_own: bool,
    /// The blocks that send count, too, where others could.
    pub(crate) senders_count: bool,
}

/// Whether scales travel by bulk copies, given contiguous rows of them.
pub(super) fn scales_in_bulk(shape: &DispatchShape, row_stride: i64, pack_stride: i64, address: u64) -> bool {
    let packs = shape.scale_packs;
    packs > 0
        && packs.is_multiple_of(4)
        && shape.scale_order == ScaleOrder::RowMajor
        && pack_stride == 1
        && row_stride % 4 == 0
        && address.is_multiple_of(16)
}

impl DispatchGrid {
    pub(super) fn new(shape: &DispatchShape, limits: Limits, wanted: Option<DispatchRoles>) -> Result<Self> {
        let wanted = wanted.unwrap_or_default();
        let counts = shape.experts + shape.ranks;
        let fixed = [
            DISPATCH_CONTROL_BYTES,
            counts * 4,
            counts * 4,
            (shape.local_experts() + 1) * 4,
            WARPS * shape.experts.next_multiple_of(2) * 2,
            MOST_FIRST_TOKENS,
        ]
        .map(|bytes| align_up(bytes, 16));
        let stage_bytes = align_up(shape.row_bytes + shape.scale_bytes(), STAGE_ALIGNMENT);
        let tables: usize = fixed.iter().sum();
        let stages = limits.shared_bytes.saturating_sub(tables) / stage_bytes;
        if stages == 0 {
            let need = format!(
                "with {} experts a block has {} bytes for rows and scales, of {} bytes of shared memory",
                shape.experts,
                limits.shared_bytes.saturating_sub(tables),
                limits.shared_bytes
            );
            return Err(Error::invalid(
                "row_bytes + scale bytes",
                shape.row_bytes + shape.scale_bytes(),
                need,
            ));
        }
        let depth = match (wanted.stages, stages) {
            (1.., _) => wanted.stages.min(MAX_STAGES).min(stages),
            // Rows that wait for each other in front of the link keep what else the multiprocessor asks for waiting.
            (0, 24..) if shape.placement == Placement::Expanded => 2,
            (0, 24..) => MAX_STAGES,
            (0, 9..) => 3,
            (0, 4..) => 2,
            (0, _) => 1,
        };
        let most_warps =
            if wanted.row_warps > 0 { wanted.row_warps.min(WARPS - LEAST_WORKERS) } else { MOST_ROW_WARPS };
        let row_warps = (stages / depth).min(most_warps);
        let ahead = match (wanted.ahead, shape.placement) {
            (1.., _) => wanted.ahead.min(depth),
            (0, Placement::Plain) => depth.div_ceil(2),
            (0, Placement::Expanded) => depth,
        };
        let (blocks, senders) = Self::roles(shape, limits, wanted);
        let most = senders * most_tokens(shape.placement);
        if most < shape.max_tokens {
            let need = format!(
                "this device gives the rank {blocks} blocks, of which {senders} may send, {} tokens each in this layout: at most {most} tokens",
                most_tokens(shape.placement)
            );
            return Err(Error::invalid("max_tokens", shape.max_tokens, need));
        }
        let mut at = row_warps * depth * stage_bytes;
        let mut take = |bytes: usize| {
            let offset = at;
            at += bytes;
            offset
        };
        let [control, base, total, start, worker_counts, first_tokens] = fixed.map(&mut take);
        // A block's release of its tables waits for all that it has stored, and where rows leave first that takes as long as they do. In the plain layout
        // nobody waits for tables so early.
        let apart = shape.placement == Placement::Expanded
            && shape.ranks > 1
            && blocks >= 2 * senders
            && !wanted.senders_count;
        Ok(Self {
            blocks,
            senders,
            counters: if apart { senders } else { 0 },
            row_warps,
            stages: depth,
            stage_bytes,
            ahead,
            drawn: match (senders, wanted.drawn) {
                (1, _) => 0,
                (_, wanted) => wanted.unwrap_or(6).min(8),
            },
            own_parts: if wanted.own_in_order { 1 } else { senders },
            keep_own: !wanted.evict_own,
            control,
            base,
            total,
            start,
            worker_counts,
            first_tokens,
            shared_bytes: at,
        })
    }

    /// A call of so many tokens, of a rank with so many landing slots. `fresh`: ids are given.
    pub(super) fn shares(&self, tokens: usize, slots: usize, fresh: bool) -> Shares {
        let chunk_tokens = tokens / self.senders;
        let chunk_rest = tokens % self.senders;
        let largest = chunk_tokens + usize::from(chunk_rest > 0);
        let counters = if fresh { self.counters } else { 0 };
        // All warps of a block that counts and does not send are workers.
        let workers = |apart: bool| if apart { WARPS } else { WARPS - self.row_warps };
        let first = (self.row_warps * self.stages).min(largest);
        Shares {
            counters,
            chunk_tokens,
            chunk_rest,
            worker_tokens: largest.div_ceil(workers(counters > 0)),
            first_share: first.div_ceil(workers(false)),
            landed: if fresh { first.min(chunk_tokens).min(slots / self.senders) } else { 0 },
        }
    }

    /// Blocks, and how many of them send: as many as the tokens need, where there are blocks.
    ///
    /// Plain: twice as many senders as fill the link, since multiprocessors get unequal shares of it, and movers for the own rank's rows, which are one
    /// of R − 1 parts of what is sent. Expanded: local rows are most of the work, and all multiprocessors write them.
    fn roles(shape: &DispatchShape, limits: Limits, wanted: DispatchRoles) -> (usize, usize) {
        let (blocks, senders) = Self::usual_roles(shape, limits);
        let available = limits.blocks.clamp(1, MAX_BLOCKS);
        let blocks = if wanted.blocks > 0 { wanted.blocks.min(available) } else { blocks };
        let senders = if wanted.senders > 0 { wanted.senders.min(MAX_SENDERS) } else { senders };
        let needed = shape.max_tokens.div_ceil(most_tokens(shape.placement));
        (blocks, senders.max(needed).min(MAX_SENDERS).min(blocks))
    }

    fn usual_roles(shape: &DispatchShape, limits: Limits) -> (usize, usize) {
        let available = limits.blocks.clamp(1, MAX_BLOCKS);
        let few = available.min(MAX_SENDERS);
        if shape.ranks == 1 {
            return match shape.placement {
                Placement::Plain => (few, few),
                Placement::Expanded => (available, available.div_ceil(4).min(16)),
            };
        }
        let senders = (2 * limits.fill()).min(MAX_SENDERS);
        match shape.placement {
            Placement::Plain => match senders + senders.div_ceil(shape.ranks - 1) {
                blocks if blocks <= available => (blocks, senders),
                _ => (few, few),
            },
            Placement::Expanded if available >= 6 * senders => (available, (senders * 2).min(MAX_SENDERS)),
            Placement::Expanded if available >= 8 => {
                (available, (available / 2).min(senders * 3 / 2).min(MAX_SENDERS))
            }
            Placement::Expanded => (available, available),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::layout::MAX_TOKENS;
    use crate::layout::test_shapes::dispatch;

    pub(in super::super) const HOPPER: Limits = Limits { blocks: 132, shared_bytes: 232_448, link: 367 };

    #[test]
    fn usual_shapes() {
        let g = DispatchGrid::new(&dispatch(2, 4096, Placement::Plain), HOPPER, None).unwrap();
        assert_eq!((g.blocks, g.senders, g.row_warps, g.stages), (32, 16, 7, 4));
        // One of eight ranks keeps a seventh of what it sends; a link of twice the speed takes twice the senders.
        let g = DispatchGrid::new(&dispatch(8, 4096, Placement::Plain), HOPPER, None).unwrap();
        assert_eq!((g.blocks, g.senders), (19, 16));
        let fast = Limits { link: Limits::link_of(10), ..HOPPER };
        let g = DispatchGrid::new(&dispatch(2, 4096, Placement::Plain), fast, None).unwrap();
        assert_eq!((g.blocks, g.senders), (64, 32));
        let g = DispatchGrid::new(&dispatch(2, 4096, Placement::Expanded), HOPPER, None).unwrap();
        assert_eq!((g.blocks, g.senders, g.counters, g.row_warps, g.stages), (132, 32, 32, 8, 2));
        // All first rows, but for few slots, few tokens, or a call that needs none.
        let landed = |tokens, slots, fresh| g.shares(tokens, slots, fresh).landed;
        assert_eq!(
            (landed(4096, 1024, true), landed(4096, 256, true), landed(4096, 1024, false)),
            (16, 8, 0)
        );
        assert_eq!((landed(33, 33, true), landed(31, 31, true), landed(4096, 0, true)), (1, 0, 0));
        let mut bf16 = dispatch(2, 4096, Placement::Expanded);
        (bf16.row_bytes, bf16.scale_packs) = (14336, 0);
        let g = DispatchGrid::new(&bf16, HOPPER, None).unwrap();
        assert_eq!((g.blocks, g.senders, g.row_warps, g.stages), (132, 32, 5, 3));
    }

    #[test]
    fn every_shape_fits_or_is_refused() {
        for ranks in [1, 2, 3, 8] {
            for placement in [Placement::Plain, Placement::Expanded] {
                for (experts, row, packs) in [
                    (8, 16, 0),
                    (256, 7168, 56),
                    (2048, 28672, 1),
                    (2048, 128 << 10, 0),
                    (256, 128 << 10, 4096),
                ] {
                    for blocks in [1, 2, 7, 8, 31, 32, 100, 500] {
                        let mut s = dispatch(ranks, 512, placement);
                        (s.experts, s.row_bytes, s.scale_packs) = (experts / ranks * ranks, row, packs);
                        let limits = Limits { blocks, ..HOPPER };
                        let Ok(g) = DispatchGrid::new(&s, limits, None) else {
                            assert!(row + 4 * packs > 100_000, "{s:?}");
                            continue;
                        };
                        assert!(g.shared_bytes <= HOPPER.shared_bytes, "{s:?} {g:?}");
                        assert!(g.blocks <= blocks.min(MAX_BLOCKS) && g.senders <= g.blocks);
                        assert!((1..=MAX_SENDERS).contains(&g.senders) && g.row_warps >= 1);
                        assert!(g.control.is_multiple_of(16) && g.worker_counts.is_multiple_of(16));
                    }
                }
            }
        }
    }

    #[test]
    fn a_chunk_is_countable() {
        let s = dispatch(2, 1 << 17, Placement::Plain);
        let few = Limits { blocks: 2, ..HOPPER };
        assert!(DispatchGrid::new(&s, few, None).unwrap_err().to_string().starts_with("max_tokens"));
        DispatchGrid::new(&s, HOPPER, None).unwrap();
        let s = dispatch(2, 1 << 17, Placement::Expanded);
        DispatchGrid::new(&s, HOPPER, None).unwrap();
        // Twelve blocks would do for the link.
        let fewer = Limits { blocks: 24, ..HOPPER };
        assert_eq!(DispatchGrid::new(&s, fewer, None).unwrap().senders, 17);
        let wanted = Some(DispatchRoles { senders: 3, ..DispatchRoles::default() });
        assert_eq!(DispatchGrid::new(&s, HOPPER, wanted).unwrap().senders, 17);
    }

    #[test]
    fn ranks_that_share_a_device_take_as_many_tokens_as_their_blocks_count() {
        const EACH: usize = 8191;
        for (sharing, blocks) in [(1, 132), (2, 60), (7, 17), (8, 15)] {
            let limits = Limits { blocks, ..HOPPER };
            let most = (blocks * EACH).min(MAX_TOKENS);
            for tokens in [1, EACH, EACH + 1, 8 * EACH + 1, 65536, most] {
                let s = dispatch(sharing, tokens, Placement::Expanded);
                let g = DispatchGrid::new(&s, limits, None).unwrap();
                assert!(tokens.div_ceil(g.senders) <= EACH, "{sharing} ranks, {tokens} tokens: {g:?}");
                assert!(g.senders <= g.blocks && g.blocks <= blocks, "{g:?}");
            }
            for tokens in [65536, MAX_TOKENS] {
                DispatchGrid::new(&dispatch(sharing, tokens, Placement::Plain), limits, None).unwrap();
            }
            if most < MAX_TOKENS {
                let s = dispatch(sharing, most + 1, Placement::Expanded);
                let error = DispatchGrid::new(&s, limits, None).unwrap_err().to_string();
                assert!(
                    error.starts_with("max_tokens") && error.contains("at most 122865 tokens"),
                    "{error}"
                );
                assert!(error.contains("15 blocks"), "{error}");
            }
        }
    }
}
