//! The status block: what a rank's kernels tell its host, in host memory that the device can write.

use super::abi::device_struct;
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

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $code:ident = $value:literal, $constant:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $code = $value,)*
        }

        impl $name {
            /// All codes with the names that kernels know them by.
            pub(crate) const NAMED: &'static [(&'static str, u32)] = &[$(($constant, $value)),*];

            /// The code with this number.
            pub const fn from_code(code: u32) -> Option<Self> {
                match code {
                    $($value => Some(Self::$code),)*
                    _ => None,
                }
            }

            /// What it is, for error messages.
            pub const fn describe(self) -> &'static str {
                match self { $(Self::$code => $text,)* }
            }
        }
    };
}

codes! {
    /// The operation a record is about.
    Operation {
        /// Dispatch.
        Dispatch = 1, "OPERATION_DISPATCH", "dispatch";
        /// Combine.
        Combine = 2, "OPERATION_COMBINE", "combine";
        /// Barrier.
        Barrier = 3, "OPERATION_BARRIER", "barrier";
        /// All-gather.
        AllGather = 4, "OPERATION_ALL_GATHER", "all-gather";
        /// Reduce-scatter.
        ReduceScatter = 5, "OPERATION_REDUCE_SCATTER", "reduce-scatter";
        /// All-reduce.
        AllReduce = 6, "OPERATION_ALL_REDUCE", "all-reduce";
    }
}

codes! {
    /// What was being waited for. See `docs/protocol.md`.
    Phase {
        /// Counts of the rank's own sending blocks.
        Partials = 1, "PHASE_PARTIALS", "counts of this rank's own blocks";
        /// A peer's totals, or its permission to write.
        Totals = 2, "PHASE_TOTALS", "token counts";
        /// Not a wait: a peer called with other parameters.
        Parameters = 3, "PHASE_PARAMETERS", "agreement on the call's parameters";
        /// Tables of the rank's own sending blocks.
        Tables = 4, "PHASE_TABLES", "tables of this rank's own blocks";
        /// A row from a peer.
        Arrival = 5, "PHASE_ARRIVAL", "arrival of a row";
        /// A peer's sending block.
        Done = 6, "PHASE_DONE", "end of sending";
        /// The start of a peer's kernel.
        Started = 7, "PHASE_STARTED", "start";
        /// A copy between global and shared memory of the own device.
        LocalCopy = 8, "PHASE_LOCAL_COPY", "a local copy";
        /// A warp of the same block.
        Announcer = 9, "PHASE_ANNOUNCER", "the block's announcing warp";
        /// A peer's arrival at a barrier.
        Barrier = 10, "PHASE_BARRIER", "barrier";
        /// A peer's values, in cells.
        Cells = 11, "PHASE_CELLS", "values of a peer";
        /// A step of a peer's block of the same number.
        Stage = 12, "PHASE_STAGE", "a step of a peer";
        /// The end of a peer's reading of this rank's rows.
        Reading = 13, "PHASE_READING", "end of reading";
    }
}

device_struct! {
    /// One record. `sequence` is written last, after a system-scope fence; 0 means "never".
    pub struct StatusRecord {
        /// Epoch of the operation that wrote the record, and never 0 in a valid one.
        sequence: u32,
        /// [`Operation`] code.
        operation: u32,
        /// [`Phase`] code; abort records only.
        phase: u32,
        /// Rank that found the failure.
        rank: u32,
        /// Abort: the rank that was waited for. Capacity: the rank whose capacity is exceeded.
        peer: u32,
        /// Block that found it.
        block: u32,
        /// Abort: index of the cell (block, token index or slot). Expert ids: token.
        index: u32,
        /// Expert ids: lane.
        lane: u32,
        /// Abort: value that would have ended the wait. Capacity: the row capacity. Expert ids: number of experts.
        expected: u64,
        /// Abort: value that was there. Capacity: rows needed. Expert ids: the id, as a signed number.
        seen: u64,
        /// Capacity: the token capacity. Abort: nanoseconds waited.
        expected_tokens: u64,
        /// Capacity: tokens needed.
        seen_tokens: u64,
    }
}

/// The word in a rank's `abort` cell: which wait of which rank failed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortWord {
    /// Epoch of the operation.
    pub epoch: u32,
    /// Rank that was waited for.
    pub missing: u32,
    /// Rank that gave up.
    pub origin: u32,
    /// [`Phase`] code.
    pub phase: u32,
    /// [`Operation`] code.
    pub operation: u32,
}

impl AbortWord {
    /// The cell's value; never 0.
    pub const fn encode(self) -> u64 {
        1 << 63
            | (self.operation as u64 & 0x7f) << 56
            | (self.phase as u64 & 0xff) << 48
            | (self.origin as u64 & 0xff) << 40
            | (self.missing as u64 & 0xff) << 32
            | self.epoch as u64
    }

    /// What a cell says; `None` as long as nobody gave up.
    pub const fn decode(cell: u64) -> Option<Self> {
        if cell == 0 {
            return None;
        }
        Some(Self {
            epoch: cell as u32,
            missing: (cell >> 32) as u32 & 0xff,
            origin: (cell >> 40) as u32 & 0xff,
            phase: (cell >> 48) as u32 & 0xff,
            operation: (cell >> 56) as u32 & 0x7f,
        })
    }
}

impl StatusRecord {
    /// An abort record as the word that was in the abort cell.
    pub const fn abort_word(&self) -> AbortWord {
        AbortWord {
            epoch: self.sequence,
            missing: self.peer,
            origin: self.rank,
            phase: self.phase,
            operation: self.operation,
        }
    }

    /// An abort record's values that would have ended the wait and that were there instead. Only the rank that gave up first has them.
    pub const fn values(&self) -> Option<[u64; 2]> {
        if self.expected | self.seen == 0 { None } else { Some([self.expected, self.seen]) }
    }
}

/// Offsets in the status block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusLayout {
    /// `[RecordKind::COUNT][STATUS_RECORD_BYTES]`, each a [`StatusRecord`].
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
        assert!(size_of::<StatusRecord>() <= STATUS_RECORD_BYTES);
    }

    #[test]
    fn the_declaration_for_kernels_has_every_field_in_order() {
        let text = StatusRecord::CUDA;
        assert!(text.starts_with("struct StatusRecord {\n    u32 sequence;\n    u32 operation;\n"), "{text}");
        assert!(text.ends_with("    u64 seen_tokens;\n};\n"), "{text}");
    }

    #[test]
    fn abort_words_survive_the_cell() {
        assert_eq!(AbortWord::decode(0), None);
        let word = AbortWord { epoch: u32::MAX, missing: 7, origin: 1, phase: 10, operation: 3 };
        assert_eq!(AbortWord::decode(word.encode()), Some(word));
        let zero = AbortWord { epoch: 0, missing: 0, origin: 0, phase: 0, operation: 0 };
        assert_eq!(AbortWord::decode(zero.encode()), Some(zero));
    }

    #[test]
    fn codes_have_names() {
        assert_eq!(Phase::from_code(7), Some(Phase::Started));
        assert_eq!(Phase::from_code(0), None);
        assert_eq!(Operation::Combine.describe(), "combine");
        assert_eq!(Phase::NAMED.len(), 13);
    }
}
