//! One rank's part of a job: its calls, and the rows it gives.

use std::sync::Arc;
use std::time::Duration;

use deepep_core::layout::IndexWidth;
use deepep_core::tensor::DType;
use deepep_core::{CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, Handle, Transfer};
use half::bf16;

use super::clock::Clock;
use super::{Got, Job, JobError, Report};
use crate::inputs::{Values, expert_row, expert_sum};
use crate::oracle::{self, Received, owner};
use crate::parallel::on_rows;
use crate::routing::Routing;
use crate::tensors::{Memory, bytes, numbers};

/// One rank's part of a job. Its tensors lie where the buffer's backend can use them.
pub struct Rank<'a> {
    pub(super) job: &'a Job,
    pub(super) rank: usize,
    pub(super) routings: &'a [Routing],
    pub(super) routing: &'a Routing,
    pub(super) received: Received,
    pub(super) memory: Arc<Memory>,
}

impl<'a> Rank<'a> {
    /// Prepares a rank's part, given all ranks' routing.
    pub fn new(job: &'a Job, routings: &'a [Routing], rank: usize) -> Self {
        let received = oracle::received(job.group, routings, rank, job.expanded.unwrap_or(1));
        Self { job, rank, routings, routing: &routings[rank], received, memory: Arc::default() }
    }

    /// Uses this memory for tensors, after other parts of jobs of the same rank have.
    #[must_use]
    pub fn with_memory(mut self, memory: Arc<Memory>) -> Self {
        self.memory = memory;
        self
    }

    /// Runs the job once and compares everything.
    ///
    /// # Errors
    /// [`JobError`]: the library's, or the first difference.
    pub fn run(&self, buffer: &mut ElasticBuffer) -> Result<Report, JobError> {
        let outcome = self.rounds(buffer);
        // What failed may have left work behind that uses this rank's tensors.
        if outcome.is_err()
            && let Err(Error::StillRunning { .. } | Error::Vmm(_)) = buffer.synchronize(self.patience())
        {
            self.memory.abandon();
        }
        outcome
    }

    fn rounds(&self, buffer: &mut ElasticBuffer) -> Result<Report, JobError> {
        let (report, handle) = self.round(buffer, 0, None)?;
        if self.job.cached { Ok(self.round(buffer, 1, Some(&handle))?.0) } else { Ok(report) }
    }

    /// Longer than kernels wait, for those before one's own.
    fn patience(&self) -> Duration {
        self.job.timeout.saturating_mul(3)
    }

    /// Copies what the oracle says has come; rows into the memory of `scratch`.
    pub(crate) fn got(
        &self,
        buffer: &ElasticBuffer,
        dispatched: &Dispatched,
        scratch: Vec<u8>,
    ) -> Result<Got, JobError> {
        Ok(Got::new(buffer, dispatched, self.received.tokens.len(), self.rows(), scratch)?)
    }

    /// Rows of the dispatch's result.
    pub(crate) fn rows(&self) -> usize {
        if self.job.expanded.is_some() { self.received.rows.len() } else { self.received.tokens.len() }
    }

    /// Dispatch, experts, combine. `round` changes the rows.
    fn round(
        &self,
        buffer: &mut ElasticBuffer,
        round: u64,
        cached: Option<&Handle>,
    ) -> Result<(Report, Handle), JobError> {
        let job = self.job;
        self.memory.reset()?;
        let (dispatched, dispatch) = self.dispatch(buffer, round, cached)?;
        let got = self.got(buffer, &dispatched, Vec::new())?;
        self.check_dispatch(&got, round)?;
        self.memory.reset()?;
        let combine = self.combine(buffer, &dispatched, &got, round)?;

        let row_bytes = job.values.row_bytes() + 4 * job.scale_packs();
        let foreign = self.received.tokens.iter().filter(|source| source.rank != self.rank).count();
        let contributions: usize = (0..self.routing.tokens())
            .map(|t| oracle::contributors(job.group, self.routing.of(t)).len())
            .sum();
        let report = Report {
            tokens: self.routing.tokens(),
            received: self.received.tokens.len(),
            rows: self.rows(),
            bytes_from_peers: foreign * row_bytes,
            dispatch_bytes: self.received.tokens.len() * row_bytes,
            combine_bytes: contributions * job.values.hidden * 2,
            dispatch,
            combine,
        };
        Ok((report, dispatched.into_handle()))
    }

