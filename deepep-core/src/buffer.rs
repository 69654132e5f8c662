//! The buffer: symmetric memory of all ranks, and the operations on it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cuda_vmm::{Cuda, Device};

use crate::backend::platform::{Platform, Seat};
use crate::backend::{Backend, Order};
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::{agree, compare};
use crate::combine_input::CombineInput;
use crate::config::{BackendKind, Config, Reduction};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::handle::{Dispatched, Handle, SlotKind, Slots};
use crate::layout::{HeapLayout, IndexWidth, ScaleOrder};
use crate::ops::{CombineArgs, DispatchArgs, Site};
use crate::stream::{Event, EventRef, StreamRef};
use crate::symmetric::{self, Heap, Registrar, Request};
use crate::tensor::DType;

/// What results and handles keep alive.
pub(crate) struct Shared {
    pub(crate) id: u64,
    pub(crate) config: Config,
    pub(crate) layout: HeapLayout,
    pub(crate) site: Site,
    pub(crate) backend: Box<dyn Backend>,
    outputs: Slots,
    handles: Slots,
    inputs: Slots,
    /// The first operation that failed: ranks may still read here.
    broken: OnceLock<String>,
    /// After the backend, which works on it.
    pub(crate) heap: Arc<Heap>,
}

impl Shared {
    /// An error if an operation has failed.
    pub(crate) fn check(&self) -> Result<()> {
        match self.broken.get() {
            Some(reason) => Err(Error::Broken { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    pub(crate) fn slots(&self, kind: SlotKind) -> &Slots {
        match kind {
            SlotKind::Output => &self.outputs,
            SlotKind::Handle => &self.handles,
            SlotKind::Input => &self.inputs,
        }
    }
}

impl Handle {
    /// Checks that this handle was made by the buffer.
    pub(crate) fn require_buffer(&self, shared: &Shared) -> Result<()> {
        let (handle, buffer) = (self.0.lease.shared.id, shared.id);
        if handle == buffer { Ok(()) } else { Err(Error::ForeignHandle { handle, buffer }) }
    }
}

/// Symmetric memory of all ranks of a host, and dispatch, combine and barrier on it.
///
/// A buffer belongs to one rank; every rank has one, built with the same settings. Its operations are collective: all ranks call the same ones
/// in the same order, which is why they take `&mut self`. Results and handles keep the memory alive, not the buffer. On GPUs the operations
/// of several buffers follow [one order](crate#several-buffers) on each device.
///
/// # CUDA graphs
///
/// A buffer whose calls were captured is not closed before the graph is destroyed and its last replay has run, nor are its results and handles
/// dropped: the buffer does not know of replays. If it is dropped and not closed, its memory stays until the process ends. [The
/// rules](crate#cuda-graphs) are on the crate's first page.
///
/// # Example
///
/// Two ranks, here threads of one process on the host backend, send each other tokens:
///
/// ```
/// use std::time::Duration;
/// use deepep_core::bootstrap::thread_group;
/// use deepep_core::tensor::{TensorMut, TensorRef};
/// use deepep_core::{BackendKind, CombineArgs, DispatchArgs, ElasticBuffer};
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
///                 .backend(BackendKind::Host)
///                 .build(bootstrap)?;
///             // Every token chooses expert 0, on rank 0, and expert 3, on rank 1.
///             let x = vec![bf16::ONE; tokens * hidden];
///             let topk_idx = [0i64, 3].repeat(tokens);
///             let dispatched = buffer.dispatch(DispatchArgs::new(
///                 TensorRef::matrix(&x, tokens, hidden)?,
///                 TensorRef::matrix(&topk_idx, tokens, 2)?,
///             ))?;
///             assert_eq!(dispatched.rows(), 2 * tokens);
///             // The expert here returns what it got.
///             let mut sum = vec![bf16::ZERO; tokens * hidden];
///             let out = TensorMut::matrix(&mut sum, tokens, hidden)?;
///             buffer.combine(CombineArgs::new(dispatched.x(), dispatched.handle(), out))?;
///             assert!(sum.iter().all(|&y| y == bf16::from_f32(2.0)));
///             buffer.close()
///         });
///     }
///     Ok::<(), deepep_core::Error>(())
/// })?;
/// # Ok::<(), deepep_core::Error>(())
/// ```
pub struct ElasticBuffer {
    shared: Arc<Shared>,
    device: Device,
    domain: Domain,
    bootstrap: Box<dyn Bootstrap>,
}

impl ElasticBuffer {
    /// Settings of a new buffer, with defaults where there can be any.
    pub fn builder() -> Builder {
        Builder { config: Config::new(0, 0, 0, 0), cuda: None }
    }

    /// Settings of a new buffer.
    pub fn with_config(config: Config) -> Builder {
        Builder { config, cuda: None }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.domain.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.domain.world_size()
    }

    /// Hosts and ranks on them.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// What the buffer was made for.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Which processors run the operations.
    pub fn backend(&self) -> BackendKind {
        self.shared.backend.kind()
    }

    /// The device whose memory this rank's heap is: a GPU, or an emulated one on the host backend.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The stream of the operations for which no stream is given; `None` on the host backend. It is the buffer's own and independent of
    /// the device's default stream: what an operation reads must be there when it is called, or be ordered by an event.
    pub fn stream(&self) -> Option<StreamRef<'_>> {
        self.shared.backend.stream()
    }

    /// The symmetric heap: every rank's range, mapped here.
    pub fn heap(&self) -> &Heap {
        &self.shared.heap
    }

    /// Where everything lies in the heap.
    pub fn layout(&self) -> &HeapLayout {
        &self.shared.layout
    }

    /// Sends tokens to the ranks of their experts, and returns what came from everybody. Collective.
    ///
    /// # Errors
    /// Errors about the arguments come before anything is sent: the call can be repeated with better ones while the other ranks wait.
    /// [`CapacityExceeded`](Error::CapacityExceeded) comes on every rank, and no row was moved. [`PeerTimeout`](Error::PeerTimeout) and
    /// [`RanksDisagree`](Error::RanksDisagree) break the buffer.
    ///
    /// Expert ids are looked at where the call runs, on a GPU by its kernel, and a wrong one counts as none: [`WrongIds`](Error::WrongIds) comes on the rank that gave
    /// it when the call has run on all ranks. The buffer is as good as before, and the error has the result, with which this rank can go on; one that
    /// does not has to tell the others, who have theirs.
    pub fn dispatch(&mut self, args: DispatchArgs<'_>) -> Result<Dispatched> {
        self.check()?;
        let outcome = args.run(&self.shared);
        self.settle(outcome)
    }

    /// Sends the experts' outputs back along the routes of a dispatch and sums them. Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`ForeignHandle`](Error::ForeignHandle) for another buffer's handle.
    pub fn combine(&mut self, args: CombineArgs<'_>) -> Result<Event> {
        self.check()?;
        let outcome = args.run(&self.shared);
        self.settle(outcome)
    }

    /// Memory for the experts' outputs that all ranks read where it is when they are combined ([`Transfer::Pull`](crate::Transfer::Pull)). Not collective; as
    /// many can be held at a time as the [configuration](Config::combine_inputs) says.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) if the buffer was made without, [`SlotsHeld`](Error::SlotsHeld) if all are in use, [`Broken`](Error::Broken).
    pub fn combine_input(&self) -> Result<CombineInput> {
        self.check()?;
        CombineInput::take(&self.shared)
    }

    /// Lets every rank finish what it did before. Collective.
    ///
    /// # Errors
    /// [`PeerTimeout`](Error::PeerTimeout).
    pub fn barrier(&mut self) -> Result<Event> {
        self.barrier_on(None, None)
    }

    /// As [`barrier`](Self::barrier), on a stream and after an event.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    pub fn barrier_on(
        &mut self,
        stream: Option<StreamRef<'_>>,
        after: Option<EventRef<'_>>,
    ) -> Result<Event> {
        self.check()?;
        let outcome = self.shared.backend.barrier(Order { stream, after });
        self.settle(outcome)
    }

    /// Blocks until everything that was enqueued so far has run, apart from what was captured in graphs. Afterwards nothing uses the tensors that
    /// operations were given; also on a buffer that is broken, and if this returns an error other than those named here.
    ///
    /// # Errors
    /// [`StillRunning`](Error::StillRunning) if the time is up, [`Vmm`](Error::Vmm) if the device failed; that of an operation that failed.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        self.shared.backend.synchronize(timeout)
    }

    /// Takes the heap in with another library: with a communicator of `nccl-gin`, as an NCCL [window](crate::symmetric::HeapWindow), for kernels that
    /// put and signal by NCCL's handles. Collective. What comes of it keeps the memory alive, and is closed before the communicator is.
    ///
    /// # Errors
    /// What the library refuses, on any rank. The buffer can be used as before.
    pub fn register<R: Registrar>(&mut self, with: &R) -> Result<R::Registration> {
        self.check()?;
        with.register(&self.shared.heap, &*self.bootstrap)
    }

    /// Waits until every rank has come here and its work has run, then gives the memory back (results and handles that still exist
    /// keep it). Collective. Dropping a buffer instead gives back this rank's part without waiting for anybody; if an operation is still running on
    /// its GPU, or some were captured in CUDA graphs, the memory stays until the process ends.
    ///
    /// [Graphs](crate#cuda-graphs) with operations of the buffer have run when this is called, and are not launched again: that can't be seen
    /// from here.
    ///
    /// # Errors
    /// Those of the bootstrap; the memory is given back all the same.
    pub fn close(self) -> Result<()> {
        let ran = self.shared.backend.close();
        agree(&*self.bootstrap, "closing the buffer", ran)
    }

    fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// The outer result is about the buffer, the inner one about one call.
    fn settle<T>(&mut self, outcome: Result<Result<T>>) -> Result<T> {
        outcome.unwrap_or_else(|error| {
            self.shared.broken.get_or_init(|| error.to_string());
            Err(error)
        })
    }
}

/// Settings of a buffer to be built; see [`Config`] for what they mean.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    config: Config,
    cuda: Option<Cuda>,
}

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.config.$name = $name.into();
            self
        }
    )*};
}

