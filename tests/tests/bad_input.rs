//! Bad input is a clear error, nothing is lost, and the next good call works. On both backends.

use std::time::Duration;

use deepep_core::bootstrap::Bootstrap;
use deepep_core::layout::{Placement, ScaleOrder};
use deepep_core::tensor::{DType, Space, TensorRef};
use deepep_core::{BackendKind, CombineArgs, DispatchArgs, ElasticBuffer, Error, Result};
use half::bf16;
use integration_tests::good::{Good, HIDDEN, TOKENS, TOPK, buffer, builder};
use integration_tests::on_both_sides;
use integration_tests::ranks::{LONG, on_threads};
use integration_tests::sides::Side;
use integration_tests::tensors::read;

/// A call that must fail on rank 0 while rank 1 waits in a good one; then rank 0 makes the good one, too.
fn refused(side: &Side, what: &str, bad: impl Fn(&Good, &mut ElasticBuffer) -> Result<()> + Sync) {
    on_threads(2, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let mut buffer = buffer(side, bootstrap);
        let good = Good::new(&buffer);
        if rank == 0 {
            let error = bad(&good, &mut buffer).expect_err(what);
            let text = error.to_string();
            assert!(text.contains(what), "expected {what:?} in: {text}");
        }
        good.round(&mut buffer);
        buffer.close().unwrap();
    });
}

/// A call with a bad id on rank 0 and good ones on rank 1. It runs on both, the lane counting as none; rank 0 hears of it, and goes on with the result.
fn wrong_ids(side: &Side, what: &str, width: DType, token: usize, ids: [i64; 2]) {
    on_threads(2, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let mut buffer = buffer(side, bootstrap);
        let good = Good::new(&buffer);
        let mut given = [0_i64, 3].repeat(TOKENS);
        if rank == 0 {
            given[token * TOPK..][..TOPK].copy_from_slice(&ids);
        }
        let narrow: Vec<i32> = given.iter().map(|&id| id as i32).collect();
        let given = match width {
            DType::I32 => good.tensors.of(&buffer, &narrow, TOKENS, TOPK),
            _ => good.tensors.of(&buffer, &given, TOKENS, TOPK),
        };
        let is_told = |error: &Error| {
            let is_id = matches!(error, Error::ExpertOutOfRange { .. } | Error::DuplicateExpert { .. });
            assert!(is_id && error.to_string().contains(what), "expected {what:?} in: {error}");
        };
        for exact in [true, false] {
            let args = DispatchArgs::new(good.x(), given.view());
            let outcome = buffer.dispatch(if exact { args } else { args.without_counts() });
            let got = match outcome {
                Err(Error::WrongIds { problem, dispatched }) => {
                    assert!(exact && rank == 0, "{problem}");
                    is_told(&problem);
                    *dispatched
                }
                outcome => {
                    assert!(rank == 1 || !exact, "{what}: no error");
                    outcome.unwrap()
                }
            };
            got.event().wait(LONG).unwrap();
            match got.check() {
                Err(error) => {
                    assert_eq!(rank, 0, "{error}");
                    is_told(&error);
                }
                Ok(()) => assert_eq!(rank, 1, "{what}: no error"),
            }
            if exact {
                // The lane that counted as none is missing on one of the ranks.
                let received = read::<i32>(&buffer, got.handle().rank_prefix());
                let tokens = got.tokens();
                assert!(received[1] == tokens as i32 && (2 * TOKENS - 1..=2 * TOKENS).contains(&tokens));
            }
            let sums = good.combine(&mut buffer, &got, None);
            for (t, row) in sums.chunks(HIDDEN).enumerate() {
                let copies = if rank == 0 && t == token { 1.0 } else { 2.0 };
                assert!(row.iter().all(|&y| y == bf16::from_f32(copies)), "{what}: token {t}");
            }
            drop(got);
            good.round(&mut buffer);
        }
        buffer.close().unwrap();
    });
}

