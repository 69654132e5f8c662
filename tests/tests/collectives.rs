//! All-gather, reduce-scatter and all-reduce against an oracle, on the host backend and, where there is a GPU, on the CUDA backend: ranks as
//! threads, and what happens when they disagree or do not come.
//!
//! `DEEPEP_TEST_RANKS=1,2,4` chooses the numbers of ranks; on GPUs ranks share them if there are more.

use deepep_core::bootstrap::{ThreadBootstrap, thread_group};
use deepep_core::tensor::{DType, Element, Space, TensorMut, TensorRef};
use deepep_core::{
    BackendKind, CollectiveLimits, Collectives, CollectivesBuilder, Error, Event, Result, device,
};
use half::{bf16, f16};
use integration_tests::gpu;
use integration_tests::tensor::{Tensor, elements};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);
/// The first calls compile kernels.
const BUILD: Duration = Duration::from_secs(120);

/// Ways of one backend: stages that are so small that they are gone around many times, or as large as they are by default.
#[derive(Clone, Copy, Debug)]
struct Setting {
    backend: BackendKind,
    small: bool,
}

impl Setting {
    fn builder(self, timeout: Duration) -> CollectivesBuilder {
        let builder = Collectives::builder().backend(self.backend).timeout(timeout);
        if self.small { builder.cell_bytes(64).slice(128) } else { builder }
    }
}

/// Runs a test body with every setting that this machine has.
fn everywhere(test: &str, body: impl Fn(Setting)) {
    for small in [true, false] {
        body(Setting { backend: BackendKind::Host, small });
    }
    if gpu::cuda(test, 1).is_some() {
        for small in [true, false] {
            body(Setting { backend: BackendKind::Cuda, small });
        }
    }
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

/// Which memory the collectives' tensors are in.
fn device_space(collectives: &Collectives) -> Space {
    if collectives.backend() == BackendKind::Cuda { Space::Device } else { Space::Host }
}

fn given<T: Number>(rank: usize, count: usize) -> Vec<T> {
    numbers(rank + 17 * count, count).into_iter().map(T::of).collect()
}

fn sum<T: Number>(ranks: usize, count: usize) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..ranks).map(|rank| given(rank, count)).collect();
    (0..count).map(|i| T::of(all[1..].iter().fold(all[0][i].to(), |sum, of| sum + of[i].to()))).collect()
}

/// One call of each kind on `count` elements a rank, if it were not for what comes back.
fn all_kinds<T: Number>(collectives: &mut Collectives, count: usize) {
    let (rank, ranks) = (collectives.rank(), collectives.ranks());
    let mine = Tensor::of(collectives, &given::<T>(rank, count));
    let many = Tensor::of(collectives, &given::<T>(rank, count * ranks));
    let mut all = Tensor::of(collectives, &vec![T::of(9.0); count * ranks]);
    let mut out = Tensor::of(collectives, &vec![T::of(9.0); count]);
    let mut part = Tensor::of(collectives, &vec![T::of(9.0); count]);
    let mut here = Tensor::of(collectives, &given::<T>(rank, count));
    // SAFETY: every call is waited for before a tensor is used again or dropped; one that fails ends the test.
    unsafe {
        let given = || mine.view(T::DTYPE, 1, count);
        let gathered = collectives.all_gather(given(), all.view_mut(T::DTYPE, ranks, count));
        let summed = collectives.all_reduce(given(), out.view_mut(T::DTYPE, 1, count));
        let in_place = collectives.all_reduce_in_place(here.view_mut(T::DTYPE, 1, count));
        let to = part.view_mut(T::DTYPE, 1, count);
        let scattered = collectives.reduce_scatter(many.view(T::DTYPE, ranks, count), to);
        [gathered, summed, in_place, scattered].into_iter().for_each(done);
    }
    let expected: Vec<T> = (0..ranks).flat_map(|rank| given::<T>(rank, count)).collect();
    assert_eq!(all.read::<T>(), expected, "all-gather of {count} on {ranks} ranks");
    let total = sum::<T>(ranks, count);
    assert_eq!(out.read::<T>(), total, "all-reduce of {count} on {ranks} ranks");
    assert_eq!(here.read::<T>(), total, "all-reduce of {count} in place on {ranks} ranks");
    let total = sum::<T>(ranks, count * ranks);
    let mine = &total[rank * count..][..count];
    assert_eq!(part.read::<T>(), mine, "reduce-scatter of {count} on {ranks} ranks");
}

#[test]
fn every_rank_gets_the_oracles_bits() {
    everywhere("every_rank_gets_the_oracles_bits", |setting| {
        for ranks in rank_counts(&[1, 2, 3, 8]) {
            on_ranks(ranks, setting.builder(SOON), |collectives| {
                for count in [0, 1, 7, 1000, 40_000] {
                    all_kinds::<f32>(collectives, count);
                    all_kinds::<bf16>(collectives, count);
                    all_kinds::<f16>(collectives, count);
                }
            });
        }
    });
}

#[test]
fn an_all_gather_moves_any_type_and_matrices() {
    everywhere("an_all_gather_moves_any_type_and_matrices", |setting| {
        on_ranks(3, setting.builder(SOON), |collectives| {
            let mine: Vec<u8> = (0..5 * 7).map(|i| (i * 3 + 50 * collectives.rank()) as u8).collect();
            let mine = Tensor::of(collectives, &mine);
            let mut all = Tensor::of(collectives, &[0_u8; 3 * 5 * 7]);
            // SAFETY: waited for before the tensors go.
            let (input, output) =
                unsafe { (mine.view(DType::F8E4M3, 5, 7), all.view_mut(DType::F8E4M3, 15, 7)) };
            done(collectives.all_gather(input, output));
            let all = all.read::<u8>();
            assert!(all.chunks(35).enumerate().all(|(rank, part)| part[1] == (3 + 50 * rank) as u8));
        });
    });
}

