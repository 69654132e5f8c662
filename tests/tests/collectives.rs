//! All-gather, reduce-scatter and all-reduce against an oracle, on the host backend and, where there is a GPU, on the CUDA backend: ranks as
//! threads, and what happens when they disagree or do not come.
//!
//! `DEEPEP_TEST_RANKS=1,2,4` chooses the numbers of ranks; on GPUs ranks share them if there are more.

use deepep_cli::tensors::Number;
use deepep_core::bootstrap::{ThreadBootstrap, thread_group};
use deepep_core::tensor::{DType, Space, TensorMut, TensorRef};
use deepep_core::{BackendKind, CollectiveLimits, Collectives, CollectivesBuilder, Error, Event, Result};
use half::{bf16, f16};
use integration_tests::on_both_sides;
use integration_tests::sides::Side;
use integration_tests::tensors::{Tensors, read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);
/// The first calls compile kernels.
const BUILD: Duration = Duration::from_secs(120);

/// Collectives of a side: with stages that are so small that they are gone around many times, and as they are by default.
fn builders(side: &Side, timeout: Duration) -> [CollectivesBuilder; 2] {
    let builder = Collectives::builder().backend(side.backend).timeout(timeout);
    [builder.clone().cell_bytes(64).slice(128), builder]
}

fn rank_counts(default: &[usize]) -> Vec<usize> {
    match std::env::var("DEEPEP_TEST_RANKS") {
        Ok(text) => text.split(',').map(|n| n.parse().unwrap()).collect(),
        Err(_) => default.to_vec(),
    }
}

