//! Experts' outputs in the heap: what is refused, and what it takes of all ranks. On both backends.

use std::sync::Mutex;

use deepep_core::bootstrap::{Bootstrap, thread_group};
use deepep_core::tensor::{DType, TensorRef};
use deepep_core::{
    CombineArgs, CombineInput, DispatchArgs, Dispatched, ElasticBuffer, Error, Event, Result, Transfer,
};
use half::bf16;
use integration_tests::good::{Good, HIDDEN, TOKENS, TOPK, builder};
use integration_tests::on_both_sides;
use integration_tests::ranks::{LONG, on_threads};

/// Sums of these rows, awaited.
fn sums(
    good: &Good,
    buffer: &mut ElasticBuffer,
    dispatched: &Dispatched,
    x: TensorRef<'_>,
    transfer: Transfer,
) -> Result<Vec<bf16>> {
    let mut out = good.tensors.of(buffer, &vec![bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
    let args = CombineArgs::new(x, dispatched.handle(), out.view_mut()).transfer(transfer);
    buffer.combine(args)?.wait(LONG)?;
    Ok(out.read(buffer))
}

/// A value of all rows.
fn fill(good: &Good, buffer: &ElasticBuffer, input: &mut CombineInput, value: f32) -> Result<Event> {
    let rows = good.tensors.of(buffer, &vec![bf16::from_f32(value); 16 * HIDDEN], 16, HIDDEN);
    let copied = input.copy_in(rows.view(), None)?;
    copied.wait(LONG)?;
    Ok(copied)
}

on_both_sides! {
    inputs_are_leased_and_used_again, |side| {
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = builder(side).combine_inputs(2).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            let dispatched = good.dispatch(&mut buffer).unwrap();
            let mut inputs = [buffer.combine_input().unwrap(), buffer.combine_input().unwrap()];
            let error = buffer.combine_input().unwrap_err();
            assert!(matches!(error, Error::SlotsHeld { what: "combine input", slots: 2 }), "{error}");
            // Two ranks of 8 tokens each.
            assert_eq!((inputs[0].rows(), inputs[0].x().shape()), (16, [16, HIDDEN]));
            assert_eq!(inputs[0].weights().shape(), [16, TOPK]);
            assert_ne!(inputs[0].x().address(), inputs[1].x().address());
            for round in 1..6 {
                for input in &mut inputs {
                    let value = round as f32 * 3.0;
                    fill(&good, &buffer, input, value).unwrap();
                    for transfer in [Transfer::Auto, Transfer::Push, Transfer::Pull] {
                        let sums = sums(&good, &mut buffer, &dispatched, input.x(), transfer).unwrap();
                        assert!(sums.iter().all(|&y| y == bf16::from_f32(2.0 * value)), "{transfer:?}");
                    }
                }
            }
            let [mut input, other] = inputs;
            drop(other);
            input.reshape(HIDDEN / 2, 1).unwrap();
            for (hidden, topk) in [(HIDDEN + 8, 1), (HIDDEN, TOPK + 1), (0, 1)] {
                let error = input.reshape(hidden, topk).unwrap_err();
                assert!(matches!(error, Error::Invalid { .. }), "{error}");
            }
            assert_eq!((input.x().shape(), input.weights().shape()), ([16, HIDDEN / 2], [16, 1]));
            // It keeps the memory, not the buffer.
            buffer.close().unwrap();
            drop(input);
        });
    }
}

