//! Ranks that die, come late or disagree: every other rank gets an error that names them, in time, and goes on living.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use cuda_vmm::{Cuda, Granularity, Reservation};
use cuda_vmm_emu::{Config, Emulator};
use deepep_cli::inputs::Values;
use deepep_cli::job::{Job, JobError, Rank, Source};
use deepep_cli::routing::{Group, Pattern, generator};
use deepep_core::bootstrap::{Bootstrap, Launch, TcpBootstrap};
use deepep_core::tensor::{DType, Space, TensorMut, TensorRef};
use deepep_core::{BackendKind, CombineArgs, DispatchArgs, Dispatched, ElasticBuffer, Error, Result};
use half::bf16;
use integration_tests::process::{Peer, role};
use integration_tests::ranks::{LONG, on_threads};
use rand::RngExt;

const RANKS: usize = 4;
const VICTIM: usize = 2;
const TOKENS: usize = 6;
const HIDDEN: usize = 64;
/// How long operations wait for the dead.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// How much longer a busy machine may take.
const SLACK: Duration = Duration::from_secs(20);

/// The moments at which the victim dies, and what the others then wait for.
const MOMENTS: &[(&str, &str)] = &[
    ("before dispatch", "dispatch, token counts"),
    ("while counting", "dispatch, token counts"),
    ("while sending plain rows", "dispatch, end of sending"),
    ("while sending expanded rows", "dispatch, arrival of a row"),
    ("before combine", "combine, arrival of a row"),
    ("before combine with one set", "combine, start"),
    ("while sending back", "combine, arrival of a row"),
    ("before the barrier", "barrier"),
];

fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("killed")
}

/// One rank's life up to the moment.
fn live(bootstrap: TcpBootstrap, moment: &str) -> (Result<()>, ElasticBuffer) {
    let victim = bootstrap.rank() == VICTIM;
    let mut buffer = ElasticBuffer::builder()
        .max_tokens_per_rank(TOKENS)
        .experts(8)
        .topk(4)
        .hidden(HIDDEN)
        .expanded(8)
        .timeout(TIMEOUT)
        .receive_sets(if moment.ends_with("one set") { 1 } else { 2 })
        .backend(BackendKind::Host)
        .build(bootstrap)
        .unwrap();
    let result = operations(&mut buffer, victim, moment);
    (result, buffer)
}

fn operations(buffer: &mut ElasticBuffer, victim: bool, moment: &str) -> Result<()> {
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

    let data = vec![bf16::ONE; 64 * HIDDEN];
    // Every token goes to every rank.
    let ids = [0i64, 2, 4, 6].repeat(TOKENS);
    let x = TensorRef::matrix(&data[..TOKENS * HIDDEN], TOKENS, HIDDEN)?;
    let idx = TensorRef::matrix(&ids, TOKENS, 4)?;
    let round = |buffer: &mut ElasticBuffer, got: &Dispatched, y: TensorRef<'_>| {
        let mut out = vec![bf16::ZERO; TOKENS * HIDDEN];
        buffer
            .combine(CombineArgs::new(y, got.handle(), TensorMut::matrix(&mut out, TOKENS, HIDDEN)?))
            .map(drop)
    };
    // A good round first.
    let got = buffer.dispatch(DispatchArgs::new(x, idx))?;
    round(buffer, &got, got.x())?;
    drop(got);

    if dies("before dispatch") {
        die();
    }
    let idx = if dies("while counting") { trap(DType::I64, TOKENS, 4) } else { idx };
    let x = if victim && moment.starts_with("while sending") && moment.ends_with("rows") {
        trap(DType::Bf16, TOKENS, HIDDEN)
    } else {
        x
    };
    let args = DispatchArgs::new(x, idx);
    let args = if moment.contains("expanded") { args.expanded(8) } else { args };
    let got = buffer.dispatch(args)?;
    if victim && moment.starts_with("before combine") {
        die();
    }
    let y = if dies("while sending back") { trap(DType::Bf16, got.rows(), HIDDEN) } else { got.x() };
    round(buffer, &got, y)?;
    drop(got);
    if dies("before the barrier") {
        die();
    }
    buffer.barrier()?;
    Ok(())
}

