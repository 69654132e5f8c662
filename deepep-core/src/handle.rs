//! What a dispatch leaves behind: the slots that its result and its handle occupy.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::backend::{Copy2d, Counts, Order, Ran};
use crate::buffer::Shared;
use crate::layout::{DispatchShape, HandleLayout, OutputLayout, Placement};
use crate::stream::{Event, StreamRef};
use crate::tensor::{DType, TensorMut, TensorRef};
use crate::{Error, Result};

/// Free slots of one kind.
pub(crate) struct Slots {
    free: Mutex<Vec<usize>>,
    count: usize,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        Self { free: Mutex::new((0..count).rev().collect()), count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    fn take(&self) -> Option<usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn put_back(&self, slot: usize) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }
}

/// Which slots a lease is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotKind {
    Output,
    Handle,
    Input,
}

/// A slot that nobody else gets as long as this lives. Keeps the buffer's memory mapped.
pub(crate) struct Lease {
    pub(crate) shared: Arc<Shared>,
    pub(crate) slot: usize,
    kind: SlotKind,
}

impl Lease {
    pub(crate) fn take(shared: &Arc<Shared>, kind: SlotKind) -> Result<Self> {
        let slots = shared.slots(kind);
        let Some(slot) = slots.take() else {
            let what = match kind {
                SlotKind::Output => "dispatch result",
                SlotKind::Handle => "dispatch handle",
                SlotKind::Input => "combine input",
            };
            return Err(Error::SlotsHeld { what, slots: slots.count() });
        };
        Ok(Self { shared: shared.clone(), slot, kind })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.slots(self.kind).put_back(self.slot);
    }
}

/// What combine and a cached dispatch need of an earlier dispatch. Cheap to clone; its slot is free when the last clone is gone.
///
/// A handle belongs to the buffer that made it and keeps that buffer's memory alive. Its tables can be given to that buffer's operations, and to nobody
/// else's ([`ForeignView`](Error::ForeignView)).
///
/// The last clone of a handle that a captured call made or used is dropped when the graph is destroyed and its last replay has run: the graph's
/// kernels read and write its slot ([CUDA graphs](crate#cuda-graphs)).
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<HandleInner>);

pub(crate) struct HandleInner {
    pub(crate) lease: Lease,
    /// Number of the dispatch that made it, equal on all ranks.
    pub(crate) number: u32,
    pub(crate) shape: DispatchShape,
    pub(crate) layout: HandleLayout,
    /// Tokens that this rank gave.
    pub(crate) tokens: usize,
    pub(crate) counts: Option<Counts>,
}

impl Handle {
    /// Tokens that this rank gave to the dispatch: the rows of combine's result.
    pub fn tokens(&self) -> usize {
        self.0.tokens
    }

    /// Top-k lanes of a token.
    pub fn topk(&self) -> usize {
        self.0.shape.topk
    }

    /// How the received rows are arranged.
    pub fn placement(&self) -> Placement {
        self.0.shape.placement
    }

    /// What this rank received, if the dispatch waited for it.
    pub fn counts(&self) -> Option<&Counts> {
        self.0.counts.as_ref()
    }

    /// `i32[4]`: tokens received, rows, and, if the call was over capacity, the tokens and rows that the lowest rank over it would have needed, else 0.
    pub fn count_cells(&self) -> TensorRef<'_> {
        self.table(self.0.layout.counts, HandleLayout::COUNTS)
    }

    /// `i32[ranks]`: inclusive prefix sum of received tokens over source ranks.
    pub fn rank_prefix(&self) -> TensorRef<'_> {
        self.table(self.0.layout.rank_psum, self.0.shape.ranks)
    }

    /// `i32[local experts + 1]`: first row of each local expert in the expanded layout, aligned; the last entry is the number of rows.
    pub fn expert_starts(&self) -> TensorRef<'_> {
        self.table(self.0.layout.expert_start, self.0.shape.local_experts() + 1)
    }

    /// `i32[local experts]`: rows of each local expert, without alignment gaps.
    pub fn expert_counts(&self) -> TensorRef<'_> {
        self.table(self.0.layout.expert_count, self.0.shape.local_experts())
    }

    /// Where each received token comes from: `i32[tokens, 2]`, global token id (source rank · most tokens of a rank + token) and the bit
    /// mask of the lanes whose experts live here. As many rows as tokens can arrive, or did if that is known.
    pub fn sources(&self) -> TensorRef<'_> {
        let tokens = self.0.counts.as_ref().map_or(self.0.shape.token_capacity, |c| c.tokens);
        self.view(self.0.layout.source, DType::I32, [tokens, 2])
    }

    fn table(&self, offset: usize, len: usize) -> TensorRef<'_> {
        self.view(offset, DType::I32, [len, 1])
    }

    fn view(&self, offset: usize, dtype: DType, shape: [usize; 2]) -> TensorRef<'_> {
        let lease = &self.0.lease;
        let shared = &lease.shared;
        let address = shared.heap.base() + (shared.layout.handles.at(lease.slot) + offset) as u64;
        // SAFETY: the layout fits the slot (checked when the handle was made), the slot lies in this rank's heap, which the handle
        // keeps mapped, and no call writes the slot while the handle exists. As for results, no work but this buffer's gets the view.
        unsafe { TensorRef::heap(address, shared.site.home(), dtype, shape) }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("buffer", &self.0.lease.shared.id)
            .field("dispatch", &self.0.number)
            .field("tokens", &self.0.tokens)
            .field("shape", &self.0.shape)
            .field("counts", &self.0.counts)
            .finish_non_exhaustive()
    }
}

