//! Teams on the software driver: each member is a thread with a driver of its own, as if it were a process. Whatever goes wrong on one
//! member ends on all of them, in time, with nothing left.

use cuda_vmm::multicast::{Agreement, Options, SocketStar, Team};
use cuda_vmm::sys::{CUresult, Function};
use cuda_vmm::{Cuda, Error, PhysicalMemory, Properties, Result};
use cuda_vmm_emu::{Config, Emulator, Fabric};
use integration_tests::multicast::{GRANULE, Local, allowed};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Far more than a team takes here; whoever needs it waits for what does not come.
const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(400);

fn options() -> Options {
    Options::default().timeout(LONG).attempts(3).pause(Duration::from_millis(5))
}

fn stars(ranks: usize) -> Vec<SocketStar> {
    let pairs: Vec<_> = (1..ranks).map(|_| UnixStream::pair().unwrap()).collect();
    let (near, far): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let members = far.into_iter().zip(1..).map(|(socket, rank)| SocketStar::member(rank, ranks, socket));
    std::iter::once(SocketStar::root(near)).chain(members).collect()
}

/// One member: its rank, its driver, and its end of the agreement.
struct Member {
    rank: usize,
    emulator: Emulator,
    cuda: Cuda,
    star: SocketStar,
}

impl Member {
    /// Memory of the device with the member's rank.
    fn memory(&self, size: usize) -> PhysicalMemory {
        let properties = Properties::device(self.rank as i32).shareable();
        PhysicalMemory::create(&self.cuda, size, &properties).unwrap()
    }

    fn team(&mut self) -> Result<Team> {
        let memory = self.memory(GRANULE);
        Team::create(&[memory], &mut self.star, &options())
    }
}

