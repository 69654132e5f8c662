//! The backend on GPUs: calls become launches, and what kernels report becomes results.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::events::CudaEvent;
use super::pinned::Readback;
use super::plans::Plans;
use super::queue::{Queue, public};
use super::reports::{Reports, Told};
use super::{
    CombineLaunch, CombinePlan, DispatchLaunch, DispatchPlan, Engine, EngineOptions, Gpu, StatusBlock,
    Uncaptured, call_failed, copy,
};
use crate::backend::{
    Backend, CombineCall, Copy2d, DispatchCall, DispatchOutcome, Order, Positions, Problem, Ran,
};
use crate::config::{BackendKind, Config};
use crate::error::{Error, Result};
use crate::layout::{CombineShape, DispatchShape, HandleLayout, HeapLayout, RecordKind, StatusRecord};
use crate::left_behind;
use crate::stream::{Event, StreamRef};
use crate::symmetric::Heap;
use crate::tensor::{Extent, Space};

/// One rank on a GPU.
pub(crate) struct CudaBackend {
    /// Dropped only if no kernel uses any of it.
    parts: ManuallyDrop<Parts>,
}

/// Fields are dropped in this order.
struct Parts {
    engine: Engine,
    readback: Readback,
    queue: Queue,
    plans: Mutex<PlansOfCalls>,
    /// Dispatches so far, captured ones included.
    dispatches: AtomicU32,
    /// A dispatch was captured: from then on the device counts calls that the host doesn't see.
    captured: AtomicBool,
    /// Newest records of bad ids that the caller knows of, once the host's count and the device's may differ.
    told: Mutex<[u32; RecordKind::COUNT]>,
    layout: HeapLayout,
    /// What kernels write to.
    heap: Arc<Heap>,
}

#[derive(Default)]
struct PlansOfCalls {
    dispatch: Plans<DispatchShape, DispatchPlan>,
    combine: Plans<(CombineShape, DispatchShape, bool), CombinePlan>,
}

impl CudaBackend {
    /// Compiles and loads every kernel, and zeroes this rank's workspace. Kernels of other ranks may start when all ranks have come
    /// back from here.
    pub(crate) fn new(heap: Arc<Heap>, layout: HeapLayout, config: &Config, gpu: &Gpu) -> Result<Self> {
        if heap.space() != Space::Device || heap.bytes() < layout.bytes || heap.ranks() != layout.ranks {
            let need = format!("the layout needs {} device bytes on {} ranks", layout.bytes, layout.ranks);
            return Err(Error::invalid("heap", format!("{heap:?}"), need));
        }
        let status = StatusBlock::new(gpu.context(), layout.status)?;
        let early = gpu.early(config.early_launch)?;
        let options = EngineOptions {
            timeout: config.timeout,
            max_blocks: gpu.blocks(config.multiprocessors)?,
            // Kernels of which the driver starts one at a time would not be early.
            cooperative: gpu.has_context_alone() && !early,
            early,
            ..EngineOptions::default()
        };
        let (context, address) = (gpu.context().clone(), status.device_address());
        // SAFETY: every range of the heap has this layout (all ranks computed it from settings that they compared) and is mapped for this
        // device; `parts` keeps it until no kernel runs. Workspaces are zeroed before any rank comes back from `new`, and
        // nobody starts an operation before all have. The status block was made for the layout, by this device.
        let engine = unsafe { Engine::new(context, layout, heap.rank(), heap.bases(), address, options)? };
        // Here, where ranks still agree on failures: a plan depends on this rank's multiprocessors.
        let shapes = config.heap_config(layout.ranks)?;
        engine.check(&shapes)?;
        let reports = Arc::new(Reports::new(status, heap.rank(), config.timeout));
        let readback = Readback::new(gpu.context(), &reports)?;
        let queue = Queue::new(gpu.context(), reports)?;
        // All that calls can need: loading one later could have to wait for a kernel that waits for this rank.
        engine.prewarm_for(&shapes)?;
        let parts = Parts {
            engine,
            readback,
            queue,
            plans: Mutex::default(),
            dispatches: AtomicU32::new(0),
            captured: AtomicBool::new(false),
            told: Mutex::default(),
            layout,
            heap,
        };
        let backend = Self { parts: ManuallyDrop::new(parts) };
        backend.clear_workspace()?;
        Ok(backend)
    }