on_both_sides! {
    expert_ids, |side| {
        for (ids, what) in [
            ([0, 4], "topk_idx[3][1] of rank 0 = 4, expected -1 (none) or 0..4"),
            ([0, -2], "topk_idx[3][1] of rank 0 = -2"),
            ([i64::MAX, 0], "topk_idx[3][0] of rank 0 = 9223372036854775807"),
            ([i64::MIN, 0], "topk_idx[3][0] of rank 0 = -9223372036854775808"),
            ([2, 2], "topk_idx[3] of rank 0 names expert 2 in lanes 0 and 1"),
        ] {
            wrong_ids(side, what, DType::I64, 3, ids);
        }
        wrong_ids(side, "topk_idx[0][1] of rank 0 = 7", DType::I32, 0, [1, 7]);
    }
}

on_both_sides! {
    shapes_and_element_types, |side| {
        refused(side, "tokens = 9: this buffer takes at most 8", |good, buffer| {
            let (x, idx) = (good.ones.part(DType::Bf16, 9, HIDDEN), good.ids.part(DType::I64, 9, 2));
            buffer.dispatch(DispatchArgs::new(x, idx)).map(drop)
        });
        refused(side, "row_bytes = 120: must be a multiple of 16", |good, buffer| {
            let x = good.ones.part(DType::Bf16, TOKENS, 60);
            buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
        });
        refused(side, "an output slot", |good, buffer| {
            let x = good.ones.part(DType::Bf16, TOKENS, HIDDEN * 16);
            buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
        });
        refused(side, "topk = 33: must be 1 to 32", |good, buffer| {
            let idx = good.ids.part(DType::I64, 1, 33);
            buffer.dispatch(DispatchArgs::new(good.x().first_rows(1), idx)).map(drop)
        });
        refused(side, "topk_idx has shape [3, 2], expected [4, 2]", |good, buffer| {
            let idx = good.ids.part(DType::I64, 3, 2);
            buffer.dispatch(DispatchArgs::new(good.x(), idx)).map(drop)
        });
        refused(side, "topk_idx has element type F32, expected I32 or I64", |good, buffer| {
            let idx = good.halves.part(DType::F32, 4, 2);
            buffer.dispatch(DispatchArgs::new(good.x(), idx)).map(drop)
        });
        refused(side, "topk_weights has element type BF16, expected F32", |good, buffer| {
            let weights = good.ones.part(DType::Bf16, 4, 2);
            buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).weights(weights)).map(drop)
        });
        refused(side, "topk_weights has shape [4, 1], expected [4, 2]", |good, buffer| {
            let weights = good.halves.part(DType::F32, 4, 1);
            buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).weights(weights)).map(drop)
        });
        refused(side, "x has strides [128, 1] (elements) for shape [4, 64]", |good, buffer| {
            let x = good.ones.strided(DType::Bf16, [TOKENS, HIDDEN], [2 * HIDDEN as isize, 1]);
            buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
        });
        refused(side, "statistics has shape [3, 1], expected [2, 1]", |good, buffer| {
            let mut counts = good.tensors.of(buffer, &[0_i32; 3], 3, 1);
            let args = DispatchArgs::new(good.x(), good.idx()).statistics(counts.view_mut());
            buffer.dispatch(args).map(drop)
        });
        let (wrong, text) = match side.is_gpu() {
            true => (Space::Host, "x lies in host memory, but the cuda backend reads device memory"),
            false => (Space::Device, "x lies in device memory, but the host backend reads host memory"),
        };
        refused(side, text, |good, buffer| {
            // SAFETY: the address is never used: only the refusal is tested.
            let x = unsafe { TensorRef::from_raw(4096, wrong, DType::Bf16, [TOKENS, HIDDEN], [64, 1])? };
            buffer.dispatch(DispatchArgs::new(x, good.idx())).map(drop)
        });
        refused(side, "zero_padding = true", |good, buffer| {
            buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).zero_padding()).map(drop)
        });
        refused(side, "expert_alignment = 0", |good, buffer| {
            buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).expanded(0)).map(drop)
        });
    }
}

