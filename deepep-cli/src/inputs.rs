//! Row contents that every rank can compute for every other, and the stand-in for the experts.

use deepep_core::tensor::DType;
use float8::F8E4M3;
use half::{bf16, f16};

/// Columns that share one scale factor in FP8.
pub const SCALE_BLOCK: usize = 128;

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Contents of rows as a function of seed, rank and token.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    /// Different seeds, different rows.
    pub seed: u64,
    /// Element type.
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: usize,
}

impl Values {
    /// Number of scale factors of a row: one for each 128 columns in FP8, else none.
    pub fn scales(&self) -> usize {
        if self.dtype == DType::F8E4M3 { self.hidden.div_ceil(SCALE_BLOCK) } else { 0 }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Writes the row of one token. Every bit pattern occurs in dtypes that no expert computes with; the others hold numbers in
    /// −2..2, so that sums round.
    pub fn fill_row(&self, rank: usize, token: usize, row: &mut [u8]) {
        let start = mix(self.seed ^ mix(((rank as u64) << 40) | token as u64));
        let words = (0..).map(|i: u64| mix(start.wrapping_add(i)));
        match self.dtype {
            DType::Bf16 => {
                let (quads, rest) = row.as_chunks_mut::<8>();
                for (quad, word) in quads.iter_mut().zip(words) {
                    // Sign, exponent 120..=127, mantissa: each half-word on its own.
                    let numbers = (word & 0x83ff_83ff_83ff_83ff) + 0x3c00_3c00_3c00_3c00;
                    *quad = numbers.to_le_bytes();
                }
                rest.iter_mut().for_each(|b| *b = 0);
            }
            DType::F8E4M3 => {
                for (chunk, word) in row.chunks_mut(8).zip(words) {
                    // Exponent below 12: no NaN.
                    let numbers = word & 0xdfdf_dfdf_dfdf_dfdf;
                    chunk.copy_from_slice(&numbers.to_le_bytes()[..chunk.len()]);
                }
            }
            _ => {
                for (chunk, word) in row.chunks_mut(8).zip(words) {
                    chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
                }
            }
        }
    }

    /// Writes the scale factors of one token: powers of two.
    pub fn fill_scales(&self, rank: usize, token: usize, scales: &mut [f32]) {
        let start = mix(!self.seed ^ mix(((rank as u64) << 40) | token as u64));
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = 0.125 * (1u32 << (mix(start.wrapping_add(i as u64)) % 5)) as f32;
        }
    }

    /// A row's numbers; bytes of other dtypes than BF16, FP16, FP32 and FP8 count as they are.
    pub fn decode(&self, row: &[u8], scales: &[f32], out: &mut [f32]) {
        match self.dtype {
            DType::Bf16 => {
                for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                    *o = bf16::from_le_bytes(*b).to_f32();
                }
            }
            DType::F16 => {
                for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                    *o = finite(f16::from_le_bytes(*b).to_f32());
                }
            }
            DType::F32 => {
                for (o, b) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                    *o = finite(f32::from_le_bytes(*b));
                }
            }
            DType::F8E4M3 => {
                for (i, (o, b)) in out.iter_mut().zip(row).enumerate() {
                    let scale = scales.get(i / SCALE_BLOCK).copied().unwrap_or(1.0);
                    *o = F8E4M3::from_bits(*b).to_f32() * scale;
                }
            }
            _ => {
                for (o, b) in out.iter_mut().zip(row) {
                    *o = f32::from(*b);
                }
            }
        }
    }
}

/// Random bits as a number that sums stay finite with.
fn finite(x: f32) -> f32 {
    if x.is_finite() { x.clamp(-1e4, 1e4) } else { 1.0 }
}

/// What the stand-in expert multiplies a row by.
pub fn expert_factor(expert: i64) -> f32 {
    1.0 + expert as f32 / 64.0
}

/// The stand-in expert's output for one decoded row, weighted: rounded to BF16 once.
pub fn expert_row(expert: i64, weight: f32, x: &[f32], out: &mut [bf16]) {
    let factor = expert_factor(expert) * weight;
    for (o, x) in out.iter_mut().zip(x) {
        *o = bf16::from_f32(x * factor);
    }
}

/// The weighted sum of several stand-in experts for one decoded row, in the order given, as one rank computes it for its experts:
/// rounded to BF16 once.
pub fn expert_sum(chosen: impl Iterator<Item = (i64, f32)>, x: &[f32], sum: &mut Vec<f32>, out: &mut [bf16]) {
    sum.clear();
    sum.resize(x.len(), 0.0);
    for (expert, weight) in chosen {
        let factor = expert_factor(expert) * weight;
        for (s, x) in sum.iter_mut().zip(x) {
            *s += x * factor;
        }
    }
    for (o, s) in out.iter_mut().zip(sum.iter()) {
        *o = bf16::from_f32(*s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_and_repeat_and_are_finite() {
        for dtype in [DType::Bf16, DType::F16, DType::F32, DType::F8E4M3, DType::U8] {
            let values = Values { seed: 1, dtype, hidden: 256 };
            let row = |rank, token| {
                let mut row = vec![0; values.row_bytes()];
                values.fill_row(rank, token, &mut row);
                row
            };
            assert_eq!(row(1, 2), row(1, 2));
            assert_ne!(row(1, 2), row(2, 1));
            assert_ne!(row(0, 0), row(0, 1));
            let mut numbers = vec![0.0; 256];
            let scales = vec![2.0; values.scales()];
            values.decode(&row(3, 4), &scales, &mut numbers);
            assert!(numbers.iter().all(|x| x.is_finite()));
            assert!(numbers.iter().any(|&x| x != numbers[0]));
        }
    }

    #[test]
    fn bf16_rows_are_small_numbers_of_both_signs() {
        let values = Values { seed: 9, dtype: DType::Bf16, hidden: 1024 };
        let mut row = vec![0; 2048];
        values.fill_row(0, 0, &mut row);
        let mut x = vec![0.0; 1024];
        values.decode(&row, &[], &mut x);
        assert!(x.iter().all(|x| x.abs() < 2.0 && x.abs() > 1e-3));
        assert!(x.iter().any(|&x| x > 0.0) && x.iter().any(|&x| x < 0.0));
    }
}