/// What a dispatch delivered: views of the symmetric heap, and the handle.
///
/// The views stay as they are until this is dropped; then a later dispatch may reuse the memory. On the CUDA backend, work that reads them must be enqueued on the
/// dispatches' stream, or ordered before the stream's next dispatch by an event, before this is dropped; and it must have run before the buffer and the
/// last of its results and handles are dropped, which give the memory back. Operations of this buffer keep to that order by themselves; other
/// buffers' operations and collectives refuse the views ([`ForeignView`](Error::ForeignView)): [copy](Self::copy_out) them for those.
///
/// The result of a captured dispatch is dropped when the graph is destroyed and its last replay has run, since every replay writes this slot ([CUDA
/// graphs](crate#cuda-graphs)). Its views show what the newest replay delivered.
pub struct Dispatched {
    pub(crate) lease: Lease,
    pub(crate) handle: Handle,
    pub(crate) shape: DispatchShape,
    pub(crate) output: OutputLayout,
    pub(crate) dtype: DType,
    pub(crate) scale_dtype: Option<DType>,
    pub(crate) weighted: bool,
    pub(crate) number: u32,
    pub(crate) cached: bool,
    pub(crate) event: Event,
}

impl Dispatched {
    /// For combine and cached dispatches.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Consumes the result, keeps the handle: the rows' memory may be reused.
    pub fn into_handle(self) -> Handle {
        self.handle.clone()
    }

    /// What this rank received, if the dispatch waited for it.
    pub fn counts(&self) -> Option<&Counts> {
        self.handle.counts()
    }

    /// The point at which everything has arrived.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Rows of the result: how many there are if the dispatch waited for counts, else how many there can be.
    pub fn rows(&self) -> usize {
        self.counts().map_or(self.shape.row_capacity, |counts| counts.rows)
    }

    /// Tokens of the result, likewise. The same as the rows in the plain layout.
    pub fn tokens(&self) -> usize {
        self.counts().map_or(self.shape.token_capacity, |counts| counts.tokens)
    }

