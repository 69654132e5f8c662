//! Collectives: which kernel, with how many blocks, and its launch.

use cuda_vmm::Context;
use cuda_vmm::sys::CUstream;

use super::grid::Limits;
use super::module::Kernels;
use super::{EngineOptions, LaunchShape, Manner, describe, domain, launch, supply};
use crate::error::{Error, Result};
use crate::jit::params::{CollectiveParams, Domain, MultimemBarrierParams};
use crate::jit::{BARRIER_THREADS, Collective, CollectiveKind, Element, Program, THREADS, Way};
use crate::layout::{COLLECTIVE_BLOCKS, CollectiveConfig, CollectiveLayout, align_up};
use crate::tune::CollectiveLimits;

/// Chunks that a block has at least to move, so that the steps of one overlap with the copies of another.
const CHUNKS: usize = 4;
/// Shortest chunk: one vector a thread.
const MIN_CHUNK: usize = THREADS * 16;

/// One rank's device, and what its collectives need to know.
pub(crate) struct CollectiveEngine {
    context: Context,
    layout: CollectiveLayout,
    domain: Domain,
    multicast: u64,
    limits: Limits,
    ways: CollectiveLimits,
    manner: Manner,
    kernels: Kernels,
}

/// A collective on this rank's tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectiveLaunch {
    pub(crate) kind: CollectiveKind,
    /// What is added; all-gather moves bytes.
    pub(crate) element: Element,
    /// Addresses of the tensors, multiples of the element's size.
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// All-gather: bytes that a rank gives. Reduce-scatter: bytes that a rank gets. All-reduce: bytes of either.
    pub(crate) bytes: usize,
    /// Of everything that must be equal on all ranks.
    pub(crate) digest: u32,
    /// Instead of what suits the size best.
    pub(crate) way: Option<Way>,
}

impl CollectiveEngine {
    /// An engine for `rank`, whose device owns `context`. `heap[r]` is the address of rank r's heap as this device sees it, `status` that of this
    /// rank's status block, and `multicast` the address behind which all heaps lie, if there is one.
    ///
    /// # Safety
    /// Every heap has the layout `layout`, is mapped for reading and writing on this device as long as the engine and work that it enqueued
    /// exist, and was zeroed before any rank's first operation; so is the multicast address. The status block is zeroed, and this
    /// device can write it.
    pub(crate) unsafe fn new(
        context: Context,
        layout: CollectiveLayout,
        rank: usize,
        heap: &[u64],
        multicast: Option<u64>,
        status: u64,
        options: EngineOptions,
    ) -> Result<Self> {
        if heap.len() != layout.config.ranks || rank >= heap.len() {
            let need = format!("there are {} ranks and {} heaps", layout.config.ranks, heap.len());
            return Err(Error::invalid("rank", rank, need));
        }
        let (arch, limits) = describe(&context, options.max_blocks)?;
        let supply = supply(&context, options.nvrtc, options.cache);
        let kernels = Kernels::new(context.clone(), arch, 0, supply);
        let domain = domain(&layout.workspace, rank, heap, status, options.timeout);
        let multicast = multicast.unwrap_or(0);
        let manner = Manner { cooperative: options.cooperative, early: false };
        let ways = CollectiveLimits::DEFAULT;
        Ok(Self { context, layout, domain, multicast, limits, ways, manner, kernels })
    }

    /// The same engine, changing its ways at other sizes.
    pub(crate) fn with_ways(mut self, ways: CollectiveLimits) -> Self {
        self.ways = ways;
        self
    }

    /// Compiles and loads everything that calls can need, so that no later call does. All ranks do so at the same time.
    pub(crate) fn prewarm(&self) -> Result<()> {
        let rank = self.domain.rank as usize;
        let ranks = self.layout.config.ranks;
        self.kernels.load_all(&programs(ranks, self.multicast != 0), rank, ranks)
    }

