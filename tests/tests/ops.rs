//! Dispatch and combine against the oracle, bit by bit, on both backends.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use cuda_vmm::Cuda;
use cuda_vmm_emu::Emulator;
use deepep_cli::inputs::Values;
use deepep_cli::job::{Job, Rank, Source};
use deepep_cli::routing::{Group, Pattern, generator};
use deepep_cli::tensors::Memory;
use deepep_core::bootstrap::{Bootstrap, Launch, TcpBootstrap};
use deepep_core::layout::{IndexWidth, ScaleOrder};
use deepep_core::tensor::DType;
use deepep_core::{ElasticBuffer, Reduction};
use integration_tests::on_both_sides;
use integration_tests::process::{Peer, role};
use integration_tests::ranks::{LONG, on_threads};
use integration_tests::sides::{Side, rounds};
use rand::RngExt;

fn job(
    side: &Side,
    ranks: usize,
    experts: usize,
    topk: usize,
    hidden: usize,
    pattern: Pattern,
    tokens: Vec<usize>,
) -> Job {
    let max_tokens = tokens.iter().copied().max().unwrap_or(0).max(1);
    let values = Values { seed: 7, dtype: DType::Bf16, hidden };
    let source = Source::Uneven(pattern, tokens);
    let mut job = Job::new(Group { ranks, experts, topk }, source, max_tokens, values);
    (job.timeout, job.backend) = (side.patience(), side.backend);
    job
}

/// Runs jobs on threads, each `rounds` times, all on the same buffers. The first is the largest.
fn verify(jobs: &[Job], rounds: usize) {
    let routings: Vec<_> = jobs.iter().map(Job::routings).collect();
    on_threads(jobs[0].group.ranks, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let mut buffer = ElasticBuffer::with_config(jobs[0].config()).build(bootstrap).unwrap();
        let memory = Arc::new(Memory::default());
        for (job, routings) in jobs.iter().zip(&routings) {
            let part = Rank::new(job, routings, rank).with_memory(memory.clone());
            for round in 0..rounds {
                part.run(&mut buffer).unwrap_or_else(|e| panic!("round {round} of {job:?}: {e}"));
            }
        }
        buffer.close().unwrap();
    });
}

on_both_sides! {
    /// Every row: tokens of each rank, hidden, lanes, experts, alignment.
    table_of_shapes, |side| {
        let table: &[(&[usize], usize, usize, usize, usize)] = &[
            (&[1], 8, 1, 1, 1),
            (&[17], 64, 4, 8, 16),
            (&[5, 5], 8, 2, 4, 1),
            (&[33, 1], 128, 8, 8, 4),
            (&[0, 9], 64, 3, 6, 8),
            (&[9, 0], 7168, 8, 256, 128),
            (&[0, 0], 64, 2, 4, 2),
            (&[4, 11, 7], 40, 2, 9, 3),
            (&[6, 6, 6, 6], 256, 6, 64, 32),
            (&[1, 0, 3, 2, 5], 16, 5, 10, 1),
            (&[3, 3, 3, 3, 3, 3], 24, 1, 6, 7),
            (&[2, 4, 0, 6, 8, 1, 3], 72, 4, 14, 2),
            (&[8, 7, 6, 5, 4, 3, 2, 1], 128, 2, 8, 1),
            (&[5, 5, 5, 5, 5, 5, 5, 5], 64, 32, 64, 64),
        ];
        for &(tokens, hidden, topk, experts, alignment) in table {
            for (expanded, packets) in
                [(None, true), (None, false), (Some(alignment), true), (Some(alignment), false)]
            {
                // Ranks on CPUs know no packets.
                if packets && !side.is_gpu() {
                    continue;
                }
                let jobs = [
                    Pattern::Uniform,
                    Pattern::Hot,
                    Pattern::Masked(0.4),
                    Pattern::Zipf(1.5),
                    Pattern::Local,
                ]
                .map(|pattern| {
                    let mut job = job(side, tokens.len(), experts, topk, hidden, pattern, tokens.to_vec());
                    (job.expanded, job.packets) = (expanded, packets);
                    job.zero_padding = expanded.is_some();
                    job
                });
                verify(&jobs, 2);
            }
        }
    }
}

