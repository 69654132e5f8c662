//! The main job on one rank: dispatch, a stand-in expert, combine, and every bit of it compared with the oracle.

mod check;
mod delivered;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepep_core::layout::{IndexWidth, ScaleOrder};
use deepep_core::tensor::{DType, TensorMut, TensorRef};
use deepep_core::{
    BackendKind, CombineArgs, Config, DispatchArgs, Dispatched, ElasticBuffer, Error, Handle, Reduction,
};
use half::bf16;

pub(crate) use self::delivered::Delivered;
use crate::inputs::{Values, expert_row, expert_sum};
use crate::oracle::{self, Received, owner};
use crate::place::Place;
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
    /// Dispatches a second time along the same routes, with other rows.
    pub cached: bool,
    /// The longest wait for a rank.
    pub timeout: Duration,
    /// Which processors.
    pub backend: BackendKind,
    /// Most multiprocessors that an operation may use; without it the library's choice.
    pub multiprocessors: Option<usize>,
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
            cached: false,
            timeout: Duration::from_secs(60),
            backend: BackendKind::Auto,
            multiprocessors: None,
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
        config.output_slots = 1;
        config.handle_slots = 2;
        config.timeout = self.timeout;
        config.backend = self.backend;
        config.multiprocessors = self.multiprocessors;
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
    fn row(&self, round: u64, rank: usize, token: usize, row: &mut [u8]) {
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

    fn scales(&self, round: u64, rank: usize, token: usize) -> Vec<f32> {
        let mut scales = vec![0.0; self.values.scales()];
        Values { seed: self.values.seed.wrapping_add(round), ..self.values }.fill_scales(
            rank,
            token,
            &mut scales,
        );
        scales
    }

    /// A token's scales as they travel: bits of `f32`, or exponents packed by four.
    fn scale_words(&self, scales: &[f32]) -> Vec<u32> {
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
    /// Time of the dispatch.
    pub dispatch: Duration,
    /// Time of the combine.
    pub combine: Duration,
}

/// One rank's part of a job.
pub struct Rank<'a> {
    job: &'a Job,
    rank: usize,
    routings: &'a [Routing],
    routing: &'a Routing,
    received: Received,
}

impl<'a> Rank<'a> {
    /// Prepares a rank's part, given all ranks' routing.
    pub fn new(job: &'a Job, routings: &'a [Routing], rank: usize) -> Self {
        let received = oracle::received(job.group, routings, rank, job.expanded.unwrap_or(1));
        Self { job, rank, routings, routing: &routings[rank], received }
    }

    /// Runs the job once and compares everything.
    ///
    /// # Errors
    /// [`JobError`]: the library's, or the first difference.
    pub fn run(&self, buffer: &mut ElasticBuffer) -> Result<Report, JobError> {
        let (report, handle) = self.round(buffer, 0, None)?;
        if self.job.cached { Ok(self.round(buffer, 1, Some(&handle))?.0) } else { Ok(report) }
    }

    /// Dispatch, experts, combine. `round` changes the rows.
    fn round(
        &self,
        buffer: &mut ElasticBuffer,
        round: u64,
        cached: Option<&Handle>,
    ) -> Result<(Report, Handle), JobError> {
        let (job, n, hidden) = (self.job, self.routing.tokens(), self.job.values.hidden);
        let x = self.own_rows(round);
        let words = self.own_scales(round);
        let narrow: Vec<i32> = self.routing.experts.iter().map(|&e| e as i32).collect();
        let topk = job.group.topk;
        let x_view = TensorRef::bytes_as(&x, job.values.dtype, n, hidden)?;
        let index = match job.index {
            IndexWidth::Bits32 => TensorRef::matrix(&narrow, n, topk)?,
            IndexWidth::Bits64 => TensorRef::matrix(&self.routing.experts, n, topk)?,
        };
        let mut args = match cached {
            Some(handle) => DispatchArgs::cached(x_view, handle),
            None => DispatchArgs::new(x_view, index),
        };
        let packs = job.scale_packs();
        // Column after column, so that strides are put to use.
        let floats: Vec<f32> = words.iter().map(|&w| f32::from_bits(w)).collect();
        let ints: Vec<i32> = words.iter().map(|&w| w as i32).collect();
        let strides = [1, n as isize];
        if packs > 0 {
            args = args.scale_order(job.scale_order).scales(if job.packed_scales {
                TensorRef::strided(&ints, n, packs, strides)?
            } else {
                TensorRef::strided(&floats, n, packs, strides)?
            });
        }
        if job.weights {
            args = args.weights(TensorRef::matrix(&self.routing.weights, n, topk)?);
        }
        if let (Some(alignment), None) = (job.expanded, cached) {
            args = args.expanded(alignment);
        }
        if job.zero_padding && job.expanded.is_some() {
            args = args.zero_padding();
        }
        if !job.exact {
            args = args.without_counts();
        }
        let started = Instant::now();
        let dispatched = buffer.dispatch(args)?;
        dispatched.event().wait(job.timeout)?;
        let dispatch = started.elapsed();
        dispatched.check()?;
        let delivered = self.delivered(&dispatched, &Place::Host)?;
        self.check_dispatch(&delivered, round)?;

        let (y, y_weights) = self.experts(&delivered, dispatched.rows(), round);
        let biases: Vec<Vec<bf16>> = (0..job.biases).map(|i| self.bias(i as u64)).collect();
        let mut out = vec![bf16::NAN; n * hidden];
        let mut out_weights = vec![f32::NAN; n * topk];
        let rows = dispatched.rows();
        let mut args = CombineArgs::new(
            TensorRef::matrix(&y, rows, hidden)?,
            dispatched.handle(),
            TensorMut::matrix(&mut out, n, hidden)?,
        )
        .reduction(job.reduction);
        if job.weights {
            let columns = if job.expanded.is_some() { 1 } else { topk };
            let given = TensorRef::matrix(&y_weights, y_weights.len() / columns, columns)?;
            args = args.weights(given, TensorMut::matrix(&mut out_weights, n, topk)?);
        }
        for bias in &biases {
            args = args.bias(TensorRef::matrix(bias, n, hidden)?);
        }
        let started = Instant::now();
        buffer.combine(args)?.wait(job.timeout)?;
        let combine = started.elapsed();
        self.check_combine(&out, &out_weights, &biases, round)?;

        let row_bytes = job.values.row_bytes() + 4 * packs;
        let foreign = self.received.tokens.iter().filter(|source| source.rank != self.rank).count();
        let contributions: usize =
            (0..n).map(|t| oracle::contributors(job.group, self.routing.of(t)).len()).sum();
        let report = Report {
            tokens: n,
            received: self.received.tokens.len(),
            rows: if job.expanded.is_some() { self.received.rows.len() } else { self.received.tokens.len() },
            bytes_from_peers: foreign * row_bytes,
            dispatch_bytes: self.received.tokens.len() * row_bytes,
            combine_bytes: contributions * hidden * 2,
            dispatch,
            combine,
        };
        Ok((report, dispatched.into_handle()))
    }

