//! Bad input is a clear error, nothing is lost, and the next good call works.

use deepep_core::bootstrap::{Bootstrap, ThreadBootstrap};
use deepep_core::layout::{Placement, ScaleOrder};
use deepep_core::tensor::{DType, Space, TensorMut, TensorRef};
use deepep_core::{BackendKind, CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, Result};
use half::bf16;
use integration_tests::ranks::{LONG, on_threads};

const TOKENS: usize = 4;
const HIDDEN: usize = 64;
const TOPK: usize = 2;
const EXPERTS: usize = 4;

fn builder() -> deepep_core::Builder {
    ElasticBuffer::builder()
        .max_tokens_per_rank(8)
        .experts(EXPERTS)
        .topk(TOPK)
        .hidden(HIDDEN)
        .expanded(8)
        .scale_packs(4)
        .timeout(LONG)
        .backend(BackendKind::Host)
}

fn buffer(bootstrap: ThreadBootstrap) -> ElasticBuffer {
    builder().build(bootstrap).unwrap()
}

/// Good arguments to spoil.
struct Good {
    x: Vec<bf16>,
    bytes: Vec<u8>,
    idx: Vec<i64>,
    weights: Vec<f32>,
    scales: Vec<f32>,
}

impl Good {
    fn new() -> Self {
        Self {
            x: vec![bf16::ONE; 64 * HIDDEN],
            bytes: vec![1; 64 * HIDDEN],
            idx: [0, 3].repeat(64),
            weights: vec![0.5; 64 * TOPK],
            scales: vec![1.0; 64 * 4],
        }
    }

    fn x(&self) -> TensorRef<'_> {
        TensorRef::matrix(&self.x[..TOKENS * HIDDEN], TOKENS, HIDDEN).unwrap()
    }

    fn fp8(&self) -> TensorRef<'_> {
        TensorRef::bytes_as(&self.bytes[..TOKENS * HIDDEN], DType::F8E4M3, TOKENS, HIDDEN).unwrap()
    }

    fn idx(&self) -> TensorRef<'_> {
        TensorRef::matrix(&self.idx[..TOKENS * TOPK], TOKENS, TOPK).unwrap()
    }

    fn dispatch(&self, buffer: &mut ElasticBuffer) -> Result<Dispatched> {
        buffer.dispatch(DispatchArgs::new(self.x(), self.idx()))
    }

    /// A whole round, to show that the buffer still works.
    fn round(&self, buffer: &mut ElasticBuffer) {
        let dispatched = self.dispatch(buffer).unwrap();
        assert_eq!(dispatched.rows(), 2 * TOKENS);
        let mut out = vec![bf16::ZERO; TOKENS * HIDDEN];
        let out_view = TensorMut::matrix(&mut out, TOKENS, HIDDEN).unwrap();
        buffer.combine(CombineArgs::new(dispatched.x(), dispatched.handle(), out_view)).unwrap();
        assert!(out.iter().all(|&y| y == bf16::from_f32(2.0)));
    }
}

/// A call that must fail on rank 0 while rank 1 waits in a good one; then rank 0 makes the good one, too.
fn refused(what: &str, bad: impl Fn(&Good, &mut ElasticBuffer) -> Result<()> + Sync) {
    on_threads(2, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let (good, mut buffer) = (Good::new(), buffer(bootstrap));
        if rank == 0 {
            let error = bad(&good, &mut buffer).expect_err(what);
            let text = error.to_string();
            assert!(text.contains(what), "expected {what:?} in: {text}");
        }
        good.round(&mut buffer);
        buffer.close().unwrap();
    });
}

#[test]
fn expert_ids() {
    for (ids, what) in [
        ([0, 4], "topk_idx[3][1] of rank 0 = 4, expected -1 (none) or 0..4"),
        ([0, -2], "topk_idx[3][1] of rank 0 = -2"),
        ([i64::MAX, 0], "topk_idx[3][0] of rank 0 = 9223372036854775807"),
        ([i64::MIN, 0], "topk_idx[3][0] of rank 0 = -9223372036854775808"),
        ([2, 2], "names expert 2 in lanes 0 and 1"),
    ] {
        refused(what, |good, buffer| {
            let mut idx = good.idx[..TOKENS * TOPK].to_vec();
            idx[6..8].copy_from_slice(&ids);
            let idx = TensorRef::matrix(&idx, TOKENS, TOPK)?;
            buffer.dispatch(DispatchArgs::new(good.x(), idx)).map(drop)
        });
    }
    refused("topk_idx[0][1] of rank 0 = 7", |good, buffer| {
        let idx = TensorRef::matrix(&[0i32, 7], 1, 2)?;
        buffer.dispatch(DispatchArgs::new(good.x().first_rows(1), idx)).map(drop)
    });
}