on_both_sides! {
    results_are_pulled_where_they_are, |side| {
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = builder(side).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            for _ in 0..3 {
                let dispatched = good.dispatch(&mut buffer).unwrap();
                let sums = sums(&good, &mut buffer, &dispatched, dispatched.x(), Transfer::Pull).unwrap();
                assert!(sums.iter().all(|&y| y == bf16::from_f32(2.0)));
            }
            let error = buffer.combine_input().unwrap_err().to_string();
            assert!(error.starts_with("combine_inputs = 0: the buffer has none"), "{error}");
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    /// Every refusal comes before anything is sent.
    what_can_not_be_pulled_is_refused, |side| {
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = builder(side).combine_inputs(1).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            let dispatched = good.dispatch(&mut buffer).unwrap();
            let mut input = buffer.combine_input().unwrap();
            let own = good.ones.part(DType::Bf16, 2 * TOKENS, HIDDEN);
            let error = sums(&good, &mut buffer, &dispatched, own, Transfer::Pull).unwrap_err().to_string();
            assert!(error.starts_with("transfer = Pull: x and the weights must lie in the buffer's heap"), "{error}");
            // In the heap, but the weights are not: sent, unless it is asked for.
            let given = good.halves.part(DType::F32, 2 * TOKENS, TOPK);
            fill(&good, &buffer, &mut input, 4.0).unwrap();
            let weights = good.tensors.of(&buffer, &[0.25_f32; 16 * TOPK], 16, TOPK);
            input.copy_weights_in(weights.view(), None).unwrap().wait(LONG).unwrap();
            let mut out = good.tensors.of(&buffer, &vec![bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
            let mut back = good.tensors.of(&buffer, &[0.0_f32; TOKENS * TOPK], TOKENS, TOPK);
            for (weights, transfer, expected) in [
                (given, Transfer::Pull, None),
                (given, Transfer::Auto, Some(0.5)),
                (given, Transfer::Push, Some(0.5)),
                (input.weights(), Transfer::Auto, Some(0.25)),
                (input.weights(), Transfer::Pull, Some(0.25)),
            ] {
                let args = CombineArgs::new(input.x(), dispatched.handle(), out.view_mut());
                let args = args.weights(weights, back.view_mut()).transfer(transfer);
                match (buffer.combine(args), expected) {
                    (Err(Error::Invalid { parameter: "transfer", .. }), None) => {}
                    (Ok(event), Some(expected)) => {
                        event.wait(LONG).unwrap();
                        assert!(back.read::<f32>(&buffer).iter().all(|&w| w == expected), "{transfer:?}");
                        assert!(out.read::<bf16>(&buffer).iter().all(|&y| y == bf16::from_f32(8.0)));
                    }
                    (outcome, _) => panic!("{transfer:?}, {expected:?}: {outcome:?}"),
                }
            }
            // Too many rows, other columns, other types.
            let wide = good.tensors.of(&buffer, &vec![bf16::ONE; 17 * HIDDEN], 17, HIDDEN);
            for bad in [wide.view(), wide.part(DType::Bf16, 1, HIDDEN / 2)] {
                assert!(matches!(input.copy_in(bad, None), Err(Error::Shape { tensor: "x", .. })));
            }
            assert!(matches!(input.copy_in(good.fp8(), None), Err(Error::DType { tensor: "x", .. })));
            assert!(input.copy_weights_in(given.first_rows(0), None).is_ok());
            assert!(matches!(input.copy_weights_in(good.x(), None), Err(Error::DType { .. })));
            // Columns after columns.
            let rows = good.x();
            // SAFETY: the tensor's memory, seen as another matrix of as many elements.
            let columns = unsafe {
                TensorRef::from_raw(rows.address(), rows.space(), DType::Bf16, [4, HIDDEN], [1, 4]).unwrap()
            };
            let error = input.copy_in(columns, None).unwrap_err();
            let is_x = matches!(&error, Error::Stride { tensor: "x", strides, .. } if strides == &[1, 4]);
            assert!(is_x && error.to_string().contains("elements of a row"), "{error}");
            // Rows of the expanded layout are summed first, or too many.
            let expanded = buffer.dispatch(DispatchArgs::new(good.x(), good.idx()).expanded(8)).unwrap();
            let error = sums(&good, &mut buffer, &expanded, input.x(), Transfer::Pull).unwrap_err().to_string();
            assert!(error.starts_with("transfer = Pull: rows are read where they are in the plain layout"), "{error}");
            let sums = sums(&good, &mut buffer, &expanded, input.x(), Transfer::Auto).unwrap();
            assert!(sums.iter().all(|&y| y == bf16::from_f32(8.0)));
            drop(expanded);
            good.round(&mut buffer);
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    another_buffer_refuses_inputs, |side| {
        let second: Vec<_> = thread_group(2, LONG).unwrap().into_iter().map(Some).collect();
        let second = Mutex::new(second);
        on_threads(2, LONG, |bootstrap| {
            let its_second = second.lock().unwrap()[bootstrap.rank()].take().unwrap();
            let one = builder(side).combine_inputs(1).build(bootstrap).unwrap();
            let mut two = builder(side).build(its_second).unwrap();
            let good = Good::new(&one);
            let mut input = one.combine_input().unwrap();
            let dispatched = good.dispatch(&mut two).unwrap();
            let error = sums(&good, &mut two, &dispatched, input.x(), Transfer::Auto).unwrap_err();
            assert!(matches!(error, Error::ForeignView { tensor: "x", .. }), "{error}");
            let error = input.copy_in(dispatched.x(), None).unwrap_err();
            assert!(matches!(error, Error::ForeignView { tensor: "x", .. }), "{error}");
            drop(dispatched);
            two.close().unwrap();
            one.close().unwrap();
        });
    }
}

on_both_sides! {
    /// A rank that receives nothing gives no rows of its input.
    a_rank_without_rows_takes_part, |side| {
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = builder(side).combine_inputs(1).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            let mut input = buffer.combine_input().unwrap();
            fill(&good, &buffer, &mut input, 5.0).unwrap();
            let ids = good.tensors.of(&buffer, &[0_i64, 1].repeat(TOKENS), TOKENS, TOPK);
            for _ in 0..4 {
                let dispatched = buffer.dispatch(DispatchArgs::new(good.x(), ids.view())).unwrap();
                assert_eq!(dispatched.rows(), if rank == 0 { 2 * TOKENS } else { 0 });
                // Of the input, or of any memory: what is not there is not read.
                let (rows, none) = (dispatched.rows(), good.ones.part(DType::Bf16, 0, HIDDEN));
                for of_input in [true, false] {
                    let x = if rows > 0 || of_input { input.x().first_rows(rows) } else { none };
                    let sums = sums(&good, &mut buffer, &dispatched, x, Transfer::Pull).unwrap();
                    assert!(sums.iter().all(|&y| y == bf16::from_f32(5.0)));
                }
            }
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    /// One rank's rows are in the heap and another's are not, or one asks to send: all are told, and nobody writes what may still be read.
    ranks_that_do_not_agree_to_pull_are_told, |side| {
        for forced in [false, true] {
            on_threads(2, LONG, |bootstrap| {
                let rank = bootstrap.rank();
                let mut buffer = builder(side).combine_inputs(2).build(bootstrap).unwrap();
                let good = Good::new(&buffer);
                let dispatched = good.dispatch(&mut buffer).unwrap();
                let mut input = buffer.combine_input().unwrap();
                fill(&good, &buffer, &mut input, 1.0).unwrap();
                let own = good.ones.part(DType::Bf16, 2 * TOKENS, HIDDEN);
                let (x, transfer) = match (rank, forced) {
                    (0, _) => (input.x(), Transfer::Auto),
                    (_, false) => (own, Transfer::Auto),
                    (_, true) => (input.x(), Transfer::Push),
                };
                let error = sums(&good, &mut buffer, &dispatched, x, transfer).unwrap_err();
                assert!(matches!(error, Error::RanksDisagree { .. }), "{error}");
                assert!(error.to_string().contains("whether rows are pulled"), "{error}");
                buffer.synchronize(LONG).err();
                // On GPUs the buffer hears of it with the next call.
                buffer.barrier().unwrap_err();
                let told = |error: Error| match error {
                    Error::Broken { reason } => assert!(reason.starts_with("ranks disagree: combine call"), "{reason}"),
                    error => panic!("{error}"),
                };
                told(input.x_mut().map(drop).unwrap_err());
                told(buffer.barrier().unwrap_err());
                assert!(matches!(input.weights_mut(), Err(Error::Broken { .. })));
                assert!(matches!(fill(&good, &buffer, &mut input, 2.0), Err(Error::Broken { .. })));
                assert!(matches!(buffer.combine_input(), Err(Error::Broken { .. })));
            });
        }
    }
}
