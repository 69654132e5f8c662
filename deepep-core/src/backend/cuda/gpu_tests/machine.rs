//! GPUs of this machine, and groups of ranks on them in this one process.

use std::time::{Duration, Instant};

use cuda_vmm::sys::{CUdevice_attribute, CUevent, CUresult, CUstream};
use cuda_vmm::{Context, Cuda, Memory, PeerAccess, PlainMemory};

use super::super::{CombineChoices, DispatchRoles, Engine, EngineOptions, StatusBlock};
use crate::jit::Alter;
use crate::layout::{HeapConfig, HeapLayout, Operation, Phase, RecordKind};
use crate::tune::EARLY_LAUNCH;

/// Longest wait of a kernel; the host waits three times as long for all kernels of a round. `DEEPEP_TEST_TIMEOUT` is for tools that slow
/// kernels down, in seconds.
fn kernel_timeout() -> Duration {
    Duration::from_secs(super::numbers("DEEPEP_TEST_TIMEOUT", &[4])[0] as u64)
}

/// Whether kernels are launched early where so many ranks share a device: as the library does, unless `DEEPEP_TEST_EARLY` says 0 or 1.
pub(super) fn early(sharing: usize) -> Outcome<bool> {
    match super::numbers("DEEPEP_TEST_EARLY", &[usize::from(EARLY_LAUNCH && sharing == 1)])[0] {
        1 if sharing > 1 => {
            Err("DEEPEP_TEST_EARLY: kernels are launched early on devices with one rank only".into())
        }
        wanted => Ok(wanted == 1),
    }
}

pub(super) type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

pub(super) struct Machine {
    contexts: Vec<Context>,
    _access: Vec<PeerAccess>,
}

impl Machine {
    /// The GPUs, or the reason why there are none.
    pub(super) fn find() -> Outcome<Result<Self, String>> {
        let cuda = match Cuda::get() {
            Ok(cuda) => cuda,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let contexts: Vec<Context> =
            cuda.devices()?.iter().map(|d| d.primary_context()).collect::<Result<_, _>>()?;
        if contexts.is_empty() {
            return Ok(Err("the driver shows no device".into()));
        }
        let mut access = Vec::new();
        for (i, from) in contexts.iter().enumerate() {
            for (j, to) in contexts.iter().enumerate() {
                if i != j && from.device().can_access(to.device())? {
                    access.push(from.enable_peer_access(to)?);
                }
            }
        }
        Ok(Ok(Self { contexts, _access: access }))
    }

    pub(super) fn devices(&self) -> usize {
        self.contexts.len()
    }

    /// One of `sharing` shares of a rank's device, in multiprocessors, with some left over: all blocks of all its ranks must be resident.
    pub(super) fn share(&self, rank: usize, sharing: usize) -> Outcome<usize> {
        let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let all = usize::try_from(self.context(rank).device().attribute(count)?)?;
        // Of 132, 120.
        Ok((all * 10 / 11 / sharing).max(1))
    }

    /// The context of a rank's device.
    pub(super) fn context(&self, rank: usize) -> &Context {
        &self.contexts[rank % self.contexts.len()]
    }
}

/// Device memory with its contents' length.
pub(super) struct Buffer {
    memory: PlainMemory,
    /// Where it begins in the memory.
    front: usize,
}

impl Buffer {
    pub(super) fn new(context: &Context, bytes: usize) -> Outcome<Self> {
        Self::behind(context, 0, bytes)
    }

    /// With so many bytes of the same memory in front of it.
    fn behind(context: &Context, front: usize, bytes: usize) -> Outcome<Self> {
        Ok(Self { memory: PlainMemory::new(context, front + bytes.max(256))?, front })
    }

    /// The memory, with what is in front of the buffer.
    pub(super) fn memory(&self) -> &PlainMemory {
        &self.memory
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.address().get() + self.front as u64
    }

    pub(super) fn write(&self, bytes: &[u8]) -> Outcome {
        self.write_at(0, bytes)
    }

    pub(super) fn write_at(&self, offset: usize, bytes: &[u8]) -> Outcome {
        if !bytes.is_empty() {
            self.memory.context().upload(&self.memory, self.front + offset, bytes)?;
        }
        Ok(())
    }

    pub(super) fn fill(&self, offset: usize, length: usize, value: u8) -> Outcome {
        if length > 0 {
            self.memory.context().fill(&self.memory, self.front + offset, length, value)?;
        }
        Ok(())
    }

    pub(super) fn read(&self, offset: usize, length: usize) -> Outcome<Vec<u8>> {
        let mut bytes = super::parallel::bytes(length);
        if length > 0 {
            self.memory.context().download(&self.memory, self.front + offset, &mut bytes)?;
        }
        Ok(bytes)
    }
}

pub(super) struct Rank {
    pub(super) engine: Engine,
    pub(super) status: StatusBlock,
    pub(super) heap: Buffer,
    pub(super) stream: CUstream,
    pub(super) context: Context,
}

impl Rank {
    pub(super) fn event(&self) -> Outcome<CUevent> {
        let _bound = self.context.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is valid for one write; a context is current. Left to the context's end: this is a test.
        unsafe { self.context.device().cuda().driver().cuEventCreate(&mut event, 0) }?;
        Ok(event)
    }

