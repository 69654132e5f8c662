//! Every way to fail, on the fakes: what is said, and that nothing is left behind.

use crate::fake::{Fake, Kind, world};
use nccl_gin::sys::{Function, ncclResult_t};
use nccl_gin::{
    Communicator, Config, DevCommRequirements, Device, Error, GinConnection, MemAlloc, NotClosed, Shrink,
    UniqueId, WindowFlags,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB2: usize = 1 << 21;
const USAGE: ncclResult_t = ncclResult_t::ncclInvalidUsage;
const SHORT: Duration = Duration::from_millis(100);

fn says(text: &str) {
    world(|world| world.last_error = format!("{text}\n\0").into_bytes());
}

fn fail(function: &'static str, code: ncclResult_t) {
    world(|world| world.fail.insert(function, code));
}

fn fail_later(function: &'static str, code: ncclResult_t) {
    world(|world| world.fail_later.insert(function, code));
}

pub fn contains(error: &Error, needles: &[&str]) {
    let text = error.to_string();
    for needle in needles {
        assert!(text.contains(needle), "{needle:?} is not in {text:?}");
    }
}

#[test]
fn bad_arguments_never_reach_nccl() {
    let fake = Fake::new(23203);
    let id = UniqueId::from_bytes([7; 128]);
    world(|world| world.log.clear());
    for (size, rank) in [(0, 0), (2, 2), (2, 9), (u32::MAX, 0)] {
        let error =
            Communicator::init(&fake.nccl, &fake.device, &id, size, rank, &Config::new()).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    }
    for ids in [&[][..], &[id; 3]] {
        let error = Communicator::begin(&fake.nccl, &fake.device, ids, 2, 0, &Config::new()).unwrap_err();
        assert!(matches!(error, Error::Argument { what: "the number of identifiers", .. }), "{error}");
    }
    assert!(matches!(MemAlloc::new(&fake.nccl, &fake.device, 0), Err(Error::Argument { .. })));
    world(|world| assert!(world.log.is_empty(), "{:?}", world.log));

    let comm = fake.comm();
    let window = comm.register(fake.memory(&[(MIB2, Kind::Device)]), WindowFlags::empty()).unwrap();
    world(|world| world.log.clear());
    assert!(matches!(window.lsa_pointer(2, 0), Err(Error::Argument { what: "the LSA rank", .. })));
    assert!(matches!(window.lsa_pointer(0, MIB2), Err(Error::Argument { what: "the offset", .. })));
    assert!(matches!(window.peer_pointer(2, 0), Err(Error::Argument { what: "the rank", .. })));
    assert!(matches!(window.multimem_pointer(MIB2), Err(Error::Argument { .. })));
    assert!(matches!(comm.split(Some(u32::MAX), 0, &Config::new()), Err(Error::Argument { .. })));
    for list in [&[][..], &[1], &[2]] {
        assert!(
            matches!(comm.shrink(list, Shrink::Default, &Config::new()), Err(Error::Argument { .. })),
            "{list:?}"
        );
    }
    for size in [2, 1, u32::MAX] {
        assert!(matches!(comm.grow(size, None, &Config::new()), Err(Error::Argument { .. })), "{size}");
    }
    world(|world| assert!(world.log.is_empty(), "{:?}", world.log));
    window.close().unwrap();
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn success_with_nothing_is_an_error() {
    let nothing = |function| world(|world| world.nothing.insert(function));
    let fake = Fake::new(23203);
    nothing("ncclCommInitRankConfig");
    let error = fake.try_comm(&Fake::config()).unwrap_err();
    contains(&error, &["creating rank 1 of 2", "ncclCommInitRankConfig succeeded, but gave no communicator"]);
    nothing("ncclMemAlloc");
    let error = MemAlloc::new(&fake.nccl, &fake.device, 5).unwrap_err();
    contains(&error, &["allocating 5 bytes on CUDA device 1", "ncclMemAlloc succeeded, but gave no memory"]);
    world(|world| world.nothing.clear());

    let comm = fake.comm();
    let memory = fake.memory(&[(MIB2, Kind::Device)]);
    nothing("ncclCommWindowRegister");
    let error = comm.register(memory.clone(), WindowFlags::empty()).unwrap_err();
    contains(&error, &["gave no window", "NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"]);
    world(|world| world.nothing.clear());
    nothing("ncclTeamLsa");
    contains(&comm.team_lsa().unwrap_err(), &["ncclTeamLsa succeeded, but gave no team"]);
    world(|world| world.nothing.clear());
    let window = comm.register(memory, WindowFlags::empty()).unwrap();
    nothing("ncclGetLsaDevicePointer");
    contains(
        &window.lsa_pointer(0, 0).unwrap_err(),
        &["ncclGetLsaDevicePointer succeeded, but gave no address"],
    );
    // For these two nothing is an answer.
    nothing("ncclGetPeerDevicePointer");
    assert_eq!(window.peer_pointer(0, 0).unwrap(), None);
    nothing("ncclCommSplit");
    contains(
        &comm.split(Some(1), 0, &Fake::config()).unwrap_err(),
        &["ncclCommSplit succeeded, but gave no communicator"],
    );
    nothing("ncclCommShrink");
    contains(&comm.shrink(&[0], Shrink::Default, &Fake::config()).unwrap_err(), &["gave no communicator"]);
    nothing("ncclDevCommCreate");
    let error = comm.create_dev_comm(&DevCommRequirements::new()).unwrap_err();
    contains(&error, &["ncclDevCommCreate succeeded, but gave no device communicator"]);
    world(|world| {
        assert!(
            !world.log.contains(&"ncclDevCommDestroy"),
            "a block that NCCL has not written is not given to it"
        );
    });
    window.close().unwrap();
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn a_communicator_without_symmetric_memory_says_so_in_every_version() {
    for version in [22803, 22809, 22907, 23007, 23102, 23203] {
        let fake = Fake::new(version);
        world(|world| world.device_api = false);
        let comm = fake.comm();
        let memory = fake.memory(&[(MIB2, Kind::Device)]);
        // From 2.29 on null; in 2.28 a handle that is no window, which is given back.
        let error = comm.register(memory, WindowFlags::empty()).unwrap_err();
        contains(&error, &["gave no window", "NCCL_CUMEM_ENABLE"]);
        if version >= 22900 {
            let error = comm.create_dev_comm(&DevCommRequirements::new()).unwrap_err();
            contains(&error, &["a device communicator cannot be had", "NCCL_CUMEM_ENABLE"]);
        } else {
            fail("ncclDevCommCreate", USAGE);
            let error = comm.create_dev_comm(&DevCommRequirements::new()).unwrap_err();
            contains(&error, &["ncclDevCommCreate failed: ncclInvalidUsage (5)", "NCCL_CUMEM_ENABLE"]);
        }
        comm.close().unwrap();
        fake.finish();
    }
}

#[test]
fn a_single_rank_has_no_windows_in_the_first_version() {
    for (version, advice) in [(22803, "use two ranks, or NCCL 2.28.9 or newer"), (22809, "NCCL_CUMEM_ENABLE")]
    {
        let fake = Fake::new(version);
        world(|world| (world.device_api, world.lsa_size) = (false, 1));
        let id = UniqueId::from_bytes([7; 128]);
        let comm = Communicator::init(&fake.nccl, &fake.device, &id, 1, 0, &Fake::config()).unwrap();
        let memory = fake.memory(&[(MIB2, Kind::Device)]);
        let error = comm.register(memory, WindowFlags::empty()).unwrap_err();
        assert!(matches!(error, Error::Nothing { .. }), "{error}");
        contains(&error, &["on rank 0 of 1", "gave no window", advice]);
        comm.close().unwrap();
        fake.finish();
    }
}

#[test]
fn failures_name_function_code_text_and_remedy() {
    let fake = Fake::new(22809);
    says("init.cc:700 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 18000");
    fail_later("ncclCommInitRankConfig", USAGE);
    let error = fake.try_comm(&Fake::config()).unwrap_err();
    assert_eq!(error.result(), Some(USAGE));
    let Error::Nccl(nccl) = &error else { panic!("{error}") };
    assert_eq!(nccl.function, Function::ncclCommInitRankConfig);
    contains(
        &error,
        &["creating rank 1 of 2 on CUDA device 1", "Duplicate GPU", "NCCL_MULTI_RANK_GPU_ENABLE=1"],
    );
    world(|world| assert!(world.comms.is_empty(), "a communicator that failed to start is not left behind"));
    says("");
    fail("ncclCommInitRankConfig", ncclResult_t::ncclUnhandledCudaError);
    contains(
        &fake.try_comm(&Fake::config()).unwrap_err(),
        &["ncclUnhandledCudaError (1)", "a GPU and a driver"],
    );
    fail("ncclGetUniqueId", ncclResult_t::ncclSystemError);
    contains(&UniqueId::new(&fake.nccl).unwrap_err(), &["making a unique id", "NCCL_SOCKET_IFNAME"]);
    fail("ncclMemAlloc", ncclResult_t(4711));
    contains(&MemAlloc::new(&fake.nccl, &fake.device, 9).unwrap_err(), &["unknown result code 4711"]);
    let error = Device::with_driver(fake.device.driver(), 7).unwrap_err();
    contains(&error, &["opening CUDA device 7", "CUDA_ERROR_INVALID_DEVICE"]);
    fake.finish();
}

#[test]
fn each_call_of_a_communicator_may_fail_and_leaves_it_usable() {
    for version in [22803, 22809, 23203] {
        let fake = Fake::new(version);
        let comm = fake.comm();
        let memory = fake.memory(&[(MIB2, Kind::Device)]);
        let register = || comm.register(memory.clone(), WindowFlags::empty());
        fail("ncclCommWindowRegister", USAGE);
        contains(
            &register().unwrap_err(),
            &["registering 2097152 bytes at 0x", "ncclCommWindowRegister failed"],
        );
        fail_later("ncclCommWindowRegister", ncclResult_t::ncclSystemError);
        contains(&register().unwrap_err(), &["ncclCommWindowRegister failed: ncclSystemError (2)"]);
        fail("ncclDevCommCreate", ncclResult_t::ncclInternalError);
        let error = comm.create_dev_comm(&DevCommRequirements::new()).unwrap_err();
        contains(&error, &["ncclDevCommCreate failed: ncclInternalError (3)"]);
        fail_later("ncclDevCommCreate", ncclResult_t::ncclRemoteError);
        let error = comm.create_dev_comm(&DevCommRequirements::new()).unwrap_err();
        contains(&error, &["creating a device communicator on rank 1 of 2", "another rank has failed"]);
        for function in ["ncclCommSplit", "ncclCommShrink"] {
            fail(function, USAGE);
            let error = if function == "ncclCommSplit" {
                comm.split(Some(1), 0, &Fake::config()).map(drop).unwrap_err()
            } else {
                comm.shrink(&[0], Shrink::Default, &Fake::config()).map(drop).unwrap_err()
            };
            contains(&error, &[function, "ncclInvalidUsage"]);
        }
        // A child that does not tell its rank is not left behind.
        fail("ncclCommUserRank", ncclResult_t::ncclInternalError);
        let error = comm.split(Some(1), 0, &Fake::config()).map(drop).unwrap_err();
        contains(&error, &["splitting rank 1 of 2", "ncclCommUserRank failed"]);
        world(|world| assert_eq!(world.comms.len(), 1));
        fail("ncclCommGetAsyncError", ncclResult_t::ncclInvalidArgument);
        contains(&comm.ready().unwrap_err(), &["ncclCommGetAsyncError failed"]);

        let window = register().unwrap();
        let dev_comm = comm.create_dev_comm(&DevCommRequirements::new()).unwrap();
        if version > 22900 {
            for function in [
                "ncclGetLsaDevicePointer",
                "ncclGetPeerDevicePointer",
                "ncclCommQueryProperties",
                "ncclCommGrow",
            ] {
                fail(function, ncclResult_t::ncclInvalidArgument);
            }
            contains(&window.lsa_pointer(0, 0).unwrap_err(), &["ncclGetLsaDevicePointer failed"]);
            contains(&window.peer_pointer(0, 0).unwrap_err(), &["ncclGetPeerDevicePointer failed"]);
            contains(&comm.properties().unwrap_err(), &["ncclCommQueryProperties failed"]);
            contains(&comm.grow(3, None, &Fake::config()).unwrap_err(), &["ncclCommGrow failed"]);
        }
        // What cannot be closed is kept for the communicator's end.
        fail("ncclDevCommDestroy", USAGE);
        contains(
            &dev_comm.close().unwrap_err(),
            &["closing a device communicator", "ncclDevCommDestroy failed"],
        );
        fail("ncclCommWindowDeregister", USAGE);
        contains(&window.close().unwrap_err(), &["closing a window", "ncclCommWindowDeregister failed"]);
        assert_eq!(Arc::strong_count(&memory), 2);
        comm.close().unwrap();
        assert_eq!(Arc::strong_count(&memory), 1);
        fake.finish();
    }
}

#[test]
fn a_peer_that_does_not_come_becomes_an_error_in_time() {
    let stuck = |function| world(|world| world.stuck.insert(function));
    let config = Config::new().timeout(SHORT);
    let timed = |error: &Error, start: Instant| {
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let Error::Timeout { after, aborted: true, .. } = error else { panic!("{error}") };
        assert_eq!(*after, SHORT);
        contains(error, &["did not end within 100ms", "was aborted"]);
    };

    let fake = Fake::new(23203);
    stuck("ncclCommInitRankConfig");
    let start = Instant::now();
    timed(&fake.try_comm(&config).unwrap_err(), start);
    world(|world| world.stuck.clear());

    // In register: the communicator is gone, and says so from then on.
    let comm = fake.try_comm(&config).unwrap();
    let memory = fake.memory(&[(MIB2, Kind::Device)]);
    let window = comm.register(memory.clone(), WindowFlags::empty()).unwrap();
    let dev_comm = comm.create_dev_comm(&DevCommRequirements::new()).unwrap();
    stuck("ncclCommWindowRegister");
    let start = Instant::now();
    timed(&comm.register(memory.clone(), WindowFlags::empty()).unwrap_err(), start);
    let gone = |error: Error| assert!(matches!(error, Error::Gone { .. }), "{error}");
    gone(comm.register(memory.clone(), WindowFlags::empty()).unwrap_err());
    gone(comm.ready().unwrap_err());
    gone(comm.properties().unwrap_err());
    gone(comm.team_lsa().unwrap_err());
    gone(window.lsa_pointer(0, 0).unwrap_err());
    gone(window.close().unwrap_err());
    gone(dev_comm.close().unwrap_err());
    assert_eq!(Arc::strong_count(&memory), 1, "the memory is its owner's again");
    let NotClosed { error, communicator, .. } = comm.close().unwrap_err();
    gone(error);
    assert!(communicator.is_none());
    world(|world| world.stuck.clear());

    // In every other collective operation.
    for function in [
        "ncclDevCommCreate",
        "ncclCommSplit",
        "ncclCommShrink",
        "ncclCommRevoke",
        "ncclCommGrow",
        "ncclCommFinalize",
    ] {
        let comm = fake.try_comm(&config).unwrap();
        stuck(function);
        let start = Instant::now();
        let error = match function {
            "ncclDevCommCreate" => comm.create_dev_comm(&DevCommRequirements::new()).map(drop).unwrap_err(),
            "ncclCommSplit" => comm.split(Some(0), 0, &config).map(drop).unwrap_err(),
            "ncclCommShrink" => comm.shrink(&[0], Shrink::Default, &config).map(drop).unwrap_err(),
            "ncclCommRevoke" => comm.revoke().unwrap_err(),
            "ncclCommGrow" => comm.grow(3, None, &config).map(drop).unwrap_err(),
            _ => {
                timed(&Error::from(comm.close().unwrap_err()), start);
                world(|world| world.stuck.clear());
                continue;
            }
        };
        timed(&error, start);
        gone(comm.abort().unwrap_err());
        world(|world| world.stuck.clear());
    }
    fake.finish();
}

#[test]
fn closing_may_fail_on_the_way() {
    let fake = Fake::new(23203);
    for (function, later) in
        [("ncclCommFinalize", false), ("ncclCommFinalize", true), ("ncclCommDestroy", false)]
    {
        let comm = fake.comm();
        if later {
            fail_later(function, ncclResult_t::ncclRemoteError)
        } else {
            fail(function, ncclResult_t::ncclRemoteError)
        }
        let failure = comm.close().unwrap_err();
        assert!(failure.communicator.is_none());
        contains(&failure.error, &["closing rank 1 of 2", function, "ncclRemoteError (6)"]);
        world(|world| assert!(world.comms.is_empty(), "aborted, or destroyed all the same"));
    }
    // An operation that was given up keeps its communicator busy; an abort ends both.
    let comm = fake.comm();
    world(|world| world.stuck.insert("ncclCommWindowRegister"));
    drop(comm.begin_register(fake.memory(&[(MIB2, Kind::Device)]), WindowFlags::empty()).unwrap());
    let NotClosed { error, communicator, .. } = comm.close().unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    communicator.unwrap().abort().unwrap();
    fake.finish();
}

#[test]
fn structs_that_make_no_sense_are_refused() {
    for version in [22803, 22809, 22907, 23007, 23102, 23203] {
        let fake = Fake::new(version);
        let comm = fake.comm();
        world(|world| world.garbled = true);
        if version > 22900 {
            let error = comm.properties().unwrap_err();
            assert!(matches!(error, Error::Layout { what: "ncclCommProperties", .. }), "{error}");
        } else {
            let error = comm.create_dev_comm(&DevCommRequirements::new()).unwrap_err();
            assert!(matches!(error, Error::Layout { what: "ncclDevComm", .. }), "{error}");
            world(|world| assert_eq!(world.dev_comms, 0, "given back"));
        }
        comm.close().unwrap();
        fake.finish();
    }
}

#[test]
fn what_the_library_lacks_is_named() {
    let fake = Fake::new(22809);
    let comm = fake.comm();
    for error in [comm.grow_id().unwrap_err(), comm.grow(3, None, &Fake::config()).unwrap_err()] {
        assert!(matches!(error, Error::Missing(_)), "{error}");
        contains(&error, &["is not in NCCL 2.28.9", "NCCL 2.29.7 has it"]);
    }
    let id = UniqueId::from_bytes([0; 128]);
    let error = Communicator::join(&fake.nccl, &fake.device, &id, 3, 2, &Fake::config()).unwrap_err();
    assert!(matches!(error, Error::Missing(_)), "{error}");
    let requirements = DevCommRequirements::new().gin(GinConnection::Rail);
    contains(
        &comm.create_dev_comm(&requirements).unwrap_err(),
        &["a railed GIN connection", "2.29.7 or newer"],
    );
    comm.close().unwrap();
    fake.finish();

    // 2.28.3 has device communicators without GIN, and cannot be revoked.
    let fake = Fake::new(22803);
    let comm = fake.comm();
    for (requirements, what) in [
        (DevCommRequirements::new().gin(GinConnection::Full), "GIN cannot be had"),
        (DevCommRequirements::new().barriers(1), "barriers over all ranks cannot be had"),
        (DevCommRequirements::new().all_to_all(1, 8), "all_to_all cannot be had"),
    ] {
        let error = comm.create_dev_comm(&requirements).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        contains(&error, &[what, "it needs NCCL 2.28.7 or newer, and 2.28.3 is loaded"]);
    }
    let error = comm.revoke().unwrap_err();
    assert!(matches!(error, Error::Missing(_)), "{error}");
    contains(&error, &["ncclCommRevoke is not in NCCL 2.28.3", "NCCL 2.28.9 has it"]);
    comm.close().unwrap();
    fake.finish();

    // A library that lacks what every version has: an error at the call, and nothing lost.
    let fake = Fake::new(23203);
    world(|world| {
        world.missing.extend(["ncclCommInitRankConfig", "ncclDevCommCreate", "ncclCommWindowRegister"])
    });
    assert!(matches!(fake.try_comm(&Fake::config()), Err(Error::Missing(_))));
    world(|world| world.missing.clear());
    fake.finish();
}

#[test]
fn a_window_whose_team_cannot_be_told_is_given_back() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    world(|world| world.nothing.insert("ncclTeamLsa"));
    let error = comm.register(fake.memory(&[(MIB2, Kind::Device)]), WindowFlags::empty()).unwrap_err();
    contains(&error, &["ncclTeamLsa succeeded, but gave no team"]);
    world(|world| assert!(world.windows.is_empty()));
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn an_error_while_polling_ends_the_operation() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    fail_later("ncclCommWindowRegister", USAGE);
    let memory = fake.memory(&[(MIB2, Kind::Device)]);
    let mut pending = comm.begin_register(memory.clone(), WindowFlags::empty()).unwrap();
    let error = loop {
        match pending.poll() {
            Ok(None) => {}
            Ok(Some(_)) => panic!("it was to fail"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.result(), Some(USAGE));
    assert_eq!(Arc::strong_count(&memory), 1, "the memory is not held any more");
    comm.close().unwrap();
    fake.finish();
}
