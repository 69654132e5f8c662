//! Operations on a GPU: kernels of this crate on the caller's stream.
//!
//! [`CudaBackend`] takes calls, enqueues them through its [`Queue`](queue::Queue) and reads what kernels report. [`Engine`] knows one rank's
//! device, its kernels and the heaps of all ranks; it works on addresses, and who owns what lies there is settled above it. A call waits for
//! nothing unless exact counts are asked for, and without them can be captured in a CUDA graph.

mod backend;
mod collective;
mod collective_backend;
mod combine;
mod combine_grid;
mod copy;
mod dispatch;
mod events;
mod gpu;
mod grid;
mod module;
mod packets;
mod pinned;
mod plans;
mod queue;
mod reports;
mod status;
mod stream;
mod turn;
mod wait;

#[cfg(test)]
mod call_tests;
#[cfg(test)]
mod gpu_tests;
#[cfg(test)]
mod recorder;

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::{
    CUdevice_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
    CUstream, CallError,
};

pub(crate) use backend::CudaBackend;
use collective::{CollectiveEngine, CollectiveLaunch};
pub(crate) use collective_backend::{CollectiveOptions, CudaCollectives};
use combine::{CombineLaunch, CombinePlan};
use dispatch::{DispatchLaunch, DispatchPlan};
pub(crate) use gpu::{Gpu, capability, capable, require_capable, require_kernels};
use status::StatusBlock;
pub(crate) use stream::Stream;
pub(crate) use wait::{Uncaptured, until};

pub(crate) use self::combine_grid::CombineChoices;
#[cfg(test)]
pub(crate) use self::combine_grid::CombineRoles;
pub(crate) use self::grid::DispatchRoles;
use self::grid::Limits;
use self::module::{Kernel, Kernels};
use crate::error::{Error, Result};
use crate::jit::params::{BarrierParams, Domain};
use crate::jit::{Arch, BARRIER_THREADS, Cache, Program, Supply};
use crate::layout::{HeapConfig, HeapLayout, MAX_RANKS, WorkspaceLayout};

/// Settings of an [`Engine`] that have good defaults.
#[derive(Clone, Debug)]
pub(crate) struct EngineOptions {
    /// Longest wait of a kernel for a peer.
    pub(crate) timeout: Duration,
    /// Multiprocessors an operation may use at most; 0 for all. Ranks that share a device must share them out.
    pub(crate) max_blocks: usize,
    /// Launch so that the driver refuses a grid that can't be resident as a whole. Switched off where ranks of one process share a
    /// device and `max_blocks` sees to it.
    pub(crate) cooperative: bool,
    /// Launch kernels while the one before them in the stream still runs (programmatic dependent launch). Only for a rank that has the device for
    /// itself (see [`Gpu::early`]).
    pub(crate) early: bool,
    /// How combines are done, if the formula's choice is not wanted.
    pub(crate) combine: CombineChoices,
    /// What the blocks and warps of a dispatch in rows do, if the formula's choice is not wanted.
    pub(crate) dispatch_roles: Option<DispatchRoles>,
    /// NVRTC's library, if it is not to be searched for.
    pub(crate) nvrtc: Option<PathBuf>,
    /// Where compiled kernels are kept.
    pub(crate) cache: Cache,
    /// Compile kernels with this change.
    #[cfg(test)]
    pub(crate) alter: Option<crate::jit::Alter>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let (timeout, cache) = (Duration::from_secs(30), Cache::default_location());
        Self {
            timeout,
            max_blocks: 0,
            cooperative: true,
            early: false,
            combine: CombineChoices::default(),
            dispatch_roles: None,
            nvrtc: None,
            cache,
            #[cfg(test)]
            alter: None,
        }
    }
}

/// One rank's device and everything its kernels need to know.
pub(crate) struct Engine {
    context: Context,
    setting: Setting,
    manner: Manner,
    kernels: Kernels,
    barrier: Arc<Kernel>,
}

/// What plans depend on besides shapes.
pub(crate) struct Setting {
    layout: HeapLayout,
    domain: Domain,
    limits: Limits,
    combine: CombineChoices,
    dispatch_roles: Option<DispatchRoles>,
}