/// Runs a body on all members at the same time, and checks that each leaves nothing behind.
fn members<T: Send>(
    ranks: usize,
    config: impl Fn(usize) -> Config,
    body: impl Fn(&mut Member) -> T + Sync,
) -> Vec<T> {
    let members: Vec<_> = stars(ranks)
        .into_iter()
        .enumerate()
        .map(|(rank, star)| {
            let emulator = Emulator::new(config(rank)).unwrap();
            let cuda = Cuda::with_driver(emulator.driver()).unwrap();
            Member { rank, emulator, cuda, star }
        })
        .collect();
    let run = &|mut member: Member| {
        let result = body(&mut member);
        member.emulator.assert_empty();
        result
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = members.into_iter().map(|member| scope.spawn(move || run(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The errors of all members that wanted a team with a plan of their own.
fn errors(ranks: usize, plan: impl Fn(&mut Member) -> Result<Team> + Sync) -> Vec<Error> {
    members(ranks, |_| Config::new(ranks), |member| plan(member).unwrap_err())
}

#[test]
fn members_reach_each_other_with_one_store() {
    if !allowed("members_reach_each_other_with_one_store") {
        return;
    }
    const RANKS: usize = 3;
    let barrier = std::sync::Barrier::new(RANKS);
    members(
        RANKS,
        |_| Config::new(RANKS),
        |member| {
            let rank = member.rank;
            let local = Local::new(&member.cuda, rank as i32, 2 * GRANULE);
            let team =
                Team::create(std::slice::from_ref(&local.memory), &mut member.star, &options()).unwrap();
            assert_eq!(
                (team.rank(), team.ranks(), team.devices(), team.size()),
                (rank, RANKS, 3, 2 * GRANULE)
            );
            // Each stores at a place of its own, and finds what all others stored in its own memory.
            let place = |rank: usize| GRANULE - 8 + 4 * rank;
            let at = team.address().get() + place(rank) as u64;
            member.emulator.multimem_store(rank, at, &[rank as f32 + 1.0]).unwrap();
            barrier.wait();
            assert_eq!([0, 1, 2].map(|rank| local.get(place(rank))), [1.0, 2.0, 3.0]);
            barrier.wait();
            local.set(0, 10.0 * (rank as f32 + 1.0));
            barrier.wait();
            let mut sum = [0.0_f32];
            member.emulator.multimem_ld_reduce_add(rank, team.address().get(), &mut sum).unwrap();
            assert_eq!(sum, [60.0]);
            team.close(&mut member.star, LONG).unwrap();
        },
    );
}

#[test]
fn a_member_may_bring_several_devices_and_be_alone() {
    if !allowed("a_member_may_bring_several_devices_and_be_alone") {
        return;
    }
    members(
        1,
        |_| Config::new(2),
        |member| {
            // Alone, memory need not be exportable.
            let memories = [0, 1].map(|device| {
                PhysicalMemory::create(&member.cuda, GRANULE, &Properties::device(device)).unwrap()
            });
            let team = Team::create(&memories, &mut member.star, &options()).unwrap();
            assert_eq!((team.devices(), team.multicast().bindings().len()), (2, 2));
        },
    );
    // Two members with two devices each.
    members(
        2,
        |_| Config::new(4),
        |member| {
            let memories = [0, 1].map(|index| {
                let device = Properties::device((2 * member.rank + index) as i32).shareable();
                PhysicalMemory::create(&member.cuda, GRANULE, &device).unwrap()
            });
            let team = Team::create(&memories, &mut member.star, &options()).unwrap();
            assert_eq!((team.devices(), team.multicast().object().added().len()), (4, 2));
            team.close(&mut member.star, LONG).unwrap();
        },
    );
}

#[test]
fn a_failure_of_one_member_is_an_error_on_all() {
    use Function as F;
    if !allowed("a_failure_of_one_member_is_an_error_on_all") {
        return;
    }
    const RANKS: usize = 3;
    let code = CUresult::CUDA_ERROR_ILLEGAL_STATE;
    for function in [
        F::cuMulticastGetGranularity,
        F::cuMulticastCreate,
        F::cuMemExportToShareableHandle,
        F::cuMemImportFromShareableHandle,
        F::cuMulticastAddDevice,
        F::cuMulticastBindMem,
        F::cuMemAddressReserve,
        F::cuMemMap,
        F::cuMemSetAccess,
    ] {
        for victim in 0..RANKS {
            let of_root = matches!(function, F::cuMulticastCreate | F::cuMemExportToShareableHandle);
            if (of_root && victim != 0) || (function == F::cuMemImportFromShareableHandle && victim == 0) {
                continue;
            }
            let start = Instant::now();
            let errors = errors(RANKS, |member| {
                let memory = member.memory(GRANULE);
                if member.rank == victim {
                    member.emulator.faults().fail_once(function, code);
                }
                Team::create(&[memory], &mut member.star, &options())
            });
            assert!(start.elapsed() < LONG / 2, "{function:?} on rank {victim}: somebody waited");
            for (rank, error) in errors.iter().enumerate() {
                assert_eq!(error.status(), Some(code), "{function:?} on rank {victim}: {error}");
                match error {
                    Error::Call { source, .. } => assert_eq!((rank, source.function()), (victim, function)),
                    Error::Member { rank: named, reason, .. } => {
                        assert!(rank != victim && *named == victim, "{error}");
                        assert!(reason.contains(function.name()), "{reason}");
                    }
                    other => panic!("{function:?} on rank {victim}: {other}"),
                }
            }
        }
    }
}

#[test]
fn a_system_that_is_not_ready_is_tried_again_by_all_together() {
    if !allowed("a_system_that_is_not_ready_is_tried_again_by_all_together") {
        return;
    }
    let not_ready = CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    for function in
        [Function::cuMulticastCreate, Function::cuMulticastAddDevice, Function::cuMulticastBindMem]
    {
        let victim = usize::from(function != Function::cuMulticastCreate);
        let creations = members(
            3,
            |_| Config::new(3),
            |member| {
                if member.rank == victim {
                    member.emulator.faults().fail_nth(function, 1, not_ready);
                    member.emulator.faults().fail_nth(function, 2, not_ready);
                }
                let team = member.team().unwrap();
                team.close(&mut member.star, LONG).unwrap();
                member.emulator.faults().calls(Function::cuMulticastCreate)
            },
        );
        assert_eq!(creations, [3, 0, 0], "{function:?}: the third attempt succeeds, from the object on");
        // There is an end to it.
        let errors = errors(3, |member| {
            if member.rank == victim {
                member.emulator.faults().fail_always(function, not_ready);
            }
            member.team()
        });
        for error in errors {
            assert_eq!(error.status(), Some(not_ready), "{error}");
            assert!(error.to_string().contains("SYSTEM_NOT_READY"), "{error}");
        }
    }
    // A failure that will not pass counts more than one that may, on every member.
    let errors = errors(3, |member| {
        let code = [None, Some(not_ready), Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY)][member.rank];
        if let Some(code) = code {
            member.emulator.faults().fail_once(Function::cuMulticastBindMem, code);
        }
        member.team()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY), "{error}");
        assert!(rank == 2 || matches!(error, Error::Member { rank: 2, .. }), "{error}");
    }
}

#[test]
fn members_that_want_different_things_hear_of_it() {
    if !allowed("members_that_want_different_things_hear_of_it") {
        return;
    }
    let disagree = |errors: Vec<Error>, wanted: &str| {
        for error in errors {
            assert!(matches!(error, Error::Disagreement { what, .. } if what == wanted), "{error}");
        }
    };
    let sizes = errors(3, |member| {
        let memory = member.memory(if member.rank == 1 { 2 * GRANULE } else { GRANULE });
        Team::create(&[memory], &mut member.star, &options())
    });
    disagree(sizes, "the size of the memory");
    let attempts = errors(2, |member| {
        let memory = member.memory(GRANULE);
        Team::create(&[memory], &mut member.star, &options().attempts(1 + member.rank as u32))
    });
    disagree(attempts, "the number of attempts");

    // Twice the same device.
    let twice = errors(2, |member| {
        let memory = PhysicalMemory::create(&member.cuda, GRANULE, &Properties::device(0).shareable())?;
        Team::create(&[memory], &mut member.star, &options())
    });
    for error in twice {
        assert!(matches!(&error, Error::Member { rank: 1, reason, .. } if reason.contains("so does rank 0")));
    }
}

#[test]
fn bad_input_of_one_member_is_an_error_on_all() {
    if !allowed("bad_input_of_one_member_is_an_error_on_all") {
        return;
    }
    type Bring = fn(&Member) -> Vec<PhysicalMemory>;
    type Expected = fn(&Error) -> bool;
    let cases: [(&str, Bring, Expected); 5] = [
        ("no memory", |_| vec![], |e| matches!(e, Error::Zero { .. })),
        (
            "private memory",
            |m| vec![PhysicalMemory::create(&m.cuda, GRANULE, &Properties::device(1)).unwrap()],
            |e| matches!(e, Error::Unsupported { .. }),
        ),
        (
            "memory of the host",
            |m| vec![PhysicalMemory::create(&m.cuda, GRANULE, &Properties::host_numa(0)).unwrap()],
            |e| matches!(e, Error::NotInTeam { .. }),
        ),
        (
            "one device twice",
            |m| vec![m.memory(GRANULE), m.memory(GRANULE)],
            |e| matches!(e, Error::DeviceTwice { ordinal: 1 }),
        ),
        (
            "sizes that differ",
            |m| {
                let other = Properties::device(2).shareable();
                vec![m.memory(GRANULE), PhysicalMemory::create(&m.cuda, 2 * GRANULE, &other).unwrap()]
            },
            |e| matches!(e, Error::OutOfBounds { .. }),
        ),
    ];
    for (what, bring, expected) in cases {
        let errors = errors(3, |member| {
            let memories = if member.rank == 1 { bring(member) } else { vec![member.memory(GRANULE)] };
            Team::create(&memories, &mut member.star, &options())
        });
        assert!(expected(&errors[1]), "{what}: {}", errors[1]);
        for rank in [0, 2] {
            assert!(
                matches!(errors[rank], Error::Member { rank: 1, status: None, .. }),
                "{what}: {}",
                errors[rank]
            );
        }
    }
    // A size that multicast cannot have is refused by all, before an object is created.
    let config = |_| Config::new(2).multicast_granularity(2 * GRANULE, 2 * GRANULE);
    let errors = members(2, config, |member| {
        let error = member.team().unwrap_err();
        assert_eq!(member.emulator.faults().calls(Function::cuMulticastCreate), 0);
        error
    });
    for error in errors {
        assert!(matches!(error, Error::Misaligned { value: GRANULE, .. }), "{error}");
    }
}

#[test]
fn a_member_that_does_not_come_is_named_in_time() {
    if !allowed("a_member_that_does_not_come_is_named_in_time") {
        return;
    }
    let timely = options().timeout(SHORT);
    for absent in 0..3 {
        // Whether it is gone (its end is closed) or only late.
        for gone in [true, false] {
            let barrier = std::sync::Barrier::new(3);
            let results = members(
                3,
                |_| Config::new(3),
                |member| {
                    if member.rank == absent {
                        if gone {
                            member.star = SocketStar::root(Vec::<OwnedFd>::new());
                        }
                        barrier.wait();
                        return None;
                    }
                    let memory = member.memory(GRANULE);
                    let start = Instant::now();
                    let error = Team::create(&[memory], &mut member.star, &timely).unwrap_err();
                    let waited = start.elapsed();
                    barrier.wait();
                    Some((error, waited))
                },
            );
            for (error, waited) in results.into_iter().flatten() {
                assert!(waited < SHORT + Duration::from_secs(2), "rank {absent}: waited {waited:?}");
                assert!(matches!(error, Error::Member { rank, .. } if rank == absent), "{error}");
            }
        }
    }
}

#[test]
fn closing_needs_everybody() {
    if !allowed("closing_needs_everybody") {
        return;
    }
    let barrier = std::sync::Barrier::new(2);
    members(
        2,
        |_| Config::new(2),
        |member| {
            let team = member.team().unwrap();
            if member.rank == 1 {
                // Goes on using it.
                barrier.wait();
                return;
            }
            let rejected = team.close(&mut member.star, SHORT).unwrap_err();
            assert!(matches!(rejected.error, Error::Member { rank: 1, .. }), "{rejected}");
            // The team is still there.
            let at = rejected.object.address().get();
            member.emulator.multimem_store(0, at, &[1.0_f32]).unwrap();
            barrier.wait();
            // The star is broken for good.
            let error = member.star.exchange(b"x", Instant::now() + LONG).unwrap_err();
            assert!(matches!(error, Error::Member { rank: 1, .. }), "{error}");
        },
    );
}

/// An agreement that does something to what another one does.
struct Bent<'a> {
    star: &'a mut SocketStar,
    fds: bool,
    lose_fd: bool,
    exchanges: usize,
    change: &'a dyn Fn(usize, &mut Vec<Vec<u8>>),
}

impl<'a> Bent<'a> {
    fn new(star: &'a mut SocketStar) -> Self {
        Self { star, fds: true, lose_fd: false, exchanges: 0, change: &|_, _| {} }
    }
}

impl Agreement for Bent<'_> {
    fn rank(&self) -> usize {
        self.star.rank()
    }

    fn ranks(&self) -> usize {
        self.star.ranks()
    }

    fn exchange(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let mut all = self.star.exchange(mine, deadline)?;
        (self.change)(self.exchanges, &mut all);
        self.exchanges += 1;
        Ok(all)
    }

    fn carries_fds(&self) -> bool {
        self.fds
    }

    fn distribute(&mut self, fd: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Option<OwnedFd>> {
        let got = self.star.distribute(fd, deadline)?;
        if self.lose_fd {
            Err(Error::DescriptorCount { received: 0, expected: 1, truncated: true })
        } else {
            Ok(got)
        }
    }
}

#[test]
fn a_lost_descriptor_is_an_error_on_all() {
    if !allowed("a_lost_descriptor_is_an_error_on_all") {
        return;
    }
    let errors = errors(3, |member| {
        let (rank, memory) = (member.rank, member.memory(GRANULE));
        let mut bent = Bent { lose_fd: rank == 2, ..Bent::new(&mut member.star) };
        Team::create(&[memory], &mut bent, &options())
    });
    assert!(matches!(errors[2], Error::DescriptorCount { .. }), "{}", errors[2]);
    for error in &errors[..2] {
        assert!(matches!(error, Error::Member { rank: 2, .. }), "{error}");
    }
}

#[test]
fn fabric_handles_need_no_descriptors() {
    if !allowed("fabric_handles_need_no_descriptors") {
        return;
    }
    let team = |member: &mut Member| {
        let memory = member.memory(GRANULE);
        Team::create(&[memory], &mut Bent { fds: false, ..Bent::new(&mut member.star) }, &options())
    };
    members(
        3,
        |_| Config::new(3).fabric(Fabric::Working),
        |member| {
            let made = team(member).unwrap();
            made.close(&mut member.star, LONG).unwrap();
        },
    );
    // Without an IMEX channel all hear why.
    for error in errors(3, team) {
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_NOT_PERMITTED), "{error}");
        assert!(error.to_string().contains("IMEX"), "{error}");
    }
    // Some can pass descriptors and some cannot.
    let mixed = errors(2, |member| {
        let (memory, fds) = (member.memory(GRANULE), member.rank == 0);
        Team::create(&[memory], &mut Bent { fds, ..Bent::new(&mut member.star) }, &options())
    });
    for error in mixed {
        assert!(matches!(error, Error::Disagreement { .. }), "{error}");
    }
}