impl Builder {
    settings! {
        /// Most tokens that a rank gives to one dispatch. Required.
        max_tokens_per_rank: usize,
        /// Experts of all ranks together, a multiple of the number of ranks. Required.
        experts: usize,
        /// Most experts of a token. Required.
        topk: usize,
        /// Elements of a row. Required.
        hidden: usize,
        /// Element type of dispatched rows; BF16 if not set.
        dtype: DType,
        /// 4-byte scale packs of a dispatched row.
        scale_packs: usize,
        /// Order of received scales.
        scale_order: ScaleOrder,
        /// Width of expert ids.
        index: IndexWidth,
        /// Whether results may be plain; yes if not set.
        plain: bool,
        /// Results may also be expanded, with at most this alignment.
        expanded: usize,
        /// Most tokens that a rank can receive.
        token_capacity: usize,
        /// Most rows of an expanded result.
        row_capacity: usize,
        /// Way to combine expanded results that the buffer must take.
        reduction: Reduction,
        /// Results of dispatches that can be held at a time.
        output_slots: usize,
        /// Handles that can be alive at a time.
        handle_slots: usize,
        /// Sets of combine's receive area, 1 or 2.
        receive_sets: usize,
        /// Inputs of combines in the heap that can be held at a time; none if not set.
        combine_inputs: usize,
        /// Whether rows of small batches travel in packets; they do if not set.
        packets: bool,
        /// Bytes of host memory of each rank in the heap.
        host_bytes: usize,
        /// Whether every rank's heap holds the host memory of all ranks.
        hybrid: bool,
        /// The longest that an operation waits for another rank.
        timeout: Duration,
        /// Most multiprocessors of a GPU that an operation may use.
        multiprocessors: usize,
        /// Whether a kernel of a rank that has its GPU for itself is launched while the one before it still runs.
        early_launch: bool,
        /// Which processors run the operations.
        backend: BackendKind,
        /// Device ordinal of this rank.
        device: usize,
    }

