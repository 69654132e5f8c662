//! All-gather, reduce-scatter and all-reduce on the host backend, against an oracle: ranks as threads, and what happens when they disagree or
//! do not come.

use deepep_core::bootstrap::{ThreadBootstrap, thread_group};
use deepep_core::tensor::{DType, Element, TensorMut, TensorRef};
use deepep_core::{BackendKind, Collectives, Error, Result};
use half::{bf16, f16};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

/// Runs a body on all ranks at the same time, with collectives whose stages are so small that they are gone around many times.
fn on_ranks<T: Send>(ranks: usize, timeout: Duration, body: impl Fn(&mut Collectives) -> T + Sync) -> Vec<T> {
    let build = |bootstrap: ThreadBootstrap| {
        let builder = Collectives::builder().backend(BackendKind::Host).timeout(timeout);
        builder.cell_bytes(64).slice(128).build(bootstrap)
    };
    let group = thread_group(ranks, SOON).unwrap();
    let (build, body) = (&build, &body);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            group.into_iter().map(|b| scope.spawn(move || body(&mut build(b).unwrap()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers between −4 and 4, the same in every process.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ (seed as u64) << 32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 21) as f32 - 4.0
    };
    (0..count).map(|_| next()).collect()
}

/// A type that is summed.
trait Number: Element + PartialEq + std::fmt::Debug + Send + Sync {
    fn of(x: f32) -> Self;
    fn to(self) -> f32;
}

macro_rules! number {
    ($type:ty, $of:expr, $to:expr) => {
        impl Number for $type {
            fn of(x: f32) -> Self {
                $of(x)
            }
            fn to(self) -> f32 {
                $to(self)
            }
        }
    };
}
number!(f32, |x| x, |x| x);
number!(bf16, bf16::from_f32, bf16::to_f32);
number!(f16, f16::from_f32, f16::to_f32);

fn given<T: Number>(rank: usize, count: usize) -> Vec<T> {
    numbers(rank + 17 * count, count).into_iter().map(T::of).collect()
}

fn sum<T: Number>(ranks: usize, count: usize) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..ranks).map(|rank| given(rank, count)).collect();
    (0..count).map(|i| T::of(all[1..].iter().fold(all[0][i].to(), |sum, of| sum + of[i].to()))).collect()
}

fn all_kinds<T: Number>(collectives: &mut Collectives, count: usize) {
    let (rank, ranks) = (collectives.rank(), collectives.ranks());
    let mine = given::<T>(rank, count);
    let mut all = vec![T::of(9.0); count * ranks];
    collectives.all_gather(TensorRef::vector(&mine), TensorMut::vector(&mut all)).unwrap();
    let expected: Vec<T> = (0..ranks).flat_map(|rank| given::<T>(rank, count)).collect();
    assert_eq!(all, expected, "all-gather of {count} on {ranks} ranks");

    let mut out = vec![T::of(9.0); count];
    collectives.all_reduce(TensorRef::vector(&mine), TensorMut::vector(&mut out)).unwrap();
    assert_eq!(out, sum::<T>(ranks, count), "all-reduce of {count} on {ranks} ranks");
    let mut here = mine.clone();
    collectives.all_reduce_in_place(TensorMut::vector(&mut here)).unwrap();
    assert_eq!(here, out);

    let many = given::<T>(rank, count * ranks);
    let event = collectives.reduce_scatter(TensorRef::vector(&many), TensorMut::vector(&mut out)).unwrap();
    assert!(event.is_complete().unwrap());
    let total = sum::<T>(ranks, count * ranks);
    assert_eq!(out, total[rank * count..][..count], "reduce-scatter of {count} on {ranks} ranks");
}

#[test]
fn every_rank_gets_the_oracles_bits() {
    for ranks in [1, 2, 3, 8] {
        on_ranks(ranks, SOON, |collectives| {
            for count in [0, 1, 7, 1000, 40_000] {
                all_kinds::<f32>(collectives, count);
                all_kinds::<bf16>(collectives, count);
                all_kinds::<f16>(collectives, count);
            }
        });
    }
}

#[test]
fn an_all_gather_moves_any_type_and_matrices() {
    on_ranks(3, SOON, |collectives| {
        let mine: Vec<u8> = (0..5 * 7).map(|i| (i * 3 + 50 * collectives.rank()) as u8).collect();
        let mut all = vec![0; 3 * 5 * 7];
        let input = TensorRef::bytes_as(&mine, DType::F8E4M3, 5, 7).unwrap();
        let output = TensorMut::bytes_as(&mut all, DType::F8E4M3, 15, 7).unwrap();
        collectives.all_gather(input, output).unwrap();
        assert!(all.chunks(35).enumerate().all(|(rank, part)| part[1] == (3 + 50 * rank) as u8));
    });
}

