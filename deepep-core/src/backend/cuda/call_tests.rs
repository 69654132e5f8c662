//! What calls ask of the driver, in which order, and what is left when it refuses.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUresult, CUstreamCaptureStatus, Function};
use half::bf16;

use super::recorder::Recorder;
use super::stream::Stream;
use crate::bootstrap::thread_group;
use crate::device::DeviceMemory;
use crate::stream::{EventRef, StreamRef};
use crate::tensor::DType;
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

fn no_counts(args: DispatchArgs<'_>) -> DispatchArgs<'_> {
    args.without_counts()
}

#[test]
fn a_call_asks_the_driver_for_five_things() {
    const STEADY: [F; 5] = [
        F::cuCtxPushCurrent,
        F::cuStreamIsCapturing,
        F::cuLaunchKernelEx,
        F::cuEventRecord,
        F::cuCtxPopCurrent,
    ];
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
