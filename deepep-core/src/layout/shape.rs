//! What a call moves: the numbers that layouts are computed from.

use super::{
    MAX_EXPERTS, MAX_RANKS, MAX_ROW_BYTES, MAX_SCALE_PACKS, MAX_SUM_PARTS, MAX_TOKENS, MAX_TOPK,
    ROW_GRANULARITY, align_up,
};
use crate::error::{Error, Result};

/// How received rows are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// One row per received token, grouped by source rank, in token order.
    Plain,
    /// One row per (received token, local expert), grouped by expert; every expert's block starts at a multiple of the alignment.
    Expanded,
}

/// Width of expert ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexWidth {
    /// `i32`.
    Bits32,
    /// `i64`.
    Bits64,
}

impl IndexWidth {
    /// Bytes of one id.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bits32 => 4,
            Self::Bits64 => 8,
        }
    }
}

/// Order of received scale packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleOrder {
    /// `[rows, packs]`, strides (packs, 1).
    RowMajor,
    /// `[rows, packs]`, strides (1, row capacity rounded up to 4), so that each column is 16-byte aligned as TMA wants it.
    ColumnMajor,
}

/// Shape of a dispatch. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DispatchShape {
    /// Ranks of the domain.
    pub ranks: usize,
    /// Most tokens a rank may give.
    pub max_tokens: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Top-k lanes of a token.
    pub topk: usize,
    /// Bytes of a token's row, a multiple of 16.
    pub row_bytes: usize,
    /// 4-byte scale packs of a row; 0 for none.
    pub scale_packs: usize,
    /// Order of the received scale packs.
    pub scale_order: ScaleOrder,
    /// Width of expert ids, given and received.
    pub index: IndexWidth,
    /// How received rows are arranged.
    pub placement: Placement,
    /// Rows of an expert are padded to a multiple of this (expanded), and so are the reported prefix sums.
    pub alignment: usize,
    /// Most tokens this rank can receive.
    pub token_capacity: usize,
    /// Most rows the result can hold: the token capacity in the plain layout.
    pub row_capacity: usize,
}

impl DispatchShape {
    /// Experts of one rank.
    pub const fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// Bytes of all scale packs of a row.
    pub const fn scale_bytes(&self) -> usize {
        self.scale_packs * 4
    }

    /// Distance of two received packs of one row, and of one pack in two rows, in packs: (pack stride, row stride).
    pub const fn scale_strides(&self) -> (usize, usize) {
        match self.scale_order {
            ScaleOrder::RowMajor => (1, self.scale_packs),
            ScaleOrder::ColumnMajor => (align_up(self.row_capacity, 4), 1),
        }
    }

    /// Tokens a rank receives at most, whatever the routing.
    pub const fn worst_case_tokens(ranks: usize, max_tokens: usize) -> usize {
        ranks.saturating_mul(max_tokens)
    }

    /// Rows of the expanded layout at most, whatever the routing: a token has at most min(K, EL) rows here, and every expert that
    /// has a row at all wastes at most `alignment − 1`.
    pub const fn worst_case_rows(
        ranks: usize,
        max_tokens: usize,
        topk: usize,
        local_experts: usize,
        alignment: usize,
    ) -> usize {
        let lanes = if topk < local_experts { topk } else { local_experts };
        let rows = Self::worst_case_tokens(ranks, max_tokens).saturating_mul(lanes);
        let used = if rows < local_experts { rows } else { local_experts };
        let padded = rows.saturating_add(used.saturating_mul(alignment - 1));
        padded / alignment * alignment
    }

    /// Checks every limit that layouts and kernels rely on.
    pub fn validate(&self) -> Result<()> {
        check_domain(self.ranks, self.max_tokens, self.experts, self.topk)?;
        check_row("row_bytes", self.row_bytes)?;
        if self.scale_packs > MAX_SCALE_PACKS {
            let need = format!("at most {MAX_SCALE_PACKS} 4-byte packs a row");
            return Err(Error::invalid("scale_packs", self.scale_packs, need));
        }
        if self.alignment == 0 || self.alignment > 1 << 16 {
            return Err(Error::invalid("expert_alignment", self.alignment, "must be 1 to 65536"));
        }
        if self.token_capacity > Self::worst_case_tokens(self.ranks, self.max_tokens) {
            let need = "more than ranks × max_tokens can't arrive";
            return Err(Error::invalid("token_capacity", self.token_capacity, need));
        }
        if self.row_capacity > i32::MAX as usize {
            return Err(Error::invalid("row_capacity", self.row_capacity, "rows are counted in i32"));
        }
        if self.placement == Placement::Plain && self.row_capacity != self.token_capacity {
            let need = format!("equals token_capacity ({}) in the plain layout", self.token_capacity);
            return Err(Error::invalid("row_capacity", self.row_capacity, need));
        }
        Ok(())
    }
}

