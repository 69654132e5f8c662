//! Teams on the software driver: each member is a thread with a driver of its own, as if it were a process. Whatever goes wrong on one
//! member ends on all of them, in time, with nothing left.

use cuda_vmm::multicast::{Agreement, SocketStar, Team};
use cuda_vmm::sys::{CUresult, Function};
use cuda_vmm::{Error, PhysicalMemory, Properties};
use cuda_vmm_emu::Config;
use integration_tests::multicast::{GRANULE, Local, allowed};
use integration_tests::team::{LONG, Member, errors, members, options};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(400);

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
                    Error::Call { cause, .. } => assert_eq!((rank, cause.function()), (victim, function)),
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
