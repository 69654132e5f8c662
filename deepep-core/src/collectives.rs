//! All-gather, reduce-scatter and all-reduce over symmetric memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cuda_vmm::Cuda;

use crate::backend::Order;
use crate::backend::collective::{CollectiveBackend, CollectiveCall};
use crate::backend::host::HostCollectives;
use crate::backend::platform::Platform;
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::{Settings, agree, compare};
use crate::config::BackendKind;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::jit::CollectiveKind;
use crate::layout::{CollectiveConfig, CollectiveLayout};
use crate::ops::Digest;
use crate::stream::{Event, EventRef, StreamRef};
use crate::symmetric::{self, Request};
use crate::tensor::{DType, Extent, Space, TensorMut, TensorRef};

/// Collectives among the ranks of a host, on tensors anywhere in the memory of their backend.
///
/// They belong to one rank; every rank has them, built with the same settings. All ranks make the same calls in the same order, which is why
/// the calls take `&mut self`. Values travel through symmetric memory of their own.
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
    domain: Domain,
    timeout: Duration,
    broken: Option<String>,
    bootstrap: Box<dyn Bootstrap>,
}

/// Settings of [`Collectives`] to be built.
#[derive(Clone, Debug)]
#[must_use]
pub struct CollectivesBuilder {
    backend: BackendKind,
    device: Option<usize>,
    timeout: Duration,
    cell_bytes: Option<usize>,
    slice: Option<usize>,
    cuda: Option<Cuda>,
}

impl CollectivesBuilder {
    /// Which processors run the operations.
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.backend = backend;
        self
    }

    /// Device ordinal of this rank; without it the rank on its host, modulo the number of devices.
    pub fn device(mut self, device: usize) -> Self {
        self.device = Some(device);
        self
    }

    /// The longest that an operation waits for another rank; 100 seconds if not set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Most bytes of a rank that travel in cells, the way for small messages (see [`CollectiveConfig::cell_bytes`]).
    pub fn cell_bytes(mut self, bytes: usize) -> Self {
        self.cell_bytes = Some(bytes);
        self
    }

    /// Bytes that a block moves at a time (see [`CollectiveConfig::slice`]); most of the memory is proportional to it.
    pub fn slice(mut self, bytes: usize) -> Self {
        self.slice = Some(bytes);
        self
    }

    /// Uses this driver instead of the process's, for example a `cuda-vmm-emu` with faults for a test.
    pub fn driver(mut self, cuda: Cuda) -> Self {
        self.cuda = Some(cuda);
        self
    }

    fn settings(&self, kind: BackendKind, config: &CollectiveConfig) -> Settings {
        Settings::new()
            .with("backend", kind.name())
            .with("timeout", format!("{:?}", self.timeout))
            .with("cell_bytes", config.cell_bytes)
            .with("slice", config.slice)
    }

    /// Compares the settings of all ranks, and allocates and maps the symmetric memory. Collective: every rank builds them.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid), [`RanksDisagree`](Error::RanksDisagree), [`Vmm`](Error::Vmm); a failure on one rank is an error on all of
    /// them, and nothing is left behind.
    pub fn build(self, bootstrap: impl Bootstrap + 'static) -> Result<Collectives> {
        let bootstrap: Box<dyn Bootstrap> = Box::new(bootstrap);
        let ranks = bootstrap.world_size();
        let mut config = CollectiveConfig::new(ranks);
        config.cell_bytes = self.cell_bytes.unwrap_or(config.cell_bytes);
        config.slice = self.slice.unwrap_or(config.slice);
        let layout = match ranks {
            1 => Ok(None),
            _ => CollectiveLayout::new(config).map(Some),
        };
        let local =
            layout.and_then(|layout| Ok((layout, Platform::choose(self.backend, self.cuda.clone())?)));
        // An error goes to the others as text, and comes back here as it is.
        let told = match &local {
            Ok((_, platform)) => Ok(self.settings(platform.kind, &config)),
            Err(error) => Err(Error::PeerFailed {
                phase: "configuration of collectives".into(),
                rank: bootstrap.rank(),
                message: error.to_string(),
            }),
        };
        let compared = compare(&*bootstrap, "configuration of collectives", told);
        let (layout, platform) = local?;
        compared?;
        let domain = Domain::discover(&*bootstrap)?;
        let hosts = domain.logical()?.scale_out;
        if hosts != 1 {
            let need = "this version connects the ranks of one host; start one group on each host";
            return Err(Error::invalid("hosts", hosts, need));
        }
        let memory = match layout {
            None => None,
            Some(layout) => {
                let seat = platform.seat(&*bootstrap, self.device.unwrap_or(domain.local_rank()))?;
                let request = Request {
                    device_bytes: layout.bytes,
                    host_bytes: 0,
                    hybrid: false,
                    device: seat.device.ordinal(),
                    space: platform.space(),
                };
                let heap = symmetric::allocate(&*bootstrap, &domain, &platform.cuda, &request)?;
                Some((Arc::new(heap), layout))
            }
        };
        let started = HostCollectives::new(memory, self.timeout);
        let backend = Box::new(agree(&*bootstrap, "starting collectives", started)?);
        Ok(Collectives { backend, domain, timeout: self.timeout, broken: None, bootstrap })
    }
}

