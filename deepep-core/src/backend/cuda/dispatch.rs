//! Dispatch: what is known once, and what each call brings.

use std::sync::Arc;

use cuda_vmm::sys::CUstream;

use super::grid::{DispatchGrid, scales_in_bulk};
use super::module::Kernel;
use super::packets::PacketGrid;
use super::{Engine, LaunchShape, Setting};
use crate::error::Result;
use crate::jit::params::{DispatchParams, PacketDispatchParams};
use crate::jit::{Program, THREADS};
use crate::layout::DispatchShape;
#[cfg(test)]
use crate::layout::OutputLayout;

/// A dispatch of one shape: its kernel, its grid, and the arguments that don't change.
pub(crate) struct DispatchPlan {
    kernel: Arc<Kernel>,
    numbers: DispatchNumbers,
}

/// What a dispatch of one shape needs to be launched, besides its kernel.
pub(super) struct DispatchNumbers {
    shape: DispatchShape,
    form: Form,
    params: DispatchParams,
}

/// How rows travel.
#[derive(Clone, Copy)]
enum Form {
    Rows(DispatchGrid),
    Packets(PacketGrid),
}

/// The parameter struct of a kernel.
#[allow(clippy::large_enum_variant)] // Lives for one launch.
pub(super) enum DispatchArguments {
    Rows(DispatchParams),
    Packets(PacketDispatchParams),
}

/// What one call brings. Addresses are this device's; 0 where the call has none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DispatchLaunch {
    /// `[tokens]` rows, contiguous, 16-byte aligned.
    pub(crate) x: u64,
    /// `[tokens, packs]`, 4 bytes each, with the strides below (in packs).
    pub(crate) scales: u64,
    pub(crate) scale_row_stride: i64,
    pub(crate) scale_pack_stride: i64,
    /// `[tokens, K]`; 0 for a cached dispatch.
    pub(crate) topk_idx: u64,
    /// `f32[tokens, K]`.
    pub(crate) weights: u64,
    /// `i32[local experts]`, added to.
    pub(crate) stats: u64,
    pub(crate) tokens: usize,
    pub(crate) output_slot: usize,
    pub(crate) handle_slot: usize,
    pub(crate) zero_padding: bool,
    /// Number of the call in the status block's count cells; 0 if nobody asks.
    pub(crate) count_tag: u32,
    /// Digest of what must be equal on all ranks.
    pub(crate) digest: u32,
}

#[cfg(test)]
impl DispatchPlan {
    /// Where the parts of an output slot lie.
    pub(crate) fn output(&self) -> OutputLayout {
        OutputLayout::new(&self.numbers.shape)
    }

    /// The shape it was made for.
    pub(crate) fn shape(&self) -> &DispatchShape {
        &self.numbers.shape
    }
}

impl Setting {
    /// The numbers of dispatches of one shape.
    pub(super) fn dispatch(&self, shape: &DispatchShape) -> Result<DispatchNumbers> {
        let (output, handle) = self.layout.fits_dispatch(shape)?;
        let form = match &self.layout.workspace.packets {
            Some(packets) => Form::Packets(PacketGrid::dispatch(shape, self.limits, packets)?),
            None => Form::Rows(DispatchGrid::new(shape, self.limits, self.dispatch_roles)?),
        };
        let (pack_stride, row_stride) = shape.scale_strides();
        let (outputs, handles, landing) = (&self.layout.outputs, &self.layout.handles, &self.layout.landing);
        let params = DispatchParams {
            domain: self.domain,
            out_scale_row_stride: row_stride as i64,
            out_scale_pack_stride: pack_stride as i64,
            outputs: outputs.offset as u64,
            output_stride: outputs.stride as u64,
            handles: handles.offset as u64,
            handle_stride: handles.stride as u64,
            landing: landing.offset as u64,
            landing_stride: landing.stride as u64,
            landing_slots: self.layout.landing_slots(shape) as u32,
            rows: output.rows as u64,
            out_scales: output.scales as u64,
            lane_weight: output.lane_weight as u64,
            lane_expert: output.lane_expert as u64,
            row_weight: output.row_weight as u64,
            source: handle.source as u64,
            lane_row: handle.lane_row as u64,
            topk: handle.topk as u64,
            sent_row: handle.sent_row as u64,
            sent_index: handle.sent_index as u64,
            own_row: handle.own_row as u64,
            counts: handle.counts as u64,
            rank_psum: handle.rank_psum as u64,
            expert_start: handle.expert_start as u64,
            expert_count: handle.expert_count as u64,
            lane_place: handle.lane_place as u64,
            host_counts: self.domain.status + self.layout.status.counts as u64,
            max_tokens: shape.max_tokens as u32,
            lanes: shape.topk as u32,
            experts: shape.experts as u32,
            local_experts: shape.local_experts() as u32,
            row_bytes: shape.row_bytes as u32,
            scale_packs: shape.scale_packs as u32,
            alignment: shape.alignment as u32,
            token_capacity: shape.token_capacity as u32,
            row_capacity: shape.row_capacity as u32,
            ..DispatchParams::default()
        };
        let params = match form {
            Form::Rows(grid) => DispatchParams {
                senders: grid.senders as u32,
                row_warps: grid.row_warps as u32,
                stages: grid.stages as u32,
                ahead: grid.ahead as u32,
                stage_bytes: grid.stage_bytes as u32,
                drawn: grid.drawn as u32,
                own_parts: grid.own_parts as u32,
                keep_own: u32::from(grid.keep_own),
                control: grid.control as u32,
                base: grid.base as u32,
                total: grid.total as u32,
                start: grid.start as u32,
                worker_counts: grid.worker_counts as u32,
                first_tokens: grid.first_tokens as u32,
                step_tokens: 32 / shape.topk as u32,
                step_inverse: 65536u32.div_ceil(shape.topk as u32),
                ..params
            },
            Form::Packets(_) => params,
        };
        Ok(DispatchNumbers { shape: *shape, form, params })
    }
}