    /// Enqueues a collective. All ranks make the same calls in the same order.
    ///
    /// # Safety
    /// The engine's context is current, and `stream` one of its streams, on which its operations are ordered. The tensors have the sizes that the call says, on this
    /// rank and on all others, and outlive the kernel.
    pub(crate) unsafe fn run(&self, call: &CollectiveLaunch, stream: CUstream) -> Result<()> {
        if call.bytes == 0 {
            return Ok(());
        }
        let config = &self.layout.config;
        let way = call.way.unwrap_or_else(|| choose(call.kind, config, self.ways, call.bytes));
        if way == Way::Cells && call.bytes > config.cell_bytes {
            let need = format!("at most {} travel in cells", config.cell_bytes);
            return Err(Error::invalid("bytes of a collective", call.bytes, need));
        }
        let kernel =
            self.kernels.get(program(call.kind, call.element, way, config.ranks, self.multicast != 0))?;
        let Geometry { blocks, chunk } = Geometry::new(way, call.bytes, self.limits.blocks, config.slice);
        let params = CollectiveParams {
            chunk: chunk as u32,
            ..self.params(call.input, call.output, call.bytes, call.digest)
        };
        let shape = LaunchShape { blocks, threads: THREADS, shared_bytes: 0 };
        // SAFETY: the parameters are those of the collectives' kernels; the caller vouches for stream and tensors, and whoever made the
        // engine for the memory.
        unsafe { launch(&self.context, self.manner, "a collective", &kernel, shape, &params, stream) }
    }

    /// Enqueues a meeting of all ranks, in which they compare what they call: when it has run, so has what each of them enqueued before.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn meet(&self, digest: u32, stream: CUstream) -> Result<()> {
        let kernel = self.kernels.get(Program::Meet { ranks: self.layout.config.ranks })?;
        let params = self.params(0, 0, 0, digest);
        let shape = LaunchShape { blocks: 1, threads: BARRIER_THREADS, shared_bytes: 0 };
        // SAFETY: as in `run`; the kernel uses none of the tensors.
        unsafe { launch(&self.context, self.manner, "a meeting", &kernel, shape, &params, stream) }
    }

    fn params(&self, input: u64, output: u64, bytes: usize, digest: u32) -> CollectiveParams {
        let l = &self.layout;
        CollectiveParams {
            domain: self.domain,
            input,
            output,
            bytes: bytes as u64,
            multicast: self.multicast,
            flags: l.flags as u64,
            steps: l.steps as u64,
            epochs: l.epochs as u64,
            calls: l.calls as u64,
            call_count: l.call_count as u64,
            cells: l.cells as u64,
            stages: l.stages as u64,
            cell_count: l.cell_count() as u32,
            slice: l.config.slice as u32,
            chunk: 0,
            digest,
        }
    }

    /// Enqueues another meeting, after one in which the ranks have compared what they call.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn meet_again(&self, digest: u32, stream: CUstream) -> Result<()> {
        if self.multicast == 0 {
            // SAFETY: the caller's promise.
            return unsafe { self.meet(digest, stream) };
        }
        let kernel = self.kernels.get(Program::MultimemBarrier { ranks: self.layout.config.ranks })?;
        let params = MultimemBarrierParams {
            domain: self.domain,
            multicast: self.multicast,
            words: self.layout.words as u64,
            count: self.layout.count as u64,
        };
        let shape = LaunchShape { blocks: 1, threads: BARRIER_THREADS, shared_bytes: 0 };
        // SAFETY: as in `run`.
        unsafe { launch(&self.context, self.manner, "a barrier", &kernel, shape, &params, stream) }
    }
}

/// The kernel for a way. What is the same for all elements, or with and without multicast, is compiled once.
fn program(kind: CollectiveKind, element: Element, way: Way, ranks: usize, multicast: bool) -> Program {
    let element = if kind == CollectiveKind::AllGather { Element::F32 } else { element };
    let sends_to_all = kind != CollectiveKind::ReduceScatter || way != Way::Cells;
    Program::Collective(Collective { kind, ranks, way, element, multicast: multicast && sends_to_all })
}

/// Every kernel that calls of `ranks` ranks can need.
fn programs(ranks: usize, multicast: bool) -> Vec<Program> {
    use CollectiveKind as Kind;
    let mut all = vec![Program::Meet { ranks }];
    if multicast {
        all.push(Program::MultimemBarrier { ranks });
    }
    for kind in [Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce] {
        for element in Element::ALL {
            for way in [Way::Cells, Way::OneShot, Way::TwoShot] {
                let exists = way != Way::TwoShot || kind == Kind::AllReduce;
                let program = program(kind, element, way, ranks, multicast);
                if exists && !all.contains(&program) {
                    all.push(program);
                }
            }
        }
    }
    all
}

/// The way that suits a size. Without multicast, which changes little at the sizes that it is about, a rank stores cells once for every other.
fn choose(kind: CollectiveKind, config: &CollectiveConfig, ways: CollectiveLimits, bytes: usize) -> Way {
    let CollectiveConfig { ranks, cell_bytes, .. } = *config;
    if bytes <= (ways.cells / (ranks - 1)).min(cell_bytes) {
        Way::Cells
    } else if kind == CollectiveKind::AllReduce && ranks > 2 && bytes > ways.one_shot {
        Way::TwoShot
    } else {
        Way::OneShot
    }
}

