//! What the tests send: a case, and data that depend on its seed, so that nothing of an earlier round can pass for this one's.

use super::super::{CombineChoices, CombineRoles, DispatchRoles};
use super::parallel;
use crate::jit::{Alter, PULL_PARTS};
use crate::layout::{CombineShape, DispatchShape, IndexWidth, PacketLayout, Placement, ScaleOrder};

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    /// K different experts, all equally likely.
    Uniform,
    /// The same, with a third of the lanes empty and some tokens without any.
    Holes,
    /// Always experts 0 to K − 1.
    Hot,
    /// Experts of one rank only.
    OneRank(usize),
    /// Nothing at all.
    Nothing,
}

/// One combination of shapes and flags.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) ranks: usize,
    pub(super) max_tokens: usize,
    pub(super) tokens: Vec<usize>,
    pub(super) experts: usize,
    pub(super) topk: usize,
    pub(super) row_bytes: usize,
    pub(super) scale_packs: usize,
    pub(super) scale_order: ScaleOrder,
    /// Given scales are column-major: strides (1, tokens).
    pub(super) scales_by_column: bool,
    pub(super) index: IndexWidth,
    pub(super) placement: Placement,
    pub(super) alignment: usize,
    /// Fewer tokens and rows of a rank than can come.
    pub(super) token_capacity: Option<usize>,
    pub(super) row_capacity: Option<usize>,
    pub(super) routing: Routing,
    pub(super) weights: bool,
    pub(super) zero_padding: bool,
    pub(super) hidden: usize,
    pub(super) biases: usize,
    pub(super) reduce_first: bool,
    pub(super) sets: usize,
    /// Combine on arbitrary bit patterns, with NaN and infinities.
    pub(super) wild: bool,
    /// Blocks an operation may use; 0 for all.
    pub(super) blocks: usize,
    /// Small batches travel in packets.
    pub(super) packets: bool,
    /// How many of 64 tokens are pulled in combine; 0 if all are sent.
    pub(super) pulled: usize,
    /// Parts in which sums travel, if not the formula's number; and whether tickets are drawn.
    pub(super) parts: Option<usize>,
    pub(super) tickets: bool,
    /// Kernels of packets are made for the case's sizes.
    pub(super) for_sizes: bool,
    /// Other roles of combine's warps than the formula's.
    pub(super) roles: Option<CombineRoles>,
    /// The same of a dispatch in rows.
    pub(super) dispatch_roles: Option<DispatchRoles>,
    /// Kernels with a mistake in them.
    pub(super) alter: Option<Alter>,
}

impl Case {
    pub(super) fn new(ranks: usize, tokens: usize, placement: Placement) -> Self {
        Self {
            ranks,
            max_tokens: tokens,
            tokens: vec![tokens; ranks],
            experts: 8 * ranks,
            topk: 4,
            row_bytes: 512,
            scale_packs: 0,
            scale_order: ScaleOrder::RowMajor,
            scales_by_column: false,
            index: IndexWidth::Bits64,
            placement,
            alignment: 1,
            token_capacity: None,
            row_capacity: None,
            routing: Routing::Uniform,
            weights: true,
            zero_padding: false,
            hidden: 256,
            biases: 0,
            reduce_first: true,
            sets: 2,
            wild: false,
            blocks: 0,
            packets: false,
            pulled: 0,
            parts: None,
            tickets: true,
            for_sizes: false,
            roles: None,
            dispatch_roles: None,
            alter: None,
        }
    }

    /// With rows that travel as rows, and in packets.
    pub(super) fn both_ways(self) -> [Self; 2] {
        [Self { packets: false, ..self.clone() }, Self { packets: true, ..self }]
    }

    /// Whether rows travel in packets.
    pub(super) fn in_packets(&self) -> bool {
        self.packets && PacketLayout::possible(self.ranks, self.max_tokens, self.experts)
    }

    /// Whether weights go back: sums at the source have none of their own.
    pub(super) fn weights_go_back(&self) -> bool {
        self.weights && (self.placement == Placement::Plain || self.reduce_first)
    }

    pub(super) fn choices(&self) -> CombineChoices {
        let pulled = if self.pulled > 0 { self.pulled } else { PULL_PARTS };
        CombineChoices { roles: self.roles, pulled, parts: self.parts, tickets: self.tickets }
    }

    /// Slots for rows that are pulled: one for each set of tensors.
    pub(super) fn combine_inputs(&self) -> usize {
        if self.pulled > 0 { 2 } else { 0 }
    }

    pub(super) fn dispatch_shape(&self) -> DispatchShape {
        let worst = DispatchShape::worst_case_tokens(self.ranks, self.max_tokens);
        let tokens = self.token_capacity.unwrap_or(worst);
        let local = self.experts / self.ranks;
        DispatchShape {
            ranks: self.ranks,
            max_tokens: self.max_tokens,
            experts: self.experts,
            topk: self.topk,
            row_bytes: self.row_bytes,
            scale_packs: self.scale_packs,
            scale_order: self.scale_order,
            index: self.index,
            placement: self.placement,
            alignment: self.alignment,
            token_capacity: tokens,
            row_capacity: match self.placement {
                Placement::Plain => tokens,
                Placement::Expanded => self.row_capacity.unwrap_or(DispatchShape::worst_case_rows(
                    self.ranks,
                    self.max_tokens,
                    self.topk,
                    local,
                    self.alignment,
                )),
            },
        }
    }

