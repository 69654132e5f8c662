//! Collectives on GPUs: calls become launches, or copies by copy engines between two meetings of the ranks.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use cuda_vmm::sys::{CUstream, CallError};

use super::queue::{Queue, public};
use super::reports::Reports;
use super::{CollectiveEngine, CollectiveLaunch, EngineOptions, Gpu, StatusBlock, Uncaptured, call_failed};
use crate::backend::Order;
use crate::backend::collective::{CollectiveBackend, CollectiveCall};
use crate::config::BackendKind;
use crate::error::{Error, Result};
use crate::jit::{CollectiveKind, Element};
use crate::layout::{CollectiveLayout, StatusLayout};
use crate::left_behind;
use crate::stream::{Event, StreamRef};
use crate::symmetric::Heap;
use crate::tensor::{DType, Space};
use crate::tune::CollectiveLimits;

/// One rank on a GPU.
pub(crate) struct CudaCollectives {
    /// Dropped only if no kernel uses any of it.
    parts: ManuallyDrop<Parts>,
}

/// Fields are dropped in this order.
struct Parts {
    /// A rank that is alone has none.
    group: Option<Group>,
    queue: Queue,
}

/// What several ranks need. Fields are dropped in this order.
struct Group {
    engine: CollectiveEngine,
    layout: CollectiveLayout,
    ways: CollectiveLimits,
    /// What kernels write to.
    heap: Arc<Heap>,
}

/// How a rank's collectives differ from others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectiveOptions {
    pub(crate) timeout: Duration,
    pub(crate) ways: CollectiveLimits,
    /// Most blocks of a kernel; the same on all ranks.
    pub(crate) blocks: usize,
    /// Address behind which the ranges of all ranks lie.
    pub(crate) multicast: Option<u64>,
}

impl CudaCollectives {
    /// Compiles and loads every kernel, and zeroes what ranks meet through. Kernels of other ranks may start when all ranks have come back
    /// from here.
    pub(crate) fn new(
        memory: Option<(Arc<Heap>, CollectiveLayout)>,
        gpu: &Gpu,
        options: &CollectiveOptions,
    ) -> Result<Self> {
        let status = StatusBlock::new(gpu.context(), StatusLayout::new(1))?;
        let address = status.device_address();
        let rank = memory.as_ref().map_or(0, |(heap, _)| heap.rank());
        let reports = Arc::new(Reports::new(status, rank, options.timeout));
        let queue = Queue::new(gpu.context(), reports)?;
        let group = match memory {
            None => None,
            Some((heap, layout)) => Some(Group::new(heap, layout, gpu, options, address)?),
        };
        let collectives = Self { parts: ManuallyDrop::new(Parts { group, queue }) };
        collectives.clear()?;
        Ok(collectives)
    }

    /// Zeroes flags, counters and cells.
    fn clear(&self) -> Result<()> {
        let Some(group) = &self.parts.group else { return Ok(()) };
        let queue = &self.parts.queue;
        let turn = queue.begin(&Order::default(), false)??;
        let (base, bytes) = (group.heap.base(), group.layout.stages);
        let driver = queue.context().device().cuda().driver();
        // SAFETY: the turn keeps the context current. All that lies before the stages in this rank's range, which is mapped for this device; nobody uses it yet.
        unsafe { driver.cuMemsetD8Async(base, 0, bytes, turn.stream) }
            .map_err(|source| call_failed(format!("zeroing {bytes} bytes"), source))?;
        let end = turn.end()?;
        end.wait_reached("zeroing the memory of collectives", queue.reports().patience())
    }

    /// Copies on this rank's device, in stream order.
    ///
    /// # Safety
    /// Both sides are mapped for this device, have that many bytes, and are the same or do not overlap. The stream is alive, and its context current.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize, stream: CUstream) -> Result<()> {
        if bytes == 0 || from == to {
            return Ok(());
        }
        let context = self.parts.queue.context();
        // SAFETY: the caller's promise.
        unsafe { context.device().cuda().driver().cuMemcpyDtoDAsync(to, from, bytes, stream) }.map_err(
            |source: CallError| call_failed(format!("copying {bytes} bytes between devices"), source),
        )
    }

    /// An all-gather by copy engines: each rank puts what it gives into its own output, fetches the others' parts from theirs when all have, and
    /// nobody goes on before everybody has. A rank writes to its own output only, so that a meeting that fails spoils nothing of the others.
    ///
    /// # Safety
    /// As [`CollectiveBackend::run`], in a turn on `stream`; `offset` is where the output lies in every rank's range.
    unsafe fn gather_by_copies(
        &self,
        group: &Group,
        call: &CollectiveCall<'_>,
        offset: usize,
        stream: CUstream,
    ) -> Result<()> {
        let (me, bases) = (group.heap.rank(), group.heap.bases());
        let part = |base: u64, rank: usize| base + (offset + rank * call.bytes) as u64;
        // SAFETY: the tensors are as `run` demands; the output lies at this offset of the own range.
        unsafe { self.copy(call.input, part(bases[me], me), call.bytes, stream)? };
        // SAFETY: the stream is the caller's, of this device, or the own one.
        unsafe { group.engine.meet(call.digest, stream)? };
        for step in 1..bases.len() {
            // Everybody starts with another rank.
            let from = (me + step) % bases.len();
            // SAFETY: the output lies at this offset of every rank's range, inside of the memory for tensors (checked when the call was planned; compared
            // by the meeting). All ranges stay mapped as long as the group. If the meeting failed, what is read may be anything, and so may the
            // own output.
            unsafe { self.copy(part(bases[from], from), part(bases[me], from), call.bytes, stream)? };
        }
        // SAFETY: as above.
        unsafe { group.engine.meet_again(call.digest, stream) }
    }
}