/// Blocks, and bytes that each moves at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    blocks: usize,
    chunk: usize,
}

impl Geometry {
    fn new(way: Way, bytes: usize, available: usize, slice: usize) -> Self {
        let most = available.clamp(1, COLLECTIVE_BLOCKS);
        if way == Way::Cells {
            // A thread has eight bytes at a time.
            return Self { blocks: bytes.div_ceil(8 * THREADS).clamp(1, most), chunk: 16 };
        }
        let chunk = align_up(bytes.div_ceil(most * CHUNKS), 4096).clamp(MIN_CHUNK.min(slice), slice);
        Self { blocks: bytes.div_ceil(chunk).clamp(1, most), chunk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_chooses_the_way() {
        use CollectiveKind::{AllGather, AllReduce, ReduceScatter};
        for (kind, ranks, bytes, way) in [
            (AllReduce, 2, 8, Way::Cells),
            (AllReduce, 2, 1 << 20, Way::Cells),
            (AllReduce, 2, 2 << 20, Way::OneShot),
            (AllReduce, 2, 1 << 30, Way::OneShot),
            (AllReduce, 4, 256 << 10, Way::Cells),
            (AllReduce, 8, 160 << 10, Way::OneShot),
            (AllReduce, 8, 1 << 20, Way::TwoShot),
            (AllGather, 8, 16 << 10, Way::Cells),
            (AllGather, 8, 1 << 30, Way::OneShot),
            (ReduceScatter, 8, 128 << 10, Way::Cells),
            (ReduceScatter, 8, 1 << 30, Way::OneShot),
        ] {
            let config = CollectiveConfig::new(ranks);
            let chosen = choose(kind, &config, CollectiveLimits::DEFAULT, bytes);
            assert_eq!(chosen, way, "{kind:?} {ranks} {bytes}");
        }
        // No more cells than there are, whatever the limit; and no fewer than the limit says.
        let config = CollectiveConfig { cell_bytes: 512, ..CollectiveConfig::new(2) };
        let ways = CollectiveLimits::DEFAULT.one_shot(1 << 20);
        assert_eq!(choose(AllReduce, &config, ways, 512), Way::Cells);
        assert_eq!(choose(AllReduce, &config, ways, 516), Way::OneShot);
        assert_eq!(choose(AllReduce, &config, ways.cells(100), 104), Way::OneShot);
        let four = CollectiveConfig::new(4);
        assert_eq!(choose(AllReduce, &four, ways, 1 << 20), Way::OneShot);
        assert_eq!(choose(AllReduce, &four, ways, (1 << 20) + 4), Way::TwoShot);
    }

    #[test]
    fn every_kernel_that_is_needed_is_one_that_there_is() {
        for ranks in [2, 8] {
            let all = Program::all(ranks);
            for (multicast, count) in [(false, 1 + 2 + 6 + 9), (true, 2 + 2 + 6 + 9)] {
                let needed = programs(ranks, multicast);
                assert_eq!(needed.len(), count, "{needed:?}");
                assert!(needed.iter().all(|program| all.contains(program)), "{needed:?}");
            }
        }
    }

    #[test]
    fn chunks_fit_and_every_block_has_work() {
        for slice in [128, 128 << 10] {
            for bytes in [1, 4096, 100_000, 1 << 20, (1 << 30) + 1] {
                for available in [1, 16, 132] {
                    let Geometry { blocks, chunk } = Geometry::new(Way::OneShot, bytes, available, slice);
                    assert!(chunk <= slice && chunk % 16 == 0 && chunk > 0, "{chunk}");
                    assert!((1..=COLLECTIVE_BLOCKS.min(available)).contains(&blocks));
                    assert!(bytes > (blocks - 1) * chunk, "{bytes} {blocks} {chunk}");
                }
            }
        }
        assert_eq!(
            Geometry::new(Way::OneShot, 1 << 30, 132, 128 << 10),
            Geometry { blocks: 64, chunk: 128 << 10 }
        );
        assert_eq!(Geometry::new(Way::Cells, 8, 132, 128 << 10).blocks, 1);
        assert_eq!(Geometry::new(Way::Cells, 1 << 20, 132, 128 << 10).blocks, 64);
    }
}