    /// The received rows, `[rows, hidden]`.
    pub fn x(&self) -> TensorRef<'_> {
        self.view(self.output.rows, self.dtype, [self.rows(), self.shape.row_bytes / self.dtype.size()])
    }

    /// The received rows' scales, `[rows, packs]`, with strides (packs, 1) or (1, row capacity rounded up to 4).
    pub fn scales(&self) -> Option<TensorRef<'_>> {
        let dtype = self.scale_dtype?;
        let (pack, row) = self.shape.scale_strides();
        let address = self.address(self.output.scales);
        let shape = [self.rows(), self.shape.scale_packs];
        let strides = [row as isize, pack as isize];
        // SAFETY: as in `view`; the region holds every pack of every row of the capacity in this order.
        Some(unsafe {
            TensorRef::heap_strided(address, self.lease.shared.site.home(), dtype, shape, strides)
        })
    }

    /// Plain: expert ids, local to this rank, of each received token, `[tokens, topk]`; −1 for lanes whose expert lives elsewhere. Expanded: none.
    pub fn topk_idx(&self) -> Option<TensorRef<'_>> {
        let dtype = if self.shape.index.bytes() == 4 { DType::I32 } else { DType::I64 };
        let plain = self.shape.placement == Placement::Plain;
        plain.then(|| self.view(self.output.lane_expert, dtype, [self.tokens(), self.shape.topk]))
    }

    /// If weights were given: all weights of each received token, `[tokens, topk]` (plain), or the weight of each row, `[rows, 1]` (expanded).
    pub fn topk_weights(&self) -> Option<TensorRef<'_>> {
        self.weighted.then(|| match self.shape.placement {
            Placement::Plain => {
                self.view(self.output.lane_weight, DType::F32, [self.tokens(), self.shape.topk])
            }
            Placement::Expanded => self.view(self.output.row_weight, DType::F32, [self.rows(), 1]),
        })
    }

    /// Whether the dispatch has run and delivered everything. Of use when it did not wait for counts: then a call over capacity delivers nothing, on all
    /// ranks, and says so here; and so does the rank whose ids were wrong. Of several calls with wrong ids the newest is known.
    ///
    /// Of a captured dispatch the newest replay is looked at, and the caller sees to it that it has run.
    ///
    /// # Errors
    /// [`CapacityExceeded`](Error::CapacityExceeded) with the number that is needed;
    /// [`ExpertOutOfRange`](Error::ExpertOutOfRange) or [`DuplicateExpert`](Error::DuplicateExpert) for a lane that counted as none;
    /// [`StillRunning`](Error::StillRunning) if the dispatch has not run yet; [`PeerTimeout`](Error::PeerTimeout) if a rank gave up.
    pub fn check(&self) -> Result<()> {
        let shared = &self.lease.shared;
        if self.event.is_pending()? {
            let (rank, waited) = (shared.heap.rank(), Duration::ZERO);
            return Err(Error::StillRunning { what: "a dispatch", rank, waited });
        }
        let handle = &self.handle.0;
        let ran = Ran {
            number: self.number,
            shape: &self.shape,
            handle: &handle.layout,
            handle_slot: handle.lease.slot,
            cached: self.cached,
        };
        match shared.backend.problem(ran)? {
            Some(problem) => Err(problem.into()),
            None => Ok(()),
        }
    }

    /// Copies one of this result's views into the caller's memory, of the same shape and element type, so that the result can be
    /// dropped. Both must be contiguous along the same dimension.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape), [`DType`](Error::DType), [`Memory`](Error::Memory) or [`Stride`](Error::Stride) if they don't fit together; [`Tensor`](Error::Tensor) if the view is none of this
    /// result.
    pub fn copy_out(
        &self,
        view: TensorRef<'_>,
        out: TensorMut<'_>,
        stream: Option<StreamRef<'_>>,
    ) -> Result<Event> {
        let shared = &self.lease.shared;
        let order = Order { stream, after: None };
        shared.site.require("out", &out)?;
        let slot = self.address(0)..self.address(self.output.bytes);
        if view.bytes() > 0 && !slot.contains(&view.address()) {
            let problem = "is not a view of this result".into();
            return Err(Error::Tensor { tensor: "view", problem });
        }
        if out.dtype() != view.dtype() {
            let expected = view.dtype().name();
            return Err(Error::DType { tensor: "out", got: out.dtype(), expected });
        }
        out.require_shape("out", view.rows(), view.columns())?;
        let Some(copy) = Copy2d::between(&view, &out) else {
            return Err(out.refuse_strides("out", "must be contiguous along the same dimension as the view"));
        };
        // SAFETY: the view lies in this result's slot (checked), which the lease keeps; `out` is exclusively borrowed, hence elsewhere. That both
        // exist until the copy has run is what views of device memory promise.
        unsafe { shared.backend.copy(copy, order) }
    }

    fn address(&self, offset: usize) -> u64 {
        let shared = &self.lease.shared;
        shared.heap.base() + (shared.layout.outputs.at(self.lease.slot) + offset) as u64
    }

    fn view(&self, offset: usize, dtype: DType, shape: [usize; 2]) -> TensorRef<'_> {
        // SAFETY: the layout fits the slot (checked when the call was planned), the slot lies in this rank's heap, which the lease keeps
        // mapped, and no call writes the slot while the lease exists. Work that was enqueued with the view is this buffer's (others refuse it),
        // whose next call and whose end come after it.
        unsafe { TensorRef::heap(self.address(offset), self.lease.shared.site.home(), dtype, shape) }
    }
}

impl fmt::Debug for Dispatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatched")
            .field("rows", &self.rows())
            .field("dtype", &self.dtype)
            .field("handle", &self.handle)
            .finish_non_exhaustive()
    }
}
