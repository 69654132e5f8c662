//! What dispatch and combine must deliver, computed from all ranks' inputs by the definition, slowly, on one thread.
//!
//! Nothing here is shared with the backends: positions come from walking all tokens in order, sums from adding in order.

use half::bf16;

use crate::routing::{Group, Routing};

/// A received token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Rank that gave the token.
    pub rank: usize,
    /// Its number there.
    pub token: usize,
}

/// What one rank must receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Received tokens, in order: by source rank, then by token.
    pub tokens: Vec<Source>,
    /// Number of tokens from each rank.
    pub tokens_from: Vec<usize>,
    /// Tokens of each local expert.
    pub expert_counts: Vec<usize>,
    /// First row of each local expert in the expanded layout, and the total at the end; multiples of the alignment.
    pub expert_starts: Vec<usize>,
    /// What lies in each row of the expanded layout: index into `tokens`, and the lane; `None` in alignment gaps.
    pub rows: Vec<Option<(usize, usize)>>,
}

/// The rank that owns an expert; `None` for −1.
pub fn owner(group: Group, expert: i64) -> Option<usize> {
    usize::try_from(expert).ok().map(|e| e / (group.experts / group.ranks))
}

/// What `rank` must receive.
pub fn received(group: Group, inputs: &[Routing], rank: usize, alignment: usize) -> Received {
    let per_rank = group.experts / group.ranks;
    let mut tokens = Vec::new();
    let mut tokens_from = vec![0; group.ranks];
    let mut by_expert: Vec<Vec<(usize, usize)>> = vec![Vec::new(); per_rank];
    for (source, routing) in inputs.iter().enumerate() {
        for token in 0..routing.tokens() {
            let mut here = false;
            for (lane, &expert) in routing.of(token).iter().enumerate() {
                if owner(group, expert) == Some(rank) {
                    here = true;
                    by_expert[expert as usize - rank * per_rank].push((tokens.len(), lane));
                }
            }
            if here {
                tokens.push(Source { rank: source, token });
                tokens_from[source] += 1;
            }
        }
    }
    let (mut rows, mut expert_starts) = (Vec::new(), Vec::new());
    for expert in &by_expert {
        expert_starts.push(rows.len());
        rows.extend(expert.iter().copied().map(Some));
        rows.resize(rows.len().div_ceil(alignment) * alignment, None);
    }
    expert_starts.push(rows.len());
    let expert_counts = by_expert.iter().map(Vec::len).collect();
    Received { tokens, tokens_from, expert_counts, expert_starts, rows }
}

/// The ranks that receive a token, in the order in which their contributions are added: by their highest lane.
pub fn contributors(group: Group, experts: &[i64]) -> Vec<usize> {
    let mut order = Vec::new();
    for &expert in experts.iter().rev() {
        if let Some(rank) = owner(group, expert).filter(|rank| !order.contains(rank)) {
            order.push(rank);
        }
    }
    order.reverse();
    order
}

/// Adds rows in order: nothing is +0, one row keeps its bits, more are added in single precision and rounded once.
pub fn sum(terms: &[&[bf16]], out: &mut [bf16]) {
    match terms {
        [] => out.fill(bf16::from_bits(0)),
        [only] => out.copy_from_slice(only),
        [first, rest @ ..] => {
            for (i, o) in out.iter_mut().enumerate() {
                let mut total = f32::from(first[i]);
                for term in rest {
                    total += f32::from(term[i]);
                }
                *o = round(total);
            }
        }
    }
}

/// To the nearest BF16, ties to even, from the bits.
fn round(x: f32) -> bf16 {
    if x.is_nan() {
        return bf16::from_bits(0x7fff);
    }
    let bits = x.to_bits();
    let (kept, dropped) = (bits >> 16, bits & 0xffff);
    let up = dropped > 0x8000 || (dropped == 0x8000 && kept & 1 == 1);
    bf16::from_bits((kept + u32::from(up)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Group = Group { ranks: 2, experts: 4, topk: 2 };

    fn routing(ids: &[i64]) -> Routing {
        Routing { topk: 2, experts: ids.to_vec(), weights: vec![0.5; ids.len()] }
    }

    #[test]
    fn a_case_by_hand() {
        // Experts 0 and 1 live on rank 0, 2 and 3 on rank 1.
        let inputs = [routing(&[0, 1, 3, 0, -1, -1]), routing(&[2, 3, 1, 2])];
        let zero = received(GROUP, &inputs, 0, 4);
        let at = |rank, token| Source { rank, token };
        assert_eq!(zero.tokens, [at(0, 0), at(0, 1), at(1, 1)]);
        assert_eq!(zero.tokens_from, [2, 1]);
        assert_eq!(zero.expert_counts, [2, 2]);
        assert_eq!(zero.expert_starts, [0, 4, 8]);
        let gap = None;
        assert_eq!(zero.rows, [Some((0, 0)), Some((1, 1)), gap, gap, Some((0, 1)), Some((2, 0)), gap, gap]);
        let one = received(GROUP, &inputs, 1, 1);
        assert_eq!(one.tokens, [at(0, 1), at(1, 0), at(1, 1)]);
        assert_eq!(one.rows, [Some((1, 0)), Some((2, 1)), Some((0, 0)), Some((1, 1))]);
    }

    #[test]
    fn contributions_stand_at_their_highest_lane() {
        let group = Group { ranks: 3, experts: 6, topk: 4 };
        assert_eq!(contributors(group, &[0, 2, 4, 1]), [1, 2, 0]);
        assert_eq!(contributors(group, &[-1, 5, -1, -1]), [2]);
        assert!(contributors(group, &[-1; 4]).is_empty());
    }

    #[test]
    fn sums_round_once() {
        let row = |x: f32| vec![bf16::from_f32(x)];
        let add = |terms: &[f32]| {
            let rows: Vec<_> = terms.iter().map(|&x| row(x)).collect();
            let mut out = row(9.0);
            sum(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut out);
            out[0]
        };
        assert_eq!(add(&[]).to_bits(), 0);
        assert_eq!(add(&[-0.0]).to_bits(), 0x8000);
        assert_eq!(add(&[1.0, 1.0 / 256.0]), bf16::from_f32(1.0), "tie to even");
        // Rounding after each step would lose both halves.
        assert_eq!(add(&[1.0, 1.0 / 256.0, 1.0 / 256.0]), bf16::from_f32(1.0 + 1.0 / 128.0));
        assert_eq!(add(&[f32::NAN, 1.0]).to_bits(), 0x7fff);
        assert_eq!(add(&[3.3e38, 3.3e38]), bf16::INFINITY);
    }
}
