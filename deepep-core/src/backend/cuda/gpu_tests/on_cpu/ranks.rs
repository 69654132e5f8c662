//! Ranks in host memory, with the plans of a GPU's kernels.

use std::ffi::c_void;

use super::super::super::combine::{CombineArguments, CombineNumbers};
use super::super::super::dispatch::{DispatchArguments, DispatchNumbers};
use super::super::super::grid::Limits;
use super::super::super::{CombineLaunch, DispatchLaunch, LaunchShape, Setting, domain};
use super::super::check::{self, POISON, Slots};
use super::super::input::{self, Case, Input};
use super::super::machine::Outcome;
use super::super::{HANDLE_SLOTS, OUTPUT_SLOTS, Round, oracle};
use super::kernels::{Kernels, Launch};
use crate::backend::Readable;
use crate::jit::Program;
use crate::layout::{
    DispatchShape, HandleLayout, HeapConfig, HeapLayout, OutputLayout, PacketLayout, Placement, RecordKind,
    StatusRecord, WorkspaceLayout,
};

/// Deadline of a wait, in turns of the runtime.
const TURNS: u64 = 40_000_000;

/// Memory at an address that is a multiple of 4096.
pub(super) struct Memory {
    pages: Vec<Page>,
    bytes: usize,
}

#[derive(Clone, Copy)]
#[repr(align(4096))]
#[expect(dead_code, reason = "seen as bytes only")]
pub(super) struct Page([u8; 4096]);

impl Memory {
    pub(super) fn new(bytes: usize, value: u8) -> Self {
        Self { pages: vec![Page([value; 4096]); bytes.div_ceil(4096).max(1)], bytes }
    }

    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut memory = Self::new(bytes.len(), 0);
        memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        memory
    }

    pub(super) fn address(&self) -> u64 {
        self.pages.as_ptr() as u64
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the pages are initialised bytes without padding; kernels write to them only while nobody holds this slice.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast::<u8>(), self.bytes) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast::<u8>(), self.bytes) }
    }
}

/// What one rank gives and gets in one round.
pub(super) struct Tensors {
    x: Memory,
    scales: Memory,
    experts: Memory,
    weights: Memory,
    rows: Memory,
    biases: Vec<Memory>,
    pub(super) out: Memory,
    pub(super) out_weights: Memory,
}

impl Tensors {
    pub(super) fn new(case: &Case, round: &Round, r: usize) -> Self {
        let input = &round.inputs[r];
        let halves = |values: &[u16]| Memory::of(&input::bytes_of(values, u16::to_le_bytes));
        Self {
            x: Memory::of(&input.x),
            scales: Memory::of(&input.scale_bytes(case)),
            experts: Memory::of(&input.expert_bytes(case.index)),
            weights: Memory::of(&input::bytes_of(&input.weights, f32::to_le_bytes)),
            rows: halves(&round.rows[r]),
            biases: round.biases[r].iter().map(|b| halves(b)).collect(),
            out: Memory::new(input.tokens * case.hidden * 2, POISON),
            out_weights: Memory::new(input.tokens * case.topk * 4, POISON),
        }
    }

    /// Those of all ranks, one for each round.
    pub(super) fn of_rounds(case: &Case, rounds: &[Round]) -> Vec<Vec<Self>> {
        let of = |r| rounds.iter().map(|round| Self::new(case, round, r)).collect();
        (0..case.ranks).map(of).collect()
    }

    /// What a combine has left here.
    pub(super) fn check_sums(&self, case: &Case, round: &Round, r: usize) -> Outcome {
        let input = &round.inputs[r];
        let want = oracle::combine(case, &round.received, input, r, &round.rows, &round.biases[r]);
        let weights = case.weights_go_back().then(|| self.out_weights.bytes());
        check::combined(case, self.out.bytes(), &want, weights, input)
    }

    /// What combines of all ranks, one for each round, have left.
    pub(super) fn check_all(tensors: &[Vec<Self>], case: &Case, rounds: &[Round]) -> Outcome {
        for (r, all) in tensors.iter().enumerate() {
            for (n, (t, round)) in all.iter().zip(rounds).enumerate() {
                t.check_sums(case, round, r).map_err(|e| format!("combine {n}, rank {r}: {e}"))?;
            }
        }
        Ok(())
    }
}