/// What a survivor must have seen.
fn check_survivor(moment: &str, phase: &str, result: Result<()>, buffer: ElasticBuffer, took: Duration) {
    let error = result.expect_err("the victim is dead");
    let Error::PeerTimeout { phase: found, missing, .. } = &error else {
        panic!("{moment}: {error}");
    };
    assert_eq!((found.as_ref(), missing.as_slice()), (phase, &[VICTIM][..]), "{moment}: {error}");
    assert!(took < TIMEOUT + SLACK, "{moment}: took {took:?}");
    let mut buffer = buffer;
    assert!(matches!(buffer.barrier(), Err(Error::Broken { .. })), "{moment}: a broken buffer says so");
    // Closing meets the victim, too, and ends.
    let error = buffer.close().expect_err("the victim is dead");
    assert!(matches!(&error, Error::PeerLeft { rank: VICTIM, .. }), "{moment}: {error}");
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

#[test]
fn a_rank_killed_in_each_phase() {
    const TEST: &str = "a_rank_killed_in_each_phase";
    let survive = |bootstrap: TcpBootstrap, moment: &str| {
        let (_, phase) = MOMENTS.iter().find(|(name, _)| *name == moment).unwrap();
        let started = Instant::now();
        let (result, buffer) = live(bootstrap, moment);
        check_survivor(moment, phase, result, buffer, started.elapsed());
    };
    if let Some(moment) = role(TEST) {
        return survive(TcpBootstrap::join(&Launch::from_env().unwrap(), LONG).unwrap(), &moment);
    }
    for (moment, _) in MOMENTS {
        let (listener, peers) = start(TEST, moment);
        survive(TcpBootstrap::serve(listener, RANKS, LONG).unwrap(), moment);
        for (rank, peer) in (1..).zip(peers) {
            if rank == VICTIM { peer.kill() } else { peer.finish() }
        }
    }
}

/// Killed at any moment: survivors name the victim.
#[test]
fn a_rank_killed_at_random() {
    const TEST: &str = "a_rank_killed_at_random";
    let mut job = Job::new(
        Group { ranks: RANKS, experts: 16, topk: 4 },
        Source::Pattern(Pattern::Uniform, 64),
        64,
        Values { seed: 3, dtype: DType::Bf16, hidden: 512 },
    );
    (job.timeout, job.backend) = (TIMEOUT, BackendKind::Host);
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
        };
        let JobError::Library(Error::PeerTimeout { missing, .. }) = &error else { panic!("{error}") };
        assert_eq!(missing, &[VICTIM], "{error}");
    };
    if let Some(expanded) = role(TEST) {
        job.expanded = (expanded == "expanded").then_some(8);
        return survive(TcpBootstrap::join(&Launch::from_env().unwrap(), LONG).unwrap(), &job);
    }
    let mut rng = generator(1, 0, 3);
    for round in 0..6 {
        let role = if round % 2 == 0 { "plain" } else { "expanded" };
        job.expanded = (role == "expanded").then_some(8);
        let (listener, mut peers) = start(TEST, role);
        let victim = peers.remove(VICTIM - 1);
        let delay = Duration::from_millis(rng.random_range(400..900));
        std::thread::scope(|scope| {
            // From the start of the processes: long enough for the buffers to be there on any machine that is not
            // overloaded, and if they are not, the bootstrap's error fails the test visibly.
            let killer = scope.spawn(move || {
                std::thread::sleep(delay);
                victim.kill();
            });
            survive(TcpBootstrap::serve(listener, RANKS, LONG).unwrap(), &job);
            killer.join().unwrap();
        });
        peers.into_iter().for_each(Peer::finish);
    }
}