on_both_sides! {
    every_element_type_and_scale, |side| {
        for (dtype, hidden) in [
            (DType::Bf16, 1000),
            (DType::F16, 64),
            (DType::F32, 24),
            (DType::U8, 48),
            (DType::F8E4M3, 256),
            (DType::F8E4M3, 400),
        ] {
            for expanded in [None, Some(4)] {
                for (packed, order, packets) in [
                    (false, ScaleOrder::RowMajor, true),
                    (false, ScaleOrder::RowMajor, false),
                    (true, ScaleOrder::ColumnMajor, true),
                    (true, ScaleOrder::ColumnMajor, false),
                ] {
                    let mut job = job(side, 3, 6, 3, hidden, Pattern::Uniform, vec![13, 8, 0]);
                    job.packets = packets;
                    job.values.dtype = dtype;
                    job.expanded = expanded;
                    job.zero_padding = expanded.is_some();
                    (job.packed_scales, job.scale_order) = (packed, order);
                    verify(&[job], 2);
                }
            }
        }
    }
}

on_both_sides! {
    every_option, |side| {
        for (expanded, reduction, packets) in (0..8).map(|bits| (bits & 1, bits & 2, bits & 4)) {
            let jobs: Vec<Job> = (0..16_u32)
                .map(|bits| {
                    let on = |bit: u32| bits >> bit & 1 == 1;
                    let mut job = job(side, 4, 16, 4, 64, Pattern::Masked(0.2), vec![11, 0, 7, 16]);
                    job.exact = on(0);
                    job.index = if on(1) { IndexWidth::Bits32 } else { IndexWidth::Bits64 };
                    job.weights = on(2);
                    job.cached = on(3);
                    job.expanded = (expanded != 0).then_some(8);
                    job.reduction = if reduction != 0 { Reduction::AtSource } else { Reduction::AtExperts };
                    job.packets = packets != 0;
                    job.biases = (bits % 3) as usize;
                    job
                })
                .collect();
            verify(&jobs, 2);
        }
    }
}

on_both_sides! {
    /// Rows and weights in the heap, read where they are: every kind of routing, ranks without tokens, lanes, biases, with and without counts; and calls
    /// that send in between, on the same buffers.
    pulled_and_sent_in_turn, |side| {
        let table: &[(&[usize], usize, usize, usize)] = &[
            (&[17], 64, 4, 8),
            (&[5, 5], 8, 2, 4),
            (&[0, 9], 64, 3, 6),
            (&[0, 0], 64, 2, 4),
            (&[4, 11, 7], 40, 2, 9),
            (&[1, 0, 3, 2, 5], 16, 5, 10),
            (&[8, 7, 6, 5, 4, 3, 2, 1], 128, 2, 8),
            (&[40, 33], 7168, 8, 256),
        ];
        for &(tokens, hidden, topk, experts) in table {
            let patterns =
                [Pattern::Uniform, Pattern::Hot, Pattern::Masked(0.4), Pattern::Zipf(1.5), Pattern::Local];
            let jobs: Vec<Job> = patterns
                .into_iter()
                .enumerate()
                .flat_map(|(n, pattern)| {
                    let mut job = job(side, tokens.len(), experts, topk, hidden, pattern, tokens.to_vec());
                    (job.pull, job.biases, job.exact) = (true, n % 3, n % 2 == 0);
                    (job.weights, job.cached) = (n % 4 != 3, n == 2);
                    let sent = Job { pull: false, ..job.clone() };
                    [job, sent]
                })
                .collect();
            verify(&jobs, 2);
        }
    }
}

/// A round's job on a buffer that was built for the largest one; the same on all ranks.
fn random_job(largest: &Job, round: u64) -> Job {
    let mut rng = generator(20_261_130, largest.group.ranks, round);
    let mut job = largest.clone();
    let tokens = (0..job.group.ranks).map(|_| rng.random_range(0..=job.max_tokens)).collect();
    let pattern = match rng.random_range(0..5) {
        0 => Pattern::Uniform,
        1 => Pattern::Zipf(rng.random_range(0.0..3.0)),
        2 => Pattern::Hot,
        3 => Pattern::Masked(rng.random_range(0.0..1.0)),
        _ => Pattern::Local,
    };
    job.source = Source::Uneven(pattern, tokens);
    job.group.topk = rng.random_range(1..=job.group.topk);
    (job.values.dtype, job.values.hidden) = match rng.random_range(0..4) {
        0 => (DType::F8E4M3, 16 * rng.random_range(1..=20)),
        1 => (DType::F32, 8 * rng.random_range(1..=20)),
        _ => (DType::Bf16, 8 * rng.random_range(1..=40)),
    };
    job.values.seed = rng.random();
    job.packed_scales = rng.random();
    job.scale_order = if rng.random() { ScaleOrder::RowMajor } else { ScaleOrder::ColumnMajor };
    job.index = if rng.random() { IndexWidth::Bits32 } else { IndexWidth::Bits64 };
    job.expanded = rng.random_bool(0.5).then(|| rng.random_range(1..=20));
    job.zero_padding = rng.random();
    job.exact = rng.random();
    job.weights = rng.random();
    job.cached = rng.random();
    job.biases = rng.random_range(0..=2);
    job.reduction = if rng.random() { Reduction::AtSource } else { Reduction::AtExperts };
    job.pull = job.expanded.is_none() && !job.packets && rng.random();
    job
}

