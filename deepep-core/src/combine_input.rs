//! Memory in the heap for what experts make of their rows.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Copy2d, Order};
use crate::buffer::Shared;
use crate::error::{Error, Result};
use crate::handle::{Lease, SlotKind};
use crate::layout::InputLayout;
use crate::stream::{Event, StreamRef};
use crate::tensor::{DType, Home, TensorMut, TensorRef};

/// Room for the experts' outputs in the symmetric heap: what lies here need not be sent in a plain [combine](crate::ElasticBuffer::combine) that
/// [pulls](crate::Transfer::Pull), the ranks of the tokens read it where it is.
///
/// Experts write their rows into [`x_mut`](Self::x_mut), combine gets [`x`](Self::x) and [`Transfer::Pull`](crate::Transfer::Pull), and the memory can be written
/// again when that combine has run: it ends only when all ranks have read. All ranks choose the same transfer
/// ([`RanksDisagree`](Error::RanksDisagree)); with [`Transfer::Auto`](crate::Transfer::Auto) every rank gives such a view, or none does, and a rank that has received
/// nothing gives one without rows, `input.x().first_rows(0)`. Without either, rows are sent, from here as from anywhere.
///
/// The views are this buffer's, like those of [results](crate::Dispatched): other buffers' operations and collectives refuse them. On the CUDA backend
/// whoever enqueues work that writes the memory orders it behind the combines that were given it before, also by the holder of an earlier lease: on
/// their stream, or by the last one's event. Dropping this gives the memory to the next who asks. For a captured combine it stays until the
/// graph is destroyed and its last replay has run ([CUDA graphs](crate#cuda-graphs)).
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use deepep_core::bootstrap::thread_group;
/// use deepep_core::tensor::{TensorMut, TensorRef};
/// use deepep_core::{BackendKind, CombineArgs, DispatchArgs, ElasticBuffer, Transfer};
/// use half::bf16;
///
/// let (tokens, hidden) = (3, 64);
/// std::thread::scope(|scope| {
///     for bootstrap in thread_group(2, Duration::from_secs(10))? {
///         scope.spawn(move || -> deepep_core::Result<()> {
///             let mut buffer = ElasticBuffer::builder()
///                 .max_tokens_per_rank(8)
///                 .experts(4)
///                 .topk(2)
///                 .hidden(hidden)
///                 .combine_inputs(1)
///                 .backend(BackendKind::Host)
///                 .build(bootstrap)?;
///             let x = vec![bf16::ONE; tokens * hidden];
///             let topk_idx = [0i64, 3].repeat(tokens);
///             let dispatched = buffer.dispatch(DispatchArgs::new(
///                 TensorRef::matrix(&x, tokens, hidden)?,
///                 TensorRef::matrix(&topk_idx, tokens, 2)?,
///             ))?;
///             // The expert here doubles what it got.
///             let mut input = buffer.combine_input()?;
///             let received = dispatched.x().as_slice::<bf16>()?;
///             for (y, x) in input.x_mut()?.as_mut_slice::<bf16>()?.iter_mut().zip(received) {
///                 *y = *x + *x;
///             }
///             let mut sum = vec![bf16::ZERO; tokens * hidden];
///             let out = TensorMut::matrix(&mut sum, tokens, hidden)?;
///             let args = CombineArgs::new(input.x(), dispatched.handle(), out);
///             buffer.combine(args.transfer(Transfer::Pull))?;
///             assert!(sum.iter().all(|&y| y == bf16::from_f32(4.0)));
///             buffer.close()
///         });
///     }
///     Ok::<(), deepep_core::Error>(())
/// })?;
/// # Ok::<(), deepep_core::Error>(())
/// ```
///
/// Rows are not written while they are given to a combine:
///
/// ```compile_fail,E0502
/// # use deepep_core::{CombineArgs, CombineInput, ElasticBuffer, Handle, Result};
/// # use deepep_core::tensor::TensorMut;
/// # fn f(buffer: &mut ElasticBuffer, input: &mut CombineInput, handle: &Handle, out: TensorMut<'_>) -> Result<()> {
/// let args = CombineArgs::new(input.x(), handle, out);
/// let rows = input.x_mut()?;
/// buffer.combine(args)?;
/// # Ok(()) }
/// ```
pub struct CombineInput {
    lease: Lease,
    /// Columns of the rows and of the weights.
    columns: [usize; 2],
}

impl CombineInput {
    pub(crate) fn take(shared: &Arc<Shared>) -> Result<Self> {
        if shared.layout.inputs.count == 0 {
            let need = "the buffer has none: build it with as many as are held at a time";
            return Err(Error::invalid("combine_inputs", 0, need));
        }
        let columns = [shared.config.hidden, shared.config.topk];
        Ok(Self { lease: Lease::take(shared, SlotKind::Input)?, columns })
    }

    /// Takes the same memory for calls with narrower rows, or fewer experts a token, than the buffer was made for. Without this, rows and weights have the columns
    /// of the [configuration](crate::Config).
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for more columns than that, or none; then nothing has changed.
    pub fn reshape(&mut self, hidden: usize, topk: usize) -> Result<()> {
        let config = &self.lease.shared.config;
        for (name, asked, most) in [("hidden", hidden, config.hidden), ("topk", topk, config.topk)] {
            if asked == 0 || asked > most {
                let need = format!("must be 1 to {most}, as the buffer was made for");
                return Err(Error::invalid(name, asked, need));
            }
        }
        self.columns = [hidden, topk];
        Ok(())
    }

    /// Rows that there is room for: every token that a rank can receive.
    pub fn rows(&self) -> usize {
        self.lease.shared.layout.input_rows
    }

