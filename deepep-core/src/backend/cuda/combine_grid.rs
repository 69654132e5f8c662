//! How the warps of a combine share its work, and how its shared memory is divided.

use std::ops::RangeInclusive;

use super::grid::{Limits, STAGE_ALIGNMENT, WARPS};
use crate::error::{Error, Result};
use crate::jit::{COMBINE_CONTROL_BYTES, PIECE_BYTES, PULL_PARTS, SUM_THREADS, THREADS};
use crate::layout::{CombineShape, MAX_BLOCKS, MAX_TOPK, Placement, align_up};

/// Geometry of a combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CombineGrid {
    pub(super) blocks: usize,
    pub(super) threads: usize,
    pub(super) row_warps: usize,
    pub(super) stages: usize,
    pub(super) stage_bytes: usize,
    pub(super) reducers: usize,
    /// Batches in the ring of a warp that reduces, bytes of one, and the same of a sender that sums.
    pub(super) batches: usize,
    pub(super) batch_bytes: usize,
    pub(super) sender_batches: usize,
    pub(super) sender_batch_bytes: usize,
    /// Bytes of a row that a warp reduces through registers at a time.
    pub(super) share_bytes: usize,
    pub(super) rings: usize,
    pub(super) control: usize,
    pub(super) shared_bytes: usize,
    /// How many of [`PULL_PARTS`] tokens are pulled; 0 in a combine that sends all.
    pub(super) pulled: usize,
    /// Parts in which the sum of a token travels.
    pub(super) parts: usize,
    /// Tokens, or parts of them, for each block from which on they are drawn by ticket.
    drawn_from: usize,
}

/// What is chosen about a combine apart from its shape: by formula, unless measurements want it otherwise. `pulled` and `parts` are the same on all
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CombineChoices {
    /// What the warps of a block do.
    pub(crate) roles: Option<CombineRoles>,
    /// How many of [`PULL_PARTS`] tokens are pulled in a combine that pulls, 1 to all.
    pub(crate) pulled: usize,
    /// Parts in which the sum of a token travels, as far as there is room for flags.
    pub(crate) parts: Option<usize>,
    /// Tokens that are pulled, and sums, go by ticket where each warp gets enough of them.
    pub(crate) tickets: bool,
}

impl Default for CombineChoices {
    fn default() -> Self {
        Self { roles: None, pulled: PULL_PARTS, parts: None, tickets: true }
    }
}

impl CombineChoices {
    /// Parts of a sum: of two pieces at least, so that a warp has work ahead in its own and the next part.
    pub(super) fn parts(&self, shape: &CombineShape, most: usize) -> usize {
        let pieces = shape.row_bytes.div_ceil(PIECE_BYTES);
        match shape.sums() {
            true => self.parts.unwrap_or((pieces / 2).min(3)).clamp(1, most.min(pieces)),
            false => 1,
        }
    }
}

/// Stages of a warp, or batches in its ring, at most: one barrier each, and each stage's lane has every `MAX_STAGES`-th mailbox of its warp.
const MAX_STAGES: usize = 8;

/// Warps of a combine block that send, stages of each, warps that reduce, and the rings of the latter and of senders that sum, at most, in pieces of
/// [`PIECE_BYTES`]. In a combine that pulls `pieces` are batches in a ring, in the plain layout otherwise shares of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CombineRoles {
    pub(crate) row_warps: usize,
    pub(crate) stages: usize,
    pub(crate) reducers: usize,
    pub(crate) pieces: usize,
    pub(crate) sender_pieces: usize,
    /// Batches that such a ring is divided into.
    pub(crate) batches: usize,
}

impl CombineRoles {
    /// Warps of a block that pull.
    const PULLERS: RangeInclusive<usize> = 12..=15;
    /// How long what is sent and has not arrived keeps the link at work, in ns. With more of it throughput does not grow, and flags and the last rows come later; with
    /// less the link has gaps. Measured on 2×H200.
    const UNDER_WAY: usize = 5000;