    pub(super) fn combine_shape(&self) -> CombineShape {
        CombineShape {
            ranks: self.ranks,
            max_tokens: self.max_tokens,
            topk: self.topk,
            row_bytes: self.hidden * 2,
            placement: self.placement,
            reduce_first: self.reduce_first,
        }
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A counter-based generator.
#[derive(Clone, Copy)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: &[u64]) -> Self {
        Self(seed.iter().fold(0x243f_6a88_85a3_08d3, |a, &s| mix(a ^ s)))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// After so many more numbers.
    fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add((count as u64).wrapping_mul(STEP)))
    }

    pub(super) fn bytes(self, count: usize) -> Vec<u8> {
        let mut all = vec![0; count];
        parallel::fill(&mut all, 8, |first, part| {
            let mut random = self.skip(first / 8);
            for word in part.chunks_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
            }
        });
        all
    }

    /// BF16 numbers between −2 and 2, or any bits at all.
    pub(super) fn bf16(self, count: usize, wild: bool) -> Vec<u16> {
        let mut all = vec![0; count];
        parallel::fill(&mut all, 4, |first, part| {
            let mut random = self.skip(first / 4);
            for four in part.chunks_mut(4) {
                let word = random.next();
                for (i, value) in four.iter_mut().enumerate() {
                    let bits = (word >> (16 * i)) as u16;
                    *value = if wild { bits } else { (bits & 0x80ff) | ((0x3b + (bits >> 8 & 3)) << 8) };
                }
            }
        });
        all
    }

    pub(super) fn f32(mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32).collect()
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What one rank gives to a dispatch.
pub(super) struct Input {
    pub(super) tokens: usize,
    /// `[tokens][row_bytes]`.
    pub(super) x: Vec<u8>,
    /// `[tokens][packs]`, in this order whatever the strides are.
    pub(super) scales: Vec<u32>,
    /// `[tokens][K]`.
    pub(super) experts: Vec<i64>,
    /// `[tokens][K]`.
    pub(super) weights: Vec<f32>,
}

impl Input {
    pub(super) fn new(case: &Case, rank: usize, seed: u64) -> Self {
        let tokens = case.tokens[rank];
        let random = |what: u64| Random::new(&[seed, rank as u64, what]);
        let packs = random(2).bytes(tokens * case.scale_packs * 4);
        Self {
            tokens,
            x: random(1).bytes(tokens * case.row_bytes),
            scales: packs.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            experts: experts(case, random(3), tokens),
            weights: random(4).f32(tokens * case.topk),
        }
    }

    /// New rows, scales and weights for the same routes.
    pub(super) fn refreshed(&self, case: &Case, rank: usize, seed: u64) -> Self {
        Self { experts: self.experts.clone(), ..Self::new(case, rank, seed) }
    }

    pub(super) fn expert_bytes(&self, width: IndexWidth) -> Vec<u8> {
        match width {
            IndexWidth::Bits32 => self.experts.iter().flat_map(|&e| (e as i32).to_le_bytes()).collect(),
            IndexWidth::Bits64 => self.experts.iter().flat_map(|e| e.to_le_bytes()).collect(),
        }
    }

    pub(super) fn scale_bytes(&self, case: &Case) -> Vec<u8> {
        let packs = case.scale_packs;
        let order: Vec<u32> = if case.scales_by_column {
            (0..packs)
                .flat_map(|p| (0..self.tokens).map(move |t| t * packs + p))
                .map(|i| self.scales[i])
                .collect()
        } else {
            self.scales.clone()
        };
        bytes_of(&order, u32::to_le_bytes)
    }
}

fn experts(case: &Case, mut random: Random, tokens: usize) -> Vec<i64> {
    let local = case.experts / case.ranks;
    let mut all = Vec::with_capacity(tokens * case.topk);
    for _ in 0..tokens {
        let (first, count) = match case.routing {
            Routing::OneRank(r) => (r * local, local),
            _ => (0, case.experts),
        };
        let mut pool: Vec<i64> = (first..first + count).map(|e| e as i64).collect();
        let empty = case.routing == Routing::Holes && random.below(5) == 0;
        for k in 0..case.topk {
            if empty || case.routing == Routing::Nothing || pool.is_empty() {
                all.push(-1);
                continue;
            }
            if case.routing == Routing::Holes && random.below(3) == 0 {
                all.push(-1);
                continue;
            }
            let pick =
                if case.routing == Routing::Hot { k.min(pool.len() - 1) } else { random.below(pool.len()) };
            all.push(if case.routing == Routing::Hot { pool[pick] } else { pool.swap_remove(pick) });
        }
    }
    all
}

pub(super) fn bytes_of<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| to(v)).collect()
}

/// 16-bit values as they lie in memory, there as here.
pub(super) fn as_bytes(values: &[u16]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little"), "devices are little-endian") };
    // SAFETY: the range is that of `values`; bytes need no alignment and take every value.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
