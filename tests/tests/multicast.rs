//! A multicast object of several real processes, on the software driver: they reach each other's memory, and when one is killed, late,
//! out of file descriptors or forbidden to use multicast, the others return an error that names it, in time, with nothing left.

use cuda_vmm::multicast::{Agreement, Options, SocketStar, Team};
use cuda_vmm::{Cuda, Error, Result};
use cuda_vmm_emu::{Config, Emulator};
use integration_tests::multicast::{GRANULE, Local, allowed};
use integration_tests::process::{PATIENCE, Peer, eventually, role, scratch};
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

const RANKS: usize = 3;
const SOCKET: &str = "MULTICAST_TEST_SOCKET";
/// How long members wait for one that is killed or late: less than for one that is slow.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Where rank 0 waits for the others, which say who they are with one byte.
fn gather(path: &Path) -> SocketStar {
    let listener = UnixListener::bind(path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut sockets: Vec<Option<UnixStream>> = (1..RANKS).map(|_| None).collect();
    eventually("the other ranks connecting", || {
        if let Ok((mut socket, _)) = listener.accept() {
            let mut rank = [0];
            socket.set_nonblocking(false).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            std::io::Read::read_exact(&mut socket, &mut rank).unwrap();
            sockets[usize::from(rank[0]) - 1] = Some(socket);
        }
        sockets.iter().all(Option::is_some)
    });
    SocketStar::root(sockets.into_iter().flatten().collect())
}

fn join(path: &Path, rank: usize) -> SocketStar {
    let mut socket = None;
    eventually("connecting to rank 0", || {
        socket = UnixStream::connect(path).ok();
        socket.is_some()
    });
    let mut socket = socket.unwrap();
    socket.write_all(&[rank as u8]).unwrap();
    SocketStar::member(rank, RANKS, socket)
}

/// Runs a body in `RANKS` processes, this one being rank 0, and checks that each leaves nothing behind. The `killed` rank is reaped, however it
/// ended.
fn processes(
    test: &str,
    environment: impl Fn(usize) -> Vec<(&'static str, &'static str)>,
    killed: Option<usize>,
    body: impl Fn(usize, &Emulator, &Cuda, SocketStar),
) {
    let run = |rank: usize, star: SocketStar| {
        let emulator = Emulator::new(Config::new(RANKS)).unwrap();
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        body(rank, &emulator, &cuda, star);
        emulator.assert_empty();
    };
    if let Some(role) = role(test) {
        let (rank, path) = (role.parse().unwrap(), std::env::var(SOCKET).unwrap());
        return run(rank, join(Path::new(&path), rank));
    }
    if !allowed(test) {
        return;
    }
    let (_folder, path) = scratch("rank-0");
    let name = path.to_str().unwrap().to_owned();
    let peers: Vec<_> = (1..RANKS)
        .map(|rank| {
            let mut environment = environment(rank);
            environment.push((SOCKET, &name));
            Peer::spawn(test, &rank.to_string(), &environment)
        })
        .collect();
    run(0, gather(&path));
    for (peer, rank) in peers.into_iter().zip(1..) {
        if killed == Some(rank) {
            peer.kill();
        } else {
            peer.finish();
        }
    }
}

fn options() -> Options {
    Options::default().timeout(TIMEOUT).pause(Duration::from_millis(10))
}

/// A barrier of all ranks.
fn meet(star: &mut SocketStar) {
    star.exchange(b".", Instant::now() + PATIENCE).unwrap();
}

#[test]
fn three_processes_share_one_address_range() {
    processes(
        "three_processes_share_one_address_range",
        |_| vec![],
        None,
        |rank, emulator, cuda, mut star| {
            let local = Local::new(cuda, rank as i32, 2 * GRANULE);
            let team = Team::create(std::slice::from_ref(&local.memory), &mut star, &options()).unwrap();
            assert_eq!((team.rank(), team.devices()), (rank, RANKS as u32));
            let place = |rank: usize| GRANULE + 4 * rank;
            let at = team.address().get();
            emulator.multimem_store(rank, at + place(rank) as u64, &[rank as f32 + 0.5]).unwrap();
            meet(&mut star);
            assert_eq!([0, 1, 2].map(|rank| local.get(place(rank))), [0.5, 1.5, 2.5]);
            meet(&mut star);
            local.set(0, f32::powi(10.0, rank as i32));
            meet(&mut star);
            let mut sum = [0.0_f32];
            emulator.multimem_ld_reduce_add(rank, at, &mut sum).unwrap();
            assert_eq!(sum, [111.0]);
            meet(&mut star);
            emulator.multimem_red_add(rank, at, &[1.0_f32]).unwrap();
            meet(&mut star);
            assert_eq!(local.get(0), f32::powi(10.0, rank as i32) + 3.0);
            team.close(&mut star, PATIENCE).unwrap();
        },
    );
}

/// An agreement whose member does something before its call with a number.
struct Before<F: FnMut()> {
    star: SocketStar,
    call: usize,
    act: F,
}

impl<F: FnMut()> Before<F> {
    fn count(&mut self) {
        if self.call == 0 {
            (self.act)();
        }
        self.call = self.call.wrapping_sub(1);
    }
}

impl<F: FnMut()> Agreement for Before<F> {
    fn rank(&self) -> usize {
        self.star.rank()
    }

    fn ranks(&self) -> usize {
        self.star.ranks()
    }

    fn exchange(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.count();
        self.star.exchange(mine, deadline)
    }

    fn carries_fds(&self) -> bool {
        true
    }

    fn distribute(&mut self, fd: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Option<OwnedFd>> {
        self.count();
        self.star.distribute(fd, deadline)
    }
}

/// The calls of one team: six steps that are agreed on, and the distribution of the object.
const CALLS: usize = 7;

/// Rank 2 does something before each of its calls in turn; the others see what becomes of it.
fn at_each_call(test: &str, killed: bool, act: impl Fn(), judge: impl Fn(usize, &Error)) {
    const CALL: &str = "MULTICAST_TEST_CALL";
    const NUMBERS: [&str; CALLS] = ["0", "1", "2", "3", "4", "5", "6"];
    for number in NUMBERS {
        let environment = |_: usize| vec![(CALL, number)];
        processes(test, environment, killed.then_some(2), |rank, _, cuda, star| {
            let memory = Local::new(cuda, rank as i32, GRANULE).memory;
            let start = Instant::now();
            let error = if rank == 2 {
                let call = std::env::var(CALL).unwrap().parse().unwrap();
                Team::create(&[memory], &mut Before { star, call, act: &act }, &options()).unwrap_err()
            } else {
                let mut star = star;
                Team::create(&[memory], &mut star, &options()).unwrap_err()
            };
            assert!(start.elapsed() < TIMEOUT + Duration::from_secs(5), "rank {rank} waited too long");
            judge(rank, &error);
        });
        if role(test).is_some() {
            return;
        }
    }
}

#[test]
fn a_killed_member_is_named_whenever_it_dies() {
    let die = || {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    };
    at_each_call("a_killed_member_is_named_whenever_it_dies", true, die, |_, error| {
        assert!(matches!(error, Error::Member { rank: 2, status: None, .. }), "{error}");
    });
}

#[test]
fn a_member_without_free_descriptors_is_an_error_on_all() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    // From here on the process can open nothing more: neither the object's descriptor nor what the driver needs for it.
    let exhaust = || {
        // The limit is one of numbers, and the next one to be given out is the first that is free.
        let next = std::fs::File::open("/proc/self/exe").unwrap().as_raw_fd() as u64;
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(next), maximum }).unwrap();
    };
    let test = "a_member_without_free_descriptors_is_an_error_on_all";
    processes(
        test,
        |_| vec![],
        None,
        |rank, _, cuda, star| {
            let memory = Local::new(cuda, rank as i32, GRANULE).memory;
            let before = getrlimit(Resource::Nofile);
            // Before the distribution, which is the third call.
            let call = if rank == 2 { 2 } else { usize::MAX };
            let error =
                Team::create(&[memory], &mut Before { star, call, act: &exhaust }, &options()).unwrap_err();
            setrlimit(Resource::Nofile, before).unwrap();
            if rank == 2 {
                assert!(
                    matches!(error, Error::DescriptorCount { received: 0, truncated: true, .. }),
                    "{error}"
                );
                assert!(error.to_string().contains("limit of open files"), "{error}");
            } else {
                assert!(matches!(&error, Error::Member { rank: 2, .. }), "{error}");
            }
        },
    );
}

#[test]
fn a_member_with_multicast_switched_off_is_an_error_on_all() {
    let off = |rank| if rank == 1 { vec![("CUDA_VMM_DISABLE_MULTICAST", "1")] } else { vec![] };
    let test = "a_member_with_multicast_switched_off_is_an_error_on_all";
    processes(test, off, None, |rank, emulator, cuda, mut star| {
        let memory = Local::new(cuda, rank as i32, GRANULE).memory;
        let error = Team::create(&[memory], &mut star, &options()).unwrap_err();
        match error {
            Error::MulticastDisabled { variable } => {
                assert_eq!((rank, variable), (1, "CUDA_VMM_DISABLE_MULTICAST"))
            }
            Error::Member { rank: 1, ref reason, .. } => {
                assert!(rank != 1 && reason.contains("switched off"), "{error}")
            }
            other => panic!("rank {rank}: {other}"),
        }
        assert_eq!(emulator.faults().calls(cuda_vmm::sys::Function::cuMulticastCreate), 0);
    });
}
