//! What calls ask of the driver, in which order, and what is left when it refuses.

use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUlaunchAttributeID, CUresult, CUstreamCaptureStatus, Function};

use super::recorder::Recorder;
use super::status::write_record;
use super::stream::Stream;
use crate::bootstrap::thread_group;
use crate::device::DeviceMemory;
use crate::jit::params::DispatchParams;
use crate::layout::{CountsLayout, RecordKind, StatusLayout, StatusRecord};
use crate::stream::{EventRef, StreamRef};
use crate::tensor::DType;
use crate::tune::EARLY_LAUNCH;
use crate::{
    BackendKind, Builder, CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, Event, Handle, Result,
};

type F = Function;

const TOKENS: usize = 8;
const HIDDEN: usize = 64;
const TOPK: usize = 2;
const LONG: Duration = Duration::from_secs(20);

fn builder(cuda: &Cuda) -> Builder {
    ElasticBuffer::builder()
        .max_tokens_per_rank(TOKENS)
        .experts(4)
        .topk(TOPK)
        .hidden(HIDDEN)
        .timeout(Duration::from_secs(1))
        .backend(BackendKind::Cuda)
        .driver(cuda.clone())
}

fn build(builder: Builder) -> Result<ElasticBuffer> {
    builder.build(thread_group(1, LONG).unwrap().remove(0))
}

/// A rank that is alone, and its tensors.
struct Bench {
    memory: DeviceMemory,
    buffer: ElasticBuffer,
}

impl Bench {
    const IDS: usize = 64 << 10;
    const OUT: usize = 128 << 10;

    fn new(cuda: &Cuda) -> Self {
        let buffer = build(builder(cuda)).unwrap();
        Self { memory: DeviceMemory::new(buffer.device(), 1).unwrap(), buffer }
    }

    fn dispatch(&mut self, with: impl FnOnce(DispatchArgs<'_>) -> DispatchArgs<'_>) -> Result<Dispatched> {
        // SAFETY: kernels do nothing, and what is enqueued has run before the memory goes.
        let (x, ids) = unsafe {
            let x = self.memory.view(0, DType::Bf16, [TOKENS, HIDDEN]).unwrap();
            (x, self.memory.view(Self::IDS, DType::I64, [TOKENS, TOPK]).unwrap())
        };
        self.buffer.dispatch(with(DispatchArgs::new(x, ids)))
    }

    fn cached(&mut self, handle: &Handle) -> Result<Dispatched> {
        // SAFETY: as above.
        let x = unsafe { self.memory.view(0, DType::Bf16, [TOKENS, HIDDEN]).unwrap() };
        self.buffer.dispatch(DispatchArgs::cached(x, handle))
    }

    fn combine(
        &mut self,
        of: &Dispatched,
        with: impl FnOnce(CombineArgs<'_>) -> CombineArgs<'_>,
    ) -> Result<Event> {
        // SAFETY: as above.
        let out = unsafe { self.memory.view_mut(Self::OUT, DType::Bf16, [TOKENS, HIDDEN]).unwrap() };
        let args = CombineArgs::new(of.x(), of.handle(), out);
        // The arguments borrow from the result, too, hence are made here.
        self.buffer.combine(with(args))
    }

    fn copy_out(&self, of: &Dispatched) -> Result<Event> {
        let rows = of.x().first_rows(TOKENS);
        // SAFETY: as above.
        let out = unsafe { self.memory.view_mut(Self::OUT, DType::Bf16, [TOKENS, HIDDEN]).unwrap() };
        of.copy_out(rows, out, None)
    }
}

/// What a dispatch's kernel writes for the host: counts if it asks, and a record.
fn kernel(params: *const c_void, totals: [u32; 4], record: Option<(RecordKind, StatusRecord)>) {
    type C = CountsLayout;
    // SAFETY: tests call this for dispatches only, whose one parameter this is.
    let params = unsafe { &*params.cast::<DispatchParams>() };
    if let Some((kind, record)) = record {
        let at = params.domain.status + StatusLayout::new(1).record(kind) as u64;
        // SAFETY: the place of that record in the rank's status block, which the emulator's host and devices see at one address.
        unsafe { write_record(at as *mut u8, record) };
    }
    let cells = totals.into_iter().enumerate();
    let experts = [1, 2, 1, 1].into_iter().enumerate().map(|(j, n)| (C::EXPERT_COUNT + j, n));
    for (cell, value) in cells.chain([(C::RANK_PSUM, totals[C::TOKENS])]).chain(experts) {
        if params.count_tag != 0 {
            // SAFETY: a cell of the counts, aligned, in the same block.
            let cell = unsafe { AtomicU64::from_ptr((params.host_counts as *mut u64).add(cell)) };
            cell.store(u64::from(params.count_tag) << 32 | u64::from(value), Ordering::Release);
        }
    }
}

fn no_counts(args: DispatchArgs<'_>) -> DispatchArgs<'_> {
    args.without_counts()
}

const STEADY: [F; 5] =
    [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuLaunchKernelEx, F::cuEventRecord, F::cuCtxPopCurrent];

/// On a stream of the caller's, which may not be the one of the call before.
const NAMED: [F; 6] = [
    F::cuCtxPushCurrent,
    F::cuStreamIsCapturing,
    F::cuStreamGetId,
    F::cuLaunchKernelEx,
    F::cuEventRecord,
    F::cuCtxPopCurrent,
];

/// A list with a wait before what is enqueued.
fn with_waits(calls: &[F], waits: usize) -> Vec<F> {
    let at = calls.iter().position(|&f| f == F::cuLaunchKernelEx).unwrap();
    let mut all = calls.to_vec();
    all.splice(at..at, vec![F::cuStreamWaitEvent; waits]);
    all
}

#[test]
fn a_call_asks_the_driver_for_five_things() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let kept = bench.dispatch(no_counts).unwrap();
        // The first ones make the events.
        for _ in 0..3 {
            drop(bench.dispatch(no_counts).unwrap());
            bench.combine(&kept, |args| args).unwrap();
        }
        for round in 0..3 {
            let (_, calls) = driver.calls(|| drop(bench.dispatch(no_counts).unwrap()));
            assert_eq!(calls, STEADY, "dispatch {round}");
            let (_, calls) = driver.calls(|| drop(bench.combine(&kept, |args| args).unwrap()));
            assert_eq!(calls, STEADY, "combine {round}");
            let (_, calls) = driver.calls(|| drop(bench.cached(kept.handle()).unwrap()));
            assert_eq!(calls, STEADY, "cached dispatch {round}");
            let (_, calls) = driver.calls(|| drop(bench.buffer.barrier().unwrap()));
            assert_eq!(calls, STEADY, "barrier {round}");
            let (_, calls) = driver.calls(|| drop(bench.copy_out(&kept).unwrap()));
            let copy = STEADY.map(|f| if f == F::cuLaunchKernelEx { F::cuMemcpyDtoDAsync } else { f });
            assert_eq!(calls, copy, "copy {round}");
        }
    });
}

