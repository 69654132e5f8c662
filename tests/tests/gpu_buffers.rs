//! What buffers do on GPUs only: streams, events, graphs, and what their kernels ask of addresses.

use std::time::Duration;

use cuda_vmm::Cuda;
use deepep_cli::gpu::{Event, GpuError, Graph, PinnedWord, Stream};
use deepep_core::bootstrap::Bootstrap;
use deepep_core::tensor::{DType, TensorRef};
use deepep_core::{Builder, CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, EventRef};
use half::bf16;
use integration_tests::gpu::skipped;
use integration_tests::ranks::{LONG, on_threads};
use integration_tests::sides::{Side, rounds};
use integration_tests::tensors::{Given, Tensors, read};

const RANKS: usize = 2;
const TOKENS: usize = 24;
const HIDDEN: usize = 256;
const TOPK: usize = 4;
const EXPERTS: usize = 8;

fn builder(side: &Side) -> Builder {
    let builder = ElasticBuffer::builder().max_tokens_per_rank(TOKENS).experts(EXPERTS).topk(TOPK);
    builder.hidden(HIDDEN).packets(false).timeout(side.patience()).backend(side.backend)
}

/// Runs on two ranks in threads, if there is a GPU.
fn on_gpu(test: &'static str, body: impl Fn(&mut ElasticBuffer) + Sync) {
    let Some(side) = Side::gpu(test) else { return };
    on_threads(RANKS, LONG, |bootstrap| {
        let mut buffer = builder(&side).expanded(8).build(bootstrap).unwrap();
        body(&mut buffer);
        buffer.close().unwrap();
    });
}

/// Rows and ids of one rank in one round: small whole numbers, so that sums of them are exact.
fn input(rank: usize, round: usize) -> (Vec<bf16>, Vec<i64>) {
    let number = |t: usize, c: usize| ((t * 7 + c + 3 * rank + 5 * round) % 31) as f32 - 15.0;
    let x = (0..TOKENS).flat_map(|t| (0..HIDDEN).map(move |c| bf16::from_f32(number(t, c)))).collect();
    let id = |t: usize, k: usize| match (t + round) % 5 {
        // No expert, one rank's experts, both ranks'.
        0 => -1,
        1 => k as i64,
        2 => (EXPERTS / 2 + k) as i64,
        _ => ((t + rank + 3 * k + round) % EXPERTS) as i64,
    };
    let ids = (0..TOKENS).flat_map(|t| {
        let mut row: Vec<i64> = (0..TOPK).map(|k| id(t, k)).collect();
        for k in 1..TOPK {
            if row[..k].contains(&row[k]) {
                row[k] = -1;
            }
        }
        row
    });
    (x, ids.collect())
}

/// Ranks that a token's experts live on.
fn destinations(ids: &[i64]) -> Vec<usize> {
    (0..RANKS)
        .filter(|&rank| ids.iter().any(|&id| id >= 0 && id as usize / (EXPERTS / RANKS) == rank))
        .collect()
}

/// What combine gives if every expert returns what it got: each row once for each rank that it went to, or in the expanded layout once for each expert.
fn expected(rank: usize, round: usize) -> Vec<bf16> {
    copies(rank, round, |ids| destinations(ids).len())
}
fn expected_expanded(rank: usize, round: usize) -> Vec<bf16> {
    copies(rank, round, |ids| ids.iter().filter(|&&id| id >= 0).count())
}
fn copies(rank: usize, round: usize, count: impl Fn(&[i64]) -> usize) -> Vec<bf16> {
    let (x, ids) = input(rank, round);
    let rows = x.chunks(HIDDEN).zip(ids.chunks(TOPK));
    rows.flat_map(|(row, ids)| {
        let count = count(ids) as f32;
        row.iter().map(move |x| bf16::from_f32(x.to_f32() * count))
    })
    .collect()
}

/// Tokens that a rank receives.
fn received(rank: usize, round: usize) -> usize {
    let from = |source: usize| {
        let (_, ids) = input(source, round);
        ids.chunks(TOPK).filter(|ids| destinations(ids).contains(&rank)).count()
    };
    (0..RANKS).map(from).sum()
}

struct Round {
    x: Given,
    ids: Given,
    out: Given,
    _tensors: Tensors,
}

