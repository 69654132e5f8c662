//! Dispatch: tokens go to the ranks of their experts.

use std::sync::Arc;

use super::Digest;
use crate::backend::{DispatchCall, Order, Positions, Problem};
use crate::buffer::Shared;
use crate::error::{Error, Result};
use crate::handle::{Dispatched, Handle, HandleInner, Lease, SlotKind};
use crate::layout::{DispatchShape, IndexWidth, MAX_TOPK, Placement, ScaleOrder};
use crate::stream::{EventRef, StreamRef};
use crate::tensor::{DType, TensorMut, TensorRef};

enum Route<'a> {
    Fresh(TensorRef<'a>),
    Cached(&'a Handle),
}

/// Arguments of [`ElasticBuffer::dispatch`](crate::ElasticBuffer::dispatch).
///
/// All ranks give the same shapes and options; only the number of tokens and the contents differ.
pub struct DispatchArgs<'a> {
    x: TensorRef<'a>,
    route: Route<'a>,
    scales: Option<TensorRef<'a>>,
    topk_weights: Option<TensorRef<'a>>,
    statistics: Option<TensorMut<'a>>,
    expanded: Option<usize>,
    alignment: usize,
    zero_padding: bool,
    scale_order: ScaleOrder,
    exact: bool,
    token_capacity: Option<usize>,
    row_capacity: Option<usize>,
    order: Order<'a>,
}

impl<'a> DispatchArgs<'a> {
    /// Sends row t of `x` (`[tokens, hidden]`, contiguous, rows of a multiple of 16 bytes) to the ranks that own the experts in row t of `topk_idx` (`i32` or `i64`
    /// `[tokens, topk]`, contiguous; −1 is none; experts of a row are distinct).
    ///
    /// An id that is no expert, or a row's second of an expert, counts as none and is an error: see [`WrongIds`](Error::WrongIds).
    pub fn new(x: TensorRef<'a>, topk_idx: TensorRef<'a>) -> Self {
        Self::with(x, Route::Fresh(topk_idx))
    }

    /// Sends rows along the routes of an earlier dispatch: no counting, and the same positions. The layout is the earlier one's.
    pub fn cached(x: TensorRef<'a>, handle: &'a Handle) -> Self {
        Self::with(x, Route::Cached(handle))
    }

    fn with(x: TensorRef<'a>, route: Route<'a>) -> Self {
        Self {
            x,
            route,
            scales: None,
            topk_weights: None,
            statistics: None,
            expanded: None,
            alignment: 1,
            zero_padding: false,
            scale_order: ScaleOrder::RowMajor,
            exact: true,
            token_capacity: None,
            row_capacity: None,
            order: Order::default(),
        }
    }

    /// Scales that travel with the rows: `[tokens, packs]` of `f32`, or of `i32` with four UE8M0 scales each; any strides.
    #[must_use]
    pub fn scales(mut self, scales: TensorRef<'a>) -> Self {
        self.scales = Some(scales);
        self
    }

    /// Weights that travel with the tokens: `f32` `[tokens, topk]`, contiguous.
    #[must_use]
    pub fn weights(mut self, topk_weights: TensorRef<'a>) -> Self {
        self.topk_weights = Some(topk_weights);
        self
    }

    /// Adds the number of tokens that each local expert receives to `i32[local experts]`.
    #[must_use]
    pub fn statistics(mut self, statistics: TensorMut<'a>) -> Self {
        self.statistics = Some(statistics);
        self
    }

    /// Delivers one row for each received token and local expert, grouped by expert, each expert's first row at a multiple of `alignment`.
    #[must_use]
    pub fn expanded(mut self, alignment: usize) -> Self {
        self.expanded = Some(alignment);
        self
    }