#[test]
fn exact_counts_are_no_further_calls() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        driver.on_launch(|_, params| kernel(params, [5, 5, 0, 0], None));
        for round in 0..4 {
            let (got, calls) = driver.calls(|| {
                let got = bench.dispatch(|args| args).unwrap();
                (got.tokens(), got.rows(), got.counts().unwrap().expert_counts.clone())
            });
            assert_eq!(got, (5, 5, vec![1, 2, 1, 1]), "{round}");
            // The first two make an event each.
            if round >= 2 {
                assert_eq!(calls, STEADY, "{round}");
            }
        }
    });
}

#[test]
fn other_streams_and_events_cost_a_wait_each() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let context = bench.buffer.device().primary_context().unwrap();
        let streams = [0, 1].map(|_| Stream::new(&context).unwrap());
        // SAFETY: the streams outlive their use.
        let [one, other] = [0, 1].map(|i| unsafe { StreamRef::from_raw(streams[i].raw().cast()) });
        let before = bench.dispatch(no_counts).unwrap();
        // SAFETY: the event was recorded, and means what it means as long as the result is there.
        let after = unsafe { EventRef::from_raw(before.event().as_raw().unwrap()) };
        drop(bench.dispatch(no_counts).unwrap());
        for round in 0..2 {
            let (_, calls) = driver.calls(|| drop(bench.dispatch(|args| args.without_counts().stream(one))));
            if round > 0 {
                assert_eq!(calls, with_waits(&NAMED, 1), "another stream than before");
            }
            let (_, calls) = driver.calls(|| drop(bench.combine(&before, |args| args.stream(one))));
            if round > 0 {
                assert_eq!(calls, NAMED, "the same stream");
            }
            let (_, calls) =
                driver.calls(|| drop(bench.combine(&before, |args| args.stream(other).after(after))));
            assert_eq!(calls, with_waits(&NAMED, 2), "another stream, and an event");
            let (_, calls) = driver.calls(|| drop(bench.dispatch(no_counts)));
            assert_eq!(calls, with_waits(&STEADY, 1), "the own stream again");
            let (_, calls) = driver.calls(|| drop(bench.dispatch(|args| args.without_counts().after(after))));
            assert_eq!(calls, with_waits(&STEADY, 1), "an event");
        }
    });
}

