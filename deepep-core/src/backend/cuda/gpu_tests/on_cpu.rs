//! The kernels of dispatch and combine on CPUs, against the oracle, bit by bit: the sources as they are, with the files of `arch/` replaced by CPU
//! versions. One fiber is one thread; at accesses that others see, at meetings and waits a seed draws who goes on, and bulk copies
//! happen late. So these tests see wrong positions, waits that nobody ends, and shared memory that is used again too early; they don't
//! see what a weak memory order does.

use std::ffi::c_void;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::super::combine::{CombineArguments, CombineNumbers};
use super::super::dispatch::{DispatchArguments, DispatchNumbers};
use super::super::grid::Limits;
use super::super::{CombineLaunch, CombineRoles, DispatchLaunch, LaunchShape, Setting, domain};
use super::cases;
use super::check::{self, POISON, Slots};
use super::input::{self, Case, Input};
use super::machine::Outcome;
use super::{HANDLE_SLOTS, OUTPUT_SLOTS, Round};
use crate::jit::Program;
use crate::layout::{
    HandleLayout, HeapConfig, HeapLayout, IndexWidth, OutputLayout, Phase, Placement, RecordKind,
    StatusRecord, WorkspaceLayout,
};

/// Longest run of one round, in seconds.
const LIMIT: f64 = 120.0;
/// Deadline of a wait, in turns of the runtime.
const TURNS: u64 = 40_000_000;

/// One operation of one rank, as the runtime knows it.
#[repr(C)]
struct Launch {
    kernel: *const c_void,
    params: *const c_void,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
}

/// Kernels in one library with the runtime.
struct Kernels {
    library: libloading::Library,
    programs: Vec<Program>,
    _build: tempfile::TempDir,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/on_cpu/fibers")
}

fn compiler(test: &str) -> bool {
    let found = Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        // Past the test runner's capture of what passing tests print.
        writeln!(std::io::stderr(), "skipped: {test}: there is no g++").ok();
    }
    found
}

fn run(command: &mut Command) -> Outcome {
    let output = command.output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned().into()),
    }
}

fn params(program: &Program) -> &'static str {
    match program {
        Program::Dispatch { .. } => "DispatchParams",
        Program::Combine { .. } => "CombineParams",
        Program::PacketDispatch { .. } => "PacketDispatchParams",
        Program::PacketCombine { .. } => "PacketCombineParams",
        _ => unreachable!("no kernel of dispatch or combine"),
    }
}