    /// Nobody sends: rings take all of shared memory. Two batches are enough, one that is summed and one that is loaded; many warps, since each waits
    /// for its batches.
    fn for_pull(shape: &CombineShape, available: usize) -> Self {
        let reducers = Self::pullers(shape, available);
        Self { row_warps: 0, stages: 0, reducers, pieces: 2, sender_pieces: 0, batches: 2 }
    }

    /// Rows that are sent as they are: as many under way as [`Self::UNDER_WAY`] wants. Sums: two slots of a piece are enough for what a sender has summed, what it
    /// waits for are its rows.
    fn for_shape(shape: &CombineShape, limits: Limits) -> Self {
        let blocks = limits.blocks;
        let row_warps = match (shape.sums(), blocks) {
            (true, _) => 5,
            (false, 28..) => 1,
            (false, 20..) => 2,
            (false, _) => 3,
        };
        let stages = match (shape.sums(), blocks) {
            (true, _) | (false, ..12) => 2,
            (false, ..28) => 1,
            // A GB/s is a byte in a ns.
            (false, _) => {
                let stage = blocks * row_warps * shape.row_bytes;
                ((limits.link * Self::UNDER_WAY + stage / 2) / stage).clamp(1, MAX_STAGES)
            }
        };
        let reducers = match shape.placement {
            // With one rank nobody sends.
            _ if shape.ranks == 1 => WARPS,
            Placement::Plain => WARPS - 1 - row_warps,
            Placement::Expanded if shape.sums() => 6,
            Placement::Expanded => WARPS - 1 - row_warps,
        };
        // Plain layout: a warp waits for a flag once a share, and the last tokens are divided among many warps.
        let pieces = match shape.placement {
            Placement::Plain if blocks >= 56 => 4,
            Placement::Plain if blocks >= 28 => 2,
            Placement::Plain => 1,
            Placement::Expanded if shape.sums() => 11,
            Placement::Expanded => 8,
        };
        Self { row_warps, stages, reducers, pieces, sender_pieces: 7, batches: 2 }
    }

    /// Few pieces a row first, then many warps.
    fn pullers(shape: &CombineShape, available: usize) -> usize {
        let pieces = |reducers: usize| {
            let most = available / (reducers * 2 * shape.ranks);
            shape.row_bytes.div_ceil(most.max(1))
        };
        Self::PULLERS.min_by_key(|&n| (pieces(n), WARPS - n)).unwrap_or(1)
    }
}

impl CombineGrid {
    /// Batches in a ring at least: one that is read and one that is loaded.
    const LEAST_BATCHES: usize = 2;
    /// A batch has a piece of each row of a token; pieces are multiples of this.
    const LEAST_PIECE: usize = 128;
    /// Pieces of rows that are pulled, and shares, are multiples of this, unless a row is smaller.
    const PIECE_STEP: usize = 512;

    /// Shares of a token at most.
    const MOST_SHARES: usize = 16;

    /// Batches in a ring at most: one barrier each.
    const MOST_BATCHES: usize = MAX_STAGES;
    /// From so many tokens for each warp on they are drawn by ticket: a warp that pulls has drawn two ahead, one that sends sums four.
    const DRAWN_FROM: [usize; 2] = [6, 10];