#[test]
fn shapes_and_element_types() {
    refused("tokens = 9: this buffer takes at most 8", |good, buffer| {
        let x = TensorRef::matrix(&good.x[..9 * HIDDEN], 9, HIDDEN)?;
        let idx = TensorRef::matrix(&good.idx[..18], 9, 2)?;
        buffer.dispatch(DispatchArgs::new(x, idx)).map(drop)
    });
    refused("row_bytes = 120: must be a multiple of 16", |good, buffer| {
        let x = TensorRef::matrix(&good.x[..TOKENS * 60], TOKENS, 60)?;
        buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
    });
    refused("an output slot", |good, buffer| {
        let x = TensorRef::matrix(&good.x[..TOKENS * HIDDEN * 16], TOKENS, HIDDEN * 16)?;
        buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
    });
    refused("topk = 33: must be 1 to 32", |good, buffer| {
        let ids: Vec<i64> = vec![-1; 33];
        let idx = TensorRef::matrix(&ids, 1, 33)?;
        buffer.dispatch(DispatchArgs::new(good.x().first_rows(1), idx)).map(drop)
    });
    refused("topk_idx has shape [3, 2], expected [4, 2]", |good, buffer| {
        let idx = TensorRef::matrix(&good.idx[..6], 3, 2)?;
        buffer.dispatch(DispatchArgs::new(good.x(), idx)).map(drop)
    });
    refused("topk_idx has element type F32, expected I32 or I64", |good, buffer| {
        let idx = TensorRef::matrix(&good.weights[..8], 4, 2)?;
        buffer.dispatch(DispatchArgs::new(good.x(), idx)).map(drop)
    });
    refused("topk_weights has element type BF16, expected F32", |good, buffer| {
        let weights = TensorRef::matrix(&good.x[..8], 4, 2)?;
        buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).weights(weights)).map(drop)
    });
    refused("topk_weights has shape [4, 1], expected [4, 2]", |good, buffer| {
        let weights = TensorRef::matrix(&good.weights[..4], 4, 1)?;
        buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).weights(weights)).map(drop)
    });
    refused("x has strides [128, 1] (elements) for shape [4, 64]", |good, buffer| {
        let x = TensorRef::strided(&good.x, TOKENS, HIDDEN, [2 * HIDDEN as isize, 1])?;
        buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
    });
    refused("statistics has shape [3, 1], expected [2, 1]", |good, buffer| {
        let mut counts = [0i32; 3];
        let statistics = TensorMut::vector(&mut counts);
        buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).statistics(statistics)).map(drop)
    });
    refused("x lies in device memory, but the host backend reads host memory", |good, buffer| {
        // SAFETY: the address is never used: only the refusal is tested.
        let x = unsafe { TensorRef::from_raw(4096, Space::Device, DType::Bf16, [TOKENS, HIDDEN], [64, 1])? };
        buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
    });
    refused("zero_padding = true", |good, buffer| {
        buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).zero_padding()).map(drop)
    });
    refused("expert_alignment = 0", |good, buffer| {
        buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).expanded(0)).map(drop)
    });
}

