//! All-gather, reduce-scatter and all-reduce: ours beside NCCL's, in one run, on the same stream and the same memory.
//!
//! `cargo bench -p benches --bench collectives`, on GPUs. Ranks are threads of this process, one a GPU and at least two; `BENCH_RANKS` says another
//! number, and then they share GPUs, which NCCL lets them with 2.30 and `NCCL_MULTI_RANK_GPU_ENABLE=1`. `BENCH_MAX` is the largest size in bytes, 1 GiB
//! if it is not set. Multicast must be switched off (`NCCL_NVLS_ENABLE=0`), so that NCCL creates no multicast object.
//!
//! A size is that of the larger tensor of a rank, as NCCL's own benchmarks count. A time is that of one call of many that follow each other on the
//! stream, between two events: the slowest rank's, median of several runs. Bandwidth is what crosses a rank's link in one direction if every byte goes
//! where it must, and no further. The last column compares the bits of the results: sums of more than two ranks may differ in the last
//! one, since NCCL does not add in rank order.

use cuda_vmm::sys::{CUevent, CUresult, CUstream};
use cuda_vmm::{Context, Cuda};
use deepep_core::bootstrap::{Bootstrap, ThreadBootstrap, thread_group};
use deepep_core::device::DeviceMemory;
use deepep_core::tensor::{DType, Space, TensorMut};
use deepep_core::{BackendKind, Collectives};
use nccl_gin::sys::{Nccl, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use nccl_gin::{UniqueId, multicast_disabled_by};
use std::ffi::c_void;
use std::ptr;
use std::time::{Duration, Instant};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const PATIENCE: Duration = Duration::from_secs(120);
const RUNS: usize = 7;
/// Bytes of results that are compared.
const COMPARED: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    AllGather,
    /// With the output in symmetric memory; NCCL's has none.
    AllGatherSymmetric,
    ReduceScatter,
    AllReduce,
}

impl Kind {
    const ALL: [Self; 4] = [Self::AllGather, Self::AllGatherSymmetric, Self::ReduceScatter, Self::AllReduce];

    fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::AllGatherSymmetric => "all-gather, symmetric",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
        }
    }

    /// Elements that a rank gives and gets.
    fn elements(self, most: usize, ranks: usize) -> [usize; 2] {
        match self {
            Self::AllGather | Self::AllGatherSymmetric => [most / ranks, most],
            Self::ReduceScatter => [most, most / ranks],
            Self::AllReduce => [most, most],
        }
    }

    /// Bytes that must cross a rank's link in one direction.
    fn wire(self, bytes: usize, ranks: usize) -> f64 {
        let part = bytes as f64 * (ranks - 1) as f64 / ranks as f64;
        if self == Self::AllReduce { 2.0 * part } else { part }
    }
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

fn main() {
    // Test runners ask for lists of tests.
    if std::env::args().any(|argument| argument == "--list") {
        return;
    }
    match prepare() {
        Err(reason) => eprintln!("skipped: collectives beside NCCL: {reason}"),
        Ok((cuda, nccl)) => {
            let ranks = number("BENCH_RANKS").unwrap_or(cuda.device_count().max(2) as usize);
            if let Err(error) = run(cuda, nccl, ranks) {
                eprintln!("{error}");
                std::process::exit(1);
            }
        }
    }
}

fn prepare() -> Result<(&'static Cuda, &'static Nccl), String> {
    if multicast_disabled_by().is_none() {
        return Err("multicast is not switched off: set NCCL_NVLS_ENABLE=0".into());
    }
    let cuda = Cuda::get().map_err(|error| error.to_string())?;
    if cuda.device_count() < 1 {
        return Err("the driver shows no device".into());
    }
    Ok((cuda, Nccl::get().map_err(|error| error.to_string())?))
}

fn run(cuda: &'static Cuda, nccl: &'static Nccl, ranks: usize) -> Outcome {
    println!(
        "{ranks} ranks on {} GPU(s) ({}), NCCL {}, BF16; microseconds of a call, GB/s on a rank's link",
        cuda.device_count(),
        cuda.device(0)?.name()?,
        nccl.version()
    );
    let id = UniqueId::new(nccl)?;
    let groups = thread_group(ranks, PATIENCE)?.into_iter().zip(thread_group(ranks, PATIENCE)?);
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .map(|(ours, meeting)| {
                scope.spawn(move || {
                    Rank::new(cuda, nccl, &id, ours, meeting)?.run().map_err(|e| e.to_string())
                })
            })
            .collect();
        let ended: Vec<_> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(Err("a rank panicked".into())))
            .collect();
        ended.into_iter().collect::<Result<(), String>>().map_err(Into::into)
    })
}

