//! What runs operations: one trait, two implementations with the same results.
//!
//! Operations are validated and planned in `ops`; a backend gets calls in which every size and offset is settled, and carries out the
//! protocol of `docs/protocol.md`.

pub(crate) mod abort;
pub(crate) mod collective;
pub(crate) mod cuda;
pub(crate) mod host;
pub(crate) mod platform;

use std::time::Duration;

use crate::config::BackendKind;
use crate::error::{Error, Result};
use crate::layout::{
    CombineShape, DispatchShape, HandleLayout, OutputLayout, REGION_ALIGNMENT, ReceiveLayout,
};
use crate::stream::{Event, EventRef, StreamRef};
use crate::tensor::{Extent, TensorMut, TensorRef};

/// Where an operation is enqueued and what it waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Order<'a> {
    pub(crate) stream: Option<StreamRef<'a>>,
    pub(crate) after: Option<EventRef<'a>>,
}

impl Order<'_> {
    pub(crate) fn is_implicit(&self) -> bool {
        self.stream.is_none() && self.after.is_none()
    }

    /// Checks that the caller names neither, where there are none.
    pub(crate) fn require_implicit(&self) -> Result<()> {
        if self.is_implicit() {
            return Ok(());
        }
        let problem =
            "the host backend has none: an operation has run when its call returns; leave it out".into();
        Err(Error::Tensor { tensor: "stream or event", problem })
    }
}

/// `height` pieces of `width` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy2d {
    pub(crate) from: u64,
    pub(crate) from_pitch: isize,
    pub(crate) to: u64,
    pub(crate) to_pitch: isize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Copy2d {
    /// From one tensor to another of the same shape, along the dimension in which both are contiguous; none if there is none.
    pub(crate) fn between(from: &Extent, to: &Extent) -> Option<Self> {
        let [rows, columns] = from.shape();
        let size = from.dtype().size();
        let ([fr, fc], [tr, tc]) = (from.strides(), to.strides());
        let piece = |n: usize, pitches: [isize; 2], height: usize| Self {
            from: from.address(),
            from_pitch: pitches[0] * size as isize,
            to: to.address(),
            to_pitch: pitches[1] * size as isize,
            width: n * size,
            height,
        };
        if columns <= 1 || (fc == 1 && tc == 1) {
            Some(piece(columns, [fr, tr], rows))
        } else if rows <= 1 || (fr == 1 && tr == 1) {
            Some(piece(rows, [fc, tc], columns))
        } else {
            None
        }
    }
}

/// Where positions come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Positions<'a> {
    /// Counted from these ids.
    Fresh { topk_idx: TensorRef<'a> },
    /// Taken from the handle slot, which an earlier call filled.
    Cached,
}

/// A dispatch, ready to run.
#[derive(Debug)]
pub(crate) struct DispatchCall<'a> {
    pub(crate) shape: DispatchShape,
    pub(crate) output: OutputLayout,
    pub(crate) handle: HandleLayout,
    /// Index of the output slot.
    pub(crate) output_slot: usize,
    /// Index of the handle slot.
    pub(crate) handle_slot: usize,
    pub(crate) positions: Positions<'a>,
    /// Of everything that must be equal on all ranks.
    pub(crate) digest: u32,
    /// Contiguous, `[tokens, …]`, `row_bytes` each.
    pub(crate) x: TensorRef<'a>,
    /// `[tokens, scale_packs]` of 4 bytes, any strides.
    pub(crate) scales: Option<TensorRef<'a>>,
    /// Contiguous `f32[tokens, topk]`.
    pub(crate) topk_weights: Option<TensorRef<'a>>,
    /// `i32[local experts]`, contiguous.
    pub(crate) statistics: Option<TensorMut<'a>>,
    pub(crate) zero_padding: bool,
    /// Wait for the counts.
    pub(crate) exact: bool,
    pub(crate) order: Order<'a>,
}

/// Where the peers of a rank read what it gives to a combine: offsets in its heap, in units of [`REGION_ALIGNMENT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Readable {
    pub(crate) x: u32,
    /// Any, if no weights go back.
    pub(crate) weights: u32,
}

impl Readable {
    /// An offset that peers can be told.
    pub(crate) fn unit(offset: u64) -> Option<u32> {
        let unit = REGION_ALIGNMENT as u64;
        if offset.is_multiple_of(unit) { u32::try_from(offset / unit).ok() } else { None }
    }
}