/// Free bytes of the device, if there is one.
fn free_memory(side: &Side) -> usize {
    match side.is_gpu() {
        true => Cuda::get().unwrap().device(0).unwrap().primary_context().unwrap().memory_info().unwrap().0,
        false => 0,
    }
}

on_both_sides! {
    /// Calls of random shapes and options on the same buffers, for each number of ranks. `DEEPEP_TEST_ROUNDS` says how many in all; whatever
    /// they are, the device has as much free memory afterwards as before.
    random_rounds, |side| {
        // Keeps the context, so that what belongs to it is not counted.
        let context = side.is_gpu().then(|| Cuda::get().unwrap().device(0).unwrap().primary_context().unwrap());
        let each = rounds("DEEPEP_TEST_ROUNDS", 320).div_ceil(8);
        let mut before = 0;
        for ranks in 1..=8 {
            let mut largest = job(side, ranks, 8 * ranks, 8, 320, Pattern::Uniform, vec![24; ranks]);
            (largest.reduction, largest.packets) = (Reduction::AtSource, ranks % 2 == 0);
            let mut config = largest.config();
            (config.plain, config.expanded, config.scale_packs) = (true, Some(20), 3);
            config.combine_inputs = 1;
            on_threads(ranks, LONG, |bootstrap| {
                let rank = bootstrap.rank();
                let mut buffer = ElasticBuffer::with_config(config.clone()).build(bootstrap).unwrap();
                let memory = Arc::new(Memory::default());
                for round in 0..each {
                    let job = random_job(&largest, round);
                    let routings = job.routings();
                    let part = Rank::new(&job, &routings, rank).with_memory(memory.clone());
                    part.run(&mut buffer)
                        .unwrap_or_else(|e| panic!("{ranks} ranks, round {round} of {job:?}: {e}"));
                }
                buffer.close().unwrap();
            });
            let free = free_memory(side);
            // The first group of ranks is the first to load kernels and to make streams.
            if ranks == 1 {
                before = free;
            }
            assert!(free + (64 << 20) >= before, "{before} bytes were free, and {free} are with {ranks} ranks");
        }
        drop(context);
    }
}

on_both_sides! {
    /// The same between processes, which share nothing but file descriptors.
    ranks_are_processes, |side| {
        let ranks = 4;
        let mut job = job(side, ranks, 32, 6, 512, Pattern::Zipf(1.0), vec![40, 0, 33, 64]);
        job.expanded = Some(16);
        let run = |bootstrap: TcpBootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap).unwrap();
            let routings = job.routings();
            let part = Rank::new(&job, &routings, rank);
            for _ in 0..20 {
                part.run(&mut buffer).unwrap();
            }
            buffer.close().unwrap();
        };
        if role(side.test).is_some() {
            return run(TcpBootstrap::join(&Launch::from_env().unwrap(), LONG).unwrap());
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let peers: Vec<_> = (1..ranks)
            .map(|rank| {
                let rank = rank.to_string();
                let environment = [
                    ("RANK", rank.as_str()),
                    ("WORLD_SIZE", "4"),
                    ("MASTER_ADDR", "127.0.0.1"),
                    ("MASTER_PORT", port.as_str()),
                ];
                Peer::spawn(side.test, &rank, &environment)
            })
            .collect();
        run(TcpBootstrap::serve(listener, ranks, LONG).unwrap());
        peers.into_iter().for_each(Peer::finish);
    }
}

on_both_sides! {
    /// Several buffers side by side, used in turn, with results held across calls.
    buffers_do_not_disturb_each_other, |side| {
        let first = job(side, 3, 6, 2, 64, Pattern::Uniform, vec![9, 9, 9]);
        let mut second = job(side, 3, 12, 4, 128, Pattern::Masked(0.3), vec![5, 0, 12]);
        second.expanded = Some(4);
        let routings = [first.routings(), second.routings()];
        let groups: Vec<_> = (0..2).map(|_| deepep_core::bootstrap::thread_group(3, LONG).unwrap()).collect();
        let mut groups = groups.into_iter().map(Vec::into_iter);
        let (mut one, mut two) = (groups.next().unwrap(), groups.next().unwrap());
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (a, b) = (one.next().unwrap(), two.next().unwrap());
                let (first, second, routings) = (&first, &second, &routings);
                scope.spawn(move || {
                    let mut buffers = [
                        ElasticBuffer::with_config(first.config()).build(a).unwrap(),
                        ElasticBuffer::with_config(second.config()).build(b).unwrap(),
                    ];
                    let parts = [Rank::new(first, &routings[0], rank), Rank::new(second, &routings[1], rank)];
                    for round in 0..10 {
                        let which = usize::from(round % 3 == 0);
                        parts[which].run(&mut buffers[which]).unwrap();
                    }
                });
            }
        });
    }
}

