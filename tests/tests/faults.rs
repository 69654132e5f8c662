//! Ranks that die, come late or disagree: every other rank gets an error that names them, in time, and goes on living.

use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuda_vmm::{Cuda, Granularity, Reservation};
use cuda_vmm_emu::{Config, Emulator};
use deepep_cli::inputs::Values;
use deepep_cli::job::{Job, JobError, Rank, Source};
use deepep_cli::routing::{Group, Pattern, generator};
use deepep_core::bootstrap::{Bootstrap, Launch, TcpBootstrap};
use deepep_core::tensor::{DType, Space, TensorRef};
use deepep_core::{CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, Result};
use half::bf16;
use integration_tests::on_both_sides;
use integration_tests::process::{Peer, eventually, role};
use integration_tests::ranks::{LONG, on_threads};
use integration_tests::sides::Side;
use integration_tests::tensors::Tensors;
use rand::RngExt;

const RANKS: usize = 4;
const VICTIM: usize = 2;
const TOKENS: usize = 6;
const HIDDEN: usize = 64;
/// How long operations wait for the dead.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// How much longer a busy machine may take.
const SLACK: Duration = Duration::from_secs(20);

/// The moments at which the victim dies, what the others then wait for, and whether that is for ranks on CPUs only: these can die by reading what is
/// not there, and do one thing after the other, while the warps of a kernel wait for several things at a time.
const MOMENTS: &[(&str, &str, bool)] = &[
    ("before dispatch", "dispatch, token counts", false),
    ("while counting", "dispatch, token counts", true),
    ("while sending plain rows", "dispatch, end of sending", true),
    ("while sending expanded rows", "dispatch, arrival of a row", true),
    ("before combine", "combine, start", false),
    ("before combine with one set", "combine, start", true),
    ("while sending back", "combine, arrival of a row", true),
    ("before the barrier", "barrier", false),
];

fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("killed")
}

/// One rank's life up to the moment.
fn live(side: &Side, bootstrap: TcpBootstrap, moment: &str) -> (Result<()>, ElasticBuffer) {
    let victim = bootstrap.rank() == VICTIM;
    let mut buffer = ElasticBuffer::builder()
        .max_tokens_per_rank(TOKENS)
        .experts(8)
        .topk(4)
        .hidden(HIDDEN)
        .expanded(8)
        .timeout(side.scaled(TIMEOUT))
        // The phases are those of rows that travel on their own.
        .packets(false)
        .receive_sets(if moment.ends_with("one set") { 1 } else { 2 })
        .backend(side.backend)
        .build(bootstrap)
        .unwrap();
    let tensors = Tensors::default();
    let result = operations(&tensors, &mut buffer, victim, moment);
    // What uses the tensors has ended, however it did.
    let ended = buffer.synchronize(side.scaled(TIMEOUT) + SLACK);
    assert!(!matches!(ended, Err(Error::StillRunning { .. })), "{moment}: {ended:?}");
    (result, buffer)
}