    fn clear_workspace(&self) -> Result<()> {
        let turn = self.queue().begin(&Order::default(), false)??;
        let (base, bytes) = (self.parts.heap.base(), self.parts.layout.workspace.bytes);
        let driver = self.queue().context().device().cuda().driver();
        // SAFETY: the turn keeps the context current. The workspace lies at the start of this rank's range, which is mapped for this device;
        // nobody uses it yet.
        unsafe { driver.cuMemsetD8Async(base, 0, bytes, turn.stream) }
            .map_err(|source| call_failed(format!("zeroing {bytes} bytes of workspace"), source))?;
        let end = turn.end()?;
        end.wait_reached("zeroing the workspace", self.reports().patience())
    }

    fn queue(&self) -> &Queue {
        &self.parts.queue
    }

    fn reports(&self) -> &Reports {
        self.parts.queue.reports()
    }

    fn plans(&self) -> MutexGuard<'_, PlansOfCalls> {
        self.parts.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> MutexGuard<'_, [u32; RecordKind::COUNT]> {
        self.parts.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An address for a kernel: 0 says that there is no tensor, so one without elements gets another that is not used.
    fn address(&self, tensor: Option<&Extent>) -> u64 {
        match tensor {
            None => 0,
            Some(tensor) if tensor.bytes() == 0 => self.parts.heap.base(),
            Some(tensor) => tensor.address(),
        }
    }

    /// The counts of a dispatch that was asked for them, and what went wrong in it.
    fn outcome(&self, number: u32, call: &DispatchCall<'_>, end: Arc<CudaEvent>) -> Result<DispatchOutcome> {
        let (reports, shape) = (self.reports(), &call.shape);
        let told = reports.counts(tag(number), shape, &end);
        if told.as_ref().is_err_and(|error| !matches!(error, Error::StillRunning { .. })) {
            // All blocks of a kernel leave soon after the first has given up. The caller is told when nothing uses its tensors any
            // more; if that can't be said, the first error is the better one all the same. Whose time is up has waited for it already.
            let _ = end.wait_reached("a dispatch", reports.patience());
        }
        let Told { counts, needed } = told?;
        let ran = Ran { number, shape, handle: &call.handle, handle_slot: call.handle_slot, cached: false };
        let over = needed != [0, 0];
        if over || self.bad_ids(number).is_some() {
            // Rare; records are certain to be there when the kernel has ended.
            end.wait_reached("a dispatch", reports.patience())?;
            reports.check()?;
        }
        // All ranks know that of each other.
        let problem = if over { Some(self.over_capacity(shape, needed)) } else { self.wrong_ids(&ran) };
        Ok(DispatchOutcome { number, counts: Some(counts), problem, event: public(end) })
    }

    /// A record of bad ids that belongs to a dispatch, or to a captured one that nobody has heard of.
    fn bad_ids(&self, number: u32) -> Option<(RecordKind, StatusRecord)> {
        let captured = self.parts.captured.load(Ordering::Acquire);
        [RecordKind::BadExpert, RecordKind::DuplicateExpert].into_iter().find_map(|kind| {
            let record = self.reports().newest(kind)?;
            let told = captured.then(|| self.told()[kind as usize]);
            concerns(record.sequence, number, told).then_some((kind, record))
        })
    }

    fn wrong_ids(&self, ran: &Ran<'_>) -> Option<Problem> {
        let (kind, record) = self.bad_ids(ran.number)?;
        let (rank, token, lane) = (self.reports().rank(), record.index as usize, record.lane as usize);
        let (expert, experts) = (record.seen as i64, record.expected as usize);
        let problem = if kind == RecordKind::BadExpert {
            Problem::ExpertOutOfRange { rank, token, lane, expert, experts }
        } else {
            let first = self.kept_lane(ran, token, lane, expert);
            Problem::DuplicateExpert { rank, token, first, second: lane, expert }
        };
        self.told()[kind as usize] = record.sequence;
        Some(problem)
    }

    /// The lane that was kept of a token's two of one expert: it is in the handle. A detail that is left out if it can't be had, or if the dispatch may be another
    /// than the handle's.
    fn kept_lane(&self, ran: &Ran<'_>, token: usize, second: usize, expert: i64) -> Option<usize> {
        if token >= ran.shape.max_tokens || self.parts.captured.load(Ordering::Acquire) {
            return None;
        }
        let row = ran.handle.topk + token * ran.shape.topk * 4;
        let kept = self.table(ran, row, ran.shape.topk).ok()?;
        kept.iter().take(second).position(|&id| i64::from(id) == expert)
    }