    /// Uses this driver instead of the process's, for example a `cuda-vmm-emu` with faults for a test. One that is not a library's goes with the host
    /// backend, unless it runs kernels and [`BackendKind::Cuda`] is asked for.
    pub fn driver(mut self, cuda: Cuda) -> Self {
        self.cuda = Some(cuda);
        self
    }

    /// The settings so far.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Compares the settings of all ranks, allocates and maps the symmetric heap, and starts the backend. Collective: every rank builds one.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for a setting that can't work, [`RanksDisagree`](Error::RanksDisagree) with every setting that differs, [`Vmm`](Error::Vmm) if the driver
    /// refuses; a failure on one rank is an error on all of them, and nothing is left behind.
    pub fn build(self, bootstrap: impl Bootstrap + 'static) -> Result<ElasticBuffer> {
        let Self { config, cuda } = self;
        let bootstrap: Box<dyn Bootstrap> = Box::new(bootstrap);
        let ranks = bootstrap.world_size();
        let local = Platform::choose(config.backend, cuda)
            .and_then(|platform| Ok((HeapLayout::new(&config.heap_config(ranks)?)?, platform)));
        let settings = local.as_ref().map(|(_, platform)| config.settings(ranks, platform.kind));
        // An error goes to the others as text, and comes back here as it is.
        let told = settings.map_err(|e| Error::PeerFailed {
            phase: "configuration".into(),
            rank: bootstrap.rank(),
            message: e.to_string(),
        });
        let compared = compare(&*bootstrap, "configuration", told);
        let (layout, platform) = local?;
        compared?;
        let domain = Domain::discover(&*bootstrap)?;
        let shape = domain.logical()?;
        if shape.scale_out != 1 {
            let need = "this version connects the ranks of one host; start one group on each host";
            return Err(Error::invalid("hosts", shape.scale_out, need));
        }
        let seat = platform.seat(&*bootstrap, config.device, domain.local_rank())?;
        let request = Request {
            device_bytes: layout.bytes,
            host_bytes: config.host_bytes,
            hybrid: config.hybrid,
            device: seat.device.ordinal(),
            space: platform.space(),
        };
        let heap = symmetric::allocate(&*bootstrap, &domain, &platform.cuda, &request)?;
        assemble(config, layout, seat, domain, heap, bootstrap)
    }
}