#[test]
fn ranks_that_disagree_about_settings_are_told_what_and_who() {
    let results = on_threads(3, LONG, |bootstrap| {
        let rank = bootstrap.rank();
        let builder = ElasticBuffer::builder()
            .max_tokens_per_rank(if rank == 2 { 16 } else { 8 })
            .experts(6)
            .topk(2)
            .hidden(if rank == 0 { 128 } else { 64 })
            .backend(BackendKind::Host);
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

#[test]
fn ranks_that_make_different_calls_are_told() {
    for difference in ["alignment", "layout", "weights", "cached", "capacity"] {
        on_threads(2, LONG, |bootstrap| {
            let other = bootstrap.rank() == 1;
            let mut buffer = ElasticBuffer::builder()
                .max_tokens_per_rank(4)
                .experts(4)
                .topk(1)
                .hidden(64)
                .expanded(8)
                .output_slots(2)
                .backend(BackendKind::Host)
                .timeout(LONG)
                .build(bootstrap)
                .unwrap();
            let (data, ids, weights) = (vec![bf16::ONE; 64], [3i64], [1.0f32]);
            let x = TensorRef::matrix(&data, 1, 64).unwrap();
            let idx = TensorRef::matrix(&ids, 1, 1).unwrap();
            let good = buffer.dispatch(DispatchArgs::new(x, idx)).unwrap();
            let args = DispatchArgs::new(x, idx);
            let args = match (difference, other) {
                ("alignment", _) => args.expanded(if other { 4 } else { 8 }),
                ("layout", true) => args.expanded(1),
                ("weights", true) => args.weights(TensorRef::matrix(&weights, 1, 1).unwrap()),
                ("cached", true) => DispatchArgs::cached(x, good.handle()),
                ("capacity", true) => args.token_capacity(1),
                _ => args,
            };
            let error = buffer.dispatch(args).unwrap_err();
            assert!(matches!(error, Error::RanksDisagree { .. }), "{difference}: {error}");
            assert!(matches!(buffer.barrier(), Err(Error::Broken { .. })), "{difference}");
        });
    }
}

/// Late, but not too late.
#[test]
fn a_late_rank_is_waited_for() {
    on_threads(3, LONG, |bootstrap| {
        let late = bootstrap.rank() == 1;
        let job = {
            let values = Values { seed: 1, dtype: DType::Bf16, hidden: 64 };
            let source = Source::Pattern(Pattern::Uniform, 5);
            let mut job = Job::new(Group { ranks: 3, experts: 6, topk: 2 }, source, 5, values);
            (job.timeout, job.backend) = (LONG, BackendKind::Host);
            job
        };
        let (rank, routings) = (bootstrap.rank(), job.routings());
        let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap).unwrap();
        for _ in 0..3 {
            if late {
                std::thread::sleep(Duration::from_millis(200));
            }
            Rank::new(&job, &routings, rank).run(&mut buffer).unwrap();
        }
    });
}

/// Too late: the late rank, too, is told, instead of waiting for ranks that gave up.
#[test]
fn a_rank_that_comes_too_late_is_told() {
    let results = on_threads(3, LONG, |bootstrap| {
        let late = bootstrap.rank() == 1;
        let mut buffer = ElasticBuffer::builder()
            .max_tokens_per_rank(4)
            .experts(3)
            .topk(1)
            .hidden(64)
            .timeout(Duration::from_millis(200))
            .backend(BackendKind::Host)
            .build(bootstrap)
            .unwrap();
        if late {
            std::thread::sleep(Duration::from_millis(1000));
        }
        let started = Instant::now();
        let error = buffer.barrier().unwrap_err();
        (error, started.elapsed())
    });
    for (error, _) in &results {
        assert!(matches!(error, Error::PeerTimeout { missing, .. } if *missing == [1]), "{error}");
    }
}