fn operations(tensors: &Tensors, buffer: &mut ElasticBuffer, victim: bool, moment: &str) -> Result<()> {
    // Addresses that nothing is mapped at: a process that reads them dies there and then.
    let emulator = Emulator::new(Config::h200x2()).unwrap();
    let cuda = Cuda::with_driver(emulator.driver()).unwrap();
    let nothing = Reservation::new(&cuda, 2 << 20, Granularity::new(2 << 20).unwrap()).unwrap();
    let trap = |dtype: DType, rows: usize, columns: usize| {
        let (address, strides) = (nothing.address().get(), [columns as isize, 1]);
        // SAFETY: not kept on purpose: the process that uses this view is to die by it, and does before anything else happens.
        unsafe { TensorRef::from_raw(address, Space::Host, dtype, [rows, columns], strides) }.unwrap()
    };
    let dies = |at: &str| victim && moment == at;

    let data = tensors.of(buffer, &vec![bf16::ONE; TOKENS * HIDDEN], TOKENS, HIDDEN);
    // Every token goes to every rank.
    let ids = tensors.of(buffer, &[0_i64, 2, 4, 6].repeat(TOKENS), TOKENS, 4);
    let mut out = tensors.of(buffer, &vec![bf16::ZERO; TOKENS * HIDDEN], TOKENS, HIDDEN);
    let mut round = |buffer: &mut ElasticBuffer, got: &Dispatched, y: TensorRef<'_>| {
        buffer.combine(CombineArgs::new(y, got.handle(), out.view_mut()))?.wait(LONG)
    };
    // A good round first.
    let got = buffer.dispatch(DispatchArgs::new(data.view(), ids.view()))?;
    round(buffer, &got, got.x())?;
    drop(got);

    if dies("before dispatch") {
        die();
    }
    let idx = if dies("while counting") { trap(DType::I64, TOKENS, 4) } else { ids.view() };
    let x = if victim && moment.starts_with("while sending") && moment.ends_with("rows") {
        trap(DType::Bf16, TOKENS, HIDDEN)
    } else {
        data.view()
    };
    let args = DispatchArgs::new(x, idx);
    let args = if moment.contains("expanded") { args.expanded(8) } else { args };
    let got = buffer.dispatch(args)?;
    got.event().wait(LONG)?;
    if victim && moment.starts_with("before combine") {
        die();
    }
    let y = if dies("while sending back") { trap(DType::Bf16, got.rows(), HIDDEN) } else { got.x() };
    round(buffer, &got, y)?;
    drop(got);
    if dies("before the barrier") {
        die();
    }
    buffer.barrier()?.wait(LONG)
}

/// What a survivor must have seen.
fn check_survivor(
    side: &Side,
    moment: &str,
    phase: &str,
    result: Result<()>,
    buffer: ElasticBuffer,
    took: Duration,
) {
    let error = result.expect_err("the victim is dead");
    let Error::PeerTimeout { phase: found, missing, .. } = &error else {
        panic!("{moment}: {error}");
    };
    // A kernel waits for its peers' calls and for their rows at the same time.
    let rows = side.is_gpu() && phase == "combine, start" && found.as_ref() == "combine, arrival of a row";
    assert!(rows || found.as_ref() == phase, "{moment}: {error}");
    assert_eq!(missing, &[VICTIM], "{moment}: {error}");
    assert!(took < side.scaled(TIMEOUT) + SLACK, "{moment}: took {took:?}");
    let mut buffer = buffer;
    if side.is_gpu() {
        // If it was found by waiting for an event, the buffer finds it once more.
        let again = buffer.barrier().unwrap_err();
        let known = match &again {
            Error::PeerTimeout { missing, .. } => *missing == [VICTIM],
            again => matches!(again, Error::Broken { .. }),
        };
        assert!(known, "{moment}: {again}");
    }
    assert!(matches!(buffer.barrier(), Err(Error::Broken { .. })), "{moment}: a broken buffer says so");
    // Closing meets the victim, too, and ends.
    match buffer.close().expect_err("the victim is dead") {
        Error::PeerLeft { rank: VICTIM, .. } => {}
        Error::PeerTimeout { missing, .. } if side.is_gpu() && missing == [VICTIM] => {}
        error => panic!("{moment}: {error}"),
    }
}