impl Group {
    fn new(
        heap: Arc<Heap>,
        layout: CollectiveLayout,
        gpu: &Gpu,
        options: &CollectiveOptions,
        status: u64,
    ) -> Result<Self> {
        let ranks = layout.config.ranks;
        if heap.space() != Space::Device || heap.bytes() < layout.bytes || heap.ranks() != ranks {
            let need = format!("the layout needs {} device bytes on {ranks} ranks", layout.bytes);
            return Err(Error::invalid("heap", format!("{heap:?}"), need));
        }
        let engine_options = EngineOptions {
            timeout: options.timeout,
            max_blocks: options.blocks,
            cooperative: gpu.has_context_alone(),
            ..EngineOptions::default()
        };
        let (context, rank, ways) = (gpu.context().clone(), heap.rank(), options.ways);
        // SAFETY: every range of the heap has this layout (all ranks computed it from settings that they compared) and is mapped for this
        // device; whoever holds the group keeps it until no kernel runs. What ranks meet through is zeroed before any rank comes back from
        // `CudaCollectives::new`, and nobody calls before all have. The multicast address, if any, is that of all ranges. The status
        // block was made by this device, and lives as long as the queue beside the group.
        let engine = unsafe {
            let multicast = options.multicast;
            CollectiveEngine::new(context, layout, rank, heap.bases(), multicast, status, engine_options)?
        };
        let engine = engine.with_ways(ways);
        // All of them: loading one later could have to wait for a kernel that waits for this rank.
        engine.prewarm()?;
        Ok(Self { engine, layout, ways, heap })
    }
}

impl CollectiveBackend for CudaCollectives {
    fn kind(&self) -> BackendKind {
        BackendKind::Cuda
    }

    unsafe fn run(&self, call: CollectiveCall<'_>) -> Result<Result<Event>> {
        let element = match call.dtype {
            DType::Bf16 => Element::Bf16,
            DType::F16 => Element::F16,
            // Or anything that is only moved.
            _ => Element::F32,
        };
        let queue = &self.parts.queue;
        let turn = match queue.begin(&call.order, false)? {
            Ok(turn) => turn,
            Err(e) => return Ok(Err(e)),
        };
        let stream = turn.stream;
        let by_copies = |ways: &CollectiveLimits| {
            call.symmetric
                .filter(|_| call.kind == CollectiveKind::AllGather && call.bytes >= ways.copy_engine)
        };
        let enqueued = match &self.parts.group {
            // What one rank gathers, scatters or sums is what it gives.
            // SAFETY: the caller vouches for both tensors, and for the stream, whose context the turn keeps current.
            None => unsafe { self.copy(call.input, call.output, call.bytes, stream) },
            // Ranks that give nothing compare that.
            // SAFETY: the stream is the caller's, of this device, or the own one; its context is current.
            Some(group) if call.bytes == 0 => unsafe { group.engine.meet(call.digest, stream) },
            Some(group) => match by_copies(&group.ways) {
                Some(offset) => {
                    // What is refused there may come after something that was not.
                    // SAFETY: the caller's promise; the offset is that of the output.
                    unsafe { self.gather_by_copies(group, &call, offset, stream)? };
                    Ok(())
                }
                None => {
                    let CollectiveCall { kind, input, output, bytes, digest, .. } = call;
                    let launch = CollectiveLaunch { kind, element, input, output, bytes, digest, way: None };
                    // SAFETY: the tensors have these sizes on this rank, and on the others or the kernel breaks it off; they stay until it has run
                    // (the promise of a view of device memory). The stream is the caller's, of this device, or the own one.
                    unsafe { group.engine.run(&launch, stream) }
                }
            },
        };
        match enqueued {
            Ok(()) => Ok(Ok(public(turn.end()?))),
            // Nothing was enqueued.
            Err(e) => Ok(Err(e)),
        }
    }

    fn close(&self) -> Result<()> {
        self.parts.queue.close()
    }

    fn stream(&self) -> Option<StreamRef<'_>> {
        Some(self.parts.queue.own())
    }
}

impl Drop for CudaCollectives {
    fn drop(&mut self) {
        // As the other operations': what a kernel that may still run uses stays for as long as the process.
        let Some(why) = self.parts.queue.in_use() else {
            let context = self.parts.queue.context().clone();
            // None of this is part of a graph that somebody captures.
            let _relaxed = Uncaptured::new(context.device().cuda().driver());
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.parts) };
            return;
        };
        let rank = self.parts.queue.reports().rank();
        let bytes = self.parts.group.as_ref().map_or(0, |group| group.heap.bytes());
        left_behind::say(format_args!(
            "the collectives of rank {rank} were dropped while {why}; their {bytes} bytes stay until the process ends"
        ));
    }
}
