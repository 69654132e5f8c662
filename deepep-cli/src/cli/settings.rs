//! Settings that `run` and `plan` share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use cuda_vmm::Cuda;
use deepep_cli::inputs::Values;
use deepep_cli::job::{Job, Source};
use deepep_cli::routing::{Group, Pattern, padded};
use deepep_cli::trace::Trace;
use deepep_core::device;
use deepep_core::layout::{IndexWidth, ScaleOrder};
use deepep_core::tensor::DType;
use deepep_core::{BackendKind, Reduction};

use super::Failure;
use super::values::timeout;

/// Element type of dispatched rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RowType {
    /// 2 bytes an element
    Bf16,
    /// 1 byte an element, and a scale for each 128 (E4M3)
    Fp8,
    /// 2 bytes an element, moved as they are
    Fp16,
    /// 4 bytes an element, moved as they are
    Fp32,
}

impl RowType {
    fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::Fp8 => DType::F8E4M3,
            Self::Fp16 => DType::F16,
            Self::Fp32 => DType::F32,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReductionChoice {
    /// First on the experts' rank
    AtExperts,
    /// Only at the token's rank
    AtSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum BackendChoice {
    /// GPUs if there are any, else emulated ranks
    Auto,
    /// GPUs
    Cuda,
    /// Emulated ranks on CPUs
    Host,
}

impl BackendChoice {
    pub(super) fn kind(self) -> BackendKind {
        match self {
            Self::Auto => BackendKind::Auto,
            Self::Cuda => BackendKind::Cuda,
            Self::Host => BackendKind::Host,
        }
    }
}

/// What is communicated.
#[derive(Args, Clone, Debug)]
pub(super) struct Settings {
    /// Number of ranks; more than there are GPUs share them [default: one for each GPU that runs the kernels, or 4 emulated ranks]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=8))]
    ranks: Option<u32>,
    /// Tokens of each rank
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Elements of a row [default: the trace's, or 7168]
    #[arg(long)]
    hidden: Option<usize>,
    /// Experts of all ranks together [default: the trace's, or 256]
    #[arg(long)]
    experts: Option<usize>,
    /// Experts of a token [default: the trace's, or 8]
    #[arg(long)]
    topk: Option<usize>,
    /// Element type of dispatched rows
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: RowType,
    /// One row for each received token and local expert, with this alignment of each expert's first row
    #[arg(long, value_name = "ALIGNMENT", num_args = 0..=1, default_missing_value = "128")]
    expanded: Option<usize>,
    /// Where expanded rows of a token are added up
    #[arg(long, value_enum, default_value = "at-experts", requires = "expanded")]
    reduction: ReductionChoice,
    /// How tokens choose experts: `uniform`, `zipf[:exponent]`, `hot`, `masked[:fraction]`, `idle[:rank]` or `local`
    #[arg(long, default_value = "uniform", conflicts_with = "trace")]
    routing: Pattern,
    /// Replay recorded routing: JSON lines, or a safetensors file with topk_idx, topk_weights and x
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    trace: Option<PathBuf>,
    /// Layer of the trace [default: its first]
    #[arg(long, requires = "trace")]
    layer: Option<i64>,
    /// Seed of everything that is generated
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Don't send weights
    #[arg(long)]
    no_weights: bool,
    /// Number of biases that combine adds, 0 to 2
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=2))]
    biases: u8,
    /// Don't wait for counts: results have the shape of the worst case
    #[arg(long)]
    without_counts: bool,
    /// Dispatch a second time along the same routes
    #[arg(long)]
    cached: bool,
    /// Small batches (at most 256 tokens of a rank) travel as rows on GPUs, too, not in packets
    #[arg(long)]
    no_packets: bool,
    /// Experts' outputs lie in the symmetric heap, and other ranks read them there
    #[arg(long, conflicts_with_all = ["expanded", "reduction", "zero_padding"])]
    pull: bool,
    /// Zero the alignment gaps of the expanded layout
    #[arg(long, requires = "expanded")]
    zero_padding: bool,
    /// Expert ids of 32 bits instead of 64
    #[arg(long)]
    narrow_ids: bool,
    /// Pack four power-of-two scales into a word (with --dtype fp8)
    #[arg(long)]
    packed_scales: bool,
    /// Deliver scales column by column (with --dtype fp8)
    #[arg(long)]
    column_scales: bool,
    /// Seconds that a rank waits for another
    #[arg(long, default_value = "60", value_name = "SECONDS", value_parser = timeout)]
    timeout: Duration,
    /// Which processors
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendChoice,
}