    /// `pull`: rows are read where they are. `most_parts`: of sums.
    pub(super) fn new(
        shape: &CombineShape,
        limits: Limits,
        choices: CombineChoices,
        pull: bool,
        most_parts: usize,
    ) -> Result<Self> {
        let pulled = if pull { choices.pulled.clamp(1, PULL_PARTS) } else { 0 };
        let blocks = limits.blocks.clamp(1, MAX_BLOCKS);
        let plain = shape.placement == Placement::Plain;
        let available = limits.shared_bytes.saturating_sub(COMBINE_CONTROL_BYTES);
        let wanted = choices.roles.unwrap_or_else(|| match pulled {
            PULL_PARTS.. => CombineRoles::for_pull(shape, available),
            _ => CombineRoles::for_shape(shape, Limits { blocks, ..limits }),
        });
        // Through registers, without rings.
        let direct = plain && !pull;
        // Pulled: pieces of a few batches, each with a row from every rank.
        let batches = if plain { wanted.pieces } else { wanted.batches };
        let mut batches = batches.clamp(Self::LEAST_BATCHES, Self::MOST_BATCHES);
        // With rings: the least batch.
        let least_batch = match plain {
            true => Self::PIECE_STEP * shape.ranks,
            false => Self::LEAST_PIECE * MAX_TOPK,
        };
        let stage_bytes = if shape.sums() { PIECE_BYTES } else { align_up(shape.row_bytes, STAGE_ALIGNMENT) };
        let threads = if shape.sums() { SUM_THREADS } else { THREADS };
        let warps = threads / 32;
        let (row_warps, mut reducers) = match shape.ranks {
            1 => (0, wanted.reducers.clamp(1, warps)),
            _ if pulled >= PULL_PARTS => (0, wanted.reducers.clamp(1, warps - 1)),
            _ => {
                let senders = wanted.row_warps.clamp(1, warps - 2);
                (senders, wanted.reducers.clamp(1, warps - 1 - senders))
            }
        };
        let least_ring = if direct { 0 } else { least_batch };
        let summing = if shape.sums() { row_warps } else { 0 };
        let left = |reducers, batches| available.checked_sub((reducers + summing) * batches * least_ring);
        // A stage at least, if anybody sends.
        let least_stage = if row_warps > 0 { stage_bytes } else { 0 };
        let fits = |reducers, batches| left(reducers, batches).is_some_and(|left| left >= least_stage);
        while !fits(reducers, batches) && batches > Self::LEAST_BATCHES {
            batches -= 1;
        }
        while !fits(reducers, batches) && reducers > 1 {
            reducers /= 2;
        }
        let stages = left(reducers, batches).map_or(0, |left| left / stage_bytes);
        if !fits(reducers, batches) {
            let need = format!("a block has {} bytes of shared memory", limits.shared_bytes);
            return Err(Error::invalid("combine row_bytes", shape.row_bytes, need));
        }
        let row_warps = row_warps.min(stages);
        let summing = summing.min(row_warps);
        let depth =
            stages.checked_div(row_warps).map_or(0, |most| wanted.stages.clamp(1, MAX_STAGES).min(most));
        let rings = row_warps * depth * stage_bytes;
        let left = available - rings;
        let mut bytes = [0; 2];
        if plain && !direct {
            // A token's rows in as few batches as can be.
            let most = left / reducers / batches / shape.ranks / Self::PIECE_STEP * Self::PIECE_STEP;
            let parts = shape.row_bytes.div_ceil(most);
            bytes[0] = align_up(shape.row_bytes.div_ceil(parts), Self::PIECE_STEP) * shape.ranks;
        } else if !plain {
            let batch = |pieces: usize| {
                (pieces * PIECE_BYTES / batches / Self::LEAST_PIECE * Self::LEAST_PIECE).max(least_batch)
            };
            bytes = [batch(wanted.pieces), if summing > 0 { batch(wanted.sender_pieces) } else { 0 }];
            // Least rings fit, as was seen above.
            while (reducers * bytes[0] + summing * bytes[1]) * batches > left {
                let larger = usize::from(bytes[1] > bytes[0]);
                bytes[larger] -= Self::LEAST_PIECE;
            }
        }
        let [batch_bytes, sender_batch_bytes] = bytes;
        let (batches, sender_batches) =
            (if direct { 0 } else { batches }, if summing > 0 { batches } else { 0 });
        let share = shape.row_bytes.div_ceil(wanted.pieces.clamp(1, Self::MOST_SHARES));
        let share_bytes = if direct { align_up(share, Self::PIECE_STEP) } else { 0 };
        let control =
            rings + reducers * batches * batch_bytes + summing * sender_batches * sender_batch_bytes;
        let shared_bytes = control + COMBINE_CONTROL_BYTES;
        Ok(Self {
            blocks,
            threads,
            row_warps,
            stages: depth,
            stage_bytes,
            reducers,
            batches,
            batch_bytes,
            sender_batches,
            sender_batch_bytes,
            share_bytes,
            rings,
            control,
            shared_bytes,
            pulled,
            parts: choices.parts(shape, most_parts),
            drawn_from: match (choices.tickets, pulled) {
                (true, PULL_PARTS..) => Self::DRAWN_FROM[0] * reducers,
                (true, 0) if shape.sums() => Self::DRAWN_FROM[1] * reducers.max(row_warps),
                _ => usize::MAX,
            },
        })
    }