    pub(super) fn record(&self, event: CUevent) -> Outcome {
        let _bound = self.context.bind()?;
        // SAFETY: event and stream belong to this context.
        unsafe { self.context.device().cuda().driver().cuEventRecord(event, self.stream) }?;
        Ok(())
    }

    pub(super) fn microseconds(&self, from: CUevent, to: CUevent) -> Outcome<f64> {
        let _bound = self.context.bind()?;
        let mut ms = 0f32;
        // SAFETY: both events were recorded and have completed.
        unsafe { self.context.device().cuda().driver().cuEventElapsedTime(&mut ms, from, to) }?;
        Ok(f64::from(ms) * 1e3)
    }

    /// Overwrites memory in stream order, for example to empty the L2 cache.
    pub(super) fn overwrite(&self, address: u64, bytes: usize) -> Outcome {
        let _bound = self.context.bind()?;
        let driver = self.context.device().cuda().driver();
        // SAFETY: callers name memory of a buffer that is alive until the stream has been waited for.
        unsafe { driver.cuMemsetD8Async(address, 0, bytes, self.stream) }?;
        Ok(())
    }
}

/// Ranks 0..R on the machine's devices, in turn.
pub(super) struct Group {
    pub(super) ranks: Vec<Rank>,
    pub(super) layout: HeapLayout,
}

impl Group {
    pub(super) fn new(
        machine: &Machine,
        config: &HeapConfig,
        blocks: usize,
        combine: CombineChoices,
        dispatch_roles: Option<DispatchRoles>,
        alter: Option<Alter>,
    ) -> Outcome<Self> {
        let layout = HeapLayout::new(config)?;
        let devices = machine.devices();
        let context = |r: usize| &machine.contexts[r % devices];
        let mut heaps = Vec::new();
        for r in 0..layout.ranks {
            // Marks of a timeline, if kernels are altered to make them.
            let front = if alter.is_some() { super::timeline::BYTES } else { 0 };
            let heap = Buffer::behind(context(r), front, layout.bytes)?;
            heap.fill(0, layout.bytes, 0xa5)?;
            heap.fill(0, layout.workspace.bytes, 0)?;
            heaps.push(heap);
        }
        let bases: Vec<u64> = heaps.iter().map(Buffer::address).collect();
        let sharing = layout.ranks.div_ceil(devices);
        let early = early(sharing)?;
        let mut ranks = Vec::new();
        for (r, heap) in heaps.into_iter().enumerate() {
            let context = context(r).clone();
            let status = StatusBlock::new(&context, layout.status)?;
            let share = machine.share(r, sharing)?;
            let options = EngineOptions {
                timeout: kernel_timeout(),
                max_blocks: match (blocks, sharing) {
                    (0, 1) => 0,
                    (0, _) => share,
                    (b, _) => b.min(share),
                },
                // Kernels of which the driver starts one at a time are not early.
                cooperative: match std::env::var("DEEPEP_TEST_COOPERATIVE") {
                    Ok(value) => value == "1",
                    Err(_) => sharing == 1 && !early,
                },
                early,
                combine,
                dispatch_roles,
                alter,
                ..EngineOptions::default()
            };
            // SAFETY: every heap has this layout, is reachable from all devices (peer access is enabled where devices differ),
            // its workspace was zeroed, and the group keeps heaps and engines together; the status block has the layout's form.
            let engine =
                unsafe { Engine::new(context.clone(), layout, r, &bases, status.device_address(), options) }?;
            let _bound = context.bind()?;
            let mut stream = std::ptr::null_mut();
            // SAFETY: `stream` is valid for one write; flag 1 makes it independent of the default stream. Destroyed in Drop.
            unsafe { context.device().cuda().driver().cuStreamCreate(&mut stream, 1) }?;
            drop(_bound);
            ranks.push(Rank { engine, status, heap, stream, context });
        }
        Ok(Self { ranks, layout })
    }

    /// Waits for all streams, then looks for reports.
    pub(super) fn wait(&self) -> Outcome {
        let longest = 3 * kernel_timeout();
        let deadline = Instant::now() + longest;
        let mut late = false;
        for rank in &self.ranks {
            loop {
                let _bound = rank.context.bind()?;
                // SAFETY: the stream is this rank's own.
                match unsafe { rank.context.device().cuda().driver().cuStreamQuery(rank.stream) } {
                    Ok(()) => break,
                    Err(e) if e.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => {}
                    Err(e) => return Err(format!("{e}; {}", self.reports()).into()),
                }
                if Instant::now() > deadline {
                    late = true;
                    break;
                }
                std::hint::spin_loop();
            }
        }
        let reports = self.reports();
        if late {
            return Err(format!("kernels still run after {longest:?}; {reports}").into());
        }
        if !reports.is_empty() { Err(reports.into()) } else { Ok(()) }
    }

    /// Abort records of all ranks.
    pub(super) fn reports(&self) -> String {
        let mut text = String::new();
        for (r, rank) in self.ranks.iter().enumerate() {
            if let Some(report) = rank.status.report(RecordKind::Abort) {
                let operation = Operation::from_code(report.operation).map_or("?", Operation::describe);
                let phase = Phase::from_code(report.phase).map_or("?", Phase::describe);
                text += &format!("[rank {r}: {operation}, {phase}: {report:?}] ");
            }
        }
        text
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by the group, destroyed once.
            let _ = unsafe { self.context.device().cuda().driver().cuStreamDestroy(self.stream) };
        }
    }
}