fn environment(rank: usize, port: u16) -> [(&'static str, String); 4] {
    [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", RANKS.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
    ]
}

/// Starts ranks 1.. of a test with a role, and returns rank 0's listener.
fn start(test: &str, role: &str) -> (TcpListener, Vec<Peer>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peers = (1..RANKS)
        .map(|rank| {
            let environment = environment(rank, port);
            let environment: Vec<_> = environment.iter().map(|(k, v)| (*k, v.as_str())).collect();
            Peer::spawn(test, role, &environment)
        })
        .collect();
    (listener, peers)
}

/// Says how long a part of a test took.
fn took(side: &Side, part: &str, begin: Instant) {
    eprintln!("{}: {part}: {:.1} s", side.test, begin.elapsed().as_secs_f64());
}

on_both_sides! {
    a_rank_killed_in_each_phase, |side| {
        let survive = |bootstrap: TcpBootstrap, moment: &str| {
            let (_, phase, _) = MOMENTS.iter().find(|(name, ..)| *name == moment).unwrap();
            let started = Instant::now();
            let (result, buffer) = live(side, bootstrap, moment);
            check_survivor(side, moment, phase, result, buffer, started.elapsed());
        };
        if let Some(moment) = role(side.test) {
            return survive(TcpBootstrap::join(&Launch::from_env().unwrap(), LONG).unwrap(), &moment);
        }
        for (moment, _, on_cpus) in MOMENTS {
            if *on_cpus && side.is_gpu() {
                continue;
            }
            let begin = Instant::now();
            let (listener, peers) = start(side.test, moment);
            survive(TcpBootstrap::serve(listener, RANKS, LONG).unwrap(), moment);
            for (rank, peer) in (1..).zip(peers) {
                if rank == VICTIM { peer.kill() } else { peer.finish() }
            }
            took(side, moment, begin);
        }
    }
}

on_both_sides! {
    /// Killed at any moment: survivors name the victim. On a GPU that processes share, a survivor that is behind may be named by another one
    /// whose time slice comes first, and learns that from it.
    a_rank_killed_at_random, |side| {
        let mut job = Job::new(
            Group { ranks: RANKS, experts: 16, topk: 4 },
            Source::Pattern(Pattern::Uniform, 64),
            64,
            Values { seed: 3, dtype: DType::Bf16, hidden: 512 },
        );
        (job.timeout, job.backend) = (side.scaled(TIMEOUT), side.backend);
        let done = AtomicUsize::new(0);
        let survive = |bootstrap: TcpBootstrap, job: &Job| {
            let rank = bootstrap.rank();
            let routings = job.routings();
            let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap).unwrap();
            let part = Rank::new(job, &routings, rank);
            let end = Instant::now() + LONG;
            let error = loop {
                assert!(Instant::now() < end, "the victim was not killed");
                if let Err(error) = part.run(&mut buffer) {
                    break error;
                }
                done.fetch_add(1, Ordering::Relaxed);
            };
            let JobError::Library(Error::PeerTimeout { missing, .. }) = &error else { panic!("{error}") };
            assert!(missing == &[VICTIM] || side.is_gpu(), "{error}");
        };
        let choose = |job: &mut Job, how: &str| {
            (job.expanded, job.pull) = ((how == "expanded").then_some(8), how == "pulled");
        };
        if let Some(how) = role(side.test) {
            choose(&mut job, &how);
            return survive(TcpBootstrap::join(&Launch::from_env().unwrap(), LONG).unwrap(), &job);
        }
        let mut rng = generator(1, 0, 3);
        // Each round starts processes, which on GPUs takes seconds: there one of each kind.
        for round in 0..if side.is_gpu() { 3 } else { 9 } {
            let begin = Instant::now();
            let how = ["plain", "expanded", "pulled"][round % 3];
            choose(&mut job, how);
            let (listener, mut peers) = start(side.test, how);
            let victim = peers.remove(VICTIM - 1);
            let (rounds, delay) = (rng.random_range(1..=4), rng.random_range(0..40_000));
            done.store(0, Ordering::Relaxed);
            std::thread::scope(|scope| {
                let killer = scope.spawn(|| {
                    eventually("a few rounds", || done.load(Ordering::Relaxed) >= rounds);
                    std::thread::sleep(Duration::from_micros(delay));
                    victim.kill();
                });
                survive(TcpBootstrap::serve(listener, RANKS, LONG).unwrap(), &job);
                killer.join().unwrap();
            });
            peers.into_iter().for_each(Peer::finish);
            took(side, &format!("round {round}, {how}"), begin);
        }
    }
}

on_both_sides! {
    ranks_that_disagree_about_settings_are_told_what_and_who, |side| {
        let results = on_threads(3, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let builder = ElasticBuffer::builder()
                .max_tokens_per_rank(if rank == 2 { 16 } else { 8 })
                .experts(6)
                .topk(2)
                .hidden(if rank == 0 { 128 } else { 64 })
                .backend(side.backend);
            builder.build(bootstrap).map(drop)
        });
        for result in results {
            let error = result.unwrap_err();
            let Error::RanksDisagree { differences } = &error else { panic!("{error}") };
            assert_eq!(differences.len(), 2, "{error}");
            let text = error.to_string();
            assert!(text.contains("max_tokens_per_rank is 8 on rank 0, 1, 16 on rank 2"), "{text}");
            assert!(text.contains("hidden is 128 on rank 0, 64 on rank 1, 2"), "{text}");
        }
    }
}

