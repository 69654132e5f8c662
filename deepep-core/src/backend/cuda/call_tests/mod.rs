//! What calls ask of the driver, in which order, and what is left when it refuses.

mod captured;
mod outcome;
mod refused;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUlaunchAttributeID, Function};

use super::recorder::Recorder;
use super::stream::Stream;
use crate::bootstrap::thread_group;
use crate::device::DeviceMemory;
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
        .packets(false)
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
        bench.buffer.synchronize(LONG).unwrap();
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
        bench.buffer.synchronize(LONG).unwrap();
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

#[test]
fn kernels_are_launched_early_if_the_caller_says_so() {
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    for asked in [None, Some(false), Some(true)] {
        Recorder::run(|driver, cuda| {
            let mut buffer = build(asked.into_iter().fold(builder(cuda), Builder::early_launch)).unwrap();
            let launches = Rc::new(RefCell::new(Vec::new()));
            let seen = launches.clone();
            driver.on_launch(move |config, _| {
                // SAFETY: a launch has that many attributes.
                let attributes =
                    unsafe { std::slice::from_raw_parts(config.attrs, config.numAttrs as usize) };
                let early = attributes.iter().any(|attribute| attribute.id == id);
                seen.borrow_mut().push(early);
            });
            buffer.barrier().unwrap();
            assert_eq!(*launches.borrow(), [asked.unwrap_or(EARLY_LAUNCH)]);
            buffer.synchronize(LONG).unwrap();
        });
    }
}
