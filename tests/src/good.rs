//! Two ranks with small buffers, and arguments of good calls, for tests to spoil.

use deepep_core::bootstrap::ThreadBootstrap;
use deepep_core::tensor::{DType, TensorRef};
use deepep_core::{CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Result};
use half::bf16;

use crate::ranks::LONG;
use crate::sides::Side;
use crate::tensors::{Given, Tensors};

/// Tokens of a rank in a good call.
pub const TOKENS: usize = 4;
/// Elements of a row.
pub const HIDDEN: usize = 64;
/// Experts of a token.
pub const TOPK: usize = 2;
/// Experts of both ranks.
pub const EXPERTS: usize = 4;

/// Settings of a small buffer that takes plain and expanded results, and whose rows travel on their own as those of large ones do.
pub fn builder(side: &Side) -> deepep_core::Builder {
    ElasticBuffer::builder()
        .max_tokens_per_rank(8)
        .experts(EXPERTS)
        .topk(TOPK)
        .hidden(HIDDEN)
        .expanded(8)
        .scale_packs(4)
        .packets(false)
        .timeout(side.patience())
        .backend(side.backend)
}

/// Such a buffer.
///
/// # Panics
/// If it can't be built.
#[must_use]
pub fn buffer(side: &Side, bootstrap: ThreadBootstrap) -> ElasticBuffer {
    builder(side).build(bootstrap).unwrap()
}

/// Good arguments to spoil.
#[derive(Debug)]
pub struct Good {
    /// `[64, HIDDEN]` of BF16.
    pub ones: Given,
    /// `[64, HIDDEN]` of bytes.
    pub bytes: Given,
    /// `[64, TOPK]` of i64: experts 0 and 3, one on each rank.
    pub ids: Given,
    /// `[64, TOPK]` of f32.
    pub halves: Given,
    /// `[64, 4]` of f32.
    pub scales: Given,
    /// For more.
    pub tensors: Tensors,
}

impl Good {
    /// Tensors for one rank.
    #[must_use]
    pub fn new(buffer: &ElasticBuffer) -> Self {
        let tensors = Tensors::default();
        Self {
            ones: tensors.of(buffer, &vec![bf16::ONE; 64 * HIDDEN], 64, HIDDEN),
            bytes: tensors.of(buffer, &vec![1_u8; 64 * HIDDEN], 64, HIDDEN),
            ids: tensors.of(buffer, &[0_i64, 3].repeat(64), 64, TOPK),
            halves: tensors.of(buffer, &[0.5_f32; 64 * TOPK], 64, TOPK),
            scales: tensors.of(buffer, &[1.0_f32; 64 * 4], 64, 4),
            tensors,
        }
    }

    /// Rows.
    #[must_use]
    pub fn x(&self) -> TensorRef<'_> {
        self.ones.part(DType::Bf16, TOKENS, HIDDEN)
    }

    /// Rows of FP8.
    #[must_use]
    pub fn fp8(&self) -> TensorRef<'_> {
        self.bytes.part(DType::F8E4M3, TOKENS, HIDDEN)
    }

    /// Ids.
    #[must_use]
    pub fn idx(&self) -> TensorRef<'_> {
        self.ids.part(DType::I64, TOKENS, TOPK)
    }

    /// A good dispatch.
    ///
    /// # Errors
    /// Those of [`ElasticBuffer::dispatch`].
    pub fn dispatch(&self, buffer: &mut ElasticBuffer) -> Result<Dispatched> {
        buffer.dispatch(DispatchArgs::new(self.x(), self.idx()))
    }

    /// Sums of `dispatched`'s own rows, plus a bias.
    ///
    /// # Panics
    /// If they can't be had.
    pub fn combine(
        &self,
        buffer: &mut ElasticBuffer,
        dispatched: &Dispatched,
        bias: Option<TensorRef<'_>>,
    ) -> Vec<bf16> {
        let mut out = self.tensors.of(buffer, &vec![bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
        let mut args = CombineArgs::new(dispatched.x(), dispatched.handle(), out.view_mut());
        if let Some(bias) = bias {
            args = args.bias(bias);
        }
        buffer.combine(args).unwrap().wait(LONG).unwrap();
        out.read(buffer)
    }

    /// A whole round, to show that the buffer still works.
    ///
    /// # Panics
    /// If it doesn't.
    pub fn round(&self, buffer: &mut ElasticBuffer) {
        let dispatched = self.dispatch(buffer).unwrap();
        assert_eq!(dispatched.rows(), 2 * TOKENS);
        let out = self.combine(buffer, &dispatched, None);
        assert!(out.iter().all(|&y| y == bf16::from_f32(2.0)));
    }
}