impl Round {
    fn new(buffer: &ElasticBuffer) -> Self {
        let tensors = Tensors::default();
        let (x, ids) = input(buffer.rank(), 0);
        Self {
            x: tensors.of(buffer, &x, TOKENS, HIDDEN),
            ids: tensors.of(buffer, &ids, TOKENS, TOPK),
            out: tensors.of(buffer, &vec![bf16::NAN; TOKENS * HIDDEN], TOKENS, HIDDEN),
            _tensors: tensors,
        }
    }

    fn set(&mut self, rank: usize, round: usize) {
        let (x, ids) = input(rank, round);
        self.x.write(&x);
        self.ids.write(&ids);
        self.out.write(&vec![bf16::NAN; TOKENS * HIDDEN]);
    }

    /// Enqueues a dispatch without counts, and a combine of what it delivers.
    fn enqueue(
        &mut self,
        buffer: &mut ElasticBuffer,
        stream: &Stream,
        expanded: Option<usize>,
    ) -> Dispatched {
        let mut args = DispatchArgs::new(self.x.view(), self.ids.view()).without_counts();
        if let Some(alignment) = expanded {
            args = args.expanded(alignment);
        }
        let got = buffer.dispatch(args.stream(stream.borrow())).unwrap();
        let args = CombineArgs::new(got.x(), got.handle(), self.out.view_mut());
        buffer.combine(args.stream(stream.borrow())).unwrap();
        got
    }

    /// Replays what `enqueue` was captured as, with the rows of a round, and waits for it.
    fn replay(&mut self, graph: &Graph, stream: &Stream, rank: usize, round: usize) {
        self.set(rank, round);
        // SAFETY: the tensors are there until the stream has been waited for, and so are the slots, which the caller holds.
        unsafe { graph.launch(stream) }.unwrap();
        stream.wait(LONG, || format!("replay {round}")).unwrap();
    }
}

/// A captured dispatch and combine give the right result for whatever the tensors hold at each replay, with direct calls in between.
#[test]
fn graphs_are_replayed_with_other_routes() {
    on_gpu("graphs_are_replayed_with_other_routes", |buffer| {
        let rank = buffer.rank();
        let stream = Stream::new(&buffer.device().primary_context().unwrap()).unwrap();
        let mut round = Round::new(buffer);
        let mut held = None;
        let graph = Graph::capture(&stream, || {
            // What would have to wait is refused, and disturbs nothing.
            let exact = DispatchArgs::new(round.x.view(), round.ids.view()).stream(stream.borrow());
            let error = buffer.dispatch(exact).unwrap_err();
            assert!(matches!(error, Error::Invalid { parameter: "exact counts", .. }), "{error}");

            let got = round.enqueue(buffer, &stream, None);
            assert!(matches!(got.event().is_complete(), Err(Error::Invalid { parameter: "event", .. })));
            held = Some(got);
            Ok::<(), GpuError>(())
        })
        .unwrap();
        let got = held.unwrap();
        for number in 1..=20 {
            round.replay(&graph, &stream, rank, number);
            assert_eq!(round.out.read::<bf16>(buffer), expected(rank, number), "replay {number}");
            let tokens = received(rank, number) as i32;
            let cells = read::<i32>(buffer, got.handle().count_cells());
            assert_eq!(cells, [tokens, tokens, 0, 0], "replay {number}");
            if number % 5 == 0 {
                // Epochs are the device's: direct calls and replays follow each other.
                let direct = buffer.dispatch(DispatchArgs::new(round.x.view(), round.ids.view())).unwrap();
                assert_eq!(direct.tokens(), tokens as usize);
                direct.event().wait(LONG).unwrap();
                direct.check().unwrap();
            }
        }
        drop((graph, got));
    });
}

/// One captured pair of a small batch, replayed with other routes and rows each time, thousands of times; `DEEPEP_TEST_REPLAYS` says how often. Every sum is compared, so
/// that no packet of an earlier replay passes for one of this one, in slots that tokens leave empty now and then.
#[test]
fn one_graph_is_replayed_thousands_of_times() {
    let Some(side) = Side::gpu("one_graph_is_replayed_thousands_of_times") else { return };
    let replays = rounds("DEEPEP_TEST_REPLAYS", 10_000) as usize;
    on_threads(RANKS, LONG, |bootstrap| {
        let mut buffer = builder(&side).expanded(1).packets(true).build(bootstrap).unwrap();
        let rank = buffer.rank();
        let stream = Stream::new(&buffer.device().primary_context().unwrap()).unwrap();
        let mut round = Round::new(&buffer);
        let mut held = None;
        let graph = Graph::capture(&stream, || {
            held = Some(round.enqueue(&mut buffer, &stream, Some(1)));
            Ok::<(), GpuError>(())
        })
        .unwrap();
        let got = held.unwrap();
        for number in 1..=replays {
            round.replay(&graph, &stream, rank, number);
            assert!(round.out.read::<bf16>(&buffer) == expected_expanded(rank, number), "replay {number}");
            let cells = read::<i32>(&buffer, got.handle().count_cells());
            assert_eq!(cells[0], received(rank, number) as i32, "replay {number}");
        }
        drop((graph, got));
        buffer.close().unwrap();
    });
}