#[test]
fn kernels_are_loaded_once() {
    Recorder::run(|driver, cuda| {
        let loads = |calls: &[F]| calls.iter().filter(|&&f| f == F::cuModuleLoadData).count();
        let (first, calls) = driver.calls(|| build(builder(cuda)).unwrap());
        // One is a question to the driver: whether it runs kernels.
        let loaded = loads(&calls) - 1;
        assert!(loaded > 3, "{loaded}");
        let (second, calls) = driver.calls(|| build(builder(cuda)).unwrap());
        assert_eq!(loads(&calls), 1);
        let (_, calls) = driver.calls(|| drop((first, second)));
        assert!(!calls.contains(&F::cuModuleUnload) && !calls.contains(&F::cuMemFreeHost));
        let (third, calls) = driver.calls(|| build(builder(cuda)).unwrap());
        assert_eq!((loads(&calls), calls.contains(&F::cuMemHostAlloc)), (1, false));
        // Another context has nothing yet.
        let (other, calls) = driver.calls(|| build(builder(cuda).device(1)).unwrap());
        assert_eq!(loads(&calls) - 1, loaded);
        drop((third, other));
    });
}

/// An operation of a bench, and how many dispatches it is.
type Operation = (&'static str, fn(&mut Bench, &Dispatched) -> Result<Event>, u32);

const OPERATIONS: [Operation; 5] = [
    ("dispatch", |bench, _| bench.dispatch(no_counts).map(|got| got.event().clone()), 1),
    ("cached dispatch", |bench, kept| bench.cached(kept.handle()).map(|got| got.event().clone()), 1),
    ("combine", |bench, kept| bench.combine(kept, |args| args), 0),
    ("barrier", |bench, _| bench.buffer.barrier(), 0),
    ("copy", |bench, kept| bench.copy_out(kept), 0),
];

/// Refuses one call of the driver that an operation makes, after `before` others, and says which. None if it makes no more.
fn refuse_one(&(name, operation, dispatches): &Operation, before: usize) -> Option<F> {
    let mut refused = None;
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let kept = bench.dispatch(no_counts).unwrap();
        // With these two events in somebody's hands the operation needs another.
        let held = bench.buffer.barrier().unwrap();
        let (result, calls) = driver.calls(|| {
            driver.fail(before, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            operation(&mut bench, &kept)
        });
        if driver.spare() {
            return;
        }
        let call = calls[before];
        refused = Some(call);
        if call != F::cuCtxPopCurrent {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Vmm(_)), "{name}, {call:?}: {error}");
            assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{name}, {call:?}: {error}");
        } else {
            // All is done by then.
            result.unwrap();
        }
        let again = operation(&mut bench, &kept);
        if call == F::cuEventRecord {
            // It runs, and nobody can be told when it has run. The other ranks have it behind them, or wait for it.
            let error = again.unwrap_err();
            assert!(matches!(error, Error::Broken { .. }), "{name}: {error}");
            return;
        }
        // Nothing was enqueued, and nothing counted.
        again.unwrap().wait(LONG).unwrap();
        let last = bench.dispatch(no_counts).unwrap();
        let ran = if call == F::cuCtxPopCurrent { 2 } else { 1 };
        assert_eq!(last.handle().0.number, 1 + ran * dispatches + 1, "{name}, {call:?}");
        bench.buffer.synchronize(LONG).unwrap();
        drop(held);
    });
    refused
}

#[test]
fn a_refused_call_can_be_repeated_unless_its_end_is_lost() {
    for operation in &OPERATIONS {
        let refused: Vec<F> = (0..).map_while(|before| refuse_one(operation, before)).collect();
        let mut expected = STEADY.to_vec();
        expected.insert(2, F::cuEventCreate);
        if operation.0 == "copy" {
            expected[3] = F::cuMemcpyDtoDAsync;
        }
        assert_eq!(refused, expected, "{}", operation.0);
    }
}