    /// Whether a call with so many tokens draws them by ticket.
    pub(super) fn draws(&self, tokens: usize) -> bool {
        tokens * self.parts >= self.drawn_from.saturating_mul(self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::tests::HOPPER;
    use super::*;
    use crate::layout::MAX_SUM_PARTS;
    use crate::layout::test_shapes::combine;

    #[test]
    fn usual_shapes() {
        let formula = CombineChoices::default();
        let g =
            CombineGrid::new(&combine(2, 8, Placement::Plain, true), HOPPER, formula, false, MAX_SUM_PARTS)
                .unwrap();
        assert_eq!((g.blocks, g.row_warps, g.stages, g.reducers), (132, 1, 1, 14));
        assert_eq!((g.batches, g.share_bytes, g.control), (0, 3584, 14336));
        for (blocks, roles) in [(16, (3, 1, 12)), (20, (2, 1, 13)), (27, (2, 1, 13)), (28, (1, 5, 14))] {
            let limits = Limits { blocks, ..HOPPER };
            let shape = combine(2, 8, Placement::Plain, true);
            let g = CombineGrid::new(&shape, limits, formula, false, MAX_SUM_PARTS).unwrap();
            assert_eq!((g.row_warps, g.stages, g.reducers), roles, "{blocks} blocks");
        }
        let g = CombineGrid::new(
            &combine(2, 8, Placement::Expanded, true),
            HOPPER,
            formula,
            false,
            MAX_SUM_PARTS,
        )
        .unwrap();
        assert_eq!((g.row_warps, g.stages, g.reducers), (5, 2, 6));
        assert_eq!([g.batches, g.batch_bytes, g.sender_batches, g.sender_batch_bytes], [2, 11264, 2, 7168]);
        assert!(g.control + COMBINE_CONTROL_BYTES <= HOPPER.shared_bytes);
        // Seven pieces in three parts: 12288 parts for 660 warps.
        assert!(g.parts == 3 && g.draws(4096) && !CombineGrid { parts: 1, ..g }.draws(4096));
        let sums = combine(2, 8, Placement::Expanded, true);
        assert_eq!([1, 2, 4].map(|most| formula.parts(&sums, most)), [1, 2, 3]);
        let g =
            CombineGrid::new(&combine(2, 8, Placement::Plain, true), HOPPER, formula, true, MAX_SUM_PARTS)
                .unwrap();
        assert_eq!((g.row_warps, g.stages, g.rings, g.pulled), (0, 0, 0, PULL_PARTS));
        assert_eq!((g.blocks, g.reducers, g.batches, g.batch_bytes), (132, 15, 2, 7168));
        // 1980 warps get 2 or 3 tokens each; 240 get 17.
        assert!(!g.draws(4096) && CombineGrid { blocks: 16, ..g }.draws(4096));
    }

    /// Room for whole rows is needed where rows are sent only.
    #[test]
    fn long_rows_that_nobody_sends() {
        let grid = |ranks, row_bytes, shared_bytes, pulled| {
            let mut s = combine(ranks, 8, Placement::Plain, true);
            s.row_bytes = row_bytes;
            let choices = CombineChoices { pulled, ..CombineChoices::default() };
            CombineGrid::new(&s, Limits { shared_bytes, ..HOPPER }, choices, ranks > 1, MAX_SUM_PARTS)
        };
        for (ranks, row_bytes) in [(8, 14336), (8, 128 << 10), (1, 128 << 10), (2, 128 << 10)] {
            let full = grid(ranks, row_bytes, HOPPER.shared_bytes, PULL_PARTS).unwrap();
            assert_eq!((full.row_warps, full.rings), (0, 0));
            // As many as were wanted.
            let most = if ranks == 1 { WARPS..=WARPS } else { CombineRoles::PULLERS };
            assert!(most.contains(&full.reducers), "{full:?}");
            let small = grid(ranks, row_bytes, 64 << 10, PULL_PARTS).unwrap();
            assert!(small.shared_bytes <= 64 << 10 && small.reducers > 1, "{small:?}");
        }
        assert!(grid(2, 128 << 10, 64 << 10, PULL_PARTS / 2).is_err());
    }

    #[test]
    fn every_combine_fits_or_is_refused() {
        for ranks in [1, 2, 8] {
            for (placement, reduce_first) in
                [(Placement::Plain, true), (Placement::Expanded, true), (Placement::Expanded, false)]
            {
                for row_bytes in [16, 14336, 98304, 128 << 10] {
                    for blocks in [1, 8, 14, 16, 20, 32, 132] {
                        for (row_warps, stages, reducers) in [(1, 1, 1), (14, 8, 15), (20, 20, 20), (0, 0, 0)]
                        {
                            let mut s = combine(ranks, 8, placement, reduce_first);
                            s.row_bytes = row_bytes;
                            let limits = Limits { blocks, ..HOPPER };
                            let (pieces, sender_pieces) = (3 * stages, 20 - stages);
                            let batches = stages;
                            let roles =
                                CombineRoles { row_warps, stages, reducers, pieces, sender_pieces, batches };
                            let pulls: &[usize] = match (ranks > 1, placement) {
                                (true, Placement::Plain) => &[0, 24, PULL_PARTS],
                                _ => &[0],
                            };
                            for (roles, &pulled) in [None, Some(roles)]
                                .into_iter()
                                .flat_map(|r| pulls.iter().map(move |p| (r, p)))
                            {
                                let choices = CombineChoices { roles, pulled, ..CombineChoices::default() };
                                let g =
                                    CombineGrid::new(&s, limits, choices, pulled > 0, MAX_SUM_PARTS).unwrap();
                                assert_eq!(g.pulled, pulled, "{g:?}");
                                assert!(g.shared_bytes <= HOPPER.shared_bytes, "{s:?} {g:?}");
                                let announcer = usize::from(ranks > 1);
                                assert!(32 * (g.row_warps + announcer + g.reducers) <= g.threads, "{g:?}");
                                // Through registers: no rings.
                                let direct = placement == Placement::Plain && pulled == 0;
                                assert!(g.reducers >= 1 && (direct || (2..=8).contains(&g.batches)), "{g:?}");
                                let most_rows = if placement == Placement::Plain { ranks } else { 32 };
                                for bytes in [g.batch_bytes, g.sender_batch_bytes] {
                                    let rings = bytes.is_multiple_of(128) && bytes / most_rows >= 128;
                                    assert!(bytes == 0 || rings, "{g:?}");
                                }
                                let sums = s.sums() && ranks > 1;
                                assert_eq!((direct, sums), (g.batch_bytes == 0, g.sender_batch_bytes > 0));
                                assert_eq!(direct, g.share_bytes > 0);
                                let sends = ranks > 1 && g.pulled < PULL_PARTS;
                                assert!(!sends || (g.row_warps >= 1 && (1..=8).contains(&g.stages)));
                            }
                        }
                    }
                }
            }
        }
        let small = Limits { shared_bytes: 64 << 10, ..HOPPER };
        let mut s = combine(2, 8, Placement::Plain, true);
        s.row_bytes = 98304;
        assert!(
            CombineGrid::new(&s, small, CombineChoices::default(), false, MAX_SUM_PARTS)
                .unwrap_err()
                .to_string()
                .starts_with("combine row_bytes")
        );
    }
}