    /// Alignment of the reported first rows of experts in the plain layout.
    #[must_use]
    pub fn alignment(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    /// Zeroes the rows, scales and weights in the alignment gaps of the expanded layout.
    #[must_use]
    pub fn zero_padding(mut self) -> Self {
        self.zero_padding = true;
        self
    }

    /// Order of the received scales.
    #[must_use]
    pub fn scale_order(mut self, order: ScaleOrder) -> Self {
        self.scale_order = order;
        self
    }

    /// Returns without waiting for counts: the result's views have the capacity as their number of rows, and
    /// [`Handle::count_cells`] has the counts once the operation has run.
    #[must_use]
    pub fn without_counts(mut self) -> Self {
        self.exact = false;
        self
    }

    /// Takes at most this many tokens from all ranks together; more is an error that loses nothing.
    #[must_use]
    pub fn token_capacity(mut self, tokens: usize) -> Self {
        self.token_capacity = Some(tokens);
        self
    }

    /// Takes at most this many rows of the expanded layout; more is an error that loses nothing.
    #[must_use]
    pub fn row_capacity(mut self, rows: usize) -> Self {
        self.row_capacity = Some(rows);
        self
    }

    /// Enqueues the operation on this stream.
    #[must_use]
    pub fn stream(mut self, stream: StreamRef<'a>) -> Self {
        self.order.stream = Some(stream);
        self
    }

    /// Waits for this event first.
    #[must_use]
    pub fn after(mut self, event: EventRef<'a>) -> Self {
        self.order.after = Some(event);
        self
    }

    /// The shape of the call, with everything checked that a shape can tell.
    fn shape(&self, shared: &Shared) -> Result<DispatchShape> {
        let (base, fresh) = match &self.route {
            Route::Fresh(topk_idx) => {
                let placement = if self.expanded.is_some() { Placement::Expanded } else { Placement::Plain };
                let mut shape = shared.config.shape(
                    shared.layout.ranks,
                    placement,
                    self.expanded.unwrap_or(self.alignment),
                )?;
                topk_idx.require_dtype("topk_idx", &[DType::I32, DType::I64], "I32 or I64")?;
                topk_idx.require_contiguous("topk_idx")?;
                topk_idx.require_shape("topk_idx", self.x.rows(), topk_idx.columns())?;
                shape.topk = topk_idx.columns();
                if shape.topk == 0 || shape.topk > MAX_TOPK {
                    return Err(Error::invalid("topk", shape.topk, format!("must be 1 to {MAX_TOPK}")));
                }
                shape.index =
                    if topk_idx.dtype() == DType::I32 { IndexWidth::Bits32 } else { IndexWidth::Bits64 };
                if placement == Placement::Expanded {
                    let worst = DispatchShape::worst_case_rows(
                        shape.ranks,
                        shape.max_tokens,
                        shape.topk,
                        shape.local_experts(),
                        shape.alignment,
                    );
                    shape.row_capacity = shared.config.row_capacity.unwrap_or(worst).min(worst);
                }
                (shape, true)
            }
            Route::Cached(handle) => {
                handle.require_buffer(shared)?;
                self.check_cached(handle)?;
                (handle.0.shape, false)
            }
        };
        let mut shape = base;
        if fresh {
            let limit = |given: Option<usize>, capacity: usize| given.unwrap_or(capacity).min(capacity);
            shape.token_capacity = limit(self.token_capacity, shape.token_capacity);
            shape.row_capacity = match shape.placement {
                Placement::Plain => shape.token_capacity,
                Placement::Expanded => limit(self.row_capacity, shape.row_capacity),
            };
        }
        shape.row_bytes = self.x.row_bytes();
        shape.scale_packs = self.scales.as_ref().map_or(0, |scales| scales.columns());
        shape.scale_order = self.scale_order;
        Ok(shape)
    }

    /// Options that a cached dispatch takes from its handle.
    fn check_cached(&self, handle: &Handle) -> Result<()> {
        let inner = &handle.0;
        let mismatch = |field, handle: &dyn ToString, call: &dyn ToString| {
            Err(Error::HandleMismatch { field, handle: handle.to_string(), call: call.to_string() })
        };
        if self.x.rows() != inner.tokens {
            return mismatch("tokens", &inner.tokens, &self.x.rows());
        }
        let expanded = (inner.shape.placement == Placement::Expanded).then_some(inner.shape.alignment);
        if self.expanded.is_some() && self.expanded != expanded {
            let text = |e: Option<usize>| e.map_or("plain".into(), |a| format!("expanded, alignment {a}"));
            return mismatch("layout", &text(expanded), &text(self.expanded));
        }
        if self.token_capacity.is_some() || self.row_capacity.is_some() {
            let problem = "a cached dispatch has the capacity of its handle".into();
            return Err(Error::Tensor { tensor: "capacity", problem });
        }
        if self.statistics.is_some() {
            let problem = "a cached dispatch counts nothing; leave them out".into();
            return Err(Error::Tensor { tensor: "statistics", problem });
        }
        Ok(())
    }

    fn check_tensors(&self, shared: &Shared, shape: &DispatchShape) -> Result<()> {
        let site = &shared.site;
        let n = self.x.rows();
        if n > shape.max_tokens {
            let need = format!("this buffer takes at most {} from each rank", shape.max_tokens);
            return Err(Error::invalid("tokens", n, need));
        }
        site.require_rows("x", &self.x)?;
        self.x.require_contiguous("x")?;
        match (self.x.dtype(), &self.scales) {
            (DType::F8E4M3 | DType::F8E5M2, None) => {
                let problem = format!("rows of {} come with scales; give them with `scales`", self.x.dtype());
                return Err(Error::Tensor { tensor: "scales", problem });
            }
            (DType::Bf16 | DType::F16 | DType::F32, Some(_)) => {
                let problem = format!("rows of {} have no scales; leave them out", self.x.dtype());
                return Err(Error::Tensor { tensor: "scales", problem });
            }
            _ => {}
        }
        if let Some(scales) = &self.scales {
            site.require("scales", scales)?;
            scales.require_dtype("scales", &[DType::F32, DType::I32], "F32, or I32 with four UE8M0 each")?;
            scales.require_shape("scales", n, shape.scale_packs)?;
            if shape.scale_packs == 0 {
                let problem = "have no columns; leave them out if there are none".into();
                return Err(Error::Tensor { tensor: "scales", problem });
            }
        }
        if let Some(weights) = &self.topk_weights {
            site.require("topk_weights", weights)?;
            weights.require_dtype("topk_weights", &[DType::F32], "F32")?;
            weights.require_shape("topk_weights", n, shape.topk)?;
            weights.require_contiguous("topk_weights")?;
        }
        if let Some(statistics) = &self.statistics {
            site.require("statistics", statistics)?;
            statistics.require_dtype("statistics", &[DType::I32], "I32")?;
            statistics.require_shape("statistics", shape.local_experts(), 1)?;
            statistics.require_contiguous("statistics")?;
        }
        if self.zero_padding && shape.placement == Placement::Plain {
            let need = "the plain layout has no gaps; ask for the expanded layout or leave it out";
            return Err(Error::invalid("zero_padding", true, need));
        }
        if let Route::Fresh(topk_idx) = &self.route {
            site.require("topk_idx", topk_idx)?;
        }
        Ok(())
    }

    fn digest(&self, shape: &DispatchShape) -> u32 {
        let source = match &self.route {
            Route::Fresh(_) => 0,
            Route::Cached(handle) => handle.0.number as usize + 1,
        };
        [
            shape.experts,
            shape.topk,
            shape.row_bytes,
            shape.scale_packs,
            shape.scale_order as usize,
            shape.index as usize,
            shape.placement as usize,
            shape.alignment,
            shape.token_capacity,
            shape.row_capacity,
            self.topk_weights.is_some().into(),
            source,
        ]
        .into_iter()
        .fold(Digest::new(), Digest::add)
        .finish()
    }

    /// Validates, plans and launches. The outer result is about the buffer's state, the inner one about this call alone.
    pub(crate) fn run(mut self, shared: &Arc<Shared>) -> Result<Result<Dispatched>> {
        let (call, lease, handle) = match self.plan(shared) {
            Ok(planned) => planned,
            Err(e) => return Ok(Err(e)),
        };
        let exact = call.exact;
        let (shape, output, layout) = (call.shape, call.output, call.handle);
        let (dtype, scale_dtype) = (call.x.dtype(), call.scales.as_ref().map(|s| s.dtype()));
        let (tokens, weighted) = (call.x.rows(), call.topk_weights.is_some());
        let outcome = match shared.backend.dispatch(call)? {
            Ok(outcome) => outcome,
            Err(e) => return Ok(Err(e)),
        };
        let number = outcome.number;
        let problem = outcome.problem.filter(|_| exact);
        // Every rank hears of that one, and none has a result.
        if let Some(problem @ Problem::Capacity { .. }) = problem {
            return Ok(Err(problem.into()));
        }
        let cached = handle.is_ok();
        let handle = match handle {
            Ok(cached) => cached,
            Err(lease) => {
                let counts = outcome.counts;
                Handle(Arc::new(HandleInner { lease, number, shape, layout, tokens, counts }))
            }
        };
        let dispatched = Dispatched {
            lease,
            handle,
            shape,
            output,
            dtype,
            scale_dtype,
            weighted,
            number,
            cached,
            event: outcome.event,
        };
        Ok(match problem {
            None => Ok(dispatched),
            Some(problem) => {
                Err(Error::WrongIds { problem: Box::new(problem.into()), dispatched: Box::new(dispatched) })
            }
        })
    }

    #[allow(clippy::type_complexity)] // The handle is either the cached one or a new slot's lease.
    fn plan(&mut self, shared: &Arc<Shared>) -> Result<(DispatchCall<'a>, Lease, Result<Handle, Lease>)> {
        let shape = self.shape(shared)?;
        self.check_tensors(shared, &shape)?;
        let (output, handle_layout) = shared.layout.fits_dispatch(&shape)?;
        let digest = self.digest(&shape);
        let lease = Lease::take(shared, SlotKind::Output)?;
        let (positions, handle, handle_layout, exact) = match &self.route {
            Route::Fresh(topk_idx) => {
                let lease = Lease::take(shared, SlotKind::Handle)?;
                (Positions::Fresh { topk_idx: *topk_idx }, Err(lease), handle_layout, self.exact)
            }
            // Its counts are known, or nobody asked for them.
            Route::Cached(handle) => (Positions::Cached, Ok((*handle).clone()), handle.0.layout, false),
        };
        let handle_slot = match &handle {
            Ok(handle) => handle.0.lease.slot,
            Err(lease) => lease.slot,
        };
        let call = DispatchCall {
            shape,
            output,
            handle: handle_layout,
            output_slot: lease.slot,
            handle_slot,
            positions,
            digest,
            x: self.x,
            scales: self.scales,
            topk_weights: self.topk_weights,
            statistics: self.statistics.take(),
            zero_padding: self.zero_padding,
            exact,
            order: self.order,
        };
        Ok((call, lease, handle))
    }
}