#[test]
fn hostile_messages_do_no_harm() {
    if !allowed("hostile_messages_do_no_harm") {
        return;
    }
    // What both members read from rank 1, in each exchange, is something else than it sent.
    type Change = fn(&mut Vec<Vec<u8>>);
    let changes: [(&str, Change); 7] = [
        ("zeros", |all| all[1].fill(0)),
        ("ones", |all| all[1].fill(0xff)),
        ("short", |all| all[1].truncate(100)),
        ("another step", |all| all[1][8] += 1),
        ("no such verdict", |all| all[1][9] = 7),
        ("a long text", |all| all[1][10..12].fill(0xff)),
        ("no message", |all| drop(all.pop())),
    ];
    for (what, change) in changes {
        for when in 0..6 {
            let errors = errors(2, |member| {
                let memory = member.memory(GRANULE);
                let change = move |exchange: usize, all: &mut Vec<Vec<u8>>| {
                    if exchange == when {
                        change(all);
                    }
                };
                let mut bent = Bent { change: &change, ..Bent::new(&mut member.star) };
                Team::create(&[memory], &mut bent, &options())
            });
            for error in errors {
                assert!(matches!(error, Error::BadMessage { .. }), "{what} in exchange {when}: {error}");
            }
        }
    }
    // Impossible numbers in the first message.
    for bytes in [[0_u8; 4], [0xff; 4], 19_u32.to_le_bytes()] {
        let errors = errors(2, |member| {
            let memory = member.memory(GRANULE);
            let change = |exchange: usize, all: &mut Vec<Vec<u8>>| {
                if exchange == 0 {
                    all[1][16..20].copy_from_slice(&bytes);
                }
            };
            let mut bent = Bent { change: &change, ..Bent::new(&mut member.star) };
            Team::create(&[memory], &mut bent, &options())
        });
        for error in errors {
            assert!(matches!(error, Error::BadMessage { .. }), "{bytes:?}: {error}");
        }
    }
}