impl Engine {
    /// An engine for `rank`, whose device owns `context`. `heap[r]` is the address of rank r's heap as this device sees it, `status`
    /// that of this rank's status block.
    ///
    /// # Safety
    /// Every heap has the layout `layout`, is mapped for reading and writing on this device as long as the engine and work
    /// that it enqueued exist, and its workspace was zeroed before any rank's first operation. The status block has
    /// `layout.status`, is zeroed, and this device can write it.
    pub(crate) unsafe fn new(
        context: Context,
        layout: HeapLayout,
        rank: usize,
        heap: &[u64],
        status: u64,
        options: EngineOptions,
    ) -> Result<Self> {
        if heap.len() != layout.ranks || rank >= heap.len() {
            let need = format!("there are {} ranks and {} heaps", layout.ranks, heap.len());
            return Err(Error::invalid("rank", rank, need));
        }
        let (arch, limits) = describe(&context, options.max_blocks)?;
        let supply = supply(&context, options.nvrtc, options.cache);
        #[cfg(test)]
        let supply = supply.altered(options.alter);
        let kernels = Kernels::new(context.clone(), arch, limits.shared_bytes, supply);
        let barrier = kernels.get(Program::Barrier { ranks: layout.ranks })?;
        let mut domain = domain(&layout.workspace, rank, heap, status, options.timeout);
        domain.early = u32::from(options.early);
        Ok(Self {
            context,
            setting: Setting {
                layout,
                domain,
                limits,
                combine: options.combine,
                dispatch_roles: options.dispatch_roles,
            },
            manner: Manner { cooperative: options.cooperative, early: options.early },
            kernels,
            barrier,
        })
    }

    /// Every kernel that calls on this layout can need.
    pub(crate) fn programs(&self) -> Vec<Program> {
        let packets = self.setting.layout.workspace.packets.is_some();
        let needed = |program: &Program| match *program {
            Program::Barrier { .. } => true,
            Program::Dispatch { .. } => !packets,
            // Rows that are not summed before they travel do so on their own.
            Program::Combine { reduce_first, .. } => !packets || !reduce_first,
            Program::PullCombine { .. } => !packets,
            Program::PacketDispatch { .. } | Program::PacketCombine { .. } => packets,
            Program::Collective(_) | Program::Meet { .. } | Program::MultimemBarrier { .. } => false,
        };
        Program::all(self.setting.layout.ranks).into_iter().filter(needed).collect()
    }

    /// Whether calls of these shapes can be planned on this device.
    pub(crate) fn check(&self, config: &HeapConfig) -> Result<()> {
        for dispatched in &config.dispatch {
            self.setting.dispatch(dispatched)?;
            for combine in config.combine.iter().filter(|c| c.placement == dispatched.placement) {
                self.setting.combine(combine, dispatched, false)?;
                if self.setting.pulls(combine) {
                    self.setting.combine(combine, dispatched, true)?;
                }
            }
        }
        Ok(())
    }

    /// Compiles and loads kernels, so that no later call does. All ranks do so at the same time.
    pub(crate) fn prewarm(&self, programs: &[Program]) -> Result<()> {
        self.kernels.load_all(programs, self.setting.domain.rank as usize, self.setting.layout.ranks)
    }

    /// Enqueues a barrier of all ranks.
    ///
    /// # Safety
    /// The engine's context is current, and `stream` is one of its streams. Operations of the buffer are ordered on it.
    pub(crate) unsafe fn barrier(&self, stream: CUstream) -> Result<()> {
        let params = BarrierParams { domain: self.setting.domain };
        let shape = LaunchShape { blocks: 1, threads: BARRIER_THREADS, shared_bytes: 0 };
        // SAFETY: the parameters are those of the barrier kernel; the caller vouches for the stream, and whoever made the engine for
        // the memory.
        unsafe { self.launch("barrier", &self.barrier, shape, &params, stream) }
    }

    /// # Safety
    /// As [`launch`].
    unsafe fn launch<P>(
        &self,
        what: &'static str,
        kernel: &Kernel,
        shape: LaunchShape,
        params: &P,
        stream: CUstream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { launch(&self.context, self.manner, what, kernel, shape, params, stream) }
    }
}