    /// Numbers at an offset of a dispatch's handle slot.
    fn table(&self, ran: &Ran<'_>, offset: usize, count: usize) -> Result<Vec<i32>> {
        let slot = self.parts.layout.handles.at(ran.handle_slot);
        let address = self.parts.heap.base() + (slot + offset) as u64;
        // SAFETY: the layout fits the slot (checked when the call was planned), the slot lies in this rank's heap, and the dispatch
        // that wrote it has run, so that nobody writes it as long as the caller holds it.
        unsafe { self.parts.readback.numbers(address, count) }
    }

    /// Whose capacity a call is over. The numbers are the call's own; the rank is in the newest record, if that has these numbers.
    fn over_capacity(&self, shape: &DispatchShape, needed: [u32; 2]) -> Problem {
        let record = self.reports().newest(RecordKind::Capacity);
        let rank = match record {
            Some(record) if [record.seen_tokens, record.seen] == needed.map(u64::from) => {
                record.peer as usize
            }
            _ => self.reports().rank(),
        };
        Problem::capacity(shape, rank, needed)
    }
}

/// Whether a record of bad ids, of the dispatch with that `sequence` number on the device, is news for the caller who asks about dispatch
/// `number`. `told`: there if dispatches were captured, the newest record that was told; from then on the two count differently, and
/// equal numbers say nothing.
fn concerns(sequence: u32, number: u32, told: Option<u32>) -> bool {
    told.map_or(sequence == number, |told| sequence != told)
}

/// The tag of a dispatch in the cells of exact counts: never 0, which says that nobody asks.
fn tag(number: u32) -> u32 {
    number.max(1)
}