#[test]
fn scales() {
    refused("scales: rows of F8_E4M3 come with scales", |good, buffer| {
        buffer.dispatch(DispatchArgs::new(good.fp8(), good.idx())).map(drop)
    });
    refused("scales: rows of BF16 have no scales", |good, buffer| {
        let scales = TensorRef::matrix(&good.scales[..8], 4, 2)?;
        buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).scales(scales)).map(drop)
    });
    refused("scales has shape [3, 2], expected [4, 2]", |good, buffer| {
        let scales = TensorRef::matrix(&good.scales[..6], 3, 2)?;
        buffer.dispatch(DispatchArgs::new(good.fp8(), good.idx()).scales(scales)).map(drop)
    });
    refused("scales has element type I64", |good, buffer| {
        let scales = TensorRef::matrix(&good.idx[..8], 4, 2)?;
        buffer.dispatch(DispatchArgs::new(good.fp8(), good.idx()).scales(scales)).map(drop)
    });
    // A stride that leaves the memory can't even be expressed.
    let scales = vec![1.0f32; 8];
    let error = TensorRef::strided(&scales, 4, 2, [3, 1]).unwrap_err();
    assert!(matches!(error, Error::Shape { tensor: "slice", .. }), "{error}");
    // Any stride inside the memory is fine.
    on_threads(2, LONG, |bootstrap| {
        let (good, mut buffer) = (Good::new(), buffer(bootstrap));
        let words: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let scales = TensorRef::strided(&words, TOKENS, 3, [10, 3]).unwrap();
        for order in [ScaleOrder::RowMajor, ScaleOrder::ColumnMajor] {
            let args = DispatchArgs::new(good.fp8(), good.idx()).scales(scales).scale_order(order);
            let got = buffer.dispatch(args).unwrap();
            let expected: Vec<f32> =
                (0..TOKENS).flat_map(|t| [0, 3, 6].map(|i| (10 * t + i) as f32)).collect();
            assert_eq!(got.scales().unwrap().to_vec::<f32>().unwrap(), expected.repeat(2));
        }
    });
}

#[test]
fn combine_arguments() {
    on_threads(2, LONG, |bootstrap| {
        let (good, mut buffer) = (Good::new(), buffer(bootstrap));
        let dispatched = good.dispatch(&mut buffer).unwrap();
        let handle = dispatched.handle();
        let rows = dispatched.rows();
        let mut out = vec![bf16::ZERO; 64 * HIDDEN];
        let mut floats = vec![0f32; 64];
        let check = |result: Result<()>, what: &str| {
            let error = result.expect_err(what).to_string();
            assert!(error.contains(what), "expected {what:?} in: {error}");
        };
        macro_rules! out {
            ($rows:expr, $columns:expr) => {
                TensorMut::matrix(&mut out[..$rows * $columns], $rows, $columns).unwrap()
            };
        }
        let x = TensorRef::matrix(&good.x[..rows * HIDDEN], rows, HIDDEN).unwrap();
        let few = TensorRef::matrix(&good.x[..3 * HIDDEN], 3, HIDDEN).unwrap();
        let bias = TensorRef::matrix(&good.x[..TOKENS * HIDDEN], TOKENS, HIDDEN).unwrap();
        let small = TensorRef::matrix(&good.x[..TOKENS * 8], TOKENS, 8).unwrap();
        let floating = TensorRef::matrix(&good.scales[..rows * 8], rows, 8).unwrap();
        let mut combine = |args: CombineArgs<'_>| buffer.combine(args).map(drop);
        check(
            combine(CombineArgs::new(few, handle, out!(TOKENS, HIDDEN))),
            "x has shape [3, 64], expected at least 8 rows of 64",
        );
        check(
            combine(CombineArgs::new(x, handle, out!(5, HIDDEN))),
            "out has shape [5, 64], expected [4, 64]",
        );
        check(
            combine(CombineArgs::new(x, handle, out!(TOKENS, 32))),
            "x has shape [8, 64], expected at least 8 rows of 32",
        );
        check(
            combine(CombineArgs::new(floating, handle, out!(TOKENS, 8))),
            "x has element type F32, expected BF16",
        );
        check(
            combine(CombineArgs::new(x, handle, out!(TOKENS, HIDDEN)).bias(small)),
            "bias has shape [4, 8]",
        );
        let three = CombineArgs::new(x, handle, out!(TOKENS, HIDDEN)).bias(bias).bias(bias).bias(bias);
        check(combine(three), "biases = 3: at most 2");
        let weights = TensorRef::matrix(&good.weights[..6], 3, 2).unwrap();
        let back = TensorMut::matrix(&mut floats[..8], 4, 2).unwrap();
        let args = CombineArgs::new(x, handle, out!(TOKENS, HIDDEN)).weights(weights, back);
        check(combine(args), "topk_weights has shape [3, 2], expected at least 8 rows of 2");
        let weights = TensorRef::matrix(&good.weights[..16], 8, 2).unwrap();
        let back = TensorMut::matrix(&mut floats[..6], 3, 2).unwrap();
        let args = CombineArgs::new(x, handle, out!(TOKENS, HIDDEN)).weights(weights, back);
        check(combine(args), "weights out has shape [3, 2], expected [4, 2]");
        // After all that the good call works.
        combine(CombineArgs::new(x, handle, out!(TOKENS, HIDDEN))).unwrap();
        assert!(out[..TOKENS * HIDDEN].iter().all(|&y| y == bf16::from_f32(2.0)));
    });
}