#[test]
fn a_star_refuses_what_is_no_star() {
    use std::io::Write;
    let deadline = || Instant::now() + Duration::from_secs(5);
    let hear = |bytes: &[u8]| {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(bytes).unwrap();
        drop(far);
        SocketStar::root(vec![near]).exchange(b"mine", deadline()).unwrap_err().to_string()
    };
    let header = |kind: u32, rank: u32, sequence: u32, length: u32| {
        let mut bytes = b"CVMSTAR1".to_vec();
        bytes.extend([kind, rank, sequence, length].iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend(b"mine");
        bytes
    };
    assert!(hear(b"").contains("rank 1"));
    assert!(hear(&[0; 24]).contains("does not start"));
    assert!(hear(&header(9, 1, 1, 4)).contains("something else"));
    assert!(hear(&header(3, 1, 1, 4)).contains("something else"), "only rank 0 says who is missing");
    assert!(hear(&header(1, 2, 1, 4)).contains("another rank"));
    assert!(hear(&header(1, 1, 2, 4)).contains("another exchange"));
    assert!(hear(&header(1, 1, 1, u32::MAX)).contains("another length"));
    assert!(hear(&header(1, 1, 1, 4)[..26]).contains("closed the connection after 2 of 4 bytes"));

    // A message that no rank may send, and one that is not for this rank.
    let (near, _far) = UnixStream::pair().unwrap();
    let mut star = SocketStar::root(vec![near]);
    assert!(matches!(star.exchange(b"", deadline()), Err(Error::Unsupported { .. })));
    assert!(matches!(star.distribute(None, deadline()), Err(Error::Unsupported { .. })));
    // What rank 0 says of a third one is heard by the second.
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut bytes = header(3, 2, 1, 7)[..24].to_vec();
    bytes.extend(b"\x1b[2Jbye");
    far.write_all(&bytes).unwrap();
    let error = SocketStar::member(1, 3, near).exchange(b"mine", deadline()).unwrap_err();
    assert!(matches!(&error, Error::Member { rank: 2, reason, .. } if reason == "\u{fffd}[2Jbye"), "{error}");
}