struct Rank {
    collectives: Collectives,
    nccl: &'static Nccl,
    comm: ncclComm_t,
    context: Context,
    stream: CUstream,
    events: [CUevent; 2],
    meeting: ThreadBootstrap,
    input: DeviceMemory,
    /// Ours and NCCL's.
    outputs: [DeviceMemory; 2],
    most: usize,
}

impl Rank {
    fn new(
        cuda: &'static Cuda,
        nccl: &'static Nccl,
        id: &UniqueId,
        ours: ThreadBootstrap,
        meeting: ThreadBootstrap,
    ) -> Result<Self, String> {
        let new = || -> Outcome<Self> {
            let most = number("BENCH_MAX").unwrap_or(1 << 30);
            let builder = Collectives::builder().backend(BackendKind::Cuda).timeout(PATIENCE);
            let collectives = builder.tensor_bytes(most).build(ours)?;
            let device = collectives.device().clone();
            let context = cuda.device(device.ordinal())?.primary_context()?;
            let bound = context.bind()?;
            let raw = ncclUniqueId { internal: id.as_bytes().map(|byte| byte as std::ffi::c_char) };
            let mut comm = ptr::null_mut();
            let (rank, ranks) = (collectives.rank() as i32, collectives.ranks() as i32);
            // A blocking one: calls on one that isn't hand their work to another thread, which takes them longer.
            // SAFETY: `comm` is valid for one write; the context of the rank's device is current.
            check(unsafe { nccl.ncclCommInitRank(&mut comm, ranks, raw, rank) }?)?;
            let mut events = [ptr::null_mut(); 2];
            for event in &mut events {
                // SAFETY: valid for one write; a context is current. Left to the process's end, as the communicator is.
                unsafe { cuda.driver().cuEventCreate(event, 0) }?;
            }
            let stream = collectives.stream().ok_or("no stream")?.as_raw().cast();
            let memory = || DeviceMemory::new(&device, most);
            let (input, outputs) = (memory()?, [memory()?, memory()?]);
            // Small numbers, others on each rank.
            input.fill(0, most, 0x3c + rank as u8)?;
            drop(bound);
            Ok(Self { collectives, nccl, comm, context, stream, events, meeting, input, outputs, most })
        };
        new().map_err(|error| error.to_string())
    }

    fn run(mut self) -> Outcome {
        for kind in Kind::ALL {
            for power in
                (3..=30).filter(|power| power % 3 == 0 || [4, 10, 14, 16, 20, 22, 26, 28].contains(power))
            {
                let bytes = 1_usize << power;
                if bytes <= self.most && bytes / 2 >= self.collectives.ranks() {
                    self.row(kind, bytes)?;
                }
            }
        }
        let Self { collectives, meeting, .. } = self;
        meeting.barrier()?;
        Ok(collectives.close()?)
    }

    fn row(&mut self, kind: Kind, bytes: usize) -> Outcome {
        let calls = match bytes >> 20 {
            0 | 1 => 100,
            ..=64 => 20,
            _ => 4,
        };
        for output in &self.outputs {
            output.fill(0, bytes.min(COMPARED), 0xee)?;
        }
        let ours = self.time(calls, |rank| rank.ours(kind, bytes))?;
        let theirs = self.time(calls, |rank| rank.theirs(kind, bytes))?;
        let same = self.same(kind, bytes)?;
        let all = self.meeting.all_gather(&[u8::from(same)])?;
        if self.collectives.rank() == 0 {
            let speed = |us: f64| kind.wire(bytes, self.collectives.ranks()) / us / 1e3;
            println!(
                "{:<22}{bytes:>11} B   ours {ours:>9.1} us {:>6.1} GB/s   NCCL {theirs:>9.1} us {:>6.1} GB/s   ours/NCCL {:.2}   {}",
                kind.name(),
                speed(ours),
                speed(theirs),
                ours / theirs,
                if all.concat().iter().all(|&one| one == 1) { "same bits" } else { "other bits" },
            );
        }
        Ok(())
    }