struct Plans {
    dispatch: DispatchNumbers,
    push: CombineNumbers,
    pull: Option<CombineNumbers>,
}

/// The rows that a combine is given.
#[derive(Clone, Copy)]
pub(super) enum Given {
    /// The caller's.
    Own,
    /// Those in a slot of the heap for experts' outputs, pulled.
    Input(usize),
    /// What a dispatch delivered to this output slot, pulled or sent.
    Output { slot: usize, pull: bool },
}

/// Ranks with heaps, and their plans.
pub(super) struct Ranks<'a> {
    /// Of each rank; the same, where ranks make the same calls.
    pub(super) cases: Vec<&'a Case>,
    layout: HeapLayout,
    heaps: Vec<Memory>,
    statuses: Vec<Memory>,
    limits: Limits,
    plans: Vec<Plans>,
    /// Of the ranks' calls.
    pub(super) digests: Vec<u32>,
    /// Number of the next calls for exact counts; 0: nobody asks.
    pub(super) count_tag: u32,
    /// Deadline of a wait, in turns of the runtime; for plans that are made from now on.
    pub(super) turns: u64,
}

#[allow(clippy::large_enum_variant)] // Boxed, and lives for one launch.
pub(super) enum Arguments {
    Dispatch(DispatchArguments),
    Combine(CombineArguments),
    Overwrite(Overwrite),
}

/// What an expert does with memory that is its own again.
#[repr(C)]
pub(super) struct Overwrite {
    address: u64,
    bytes: usize,
}

extern "C" fn overwrite(params: *const c_void) {
    // SAFETY: `run` calls this with the arguments of an `Overwrite`, whose memory is a part of a heap; fibers take turns.
    unsafe {
        let Overwrite { address, bytes } = *params.cast::<Overwrite>();
        std::ptr::write_bytes(address as *mut u8, POISON, bytes);
    }
}

impl Arguments {
    pub(super) fn address(&self) -> *const c_void {
        match self {
            Self::Dispatch(DispatchArguments::Rows(p)) => std::ptr::from_ref(p).cast(),
            Self::Dispatch(DispatchArguments::Packets(p)) => std::ptr::from_ref(p).cast(),
            Self::Combine(CombineArguments::Rows(p)) => std::ptr::from_ref(p).cast(),
            Self::Combine(CombineArguments::Packets(p)) => std::ptr::from_ref(p).cast(),
            Self::Overwrite(p) => std::ptr::from_ref(p).cast(),
        }
    }
}

pub(super) type Call = (Program, LaunchShape, Box<Arguments>);

impl<'a> Ranks<'a> {
    /// Ranks that have run `epoch` calls of each kind.
    pub(super) fn new(case: &'a Case, limits: Limits, epoch: u32) -> Outcome<Self> {
        Self::of(&vec![case; case.ranks], limits, epoch)
    }

