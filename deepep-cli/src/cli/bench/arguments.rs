//! Arguments of `deepep bench`, and the plan they make.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use deepep_cli::bench::ceilings::{Batch, Extent};
use deepep_cli::bench::plan::{Layout, Operation, Precision, Selection, Setting, Shape};
use deepep_cli::bench::rank::{Fault, Run};
use deepep_cli::routing::{Pattern, padded};
use deepep_cli::trace::Trace;
use deepep_core::BackendKind;

use super::super::Failure;
use super::super::settings::BackendChoice;
use super::super::values::timeout;
use super::devices::Devices;

/// Tokens of each device in exchanges of packets.
const EXCHANGED: [u32; 4] = [1, 8, 32, 128];

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DtypeChoice {
    /// E4M3 with a scale for each 128 columns
    Fp8,
    /// 2 bytes an element
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutChoice {
    /// A row for each received token
    Plain,
    /// A row for each received token and expert
    Expanded,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OperationChoice {
    /// Dispatch of tokens whose routes are new
    Dispatch,
    /// Dispatch along the routes of an earlier one
    Cached,
    /// Combine
    Combine,
    /// Combine of rows in the symmetric heap, read where they are (plain layout)
    Pulled,
    /// Dispatch, then combine
    Pair,
    /// The same, replayed as a CUDA graph
    Graph,
}

impl OperationChoice {
    fn operation(self) -> Operation {
        match self {
            Self::Dispatch => Operation::Dispatch,
            Self::Cached => Operation::Cached,
            Self::Combine => Operation::Combine,
            Self::Pulled => Operation::Pulled,
            Self::Pair => Operation::Pair,
            Self::Graph => Operation::Graph,
        }
    }
}

/// Arguments of `deepep bench`.
#[derive(Args, Debug)]
pub(in super::super) struct Arguments {
    /// Two numbers of tokens, few samples
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// All shapes and numbers of tokens; routings and multiprocessors vary at the first shape
    #[arg(long)]
    full: bool,
    /// Number of ranks [default: the visible GPUs, or 2 on one GPU or none]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=8))]
    ranks: Option<u32>,
    /// Ranks are threads of one process instead of processes; always so where ranks share a GPU
    #[arg(long)]
    threads: bool,
    /// Shapes: hidden,topk,experts [default: 7168,8,256]
    #[arg(long, num_args = 1.., value_name = "H,K,E")]
    shapes: Vec<Shape>,
    /// Tokens of each rank
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "T")]
    tokens: Vec<usize>,
    /// How tokens choose experts, as for `deepep run` [default: uniform]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "ROUTING")]
    routings: Vec<Pattern>,
    /// Also replay recorded routing, in its own shape
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Layer of the trace [default: its first]
    #[arg(long, requires = "trace")]
    layer: Option<i64>,
    /// Element types of dispatched rows
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "fp8,bf16")]
    dtypes: Vec<DtypeChoice>,
    /// Arrangements of received rows
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "plain,expanded")]
    layouts: Vec<LayoutChoice>,
    /// What to time
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "dispatch,cached,combine,pair,graph")]
    operations: Vec<OperationChoice>,
    /// Most multiprocessors that an operation may use; `0` is the library's choice [default: 0]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "SMS")]
    sms: Vec<usize>,
    /// Alignment of experts' first rows in the expanded layout
    #[arg(long, default_value_t = 1)]
    alignment: usize,
    /// Timed calls of each operation [default: 31, or 11 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,
    /// Tokens from which on L2 is emptied before each call
    #[arg(long, default_value_t = 512, value_name = "T")]
    flush_from: usize,
    /// Launch no kernel while the one before it in the stream still runs, as is done where each rank has a GPU for itself
    #[arg(long)]
    no_early_launch: bool,
    /// Small batches (at most 256 tokens of a rank), too, travel as rows, not in packets
    #[arg(long)]
    no_packets: bool,
    /// Leave out the ceilings
    #[arg(long)]
    no_ceilings: bool,
    /// Find the ceilings and nothing else
    #[arg(long, conflicts_with = "no_ceilings")]
    pub(super) ceilings_only: bool,
    /// Seed of everything that is generated
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds that a rank waits for another
    #[arg(long, default_value = "60", value_name = "SECONDS", value_parser = timeout)]
    timeout: Duration,
    /// Which processors
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendChoice,
    /// Write everything as JSON; `-` is the standard output, instead of tables
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Draw the curves
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
    /// For tests of this program: this rank sends wrong rows.
    #[arg(long, hide = true, value_name = "RANK")]
    plant_fault: Option<usize>,
    /// From the timed calls on only.
    #[arg(long, hide = true, requires = "plant_fault")]
    plant_late: bool,
    /// This process is the given rank of a run that another one has started.
    #[arg(long, hide = true)]
    pub(super) as_rank: Option<usize>,
    /// Where that run's store listens.
    #[arg(long, hide = true, requires = "as_rank")]
    pub(super) store_port: Option<u16>,
    /// Which part of the plan.
    #[arg(long, hide = true, requires = "as_rank")]
    pub(super) section: Option<usize>,
}