impl Kernels {
    /// Compiles programs, with a change of their sources.
    fn build(programs: &[Program], change: &(dyn Fn(&str, String) -> String + Sync)) -> Outcome<Self> {
        let build = tempfile::tempdir()?;
        let compile = |number: usize, program: &Program| -> Outcome<PathBuf> {
            let root = build.path().join(format!("kernel{number}"));
            for (name, text) in program.headers().into_iter().filter(|(name, _)| !name.starts_with("arch/")) {
                let path = root.join(name);
                std::fs::create_dir_all(path.parent().unwrap_or(&root))?;
                std::fs::write(path, change(name, text))?;
            }
            let shared = "extern __shared__ __align__(128) u8 shared[];";
            let source = program.source().replace(shared, "u8* shared = fiber_shared();");
            let source = source.replace("extern \"C\" __global__", "__global__");
            std::fs::write(root.join("kernel.cu"), change("kernel.cu", source))?;
            let object = root.join("kernel.o");
            let define = |name: &str, value: String| format!("-D{name}={value}");
            run(Command::new("g++")
                .args(["-std=c++20", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE", "-c", "-I"])
                .arg(&root)
                .arg("-I")
                .arg(folder())
                .arg(define("KERNEL", "\"kernel.cu\"".into()))
                .arg(define("ENTRY", program.entry().into()))
                .arg(define("PARAMS", params(program).into()))
                .arg(define("SPACE", format!("space{number}")))
                .arg(define("NAME", format!("launch{number}")))
                .arg(folder().join("kernel.cpp"))
                .arg("-o")
                .arg(&object))
            .map_err(|e| format!("{program:?}: {e}"))?;
            Ok(object)
        };
        let objects: Outcome<Vec<PathBuf>> =
            programs.iter().enumerate().map(|(n, program)| compile(n, program)).collect();
        let library = build.path().join("kernels.so");
        run(Command::new("g++")
            .args(["-std=c++20", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-I"])
            .arg(folder())
            .arg(folder().join("runtime.cpp"))
            .args(objects?)
            .arg("-o")
            .arg(&library))?;
        // SAFETY: the library is the one that was just made; its initialisers construct empty containers.
        let library = unsafe { libloading::Library::new(&library) }?;
        Ok(Self { library, programs: programs.to_vec(), _build: build })
    }

    fn kernel(&self, program: Program) -> Outcome<*const c_void> {
        let number =
            self.programs.iter().position(|p| *p == program).ok_or(format!("{program:?} was not built"))?;
        // SAFETY: kernel.cpp gives the function this name and type.
        let function: libloading::Symbol<'_, unsafe extern "C" fn(*const c_void)> =
            unsafe { self.library.get(format!("launch{number}").as_bytes()) }?;
        Ok(*function as *const c_void)
    }

    /// Runs the ranks' operations side by side.
    fn run(&self, seed: u64, launches: &[Vec<Launch>]) -> Outcome {
        type Run =
            unsafe extern "C" fn(u64, *const *const Launch, *const usize, usize, f64, *mut u8, usize) -> i32;
        // SAFETY: runtime.cpp gives the function this name and type.
        let function: libloading::Symbol<'_, Run> = unsafe { self.library.get(b"fiber_run") }?;
        let lists: Vec<*const Launch> = launches.iter().map(Vec::as_ptr).collect();
        let counts: Vec<usize> = launches.iter().map(Vec::len).collect();
        let mut text = [0u8; 512];
        // SAFETY: the lists have these lengths; kernels and what their arguments name outlive the call. Only this thread uses the library.
        let failed = unsafe {
            function(
                seed,
                lists.as_ptr(),
                counts.as_ptr(),
                counts.len(),
                LIMIT,
                text.as_mut_ptr(),
                text.len(),
            )
        };
        let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
        match failed {
            0 => Ok(()),
            _ => Err(String::from_utf8_lossy(&text[..end]).into_owned().into()),
        }
    }
}

/// Memory at an address that is a multiple of 4096.
struct Memory {
    pages: Vec<Page>,
    bytes: usize,
}

#[derive(Clone, Copy)]
#[repr(align(4096))]
#[expect(dead_code, reason = "seen as bytes only")]
struct Page([u8; 4096]);

impl Memory {
    fn new(bytes: usize, value: u8) -> Self {
        Self { pages: vec![Page([value; 4096]); bytes.div_ceil(4096).max(1)], bytes }
    }

    fn of(bytes: &[u8]) -> Self {
        let mut memory = Self::new(bytes.len(), 0);
        memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        memory
    }

    fn address(&self) -> u64 {
        self.pages.as_ptr() as u64
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the pages are initialised bytes without padding; kernels write to them only while nobody holds this slice.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast::<u8>(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast::<u8>(), self.bytes) }
    }
}

/// What one rank gives and gets in one round.
struct Tensors {
    x: Memory,
    scales: Memory,
    experts: Memory,
    weights: Memory,
    rows: Memory,
    biases: Vec<Memory>,
    out: Memory,
    out_weights: Memory,
}

impl Tensors {
    fn new(case: &Case, round: &Round, r: usize) -> Self {
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
}

/// Ranks with heaps, and their plans.
struct Ranks<'a> {
    /// Of each rank; the same, where ranks make the same calls.
    cases: Vec<&'a Case>,
    layout: HeapLayout,
    heaps: Vec<Memory>,
    statuses: Vec<Memory>,
    plans: Vec<(DispatchNumbers, CombineNumbers)>,
    /// Of the ranks' calls.
    digests: Vec<u32>,
}

enum Arguments {
    Dispatch(DispatchArguments),
    Combine(CombineArguments),
}

impl Arguments {
    fn address(&self) -> *const c_void {
        match self {
            Self::Dispatch(DispatchArguments::Rows(p)) => std::ptr::from_ref(p).cast(),
            Self::Dispatch(DispatchArguments::Packets(p)) => std::ptr::from_ref(p).cast(),
            Self::Combine(CombineArguments::Rows(p)) => std::ptr::from_ref(p).cast(),
            Self::Combine(CombineArguments::Packets(p)) => std::ptr::from_ref(p).cast(),
        }
    }
}

type Call = (Program, LaunchShape, Box<Arguments>);

impl<'a> Ranks<'a> {
    /// Ranks that have run `epoch` calls of each kind.
    fn new(case: &'a Case, limits: Limits, epoch: u32) -> Outcome<Self> {
        Self::of(&vec![case; case.ranks], limits, epoch)
    }

    /// Ranks that make different calls, perhaps.
    fn of(cases: &[&'a Case], limits: Limits, epoch: u32) -> Outcome<Self> {
        let case = cases[0];
        let config = HeapConfig {
            dispatch: cases.iter().map(|case| case.dispatch_shape()).collect(),
            combine: cases.iter().map(|case| case.combine_shape()).collect(),
            output_slots: OUTPUT_SLOTS,
            handle_slots: HANDLE_SLOTS,
            receive_sets: case.sets,
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
        let bases: Vec<u64> = heaps.iter().map(Memory::address).collect();
        let plan = |r: usize| -> Outcome<_> {
            // The runtime's clock counts turns.
            let turns = std::time::Duration::from_nanos(TURNS);
            let domain = domain(&layout.workspace, r, &bases, statuses[r].address(), turns);
            let setting = Setting { layout, domain, limits, combine_roles: case.roles };
            let (dispatch, combine) = (cases[r].dispatch_shape(), cases[r].combine_shape());
            Ok((setting.dispatch(&dispatch)?, setting.combine(&combine, &dispatch)?))
        };
        let plans = (0..case.ranks).map(plan).collect::<Outcome<_>>()?;
        let (cases, digests) = (cases.to_vec(), vec![55; case.ranks]);
        Ok(Self { cases, layout, heaps, statuses, plans, digests })
    }

    /// The phase and the peer of the records in which all ranks say that they gave up.
    fn gave_up(&self) -> Vec<(u32, u32)> {
        let record = |status: &Memory| {
            let at = self.layout.status.record(RecordKind::Abort);
            // SAFETY: as in `run`.
            let record: StatusRecord =
                unsafe { status.bytes().as_ptr().add(at).cast::<StatusRecord>().read() };
            (record.phase, record.peer)
        };
        self.statuses.iter().map(record).collect()
    }

    fn dispatch(&self, r: usize, t: &Tensors, output: usize, handle: usize, cached: bool) -> Call {
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
            ..DispatchLaunch::default()
        };
        let numbers = &self.plans[r].0;
        let (shape, arguments) = numbers.call(&call);
        (numbers.program(), shape, Box::new(Arguments::Dispatch(arguments)))
    }

    fn combine(&self, r: usize, t: &Tensors, output: usize, handle: usize) -> Call {
        let case = self.cases[r];
        let slot = self.heaps[r].address() + self.layout.outputs.at(output) as u64;
        let o = OutputLayout::new(&case.dispatch_shape());
        let weights = match case.placement {
            Placement::Plain => o.lane_weight,
            Placement::Expanded => o.row_weight,
        };
        let back = case.weights_go_back();
        let bias = |b: usize| t.biases.get(b).map_or(0, Memory::address);
        let call = CombineLaunch {
            x: t.rows.address(),
            weights: if back { slot + weights as u64 } else { 0 },
            biases: [bias(0), bias(1)],
            out: t.out.address(),
            out_weights: if back { t.out_weights.address() } else { 0 },
            tokens: case.tokens[r],
            handle_slot: handle,
            digest: self.digests[r],
        };
        let numbers = &self.plans[r].1;
        let (shape, arguments) = numbers.call(&call);
        (numbers.program(), shape, Box::new(Arguments::Combine(arguments)))
    }

    fn run(&self, kernels: &Kernels, seed: u64, calls: &[Vec<Call>]) -> Outcome {
        let launch = |(program, shape, arguments): &Call| {
            Ok(Launch {
                kernel: kernels.kernel(*program)?,
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

    fn slots(&self, r: usize, output: usize, handle: usize) -> Slots {
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
    fn round(&mut self, kernels: &Kernels, seed: u64) -> Outcome {
        let case = self.cases[0];
        let inputs = |seed| (0..case.ranks).map(|r| Input::new(case, r, seed)).collect::<Vec<_>>();
        let rounds = [Round::new(case, inputs(seed), seed), Round::new(case, inputs(!seed), !seed)];
        let refreshed: Vec<Input> =
            rounds[0].inputs.iter().enumerate().map(|(r, i)| i.refreshed(case, r, !seed)).collect();
        let from = self.layout.handles.offset;
        self.heaps.iter_mut().for_each(|heap| heap.bytes_mut()[from..].fill(POISON));
        let tensors: Vec<[Tensors; 2]> =
            (0..case.ranks).map(|r| [0, 1].map(|n| Tensors::new(case, &rounds[n], r))).collect();
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
                let (received, input) = (&round.received, &round.inputs[r]);
                let want = super::oracle::combine(case, received, input, r, &round.rows, &round.biases[r]);
                let weights = case.weights_go_back().then(|| t.out_weights.bytes());
                check::combined(case, t.out.bytes(), &want, weights, input)
                    .map_err(|e| format!("combine, rank {r}: {e}"))?;
            }
        }
        Ok(())
    }
}

fn programs(ranks: usize, placement: Placement) -> Vec<Program> {
    let index = IndexWidth::Bits64;
    let mut all = vec![
        Program::Dispatch { ranks, placement, index },
        Program::PacketDispatch { ranks, placement, index },
        Program::Combine { ranks, placement, reduce_first: true },
        Program::PacketCombine { ranks, placement },
    ];
    if placement == Placement::Expanded {
        all.push(Program::Combine { ranks, placement, reduce_first: false });
    }
    all
}

/// Names of cases that are run here, or parts of them.
const WANTED: [&str; 14] = [
    "as it comes",
    "one token",
    "last rank has none",
    "nobody has tokens",
    "holes",
    "all to rank 0",
    "scales of odd length",
    "scales to columns",
    "top-17",
    "rows of 2064",
    "hidden 2056",
    "one bias",
    "sum at the source",
    "alignment",
];

fn all_cases(test: &str, ranks: usize, placement: Placement, seeds: u64) {
    if !compiler(test) {
        return;
    }
    let kernels =
        Kernels::build(&programs(ranks, placement), &|_, text| text).unwrap_or_else(|e| panic!("{e}"));
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    let small = Limits { blocks: 2, shared_bytes: 100_000, link: 367 };
    let few = Some(CombineRoles { row_warps: 2, stages: 2, reducers: 2, pieces: 3, sender_pieces: 4 });
    let (mut count, mut failures) = (0, Vec::new());
    for (name, mut case) in cases::all(ranks) {
        let wanted = WANTED.iter().any(|part| name.contains(part));
        if !wanted || case.placement != placement || case.index != IndexWidth::Bits64 {
            continue;
        }
        // Enough for several turns of every ring, and no more.
        case.max_tokens = case.max_tokens.min(18);
        case.tokens.iter_mut().for_each(|n| *n = (*n).min(18));
        for seed in 0..seeds {
            (case.roles, case.sets) = if seed % 2 == 0 { (None, 2) } else { (few, 1) };
            let limits = if seed % 2 == 0 { limits } else { small };
            let outcome = Ranks::new(&case, limits, 0).and_then(|mut ranks| {
                ranks.round(&kernels, seed).and_then(|()| ranks.round(&kernels, seed + 100))
            });
            if let Err(error) = outcome {
                failures.push(format!("{name}, seed {seed}: {error}"));
            }
            count += 1;
        }
        assert!(failures.len() < 3, "{failures:#?}");
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(count >= 20, "only {count} cases were run");
}

/// One dispatch on each rank, and a combine behind it.
fn one_call(ranks: &mut Ranks<'_>, kernels: &Kernels, seed: u64) -> Outcome {
    let rounds: Vec<Round> = ranks
        .cases
        .iter()
        .map(|case| Round::new(case, (0..case.ranks).map(|r| Input::new(case, r, seed)).collect(), seed))
        .collect();
    let tensors: Vec<Tensors> =
        rounds.iter().enumerate().map(|(r, round)| Tensors::new(ranks.cases[r], round, r)).collect();
    let calls: Vec<Vec<Call>> = tensors
        .iter()
        .enumerate()
        .map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false), ranks.combine(r, t, 0, 0)])
        .collect();
    ranks.run(kernels, seed, &calls)
}

/// Ranks that make different calls all learn of it, whatever differs, and nothing is parsed as what it is not.
#[test]
fn calls_that_differ_end_on_cpus() {
    if !compiler("calls_that_differ_end_on_cpus") {
        return;
    }
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    for placement in [Placement::Plain, Placement::Expanded] {
        let kernels = Kernels::build(&programs(2, placement), &|_, text| text).unwrap();
        for packets in [false, true] {
            let case = |topk: usize, hidden: usize| {
                let mut case = Case { packets, topk, hidden, ..Case::new(2, 12, placement) };
                case.experts = 16;
                case
            };
            let same = case(8, 256);
            // Weights of one's few lanes lie where the other looks for ids.
            for (name, other, digests) in [
                ("top-k in dispatch", case(4, 256), [55, 56]),
                ("top-k in dispatch, the other way round", case(11, 256), [55, 56]),
            ] {
                let mut ranks = Ranks::of(&[&same, &other], limits, 0).unwrap();
                ranks.digests = digests.to_vec();
                let error = one_call(&mut ranks, &kernels, 3).unwrap_err().to_string();
                assert!(error.contains("gave up"), "{name}: {error}");
                for (phase, _) in ranks.gave_up() {
                    assert_eq!(phase, Phase::Parameters as u32, "{placement:?}, packets {packets}, {name}");
                }
            }
            // Nothing differs in dispatch: combine is what finds it.
            let mut ranks = Ranks::of(&[&same, &same], limits, 0).unwrap();
            let other = case(8, 512);
            let inputs: Vec<Input> = (0..2).map(|r| Input::new(&same, r, 4)).collect();
            let round = Round::new(&same, inputs, 4);
            let tensors: Vec<Tensors> = (0..2).map(|r| Tensors::new(&same, &round, r)).collect();
            let dispatches: Vec<Vec<Call>> =
                tensors.iter().enumerate().map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false)]).collect();
            ranks.run(&kernels, 4, &dispatches).unwrap();
            ranks.digests = vec![1, 2];
            let combines: Vec<Vec<Call>> =
                tensors.iter().enumerate().map(|(r, t)| vec![ranks.combine(r, t, 0, 0)]).collect();
            let error = ranks.run(&kernels, 5, &combines).unwrap_err().to_string();
            assert!(error.contains("gave up"), "{error}");
            for (r, (phase, peer)) in ranks.gave_up().into_iter().enumerate() {
                assert_eq!(phase, Phase::Parameters as u32, "{placement:?}, packets {packets}, rank {r}");
                assert!(peer < 2);
            }
            // Other rows and slots: the ranks wait for different things, and still learn why.
            let mut ranks = Ranks::of(&[&same, &other], limits, 0).unwrap();
            let error = {
                let rounds =
                    [&same, &other].map(|c| Round::new(c, (0..2).map(|r| Input::new(c, r, 6)).collect(), 6));
                let tensors: Vec<Tensors> =
                    (0..2).map(|r| Tensors::new(ranks.cases[r], &rounds[r], r)).collect();
                let calls = |ranks: &Ranks<'_>, combine: bool| -> Vec<Vec<Call>> {
                    let call = |(r, t): (usize, &Tensors)| match combine {
                        true => vec![ranks.combine(r, t, 0, 0)],
                        false => vec![ranks.dispatch(r, t, 0, 0, false)],
                    };
                    tensors.iter().enumerate().map(call).collect()
                };
                ranks.run(&kernels, 6, &calls(&ranks, false)).unwrap();
                ranks.digests = vec![1, 2];
                ranks.run(&kernels, 7, &calls(&ranks, true)).unwrap_err().to_string()
            };
            assert!(error.contains("gave up"), "{error}");
            assert!(ranks.gave_up().iter().all(|&(phase, _)| phase == Phase::Parameters as u32));
        }
    }
}

/// A rank whose rows were not all sent announces none of them: its peer gives up and does not take old rows for new ones.
#[test]
fn rows_that_were_not_sent_are_not_announced_on_cpus() {
    if !compiler("rows_that_were_not_sent_are_not_announced_on_cpus") {
        return;
    }
    let programs = [Program::Dispatch { ranks: 2, placement: Placement::Plain, index: IndexWidth::Bits64 }];
    let (call, changed) = ("sent = sender.run();", "sent = sender.run() && b.me != 0;");
    let change = |name: &str, text: String| {
        assert!(name != "kernel.cu" || text.matches(call).count() == 1);
        text.replace(call, changed)
    };
    let kernels = Kernels::build(&programs, &change).unwrap();
    let case = Case::new(2, 12, Placement::Plain);
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    let ranks = Ranks::new(&case, limits, 0).unwrap();
    let round = Round::new(&case, (0..2).map(|r| Input::new(&case, r, 1)).collect(), 1);
    let tensors: Vec<Tensors> = (0..2).map(|r| Tensors::new(&case, &round, r)).collect();
    let calls: Vec<Vec<Call>> =
        tensors.iter().enumerate().map(|(r, t)| vec![ranks.dispatch(r, t, 0, 0, false)]).collect();
    let error = ranks.run(&kernels, 1, &calls).unwrap_err().to_string();
    assert!(error.contains("rank 1 gave up"), "{error}");
    assert_eq!(ranks.gave_up()[1], (Phase::Done as u32, 0));
}

/// The tags of packets come back after 65535 calls: the next ones are right, too.
#[test]
fn tags_of_packets_wrap_on_cpus() {
    if !compiler("tags_of_packets_wrap_on_cpus") {
        return;
    }
    let placement = Placement::Expanded;
    let programs: Vec<Program> = programs(2, placement)
        .into_iter()
        .filter(|p| matches!(p, Program::PacketDispatch { .. } | Program::PacketCombine { .. }))
        .collect();
    let kernels = Kernels::build(&programs, &|_, text| text).unwrap();
    let mut case = Case { packets: true, ..Case::new(2, 12, placement) };
    case.tokens = vec![12, 7];
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    for epoch in [65_528, 131_064] {
        let mut ranks = Ranks::new(&case, limits, epoch).unwrap();
        for seed in 0..4 {
            ranks.round(&kernels, seed).unwrap_or_else(|e| panic!("from epoch {epoch}, round {seed}: {e}"));
        }
    }
}

/// The tests see what they are for: stages that are used again before their stores have read them.
#[test]
fn shared_memory_that_is_used_too_early_is_noticed_on_cpus() {
    if !compiler("shared_memory_that_is_used_too_early_is_noticed_on_cpus") {
        return;
    }
    let placement = Placement::Expanded;
    let programs: Vec<Program> = programs(2, placement)
        .into_iter()
        .filter(|p| matches!(p, Program::Dispatch { .. } | Program::Combine { .. }))
        .collect();
    let mistakes = [
        ("ops/combine/send_sum.cuh", "if (b.lane == slot) arch::bulk_wait_read();", ""),
        ("ops/combine/send.cuh", "arch::bulk_wait_read();", ""),
    ];
    let limits = Limits { blocks: 2, shared_bytes: 232_448, link: 48 };
    for (file, from, to) in mistakes {
        let change = |name: &str, text: String| {
            assert!(name != file || text.matches(from).count() == 1, "{file} has no longer {from:?}");
            if name == file { text.replace(from, to) } else { text }
        };
        let kernels = Kernels::build(&programs, &change).unwrap();
        let mut case = Case::new(2, 24, placement);
        (case.hidden, case.topk, case.experts) = (8192, 6, 16);
        case.reduce_first = file.ends_with("send_sum.cuh");
        case.roles = Some(CombineRoles { row_warps: 1, stages: 1, reducers: 2, pieces: 3, sender_pieces: 4 });
        let failed = (0..5).any(|seed| Ranks::new(&case, limits, 0).unwrap().round(&kernels, seed).is_err());
        assert!(failed, "{file} without {from:?} went unnoticed");
    }
}

#[test]
fn plain_kernels_give_the_oracles_bits_on_cpus() {
    all_cases("plain_kernels_give_the_oracles_bits_on_cpus", 2, Placement::Plain, 2);
}

#[test]
fn expanded_kernels_give_the_oracles_bits_on_cpus() {
    all_cases("expanded_kernels_give_the_oracles_bits_on_cpus", 3, Placement::Expanded, 2);
}
