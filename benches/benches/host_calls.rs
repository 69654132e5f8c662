//! CPU time that a call of dispatch, combine and barrier takes of its thread, *without the driver's own time*.
//!
//! `cargo bench -p benches --bench host_calls`, on any machine with NVRTC. The driver is one in software whose calls return at once (`benches::quick`),
//! so these are the library's own nanoseconds: arguments checked, a plan found, a launch's parameters filled in, the order of streams kept. On a GPU add
//! what the driver takes for the calls that are listed in `deepep-core`'s test `a_call_asks_the_driver_for_five_things`; docs/performance.md
//! predicts two microseconds and more for the launch, some tenths for the event. `deepep bench` has the sum in its column *CPU*.
//!
//! A rank that is alone; making the arguments and dropping the result count. The second figure is the number of allocations of a call.
//! The first line says how long the buffer took to build: with an empty cache (`XDG_CACHE_HOME` names its place) mostly NVRTC's time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use benches::quick::Quick;
use criterion::{Criterion, criterion_group, criterion_main};
use deepep_cli::bench::cpu_time::thread_time;
use deepep_core::bootstrap::thread_group;
use deepep_core::device::DeviceMemory;
use deepep_core::jit::JitError;
use deepep_core::tensor::{DType, TensorRef};
use deepep_core::{BackendKind, CombineArgs, DispatchArgs, ElasticBuffer, Error, Handle, StreamRef};

/// Counts allocations.
struct Counting;

thread_local! {
    /// Of this thread: others may be busy with something else.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Not counted while the thread ends.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKENS: usize = 128;
const HIDDEN: usize = 7168;
const TOPK: usize = 8;
const EXPERTS: usize = 256;

/// Where the tensors lie.
const IDS: usize = 2 << 20;
const WEIGHTS: usize = IDS + (64 << 10);
const SCALES: usize = WEIGHTS + (64 << 10);
const Y: usize = 3 << 20;
const OUT: usize = 6 << 20;

/// A rank's tensors.
struct Tensors(DeviceMemory);

impl Tensors {
    fn view(&self, at: usize, dtype: DType, columns: usize) -> TensorRef<'_> {
        // SAFETY: nothing that is enqueued runs.
        unsafe { self.0.view(at, dtype, [TOKENS, columns]) }.expect("a view")
    }

    fn dispatch(&self) -> DispatchArgs<'_> {
        DispatchArgs::new(self.view(0, DType::F8E4M3, HIDDEN), self.view(IDS, DType::I64, TOPK))
            .scales(self.view(SCALES, DType::F32, HIDDEN / 128))
            .weights(self.view(WEIGHTS, DType::F32, TOPK))
            .without_counts()
    }

    fn cached<'a>(&'a self, handle: &'a Handle) -> DispatchArgs<'a> {
        DispatchArgs::cached(self.view(0, DType::F8E4M3, HIDDEN), handle).scales(self.view(
            SCALES,
            DType::F32,
            HIDDEN / 128,
        ))
    }

    fn combine<'a>(&'a self, handle: &'a Handle) -> CombineArgs<'a> {
        // SAFETY: nothing that is enqueued runs.
        let out = unsafe { self.0.view_mut(OUT, DType::Bf16, [TOKENS, HIDDEN]) }.expect("a view");
        CombineArgs::new(self.view(Y, DType::Bf16, HIDDEN), handle, out)
    }
}

fn build(quick: &Quick) -> deepep_core::Result<ElasticBuffer> {
    ElasticBuffer::builder()
        .packets(false)
        .max_tokens_per_rank(TOKENS)
        .experts(EXPERTS)
        .topk(TOPK)
        .hidden(HIDDEN)
        .dtype(DType::F8E4M3)
        .scale_packs(HIDDEN / 128)
        .expanded(1)
        .timeout(Duration::from_secs(10))
        .backend(BackendKind::Cuda)
        .driver(quick.cuda.clone())
        .build(thread_group(1, Duration::from_secs(10))?.remove(0))
}

/// Times a call, and counts its allocations.
fn measure(criterion: &mut Criterion, quick: &Quick, name: &str, mut call: impl FnMut()) {
    const CALLS: u64 = 1000;
    quick.start();
    (0..100).for_each(|_| call());
    let before = ALLOCATIONS.get();
    (0..CALLS).for_each(|_| call());
    let made = ALLOCATIONS.get() - before;
    criterion.bench_function(name, |bencher| {
        bencher.iter_custom(|calls| {
            let start = thread_time();
            (0..calls).for_each(|_| call());
            thread_time() - start
        });
    });
    println!(
        "{name}: {:.2} allocations a call; the time is without the driver's",
        made as f64 / CALLS as f64
    );
    quick.stop();
}

fn calls(criterion: &mut Criterion) {
    let quick = Quick::new();
    let start = Instant::now();
    let mut buffer = match build(&quick) {
        Ok(buffer) => buffer,
        Err(Error::Jit(error @ JitError::NotFound { .. })) => {
            return eprintln!("skipped: host_calls: {error}");
        }
        Err(error) => panic!("a buffer on a driver that does nothing: {error}"),
    };
    println!("a buffer of one rank is built in {:.2} s", start.elapsed().as_secs_f64());
    let tensors = Tensors(DeviceMemory::new(buffer.device(), 8 << 20).expect("memory"));
    let context = buffer.device().primary_context().expect("a context");
    let mut raw = std::ptr::null_mut();
    {
        let _bound = context.bind().expect("a context");
        // SAFETY: `raw` is valid for one write, and a context is current. The stream ends with the process.
        unsafe { context.device().cuda().driver().cuStreamCreate(&mut raw, 1) }.expect("a stream");
    }
    // SAFETY: as above.
    let stream = unsafe { StreamRef::from_raw(raw.cast()) };
    let mut dispatched = Some(buffer.dispatch(tensors.dispatch()).expect("a dispatch"));
    let handle = dispatched.as_ref().expect("the first").handle().clone();
    measure(criterion, &quick, "dispatch", || {
        dispatched = None;
        dispatched = Some(buffer.dispatch(tensors.dispatch()).expect("a dispatch"));
    });
    measure(criterion, &quick, "dispatch, expanded", || {
        dispatched = None;
        dispatched = Some(buffer.dispatch(tensors.dispatch().expanded(1)).expect("a dispatch"));
    });
    measure(criterion, &quick, "dispatch, on the caller's stream", || {
        dispatched = None;
        dispatched = Some(buffer.dispatch(tensors.dispatch().stream(stream)).expect("a dispatch"));
    });
    measure(criterion, &quick, "cached dispatch", || {
        dispatched = None;
        dispatched = Some(buffer.dispatch(tensors.cached(&handle)).expect("a dispatch"));
    });
    dispatched = None;
    measure(criterion, &quick, "combine", || {
        buffer.combine(tensors.combine(&handle)).expect("a combine");
    });
    measure(criterion, &quick, "combine, on the caller's stream", || {
        buffer.combine(tensors.combine(&handle).stream(stream)).expect("a combine");
    });
    measure(criterion, &quick, "barrier", || {
        buffer.barrier().expect("a barrier");
    });
    drop((dispatched, handle));
    // Dispatch and combine in turn: two shapes.
    measure(criterion, &quick, "dispatch and combine", || {
        let dispatched = buffer.dispatch(tensors.dispatch()).expect("a dispatch");
        buffer.combine(tensors.combine(dispatched.handle())).expect("a combine");
    });
}

criterion_group!(benches, calls);
criterion_main!(benches);