/// Another's stream whose work has no known end: the memory stays, since nobody can say when it is not used any more.
#[test]
fn memory_stays_if_an_end_is_lost_on_the_callers_stream() {
    let emulator = Recorder::run_leaving(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let stream = Stream::new(&bench.buffer.device().primary_context().unwrap()).unwrap();
        // SAFETY: the stream outlives its use.
        let borrowed = unsafe { StreamRef::from_raw(stream.raw().cast()) };
        for _ in 0..2 {
            drop(bench.dispatch(|args| args.without_counts().stream(borrowed)).unwrap());
        }
        let record = NAMED.iter().position(|&f| f == F::cuEventRecord).unwrap();
        driver.fail(record, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let lost = bench.dispatch(|args| args.without_counts().stream(borrowed));
        assert!(matches!(lost, Err(Error::Vmm(_))), "{lost:?}");
        let error = bench.buffer.synchronize(LONG).unwrap_err();
        assert!(matches!(error, Error::StillRunning { .. }), "{error}");
        drop(bench);
    });
    assert!(!emulator.ledger().is_empty());
}

#[test]
fn a_wait_for_another_stream_or_an_event_can_be_refused() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let stream = Stream::new(&bench.buffer.device().primary_context().unwrap()).unwrap();
        // SAFETY: the stream outlives its use.
        let borrowed = unsafe { StreamRef::from_raw(stream.raw().cast()) };
        let before = bench.dispatch(no_counts).unwrap();
        drop(bench.dispatch(no_counts));
        // SAFETY: the event was recorded, and means what it means as long as the result is there.
        let after = unsafe { EventRef::from_raw(before.event().as_raw().unwrap()) };
        // Both waits; a driver that can't number the stream is no error.
        for (at, is_error) in [(3, true), (4, true), (2, false)] {
            driver.fail(at, CUresult::CUDA_ERROR_INVALID_VALUE);
            let (got, calls) = driver.calls(|| {
                bench.dispatch(|args| args.without_counts().stream(borrowed).after(after)).map(drop)
            });
            assert!(!driver.spare());
            assert_eq!(got.is_err(), is_error, "{calls:?}");
            assert_eq!(calls.contains(&F::cuLaunchKernelEx), !is_error, "{calls:?}");
        }
        assert_eq!(bench.dispatch(no_counts).unwrap().handle().0.number, 4);
    });
}

#[test]
fn a_captured_call_is_noticed_once() {
    type S = CUstreamCaptureStatus;
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        for _ in 0..2 {
            drop(bench.dispatch(no_counts).unwrap());
        }
        driver.capture(S::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        // What would have to wait is refused, and takes nothing.
        let (refused, calls) = driver.calls(|| bench.dispatch(|args| args));
        assert!(matches!(refused, Err(Error::Invalid { parameter: "exact counts", .. })), "{refused:?}");
        assert_eq!(calls, [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuCtxPopCurrent]);
        // Captured: no wait for what runs outside, and one question, whether it is captured.
        let (captured, calls) = driver.calls(|| bench.dispatch(no_counts).unwrap());
        assert_eq!(calls, STEADY);
        // It counts, since all ranks capture alike, and holds its slots.
        assert_eq!(captured.handle().0.number, 3);
        let other = bench.dispatch(no_counts).unwrap();
        let held = bench.dispatch(no_counts);
        assert!(matches!(held, Err(Error::SlotsHeld { what: "dispatch result", slots: 2 })), "{held:?}");
        drop(other);
        // Its event is a point in the graph.
        let error = captured.event().is_complete().unwrap_err();
        assert!(matches!(error, Error::Invalid { parameter: "event", .. }), "{error}");
        assert!(captured.event().wait(LONG).is_err());
        driver.capture(S::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        let (refused, calls) = driver.calls(|| bench.buffer.barrier());
        assert!(matches!(refused, Err(Error::Invalid { parameter: "stream", .. })), "{refused:?}");
        assert_eq!(calls, [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuCtxPopCurrent]);
        driver.capture(S::CU_STREAM_CAPTURE_STATUS_NONE);
        // A result of a captured dispatch is looked at when the caller says so.
        captured.check().unwrap();
        let direct = bench.dispatch(no_counts).unwrap();
        direct.event().wait(LONG).unwrap();
        // Closing is the caller's word that no graph will run.
        drop((direct, captured));
        let Bench { buffer, memory } = bench;
        buffer.close().unwrap();
        drop(memory);
    });
}

