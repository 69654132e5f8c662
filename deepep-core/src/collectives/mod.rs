//! All-gather, reduce-scatter and all-reduce over symmetric memory.

mod builder;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cuda_vmm::Device;

pub use self::builder::CollectivesBuilder;
use crate::backend::Order;
use crate::backend::collective::{CollectiveBackend, CollectiveCall};
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree;
use crate::config::BackendKind;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::jit::CollectiveKind;
use crate::ops::{Digest, Site};
use crate::stream::{Event, EventRef, StreamRef};
use crate::symmetric::{Heap, Multicast};
use crate::tensor::{DType, Extent, TensorMut, TensorRef};

/// Collectives among the ranks of a host, on tensors anywhere in the memory of their backend.
///
/// They belong to one rank; every rank has them, built with the same settings. All ranks make the same calls in the same order, which is why
/// the calls take `&mut self`. Values travel through symmetric memory of their own. On GPUs their calls and the operations of buffers follow [one
/// order](crate#several-buffers) on each device; what holds for [graphs](crate#cuda-graphs) of a buffer's calls holds for these.
///
/// Sums are in single precision and in rank order, with one rounding at the end: every rank gets the same bits, on every backend.
///
/// ```
/// use std::time::Duration;
/// use deepep_core::bootstrap::thread_group;
/// use deepep_core::tensor::{TensorMut, TensorRef};
/// use deepep_core::{BackendKind, Collectives};
///
/// std::thread::scope(|scope| {
///     for bootstrap in thread_group(2, Duration::from_secs(10))? {
///         scope.spawn(move || -> deepep_core::Result<()> {
///             let mut collectives = Collectives::builder().backend(BackendKind::Host).build(bootstrap)?;
///             let mine = [collectives.rank() as f32 + 1.0; 3];
///             let mut sum = [0.0_f32; 3];
///             collectives.all_reduce(TensorRef::vector(&mine), TensorMut::vector(&mut sum))?;
///             assert_eq!(sum, [3.0; 3]);
///             let mut all = [0.0_f32; 6];
///             collectives.all_gather(TensorRef::vector(&mine), TensorMut::vector(&mut all))?;
///             assert_eq!(all, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
///             collectives.close()
///         });
///     }
///     Ok::<(), deepep_core::Error>(())
/// })?;
/// # Ok::<(), deepep_core::Error>(())
/// ```
pub struct Collectives {
    backend: Box<dyn CollectiveBackend>,
    tensors: Option<Tensors>,
    multicast: Result<Multicast, String>,
    site: Site,
    device: Device,
    domain: Domain,
    timeout: Duration,
    broken: Option<String>,
    bootstrap: Box<dyn Bootstrap>,
}

/// Symmetric memory for the caller's tensors.
struct Tensors {
    heap: Arc<Heap>,
    offset: usize,
    bytes: usize,
}

impl Tensors {
    /// Offset of an output in every rank's range, if all of it lies in this rank's memory for tensors.
    fn locate(&self, tensor: &Extent) -> Option<usize> {
        let start = tensor.address().checked_sub(self.heap.base() + self.offset as u64)? as usize;
        let inside = tensor.bytes() > 0 && start.checked_add(tensor.bytes())? <= self.bytes;
        inside.then_some(self.offset + start)
    }
}

impl Collectives {
    /// Settings of new ones, with defaults for all.
    pub fn builder() -> CollectivesBuilder {
        CollectivesBuilder::new()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.domain.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.domain.world_size()
    }

    /// Which processors run the operations.
    pub fn backend(&self) -> BackendKind {
        self.backend.kind()
    }