/// Runs a body on all ranks at the same time.
fn on_ranks<T: Send>(
    ranks: usize,
    builder: CollectivesBuilder,
    body: impl Fn(&mut Collectives) -> T + Sync,
) -> Vec<T> {
    let build = |bootstrap: ThreadBootstrap| builder.clone().build(bootstrap);
    let group = thread_group(ranks, BUILD).unwrap();
    let (build, body) = (&build, &body);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            group.into_iter().map(|b| scope.spawn(move || body(&mut build(b).unwrap()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn done(outcome: Result<Event>) {
    outcome.and_then(|event| event.wait(SOON)).unwrap_or_else(|error| panic!("{error}"));
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

/// A number that is summed.
trait Summed: Number + PartialEq + std::fmt::Debug + Send + Sync {
    fn from(x: f32) -> Self;
    fn to(self) -> f32;
}

macro_rules! summed {
    ($type:ty, $from:expr, $to:expr) => {
        impl Summed for $type {
            fn from(x: f32) -> Self {
                $from(x)
            }
            fn to(self) -> f32 {
                $to(self)
            }
        }
    };
}
summed!(f32, |x| x, |x| x);
summed!(bf16, bf16::from_f32, bf16::to_f32);
summed!(f16, f16::from_f32, f16::to_f32);

/// Which memory the collectives' tensors are in.
fn space(side: &Side) -> Space {
    if side.is_gpu() { Space::Device } else { Space::Host }
}

fn given<T: Summed>(rank: usize, count: usize) -> Vec<T> {
    numbers(rank + 17 * count, count).into_iter().map(<T as Summed>::from).collect()
}

fn sum<T: Summed>(ranks: usize, count: usize) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..ranks).map(|rank| given(rank, count)).collect();
    (0..count)
        .map(|i| <T as Summed>::from(all[1..].iter().fold(all[0][i].to(), |sum, of| sum + of[i].to())))
        .collect()
}

/// One call of each kind on `count` elements a rank, one after the other.
fn all_kinds<T: Summed>(collectives: &mut Collectives, count: usize) {
    let (rank, ranks) = (collectives.rank(), collectives.ranks());
    let (tensors, nines) = (Tensors::default(), vec![<T as Summed>::from(9.0); count * ranks]);
    let mine = tensors.of(collectives, &given::<T>(rank, count), 1, count);
    let many = tensors.of(collectives, &given::<T>(rank, count * ranks), ranks, count);
    let mut all = tensors.of(collectives, &nines, ranks, count);
    let mut out = tensors.of(collectives, &nines[..count], 1, count);
    let mut part = tensors.of(collectives, &nines[..count], 1, count);
    let mut here = tensors.of(collectives, &given::<T>(rank, count), 1, count);
    let calls = [
        collectives.all_gather(mine.view(), all.view_mut()),
        collectives.all_reduce(mine.view(), out.view_mut()),
        collectives.all_reduce_in_place(here.view_mut()),
        collectives.reduce_scatter(many.view(), part.view_mut()),
    ];
    calls.into_iter().for_each(done);
    let expected: Vec<T> = (0..ranks).flat_map(|rank| given::<T>(rank, count)).collect();
    assert_eq!(all.read::<T>(collectives), expected, "all-gather of {count} on {ranks} ranks");
    let total = sum::<T>(ranks, count);
    assert_eq!(out.read::<T>(collectives), total, "all-reduce of {count} on {ranks} ranks");
    assert_eq!(here.read::<T>(collectives), total, "all-reduce of {count} in place on {ranks} ranks");
    let total = sum::<T>(ranks, count * ranks);
    let mine = &total[rank * count..][..count];
    assert_eq!(part.read::<T>(collectives), mine, "reduce-scatter of {count} on {ranks} ranks");
}

on_both_sides!(every_rank_gets_the_oracles_bits, |side| {
    for ranks in rank_counts(&[1, 2, 3, 8]) {
        for builder in builders(side, SOON) {
            on_ranks(ranks, builder, |collectives| {
                assert_eq!(collectives.backend(), side.backend);
                for count in [0, 1, 7, 1000, 40_000] {
                    all_kinds::<f32>(collectives, count);
                    all_kinds::<bf16>(collectives, count);
                    all_kinds::<f16>(collectives, count);
                }
            });
        }
    }
});

on_both_sides!(an_all_gather_moves_any_type_and_matrices, |side| {
    for builder in builders(side, SOON) {
        on_ranks(3, builder, |collectives| {
            let mine: Vec<u8> = (0..5 * 7).map(|i| (i * 3 + 50 * collectives.rank()) as u8).collect();
            let tensors = Tensors::default();
            let mine = tensors.of(collectives, &mine, 5, 7);
            let mut all = tensors.of(collectives, &[0_u8; 3 * 5 * 7], 15, 7);
            let (input, output) = (mine.part(DType::F8E4M3, 5, 7), all.part_mut(DType::F8E4M3, 15, 7));
            done(collectives.all_gather(input, output));
            let all = all.read::<u8>(collectives);
            assert!(all.chunks(35).enumerate().all(|(rank, part)| part[1] == (3 + 50 * rank) as u8));
        });
    }
});

// Into symmetric memory, by copy engines where there are some.
on_both_sides!(an_all_gather_into_symmetric_memory, |side| {
    let limits = CollectiveLimits::DEFAULT.copy_engine(1000);
    for (ranks, builder) in
        rank_counts(&[1, 2, 4]).into_iter().flat_map(|n| builders(side, SOON).map(|b| (n, b)))
    {
        on_ranks(ranks, builder.tensor_bytes(1 << 20).limits(limits), |collectives| {
            let range = collectives.tensors().unwrap();
            assert_eq!(range.end - range.start, 1 << 20);
            let (rank, tensors) = (collectives.rank(), Tensors::default());
            // Below the limit, at it and above; several calls one after the other.
            for count in [3, 250, 251, 9999, 60_000 / ranks] {
                let mine = tensors.of(collectives, &given::<f32>(rank, count), 1, count);
                let address = range.start + 64 * ranks as u64;
                let (shape, strides) = ([ranks, count], [count as isize, 1]);
                // SAFETY: the part lies in this rank's memory for tensors, which nobody else uses; the call is waited for.
                let output = unsafe { TensorMut::from_raw(address, space(side), DType::F32, shape, strides) };
                done(collectives.all_gather(mine.view(), output.unwrap()));
                // SAFETY: the call has run; nobody writes the part before the next one.
                let view = unsafe { TensorRef::from_raw(address, space(side), DType::F32, shape, strides) };
                let expected: Vec<f32> = (0..ranks).flat_map(|rank| given::<f32>(rank, count)).collect();
                assert_eq!(read::<f32>(collectives, view.unwrap()), expected, "{count} on {ranks} ranks");
                // The others may write it only now.
                all_kinds::<bf16>(collectives, 5);
            }
            assert!(collectives.multicast().unwrap_err().contains("not asked"));
        });
    }
});

#[test]
fn bad_arguments_are_errors_before_anything_is_sent() {
    let side = Side::host("bad_arguments_are_errors_before_anything_is_sent");
    let [builder, _] = builders(&side, SOON);
    on_ranks(2, builder, |collectives| {
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

// On the host backend they are told before anything moves, and go on. On GPUs they learn of it from the event.
on_both_sides!(ranks_that_call_differently_are_told, |side| {
    for builder in builders(side, SOON) {
        let errors = on_ranks(3, builder, |collectives| {
            let count = if collectives.rank() == 1 { 5 } else { 4 };
            let tensors = Tensors::default();
            let mine = tensors.of(collectives, &vec![1.0_f32; count], 1, count);
            let mut out = tensors.of(collectives, &vec![9.0_f32; count], 1, count);
            let call = collectives.all_reduce(mine.view(), out.view_mut());
            let error = call.and_then(|event| event.wait(SOON)).unwrap_err();
            if side.is_gpu() {
                assert!(collectives.all_reduce_in_place(out.view_mut()).is_err(), "they are broken");
            } else {
                assert_eq!(out.read::<f32>(collectives), vec![9.0; count], "nothing was moved");
                all_kinds::<bf16>(collectives, 33);
            }
            error
        });
        for error in errors {
            let Error::RanksDisagree { differences } = &error else { panic!("{error}") };
            assert!(differences[0].field.starts_with("collective call"), "{error}");
            let ranks: Vec<_> = differences[0].values.iter().map(|(_, ranks)| ranks.clone()).collect();
            if side.is_gpu() {
                // Two that differ are enough to stop.
                assert!(ranks.len() == 2 && ranks.concat().contains(&1), "{error}");
            } else {
                assert_eq!(ranks, [vec![0, 2], vec![1]]);
            }
        }
    }
});

/// Counts who has come, and waits for others, not for ever.
#[derive(Default)]
struct Gate(AtomicUsize);

impl Gate {
    fn come(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    fn wait_for(&self, count: usize) {
        let end = Instant::now() + 2 * SOON;
        while self.0.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < end, "some rank did not get there");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

on_both_sides!(a_rank_that_does_not_come_is_named_in_time, |side| {
    let short = Duration::from_secs(2);
    for builder in builders(side, short) {
        let (ready, failed) = (Gate::default(), Gate::default());
        on_ranks(3, builder, |collectives| {
            all_kinds::<f32>(collectives, 10);
            let tensors = Tensors::default();
            let mine = tensors.of(collectives, &[1.0_f32; 10], 1, 10);
            let mut out = tensors.of(collectives, &[0.0_f32; 10], 1, 10);
            let mut call = || {
                let call = collectives.all_reduce(mine.view(), out.view_mut());
                call.and_then(|event| event.wait(SOON))
            };
            let late = ready.come() == 0;
            ready.wait_for(3);
            if late {
                failed.wait_for(2);
                let error = call().unwrap_err();
                assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
                return;
            }
            let start = Instant::now();
            let error = call().unwrap_err();
            assert!(matches!(&error, Error::PeerTimeout { missing, .. } if missing.len() == 1), "{error}");
            assert!(start.elapsed() < short + Duration::from_secs(5), "{:?}", start.elapsed());
            // From then on they are broken; on a GPU the first call to see it says why.
            let error = call().unwrap_err();
            let why = side.is_gpu() && matches!(error, Error::PeerTimeout { .. });
            assert!(why || matches!(error, Error::Broken { .. }), "{error}");
            assert!(matches!(call().unwrap_err(), Error::Broken { .. }));
            failed.come();
        });
    }
});

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
