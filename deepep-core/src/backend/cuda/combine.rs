//! Combine: what is known once, and what each call brings.

use std::sync::Arc;

use cuda_vmm::sys::CUstream;

use super::combine_grid::CombineGrid;
use super::module::Kernel;
use super::packets::PacketGrid;
use super::{Engine, LaunchShape, Setting};
use crate::backend::Readable;
use crate::error::{Error, Result};
use crate::jit::Program;
use crate::jit::params::{CombineParams, PacketCombineParams};
use crate::layout::{CombineShape, DispatchShape, Placement, SlotArray};

/// A combine of one shape: its kernel, its grid, and the arguments that don't change.
pub(crate) struct CombinePlan {
    kernel: Arc<Kernel>,
    numbers: CombineNumbers,
}

/// What a combine of one shape needs to be launched, besides its kernel.
pub(super) struct CombineNumbers {
    shape: CombineShape,
    pull: bool,
    form: Form,
    params: CombineParams,
    handles: SlotArray,
}

/// How rows travel.
#[derive(Clone, Copy)]
enum Form {
    Rows(CombineGrid),
    Packets(PacketGrid),
}

/// The parameter struct of a kernel.
#[allow(clippy::large_enum_variant)] // Lives for one launch.
pub(super) enum CombineArguments {
    Rows(CombineParams),
    Packets(PacketCombineParams),
}

/// What one call brings. Addresses are this device's, rows contiguous and 16-byte aligned; 0 where the call has none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CombineLaunch {
    /// Received rows, after the experts.
    pub(crate) x: u64,
    /// Where peers read them, if the plan is to pull.
    pub(crate) pull: Option<Readable>,
    /// `f32[received tokens, K]` (plain) or `f32[rows]` (expanded).
    pub(crate) weights: u64,
    /// `[tokens]` rows each; the second only with the first.
    pub(crate) biases: [u64; 2],
    /// `[tokens]` rows.
    pub(crate) out: u64,
    /// `f32[tokens, K]`; only with weights.
    pub(crate) out_weights: u64,
    pub(crate) tokens: usize,
    pub(crate) handle_slot: usize,
    /// Digest of what must be equal on all ranks.
    pub(crate) digest: u32,
}

impl Setting {
    /// The numbers of combines of one shape, of what dispatches of shape `dispatched` received. `pull`: rows are read where they are.
    pub(super) fn combine(
        &self,
        shape: &CombineShape,
        dispatched: &DispatchShape,
        pull: bool,
    ) -> Result<CombineNumbers> {
        let receive = self.layout.fits_combine(shape)?;
        let (_, handle) = self.layout.fits_dispatch(dispatched)?;
        if dispatched.placement != shape.placement || dispatched.topk != shape.topk {
            let need = format!(
                "must be that of the dispatch, {:?} with top-{}",
                dispatched.placement, dispatched.topk
            );
            return Err(Error::invalid("combine shape", format!("{shape:?}"), need));
        }
        if pull && !self.pulls(shape) {
            let need = "rows are pulled in the plain layout, by several ranks, without packets";
            return Err(Error::invalid("combine shape", format!("{shape:?}"), need));
        }
        let form = match &self.layout.workspace.packets {
            Some(packets) if sums(shape) => {
                Form::Packets(PacketGrid::combine(shape, dispatched.experts, self.limits, packets))
            }
            _ => Form::Rows(CombineGrid::new(
                shape,
                self.limits,
                self.combine,
                pull,
                self.layout.most_sum_parts(shape),
            )?),
        };
        let sets = &self.layout.receive;
        let params = CombineParams {
            domain: self.domain,
            source: handle.source as u64,
            lane_row: handle.lane_row as u64,
            topk: handle.topk as u64,
            sent_row: handle.sent_row as u64,
            own_row: handle.own_row as u64,
            rank_psum: handle.rank_psum as u64,
            lane_place: handle.lane_place as u64,
            receive: sets.offset as u64,
            receive_stride: sets.stride as u64,
            receive_weights: receive.weights as u64,
            read: self.layout.workspace.read as u64,
            max_tokens: shape.max_tokens as u32,
            lanes: shape.topk as u32,
            local_experts: dispatched.local_experts() as u32,
            row_bytes: shape.row_bytes as u32,
            sets: sets.count as u32,
            by_lane: u32::from(shape.by_lane()),
            ..CombineParams::default()
        };
        let params = match form {
            Form::Rows(grid) => CombineParams {
                row_warps: grid.row_warps as u32,
                stages: grid.stages as u32,
                stage_bytes: grid.stage_bytes as u32,
                reducers: grid.reducers as u32,
                batches: grid.batches as u32,
                batch_bytes: grid.batch_bytes as u32,
                sender_batches: grid.sender_batches as u32,
                sender_batch_bytes: grid.sender_batch_bytes as u32,
                share_bytes: grid.share_bytes as u32,
                rings: grid.rings as u32,
                control: grid.control as u32,
                pulled: grid.pulled as u32,
                parts: grid.parts as u32,
                ..params
            },
            Form::Packets(_) => params,
        };
        Ok(CombineNumbers { shape: *shape, pull, form, params, handles: self.layout.handles })
    }

