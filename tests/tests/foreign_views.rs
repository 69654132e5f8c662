//! Views of one buffer's results are not for the operations of another: nothing orders the two. On both backends.

use std::sync::Mutex;

use deepep_core::bootstrap::{Bootstrap, ThreadBootstrap, thread_group};
use deepep_core::tensor::TensorRef;
use deepep_core::{Collectives, CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, Result};
use half::bf16;
use integration_tests::on_both_sides;
use integration_tests::ranks::{LONG, on_threads};
use integration_tests::sides::Side;
use integration_tests::tensors::{Tensors, read};

const TOKENS: usize = 4;
const HIDDEN: usize = 64;

fn buffer(side: &Side, bootstrap: ThreadBootstrap) -> ElasticBuffer {
    ElasticBuffer::builder()
        .packets(false)
        .max_tokens_per_rank(TOKENS)
        .experts(2)
        .topk(1)
        .hidden(HIDDEN)
        .timeout(side.patience())
        .backend(side.backend)
        .build(bootstrap)
        .unwrap()
}

/// The two buffers that a refusal names.
fn foreign<T>(outcome: Result<T>, tensor: &str) -> (u64, Option<u64>) {
    match outcome {
        Err(Error::ForeignView { tensor: got, owner, buffer }) if got == tensor => (owner, buffer),
        Err(error) => panic!("{tensor}: {error}"),
        Ok(_) => panic!("{tensor}: taken"),
    }
}

on_both_sides!(
    /// Every tensor argument is looked at; nothing is sent, and the same calls with tensors of the caller's, or of the same buffer, work.
    another_buffer_refuses_them, |side| {
        // Each rank takes its own.
        let second: Vec<_> = thread_group(2, LONG).unwrap().into_iter().map(Some).collect();
        let second = Mutex::new(second);
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut one = buffer(side, bootstrap);
            let its_second = second.lock().unwrap()[rank].take().unwrap();
            let mut two = buffer(side, its_second);
            let tensors = Tensors::default();
            let x = tensors.of(&one, &[bf16::ONE; TOKENS * HIDDEN], TOKENS, HIDDEN);
            let ids = tensors.of(&one, &[0_i64, 1, 0, 1], TOKENS, 1);
            let weights = tensors.of(&one, &[0.5_f32; TOKENS], TOKENS, 1);
            let mut out = tensors.of(&one, &[bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
            let good = || DispatchArgs::new(x.view(), ids.view()).weights(weights.view());
            let of_one = one.dispatch(good()).unwrap();
            let of_two = two.dispatch(good()).unwrap();
            // Both got as many rows as each rank gives: the views fit wherever tensors of a call do.
            assert_eq!((of_one.rows(), of_two.rows()), (TOKENS, TOKENS));
            let (rows, received) = (of_one.x(), of_one.topk_weights().unwrap());
            let [number, other] = [&of_one, &of_two].map(|dispatched| dispatched.x().buffer());
            assert!(number.is_some() && other.is_some() && number != other);
            let expected = (number.unwrap(), other);
            assert_eq!(foreign(two.dispatch(DispatchArgs::new(rows, ids.view())), "x"), expected);
            let refused = two.dispatch(DispatchArgs::new(x.view(), ids.view()).weights(received));
            assert_eq!(foreign(refused, "topk_weights"), expected);
            let handle = of_two.handle();
            assert_eq!(foreign(two.combine(CombineArgs::new(rows, handle, out.view_mut())), "x"), expected);
            let refused = two.combine(CombineArgs::new(of_two.x(), handle, out.view_mut()).bias(rows));
            assert_eq!(foreign(refused, "bias"), expected);
            // The same rows by the buffer that they are of, then copied by hand for the other.
            let sum = |buffer: &mut ElasticBuffer, dispatched: &Dispatched, x: TensorRef<'_>| {
                let mut out = tensors.of(buffer, &[bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
                let done = buffer.combine(CombineArgs::new(x, dispatched.handle(), out.view_mut())).unwrap();
                done.wait(LONG).unwrap();
                out.read::<bf16>(buffer)
            };
            assert_eq!(sum(&mut one, &of_one, rows), [bf16::ONE; TOKENS * HIDDEN]);
            of_one.copy_out(rows, out.view_mut(), None).unwrap().wait(LONG).unwrap();
            assert_eq!(sum(&mut two, &of_two, out.view()), [bf16::ONE; TOKENS * HIDDEN]);
            // A buffer's own views may go round again.
            let again = one.dispatch(DispatchArgs::new(rows, ids.view())).unwrap();
            again.event().wait(LONG).unwrap();
            assert_eq!(read::<bf16>(&one, again.x()), [bf16::ONE; TOKENS * HIDDEN]);
            drop((of_one, of_two, again));
            one.close().unwrap();
            two.close().unwrap();
        });
    }
);

on_both_sides!(
    /// Collectives have no buffer at all.
    collectives_refuse_them, |side| {
        on_threads(1, LONG, |bootstrap| {
            let mut buffer = buffer(side, bootstrap);
            let alone = thread_group(1, LONG).unwrap().remove(0);
            let builder = Collectives::builder().timeout(side.patience()).backend(side.backend);
            let mut collectives = builder.build(alone).unwrap();
            let tensors = Tensors::default();
            let x = tensors.of(&buffer, &[bf16::ONE; TOKENS * HIDDEN], TOKENS, HIDDEN);
            let ids = tensors.of(&buffer, &[0_i64; TOKENS], TOKENS, 1);
            let mut out = tensors.of(&buffer, &[bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
            let dispatched = buffer.dispatch(DispatchArgs::new(x.view(), ids.view())).unwrap();
            let owner = dispatched.x().buffer().unwrap();
            assert_eq!(foreign(collectives.all_reduce(dispatched.x(), out.view_mut()), "input"), (owner, None));
            let cells = dispatched.handle().count_cells();
            let mut four = tensors.of(&buffer, &[0_i32; 4], 4, 1);
            assert_eq!(foreign(collectives.all_gather(cells, four.view_mut()), "input"), (owner, None));
            // Whoever answers for the view may give it all the same: here the dispatch has run, and the result is kept.
            let rows = dispatched.x();
            // SAFETY: the counts, hence the dispatch, were waited for, and the result is dropped after the collective was waited for.
            let raw = unsafe {
                TensorRef::from_raw(rows.address(), rows.space(), rows.dtype(), rows.shape(), rows.strides())
            };
            dispatched.event().wait(LONG).unwrap();
            collectives.all_reduce(raw.unwrap(), out.view_mut()).unwrap().wait(LONG).unwrap();
            assert_eq!(out.read::<bf16>(&buffer), [bf16::ONE; TOKENS * HIDDEN]);
            drop(dispatched);
            collectives.close().unwrap();
            buffer.close().unwrap();
        });
    }
);