    /// Dispatches this rank's rows, and waits until everything has arrived.
    fn dispatch(
        &self,
        buffer: &mut ElasticBuffer,
        round: u64,
        cached: Option<&Handle>,
    ) -> Result<(Dispatched, Duration), JobError> {
        let (job, n, topk) = (self.job, self.routing.tokens(), self.job.group.topk);
        let memory = &self.memory;
        let x = memory.matrix(buffer, &self.own_rows(round), job.values.dtype, [n, job.values.hidden])?;
        let (ids, width) = match job.index {
            IndexWidth::Bits32 => {
                let narrow: Vec<i32> = self.routing.experts.iter().map(|&e| e as i32).collect();
                (bytes(&narrow), DType::I32)
            }
            IndexWidth::Bits64 => (bytes(&self.routing.experts), DType::I64),
        };
        let index = memory.matrix(buffer, &ids, width, [n, topk])?;
        let packs = job.scale_packs();
        let scale = if job.packed_scales { DType::I32 } else { DType::F32 };
        // Column after column, so that strides are put to use.
        let words = bytes(&self.own_scales(round));
        let scales = memory.matrix(buffer, &words, scale, [packs, n])?;
        let weights = memory.matrix(buffer, &bytes(&self.routing.weights), DType::F32, [n, topk])?;
        let clock = Clock::start(buffer)?;
        // SAFETY: the tensors are not written, and the memory is reset, only after `stop` has waited for the dispatch, or after `run` has
        // waited for what a failed call left.
        let (x, index, scales, weights) = unsafe {
            let scales = scales.viewed_as(scale, [n, packs], [1, n as isize])?;
            (x.view()?, index.view()?, scales, weights.view()?)
        };
        let mut args = match cached {
            Some(handle) => DispatchArgs::cached(x, handle),
            None => DispatchArgs::new(x, index),
        };
        if packs > 0 {
            args = args.scale_order(job.scale_order).scales(scales);
        }
        if job.weights {
            args = args.weights(weights);
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
        let dispatched = buffer.dispatch(args)?;
        let took = clock.stop(buffer, self.patience())?;
        dispatched.check()?;
        Ok((dispatched, took))
    }

    /// Lets the stand-in experts work, combines what they make, and compares the sums.
    fn combine(
        &self,
        buffer: &mut ElasticBuffer,
        dispatched: &Dispatched,
        got: &Got,
        round: u64,
    ) -> Result<Duration, JobError> {
        let (job, n, hidden, topk) =
            (self.job, self.routing.tokens(), self.job.values.hidden, self.job.group.topk);
        let memory = &self.memory;
        let y = bytes(&self.experts(got, round, Vec::new()));
        let y = memory.matrix(buffer, &y, DType::Bf16, [got.capacity, hidden])?;
        let returned = got.topk_weights.as_deref().unwrap_or_default();
        let columns = if job.expanded.is_some() { 1 } else { topk };
        let rows = if job.exact { returned.len() / columns } else { self.weight_rows(dispatched) };
        let weights = memory.matrix(buffer, &bytes(returned), DType::F32, [rows, columns])?;
        let mut input = if job.pull { Some(buffer.combine_input()?) } else { None };
        if let Some(input) = &mut input {
            input.reshape(hidden, topk)?;
            // SAFETY: as below; the copies come before the combine on the buffer's own stream.
            let (y, weights) = unsafe { (y.view()?, weights.view()?) };
            input.copy_in(y, None)?;
            if job.weights {
                input.copy_weights_in(weights, None)?;
            }
        }
        let biases: Vec<Vec<bf16>> = (0..job.biases).map(|i| self.bias(i as u64)).collect();
        let bias_tensors = biases
            .iter()
            .map(|bias| memory.matrix(buffer, &bytes(bias), DType::Bf16, [n, hidden]))
            .collect::<deepep_core::Result<Vec<_>>>()?;
        let nan = bytes(&vec![bf16::NAN; n * hidden]);
        let mut out = memory.matrix(buffer, &nan, DType::Bf16, [n, hidden])?;
        let nan = bytes(&vec![f32::NAN; n * topk]);
        let mut out_weights = memory.matrix(buffer, &nan, DType::F32, [n, topk])?;

        let clock = Clock::start(buffer)?;
        // SAFETY: the tensors are used, and the memory is reset, only after `stop` has waited for the combine, or after `run` has waited for
        // what a failed call left.
        let args = unsafe {
            let y = input.as_ref().map_or(y.view()?, |input| input.x().first_rows(got.capacity));
            let weights = input.as_ref().map_or(weights.view()?, |input| input.weights().first_rows(rows));
            let mut args = CombineArgs::new(y, dispatched.handle(), out.view_mut()?).reduction(job.reduction);
            if job.weights {
                args = args.weights(weights, out_weights.view_mut()?);
            }
            if job.pull {
                args = args.transfer(Transfer::Pull);
            }
            for bias in &bias_tensors {
                args = args.bias(bias.view()?);
            }
            args
        };
        buffer.combine(args)?;
        let took = clock.stop(buffer, self.patience())?;
        let out: Vec<bf16> = numbers(&out.read(buffer)?);
        let out_weights: Vec<f32> = numbers(&out_weights.read(buffer)?);
        self.check_combine(&out, &out_weights, &biases, round)?;
        Ok(took)
    }

    /// Rows of the weights that combine is given if counts are not known.
    fn weight_rows(&self, dispatched: &Dispatched) -> usize {
        if self.job.expanded.is_some() { dispatched.rows() } else { dispatched.tokens() }
    }

    pub(crate) fn own_rows(&self, round: u64) -> Vec<u8> {
        let size = self.job.values.row_bytes();
        let mut x = vec![0; self.routing.tokens() * size];
        on_rows(&mut x, size, self.job.group.ranks, |first, rows| {
            for (i, row) in rows.chunks_mut(size).enumerate() {
                self.job.row(round, self.rank, first + i, row);
            }
        });
        x
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

    /// Scales of all own tokens, row after row.
    pub(crate) fn scales_by_token(&self, round: u64) -> Vec<u32> {
        let words = |token| self.job.scale_words(&self.job.scales(round, self.rank, token));
        (0..self.routing.tokens()).flat_map(words).collect()
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

    /// The stand-in experts' outputs for the received rows, in the memory of `y`.
    pub(crate) fn experts(&self, got: &Got, round: u64, mut y: Vec<bf16>) -> Vec<bf16> {
        let (job, want, hidden) = (self.job, &self.received, self.job.values.hidden);
        y.resize(self.rows() * hidden, bf16::NAN);
        let size = job.values.row_bytes();
        on_rows(&mut y, hidden, job.group.ranks, |first, rows| {
            let mut numbers = vec![0.0; hidden];
            let mut sum = Vec::new();
            for (i, out) in rows.chunks_mut(hidden).enumerate() {
                let row = first + i;
                let Some((source, _)) = self.row_source(row) else {
                    out.fill(bf16::NAN);
                    continue;
                };
                // The row as it came; scales were compared already.
                let scales = job.scales(round, source.rank, source.token);
                job.values.decode(&got.x[row * size..][..size], &scales, &mut numbers);
                let (experts, weights) = self.lanes_of(source);
                match (job.expanded, want.rows.get(row).copied().flatten()) {
                    (Some(_), Some((_, lane))) => expert_row(experts[lane], weights[lane], &numbers, out),
                    _ => {
                        let lanes = experts.iter().copied().zip(weights.iter().copied());
                        let here = lanes.filter(|&(e, _)| owner(job.group, e) == Some(self.rank));
                        expert_sum(here, &numbers, &mut sum, out);
                    }
                }
            }
        });
        y
    }
}
