//! Comparison of a rank's results with the oracle.

use std::ops::Range;

use deepep_core::Reduction;
use half::bf16;

use super::got::Got;
use super::{JobError, Mismatch, Rank};
use crate::inputs::{expert_row, expert_sum};
use crate::oracle::{self, owner};
use crate::parallel::in_parts;

macro_rules! differs {
    ($($text:tt)*) => {
        return Err(JobError::Mismatch(Mismatch(format!($($text)*))))
    };
}

macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            differs!($($text)*);
        }
    };
}

impl Rank<'_> {
    /// The rank, lanes and rows of what was received, as the oracle has it.
    pub(crate) fn check_dispatch(&self, got: &Got, round: u64) -> Result<(), JobError> {
        let (job, want) = (self.job, &self.received);
        let me = self.rank;
        let rows = self.rows();
        let expected = [want.tokens.len() as i32, rows as i32, 0, 0];
        let found = &got.cells;
        ensure!(*found == expected, "rank {me}, counts: {found:?}, expected {expected:?}");
        let mut sum = 0;
        let prefix: Vec<i32> = want
            .tokens_from
            .iter()
            .map(|&n| {
                sum += n as i32;
                sum
            })
            .collect();
        let found = &got.rank_prefix;
        ensure!(*found == prefix, "rank {me}, tokens by source rank: {found:?}, expected {prefix:?}");
        let starts: Vec<i32> = want.expert_starts.iter().map(|&n| n as i32).collect();
        let found = &got.expert_starts;
        ensure!(*found == starts, "rank {me}, first rows of experts: {found:?}, expected {starts:?}");
        let counts: Vec<i32> = want.expert_counts.iter().map(|&n| n as i32).collect();
        let found = &got.expert_counts;
        ensure!(*found == counts, "rank {me}, rows of experts: {found:?}, expected {counts:?}");
        if let Some(counts) = &got.counts {
            ensure!(counts.tokens == want.tokens.len(), "rank {me}: {} tokens counted", counts.tokens);
            ensure!(counts.rows == rows, "rank {me}: {} rows counted", counts.rows);
            ensure!(counts.expert_counts == want.expert_counts, "rank {me}: experts counted wrong");
        }
        for (at, &source) in want.tokens.iter().enumerate() {
            let lanes = self.lanes_of(source).0.iter().enumerate();
            let here = lanes.filter(|&(_, &expert)| owner(job.group, expert) == Some(me));
            let mask = here.fold(0, |mask, (lane, _)| mask | 1 << lane);
            let expected = [(source.rank * job.max_tokens + source.token) as i32, mask];
            let found = &got.sources[2 * at..][..2];
            ensure!(*found == expected, "rank {me}, source [{at}]: {found:?}, expected {expected:?}");
        }
        let size = job.values.row_bytes();
        let x = &got.x;
        in_parts(rows, size, job.group.ranks, |part| {
            let mut row = vec![0; size];
            for at in part {
                let found = &x[at * size..][..size];
                let Some((source, what)) = self.row_source(at) else {
                    if job.zero_padding {
                        ensure!(found.iter().all(|&b| b == 0), "rank {me}, gap row {at} is not zero");
                    }
                    continue;
                };
                job.row(round, source.rank, source.token, &mut row);
                if found == row {
                    continue;
                }
                if let Some(i) = (0..size).find(|&i| found[i] != row[i]) {
                    let (got, want) = (found[i], row[i]);
                    differs!("rank {me}, row {at} ({what}), byte {i}: {got:#04x}, expected {want:#04x}");
                }
            }
            Ok(())
        })?;
        self.check_scales(got, rows, round)?;
        self.check_lanes(got)
    }

    /// Experts and weights of a token.
    pub(super) fn lanes_of(&self, source: oracle::Source) -> (&[i64], &[f32]) {
        let routing = &self.routings[source.rank];
        (routing.of(source.token), routing.weights_of(source.token))
    }

    /// Which token a row of the result is; `None` for alignment gaps.
    pub(super) fn row_source(&self, row: usize) -> Option<(oracle::Source, String)> {
        let index = match self.job.expanded {
            Some(_) => self.received.rows[row]?.0,
            None => row,
        };
        let source = self.received.tokens[index];
        Some((source, format!("token {} of rank {}", source.token, source.rank)))
    }

    fn check_scales(&self, got: &Got, rows: usize, round: u64) -> Result<(), JobError> {
        let packs = self.job.scale_packs();
        let Some(found) = &got.scales else {
            ensure!(packs == 0, "rank {}: no scales came", self.rank);
            return Ok(());
        };
        for row in 0..rows {
            let words = match self.row_source(row) {
                Some((source, _)) => self.job.scale_words(&self.job.scales(round, source.rank, source.token)),
                None if self.job.zero_padding => vec![0; packs],
                None => continue,
            };
            for (pack, &want) in words.iter().enumerate() {
                let found = found[row * packs + pack];
                let me = self.rank;
                ensure!(found == want, "rank {me}, scale [{row}][{pack}]: {found:#x}, expected {want:#x}");
            }
        }
        Ok(())
    }

    fn check_lanes(&self, got: &Got) -> Result<(), JobError> {
        let (job, want, me, k) = (self.job, &self.received, self.rank, self.job.group.topk);
        let weights = got.topk_weights.as_deref();
        ensure!(weights.is_some() == job.weights, "rank {me}: weights came or did not");
        if job.expanded.is_none() {
            let ids = got.topk_idx.as_deref().unwrap_or_default();
            let first = (me * job.group.experts / job.group.ranks) as i64;
            for (at, &source) in want.tokens.iter().enumerate() {
                let (experts, given) = self.lanes_of(source);
                for lane in 0..k {
                    let here = owner(job.group, experts[lane]) == Some(me);
                    let want = if here { experts[lane] - first } else { -1 };
                    let id = ids.get(at * k + lane).copied();
                    ensure!(id == Some(want), "rank {me}, topk_idx[{at}][{lane}]: {id:?}, expected {want}");
                    if let Some(found) = weights {
                        let (found, want) = (found[at * k + lane], given[lane]);
                        let same = found.to_bits() == want.to_bits();
                        ensure!(same, "rank {me}, topk_weights[{at}][{lane}]: {found}, expected {want}");
                    }
                }
            }
        } else if let Some(found) = weights {
            for (row, what) in want.rows.iter().enumerate() {
                let want = match what {
                    Some((index, lane)) => self.lanes_of(want.tokens[*index]).1[*lane],
                    None if job.zero_padding => 0.0,
                    None => continue,
                };
                let found = found[row];
                let same = found.to_bits() == want.to_bits();
                ensure!(same, "rank {me}, weight of row {row}: {found}, expected {want}");
            }
        }
        Ok(())
    }

    pub(crate) fn check_combine(
        &self,
        out: &[bf16],
        out_weights: &[f32],
        biases: &[Vec<bf16>],
        round: u64,
    ) -> Result<(), JobError> {
        let bytes = self.job.values.hidden * self.job.group.topk * size_of::<bf16>();
        in_parts(self.routing.tokens(), bytes, self.job.group.ranks, |part| {
            self.check_sums(part, out, out_weights, biases, round)
        })
    }

    /// The sums of some tokens.
    fn check_sums(
        &self,
        tokens: Range<usize>,
        out: &[bf16],
        out_weights: &[f32],
        biases: &[Vec<bf16>],
        round: u64,
    ) -> Result<(), JobError> {
        let (job, me, hidden, k) = (self.job, self.rank, self.job.values.hidden, self.job.group.topk);
        let mut row = vec![0; job.values.row_bytes()];
        let mut numbers = vec![0.0; hidden];
        let mut sum = Vec::new();
        let mut want = vec![bf16::ZERO; hidden];
        for token in tokens {
            job.row(round, me, token, &mut row);
            let scales = job.scales(round, me, token);
            job.values.decode(&row, &scales, &mut numbers);
            let (experts, weights) = (self.routing.of(token), self.routing.weights_of(token));
            let lanes_of =
                |rank: usize| (0..k).filter(move |&lane| owner(job.group, experts[lane]) == Some(rank));
            let one = |lane: usize| {
                let mut out = vec![bf16::ZERO; hidden];
                expert_row(experts[lane], weights[lane], &numbers, &mut out);
                out
            };
            let contributions: Vec<Vec<bf16>> =
                if job.expanded.is_some() && job.reduction == Reduction::AtSource {
                    (0..k).filter(|&lane| experts[lane] >= 0).map(one).collect()
                } else {
                    let of_rank = |rank: usize| {
                        let mut out = vec![bf16::ZERO; hidden];
                        if job.expanded.is_some() {
                            let rows: Vec<_> = lanes_of(rank).map(one).collect();
                            oracle::sum(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut out);
                        } else {
                            let chosen = lanes_of(rank).map(|lane| (experts[lane], weights[lane]));
                            expert_sum(chosen, &numbers, &mut sum, &mut out);
                        }
                        out
                    };
                    oracle::contributors(job.group, experts).into_iter().map(of_rank).collect()
                };
            let mut terms: Vec<&[bf16]> =
                biases.iter().map(|bias| &bias[token * hidden..][..hidden]).collect();
            terms.extend(contributions.iter().map(Vec::as_slice));
            oracle::sum(&terms, &mut want);
            let found = &out[token * hidden..][..hidden];
            if let Some(i) = (0..hidden).find(|&i| found[i].to_bits() != want[i].to_bits()) {
                let (found, want) = (found[i], want[i]);
                differs!("rank {me}, combined token {token}, column {i}: {found}, expected {want}");
            }
            if job.weights {
                for lane in 0..k {
                    let want = if experts[lane] >= 0 { weights[lane] } else { 0.0 };
                    let found = out_weights[token * k + lane];
                    let same = found.to_bits() == want.to_bits();
                    ensure!(same, "rank {me}, combined weight [{token}][{lane}]: {found}, expected {want}");
                }
            }
        }
        Ok(())
    }
}
