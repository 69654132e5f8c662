//! What a dispatch has delivered, copied to where the CPU can look at it.

use deepep_core::tensor::{DType, TensorRef};
use deepep_core::{Counts, Dispatched, Result};

use crate::place::Place;

/// A copy of a dispatch's result and of its handle's tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Delivered {
    pub(crate) count_cells: Vec<i32>,
    pub(crate) rank_prefix: Vec<i32>,
    pub(crate) expert_starts: Vec<i32>,
    pub(crate) expert_counts: Vec<i32>,
    pub(crate) counts: Option<Counts>,
    /// Row after row.
    pub(crate) x: Vec<u8>,
    /// The words of the scales, row after row.
    pub(crate) scales: Option<Vec<u32>>,
    pub(crate) topk_idx: Option<Vec<i64>>,
    pub(crate) topk_weights: Option<Vec<f32>>,
}

impl Delivered {
    /// Copies the first `rows` rows and `tokens` tokens of a dispatch that has run.
    pub(crate) fn copy(got: &Dispatched, rows: usize, tokens: usize, place: &Place) -> Result<Self> {
        let ints =
            |view: TensorRef<'_>| -> Result<Vec<i32>> { Ok(words(&place.read(&view)?, i32::from_ne_bytes)) };
        let scales = got.scales().map(|view| -> Result<Vec<u32>> {
            Ok(words(&place.read(&view.first_rows(rows))?, u32::from_ne_bytes))
        });
        let topk_idx = got.topk_idx().map(|view| -> Result<Vec<i64>> {
            let view = view.first_rows(tokens);
            let bytes = place.read(&view)?;
            Ok(match view.dtype() {
                DType::I32 => words(&bytes, |b| i64::from(i32::from_ne_bytes(b))),
                _ => words(&bytes, i64::from_ne_bytes),
            })
        });
        let topk_weights = got.topk_weights().map(|view| -> Result<Vec<f32>> {
            let most = if got.topk_idx().is_some() { tokens } else { rows };
            Ok(words(&place.read(&view.first_rows(most))?, f32::from_ne_bytes))
        });
        Ok(Self {
            count_cells: ints(got.handle().count_cells())?,
            rank_prefix: ints(got.handle().rank_prefix())?,
            expert_starts: ints(got.handle().expert_starts())?,
            expert_counts: ints(got.handle().expert_counts())?,
            counts: got.counts().cloned(),
            x: place.read(&got.x().first_rows(rows))?,
            scales: scales.transpose()?,
            topk_idx: topk_idx.transpose()?,
            topk_weights: topk_weights.transpose()?,
        })
    }
}

fn words<const N: usize, T>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&word| convert(word)).collect()
}