#[test]
fn a_captured_buffer_that_is_not_closed_keeps_its_memory() {
    let emulator = Recorder::run_leaving(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        driver.capture(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        drop(bench.dispatch(no_counts).unwrap());
        driver.capture(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        bench.buffer.synchronize(LONG).unwrap();
        let (_, calls) = driver.calls(|| drop(bench.buffer));
        assert!(!calls.contains(&F::cuMemUnmap) && !calls.contains(&F::cuStreamDestroy), "{calls:?}");
        drop(bench.memory);
    });
    assert!(!emulator.ledger().is_empty());
}

#[test]
fn kernels_are_launched_early_if_the_caller_says_so() {
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    for asked in [None, Some(false), Some(true)] {
        Recorder::run(|driver, cuda| {
            let mut buffer = build(asked.into_iter().fold(builder(cuda), Builder::early_launch)).unwrap();
            let launches = Rc::new(Cell::new(0));
            let counted = launches.clone();
            driver.on_launch(move |config, _| {
                // SAFETY: a launch has that many attributes.
                let attributes =
                    unsafe { std::slice::from_raw_parts(config.attrs, config.numAttrs as usize) };
                let early = attributes.iter().any(|attribute| attribute.id == id);
                assert_eq!(early, asked.unwrap_or(EARLY_LAUNCH));
                counted.set(counted.get() + 1);
            });
            buffer.barrier().unwrap();
            assert_eq!(launches.get(), 1);
        });
    }
}

fn bad_id(sequence: u32) -> (RecordKind, StatusRecord) {
    let record =
        StatusRecord { sequence, index: 3, lane: 1, seen: 7, expected: 4, ..StatusRecord::default() };
    (RecordKind::BadExpert, record)
}

#[test]
fn wrong_ids_do_not_lose_the_result() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        driver.on_launch(|_, params| kernel(params, [5, 5, 0, 0], Some(bad_id(1))));
        let outcome = bench.dispatch(|args| args);
        let Err(Error::WrongIds { problem, dispatched }) = outcome else { panic!("{outcome:?}") };
        let says = |error: &Error| {
            assert!(matches!(error, Error::ExpertOutOfRange { token: 3, lane: 1, expert: 7, experts: 4, .. }))
        };
        says(&problem);
        assert_eq!((dispatched.tokens(), dispatched.handle().counts().unwrap().rows), (5, 5));
        says(&dispatched.check().unwrap_err());
        driver.on_launch(|_, _| {});
        bench.combine(&dispatched, |args| args).unwrap().wait(LONG).unwrap();
        // A good call is not blamed for it, with counts or without.
        driver.on_launch(|_, params| kernel(params, [5, 5, 0, 0], None));
        bench.dispatch(|args| args).unwrap();
        let got = bench.dispatch(no_counts).unwrap();
        got.event().wait(LONG).unwrap();
        got.check().unwrap();
        drop(got);
        // Over capacity, which all ranks know of, comes first.
        driver.on_launch(|_, params| kernel(params, [0, 0, 9, 9], Some(bad_id(4))));
        let outcome = bench.dispatch(|args| args);
        assert!(matches!(outcome, Err(Error::CapacityExceeded { needed: 9, .. })), "{outcome:?}");
        drop(dispatched);
    });
}

#[test]
fn a_dispatch_that_has_not_run_can_not_be_checked() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let gate = DeviceMemory::new(bench.buffer.device(), 4).unwrap();
        gate.write(0, &[0; 4]).unwrap();
        let context = bench.buffer.device().primary_context().unwrap();
        let stream = Stream::new(&context).unwrap();
        {
            let _bound = context.bind().unwrap();
            // SAFETY: the word lies in memory that outlives the wait.
            unsafe { cuda.driver().cuStreamWaitValue32(stream.raw(), gate.address(), 1, 0) }.unwrap();
        }
        // SAFETY: the stream outlives its use.
        let borrowed = unsafe { StreamRef::from_raw(stream.raw().cast()) };
        let got = bench.dispatch(|args| args.without_counts().stream(borrowed)).unwrap();
        let (checked, calls) = driver.calls(|| got.check());
        assert!(matches!(checked, Err(Error::StillRunning { what: "a dispatch", .. })), "{checked:?}");
        assert!(!calls.contains(&F::cuMemcpyDtoHAsync), "{calls:?}");
        gate.write(0, &1_u32.to_ne_bytes()).unwrap();
        got.event().wait(LONG).unwrap();
        got.check().unwrap();
    });
}