impl Collectives {
    /// Settings of new ones, with defaults for all.
    pub fn builder() -> CollectivesBuilder {
        CollectivesBuilder {
            backend: BackendKind::Auto,
            device: None,
            timeout: Duration::from_secs(100),
            cell_bytes: None,
            slice: None,
            cuda: None,
        }
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

    /// Gives every rank what all ranks give, in rank order: `input` is `[n, c]` and `output` `[ranks * n, c]`, contiguous, of one element type.
    ///
    /// # Errors
    /// Errors about the arguments come before anything is sent. [`RanksDisagree`](Error::RanksDisagree) if ranks call with different sizes or types;
    /// nothing was moved. [`PeerTimeout`](Error::PeerTimeout) breaks the collectives.
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
    /// rank's part without waiting for anybody.
    ///
    /// # Errors
    /// Those of the bootstrap; the memory is given back all the same.
    pub fn close(self) -> Result<()> {
        agree(&*self.bootstrap, "closing collectives", self.backend.synchronize(self.timeout))
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
        // Ranks that give nothing have nothing to wait for: all of them do, or their call differs.
        let digest = Digest::new().add(kind as usize).add(dtype as usize).add(bytes).finish();
        let (from, to) = (input.address(), output.address());
        let call = CollectiveCall { kind, dtype, input: from, output: to, bytes, digest, order };
        // SAFETY: the tensors are borrowed for this call, the output exclusively; they have these sizes (checked), and by the promise of
        // a view on device memory they stay until the work has run. In place, both are one tensor.
        let outcome = unsafe { self.backend.run(call) };
        outcome.unwrap_or_else(|error| {
            self.broken = Some(error.to_string());
            Err(error)
        })
    }

    fn check(&self, kind: CollectiveKind, input: &Extent, output: &Extent, order: &Order<'_>) -> Result<()> {
        let backend = self.backend.kind();
        if backend != BackendKind::Cuda && !order.is_implicit() {
            let problem =
                "the host backend has none: an operation has run when its call returns; leave it out";
            return Err(Error::Tensor { tensor: "stream or event", problem: problem.into() });
        }
        let expected = if backend == BackendKind::Cuda { Space::Device } else { Space::Host };
        for (tensor, extent) in [("input", input), ("output", output)] {
            if extent.bytes() > 0 && extent.space() != expected {
                let (got, expected) = (extent.space().name(), expected.name());
                return Err(Error::Memory { tensor, got, expected, backend: backend.name() });
            }
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
