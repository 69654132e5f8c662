//! Combine: the experts' outputs go back and are summed.

use std::sync::Arc;

use super::Digest;
use crate::backend::{CombineCall, Order, Readable};
use crate::buffer::Shared;
use crate::config::{Reduction, Transfer};
use crate::error::{Error, Result};
use crate::handle::Handle;
use crate::layout::{CombineShape, Placement};
use crate::stream::{Event, EventRef, StreamRef};
use crate::tensor::{DType, Extent, TensorMut, TensorRef};

/// Arguments of [`ElasticBuffer::combine`](crate::ElasticBuffer::combine).
pub struct CombineArgs<'a> {
    x: TensorRef<'a>,
    handle: &'a Handle,
    out: TensorMut<'a>,
    weights: Option<(TensorRef<'a>, TensorMut<'a>)>,
    biases: Vec<TensorRef<'a>>,
    reduction: Reduction,
    transfer: Transfer,
    order: Order<'a>,
}

impl<'a> CombineArgs<'a> {
    /// Sends the rows of `x` back along the routes of a dispatch and sums them: `x` is BF16 `[rows, hidden]`, contiguous, one row for each received row; `out` is BF16
    /// `[tokens, hidden]`, one row for each token that this rank gave.
    ///
    /// Contributions are added in ascending order of their lanes, in single precision, and rounded to BF16 once.
    pub fn new(x: TensorRef<'a>, handle: &'a Handle, out: TensorMut<'a>) -> Self {
        Self {
            x,
            handle,
            out,
            weights: None,
            biases: Vec::new(),
            reduction: Reduction::AtExperts,
            transfer: Transfer::default(),
            order: Order::default(),
        }
    }

    /// Sends weights back: `f32` `[received tokens, topk]` (plain) or `[rows, 1]` (expanded) into `f32` `[tokens, topk]`. They are not multiplied with anything; lanes
    /// without an expert get 0.
    #[must_use]
    pub fn weights(mut self, topk_weights: TensorRef<'a>, out: TensorMut<'a>) -> Self {
        self.weights = Some((topk_weights, out));
        self
    }

    /// Adds a BF16 `[tokens, hidden]` to the result, before the contributions. At most two.
    #[must_use]
    pub fn bias(mut self, bias: TensorRef<'a>) -> Self {
        self.biases.push(bias);
        self
    }

