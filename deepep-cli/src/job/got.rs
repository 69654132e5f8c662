//! A dispatch's result, brought to the host.

use deepep_core::device::{read, read_into};
use deepep_core::layout::Placement;
use deepep_core::tensor::{DType, TensorRef};
use deepep_core::{Counts, Dispatched, ElasticBuffer, Result};

use crate::tensors::numbers;

/// What a rank received: as many rows and tokens as the oracle says there must be.
pub(crate) struct Got {
    /// As told to the host, if it waited for them.
    pub(crate) counts: Option<Counts>,
    /// As the device knows them: the four count cells, tokens by source rank, first rows and rows of experts.
    pub(crate) cells: Vec<i32>,
    pub(crate) rank_prefix: Vec<i32>,
    pub(crate) expert_starts: Vec<i32>,
    pub(crate) expert_counts: Vec<i32>,
    pub(crate) sources: Vec<i32>,
    pub(crate) x: Vec<u8>,
    /// `[rows][packs]`.
    pub(crate) scales: Option<Vec<u32>>,
    /// Plain: `[tokens][topk]`.
    pub(crate) topk_idx: Option<Vec<i64>>,
    /// Plain: `[tokens][topk]`. Expanded: `[rows]`.
    pub(crate) topk_weights: Option<Vec<f32>>,
    /// Rows of the result's views.
    pub(crate) capacity: usize,
}

impl Got {
    /// `scratch` becomes the rows' memory.
    pub(crate) fn new(
        buffer: &ElasticBuffer,
        dispatched: &Dispatched,
        tokens: usize,
        rows: usize,
        scratch: Vec<u8>,
    ) -> Result<Self> {
        let handle = dispatched.handle();
        let read = |view: TensorRef<'_>| read(buffer.device(), view);
        let table = |view: TensorRef<'_>| Ok::<Vec<i32>, deepep_core::Error>(numbers(&read(view)?));
        let per_token = match handle.placement() {
            Placement::Plain => tokens,
            Placement::Expanded => rows,
        };
        let ids = |view: TensorRef<'_>| -> Result<Vec<i64>> {
            let bytes = read(view.first_rows(tokens))?;
            Ok(match view.dtype() {
                DType::I32 => numbers::<i32>(&bytes).into_iter().map(i64::from).collect(),
                _ => numbers(&bytes),
            })
        };
        let scales = dispatched.scales().map(|view| read(view.first_rows(rows))).transpose()?;
        let weights = dispatched.topk_weights().map(|view| read(view.first_rows(per_token))).transpose()?;
        Ok(Self {
            counts: dispatched.counts().cloned(),
            cells: table(handle.count_cells())?,
            rank_prefix: table(handle.rank_prefix())?,
            expert_starts: table(handle.expert_starts())?,
            expert_counts: table(handle.expert_counts())?,
            sources: table(handle.sources().first_rows(tokens))?,
            x: read_into(buffer.device(), dispatched.x().first_rows(rows), scratch)?,
            scales: scales.map(|bytes| numbers(&bytes)),
            topk_idx: dispatched.topk_idx().map(ids).transpose()?,
            topk_weights: weights.map(|bytes| numbers(&bytes)),
            capacity: dispatched.rows(),
        })
    }
}