    /// Ranks that make different calls, perhaps.
    pub(super) fn of(cases: &[&'a Case], limits: Limits, epoch: u32) -> Outcome<Self> {
        Self::with_slots(cases, limits, epoch, [OUTPUT_SLOTS, HANDLE_SLOTS])
    }

    /// With so many slots for outputs, and for handles.
    pub(super) fn with_slots(
        cases: &[&'a Case],
        limits: Limits,
        epoch: u32,
        [output_slots, handle_slots]: [usize; 2],
    ) -> Outcome<Self> {
        let case = cases[0];
        let config = HeapConfig {
            dispatch: cases.iter().map(|case| case.dispatch_shape()).collect(),
            combine: cases.iter().map(|case| case.combine_shape()).collect(),
            output_slots,
            handle_slots,
            receive_sets: case.sets,
            combine_inputs: case.combine_inputs(),
            packets: case.packets,
        };
        let layout = HeapLayout::new(&config)?;
        let heap = |_| {
            let mut heap = Memory::new(layout.bytes, POISON);
            let w = &layout.workspace;
            heap.bytes_mut()[..w.bytes].fill(0);
            let epochs = (w.epochs..w.tickets).step_by(4);
            let lines = |from: usize, count: usize| (0..count).map(move |n| from + n * WorkspaceLayout::LINE);
            let begun = w.packets.iter().flat_map(|p| lines(p.begun, 4 * case.ranks));
            // The upper halves of words that say when a rank has begun.
            let begun = begun.chain(lines(w.started, 2 * case.ranks)).map(|at| at + 4);
            for at in epochs.chain(begun) {
                heap.bytes_mut()[at..at + 4].copy_from_slice(&epoch.to_le_bytes());
            }
            heap
        };
        let heaps: Vec<Memory> = (0..case.ranks).map(heap).collect();
        let statuses: Vec<Memory> = (0..case.ranks).map(|_| Memory::new(layout.status.bytes, 0)).collect();
        let (cases, digests) = (cases.to_vec(), vec![55; case.ranks]);
        let shapes: Vec<DispatchShape> = cases.iter().map(|case| case.dispatch_shape()).collect();
        let (plans, count_tag, turns) = (Vec::new(), 0, TURNS);
        let mut ranks = Self { cases, layout, heaps, statuses, limits, plans, digests, count_tag, turns };
        ranks.plan(&shapes)?;
        Ok(ranks)
    }

    /// Plans for other shapes than those of the cases, of the same sizes.
    pub(super) fn plan(&mut self, shapes: &[DispatchShape]) -> Outcome {
        let bases: Vec<u64> = self.heaps.iter().map(Memory::address).collect();
        let plan = |(r, dispatch): (usize, &DispatchShape)| -> Outcome<_> {
            // The runtime's clock counts turns.
            let turns = std::time::Duration::from_nanos(self.turns);
            let domain = domain(&self.layout.workspace, r, &bases, self.statuses[r].address(), turns);
            let setting = Setting {
                layout: self.layout,
                domain,
                limits: self.limits,
                combine: self.cases[r].choices(),
                dispatch_roles: self.cases[r].dispatch_roles,
            };
            let combine = self.cases[r].combine_shape();
            let pull = match self.cases[r].pulled {
                0 => None,
                _ => Some(setting.combine(&combine, dispatch, true)?),
            };
            let push = setting.combine(&combine, dispatch, false)?;
            Ok(Plans { dispatch: setting.dispatch(dispatch)?, push, pull })
        };
        self.plans = shapes.iter().enumerate().map(plan).collect::<Outcome<_>>()?;
        Ok(())
    }

    /// Where small batches travel, in every heap.
    pub(super) fn packets(&self) -> Outcome<PacketLayout> {
        Ok(self.layout.workspace.packets.ok_or("nothing travels in packets")?)
    }

    /// A part of a rank's heap.
    pub(super) fn part(&mut self, r: usize, offset: usize, bytes: usize) -> &mut [u8] {
        &mut self.heaps[r].bytes_mut()[offset..offset + bytes]
    }

    /// All that ranks have told each other in packets, and when they have begun.
    pub(super) fn all_packets(&mut self) -> Outcome<Vec<Vec<u8>>> {
        let p = self.packets()?;
        Ok((0..self.heaps.len()).map(|r| self.part(r, p.begun, p.bytes).to_vec()).collect())
    }

    /// The newest record of a kind on a rank.
    pub(super) fn record(&self, r: usize, kind: RecordKind) -> StatusRecord {
        let at = self.layout.status.record(kind);
        // SAFETY: as in `run`.
        unsafe { self.statuses[r].bytes().as_ptr().add(at).cast::<StatusRecord>().read() }
    }

    /// A cell of a rank's exact counts, if it is of the call with this number.
    pub(super) fn count(&self, r: usize, cell: usize, tag: u32) -> Option<u32> {
        let at = self.layout.status.counts + 8 * cell;
        let word = u64::from_le_bytes(self.statuses[r].bytes()[at..at + 8].try_into().ok()?);
        ((word >> 32) as u32 == tag).then_some(word as u32)
    }

    /// The phase and the peer of the records in which all ranks say that they gave up.
    pub(super) fn gave_up(&self) -> Vec<(u32, u32)> {
        let record = |r| self.record(r, RecordKind::Abort);
        (0..self.statuses.len()).map(record).map(|record| (record.phase, record.peer)).collect()
    }

    /// Kernels that are made for the sizes of rank r's calls.
    pub(super) fn programs_for_sizes(&self, r: usize) -> Vec<Program> {
        let Plans { dispatch, push, .. } = &self.plans[r];
        dispatch.program_for_sizes().into_iter().chain(push.program_for_sizes()).collect()
    }

    /// Nothing of earlier calls is left in the slots and the receive area.
    pub(super) fn poison(&mut self) {
        let from = self.layout.handles.offset;
        self.heaps.iter_mut().for_each(|heap| heap.bytes_mut()[from..].fill(POISON));
    }

    pub(super) fn dispatch(&self, r: usize, t: &Tensors, output: usize, handle: usize, cached: bool) -> Call {
        let case = self.cases[r];
        let (row, pack) =
            if case.scales_by_column { (1, case.tokens[r] as i64) } else { (case.scale_packs as i64, 1) };
        let call = DispatchLaunch {
            x: t.x.address(),
            scales: if case.scale_packs > 0 { t.scales.address() } else { 0 },
            scale_row_stride: row,
            scale_pack_stride: pack,
            topk_idx: if cached { 0 } else { t.experts.address() },
            weights: if case.weights { t.weights.address() } else { 0 },
            tokens: case.tokens[r],
            output_slot: output,
            handle_slot: handle,
            zero_padding: case.zero_padding,
            digest: self.digests[r] + 22 + u32::from(cached),
            count_tag: if cached { 0 } else { self.count_tag },
            ..DispatchLaunch::default()
        };
        let numbers = &self.plans[r].dispatch;
        let (shape, arguments) = numbers.call(&call);
        let for_sizes = numbers.program_for_sizes().filter(|_| case.for_sizes);
        (for_sizes.unwrap_or(numbers.program()), shape, Box::new(Arguments::Dispatch(arguments)))
    }

    /// Overwrites the rows that a dispatch has delivered.
    pub(super) fn overwrite(&self, r: usize, output: usize) -> Call {
        let rows = OutputLayout::new(&self.cases[r].dispatch_shape()).rows;
        let address = self.heaps[r].address() + (self.layout.outputs.at(output) + rows) as u64;
        let shape = self.cases[r].dispatch_shape();
        let arguments =
            Arguments::Overwrite(Overwrite { address, bytes: shape.row_capacity * shape.row_bytes });
        // The program is not looked at.
        let shape = LaunchShape { blocks: 1, threads: 32, shared_bytes: 0 };
        (Program::Barrier { ranks: self.cases.len() }, shape, Box::new(arguments))
    }

    /// As the case says: of the caller's rows, or of those in the heap's slot with the number of the handle.
    pub(super) fn combine(&self, r: usize, t: &Tensors, output: usize, handle: usize) -> Call {
        let given = if self.cases[r].pulled > 0 { Given::Input(handle) } else { Given::Own };
        self.combine_of(r, t, output, handle, given)
    }

    pub(super) fn combine_of(
        &self,
        r: usize,
        t: &Tensors,
        output: usize,
        handle: usize,
        given: Given,
    ) -> Call {
        let case = self.cases[r];
        let base = self.heaps[r].address();
        let slot = base + self.layout.outputs.at(output) as u64;
        let o = OutputLayout::new(&case.dispatch_shape());
        let weights = match case.placement {
            Placement::Plain => o.lane_weight,
            Placement::Expanded => o.row_weight,
        };
        let back = case.weights_go_back();
        let bias = |b: usize| t.biases.get(b).map_or(0, Memory::address);
        let (x, pull) = match given {
            Given::Own => (t.rows.address(), false),
            Given::Input(slot) => (base + self.layout.inputs.at(slot) as u64, true),
            Given::Output { slot, pull } => (base + (self.layout.outputs.at(slot) + o.rows) as u64, pull),
        };
        let unit = |address: u64| Readable::unit(address.wrapping_sub(base)).unwrap_or_default();
        let readable = Readable { x: unit(x), weights: unit(slot + weights as u64) };
        let call = CombineLaunch {
            x,
            pull: pull.then_some(readable),
            weights: if back { slot + weights as u64 } else { 0 },
            biases: [bias(0), bias(1)],
            out: t.out.address(),
            out_weights: if back { t.out_weights.address() } else { 0 },
            tokens: case.tokens[r],
            handle_slot: handle,
            digest: self.digests[r],
        };
        let plans = &self.plans[r];
        let numbers = if pull { plans.pull.as_ref().unwrap_or(&plans.push) } else { &plans.push };
        let (shape, arguments) = numbers.call(&call);
        let for_sizes = numbers.program_for_sizes().filter(|_| case.for_sizes);
        (for_sizes.unwrap_or(numbers.program()), shape, Box::new(Arguments::Combine(arguments)))
    }

    pub(super) fn run(&self, kernels: &Kernels, seed: u64, calls: &[Vec<Call>]) -> Outcome {
        let launch = |(program, shape, arguments): &Call| {
            let kernel = match **arguments {
                Arguments::Overwrite(_) => overwrite as *const c_void,
                _ => kernels.kernel(*program)?,
            };
            Ok(Launch {
                kernel,
                params: arguments.address(),
                blocks: shape.blocks as u32,
                threads: shape.threads as u32,
                shared_bytes: shape.shared_bytes as u32,
            })
        };
        let launches: Outcome<Vec<Vec<Launch>>> =
            calls.iter().map(|all| all.iter().map(launch).collect()).collect();
        kernels.run(seed, &launches?)?;
        for (r, status) in self.statuses.iter().enumerate() {
            let at = self.layout.status.record(RecordKind::Abort);
            // SAFETY: the record lies in the status block, which nobody writes any more.
            let record: StatusRecord =
                unsafe { status.bytes().as_ptr().add(at).cast::<StatusRecord>().read() };
            if record.sequence != 0 {
                return Err(format!("rank {r} gave up: {record:?}").into());
            }
        }
        Ok(())
    }

    pub(super) fn slots(&self, r: usize, output: usize, handle: usize) -> Slots {
        let shape = self.cases[r].dispatch_shape();
        let part = |offset: usize, bytes: usize| self.heaps[r].bytes()[offset..offset + bytes].to_vec();
        Slots {
            output: part(self.layout.outputs.at(output), OutputLayout::new(&shape).bytes),
            handle: part(
                self.layout.handles.at(handle),
                HandleLayout::new(&shape, self.cases[r].in_packets()).bytes,
            ),
        }
    }

    /// The same calls as a round on GPUs, with no wait between the ranks.
    pub(super) fn round(&mut self, kernels: &Kernels, seed: u64) -> Outcome {
        let case = self.cases[0];
        let rounds = [seed, !seed].map(|seed| Round::drawn(case, seed));
        let refreshed: Vec<Input> =
            rounds[0].inputs.iter().enumerate().map(|(r, i)| i.refreshed(case, r, !seed)).collect();
        self.poison();
        let tensors: Vec<[Tensors; 2]> =
            (0..case.ranks).map(|r| [0, 1].map(|n| Tensors::new(case, &rounds[n], r))).collect();
        for (heap, tensors) in self.heaps.iter_mut().zip(&tensors) {
            for (slot, t) in tensors.iter().enumerate().take(case.combine_inputs()) {
                let (at, rows) = (self.layout.inputs.at(slot), t.rows.bytes());
                heap.bytes_mut()[at..at + rows.len()].copy_from_slice(rows);
            }
        }
        let calls: Vec<Vec<Call>> = tensors
            .iter()
            .enumerate()
            .map(|(r, [first, second])| {
                vec![
                    self.dispatch(r, first, 0, 0, false),
                    self.combine(r, first, 0, 0),
                    self.dispatch(r, second, 1, 0, true),
                    self.dispatch(r, second, 2, 1, false),
                    self.combine(r, second, 2, 1),
                ]
            })
            .collect();
        self.run(kernels, seed, &calls)?;
        for (r, tensors) in tensors.iter().enumerate() {
            let dispatched = [
                ("first", 0, 0, &rounds[0], &rounds[0].inputs, false),
                ("cached", 1, 0, &rounds[0], &refreshed, true),
                ("second", 2, 1, &rounds[1], &rounds[1].inputs, false),
            ];
            for (name, output, handle, round, inputs, cached) in dispatched {
                let slots = self.slots(r, output, handle);
                check::dispatched(case, r, &slots, &round.received, inputs, cached)
                    .map_err(|e| format!("{name} dispatch, rank {r}: {e}"))?;
            }
            for (round, t) in rounds.iter().zip(tensors) {
                t.check_sums(case, round, r).map_err(|e| format!("combine, rank {r}: {e}"))?;
            }
        }
        Ok(())
    }
}