/// Into symmetric memory, by copy engines where there are some.
#[test]
fn an_all_gather_into_symmetric_memory() {
    everywhere("an_all_gather_into_symmetric_memory", |setting| {
        for ranks in rank_counts(&[1, 2, 4]) {
            let limits = CollectiveLimits::DEFAULT.copy_engine(1000);
            let builder = setting.builder(SOON).tensor_bytes(1 << 20).limits(limits);
            on_ranks(ranks, builder, |collectives| {
                let range = collectives.tensors().unwrap();
                assert_eq!(range.end - range.start, 1 << 20);
                let rank = collectives.rank();
                // Below the limit, at it and above; several calls one after the other.
                for count in [3, 250, 251, 9999, 60_000 / ranks] {
                    let mine = Tensor::of(collectives, &given::<f32>(rank, count));
                    let (offset, shape) = (64 * ranks as u64, [ranks, count]);
                    let (dtype, strides) = (DType::F32, [count as isize, 1]);
                    let space = device_space(collectives);
                    // SAFETY: the part lies in this rank's memory for tensors, which nobody else uses; the call is waited for.
                    let output =
                        unsafe { TensorMut::from_raw(range.start + offset, space, dtype, shape, strides) };
                    // SAFETY: as above.
                    done(collectives.all_gather(unsafe { mine.view(dtype, 1, count) }, output.unwrap()));
                    // SAFETY: the call has run; nobody writes the part before the next one.
                    let view =
                        unsafe { TensorRef::from_raw(range.start + offset, space, dtype, shape, strides) };
                    let got = elements::<f32>(&device::read(collectives.device(), view.unwrap()).unwrap());
                    let expected: Vec<f32> = (0..ranks).flat_map(|rank| given::<f32>(rank, count)).collect();
                    assert_eq!(got, expected, "{count} on {ranks} ranks");
                    // The others may write it only now.
                    all_kinds::<bf16>(collectives, 5);
                }
                assert!(collectives.multicast().unwrap_err().contains("not asked"));
            });
        }
    });
}

#[test]
fn bad_arguments_are_errors_before_anything_is_sent() {
    let setting = Setting { backend: BackendKind::Host, small: true };
    on_ranks(2, setting.builder(SOON), |collectives| {
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

/// On the host backend they are told before anything moves, and go on. On GPUs they learn of it from the event.
#[test]
fn ranks_that_call_differently_are_told() {
    everywhere("ranks_that_call_differently_are_told", |setting| {
        let errors = on_ranks(3, setting.builder(SOON), |collectives| {
            let count = if collectives.rank() == 1 { 5 } else { 4 };
            let mine = Tensor::of(collectives, &vec![1.0_f32; count]);
            let mut out = Tensor::of(collectives, &vec![9.0_f32; count]);
            // SAFETY: waited for, or refused, before the tensors go.
            let (input, output) =
                unsafe { (mine.view(DType::F32, 1, count), out.view_mut(DType::F32, 1, count)) };
            let error = collectives.all_reduce(input, output).and_then(|event| event.wait(SOON)).unwrap_err();
            if setting.backend == BackendKind::Host {
                assert_eq!(out.read::<f32>(), vec![9.0; count], "nothing was moved");
                all_kinds::<bf16>(collectives, 33);
            } else {
                // SAFETY: refused.
                let again = collectives.all_reduce_in_place(unsafe { out.view_mut(DType::F32, 1, count) });
                assert!(again.is_err(), "they are broken");
            }
            error
        });
        for error in errors {
            let Error::RanksDisagree { differences } = &error else { panic!("{error}") };
            assert!(differences[0].field.starts_with("collective call"), "{error}");
            let ranks: Vec<_> = differences[0].values.iter().map(|(_, ranks)| ranks.clone()).collect();
            match setting.backend {
                BackendKind::Host => assert_eq!(ranks, [vec![0, 2], vec![1]]),
                // Two that differ are enough to stop.
                _ => assert!(ranks.len() == 2 && ranks.concat().contains(&1), "{error}"),
            }
        }
    });
}

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

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    everywhere("a_rank_that_does_not_come_is_named_in_time", |setting| {
        let short = Duration::from_millis(500);
        let (ready, failed) = (Gate::default(), Gate::default());
        on_ranks(3, setting.builder(short), |collectives| {
            all_kinds::<f32>(collectives, 10);
            let mine = Tensor::of(collectives, &[1.0_f32; 10]);
            let mut out = Tensor::of(collectives, &[0.0_f32; 10]);
            let mut call = || {
                // SAFETY: waited for, or refused, before the tensors go.
                let (input, output) =
                    unsafe { (mine.view(DType::F32, 1, 10), out.view_mut(DType::F32, 1, 10)) };
                collectives.all_reduce(input, output).and_then(|event| event.wait(SOON))
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
            let known = setting.backend != BackendKind::Host && matches!(error, Error::PeerTimeout { .. });
            assert!(known || matches!(error, Error::Broken { .. }), "{error}");
            assert!(matches!(call().unwrap_err(), Error::Broken { .. }));
            failed.come();
        });
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