/// What is to be done.
pub(super) struct Plan {
    pub(super) run: Run,
    /// Settings of one shape and routing each.
    pub(super) sections: Vec<Vec<Setting>>,
    pub(super) ranks: usize,
    pub(super) threads: bool,
    pub(super) cuda: bool,
    /// Which ceilings to find; none to leave them out.
    pub(super) ceilings: Option<Extent>,
    pub(super) notes: Vec<String>,
}

impl Plan {
    /// How long ranks wait for each other between calls: longer than any call, after which all tell each other how it went, and than the
    /// comparison of a large result.
    pub(super) fn patience(&self) -> Duration {
        2 * self.run.timeout + Duration::from_secs(30)
    }
}

impl Arguments {
    pub(super) fn plan(&self, devices: &Devices) -> Result<Plan, Failure> {
        let cuda = match self.backend.kind() {
            BackendKind::Host => false,
            BackendKind::Cuda if devices.usable() == 0 => {
                return Err(format!("--backend cuda: {}", devices.why).into());
            }
            _ => devices.usable() > 0,
        };
        let mut notes = Vec::new();
        if !cuda {
            notes.push(format!(
                "these are times of the host backend, which stands in for GPUs ({}): they say how fast this machine's CPUs are, and nothing about GPUs",
                devices.why
            ));
        }
        let ranks = self.ranks.map_or_else(|| devices.usable().clamp(2, 8), |n| n as usize);
        let shared = cuda && ranks > devices.usable();
        if shared {
            notes.push(format!(
                "{ranks} ranks share {} GPU(s): no link is crossed between ranks on one device, and each has a share of its multiprocessors",
                devices.usable()
            ));
        }
        let early_launch = cuda && !shared && !self.no_early_launch;
        if self.no_early_launch && (shared || !cuda) {
            notes.push("--no-early-launch changes nothing: kernels are launched early only where each rank has a GPU for itself".into());
        }
        if self.alignment != 1 && !self.layouts.contains(&LayoutChoice::Expanded) {
            return Err(format!("--alignment {}: only the expanded layout has gaps", self.alignment).into());
        }
        let trace =
            self.trace.as_deref().map(|path| Trace::read(path, self.layer)).transpose()?.map(Arc::new);
        let selection = self.selection(cuda, trace.as_deref(), ranks, &mut notes)?;
        let mut operations = Vec::new();
        for operation in self.operations.iter().map(|o| o.operation()) {
            if !operations.contains(&operation) {
                operations.push(operation);
            }
        }
        let run = Run {
            operations,
            iterations: self.iterations.unwrap_or(if self.quick { 11 } else { 31 }) as usize,
            flush_from_tokens: self.flush_from,
            alignment: self.alignment,
            seed: self.seed,
            timeout: self.timeout,
            backend: if cuda { BackendKind::Cuda } else { BackendKind::Host },
            early_launch,
            packets: cuda && !self.no_packets,
            trace,
            fault: self.plant_fault.map(|rank| Fault { rank, late: self.plant_late }),
        };
        let sections =
            if self.ceilings_only { Vec::new() } else { run.with_operations(selection.sections()) };
        if sections.is_empty() && !self.ceilings_only {
            return Err(
                "nothing to time: rows are pulled in the plain layout only, and not from packets".into()
            );
        }
        // What can't work is said once, here, before anything starts.
        for setting in sections.iter().flatten() {
            let job = run.job(setting, ranks).map_err(|problem| format!("{setting}: {problem}"))?;
            job.config().plan(ranks).map_err(|problem| format!("{setting}: {problem}"))?;
        }
        let sms = if self.quick { vec![8, 32] } else { vec![4, 8, 16, 24, 32, 64] };
        let samples = if self.quick { 5 } else { 9 };
        // What graphs of small batches are compared with, if they are of these devices, in packets, and with a warm L2.
        let compared = run.packets && ranks == devices.ordinals().len();
        let exchanged = EXCHANGED.into_iter().filter(|&n| compared && (n as usize) < run.flush_from_tokens);
        let batch = |hidden: usize| move |tokens| Batch { tokens, hidden: hidden as u32 };
        let batches = selection.hidden().into_iter().flat_map(|hidden| exchanged.clone().map(batch(hidden)));
        let extent = Extent { sms, samples, batches: batches.collect(), early_launch };
        Ok(Plan {
            run,
            sections,
            ranks,
            threads: self.threads || shared,
            cuda,
            ceilings: (cuda && !self.no_ceilings).then_some(extent),
            notes,
        })
    }