/// Shape of a combine. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CombineShape {
    /// Ranks of the domain.
    pub ranks: usize,
    /// Most tokens a rank may give to dispatch.
    pub max_tokens: usize,
    /// Top-k lanes of a token.
    pub topk: usize,
    /// Bytes of a row: 2 × hidden size, a multiple of 16.
    pub row_bytes: usize,
    /// Arrangement of the rows that come in.
    pub placement: Placement,
    /// Expanded rows of a token are summed where they are before they travel. Without it every row travels on its own.
    pub reduce_first: bool,
}

impl CombineShape {
    /// Whether each lane has its own slot at the token's owner. Otherwise each peer has one.
    pub const fn by_lane(&self) -> bool {
        (matches!(self.placement, Placement::Expanded) && !self.sums()) || self.ranks - 1 > self.topk
    }

    /// Whether rows of a token are summed before they travel.
    pub const fn sums(&self) -> bool {
        matches!(self.placement, Placement::Expanded) && self.reduce_first
    }

    /// Slots that a token has in the receive area.
    pub const fn slots(&self) -> usize {
        match (self.ranks, self.by_lane()) {
            (1, _) => 0,
            (_, true) => self.topk,
            (ranks, false) => ranks - 1,
        }
    }

    /// Flags of a token for which a buffer that is made for this shape has room: one a slot; in the expanded layout, where a token's sum may travel in parts, also
    /// if this shape does not sum, several for each rank.
    pub const fn flags(&self) -> usize {
        let sums = if self.ranks - 1 < self.topk { self.ranks - 1 } else { self.topk };
        match (self.slots(), sums * MAX_SUM_PARTS) {
            (slots, parts) if matches!(self.placement, Placement::Expanded) && parts > slots => parts,
            (slots, _) => slots,
        }
    }

    /// Checks every limit that layouts and kernels rely on.
    pub fn validate(&self) -> Result<()> {
        check_domain(self.ranks, self.max_tokens, self.ranks, self.topk)?;
        check_row("combine row_bytes", self.row_bytes)
    }
}

fn check_domain(ranks: usize, max_tokens: usize, experts: usize, topk: usize) -> Result<()> {
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(Error::invalid("ranks", ranks, format!("must be 1 to {MAX_RANKS} on one host")));
    }
    if max_tokens == 0 || max_tokens > MAX_TOKENS {
        return Err(Error::invalid("max_tokens", max_tokens, format!("must be 1 to {MAX_TOKENS}")));
    }
    if experts == 0 || experts > MAX_EXPERTS || !experts.is_multiple_of(ranks) {
        let need = format!("must be a multiple of the {ranks} ranks, at most {MAX_EXPERTS}");
        return Err(Error::invalid("experts", experts, need));
    }
    if topk == 0 || topk > MAX_TOPK {
        return Err(Error::invalid("topk", topk, format!("must be 1 to {MAX_TOPK}")));
    }
    Ok(())
}