    /// Whether rows of such combines can be pulled.
    pub(super) fn pulls(&self, shape: &CombineShape) -> bool {
        shape.ranks > 1 && shape.placement == Placement::Plain && self.layout.workspace.packets.is_none()
    }
}

/// One row travels for each token and rank.
fn sums(shape: &CombineShape) -> bool {
    shape.sums() || shape.placement == Placement::Plain
}

impl CombineNumbers {
    /// The kernel that runs it.
    pub(super) fn program(&self) -> Program {
        let CombineShape { ranks, placement, .. } = self.shape;
        match self.form {
            Form::Rows(_) if self.pull => Program::PullCombine { ranks },
            Form::Rows(_) => Program::Combine { ranks, placement, reduce_first: sums(&self.shape) },
            Form::Packets(_) => Program::PacketCombine { ranks, placement, sizes: None },
        }
    }

    /// The kernel that is made for these sizes, if there is one.
    pub(super) fn program_for_sizes(&self) -> Option<Program> {
        let CombineShape { ranks, placement, .. } = self.shape;
        match self.form {
            Form::Rows(_) => None,
            Form::Packets(grid) => {
                grid.sizes().map(|sizes| Program::PacketCombine { ranks, placement, sizes: Some(sizes) })
            }
        }
    }

    /// Grid and arguments of a call.
    pub(super) fn call(&self, call: &CombineLaunch) -> (LaunchShape, CombineArguments) {
        let domain = &self.params.domain;
        let own = domain.heap[domain.rank as usize];
        let readable = call.pull.unwrap_or(Readable { x: 0, weights: 0 });
        let params = CombineParams {
            x: call.x,
            weights: call.weights,
            bias0: call.biases[0],
            bias1: call.biases[1],
            out: call.out,
            out_weights: call.out_weights,
            handle: own + self.handles.at(call.handle_slot) as u64,
            readable_x: readable.x,
            readable_weights: readable.weights,
            tokens: call.tokens as u32,
            call: call.digest,
            ..self.params
        };
        match self.form {
            Form::Rows(grid) => {
                let (blocks, threads, shared_bytes) = (grid.blocks, grid.threads, grid.shared_bytes);
                let drawn = u32::from(grid.draws(call.tokens));
                let params = CombineParams { drawn, ..params };
                (LaunchShape { blocks, threads, shared_bytes }, CombineArguments::Rows(params))
            }
            Form::Packets(grid) => (grid.launch(), CombineArguments::Packets(grid.combine_params(params))),
        }
    }
}

impl Engine {
    /// Prepares a combine of what dispatches of shape `dispatched` received, whose rows are sent or (`pull`) read where they are.
    pub(crate) fn plan_combine(
        &self,
        shape: &CombineShape,
        dispatched: &DispatchShape,
        pull: bool,
    ) -> Result<CombinePlan> {
        let numbers = self.setting.combine(shape, dispatched, pull)?;
        let kernel = self.kernels.best(numbers.program_for_sizes(), numbers.program())?;
        Ok(CombinePlan { kernel, numbers })
    }

    /// Enqueues a combine.
    ///
    /// # Safety
    /// The plan is this engine's, whose context is current. Addresses are valid on this device for what [`CombineLaunch`] says until the kernel has
    /// ended. The handle slot was filled by a dispatch of the plan's shape with the same number of tokens, x has every row that it
    /// names and lies in this rank's heap where [`CombineLaunch::pull`] says (which is there if and only if the plan pulls), and `stream` belongs to the engine's context, with the buffer's operations ordered on it.
    pub(crate) unsafe fn combine(
        &self,
        plan: &CombinePlan,
        call: &CombineLaunch,
        stream: CUstream,
    ) -> Result<()> {
        let (shape, arguments) = plan.numbers.call(call);
        match &arguments {
            // SAFETY: the params are the kernel's; the caller vouches for addresses, slot and stream, the engine for the heaps.
            CombineArguments::Rows(params) => unsafe {
                self.launch("combine", &plan.kernel, shape, params, stream)
            },
            // SAFETY: as above.
            CombineArguments::Packets(params) => unsafe {
                self.launch("combine", &plan.kernel, shape, params, stream)
            },
        }
    }
}