on_both_sides! {
    ranks_that_make_different_calls_are_told, |side| {
        for difference in ["alignment", "layout", "weights", "cached", "capacity"] {
            on_threads(2, LONG, |bootstrap| {
                let other = bootstrap.rank() == 1;
                let mut buffer = ElasticBuffer::builder()
                    .packets(false)
                    .max_tokens_per_rank(4)
                    .experts(4)
                    .topk(1)
                    .hidden(64)
                    .expanded(8)
                    .output_slots(2)
                    .backend(side.backend)
                    .timeout(side.patience())
                    .build(bootstrap)
                    .unwrap();
                let tensors = Tensors::default();
                let x = tensors.of(&buffer, &[bf16::ONE; 64], 1, 64);
                let idx = tensors.of(&buffer, &[3_i64], 1, 1);
                let weights = tensors.of(&buffer, &[1.0_f32], 1, 1);
                let good = buffer.dispatch(DispatchArgs::new(x.view(), idx.view())).unwrap();
                let args = DispatchArgs::new(x.view(), idx.view());
                let args = match (difference, other) {
                    ("alignment", _) => args.expanded(if other { 4 } else { 8 }),
                    ("layout", true) => args.expanded(1),
                    ("weights", true) => args.weights(weights.view()),
                    ("cached", true) => DispatchArgs::cached(x.view(), good.handle()),
                    ("capacity", true) => args.token_capacity(1),
                    _ => args,
                };
                // A call that does not wait for counts finds out when it has run.
                let outcome = buffer.dispatch(args).and_then(|got| got.event().wait(LONG));
                let error = outcome.unwrap_err();
                assert!(matches!(error, Error::RanksDisagree { .. }), "{difference}: {error}");
                buffer.synchronize(LONG).err();
                let first = buffer.barrier();
                let known = matches!(first, Err(Error::Broken { .. } | Error::RanksDisagree { .. }));
                assert!(known, "{difference}: {first:?}");
                assert!(matches!(buffer.barrier(), Err(Error::Broken { .. })), "{difference}");
            });
        }
    }
}

on_both_sides! {
    /// Late, but not too late.
    a_late_rank_is_waited_for, |side| {
        on_threads(3, LONG, |bootstrap| {
            let late = bootstrap.rank() == 1;
            let job = {
                let values = Values { seed: 1, dtype: DType::Bf16, hidden: 64 };
                let source = Source::Pattern(Pattern::Uniform, 5);
                let mut job = Job::new(Group { ranks: 3, experts: 6, topk: 2 }, source, 5, values);
                (job.timeout, job.backend) = (side.patience(), side.backend);
                job
            };
            let (rank, routings) = (bootstrap.rank(), job.routings());
            let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap).unwrap();
            let part = Rank::new(&job, &routings, rank);
            for _ in 0..3 {
                if late {
                    std::thread::sleep(Duration::from_millis(200));
                }
                part.run(&mut buffer).unwrap();
            }
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    /// Too late: the late rank, too, is told, instead of waiting for ranks that gave up. And a new group works.
    a_rank_that_comes_too_late_is_told, |side| {
        let build = |bootstrap, timeout| {
            let builder = ElasticBuffer::builder().max_tokens_per_rank(4).experts(3).topk(1).hidden(64);
            builder.timeout(timeout).backend(side.backend).build(bootstrap).unwrap()
        };
        let errors = on_threads(3, LONG, |bootstrap| {
            let late = bootstrap.rank() == 1;
            let mut buffer = build(bootstrap, side.scaled(Duration::from_millis(400)));
            if late {
                std::thread::sleep(side.scaled(Duration::from_secs(2)));
            }
            let started = Instant::now();
            let error = buffer.barrier().and_then(|arrived| arrived.wait(LONG)).unwrap_err();
            assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
            error
        });
        for error in &errors {
            assert!(matches!(error, Error::PeerTimeout { missing, .. } if *missing == [1]), "{error}");
        }
        on_threads(3, LONG, |bootstrap| {
            let mut buffer = build(bootstrap, LONG);
            buffer.barrier().unwrap().wait(LONG).unwrap();
            buffer.close().unwrap();
        });
    }
}
