//! What dispatch and combine must give, straight from the definitions, without any of the kernels' ideas.

use super::input::{Case, Input};
use super::parallel;
use crate::layout::Placement;

/// What one rank receives.
pub(super) struct Received {
    /// (source rank, token) of each token index.
    pub(super) tokens: Vec<(usize, usize)>,
    /// Lanes of each token that live here.
    pub(super) lanes: Vec<u32>,
    /// Row of each lane of each token, −1 for lanes elsewhere: `[tokens][K]`. In the plain layout the token index.
    pub(super) lane_row: Vec<i32>,
    /// (token index, lane) of each row; `None` in gaps. Expanded only.
    pub(super) rows: Vec<Option<(usize, usize)>>,
    pub(super) rank_psum: Vec<i32>,
    /// `[EL + 1]`.
    pub(super) expert_start: Vec<i32>,
    pub(super) expert_count: Vec<i32>,
}

/// What every rank receives.
pub(super) fn dispatch(case: &Case, inputs: &[Input]) -> Vec<Received> {
    (0..case.ranks).map(|d| receive(case, inputs, d)).collect()
}

fn receive(case: &Case, inputs: &[Input], d: usize) -> Received {
    let (local, topk) = (case.experts / case.ranks, case.topk);
    let here = |e: i64| e >= 0 && e as usize / local == d;
    let mut tokens = Vec::new();
    let mut lanes = Vec::new();
    let mut rank_psum = Vec::new();
    let mut by_expert: Vec<Vec<(usize, usize)>> = vec![Vec::new(); local];
    for (s, input) in inputs.iter().enumerate() {
        for t in 0..input.tokens {
            let row = &input.experts[t * topk..(t + 1) * topk];
            let mask = row.iter().enumerate().filter(|&(_, &e)| here(e)).fold(0, |m, (k, _)| m | 1 << k);
            if mask == 0 {
                continue;
            }
            for (k, &e) in row.iter().enumerate().filter(|&(_, &e)| here(e)) {
                by_expert[e as usize % local].push((tokens.len(), k));
            }
            tokens.push((s, t));
            lanes.push(mask);
        }
        rank_psum.push(tokens.len() as i32);
    }
    let mut lane_row = vec![-1; tokens.len() * topk];
    let mut rows = Vec::new();
    let mut expert_start = vec![0i32];
    for list in &by_expert {
        let begin = expert_start[expert_start.len() - 1] as usize;
        let end = begin + list.len().next_multiple_of(case.alignment);
        rows.resize(end, None);
        for (i, &(token, k)) in list.iter().enumerate() {
            rows[begin + i] = Some((token, k));
            lane_row[token * topk + k] = match case.placement {
                Placement::Plain => token as i32,
                Placement::Expanded => (begin + i) as i32,
            };
        }
        expert_start.push(end as i32);
    }
    let expert_count = by_expert.iter().map(|l| l.len() as i32).collect();
    Received { tokens, lanes, lane_row, rows, rank_psum, expert_start, expert_count }
}

/// Rounds to nearest even; every NaN is 0x7FFF.
fn round(v: f32) -> u16 {
    if v.is_nan() {
        return 0x7fff;
    }
    let bits = v.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Sums of rows, value by value. Without biases nothing is 0, and one row is taken as it is.
fn sum(biases: &[&[u16]], rows: &[&[u16]], wide: &mut [f32], out: &mut [u16]) {
    match (biases, rows) {
        ([], []) => return out.fill(0),
        ([], [one]) => return out.copy_from_slice(one),
        _ => {}
    }
    let value = |b: u16| f32::from_bits(u32::from(b) << 16);
    for (i, row) in biases.iter().chain(rows).enumerate() {
        for (sum, &b) in wide.iter_mut().zip(*row) {
            *sum = if i == 0 { value(b) } else { *sum + value(b) };
        }
    }
    out.iter_mut().zip(wide).for_each(|(to, sum)| *to = round(*sum));
}

/// Result rows of one rank. `rows[r]` are the rows that rank r's experts made, `hidden` values each.
pub(super) fn combine(
    case: &Case,
    received: &[Received],
    input: &Input,
    rank: usize,
    rows: &[Vec<u16>],
    biases: &[Vec<u16>],
) -> Vec<u16> {
    let (hidden, topk, local) = (case.hidden, case.topk, case.experts / case.ranks);
    // Token index of this rank's tokens at each rank.
    let mut index = vec![vec![usize::MAX; input.tokens]; case.ranks];
    for (r, all) in received.iter().enumerate() {
        for (i, &(s, t)) in all.tokens.iter().enumerate() {
            if s == rank {
                index[r][t] = i;
            }
        }
    }
    let token = |t: usize, wide: &mut [f32], out: &mut [u16]| {
        let experts = &input.experts[t * topk..(t + 1) * topk];
        let owner = |k: usize| (experts[k] >= 0).then(|| experts[k] as usize / local);
        // (rank, rows) of each contribution, in the order in which they are added.
        let mut parts: Vec<(usize, Vec<usize>)> = Vec::new();
        for k in 0..topk {
            let Some(r) = owner(k) else { continue };
            let row = |k: usize| received[r].lane_row[index[r][t] * topk + k] as usize;
            let last_of_rank = !(k + 1..topk).any(|other| owner(other) == Some(r));
            match (case.placement, case.reduce_first) {
                (Placement::Expanded, false) => parts.push((r, vec![row(k)])),
                (Placement::Plain, _) if last_of_rank => parts.push((r, vec![row(k)])),
                (Placement::Expanded, true) if last_of_rank => {
                    parts.push((r, (0..topk).filter(|&o| owner(o) == Some(r)).map(row).collect()));
                }
                _ => {}
            }
        }
        let mut terms = vec![0; parts.len() * hidden];
        for ((r, list), term) in parts.iter().zip(terms.chunks_exact_mut(hidden)) {
            let list: Vec<_> = list.iter().map(|row| &rows[*r][row * hidden..][..hidden]).collect();
            sum(&[], &list, wide, term);
        }
        let terms: Vec<_> = terms.chunks_exact(hidden).collect();
        let biases: Vec<_> = biases.iter().map(|b| &b[t * hidden..][..hidden]).collect();
        sum(&biases, &terms, wide, out);
    };
    let mut all = vec![0; input.tokens * hidden];
    parallel::fill(&mut all, hidden, |first, part| {
        let mut wide = vec![0.; hidden];
        for (i, out) in part.chunks_exact_mut(hidden).enumerate() {
            token(first / hidden + i, &mut wide, out);
        }
    });
    all
}
