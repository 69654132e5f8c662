use std::io::{Read, Write};

use super::*;

const LONG: Duration = Duration::from_secs(20);

/// A store on a free port, and the launch description of each rank.
fn store(world_size: usize, timeout: Duration) -> (TcpBootstrap, Vec<Launch>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let launches = (0..world_size).map(|rank| Launch {
        rank,
        world_size,
        local_rank: None,
        master_addr: "127.0.0.1".into(),
        master_port: port,
    });
    (TcpBootstrap::serve(listener, world_size, timeout).unwrap(), launches.collect())
}

fn on_ranks<T: Send>(world_size: usize, timeout: Duration, f: impl Fn(TcpBootstrap) -> T + Sync) -> Vec<T> {
    let (zero, launches) = store(world_size, timeout);
    let f = &f;
    thread::scope(|scope| {
        let mut running = vec![scope.spawn(move || f(zero))];
        running.extend(
            launches[1..]
                .iter()
                .map(|launch| scope.spawn(move || f(TcpBootstrap::join(launch, timeout).unwrap()))),
        );
        running.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn gathers_in_rank_order_many_times() {
    on_ranks(4, LONG, |b| {
        for round in 0..100usize {
            let all = b.all_gather(&vec![b.rank() as u8; round + b.rank()]).unwrap();
            for (r, bytes) in all.iter().enumerate() {
                assert_eq!(*bytes, vec![r as u8; round + r]);
            }
        }
        let big = vec![b.rank() as u8; 3 << 20];
        assert!(b.all_gather(&big).unwrap().iter().enumerate().all(|(r, x)| *x == vec![r as u8; 3 << 20]));
    });
}

#[test]
fn the_longest_timeout_is_one() {
    let all = on_ranks(3, Duration::MAX, |b| b.all_gather(&[b.rank() as u8]).unwrap());
    assert!(all.iter().all(|one| *one == [[0], [1], [2]]), "{all:?}");
}

#[test]
fn one_rank_needs_nobody() {
    let (zero, _) = store(1, LONG);
    assert_eq!(zero.all_gather(b"x").unwrap(), [b"x"]);
}

#[test]
fn everybody_learns_who_is_late() {
    let results = on_ranks(4, Duration::from_millis(300), |b| {
        if b.rank() == 2 {
            // Connected, but doesn't call in time. Kept alive so that it doesn't count as having left.
            thread::sleep(Duration::from_millis(1500));
            return Ok(());
        }
        b.barrier()
    });
    for rank in [0, 1, 3] {
        let error = results[rank].as_ref().unwrap_err();
        assert!(matches!(error, Error::PeerTimeout { missing, .. } if *missing == [2]), "{error}");
    }
}

#[test]
fn everybody_learns_who_left() {
    let results = on_ranks(3, LONG, |b| {
        b.barrier().unwrap();
        if b.rank() == 1 { Ok(()) } else { b.barrier() }
    });
    for rank in [0, 2] {
        let error = results[rank].as_ref().unwrap_err();
        assert!(matches!(error, Error::PeerLeft { rank: 1, .. }), "{error}");
    }
    let results = on_ranks(3, LONG, |b| {
        b.barrier().unwrap();
        if b.rank() == 0 { Ok(()) } else { b.barrier() }
    });
    for rank in [1, 2] {
        let error = results[rank].as_ref().unwrap_err();
        assert!(matches!(error, Error::PeerLeft { rank: 0, .. }), "{error}");
    }
}

#[test]
fn leaving_after_the_last_call_disturbs_nobody() {
    for _ in 0..30 {
        on_ranks(3, LONG, |b| b.barrier().unwrap());
    }
}

#[test]
fn strangers_disturb_nobody() {
    let (zero, launches) = store(2, LONG);
    let address = format!("127.0.0.1:{}", launches[1].master_port);
    let silent = TcpStream::connect(&address).unwrap();
    let mut noisy = TcpStream::connect(&address).unwrap();
    noisy.write_all(&[0xaa; 100]).unwrap();
    let mut greedy = TcpStream::connect(&address).unwrap();
    let mut hello = frame::encode(Kind::Hello, &[0; 16]);
    hello[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    greedy.write_all(&hello).unwrap();
    let mut end = Vec::new();
    // The store hangs up on both.
    let _ = noisy.read_to_end(&mut end);
    let _ = greedy.read_to_end(&mut end);
    assert!(end.is_empty());
    thread::scope(|scope| {
        scope.spawn(|| TcpBootstrap::join(&launches[1], LONG).unwrap().barrier().unwrap());
        zero.barrier().unwrap();
    });
    drop(silent);
}

#[test]
fn a_second_process_with_the_same_rank_is_refused() {
    let (_zero, launches) = store(3, LONG);
    let _one = TcpBootstrap::join(&launches[1], LONG).unwrap();
    let error = TcpBootstrap::join(&launches[1], LONG).err().unwrap();
    assert!(error.to_string().contains("two processes have this rank"), "{error}");
    let other_size = Launch { rank: 2, world_size: 5, ..launches[2].clone() };
    let error = TcpBootstrap::join(&other_size, LONG).err().unwrap();
    assert!(error.to_string().contains("started for 5 ranks, rank 0 for 3"), "{error}");
}

#[test]
fn garbage_from_a_rank_names_it() {
    let (zero, launches) = store(2, LONG);
    let mut raw = TcpStream::connect(("127.0.0.1", launches[1].master_port)).unwrap();
    let hello = [1u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
    frame::write(&mut raw, Kind::Hello, &hello).unwrap();
    let (kind, _) = frame::read(&mut raw, 0, "store").unwrap();
    assert_eq!(kind, Kind::Welcome);
    raw.write_all(&[0x55; 64]).unwrap();
    let error = zero.barrier().unwrap_err();
    assert!(matches!(&error, Error::Protocol { from, .. } if from == "rank 1"), "{error}");
}

#[test]
fn no_store_is_an_error_within_the_timeout() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let launch = Launch {
        rank: 1,
        world_size: 2,
        local_rank: None,
        master_addr: "127.0.0.1".into(),
        master_port: port,
    };
    let started = Instant::now();
    let error = TcpBootstrap::join(&launch, Duration::from_millis(100)).err().unwrap();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
}