    /// This rank's device, on the CUDA backend that of the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The stream of calls for which the caller gives none; `None` on the host backend.
    pub fn stream(&self) -> Option<StreamRef<'_>> {
        self.backend.stream()
    }

    /// Addresses of this rank's memory for tensors, if [any was asked for](CollectivesBuilder::tensor_bytes): at the same place in the symmetric
    /// memory of every rank, and mapped by all ranks. It is there as long as the collectives are.
    ///
    /// An all-gather whose output lies in it, at the same offset on all ranks, needs no intermediate memory.
    pub fn tensors(&self) -> Option<Range<u64>> {
        let Tensors { heap, offset, bytes } = self.tensors.as_ref()?;
        let start = heap.base() + *offset as u64;
        Some(start..start + *bytes as u64)
    }

    /// Whether values go through a multicast address, and if not, why not.
    ///
    /// # Errors
    /// The reason, in words, if [it was asked for](CollectivesBuilder::multicast) and there is none.
    pub fn multicast(&self) -> Result<(), &str> {
        self.multicast.as_ref().map(drop).map_err(String::as_str)
    }

    /// Gives every rank what all ranks give, in rank order: `input` is `[n, c]` and `output` `[ranks * n, c]`, contiguous, of one element type.
    ///
    /// # Errors
    /// Errors about the arguments come before anything is sent. On the CUDA backend the following come from the event or a later call, on the
    /// host backend from this one: [`RanksDisagree`](Error::RanksDisagree) if ranks call with different sizes or types, which breaks the collectives
    /// on the CUDA backend (outputs are undefined then) and moves nothing on the host backend; [`PeerTimeout`](Error::PeerTimeout), which breaks them.
    pub fn all_gather(&mut self, input: TensorRef<'_>, output: TensorMut<'_>) -> Result<Event> {
        self.all_gather_on(input, output, None, None)
    }

    /// As [`all_gather`](Self::all_gather), on a stream and after an event.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_on(
        &mut self,
        input: TensorRef<'_>,
        output: TensorMut<'_>,
        stream: Option<StreamRef<'_>>,
        after: Option<EventRef<'_>>,
    ) -> Result<Event> {
        let rows = self.times_ranks(input.rows())?;
        output.require_shape("output", rows, input.columns())?;
        let (kind, bytes) = (CollectiveKind::AllGather, input.bytes());
        self.run(kind, &input, &output, bytes, Order { stream, after })
    }

    /// Sums what all ranks give, and gives every rank its part: `input` is `[ranks * n, c]` and `output` `[n, c]`, contiguous, F32, BF16 or F16.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(&mut self, input: TensorRef<'_>, output: TensorMut<'_>) -> Result<Event> {
        self.reduce_scatter_on(input, output, None, None)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), on a stream and after an event.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn reduce_scatter_on(
        &mut self,
        input: TensorRef<'_>,
        output: TensorMut<'_>,
        stream: Option<StreamRef<'_>>,
        after: Option<EventRef<'_>>,
    ) -> Result<Event> {
        let rows = self.times_ranks(output.rows())?;
        input.require_shape("input", rows, output.columns())?;
        let (kind, bytes) = (CollectiveKind::ReduceScatter, output.bytes());
        self.run(kind, &input, &output, bytes, Order { stream, after })
    }

    /// Sums what all ranks give, for every rank: `input` and `output` have one shape, contiguous, F32, BF16 or F16.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_reduce(&mut self, input: TensorRef<'_>, output: TensorMut<'_>) -> Result<Event> {
        self.all_reduce_on(input, output, None, None)
    }

    /// As [`all_reduce`](Self::all_reduce), on a stream and after an event.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_reduce_on(
        &mut self,
        input: TensorRef<'_>,
        output: TensorMut<'_>,
        stream: Option<StreamRef<'_>>,
        after: Option<EventRef<'_>>,
    ) -> Result<Event> {
        let [rows, columns] = input.shape();
        output.require_shape("output", rows, columns)?;
        let (kind, bytes) = (CollectiveKind::AllReduce, input.bytes());
        self.run(kind, &input, &output, bytes, Order { stream, after })
    }

    /// Replaces a tensor by the sum of all ranks'.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_reduce_in_place(&mut self, tensor: TensorMut<'_>) -> Result<Event> {
        let (kind, bytes) = (CollectiveKind::AllReduce, tensor.bytes());
        self.run(kind, &tensor, &tensor, bytes, Order::default())
    }

    /// Waits until every rank has come here and its work has run, then gives the memory back. Collective. Dropping instead gives back this
    /// rank's part without waiting for anybody; if one is still running on its GPU, or some were captured in CUDA graphs, the memory stays until
    /// the process ends.
    ///
    /// Graphs with collectives of these have run when this is called, and are not launched again: that can't be seen from here.
    ///
    /// # Errors
    /// Those of the bootstrap; the memory is given back all the same.
    pub fn close(self) -> Result<()> {
        let Self { backend, multicast, timeout, bootstrap, .. } = self;
        let ended = agree(&*bootstrap, "closing collectives", backend.close());
        drop(backend);
        match multicast {
            // As if dropped: some rank may still use the address.
            _ if ended.is_err() => ended,
            Ok(multicast) => multicast.close(timeout),
            Err(_) => Ok(()),
        }
    }

    fn times_ranks(&self, rows: usize) -> Result<usize> {
        let ranks = self.ranks();
        rows.checked_mul(ranks)
            .ok_or_else(|| Error::invalid("rows", rows, format!("times {ranks} ranks they can't be counted")))
    }

    /// `output` comes from a [`TensorMut`], or is the input itself.
    fn run(
        &mut self,
        kind: CollectiveKind,
        input: &Extent,
        output: &Extent,
        bytes: usize,
        order: Order<'_>,
    ) -> Result<Event> {
        if let Some(reason) = &self.broken {
            return Err(Error::Broken { reason: reason.clone() });
        }
        self.check(kind, input, output, &order)?;
        let dtype = input.dtype();
        // What is in symmetric memory on one rank is there on all, or the calls differ.
        let gathers = kind == CollectiveKind::AllGather;
        let symmetric = self.tensors.as_ref().filter(|_| gathers).and_then(|tensors| tensors.locate(output));
        let place = symmetric.map_or(0, |offset| offset + 1);
        let digest = Digest::new().add(kind as usize).add(dtype as usize).add(bytes).add(place).finish();
        let (from, to) = (input.address(), output.address());
        let call = CollectiveCall { kind, dtype, input: from, output: to, bytes, symmetric, digest, order };
        // SAFETY: the tensors are borrowed for this call, the output exclusively; they have these sizes (checked), and by the promise of
        // a view on device memory they stay until the work has run. In place, both are one tensor.
        let outcome = unsafe { self.backend.run(call) };
        outcome.unwrap_or_else(|error| {
            self.broken = Some(error.to_string());
            Err(error)
        })
    }

    fn check(&self, kind: CollectiveKind, input: &Extent, output: &Extent, order: &Order<'_>) -> Result<()> {
        if self.backend.kind() != BackendKind::Cuda {
            order.require_implicit()?;
        }
        for (tensor, extent) in [("input", input), ("output", output)] {
            self.site.require(tensor, extent)?;
            extent.require_contiguous(tensor)?;
        }
        if output.dtype() != input.dtype() {
            let (got, expected) = (output.dtype(), input.dtype().name());
            return Err(Error::DType { tensor: "output", got, expected });
        }
        if kind != CollectiveKind::AllGather {
            input.require_dtype("input", &[DType::F32, DType::Bf16, DType::F16], "F32, BF16 or F16")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Collectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collectives")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("backend", &self.backend())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}