#[test]
fn handles_of_another_buffer_and_other_shapes() {
    on_threads(2, LONG, |bootstrap| {
        let shared = std::sync::Arc::new(bootstrap);
        let good = Good::new();
        let mut one = builder().build(shared.clone()).unwrap();
        let mut two = builder().build(shared.clone()).unwrap();
        let dispatched = good.dispatch(&mut one).unwrap();
        let foreign = dispatched.handle();
        let mut out = vec![bf16::ZERO; TOKENS * HIDDEN];
        let view = TensorMut::matrix(&mut out, TOKENS, HIDDEN).unwrap();
        let error = two.combine(CombineArgs::new(dispatched.x(), foreign, view)).unwrap_err();
        assert!(matches!(error, Error::ForeignHandle { .. }), "{error}");
        let error = two.dispatch(DispatchArgs::cached(good.x(), foreign)).unwrap_err();
        assert!(matches!(error, Error::ForeignHandle { .. }), "{error}");

        let fewer = good.x().first_rows(3);
        let error = one.dispatch(DispatchArgs::cached(fewer, foreign)).unwrap_err();
        assert!(matches!(error, Error::HandleMismatch { field: "tokens", .. }), "{error}");
        let error = one.dispatch(DispatchArgs::cached(good.x(), foreign).expanded(4)).unwrap_err();
        assert!(matches!(error, Error::HandleMismatch { field: "layout", .. }), "{error}");
        let mut counts = [0i32; 2];
        let args = DispatchArgs::cached(good.x(), foreign).statistics(TensorMut::vector(&mut counts));
        let error = one.dispatch(args).unwrap_err();
        assert!(matches!(error, Error::Tensor { tensor: "statistics", .. }), "{error}");
        assert_eq!(dispatched.handle().placement(), Placement::Plain);

        // A handle keeps its buffer's memory: it can still be looked at.
        let handle = dispatched.into_handle();
        one.close().unwrap();
        assert_eq!(handle.counts().unwrap().tokens, 2 * TOKENS);
        assert_eq!(handle.rank_prefix().as_slice::<i32>().unwrap(), [4, 8]);
        good.round(&mut two);
    });
}

#[test]
fn results_and_handles_that_are_held() {
    on_threads(2, LONG, |bootstrap| {
        let good = Good::new();
        let mut buffer = builder().output_slots(2).handle_slots(3).build(bootstrap).unwrap();
        let one = good.dispatch(&mut buffer).unwrap();
        let two = good.dispatch(&mut buffer).unwrap();
        let error = good.dispatch(&mut buffer).unwrap_err();
        assert!(matches!(error, Error::SlotsHeld { what: "dispatch result", slots: 2 }), "{error}");
        // What is held stays as it is; a handle alone doesn't hold the rows.
        let first = one.into_handle();
        let three = good.dispatch(&mut buffer).unwrap();
        assert_eq!(two.x().as_slice::<bf16>().unwrap(), three.x().as_slice::<bf16>().unwrap());
        drop((two.into_handle(), three.into_handle()));
        let _second = good.dispatch(&mut buffer).unwrap().into_handle();
        let _third = good.dispatch(&mut buffer).unwrap().into_handle();
        let error = good.dispatch(&mut buffer).unwrap_err();
        assert!(matches!(error, Error::SlotsHeld { what: "dispatch handle", slots: 3 }), "{error}");
        drop(first);
        good.round(&mut buffer);
    });
}