/// A combine, ready to run.
#[derive(Debug)]
pub(crate) struct CombineCall<'a> {
    pub(crate) shape: CombineShape,
    pub(crate) receive: ReceiveLayout,
    /// Of the dispatch that made the handle.
    pub(crate) dispatched: DispatchShape,
    pub(crate) handle: HandleLayout,
    pub(crate) handle_slot: usize,
    /// Tokens of this rank.
    pub(crate) tokens: usize,
    /// Contiguous BF16 `[rows, hidden]`.
    pub(crate) x: TensorRef<'a>,
    /// There if the ranks of the tokens read the rows where they are. On all ranks, or on none.
    pub(crate) pull: Option<Readable>,
    /// Contiguous `f32[received tokens, topk]` (plain) or `f32[rows]` (expanded).
    pub(crate) topk_weights: Option<TensorRef<'a>>,
    /// Contiguous BF16 `[tokens, hidden]`.
    pub(crate) biases: [Option<TensorRef<'a>>; 2],
    /// Contiguous BF16 `[tokens, hidden]`.
    pub(crate) out: TensorMut<'a>,
    /// Contiguous `f32[tokens, topk]`; there if and only if weights are given.
    pub(crate) out_weights: Option<TensorMut<'a>>,
    /// Of everything that must be equal on all ranks.
    pub(crate) digest: u32,
    pub(crate) order: Order<'a>,
}

/// What a rank has received, as known to the host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Tokens received.
    pub tokens: usize,
    /// Rows of the result: the tokens (plain), or all experts' rows including alignment gaps (expanded).
    pub rows: usize,
    /// Inclusive prefix sum of received tokens over source ranks.
    pub rank_prefix: Vec<usize>,
    /// Rows of each local expert, without gaps.
    pub expert_counts: Vec<usize>,
}

/// Something that went wrong in an operation after which the buffer can go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// No rank moved a row. What comes first, if there are several.
    Capacity { what: &'static str, rank: usize, needed: u64, capacity: u64 },
    /// The lane counted as none.
    ExpertOutOfRange { rank: usize, token: usize, lane: usize, expert: i64, experts: usize },
    /// The second lane counted as none.
    DuplicateExpert { rank: usize, token: usize, first: Option<usize>, second: usize, expert: i64 },
}

impl Problem {
    /// A call over capacity. `needed`: the tokens and rows that `rank` would have received.
    pub(crate) fn capacity(shape: &DispatchShape, rank: usize, needed: [u32; 2]) -> Self {
        let [tokens, rows] = needed.map(u64::from);
        let (what, needed, capacity) = if tokens > shape.token_capacity as u64 {
            ("token capacity", tokens, shape.token_capacity)
        } else {
            ("row capacity", rows, shape.row_capacity)
        };
        Self::Capacity { what, rank, needed, capacity: capacity as u64 }
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Capacity { what, rank, needed, capacity } => {
                Self::CapacityExceeded { what, rank, needed, capacity }
            }
            Problem::ExpertOutOfRange { rank, token, lane, expert, experts } => {
                Self::ExpertOutOfRange { rank, token, lane, expert, experts }
            }
            Problem::DuplicateExpert { rank, token, first, second, expert } => {
                Self::DuplicateExpert { rank, token, first, second, expert }
            }
        }
    }
}

/// What a dispatch gives back at once.
#[derive(Debug)]
pub(crate) struct DispatchOutcome {
    /// Number of this dispatch on the buffer, from 1; equal on all ranks.
    pub(crate) number: u32,
    /// There if exact counts were asked for.
    pub(crate) counts: Option<Counts>,
    /// Known at once only if exact counts were asked for.
    pub(crate) problem: Option<Problem>,
    pub(crate) event: Event,
}

/// A dispatch that has run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ran<'a> {
    pub(crate) number: u32,
    pub(crate) shape: &'a DispatchShape,
    pub(crate) handle: &'a HandleLayout,
    pub(crate) handle_slot: usize,
    /// Its positions are an earlier dispatch's.
    pub(crate) cached: bool,
}

/// Runs operations on one rank. The caller makes one call at a time; all ranks make the same calls in the same order.
///
/// An error means that ranks may no longer agree and the buffer is not used again. An inner error is about one call:
/// nothing was sent, and the call can be repeated.
pub(crate) trait Backend: Send + Sync {
    fn kind(&self) -> BackendKind;
    fn dispatch(&self, call: DispatchCall<'_>) -> Result<Result<DispatchOutcome>>;
    fn combine(&self, call: CombineCall<'_>) -> Result<Result<Event>>;
    fn barrier(&self, order: Order<'_>) -> Result<Result<Event>>;
    /// The problem of a dispatch that did not wait for counts.
    fn problem(&self, ran: Ran<'_>) -> Result<Option<Problem>>;
    /// Copies memory that the backend's processor uses, in stream order.
    ///
    /// # Safety
    /// Both sides must be readable or writable as described until the copy has run, and must not overlap.
    unsafe fn copy(&self, copy: Copy2d, order: Order<'_>) -> Result<Event>;
    /// Blocks until everything enqueued so far has run.
    fn synchronize(&self, timeout: Duration) -> Result<()>;
    /// Blocks until everything enqueued so far has run, as long as that can take. There will be no more calls, and no graph runs what was
    /// captured: the memory may be given back.
    fn close(&self) -> Result<()>;
    /// The stream of operations for which the caller gives none.
    fn stream(&self) -> Option<StreamRef<'_>>;
}
