//! Choices between ways of doing things: sizes at which one replaces another, and what is done unless the caller says otherwise.

/// Whether a rank that has its device for itself launches kernels early, if its caller does not say.
pub(crate) const EARLY_LAUNCH: bool = true;

/// Sizes at which collectives change the way in which values travel, in bytes of one rank: what it gives to an all-gather, gets from a
/// reduce-scatter, or gives to and gets from an all-reduce. The same on all ranks. On the host backend there is one way only.
///
/// The defaults come from measurements of two ranks on two H200, except those for more ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CollectiveLimits {
    /// Bytes that a rank stores for all others together, up to which values travel in cells: twice as many bytes, but nothing is waited for but
    /// the values. Never more than [`cell_bytes`](crate::layout::CollectiveConfig::cell_bytes) for each.
    pub cells: usize,
    /// Up to this, an all-reduce of more than two ranks has everybody read everything; above, each rank sums a part and gives it to all.
    pub one_shot: usize,
    /// From this on, an all-gather into symmetric memory is done by copy engines, without a multiprocessor.
    pub copy_engine: usize,
}

impl CollectiveLimits {
    /// The defaults.
    pub const DEFAULT: Self = Self { cells: 1 << 20, one_shot: 512 << 10, copy_engine: 4 << 20 };

    /// The same, with cells up to so many bytes.
    #[must_use]
    pub const fn cells(mut self, bytes: usize) -> Self {
        self.cells = bytes;
        self
    }

    /// The same, with sums in one shot up to so many bytes.
    #[must_use]
    pub const fn one_shot(mut self, bytes: usize) -> Self {
        self.one_shot = bytes;
        self
    }

    /// The same, with copy engines from so many bytes on.
    #[must_use]
    pub const fn copy_engine(mut self, bytes: usize) -> Self {
        self.copy_engine = bytes;
        self
    }
}

impl Default for CollectiveLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