#[test]
fn capacity() {
    on_threads(2, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let good = Good::new();
        let mut buffer = builder().token_capacity(7).build(bootstrap).unwrap();
        // All eight tokens go to both ranks.
        let error = good.dispatch(&mut buffer).unwrap_err();
        let expected = "token capacity: 8 needed on rank 0, capacity is 7";
        assert!(error.to_string().starts_with(expected), "{error}");
        // Without counts: an empty result, and the number that is needed.
        let got = buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).without_counts()).unwrap();
        let error = got.check().unwrap_err();
        assert!(matches!(error, Error::CapacityExceeded { needed: 8, capacity: 7, .. }), "{error}");
        assert_eq!(got.handle().count_cells().as_slice::<i32>().unwrap(), [0, 0, 8, 8]);
        // Combining nothing gives the bias.
        let bias = vec![bf16::from_f32(3.0); TOKENS * HIDDEN];
        let mut out = vec![bf16::ZERO; TOKENS * HIDDEN];
        let args =
            CombineArgs::new(got.x(), got.handle(), TensorMut::matrix(&mut out, TOKENS, HIDDEN).unwrap())
                .bias(TensorRef::matrix(&bias, TOKENS, HIDDEN).unwrap());
        buffer.combine(args).unwrap();
        assert_eq!(out, bias);
        drop(got);
        // Fewer tokens fit.
        let n = 3 + rank;
        let idx = TensorRef::matrix(&good.idx[..n * TOPK], n, TOPK).unwrap();
        let got = buffer.dispatch(DispatchArgs::new(good.x().first_rows(n), idx)).unwrap();
        assert_eq!(got.tokens(), 7);
        got.check().unwrap();
        drop(got);
        // The caller's own limit, on rows of the expanded layout.
        let limited = |rows| {
            DispatchArgs::new(good.x().first_rows(1), good.idx().first_rows(1)).expanded(4).row_capacity(rows)
        };
        let error = buffer.dispatch(limited(3)).unwrap_err();
        assert!(error.to_string().starts_with("row capacity: 4 needed on rank 0, capacity is 3"), "{error}");
        assert_eq!(buffer.dispatch(limited(4)).unwrap().rows(), 4);
        buffer.close().unwrap();
    });
}

#[test]
fn statistics_add_up() {
    on_threads(2, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let (good, mut buffer) = (Good::new(), buffer(bootstrap));
        let mut counts = [100i32, 200];
        for _ in 0..3 {
            let args = DispatchArgs::new(good.x(), good.idx())
                .expanded(8)
                .statistics(TensorMut::vector(&mut counts));
            buffer.dispatch(args).unwrap();
        }
        // Experts 0 and 3 get all eight tokens, three times.
        assert_eq!(counts, if rank == 0 { [124, 200] } else { [100, 224] });
    });
}

#[test]
fn results_can_be_copied_out() {
    on_threads(2, LONG, |bootstrap| {
        let (good, mut buffer) = (Good::new(), buffer(bootstrap));
        let args = DispatchArgs::new(good.x(), good.idx());
        let got = buffer.dispatch(args).unwrap();
        let rows = got.rows();
        let mut own = vec![bf16::ZERO; rows * HIDDEN];
        let out = TensorMut::matrix(&mut own, rows, HIDDEN).unwrap();
        got.copy_out(got.x(), out, None).unwrap();
        let mut small = vec![bf16::ZERO; HIDDEN];
        let out = TensorMut::matrix(&mut small, 1, HIDDEN).unwrap();
        assert!(matches!(got.copy_out(got.x(), out, None), Err(Error::Shape { .. })));
        let out = TensorMut::matrix(&mut small, 1, HIDDEN).unwrap();
        assert!(matches!(got.copy_out(good.x().first_rows(1), out, None), Err(Error::Tensor { .. })));
        drop(got);
        assert!(own.iter().all(|&x| x == bf16::ONE));
    });
}

#[test]
fn settings() {
    let text = |error: Error| error.to_string();
    on_threads(1, LONG, |bootstrap| {
        let shared = std::sync::Arc::new(bootstrap);
        let build =
            |builder: deepep_core::Builder| text(builder.build(shared.clone()).map(drop).unwrap_err());
        assert!(build(ElasticBuffer::builder()).starts_with("experts = 0"));
        assert!(build(builder().topk(33)).starts_with("topk = 33"));
        assert!(build(builder().hidden(60)).starts_with("row_bytes = 120"));
        assert!(build(builder().max_tokens_per_rank(0)).starts_with("max_tokens = 0"));
        assert!(build(builder().host_bytes(5)).starts_with("host_bytes = 5"));
        // And after all that a good one.
        Good::new().x();
        builder().build(shared.clone()).unwrap().close().unwrap();
    });
    let errors = on_threads(3, LONG, |bootstrap| text(builder().build(bootstrap).map(drop).unwrap_err()));
    assert!(
        errors.iter().any(|e| e.starts_with("experts = 4: must be a multiple of the 3 ranks")),
        "{errors:?}"
    );
}