impl Settings {
    /// As many ranks as there are GPUs if these are used, unless told otherwise.
    fn ranks(&self) -> usize {
        let gpus = || match self.backend.kind().resolve() {
            Ok(BackendKind::Cuda) => {
                Cuda::get().ok().and_then(|cuda| device::usable(cuda).ok()).map(|usable| usable.len())
            }
            _ => None,
        };
        let most = deepep_core::layout::MAX_RANKS;
        self.ranks.map_or_else(|| gpus().map_or(4, |gpus| gpus.clamp(1, most)), |ranks| ranks as usize)
    }

    /// The job, and what had to be changed to make it possible.
    pub(super) fn job(&self) -> Result<(Job, Vec<String>), Failure> {
        let mut notes = Vec::new();
        let ranks = self.ranks();
        let trace =
            self.trace.as_deref().map(|path| Trace::read(path, self.layer)).transpose()?.map(Arc::new);
        let recorded = trace.as_deref();
        let topk = match (self.topk, recorded.map(|t| t.routing.topk)) {
            (Some(asked), Some(recorded)) if asked != recorded => {
                return Err(format!("--topk {asked}: the trace has {recorded}").into());
            }
            (asked, recorded) => asked.or(recorded).unwrap_or(8),
        };
        let wanted = self.experts.or(recorded.map(|t| t.experts)).unwrap_or(256);
        if recorded.is_some_and(|t| wanted < t.experts) {
            return Err(
                format!("--experts {wanted}: the trace has {}", recorded.map_or(0, |t| t.experts)).into()
            );
        }
        let experts = padded(wanted, ranks);
        if experts != wanted {
            if self.experts.is_some() {
                return Err(format!("--experts {wanted}: must be a multiple of the {ranks} ranks").into());
            }
            notes.push(format!("{wanted} experts are padded to {experts}, a multiple of {ranks} ranks"));
        }
        if topk > experts {
            return Err(format!("--topk {topk}: there are {experts} experts").into());
        }
        if let Pattern::Idle(rank) = self.routing
            && rank >= ranks
        {
            return Err(format!("--routing idle:{rank}: there are {ranks} ranks").into());
        }
        let mut dtype = self.dtype.dtype();
        let mut hidden = self.hidden.or(recorded.and_then(|t| t.hidden)).unwrap_or(7168);
        if let Some(rows) = recorded.and_then(|t| t.rows.as_ref()) {
            if self.hidden.is_some_and(|h| h != rows.hidden) {
                return Err(format!("--hidden {hidden}: the trace's rows have {}", rows.hidden).into());
            }
            (dtype, hidden) = (rows.dtype, rows.hidden);
            notes.push(format!("rows are the trace's: {hidden} × {dtype}"));
        }
        let (source, max_tokens) = match &trace {
            Some(trace) => {
                let most = (0..ranks).map(|r| trace.share(r, ranks).tokens()).max().unwrap_or(0);
                (Source::Trace(trace.clone()), most.max(1))
            }
            None => (Source::Pattern(self.routing, self.tokens), self.tokens.max(1)),
        };
        let values = Values { seed: self.seed, dtype, hidden };
        let mut job = Job::new(Group { ranks, experts, topk }, source, max_tokens, values);
        job.expanded = self.expanded;
        job.zero_padding = self.zero_padding;
        job.exact = !self.without_counts;
        job.index = if self.narrow_ids { IndexWidth::Bits32 } else { IndexWidth::Bits64 };
        job.packed_scales = self.packed_scales;
        job.scale_order = if self.column_scales { ScaleOrder::ColumnMajor } else { ScaleOrder::RowMajor };
        job.weights = !self.no_weights;
        job.biases = self.biases.into();
        job.reduction = match self.reduction {
            ReductionChoice::AtExperts => Reduction::AtExperts,
            ReductionChoice::AtSource => Reduction::AtSource,
        };
        job.cached = self.cached;
        // What travels in packets can't be pulled.
        job.packets = !self.no_packets && !self.pull;
        job.pull = self.pull;
        job.timeout = self.timeout;
        job.backend = self.backend.kind();
        if job.values.scales() == 0 && (self.packed_scales || self.column_scales) {
            let option = if self.packed_scales { "--packed-scales" } else { "--column-scales" };
            return Err(format!("{option}: {dtype} rows have no scales, --dtype fp8 has").into());
        }
        Ok((job, notes))
    }
}