    /// The rows, BF16 `[rows, hidden]`, contiguous, in the order in which a plain dispatch delivers tokens. Those behind the received ones are
    /// not read.
    pub fn x(&self) -> TensorRef<'_> {
        let (at, home) = (self.at(self.layout().rows), self.home());
        // SAFETY: the slot has this many rows of this size or a larger one, and lies in this rank's heap, which the lease keeps mapped. Nobody writes it as long
        // as the view is borrowed (`x_mut` takes the lease exclusively); work that was enqueued with the view is this buffer's, and
        // whoever writes the memory later orders it behind that.
        unsafe { TensorRef::heap(at, home, DType::Bf16, self.shape()) }
    }

    /// The same rows to be written, by the experts.
    ///
    /// # Errors
    /// [`Broken`](Error::Broken) if a call of the buffer has said that an operation failed: other ranks may still be reading. (An event alone that says so
    /// does not count. Whoever writes then changes nothing that a peer takes for good: it has heard of the failure, too.)
    pub fn x_mut(&mut self) -> Result<TensorMut<'_>> {
        self.lease.shared.check()?;
        let (at, home) = (self.at(self.layout().rows), self.home());
        // SAFETY: as in `x`; the lease is borrowed exclusively, and no combine reads here any more: on the host none that has returned without an
        // error does, and none has failed; on a GPU the memory is written by work that is ordered behind them.
        Ok(unsafe { TensorMut::heap(at, home, DType::Bf16, self.shape()) })
    }

    /// Room for weights that go back with the rows, `f32[rows, topk]`, contiguous: where [`CombineArgs::weights`](crate::CombineArgs::weights) finds
    /// them in a combine that pulls.
    pub fn weights(&self) -> TensorRef<'_> {
        let (at, home) = (self.at(self.layout().weights), self.home());
        // SAFETY: as in `x`.
        unsafe { TensorRef::heap(at, home, DType::F32, self.lanes()) }
    }

    /// The same weights to be written.
    ///
    /// # Errors
    /// As [`x_mut`](Self::x_mut).
    pub fn weights_mut(&mut self) -> Result<TensorMut<'_>> {
        self.lease.shared.check()?;
        let (at, home) = (self.at(self.layout().weights), self.home());
        // SAFETY: as in `x_mut`.
        Ok(unsafe { TensorMut::heap(at, home, DType::F32, self.lanes()) })
    }

    /// Copies rows into the first ones: for experts that write elsewhere. BF16, at most as many as there is room for, `hidden` columns; enqueued as
    /// [results are copied out](crate::Dispatched::copy_out).
    ///
    /// # Errors
    /// [`Shape`](Error::Shape), [`DType`](Error::DType), [`Memory`](Error::Memory) or [`Stride`](Error::Stride) if they don't fit, [`Broken`](Error::Broken).
    pub fn copy_in(&mut self, x: TensorRef<'_>, stream: Option<StreamRef<'_>>) -> Result<Event> {
        let (at, [_, columns]) = (self.at(self.layout().rows), self.shape());
        self.copy("x", x, at, DType::Bf16, columns, stream)
    }

    /// Copies weights into the first rows of [`weights`](Self::weights), F32 with `topk` columns.
    ///
    /// # Errors
    /// As [`copy_in`](Self::copy_in).
    pub fn copy_weights_in(
        &mut self,
        weights: TensorRef<'_>,
        stream: Option<StreamRef<'_>>,
    ) -> Result<Event> {
        let (at, [_, columns]) = (self.at(self.layout().weights), self.lanes());
        self.copy("weights", weights, at, DType::F32, columns, stream)
    }

    fn copy(
        &mut self,
        name: &'static str,
        from: TensorRef<'_>,
        at: u64,
        dtype: DType,
        columns: usize,
        stream: Option<StreamRef<'_>>,
    ) -> Result<Event> {
        self.lease.shared.check()?;
        let (shared, most, order) = (&self.lease.shared, self.rows(), Order { stream, after: None });
        shared.site.require(name, &from)?;
        from.require_dtype(name, &[dtype], dtype.name())?;
        if from.columns() != columns || from.rows() > most {
            let [rows, got] = from.shape();
            let expected = format!("at most {most} rows of {columns}");
            return Err(Error::Shape { tensor: name, got: format!("[{rows}, {got}]"), expected });
        }
        // SAFETY: as in `x_mut`; the view is used for the copy alone.
        let to = unsafe { TensorMut::heap(at, self.home(), dtype, from.shape()) };
        let Some(copy) = Copy2d::between(&from, &to) else {
            return Err(
                from.refuse_strides(name, "the elements of a row must follow each other without gaps")
            );
        };
        // SAFETY: the rows lie in this slot, which the lease keeps and which is borrowed exclusively, so that the given view, a shared borrow, is elsewhere;
        // that it stays until the copy has run is what views promise.
        unsafe { shared.backend.copy(copy, order) }
    }

    fn layout(&self) -> &InputLayout {
        &self.lease.shared.layout.input
    }

    fn home(&self) -> Home {
        self.lease.shared.site.home()
    }

    fn shape(&self) -> [usize; 2] {
        [self.rows(), self.columns[0]]
    }

    fn lanes(&self) -> [usize; 2] {
        [self.rows(), self.columns[1]]
    }

    fn at(&self, offset: usize) -> u64 {
        let shared = &self.lease.shared;
        shared.heap.base() + (shared.layout.inputs.at(self.lease.slot) + offset) as u64
    }
}

impl fmt::Debug for CombineInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CombineInput")
            .field("buffer", &self.lease.shared.id)
            .field("slot", &self.lease.slot)
            .field("shape", &self.shape())
            .finish_non_exhaustive()
    }
}