    /// Copies what the oracle says has come.
    pub(crate) fn delivered(&self, got: &Dispatched, place: &Place) -> Result<Delivered, JobError> {
        Ok(Delivered::copy(got, self.rows(), self.received.tokens.len(), place)?)
    }

    /// Rows that come.
    pub(crate) fn rows(&self) -> usize {
        if self.job.expanded.is_some() { self.received.rows.len() } else { self.received.tokens.len() }
    }

    pub(crate) fn own_rows(&self, round: u64) -> Vec<u8> {
        let size = self.job.values.row_bytes();
        let mut x = vec![0; self.routing.tokens() * size];
        for (token, row) in x.chunks_mut(size).enumerate() {
            self.job.row(round, self.rank, token, row);
        }
        x
    }

    /// Scales of all own tokens, row after row.
    pub(crate) fn scales_by_token(&self, round: u64) -> Vec<u32> {
        let words = |token| self.job.scale_words(&self.job.scales(round, self.rank, token));
        (0..self.routing.tokens()).flat_map(words).collect()
    }

    /// Scales of all own tokens, column after column.
    fn own_scales(&self, round: u64) -> Vec<u32> {
        let (n, packs) = (self.routing.tokens(), self.job.scale_packs());
        let mut words = vec![0; n * packs];
        for token in 0..n {
            let own = self.job.scale_words(&self.job.scales(round, self.rank, token));
            for (pack, word) in own.into_iter().enumerate() {
                words[pack * n + token] = word;
            }
        }
        words
    }

    fn bias(&self, which: u64) -> Vec<bf16> {
        let values = Values { seed: 1000 + which, dtype: DType::Bf16, hidden: self.job.values.hidden };
        let mut row = vec![0; values.row_bytes()];
        let mut bias = Vec::with_capacity(self.routing.tokens() * values.hidden);
        for token in 0..self.routing.tokens() {
            values.fill_row(self.rank, token, &mut row);
            bias.extend(row.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b)));
        }
        bias
    }

    /// The stand-in experts' outputs for the received rows, and the weights to send back.
    pub(crate) fn experts(&self, got: &Delivered, rows: usize, round: u64) -> (Vec<bf16>, Vec<f32>) {
        let (job, want, hidden) = (self.job, &self.received, self.job.values.hidden);
        let mut y = vec![bf16::NAN; rows * hidden];
        let size = job.values.row_bytes();
        let mut numbers = vec![0.0; hidden];
        let mut sum = Vec::new();
        for row in 0..self.rows() {
            let Some((source, _)) = self.row_source(row) else { continue };
            // The row as it came; scales were compared already.
            let scales = job.scales(round, source.rank, source.token);
            job.values.decode(&got.x[row * size..][..size], &scales, &mut numbers);
            let (experts, weights) = self.lanes_of(source);
            let out = &mut y[row * hidden..][..hidden];
            match (job.expanded, want.rows.get(row).copied().flatten()) {
                (Some(_), Some((_, lane))) => expert_row(experts[lane], weights[lane], &numbers, out),
                _ => {
                    let lanes = experts.iter().copied().zip(weights.iter().copied());
                    let here = lanes.filter(|&(e, _)| owner(job.group, e) == Some(self.rank));
                    expert_sum(here, &numbers, &mut sum, out);
                }
            }
        }
        (y, got.topk_weights.clone().unwrap_or_default())
    }
}