impl DispatchNumbers {
    /// The kernel that runs it.
    pub(super) fn program(&self) -> Program {
        let DispatchShape { ranks, placement, index, .. } = self.shape;
        match self.form {
            Form::Rows(_) => Program::Dispatch { ranks, placement, index },
            Form::Packets(_) => Program::PacketDispatch { ranks, placement, index, sizes: None },
        }
    }

    /// The kernel that is made for these sizes, if there is one.
    pub(super) fn program_for_sizes(&self) -> Option<Program> {
        let DispatchShape { ranks, placement, index, .. } = self.shape;
        match self.form {
            Form::Rows(_) => None,
            Form::Packets(grid) => grid.sizes().map(|sizes| Program::PacketDispatch {
                ranks,
                placement,
                index,
                sizes: Some(sizes),
            }),
        }
    }

    /// Grid and arguments of a call.
    pub(super) fn call(&self, call: &DispatchLaunch) -> (LaunchShape, DispatchArguments) {
        let bulk = scales_in_bulk(&self.shape, call.scale_row_stride, call.scale_pack_stride, call.scales);
        let params = DispatchParams {
            x: call.x,
            scales: call.scales,
            topk_idx: call.topk_idx,
            weights: call.weights,
            stats: call.stats,
            scale_row_stride: call.scale_row_stride,
            scale_pack_stride: call.scale_pack_stride,
            place: call.output_slot as u32 | (call.handle_slot as u32) << 8,
            call: call.digest,
            tokens: call.tokens as u32,
            scales_in_bulk: u32::from(bulk),
            zero_padding: u32::from(call.zero_padding),
            count_tag: call.count_tag,
            ..self.params
        };
        match self.form {
            Form::Rows(grid) => {
                let (blocks, shared_bytes) = (grid.blocks, grid.shared_bytes);
                let slots = self.params.landing_slots as usize;
                let shares = grid.shares(call.tokens, slots, call.topk_idx != 0);
                let params = DispatchParams {
                    place: params.place | (grid.senders as u32) << 20,
                    landed: shares.landed as u32,
                    counters: shares.counters as u32,
                    chunk_tokens: shares.chunk_tokens as u32,
                    chunk_rest: shares.chunk_rest as u32,
                    worker_tokens: shares.worker_tokens as u32,
                    first_share: shares.first_share as u32,
                    ..params
                };
                let shape = LaunchShape { blocks, threads: THREADS, shared_bytes };
                (shape, DispatchArguments::Rows(params))
            }
            Form::Packets(grid) => (grid.launch(), DispatchArguments::Packets(grid.dispatch_params(params))),
        }
    }
}

impl Engine {
    /// Prepares a dispatch: compiles and loads its kernel if need be.
    pub(crate) fn plan_dispatch(&self, shape: &DispatchShape) -> Result<DispatchPlan> {
        let numbers = self.setting.dispatch(shape)?;
        let kernel = self.kernels.best(numbers.program_for_sizes(), numbers.program())?;
        Ok(DispatchPlan { kernel, numbers })
    }

    /// Enqueues a dispatch.
    ///
    /// # Safety
    /// The plan is this engine's, whose context is current. Addresses are valid on this device for what [`DispatchLaunch`] says until the kernel has
    /// ended; `tokens` is at most the shape's maximum and the slots exist and are this call's. `stream` belongs to the engine's
    /// context, and the buffer's operations are ordered on it. A cached call's handle slot was filled by an earlier dispatch of
    /// the same shape and tokens.
    pub(crate) unsafe fn dispatch(
        &self,
        plan: &DispatchPlan,
        call: &DispatchLaunch,
        stream: CUstream,
    ) -> Result<()> {
        let (shape, arguments) = plan.numbers.call(call);
        match &arguments {
            // SAFETY: the params are the kernel's; the caller vouches for addresses, slots and stream, the engine for the heaps.
            DispatchArguments::Rows(params) => unsafe {
                self.launch("dispatch", &plan.kernel, shape, params, stream)
            },
            // SAFETY: as above.
            DispatchArguments::Packets(params) => unsafe {
                self.launch("dispatch", &plan.kernel, shape, params, stream)
            },
        }
    }
}
