//! The TCP store between processes.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use deepep_core::Error;
use deepep_core::bootstrap::agree::{Settings, agree, compare};
use deepep_core::bootstrap::{Bootstrap, Launch, TcpBootstrap};
use integration_tests::process::{Peer, role};
use integration_tests::ranks::LONG;

const RANKS: usize = 4;

/// Environment of a rank as one of the launchers sets it.
fn launched(launcher: &str, rank: usize, port: u16) -> Vec<(&'static str, String)> {
    let (rank, ranks, port) = (rank.to_string(), RANKS.to_string(), port.to_string());
    let address = ("MASTER_ADDR", "127.0.0.1".to_owned());
    match launcher {
        "torchrun" => vec![("RANK", rank), ("WORLD_SIZE", ranks), ("MASTER_PORT", port), address],
        "slurm" => vec![
            ("SLURM_PROCID", rank),
            ("SLURM_NTASKS", ranks),
            ("SLURM_NODELIST", "localhost".into()),
            ("DEEPEP_MASTER_PORT", port),
        ],
        _ => vec![
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", ranks.clone()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", ranks),
            ("DEEPEP_MASTER_PORT", port),
        ],
    }
}

fn start(test: &str, launcher: &str) -> (TcpListener, Vec<Peer>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peers = (1..RANKS)
        .map(|rank| {
            let environment = launched(launcher, rank, port);
            let environment: Vec<_> = environment.iter().map(|(k, v)| (*k, v.as_str())).collect();
            Peer::spawn(test, launcher, &environment)
        })
        .collect();
    (listener, peers)
}

fn join() -> TcpBootstrap {
    TcpBootstrap::join(&Launch::from_env().unwrap(), LONG).unwrap()
}

#[test]
fn processes_of_every_launcher_meet() {
    const TEST: &str = "processes_of_every_launcher_meet";
    let body = |b: TcpBootstrap| {
        for round in 0..200u64 {
            let mine = [round.to_le_bytes(), (b.rank() as u64).to_le_bytes()].concat();
            let all = b.all_gather(&mine).unwrap();
            for (rank, bytes) in all.iter().enumerate() {
                assert_eq!(*bytes, [round.to_le_bytes(), (rank as u64).to_le_bytes()].concat());
            }
        }
        let settings = Settings::new().with("hidden", if b.rank() == 3 { 64 } else { 128 });
        let error = compare(&b, "settings", Ok(settings)).unwrap_err();
        assert_eq!(error.to_string(), "ranks disagree: hidden is 128 on rank 0–2, 64 on rank 3");
        let local = if b.rank() == 2 {
            Err(TcpBootstrap::serve(TcpListener::bind("127.0.0.1:0").unwrap(), 0, LONG).err().unwrap())
        } else {
            Ok(())
        };
        let error = agree(&b, "a step", local).unwrap_err();
        match b.rank() {
            2 => assert!(matches!(error, Error::Invalid { .. }), "{error}"),
            _ => assert!(matches!(error, Error::PeerFailed { rank: 2, .. }), "{error}"),
        }
    };
    if role(TEST).is_some() {
        return body(join());
    }
    for launcher in ["torchrun", "slurm", "open mpi"] {
        let (listener, peers) = start(TEST, launcher);
        body(TcpBootstrap::serve(listener, RANKS, LONG).unwrap());
        peers.into_iter().for_each(Peer::finish);
    }
}

#[test]
fn a_killed_process_is_named_at_once() {
    const TEST: &str = "a_killed_process_is_named_at_once";
    let survive = |b: TcpBootstrap| {
        let started = Instant::now();
        let error = loop {
            if let Err(error) = b.barrier() {
                break error;
            }
            assert!(started.elapsed() < LONG, "nobody was killed");
        };
        assert!(matches!(error, Error::PeerLeft { rank: 2, .. }), "{error}");
        // From then on every call says so.
        assert!(b.barrier().is_err());
    };
    if role(TEST).is_some() {
        return survive(join());
    }
    let (listener, mut peers) = start(TEST, "torchrun");
    let victim = peers.remove(1);
    let b = TcpBootstrap::serve(listener, RANKS, LONG).unwrap();
    b.barrier().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            victim.kill();
        });
        survive(b);
    });
    peers.into_iter().for_each(Peer::finish);
}

#[test]
fn rank_zero_killed_is_named_at_once() {
    const TEST: &str = "rank_zero_killed_is_named_at_once";
    // Here this process is rank 1, and rank 0 is the one to be killed.
    if role(TEST).is_some() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let b = TcpBootstrap::serve(listener, 2, LONG).unwrap();
        std::fs::write(std::env::var("PORT_FILE").unwrap(), port.to_string()).unwrap();
        while b.barrier().is_ok() {}
        return;
    }
    let (_folder, path) = integration_tests::process::scratch("port");
    let zero = Peer::spawn(TEST, "zero", &[("PORT_FILE", path.to_str().unwrap())]);
    let mut port = 0;
    integration_tests::process::eventually("rank 0 listens", || {
        let written = std::fs::read_to_string(&path).ok().and_then(|text| text.parse().ok());
        port = written.unwrap_or(0);
        port != 0
    });
    let master_addr = "127.0.0.1".to_owned();
    let launch = Launch { rank: 1, world_size: 2, local_rank: None, master_addr, master_port: port };
    let b = TcpBootstrap::join(&launch, LONG).unwrap();
    for _ in 0..10 {
        b.barrier().unwrap();
    }
    zero.kill();
    let error = b.barrier().unwrap_err();
    assert!(matches!(error, Error::PeerLeft { rank: 0, .. }), "{error}");
    assert!(matches!(b.barrier(), Err(Error::Broken { .. })));
}