/// Everything after the allocation.
fn assemble(
    config: Config,
    layout: HeapLayout,
    seat: Seat,
    domain: Domain,
    heap: Heap,
    bootstrap: Box<dyn Bootstrap>,
) -> Result<ElasticBuffer> {
    static BUFFERS: AtomicU64 = AtomicU64::new(1);
    let heap = Arc::new(heap);
    let started = seat.start(&heap, &layout, &config);
    let backend = agree(&*bootstrap, "starting the backend", started)?;
    let id = BUFFERS.fetch_add(1, Ordering::Relaxed);
    let shared = Arc::new(Shared {
        id,
        site: Site::new(backend.kind(), &seat.device, Some(id)),
        outputs: Slots::new(config.output_slots),
        handles: Slots::new(config.handle_slots),
        inputs: Slots::new(config.combine_inputs),
        broken: OnceLock::new(),
        config,
        layout,
        backend,
        heap,
    });
    bootstrap.barrier()?;
    Ok(ElasticBuffer { shared, device: seat.device, domain, bootstrap })
}

impl fmt::Debug for ElasticBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ElasticBuffer")
            .field("id", &self.shared.id)
            .field("domain", &self.domain)
            .field("backend", &self.backend())
            .field("heap", self.heap())
            .field("broken", &self.shared.broken.get())
            .finish_non_exhaustive()
    }
}