impl Backend for CudaBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Cuda
    }

    fn dispatch(&self, call: DispatchCall<'_>) -> Result<Result<DispatchOutcome>> {
        let engine = &self.parts.engine;
        let planned = self.plans().dispatch.get(&call.shape, |shape| engine.plan_dispatch(shape));
        let plan = match planned {
            Ok(plan) => plan,
            Err(e) => return Ok(Err(e)),
        };
        // One call at a time comes here.
        let number = self.parts.dispatches.load(Ordering::Acquire).wrapping_add(1);
        let [row_stride, pack_stride] = call.scales.map_or([0, 0], |scales| scales.strides());
        let topk_idx = match &call.positions {
            Positions::Fresh { topk_idx } => self.address(Some(topk_idx)),
            Positions::Cached => 0,
        };
        let launch = DispatchLaunch {
            x: self.address(Some(&call.x)),
            scales: self.address(call.scales.as_deref()),
            scale_row_stride: row_stride as i64,
            scale_pack_stride: pack_stride as i64,
            topk_idx,
            weights: self.address(call.topk_weights.as_deref()),
            stats: self.address(call.statistics.as_deref()),
            tokens: call.x.rows(),
            output_slot: call.output_slot,
            handle_slot: call.handle_slot,
            zero_padding: call.zero_padding,
            count_tag: if call.exact { tag(number) } else { 0 },
            digest: call.digest,
        };
        let turn = match self.queue().begin(&call.order, call.exact)? {
            Ok(turn) => turn,
            Err(e) => return Ok(Err(e)),
        };
        // SAFETY: the plan is this engine's, whose context the turn keeps current. The tensors have the call's sizes on this device until the call has run (the promise of
        // a view of device memory), the slots are leased for it, and a cached handle was made by this buffer with the same
        // tokens (all checked when the call was planned). The stream is the caller's, of this device, or the own one.
        let launched = unsafe { engine.dispatch(&plan, &launch, turn.stream) };
        if let Err(e) = launched {
            // Nothing was enqueued.
            return Ok(Err(e));
        }
        self.parts.dispatches.store(number, Ordering::Release);
        if turn.captured {
            self.parts.captured.store(true, Ordering::Release);
        }
        let end = turn.end()?;
        if call.exact {
            return self.outcome(number, &call, end).map(Ok);
        }
        Ok(Ok(DispatchOutcome { number, counts: None, problem: None, event: public(end) }))
    }

    fn combine(&self, call: CombineCall<'_>) -> Result<Result<Event>> {
        let engine = &self.parts.engine;
        let key = (call.shape, call.dispatched, call.pull.is_some());
        let make =
            |(shape, dispatched, pull): &_| -> Result<_> { engine.plan_combine(shape, dispatched, *pull) };
        let planned = self.plans().combine.get(&key, make);
        let plan = match planned {
            Ok(plan) => plan,
            Err(e) => return Ok(Err(e)),
        };
        let launch = CombineLaunch {
            x: self.address(Some(&call.x)),
            pull: call.pull,
            weights: self.address(call.topk_weights.as_deref()),
            biases: call.biases.map(|bias| self.address(bias.as_deref())),
            out: self.address(Some(&call.out)),
            out_weights: self.address(call.out_weights.as_deref()),
            tokens: call.tokens,
            handle_slot: call.handle_slot,
            digest: call.digest,
        };
        let turn = match self.queue().begin(&call.order, false)? {
            Ok(turn) => turn,
            Err(e) => return Ok(Err(e)),
        };
        // SAFETY: as in `dispatch`; the handle slot was filled by a dispatch of this shape with as many tokens, and x has every row that
        // it names (checked against its counts, or its capacity, when the call was planned). What peers are to read, x and the weights if there are any, lies
        // in this rank's heap at the offsets in `pull` (`ops::combine` found them there), and the plan pulls if and only if there are any: that is part of
        // its key.
        let launched = unsafe { engine.combine(&plan, &launch, turn.stream) };
        match launched {
            Ok(()) => Ok(Ok(public(turn.end()?))),
            Err(e) => Ok(Err(e)),
        }
    }

    fn barrier(&self, order: Order<'_>) -> Result<Result<Event>> {
        let turn = match self.queue().begin(&order, false)? {
            Ok(turn) => turn,
            Err(e) => return Ok(Err(e)),
        };
        // SAFETY: the stream is the caller's, of this device, or the own one; `begin` has ordered it after the operation before, and the turn keeps the
        // context current.
        let launched = unsafe { self.parts.engine.barrier(turn.stream) };
        match launched {
            Ok(()) => Ok(Ok(public(turn.end()?))),
            Err(e) => Ok(Err(e)),
        }
    }

    fn problem(&self, ran: Ran<'_>) -> Result<Option<Problem>> {
        self.reports().check()?;
        if ran.cached {
            return Ok(None);
        }
        let cells = self.table(&ran, ran.handle.counts, HandleLayout::COUNTS)?;
        let needed = [cells[2], cells[3]].map(|n| n.max(0) as u32);
        if needed != [0, 0] {
            return Ok(Some(self.over_capacity(ran.shape, needed)));
        }
        Ok(self.wrong_ids(&ran))
    }

    unsafe fn copy(&self, rows: Copy2d, order: Order<'_>) -> Result<Event> {
        // It meets nobody: what an earlier call has delivered can be saved when a rank has given up.
        let turn = self.queue().turn(&order, false)?;
        // SAFETY: the caller vouches for both sides; the stream belongs to the context, which the turn keeps current.
        unsafe { copy::enqueue(self.queue().context(), &rows, turn.stream)? };
        Ok(public(turn.end()?))
    }

    fn synchronize(&self, timeout: Duration) -> Result<()> {
        self.queue().synchronize(timeout)
    }

    fn close(&self) -> Result<()> {
        self.queue().close()
    }

    fn stream(&self) -> Option<StreamRef<'_>> {
        Some(self.queue().own())
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // A kernel may still read and write the heap, and wait for ranks that will not come. Waiting for it here could take as long as
        // its timeout: what it uses stays for as long as the process.
        let readback = self.parts.readback.may_run();
        let copy = "a copy of a small table may be running (the driver refused to say when it ends)";
        let Some(why) = self.queue().in_use().or(readback.then_some(copy)) else {
            let context = self.queue().context().clone();
            // None of this is part of a graph that somebody captures.
            let _relaxed = Uncaptured::new(context.device().cuda().driver());
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.parts) };
            return;
        };
        let (rank, bytes) = (self.parts.heap.rank(), self.parts.heap.bytes());
        left_behind::say(format_args!(
            "the buffer of rank {rank} was dropped while {why}; its {bytes} bytes stay until the process ends"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_not_blamed_for_ids_of_replays() {
        // Host and device count the same.
        assert!(concerns(5, 5, None) && !concerns(5, 6, None));
        // Dispatch 1 was captured and replayed; ids were bad in the fifth replay. Whoever asks first hears of it, and nobody again: not
        // even the call that happens to have that number.
        assert!(concerns(5, 2, Some(0)));
        for number in 2..10 {
            assert!(!concerns(5, number, Some(5)), "{number}");
        }
        // The next one is news again.
        assert!(concerns(9, 3, Some(5)));
    }
}