fn check_row(name: &'static str, bytes: usize) -> Result<()> {
    if bytes == 0 || bytes > MAX_ROW_BYTES || !bytes.is_multiple_of(ROW_GRANULARITY) {
        let need = format!("must be a multiple of {ROW_GRANULARITY} bytes, at most {MAX_ROW_BYTES}");
        return Err(Error::invalid(name, bytes, need));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// FP8 rows of 7168 with a scale per 128, top-8 of 256.
    pub(crate) fn dispatch(ranks: usize, max_tokens: usize, placement: Placement) -> DispatchShape {
        let tokens = DispatchShape::worst_case_tokens(ranks, max_tokens);
        DispatchShape {
            ranks,
            max_tokens,
            experts: 256,
            topk: 8,
            row_bytes: 7168,
            scale_packs: 56,
            scale_order: ScaleOrder::RowMajor,
            index: IndexWidth::Bits64,
            placement,
            alignment: 128,
            token_capacity: tokens,
            row_capacity: match placement {
                Placement::Plain => tokens,
                Placement::Expanded => DispatchShape::worst_case_rows(ranks, max_tokens, 8, 256 / ranks, 128),
            },
        }
    }

    pub(crate) fn combine(
        ranks: usize,
        topk: usize,
        placement: Placement,
        reduce_first: bool,
    ) -> CombineShape {
        CombineShape { ranks, max_tokens: 64, topk, row_bytes: 14336, placement, reduce_first }
    }

    #[test]
    fn worst_case_rows_is_tight() {
        // By trial: spread the (token, expert) pairs over experts in the most wasteful way.
        for (ranks, tokens, topk, local, align) in
            [(1, 3, 2, 4, 8), (2, 5, 8, 3, 4), (4, 1, 1, 16, 32), (8, 2, 6, 8, 1)]
        {
            let pairs = ranks * tokens * usize::min(topk, local);
            let most = ranks * tokens; // rows one expert can have
            // One row for each of as many experts as possible, the rest where they fill up blocks.
            let mut counts = vec![0usize; local];
            let mut left = pairs;
            for c in counts.iter_mut() {
                let take = usize::from(left > 0);
                *c += take;
                left -= take;
            }
            for c in counts.iter_mut() {
                let take = left.min(most - *c);
                *c += take;
                left -= take;
            }
            assert_eq!(left, 0);
            let rows: usize = counts.iter().map(|&c| align_up(c, align)).sum();
            let bound = DispatchShape::worst_case_rows(ranks, tokens, topk, local, align);
            assert!(rows <= bound, "{rows} > {bound}");
            assert!(bound < rows + align * local, "{bound} is far above {rows}");
            assert_eq!(bound % align, 0);
        }
    }

    #[test]
    fn limits_are_errors_that_name_the_setting() {
        let good = dispatch(2, 4096, Placement::Plain);
        good.validate().unwrap();
        type Change = fn(&mut DispatchShape);
        let broken: &[(&str, Change)] = &[
            ("ranks", |s| s.ranks = 0),
            ("ranks", |s| s.ranks = 9),
            ("experts", |s| s.experts = 255),
            ("experts", |s| s.experts = 4096),
            ("topk", |s| s.topk = 33),
            ("max_tokens", |s| s.max_tokens = 0),
            ("row_bytes", |s| s.row_bytes = 7160),
            ("row_bytes", |s| s.row_bytes = MAX_ROW_BYTES + 16),
            ("scale_packs", |s| s.scale_packs = MAX_SCALE_PACKS + 1),
            ("expert_alignment", |s| s.alignment = 0),
            ("token_capacity", |s| s.token_capacity += 1),
            ("row_capacity", |s| s.row_capacity -= 1),
        ];
        for (name, change) in broken {
            let mut s = good;
            change(&mut s);
            let message = s.validate().unwrap_err().to_string();
            assert!(message.starts_with(name), "{message}");
        }
    }

    #[test]
    fn slots_of_a_token() {
        use Placement::{Expanded, Plain};
        assert_eq!(combine(1, 8, Plain, true).slots(), 0);
        assert_eq!(combine(2, 8, Plain, true).slots(), 1);
        assert_eq!(combine(8, 8, Expanded, true).slots(), 7);
        assert_eq!(combine(8, 7, Plain, false).slots(), 7);
        assert_eq!(combine(8, 6, Plain, true).slots(), 6);
        assert!(combine(8, 6, Plain, true).by_lane());
        assert_eq!(combine(2, 8, Expanded, false).slots(), 8);
        let flags = |ranks, topk, sum| combine(ranks, topk, Expanded, sum).flags();
        assert_eq!((flags(1, 8, true), flags(2, 8, true), flags(8, 6, true)), (0, 4, 24));
        assert_eq!((flags(2, 8, false), flags(4, 8, false), combine(4, 8, Plain, true).flags()), (8, 12, 3));
    }
}