#[test]
fn bad_arguments_are_errors_before_anything_is_sent() {
    on_ranks(2, SOON, |collectives| {
        let four = [1.0_f32; 4];
        let mut eight = [0.0_f32; 8];
        let error = |result: Result<_>| result.map(|_: deepep_core::Event| ()).unwrap_err();
        let e = error(collectives.all_reduce(TensorRef::vector(&four), TensorMut::vector(&mut eight)));
        assert!(matches!(e, Error::Shape { tensor: "output", .. }), "{e}");
        let e = error(collectives.reduce_scatter(TensorRef::vector(&four), TensorMut::vector(&mut eight)));
        assert!(matches!(e, Error::Shape { tensor: "input", .. }), "{e}");
        let e = error(collectives.all_gather(TensorRef::vector(&four), TensorMut::vector(&mut eight[..7])));
        assert!(matches!(e, Error::Shape { tensor: "output", .. }), "{e}");
        let integers = [1_i32; 8];
        let mut more = [0_i32; 8];
        let e = error(collectives.all_reduce(TensorRef::vector(&integers), TensorMut::vector(&mut more)));
        assert!(matches!(e, Error::DType { tensor: "input", .. }), "{e}");
        let e = error(collectives.all_reduce(TensorRef::vector(&integers), TensorMut::vector(&mut eight)));
        assert!(matches!(e, Error::DType { tensor: "output", .. }), "{e}");
        let apart = TensorRef::strided(&four, 2, 1, [2, 1]).unwrap();
        let mut two = [0.0_f32; 2];
        let e = error(collectives.all_reduce(apart, TensorMut::matrix(&mut two, 2, 1).unwrap()));
        assert!(matches!(e, Error::Stride { tensor: "input", .. }), "{e}");
        // SAFETY: null is the default stream; it is refused before it is used.
        let stream = unsafe { deepep_core::StreamRef::from_raw(std::ptr::null_mut()) };
        let e = error(collectives.all_gather_on(
            TensorRef::vector(&four),
            TensorMut::vector(&mut eight),
            Some(stream),
            None,
        ));
        assert!(matches!(e, Error::Tensor { .. }), "{e}");
        all_kinds::<f32>(collectives, 100);
    });
}

#[test]
fn ranks_that_call_differently_are_told_and_go_on() {
    let errors = on_ranks(3, SOON, |collectives| {
        let count = if collectives.rank() == 1 { 5 } else { 4 };
        let mine = vec![1.0_f32; count];
        let mut out = vec![9.0_f32; count];
        let error =
            collectives.all_reduce(TensorRef::vector(&mine), TensorMut::vector(&mut out)).unwrap_err();
        assert_eq!(out, vec![9.0; count], "nothing was moved");
        all_kinds::<bf16>(collectives, 33);
        error
    });
    for error in errors {
        let Error::RanksDisagree { differences } = &error else { panic!("{error}") };
        assert_eq!(
            differences[0].values.iter().map(|(_, ranks)| ranks.clone()).collect::<Vec<_>>(),
            [vec![0, 2], vec![1]]
        );
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let short = Duration::from_millis(200);
    let barrier = std::sync::Barrier::new(3);
    on_ranks(3, short, |collectives| {
        all_kinds::<f32>(collectives, 10);
        let mine = [1.0_f32; 10];
        let mut out = [0.0_f32; 10];
        let mut call = || collectives.all_reduce(TensorRef::vector(&mine), TensorMut::vector(&mut out));
        if barrier.wait().is_leader() {
            // Whoever it is comes late.
            barrier.wait();
            let error = call().unwrap_err();
            assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
            return;
        }
        let start = Instant::now();
        let error = call().unwrap_err();
        assert!(matches!(&error, Error::PeerTimeout { missing, .. } if missing.len() == 1), "{error}");
        assert!(start.elapsed() < short + Duration::from_secs(5), "{:?}", start.elapsed());
        // From then on they are broken.
        let error = call().unwrap_err();
        assert!(matches!(error, Error::Broken { .. }), "{error}");
        barrier.wait();
    });
}

#[test]
fn settings_that_differ_or_cannot_be_are_errors_on_all() {
    let build = |slices: [usize; 2]| {
        let group = thread_group(2, SOON).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = group
                .into_iter()
                .zip(slices)
                .map(|(b, slice)| {
                    let builder = Collectives::builder().backend(BackendKind::Host).slice(slice);
                    scope.spawn(move || builder.build(b).map(drop).unwrap_err())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for error in build([128, 256]) {
        assert!(matches!(&error, Error::RanksDisagree { .. }), "{error}");
        assert!(error.to_string().contains("slice is 128 on rank 0, 256 on rank 1"), "{error}");
    }
    let errors = build([128, 100]);
    assert!(matches!(&errors[0], Error::PeerFailed { rank: 1, .. }), "{}", errors[0]);
    assert!(matches!(&errors[1], Error::Invalid { parameter: "slice", .. }), "{}", errors[1]);
}