/// Enqueues a kernel whose blocks are all resident at once.
///
/// # Safety
/// `P` is the kernel's parameter struct and what it points to outlives the kernel; the context is current, and `stream` belongs to it.
unsafe fn launch<P>(
    context: &Context,
    manner: Manner,
    what: &'static str,
    kernel: &Kernel,
    shape: LaunchShape,
    params: &P,
    stream: CUstream,
) -> Result<()> {
    let attribute = |id, value| CUlaunchAttribute { id, pad: Default::default(), value };
    let cooperative = attribute(
        CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        CUlaunchAttributeValue { cooperative: 1 },
    );
    let early = attribute(
        CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    );
    let mut attributes = if manner.cooperative { [cooperative, early] } else { [early, cooperative] };
    let config = CUlaunchConfig {
        gridDimX: shape.blocks as u32,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: shape.threads as u32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared_bytes as u32,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: u32::from(manner.cooperative) + u32::from(manner.early),
    };
    let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    let driver = context.device().cuda().driver();
    // SAFETY: config, attribute and arguments live through the call, which copies them; the kernel takes one parameter, of type P
    // (jit::params declares both sides, and the kernel asserts its size).
    unsafe {
        driver.cuLaunchKernelEx(&config, kernel.function(), arguments.as_mut_ptr(), std::ptr::null_mut())
    }
    .map_err(|source| {
        call_failed(
            format!(
                "launching {what} with {} blocks and {} B of shared memory",
                shape.blocks, shape.shared_bytes
            ),
            source,
        )
    })
}

/// Where the kernels of a context come from.
fn supply(context: &Context, nvrtc: Option<PathBuf>, cache: Cache) -> Supply {
    let supply = Supply::new(nvrtc, cache);
    #[cfg(test)]
    let supply = supply.blank_if(*context.device().cuda().driver().origin() == cuda_vmm::sys::Origin::Custom);
    #[cfg(not(test))]
    let _ = context;
    supply
}

/// What a device is and offers, with at most `max_blocks` multiprocessors; 0 for all.
fn describe(context: &Context, max_blocks: usize) -> Result<(Arch, Limits)> {
    let device = context.device();
    let attribute = |which| device.attribute(which).map(|v| usize::try_from(v).unwrap_or(0));
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared_bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let [major, minor] = gpu::capability(device)?;
    let blocks = match max_blocks {
        0 => multiprocessors,
        most => most.min(multiprocessors),
    };
    Ok((Arch::new(major, minor), Limits { blocks, shared_bytes, link: Limits::link_of(major) }))
}

/// Blocks, threads of a block, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
struct LaunchShape {
    blocks: usize,
    threads: usize,
    shared_bytes: usize,
}

/// How kernels are launched.
#[derive(Clone, Copy, Debug)]
struct Manner {
    /// The driver refuses a grid that can't be resident as a whole.
    cooperative: bool,
    /// The kernel may become resident while the one before still runs; it waits for its end before it does anything.
    early: bool,
}

fn domain(w: &WorkspaceLayout, rank: usize, heap: &[u64], status: u64, timeout: Duration) -> Domain {
    let mut bases = [0; MAX_RANKS];
    bases[..heap.len()].copy_from_slice(heap);
    Domain {
        heap: bases,
        status,
        timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
        totals: w.totals as u64,
        ready: w.ready as u64,
        done: w.done as u64,
        started: w.started as u64,
        arrived: w.arrived as u64,
        barrier: w.barrier as u64,
        abort: w.abort as u64,
        epochs: w.epochs as u64,
        tickets: w.tickets as u64,
        counts: w.counts as u64,
        chunks: w.chunks as u64,
        reported: w.reported as u64,
        cells: w.cells as u32,
        count_cells: w.count_cells as u32,
        arrived_set: w.arrived_set as u32,
        rank: rank as u32,
        ranks: heap.len() as u32,
        early: 0,
    }
}

/// A driver call that failed, as an error of this crate.
pub(crate) fn call_failed(attempt: String, cause: CallError) -> Error {
    cuda_vmm::Error::Call { attempt, cause }.into()
}