/// Operations follow the caller's events and streams.
#[test]
fn operations_wait_for_what_produces_their_input() {
    on_gpu("operations_wait_for_what_produces_their_input", |buffer| {
        let rank = buffer.rank();
        let context = buffer.device().primary_context().unwrap();
        let (producer, consumer) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
        let mut round = Round::new(buffer);
        round.set(rank, 7);
        let gate = PinnedWord::new(&context).unwrap();
        {
            let _bound = context.bind().unwrap();
            // SAFETY: the word outlives the wait, which ends below.
            unsafe {
                context.device().cuda().driver().cuStreamWaitValue32(producer.as_raw(), gate.address(), 1, 0)
            }
            .unwrap();
        }
        let ready = Event::new(&context).unwrap();
        ready.record(&producer).unwrap();
        // SAFETY: the event was recorded and lives until the end of this block.
        let after = unsafe { EventRef::from_raw(ready.as_raw().cast()) };
        let args = DispatchArgs::new(round.x.view(), round.ids.view()).without_counts();
        let got = buffer.dispatch(args.stream(consumer.borrow()).after(after)).unwrap();
        // On the buffer's own stream, and yet after the dispatch.
        let args = CombineArgs::new(got.x(), got.handle(), round.out.view_mut());
        let sum = buffer.combine(args).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!got.event().is_complete().unwrap() && !sum.is_complete().unwrap());
        let error = sum.wait(Duration::from_millis(10)).unwrap_err();
        assert!(matches!(error, Error::StillRunning { .. }), "{error}");
        gate.set(1);
        sum.wait(LONG).unwrap();
        assert!(got.event().is_complete().unwrap());
        assert_eq!(round.out.read::<bf16>(buffer), expected(rank, 7));
        drop(got);
    });
}

/// Kernels move rows in bulk: an address that they can't is refused, and the next call works.
#[test]
fn rows_that_start_at_odd_addresses_are_refused() {
    on_gpu("rows_that_start_at_odd_addresses_are_refused", |buffer| {
        let mut round = Round::new(buffer);
        let shifted = |view: TensorRef<'_>| {
            let (address, space) = (view.address() + 8, view.space());
            // SAFETY: one row less than there is, so that it ends inside the tensor; and it is refused.
            unsafe {
                TensorRef::from_raw(address, space, DType::Bf16, [TOKENS - 1, HIDDEN], [HIDDEN as isize, 1])
            }
            .unwrap()
        };
        if buffer.rank() == 0 {
            let args =
                DispatchArgs::new(shifted(round.x.view()), round.ids.part(DType::I64, TOKENS - 1, TOPK));
            let error = buffer.dispatch(args).unwrap_err();
            assert!(matches!(error, Error::Tensor { tensor: "x", .. }), "{error}");
            assert!(error.to_string().contains("multiples of 16 bytes"), "{error}");
        }
        let got = buffer.dispatch(DispatchArgs::new(round.x.view(), round.ids.view())).unwrap();
        let args = CombineArgs::new(got.x(), got.handle(), round.out.view_mut());
        buffer.combine(args).unwrap().wait(LONG).unwrap();
        assert_eq!(round.out.read::<bf16>(buffer), expected(buffer.rank(), 0));
        drop(got);
    });
}