on_both_sides! {
    /// Gaps are zeroed over what an earlier call has left there.
    gaps_are_zeroed_over_old_rows, |side| {
        let mut full = job(side, 2, 4, 4, 256, Pattern::Uniform, vec![16, 16]);
        full.values.dtype = DType::F8E4M3;
        full.expanded = Some(1);
        let mut gaps = full.clone();
        gaps.source = Source::Uneven(Pattern::Uniform, vec![3, 1]);
        (gaps.expanded, gaps.zero_padding) = (Some(8), true);
        let mut config = full.config();
        // The same capacity, so that scales and weights of both calls lie at the same places.
        (config.expanded, config.row_capacity) = (Some(8), Some(64));
        let routings = [full.routings(), gaps.routings()];
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = ElasticBuffer::with_config(config.clone()).build(bootstrap).unwrap();
            let parts = [Rank::new(&full, &routings[0], rank), Rank::new(&gaps, &routings[1], rank)];
            for part in parts {
                part.run(&mut buffer).unwrap();
            }
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    /// Host memory in the heap, own or everybody's, changes nothing for the operations; and whatever a buffer made is gone after it.
    elastic_buffers_leave_nothing, |side| {
        let failed = cuda_vmm::failed_releases();
        for (host_bytes, hybrid) in [(0, false), (2 << 20, false), (4 << 20, true)] {
            let job = job(side, 3, 6, 2, 64, Pattern::Uniform, vec![9, 0, 7]);
            let routings = job.routings();
            on_threads(3, LONG, |bootstrap| {
                let rank = bootstrap.rank();
                let emulator = Emulator::new(cuda_vmm_emu::Config::h200x2()).unwrap();
                let mut config = job.config();
                (config.host_bytes, config.hybrid) = (host_bytes, hybrid);
                let mut builder = ElasticBuffer::with_config(config);
                if !side.is_gpu() {
                    builder = builder.driver(Cuda::with_driver(emulator.driver()).unwrap());
                }
                let mut buffer = builder.build(bootstrap).unwrap();
                assert_eq!(buffer.heap().host_memory(1).is_some(), host_bytes > 0);
                let part = Rank::new(&job, &routings, rank);
                for _ in 0..3 {
                    part.run(&mut buffer).unwrap();
                }
                buffer.close().unwrap();
                emulator.assert_empty();
            });
        }
        assert_eq!(cuda_vmm::failed_releases(), failed, "a destructor was refused");
    }
}

on_both_sides! {
    /// Thousands of calls take nothing that they don't give back. In a process of its own: tests beside it open files too.
    many_rounds_do_not_grow, |side| {
        if role(side.test).is_none() {
            return Peer::spawn(side.test, "alone", &[]).patience(LONG * 4).finish();
        }
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut job = job(side, 2, 8, 3, 32, Pattern::Masked(0.1), vec![6, 5]);
        job.cached = true;
        let routings = job.routings();
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap).unwrap();
            let part = Rank::new(&job, &routings, rank);
            part.run(&mut buffer).unwrap();
            buffer.barrier().unwrap().wait(LONG).unwrap();
            let before = open();
            // Slots run out at the second call that keeps one.
            for _ in 0..rounds("DEEPEP_TEST_ROUNDS", 2500) {
                part.run(&mut buffer).unwrap();
            }
            buffer.barrier().unwrap().wait(LONG).unwrap();
            let after = open();
            // Counting opens the folder, and the other rank may be counting now and not have been before.
            assert!(after <= before + 1, "{before} open files became {after}");
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    barriers_wait_for_everybody, |side| {
        let arrived = std::sync::atomic::AtomicUsize::new(0);
        on_threads(4, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let config = job(side, 4, 4, 1, 16, Pattern::Uniform, vec![1; 4]).config();
            let mut buffer = ElasticBuffer::with_config(config).build(bootstrap).unwrap();
            for round in 1..=50 {
                if (round + rank) % 4 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                buffer.barrier().unwrap().wait(LONG).unwrap();
                let seen = arrived.load(std::sync::atomic::Ordering::SeqCst);
                assert!(seen >= 4 * round, "round {round}: {seen}");
            }
            buffer.close().unwrap();
        });
    }
}
