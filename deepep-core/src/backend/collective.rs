//! What runs collectives: one trait, like [`Backend`](super::Backend) for dispatch and combine.

use super::Order;
use crate::config::BackendKind;
use crate::error::Result;
use crate::jit::CollectiveKind;
use crate::layout::Operation;
use crate::stream::{Event, StreamRef};
use crate::tensor::DType;

/// A collective, ready to run: tensors are contiguous, of one element type, and where the backend can use them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectiveCall<'a> {
    pub(crate) kind: CollectiveKind,
    pub(crate) dtype: DType,
    /// Addresses of what this rank gives and gets.
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// All-gather: bytes that a rank gives. Reduce-scatter: bytes that a rank gets. All-reduce: bytes of either.
    pub(crate) bytes: usize,
    /// Where the output is in every rank's symmetric memory, if it is there.
    pub(crate) symmetric: Option<usize>,
    /// Of everything that must be equal on all ranks.
    pub(crate) digest: u32,
    pub(crate) order: Order<'a>,
}

impl CollectiveCall<'_> {
    pub(crate) const fn operation(&self) -> Operation {
        match self.kind {
            CollectiveKind::AllGather => Operation::AllGather,
            CollectiveKind::ReduceScatter => Operation::ReduceScatter,
            CollectiveKind::AllReduce => Operation::AllReduce,
        }
    }
}

/// Runs collectives on one rank. The caller makes one call at a time; all ranks make the same calls in the same order.
///
/// As for [`Backend`](super::Backend), the outer error means that ranks may no longer agree; the inner one is about one call, which moved
/// nothing on any rank.
pub(crate) trait CollectiveBackend: Send + Sync {
    fn kind(&self) -> BackendKind;
    /// # Safety
    /// The addresses are those of tensors of the call's sizes, which stay what they are until the call has run; nobody else uses them
    /// meanwhile. They are the same tensor, or the same part of one, or do not overlap.
    unsafe fn run(&self, call: CollectiveCall<'_>) -> Result<Result<Event>>;
    /// Blocks until everything enqueued so far has run, as long as that can take. There will be no more calls, and no graph runs what was
    /// captured: the memory may be given back.
    fn close(&self) -> Result<()>;
    /// The stream of calls for which the caller gives none.
    fn stream(&self) -> Option<StreamRef<'_>>;
}