/// Dropping a buffer whose kernels still wait gives nothing back that they use, and waits for nobody.
#[test]
fn dropping_a_buffer_waits_for_nobody() {
    let Some(side) = Side::gpu("dropping_a_buffer_waits_for_nobody") else { return };
    let timeout = side.scaled(Duration::from_secs(2));
    on_threads(RANKS, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let shared = std::sync::Arc::new(bootstrap);
        let mut buffer = builder(&side).topk(1).timeout(timeout).build(shared.clone()).unwrap();
        if rank == 0 {
            // Rank 1 does not come.
            let arrived = buffer.barrier().unwrap();
            let start = std::time::Instant::now();
            drop(buffer);
            assert!(start.elapsed() < timeout / 2, "{:?}", start.elapsed());
            // The kernel ends by itself, and says who was missing.
            let error = arrived.wait(LONG).unwrap_err();
            assert!(matches!(&error, Error::PeerTimeout { missing, .. } if *missing == [1]), "{error}");
            shared.barrier().unwrap();
        } else {
            shared.barrier().unwrap();
            drop(buffer);
        }
    });
}

/// Dropping a buffer whose operations have run waits for nobody either: not for a kernel of another buffer on the same device that waits for the very rank that
/// drops. Else that kernel would wait until its deadline.
#[test]
fn dropping_an_idle_buffer_does_not_wait_for_kernels_of_others() {
    let Some(side) = Side::gpu("dropping_an_idle_buffer_does_not_wait_for_kernels_of_others") else { return };
    // What is looked for would last until that kernel's deadline.
    let at_most = side.patience() / 4;
    on_threads(RANKS, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let shared = std::sync::Arc::new(bootstrap);
        // Both ranks on one device.
        let build = || builder(&side).device(0).build(shared.clone()).unwrap();
        let (mut idle, mut busy) = (build(), build());
        // It has a past: kernels, events, results, and what was copied.
        let mut round = Round::new(&idle);
        let got = idle.dispatch(DispatchArgs::new(round.x.view(), round.ids.view())).unwrap();
        let sums = idle.combine(CombineArgs::new(got.x(), got.handle(), round.out.view_mut())).unwrap();
        sums.wait(LONG).unwrap();
        got.check().unwrap();
        drop(got);
        assert_eq!(round.out.read::<bf16>(&idle), expected(rank, 0));
        shared.barrier().unwrap();
        if rank == 1 {
            let met = busy.barrier().unwrap();
            // Long enough for the kernel to run, if it is to run at all.
            std::thread::sleep(Duration::from_millis(200));
            assert!(!met.is_complete().unwrap());
            shared.barrier().unwrap();
            // Here the other rank drops.
            shared.barrier().unwrap();
            assert!(!met.is_complete().unwrap(), "the kernel has not waited for the other rank");
            shared.barrier().unwrap();
            met.wait(LONG).unwrap();
            drop(idle);
        } else {
            shared.barrier().unwrap();
            let start = std::time::Instant::now();
            drop(idle);
            // The last that knows of the buffer, and tensors.
            drop((sums, round));
            assert!(start.elapsed() < at_most, "{:?}", start.elapsed());
            shared.barrier().unwrap();
            shared.barrier().unwrap();
            busy.barrier().unwrap().wait(LONG).unwrap();
        }
        busy.close().unwrap();
    });
}

/// Kernels that start while the one before them still runs give the same results; where ranks share a device they are refused, on every rank.
#[test]
fn kernels_start_early_where_a_rank_has_its_device_for_itself() {
    let test = "kernels_start_early_where_a_rank_has_its_device_for_itself";
    let Some(side) = Side::gpu(test) else { return };
    let builder = || builder(&side).early_launch(true);
    on_threads(RANKS, LONG, |bootstrap| {
        let error = builder().device(0).build(bootstrap).unwrap_err();
        assert!(matches!(error, Error::Invalid { parameter: "early_launch", .. }), "{error}");
    });
    if Cuda::get().unwrap().device_count() < RANKS as i32 {
        return skipped(test, "a device for each rank, to launch early on");
    }
    on_threads(RANKS, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let mut buffer = builder().device(rank).build(bootstrap).unwrap();
        let mut round = Round::new(&buffer);
        for number in 1..=5 {
            round.set(rank, number);
            for _ in 0..10 {
                let args = DispatchArgs::new(round.x.view(), round.ids.view()).without_counts();
                let got = buffer.dispatch(args).unwrap();
                let args = CombineArgs::new(got.x(), got.handle(), round.out.view_mut());
                buffer.combine(args).unwrap();
            }
            buffer.synchronize(LONG).unwrap();
            assert_eq!(round.out.read::<bf16>(&buffer), expected(rank, number), "round {number}");
        }
        buffer.close().unwrap();
    });
}