    fn selection(
        &self,
        cuda: bool,
        trace: Option<&Trace>,
        ranks: usize,
        notes: &mut Vec<String>,
    ) -> Result<Selection, Failure> {
        let or = |given: &[usize], default: &[usize]| if given.is_empty() { default } else { given }.to_vec();
        let shape = |hidden, topk, experts| Shape { hidden, topk, experts };
        let default_shapes = match self.full {
            true => vec![shape(7168, 8, 256), shape(7168, 8, 384), shape(4096, 6, 256), shape(2048, 8, 128)],
            false => vec![shape(7168, 8, 256)],
        };
        let default_tokens: &[usize] = match (cuda, self.quick) {
            (true, false) => &[1, 8, 32, 128, 512, 2048, 4096, 8192],
            (true, true) => &[128, 4096],
            // CPUs take as long for one token as a GPU for a thousand.
            (false, false) => &[1, 16, 128],
            (false, true) => &[16],
        };
        let tokens = or(&self.tokens, default_tokens);
        let default_sms: &[usize] = if self.full && cuda { &[0, 4, 8, 16, 24, 32, 64, 132] } else { &[0] };
        let sms = or(&self.sms, default_sms);
        let default_routings = match self.full {
            true => vec![Pattern::Uniform, Pattern::Zipf(1.1), Pattern::Hot, Pattern::Idle(0)],
            false => vec![Pattern::Uniform],
        };
        let routings = if self.routings.is_empty() { default_routings } else { self.routings.clone() };
        for routing in &routings {
            if let Pattern::Idle(rank) = routing
                && *rank >= ranks
            {
                return Err(format!("--routings {routing}: there are {ranks} ranks").into());
            }
        }
        let focus: Vec<usize> = tokens.iter().copied().filter(|t| [128, 4096].contains(t)).collect();
        let focus = if focus.is_empty() { tokens.iter().copied().max().into_iter().collect() } else { focus };
        let trace = trace.map(|trace| {
            let experts = padded(trace.experts, ranks);
            if experts != trace.experts {
                let had = trace.experts;
                notes.push(format!(
                    "the trace's {had} experts are padded to {experts}, a multiple of {ranks} ranks"
                ));
            }
            let hidden = trace.hidden.unwrap_or(7168);
            let most = (0..ranks).map(|rank| trace.share(rank, ranks).tokens()).max().unwrap_or(0);
            (Shape { hidden, topk: trace.routing.topk, experts }, most)
        });
        Ok(Selection {
            shapes: if self.shapes.is_empty() { default_shapes } else { self.shapes.clone() },
            tokens,
            routings,
            dtypes: self
                .dtypes
                .iter()
                .map(|d| match d {
                    DtypeChoice::Fp8 => Precision::Fp8,
                    DtypeChoice::Bf16 => Precision::Bf16,
                })
                .collect(),
            layouts: self
                .layouts
                .iter()
                .map(|l| match l {
                    LayoutChoice::Plain => Layout::Plain,
                    LayoutChoice::Expanded => Layout::Expanded,
                })
                .collect(),
            sms: sms.into_iter().map(|n| (n > 0).then_some(n)).collect(),
            cross: !self.full,
            focus,
            trace,
        })
    }
}
