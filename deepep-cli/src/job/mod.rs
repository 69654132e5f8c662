//! The main job on one rank: dispatch, a stand-in expert, combine, and every bit of it compared with the oracle.

mod check;
mod clock;
mod got;
mod rank;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use deepep_core::layout::{IndexWidth, ScaleOrder};
use deepep_core::{BackendKind, Config, Error, Reduction};

pub(crate) use self::got::Got;
pub use self::rank::Rank;
use crate::gpu::GpuError;
use crate::inputs::Values;
use crate::routing::{Group, Pattern, Routing, generate};
use crate::trace::Trace;

/// Where routing and rows come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Generated; every rank gives this many tokens.
    Pattern(Pattern, usize),
    /// Generated; each rank gives its own number of tokens.
    Uneven(Pattern, Vec<usize>),
    /// Recorded; each rank gives an equal share.
    Trace(Arc<Trace>),
}

/// What to run. Equal on all ranks.
#[derive(Clone, Debug)]
pub struct Job {
    /// Ranks, experts, lanes.
    pub group: Group,
    /// Routing and rows.
    pub source: Source,
    /// Most tokens of a rank.
    pub max_tokens: usize,
    /// Contents of generated rows.
    pub values: Values,
    /// Expanded result with this alignment, or plain.
    pub expanded: Option<usize>,
    /// Zeroes alignment gaps.
    pub zero_padding: bool,
    /// Waits for counts.
    pub exact: bool,
    /// Width of expert ids.
    pub index: IndexWidth,
    /// Packs scales as four UE8M0 in a word, instead of `f32`.
    pub packed_scales: bool,
    /// Order of received scales.
    pub scale_order: ScaleOrder,
    /// Sends weights.
    pub weights: bool,
    /// Number of biases.
    pub biases: usize,
    /// Where expanded rows are added up.
    pub reduction: Reduction,
    /// Rows of small batches travel in packets, on GPUs.
    pub packets: bool,
    /// Experts' outputs lie in the heap, and are read where they are.
    pub pull: bool,
    /// Dispatches a second time along the same routes, with other rows.
    pub cached: bool,
    /// The longest wait for a rank.
    pub timeout: Duration,
    /// Which processors.
    pub backend: BackendKind,
    /// Most multiprocessors that an operation may use; without it the library's choice.
    pub multiprocessors: Option<usize>,
    /// Whether kernels are launched while the one before them still runs; without it the library's choice.
    pub early_launch: Option<bool>,
}

impl Job {
    /// A plain job with exact counts, weights and one bias.
    pub fn new(group: Group, source: Source, max_tokens: usize, values: Values) -> Self {
        Self {
            group,
            source,
            max_tokens,
            values,
            expanded: None,
            zero_padding: false,
            exact: true,
            index: IndexWidth::Bits64,
            packed_scales: false,
            scale_order: ScaleOrder::RowMajor,
            weights: true,
            biases: 1,
            reduction: Reduction::AtExperts,
            packets: false,
            pull: false,
            cached: false,
            timeout: Duration::from_secs(60),
            backend: BackendKind::Auto,
            multiprocessors: None,
            early_launch: None,
        }
    }

    /// Settings of a buffer that this job fits into.
    pub fn config(&self) -> Config {
        let Group { experts, topk, .. } = self.group;
        let mut config = Config::new(self.max_tokens, experts, topk, self.values.hidden);
        config.dtype = self.values.dtype;
        config.scale_packs = self.scale_packs();
        config.scale_order = self.scale_order;
        config.index = self.index;
        config.plain = self.expanded.is_none();
        config.expanded = self.expanded;
        config.reduction = self.reduction;
        config.packets = self.packets;
        config.combine_inputs = usize::from(self.pull);
        config.output_slots = 1;
        config.handle_slots = 2;
        config.timeout = self.timeout;
        config.backend = self.backend;
        config.multiprocessors = self.multiprocessors;
        config.early_launch = self.early_launch;
        config
    }

    /// Words of a token's scales.
    pub(crate) fn scale_packs(&self) -> usize {
        if self.packed_scales { self.values.scales().div_ceil(4) } else { self.values.scales() }
    }

    /// The choices of a rank's tokens.
    pub fn routing(&self, rank: usize) -> Routing {
        match &self.source {
            Source::Pattern(pattern, tokens) => {
                generate(*pattern, self.group, rank, *tokens, self.values.seed)
            }
            Source::Uneven(pattern, tokens) => {
                generate(*pattern, self.group, rank, tokens[rank], self.values.seed)
            }
            Source::Trace(trace) => trace.share(rank, self.group.ranks),
        }
    }

    /// The choices of all ranks' tokens.
    pub fn routings(&self) -> Vec<Routing> {
        (0..self.group.ranks).map(|rank| self.routing(rank)).collect()
    }

    /// Writes a token's row; `round` changes the contents.
    pub(super) fn row(&self, round: u64, rank: usize, token: usize, row: &mut [u8]) {
        match &self.source {
            Source::Trace(trace) if trace.rows.is_some() && round == 0 => {
                let first = trace.share_range(rank, self.group.ranks).0;
                if let Some(rows) = &trace.rows {
                    row.copy_from_slice(&rows.bytes[(first + token) * row.len()..][..row.len()]);
                }
            }
            _ => Values { seed: self.values.seed.wrapping_add(round), ..self.values }
                .fill_row(rank, token, row),
        }
    }

    pub(super) fn scales(&self, round: u64, rank: usize, token: usize) -> Vec<f32> {
        let mut scales = vec![0.0; self.values.scales()];
        Values { seed: self.values.seed.wrapping_add(round), ..self.values }.fill_scales(
            rank,
            token,
            &mut scales,
        );
        scales
    }

    /// A token's scales as they travel: bits of `f32`, or exponents packed by four.
    pub(super) fn scale_words(&self, scales: &[f32]) -> Vec<u32> {
        if self.packed_scales {
            let exponents: Vec<u8> = scales.iter().map(|s| (s.to_bits() >> 23) as u8).collect();
            let pack = |four: &[u8]| four.iter().rev().fold(0, |word, &e| word << 8 | u32::from(e));
            exponents.chunks(4).map(pack).collect()
        } else {
            scales.iter().map(|s| s.to_bits()).collect()
        }
    }
}

/// The first thing that is not as the oracle has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch(String);

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a job ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The library returned an error.
    #[error(transparent)]
    Library(#[from] Error),
    /// A result differs from the oracle's.
    #[error("{0}")]
    Mismatch(Mismatch),
    /// The device failed while times were taken.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// What one rank did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Tokens given.
    pub tokens: usize,
    /// Tokens received.
    pub received: usize,
    /// Rows of the dispatch's result.
    pub rows: usize,
    /// Bytes of rows and scales received from other ranks.
    pub bytes_from_peers: usize,
    /// Bytes of rows received, own ones included, by dispatch and by combine.
    pub dispatch_bytes: usize,
    /// Bytes of contributions added up by combine.
    pub combine_bytes: usize,
    /// Time of the dispatch, from the moment at which all ranks were there: on the CPU's clock, or between two events of its stream.
    pub dispatch: Duration,
    /// Time of the combine, likewise.
    pub combine: Duration,
}
