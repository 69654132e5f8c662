//! Sizes of small batches, as constants of the kernels that move them.

/// Sizes that a kernel of packets is compiled for: loops over them are unrolled, and divisions by them vanish. A kernel that is compiled for none
/// takes all of them as arguments, and gives the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PacketSizes {
    /// Most tokens of a rank.
    pub max_tokens: usize,
    /// Top-k lanes of a token.
    pub topk: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Packs of scales of a row; 0 in a combine.
    pub scale_packs: usize,
}

impl PacketSizes {
    /// The constants of a kernel's generated header.
    pub(super) fn constants(sizes: Option<Self>) -> String {
        let s = sizes.unwrap_or(Self { max_tokens: 1, topk: 1, experts: 1, row_bytes: 16, scale_packs: 0 });
        format!(
            "constexpr bool FIXED = {};\nconstexpr u32 FIXED_MAX_TOKENS = {}, FIXED_LANES = {}, FIXED_EXPERTS = {}, FIXED_ROW_BYTES = {}, \
             FIXED_SCALE_PACKS = {};",
            sizes.is_some(),
            s.max_tokens,
            s.topk,
            s.experts,
            s.row_bytes,
            s.scale_packs
        )
    }
}