    /// Where the rows of one token on one rank are added up in the expanded layout.
    #[must_use]
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// How rows of the plain layout travel. All ranks choose the same; with [`Transfer::Auto`] all ranks give an `x` (and weights) in the heap, or
    /// none does: an empty one counts as in the heap if it is a view of a [`CombineInput`](crate::CombineInput) or of a result.
    /// [`RanksDisagree`](Error::RanksDisagree) otherwise.
    ///
    /// [`Transfer::Pull`] where rows can't be pulled is [`Invalid`](Error::Invalid), before anything is sent: in the expanded layout, in a buffer with
    /// [packets](crate::Config::packets), or if x or the weights have elements and lie anywhere else than in the heap.
    #[must_use]
    pub fn transfer(mut self, transfer: Transfer) -> Self {
        self.transfer = transfer;
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

    /// Validates, plans and launches. The outer result is about the buffer's state, the inner one about this call alone.
    pub(crate) fn run(self, shared: &Arc<Shared>) -> Result<Result<Event>> {
        match self.plan(shared) {
            Ok(call) => shared.backend.combine(call),
            Err(e) => Ok(Err(e)),
        }
    }

    fn plan(self, shared: &Arc<Shared>) -> Result<CombineCall<'a>> {
        self.handle.require_buffer(shared)?;
        let site = &shared.site;
        let inner = &self.handle.0;
        let dispatched = inner.shape;
        let hidden = self.out.columns();
        let (n, rows) = (inner.tokens, inner.counts.as_ref().map_or(dispatched.row_capacity, |c| c.rows));
        let tokens = inner.counts.as_ref().map_or(dispatched.token_capacity, |c| c.tokens);

        let bf16 = [DType::Bf16];
        site.require_rows("x", &self.x)?;
        self.x.require_dtype("x", &bf16, "BF16")?;
        self.x.require_contiguous("x")?;
        if self.x.columns() != hidden || self.x.rows() < rows {
            let [got_rows, got_columns] = self.x.shape();
            let expected = format!("at least {rows} rows of {hidden}");
            return Err(Error::Shape { tensor: "x", got: format!("[{got_rows}, {got_columns}]"), expected });
        }
        let per_token = |name, tensor: &Extent| -> Result<()> {
            site.require_rows(name, tensor)?;
            tensor.require_dtype(name, &bf16, "BF16")?;
            tensor.require_shape(name, n, hidden)?;
            tensor.require_contiguous(name)
        };
        per_token("out", &self.out)?;
        self.biases.iter().try_for_each(|bias| per_token("bias", bias))?;
        let biases = match self.biases[..] {
            [] => [None, None],
            [one] => [Some(one), None],
            [one, two] => [Some(one), Some(two)],
            _ => return Err(Error::invalid("biases", self.biases.len(), "at most 2 can be added")),
        };
        let (topk_weights, out_weights) = match self.weights {
            None => (None, None),
            Some((given, out)) => {
                site.require("topk_weights", &given)?;
                site.require("weights out", &out)?;
                given.require_dtype("topk_weights", &[DType::F32], "F32")?;
                given.require_contiguous("topk_weights")?;
                let (need, columns) = match dispatched.placement {
                    Placement::Plain => (tokens, dispatched.topk),
                    Placement::Expanded => (rows, 1),
                };
                if given.columns() != columns || given.rows() < need {
                    let [r, c] = given.shape();
                    let expected = format!("at least {need} rows of {columns}");
                    return Err(Error::Shape {
                        tensor: "topk_weights",
                        got: format!("[{r}, {c}]"),
                        expected,
                    });
                }
                out.require_dtype("weights out", &[DType::F32], "F32")?;
                out.require_shape("weights out", n, dispatched.topk)?;
                out.require_contiguous("weights out")?;
                (Some(given), Some(out))
            }
        };
        let shape = CombineShape {
            ranks: dispatched.ranks,
            max_tokens: dispatched.max_tokens,
            topk: dispatched.topk,
            row_bytes: hidden.saturating_mul(DType::Bf16.size()),
            placement: dispatched.placement,
            reduce_first: self.reduction == Reduction::AtExperts,
        };
        let pull = transfer(self.transfer, shared, &shape, &self.x, topk_weights.as_deref())?;
        let receive = shared.layout.fits_combine(&shape)?;
        let digest = [
            shape.row_bytes,
            shape.topk,
            shape.placement as usize,
            shape.reduce_first.into(),
            topk_weights.is_some().into(),
            pull.is_some().into(),
            inner.number as usize,
        ]
        .into_iter()
        .fold(Digest::new(), Digest::add)
        .finish();
        Ok(CombineCall {
            shape,
            receive,
            dispatched,
            handle: inner.layout,
            handle_slot: inner.lease.slot,
            tokens: n,
            x: self.x,
            pull,
            topk_weights,
            biases,
            out: self.out,
            out_weights,
            digest,
            order: self.order,
        })
    }
}

/// Where the peers read x and the weights, if rows are to be pulled.
fn transfer(
    wanted: Transfer,
    shared: &Shared,
    shape: &CombineShape,
    x: &Extent,
    weights: Option<&Extent>,
) -> Result<Option<Readable>> {
    let refuse = |what: &str| match wanted {
        Transfer::Pull => Err(Error::invalid("transfer", "Pull", what.to_owned())),
        Transfer::Auto | Transfer::Push => Ok(None),
    };
    if wanted == Transfer::Push {
        return Ok(None);
    }
    if shape.placement != Placement::Plain {
        return refuse("rows are read where they are in the plain layout only");
    }
    if shared.layout.workspace.packets.is_some() {
        return refuse("this buffer's rows travel in packets; build it with packets(false)");
    }
    let place = |tensor: &Extent| match tensor.bytes() {
        // Nobody reads it. Where ranks find out by themselves, it says what they do.
        0 => (wanted == Transfer::Pull || tensor.buffer() == Some(shared.id)).then_some(0),
        _ => offset(shared, tensor),
    };
    let (Some(x), Some(weights)) = (place(x), weights.map_or(Some(0), place)) else {
        return refuse(
            "x and the weights must lie in the buffer's heap: in a combine input, or in a result of a dispatch",
        );
    };
    // One rank has nobody to read from.
    Ok((shape.ranks > 1).then_some(Readable { x, weights }))
}

/// Where a tensor lies in this rank's heap, if it does and peers can read it there.
fn offset(shared: &Shared, tensor: &Extent) -> Option<u32> {
    let offset = tensor.address().checked_sub(shared.heap.base())?;
    let inside = offset.checked_add(tensor.bytes() as u64)? <= shared.layout.bytes as u64;
    if inside { Readable::unit(offset) } else { None }
}