    /// Microseconds of a call: of the slowest rank, median of several runs.
    fn time(&mut self, calls: usize, call: impl Fn(&mut Self) -> Outcome) -> Outcome<f64> {
        let mut times = Vec::new();
        for run in 0..=RUNS {
            self.meeting.barrier()?;
            self.record(0)?;
            for _ in 0..calls {
                call(self)?;
            }
            self.record(1)?;
            let mine = self.elapsed()? / calls as f64;
            let all = self.meeting.all_gather(&mine.to_le_bytes())?;
            let each =
                all.iter().filter_map(|bytes| bytes.first_chunk().map(|eight| f64::from_le_bytes(*eight)));
            // The first one wakes everything up.
            if run > 0 {
                times.push(each.fold(0.0, f64::max));
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn ours(&mut self, kind: Kind, bytes: usize) -> Outcome {
        let ranks = self.collectives.ranks();
        let [given, got] = kind.elements(bytes / 2, ranks);
        // SAFETY: the memory has these elements, and is used by calls on one stream only, which are waited for before anything else happens to it.
        let input = unsafe { self.input.view(0, DType::Bf16, [1, given])? };
        // SAFETY: as above.
        let mut output = unsafe { self.outputs[0].view_mut(0, DType::Bf16, [1, got])? };
        match kind {
            Kind::ReduceScatter => {
                // SAFETY: as above.
                let input = unsafe { self.input.view(0, DType::Bf16, [ranks, given / ranks])? };
                self.collectives.reduce_scatter(input, output)?;
            }
            Kind::AllReduce => drop(self.collectives.all_reduce(input, output)?),
            Kind::AllGather | Kind::AllGatherSymmetric => {
                let address = match kind {
                    Kind::AllGather => self.outputs[0].address(),
                    _ => self.collectives.tensors().ok_or("no symmetric memory")?.start,
                };
                // SAFETY: as above; the memory for tensors is this rank's, and holds as much.
                output = unsafe {
                    let shape = [ranks, got / ranks];
                    TensorMut::from_raw(address, Space::Device, DType::Bf16, shape, [shape[1] as isize, 1])?
                };
                self.collectives.all_gather(input, output)?;
            }
        }
        Ok(())
    }

    fn theirs(&mut self, kind: Kind, bytes: usize) -> Outcome {
        let _bound = self.context.bind()?;
        let [given, got] = kind.elements(bytes / 2, self.collectives.ranks());
        let from = ptr::without_provenance::<c_void>(self.input.address() as usize);
        let to = ptr::without_provenance_mut::<c_void>(self.outputs[1].address() as usize);
        let (bf16, sum) = (ncclDataType_t::ncclBfloat16, ncclRedOp_t::ncclSum);
        let (nccl, comm, stream) = (self.nccl, self.comm, self.stream.cast());
        // SAFETY: communicator and stream are this rank's, and of the device whose context is current; the memory has these elements.
        let result = unsafe {
            match kind {
                Kind::ReduceScatter => nccl.ncclReduceScatter(from, to, got, bf16, sum, comm, stream),
                Kind::AllReduce => nccl.ncclAllReduce(from, to, got, bf16, sum, comm, stream),
                Kind::AllGather | Kind::AllGatherSymmetric => {
                    nccl.ncclAllGather(from, to, given, bf16, comm, stream)
                }
            }
        }?;
        check(result)
    }

    /// Whether both have the same bits, as far as they are compared.
    fn same(&self, kind: Kind, bytes: usize) -> Outcome<bool> {
        let [_, got] = kind.elements(bytes / 2, self.collectives.ranks());
        let mut both = [vec![0; (2 * got).min(COMPARED)], vec![0; (2 * got).min(COMPARED)]];
        self.outputs[1].read(0, &mut both[1])?;
        if kind == Kind::AllGatherSymmetric {
            let start = self.collectives.tensors().ok_or("no symmetric memory")?.start;
            let shape = [1, both[0].len()];
            // SAFETY: this rank's memory for tensors; all calls have run, on all ranks.
            let view = unsafe {
                let strides = [shape[1] as isize, 1];
                deepep_core::tensor::TensorRef::from_raw(start, Space::Device, DType::U8, shape, strides)?
            };
            both[0] = deepep_core::device::read(self.collectives.device(), view)?;
        } else {
            self.outputs[0].read(0, &mut both[0])?;
        }
        Ok(both[0] == both[1])
    }

    fn record(&self, event: usize) -> Outcome {
        let _bound = self.context.bind()?;
        // SAFETY: event and stream belong to the current context.
        unsafe { self.context.device().cuda().driver().cuEventRecord(self.events[event], self.stream) }?;
        Ok(())
    }

    /// Microseconds between the two events, once the second has been reached.
    fn elapsed(&self) -> Outcome<f64> {
        let _bound = self.context.bind()?;
        let driver = self.context.device().cuda().driver();
        let end = Instant::now() + PATIENCE;
        // SAFETY: the event was recorded.
        while let Err(error) = unsafe { driver.cuEventQuery(self.events[1]) } {
            if error.status() != Some(CUresult::CUDA_ERROR_NOT_READY) || Instant::now() > end {
                return Err(error.into());
            }
            std::hint::spin_loop();
        }
        let mut milliseconds = 0_f32;
        // SAFETY: both events were recorded, and have been reached.
        unsafe { driver.cuEventElapsedTime(&mut milliseconds, self.events[0], self.events[1]) }?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

fn check(result: ncclResult_t) -> Outcome {
    if result == ncclResult_t::ncclSuccess { Ok(()) } else { Err(format!("NCCL says {result:?}").into()) }
}