on_both_sides! {
    scales, |side| {
        refused(side, "scales: rows of F8_E4M3 come with scales", |good, buffer| {
            buffer.dispatch(DispatchArgs::new(good.fp8(), good.idx())).map(drop)
        });
        refused(side, "scales: rows of BF16 have no scales", |good, buffer| {
            let scales = good.scales.part(DType::F32, 4, 2);
            buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).scales(scales)).map(drop)
        });
        refused(side, "scales has shape [3, 2], expected [4, 2]", |good, buffer| {
            let scales = good.scales.part(DType::F32, 3, 2);
            buffer.dispatch(DispatchArgs::new(good.fp8(), good.idx()).scales(scales)).map(drop)
        });
        refused(side, "scales has element type I64", |good, buffer| {
            let scales = good.ids.part(DType::I64, 4, 2);
            buffer.dispatch(DispatchArgs::new(good.fp8(), good.idx()).scales(scales)).map(drop)
        });
        // A stride that leaves the memory can't even be expressed.
        let scales = vec![1.0f32; 8];
        let error = TensorRef::strided(&scales, 4, 2, [3, 1]).unwrap_err();
        assert!(matches!(error, Error::Shape { tensor: "slice", .. }), "{error}");
        // Any stride inside the memory is fine.
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = buffer(side, bootstrap);
            let good = Good::new(&buffer);
            let words: Vec<f32> = (0..40).map(|i| i as f32).collect();
            let words = good.tensors.of(&buffer, &words, 40, 1);
            let scales = words.strided(DType::F32, [TOKENS, 3], [10, 3]);
            for order in [ScaleOrder::RowMajor, ScaleOrder::ColumnMajor] {
                let args = DispatchArgs::new(good.fp8(), good.idx()).scales(scales).scale_order(order);
                let got = buffer.dispatch(args).unwrap();
                got.event().wait(LONG).unwrap();
                let expected: Vec<f32> =
                    (0..TOKENS).flat_map(|t| [0, 3, 6].map(|i| (10 * t + i) as f32)).collect();
                assert_eq!(read::<f32>(&buffer, got.scales().unwrap()), expected.repeat(2));
            }
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    combine_arguments, |side| {
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = buffer(side, bootstrap);
            let good = Good::new(&buffer);
            let dispatched = good.dispatch(&mut buffer).unwrap();
            let handle = dispatched.handle();
            let rows = dispatched.rows();
            let mut out = good.tensors.of(&buffer, &vec![bf16::ZERO; 64 * HIDDEN], 64, HIDDEN);
            let mut floats = good.tensors.of(&buffer, &[0.0_f32; 64], 64, 1);
            let check = |result: Result<()>, what: &str| {
                let error = result.expect_err(what).to_string();
                assert!(error.contains(what), "expected {what:?} in: {error}");
            };
            macro_rules! out {
                ($rows:expr, $columns:expr) => {
                    out.part_mut(DType::Bf16, $rows, $columns)
                };
            }
            let x = good.ones.part(DType::Bf16, rows, HIDDEN);
            let few = good.ones.part(DType::Bf16, 3, HIDDEN);
            let bias = good.ones.part(DType::Bf16, TOKENS, HIDDEN);
            let small = good.ones.part(DType::Bf16, TOKENS, 8);
            let floating = good.scales.part(DType::F32, rows, 8);
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
            let weights = good.halves.part(DType::F32, 3, 2);
            let back = floats.part_mut(DType::F32, 4, 2);
            let args = CombineArgs::new(x, handle, out!(TOKENS, HIDDEN)).weights(weights, back);
            check(combine(args), "topk_weights has shape [3, 2], expected at least 8 rows of 2");
            let weights = good.halves.part(DType::F32, 8, 2);
            let back = floats.part_mut(DType::F32, 3, 2);
            let args = CombineArgs::new(x, handle, out!(TOKENS, HIDDEN)).weights(weights, back);
            check(combine(args), "weights out has shape [3, 2], expected [4, 2]");
            // After all that the good call works.
            combine(CombineArgs::new(x, handle, out!(TOKENS, HIDDEN))).unwrap();
            buffer.synchronize(LONG).unwrap();
            let sums = out.read::<bf16>(&buffer);
            assert!(sums[..TOKENS * HIDDEN].iter().all(|&y| y == bf16::from_f32(2.0)));
            drop(dispatched);
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    handles_of_another_buffer_and_other_shapes, |side| {
        on_threads(2, LONG, |bootstrap| {
            let shared = std::sync::Arc::new(bootstrap);
            let mut one = builder(side).build(shared.clone()).unwrap();
            let mut two = builder(side).build(shared.clone()).unwrap();
            let good = Good::new(&one);
            let dispatched = good.dispatch(&mut one).unwrap();
            let foreign = dispatched.handle();
            let mut out = good.tensors.of(&one, &vec![bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
            let error = two.combine(CombineArgs::new(dispatched.x(), foreign, out.view_mut())).unwrap_err();
            assert!(matches!(error, Error::ForeignHandle { .. }), "{error}");
            let error = two.dispatch(DispatchArgs::cached(good.x(), foreign)).unwrap_err();
            assert!(matches!(error, Error::ForeignHandle { .. }), "{error}");

            let fewer = good.x().first_rows(3);
            let error = one.dispatch(DispatchArgs::cached(fewer, foreign)).unwrap_err();
            assert!(matches!(error, Error::HandleMismatch { field: "tokens", .. }), "{error}");
            let error = one.dispatch(DispatchArgs::cached(good.x(), foreign).expanded(4)).unwrap_err();
            assert!(matches!(error, Error::HandleMismatch { field: "layout", .. }), "{error}");
            let mut counts = good.tensors.of(&one, &[0_i32; 2], 2, 1);
            let args = DispatchArgs::cached(good.x(), foreign).statistics(counts.view_mut());
            let error = one.dispatch(args).unwrap_err();
            assert!(matches!(error, Error::Tensor { tensor: "statistics", .. }), "{error}");
            assert_eq!(dispatched.handle().placement(), Placement::Plain);

            // A handle keeps its buffer's memory: it can still be looked at.
            let handle = dispatched.into_handle();
            one.close().unwrap();
            assert_eq!(handle.counts().unwrap().tokens, 2 * TOKENS);
            assert_eq!(read::<i32>(&two, handle.rank_prefix()), [4, 8]);
            good.round(&mut two);
            two.close().unwrap();
        });
    }
}

on_both_sides! {
    capacity, |side| {
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = builder(side).token_capacity(7).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            // All eight tokens go to both ranks.
            let error = good.dispatch(&mut buffer).unwrap_err();
            let expected = "token capacity: 8 needed on rank 0, capacity is 7";
            assert!(error.to_string().starts_with(expected), "{error}");
            // Without counts: an empty result, and the number that is needed.
            let got = buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).without_counts()).unwrap();
            got.event().wait(LONG).unwrap();
            let error = got.check().unwrap_err();
            let over = matches!(error, Error::CapacityExceeded { rank: 0, needed: 8, capacity: 7, .. });
            assert!(over, "{error}");
            assert_eq!(read::<i32>(&buffer, got.handle().count_cells()), [0, 0, 8, 8]);
            // Combining nothing gives the bias.
            let three = vec![bf16::from_f32(3.0); TOKENS * HIDDEN];
            let bias = good.tensors.of(&buffer, &three, TOKENS, HIDDEN);
            assert_eq!(good.combine(&mut buffer, &got, Some(bias.view())), three);
            drop(got);
            // Fewer tokens fit.
            let n = 3 + rank;
            let (x, idx) = (good.x().first_rows(n), good.idx().first_rows(n));
            let got = buffer.dispatch(DispatchArgs::new(x, idx)).unwrap();
            assert_eq!(got.tokens(), 7);
            // Counts come before the rows.
            got.event().wait(LONG).unwrap();
            got.check().unwrap();
            drop(got);
            // The caller's own limit, on rows of the expanded layout.
            let limited = |rows| {
                let (x, idx) = (good.x().first_rows(1), good.idx().first_rows(1));
                DispatchArgs::new(x, idx).expanded(4).row_capacity(rows)
            };
            let error = buffer.dispatch(limited(3)).unwrap_err();
            assert!(error.to_string().starts_with("row capacity: 4 needed on rank 0, capacity is 3"), "{error}");
            assert_eq!(buffer.dispatch(limited(4)).unwrap().rows(), 4);
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    problems_are_known_after_later_calls, |side| {
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = builder(side).token_capacity(5).output_slots(4).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            // Both ranks' tokens go to rank 1 alone, which has no room for the last of six.
            let away = good.tensors.of(&buffer, &[2_i64, 3].repeat(3), 3, TOPK);
            let args = DispatchArgs::new(good.x().first_rows(3), away.view()).without_counts();
            let over = buffer.dispatch(args).unwrap();
            // Two tokens of each rank; rank 0 names an expert that there is not.
            let ids = if rank == 0 { [0_i64, 3, 1, 99] } else { [0, 3, 0, 3] };
            let ids = good.tensors.of(&buffer, &ids, 2, TOPK);
            let x = good.x().first_rows(2);
            let wrong = buffer.dispatch(DispatchArgs::new(x, ids.view()).without_counts()).unwrap();
            let fine = good.idx().first_rows(2);
            let right = buffer.dispatch(DispatchArgs::new(x, fine).without_counts()).unwrap();
            let again = buffer.dispatch(DispatchArgs::cached(x, wrong.handle())).unwrap();
            again.event().wait(LONG).unwrap();
            for _ in 0..2 {
                let error = over.check().unwrap_err();
                let expected = "token capacity: 6 needed on rank 1, capacity is 5";
                assert!(error.to_string().starts_with(expected), "{error}");
                assert_eq!(read::<i32>(&buffer, over.handle().count_cells()), [0, 0, 6, 6]);
                match wrong.check() {
                    Ok(()) => assert_eq!(rank, 1),
                    Err(error) => assert!(
                        matches!(error, Error::ExpertOutOfRange { rank: 0, token: 1, lane: 1, .. }),
                        "{error}"
                    ),
                }
                assert_eq!(wrong.check().is_err(), rank == 0);
                right.check().unwrap();
                again.check().unwrap();
            }
            drop((over, wrong, right, again));
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    settings, |side| {
        let text = |error: Error| error.to_string();
        on_threads(1, LONG, |bootstrap| {
            let shared = std::sync::Arc::new(bootstrap);
            let build =
                |builder: deepep_core::Builder| text(builder.build(shared.clone()).map(drop).unwrap_err());
            assert!(build(ElasticBuffer::builder().backend(side.backend)).starts_with("experts = 0"));
            assert!(build(builder(side).topk(33)).starts_with("topk = 33"));
            assert!(build(builder(side).hidden(60)).starts_with("row_bytes = 120"));
            assert!(build(builder(side).max_tokens_per_rank(0)).starts_with("max_tokens = 0"));
            assert!(build(builder(side).host_bytes(5)).starts_with("host_bytes = 5"));
            // And after all that a good one.
            builder(side).build(shared.clone()).unwrap().close().unwrap();
        });
        // Nobody has to know how long is too long.
        on_threads(2, Duration::MAX, |bootstrap| {
            let mut buffer = builder(side).timeout(Duration::MAX).build(bootstrap).unwrap();
            Good::new(&buffer).round(&mut buffer);
            buffer.barrier().unwrap().wait(LONG).unwrap();
            buffer.close().unwrap();
        });
        let errors =
            on_threads(3, LONG, |bootstrap| text(builder(side).build(bootstrap).map(drop).unwrap_err()));
        assert!(
            errors.iter().any(|e| e.starts_with("experts = 4: must be a multiple of the 3 ranks")),
            "{errors:?}"
        );
    }
}

/// Where there is no GPU, asking for one is an error that says why, on every rank.
#[test]
fn a_backend_that_is_not_there() {
    if let Err(why) = BackendKind::Cuda.resolve() {
        let why = why.to_string();
        let errors = on_threads(2, LONG, |bootstrap| {
            let builder = ElasticBuffer::builder().max_tokens_per_rank(1).experts(2).topk(1).hidden(64);
            builder.backend(BackendKind::Cuda).build(bootstrap).map(drop).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| *error == why), "{why}: {errors:?}");
    }
    assert_eq!(BackendKind::Host.resolve().unwrap(), BackendKind::Host);
    let auto = BackendKind::Auto.resolve().unwrap();
    assert_eq!(auto == BackendKind::Cuda, BackendKind::Cuda.resolve().is_ok());
}
