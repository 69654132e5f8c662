//! From a communicator to its end, with each generation of NCCL, on the fakes.

use crate::fake::{Fake, Kind, world};
use nccl_gin::{
    Communicator, Config, DevCommRequirements, Error, ForeignMemory, Group, MemAlloc, NotClosed, Shrink,
    UniqueId, WindowFlags, WindowMemory,
};
use std::sync::Arc;

const VERSIONS: [u32; 8] = [22803, 22807, 22809, 22907, 23003, 23007, 23102, 23203];
const MIB2: usize = 1 << 21;

#[test]
fn everything_is_made_used_and_given_back() {
    for version in VERSIONS {
        let fake = Fake::new(version);
        let comm = fake.comm();
        assert_eq!((comm.rank(), comm.size()), (1, 2));
        assert!(comm.ready().unwrap());
        let memory = Arc::new(MemAlloc::new(&fake.nccl, &fake.device, 5000).unwrap());
        let window = comm.register(memory.clone(), WindowFlags::empty()).unwrap();
        assert_eq!((window.address(), window.len()), (memory.address().addr().get(), 5000));
        // The same addresses from the function and, in 2.28, from the window's struct.
        assert_eq!(window.lsa_pointers(16).unwrap(), [0x7e00_0000_0010, 0x7e04_0000_0010]);
        assert_eq!(window.peer_pointer(1, 0).unwrap(), Some(0x7e04_0000_0000));
        assert_eq!(
            window.multimem_pointer(0).unwrap(),
            None,
            "no device communicator has asked for multicast"
        );

        let dev_comm = comm.create_dev_comm(&DevCommRequirements::new().lsa_barriers(3)).unwrap();
        let info = dev_comm.info();
        assert_eq!((info.rank, info.size, info.lsa_rank, info.lsa_size, info.lsa_barriers), (1, 2, 1, 2, 3));
        assert_eq!(dev_comm.as_bytes().len(), fake.nccl.generation().dev_comm_size());
        assert_eq!(dev_comm.declared_version().code(), version);
        assert_eq!(dev_comm.as_ptr().addr() % 16, 0);

        dev_comm.close().unwrap();
        window.close().unwrap();
        assert_eq!(Arc::strong_count(&memory), 1, "the window has let go");
        drop(memory);
        comm.close().unwrap();
        fake.finish();
    }
}

#[test]
fn structs_are_of_the_loaded_version() {
    for version in VERSIONS {
        let fake = Fake::new(version);
        let comm = fake.comm();
        let dev_comm = comm.create_dev_comm(&DevCommRequirements::new().lsa_barriers(9)).unwrap();
        world(|world| {
            let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let generation = fake.nccl.generation();
            assert_eq!(word(&world.config, 0) as usize, generation.config_size());
            assert_eq!(
                (word(&world.config, 8), word(&world.config, 12), word(&world.config, 16)),
                (0xcafe_beef, version, 0)
            );
            if version < 22900 {
                let barriers = if version == 22803 { 20 } else { 24 };
                assert_eq!(world.requirements.len(), generation.requirements_size());
                assert_eq!(
                    world.requirements[..barriers],
                    [0; 24][..barriers],
                    "no size, no magic, no lists"
                );
                assert_eq!(word(&world.requirements, barriers), 9);
                assert!(!world.log.contains(&"ncclCommQueryProperties"));
            } else {
                assert_eq!(word(&world.requirements, 0) as usize, generation.requirements_size());
                assert_eq!(
                    (word(&world.requirements, 8), word(&world.requirements, 12)),
                    (0xcafe_beef, version)
                );
                assert_eq!(word(&world.requirements, 40), 9);
                assert_eq!(Some(word(&world.properties, 0) as usize), generation.properties_size());
                assert_eq!((word(&world.properties, 8), word(&world.properties, 12)), (0xcafe_beef, version));
            }
        });
        dev_comm.close().unwrap();
        comm.close().unwrap();
        fake.finish();
    }
}

#[test]
fn properties_are_told_where_the_library_tells_them() {
    let fake = Fake::new(22809);
    let comm = fake.comm();
    let properties = comm.properties().unwrap();
    assert_eq!(
        (properties.rank, properties.size, properties.cuda_device, properties.support),
        (1, 2, 1, None)
    );
    comm.close().unwrap();
    fake.finish();
    let fake = Fake::new(23203);
    let comm = fake.comm();
    let support = comm.properties().unwrap().support.unwrap();
    assert!(support.device_api && !support.multimem && support.gin.is_none());
    assert_eq!((support.lsa_teams, support.device_communicator_size), (1, Some(248)));
    assert_eq!(
        (comm.team_world().size, comm.team_lsa().unwrap().size, comm.team_rail().unwrap().size),
        (2, 2, 1)
    );
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn memory_of_every_kind_becomes_a_window() {
    let fake = Fake::new(23007);
    let comm = fake.comm();
    // A segmented range: device memory, host memory, device memory.
    let pieces = [(MIB2, Kind::Device), (MIB2, Kind::Host), (2 * MIB2, Kind::Device)];
    let segmented = fake.memory(&pieces);
    let window = comm.register(segmented.clone(), WindowFlags::empty()).unwrap();
    assert_eq!(window.len(), 4 * MIB2);
    window.close().unwrap();
    // A foreign pointer.
    // SAFETY: the fakes never follow the address.
    let foreign = unsafe { ForeignMemory::new(segmented.address(), MIB2) };
    comm.register(Arc::new(foreign), WindowFlags::empty()).unwrap().close().unwrap();
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn a_communicator_in_use_is_not_closed_and_comes_back() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    let window = comm.register(fake.memory(&[(MIB2, Kind::Device)]), WindowFlags::empty()).unwrap();
    let dev_comm = comm.create_dev_comm(&DevCommRequirements::new()).unwrap();
    let NotClosed { error, communicator, .. } = comm.close().unwrap_err();
    assert_eq!(error, Error::InUse { windows: 1, device_communicators: 1 });
    let comm = communicator.expect("nothing has happened to it");
    dev_comm.close().unwrap();
    window.close().unwrap();
    assert!(comm.ready().unwrap());
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn what_is_dropped_is_kept_until_the_communicator_is_closed() {
    let fake = Fake::new(23102);
    let comm = fake.comm();
    let memory = Arc::new(MemAlloc::new(&fake.nccl, &fake.device, MIB2).unwrap());
    drop(comm.register(memory.clone(), WindowFlags::empty()).unwrap());
    drop(comm.create_dev_comm(&DevCommRequirements::new()).unwrap());
    world(|world| assert_eq!((world.windows.len(), world.dev_comms), (1, 1)));
    assert_eq!(Arc::strong_count(&memory), 2, "the memory is kept for the window");
    world(|world| world.log.clear());
    comm.close().unwrap();
    world(|world| {
        let order = ["ncclDevCommDestroy", "ncclCommWindowDeregister", "ncclCommFinalize", "ncclCommDestroy"];
        assert_eq!(world.log, order);
    });
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(memory);
    fake.finish();
}

#[test]
fn a_dropped_communicator_takes_part_in_nothing() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    world(|world| world.log.clear());
    drop(comm);
    world(|world| {
        assert!(world.log.is_empty(), "{:?}", world.log);
        assert_eq!(world.comms.len(), 1);
    });
}

#[test]
fn communicators_come_from_others() {
    let fake = Fake::new(23007);
    let comm = fake.comm();
    let child = comm.split(Some(3), 1, &Fake::config()).unwrap().expect("a colour makes a communicator");
    assert_eq!((child.rank(), child.size()), (1, 2));
    assert!(comm.split(None, 0, &Fake::config()).unwrap().is_none());
    let shrunk = comm.shrink(&[0, 0], Shrink::Abort, &Fake::config()).unwrap();
    assert_eq!((shrunk.rank(), shrunk.size()), (0, 1));
    world(|world| assert_eq!(world.exclude, [0, 1], "the list without doubles, then the flags"));
    assert_eq!(comm.grow_id().unwrap().as_bytes(), &[5; 128]);
    let grown = comm.grow(4, None, &Fake::config()).unwrap();
    assert_eq!((grown.rank(), grown.size()), (1, 4));
    let joined =
        Communicator::join(&fake.nccl, &fake.device, &UniqueId::from_bytes([5; 128]), 4, 3, &Fake::config())
            .unwrap();
    assert_eq!((joined.rank(), joined.size()), (3, 4));
    let many = [UniqueId::from_bytes([7; 128]); 2];
    let scalable =
        Communicator::begin(&fake.nccl, &fake.device, &many, 2, 0, &Fake::config()).unwrap().wait().unwrap();
    for comm in [child, shrunk, grown, joined, scalable] {
        comm.close().unwrap();
    }
    comm.revoke().unwrap();
    comm.abort().unwrap();
    fake.finish();
}

#[test]
fn operations_can_be_begun_and_polled() {
    let fake = Fake::new(23203);
    world(|world| world.polls = 3);
    let id = UniqueId::from_bytes([7; 128]);
    let mut pending = Communicator::begin(&fake.nccl, &fake.device, &[id], 2, 0, &Config::new()).unwrap();
    let mut polls = 0;
    let comm = loop {
        match pending.poll().unwrap() {
            Some(comm) => break comm,
            None => polls += 1,
        }
    };
    assert_eq!(polls, 3);
    assert!(matches!(pending.poll(), Err(Error::Gone { .. })));

    let memory = fake.memory(&[(MIB2, Kind::Device)]);
    let mut window = comm.begin_register(memory.clone(), WindowFlags::empty()).unwrap();
    assert!(window.poll().unwrap().is_none());
    assert!(!comm.ready().unwrap());
    // One operation at a time.
    assert!(matches!(comm.begin_register(memory, WindowFlags::empty()), Err(Error::Busy { .. })));
    assert!(matches!(comm.begin_dev_comm(&DevCommRequirements::new()), Err(Error::Busy { .. })));
    let NotClosed { error, communicator, .. } = comm.close().unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    let comm = communicator.unwrap();
    window.wait().unwrap().close().unwrap();
    assert!(comm.wait(std::time::Duration::from_secs(1)).unwrap());
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn an_operation_that_is_dropped_goes_on_and_is_cleaned_up() {
    let fake = Fake::new(23203);
    world(|world| world.polls = 2);
    let comm = fake.comm();
    let memory = Arc::new(MemAlloc::new(&fake.nccl, &fake.device, MIB2).unwrap());
    drop(comm.begin_register(memory.clone(), WindowFlags::empty()).unwrap());
    drop_dev_comm(&comm);
    // Both have ended in the background by now; what came of them goes with the communicator.
    assert_eq!(Arc::strong_count(&memory), 2);
    comm.close().unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(memory);
    fake.finish();
}

/// Begins a device communicator, once the operation before it has ended, and drops it.
fn drop_dev_comm(comm: &Communicator) {
    let requirements = DevCommRequirements::new();
    let mut refused = 0;
    loop {
        match comm.begin_dev_comm(&requirements) {
            Ok(pending) => break drop(pending),
            Err(Error::Busy { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(refused, 2, "the operation before it takes two polls");
    while !comm.ready().unwrap() {}
}

#[test]
fn a_group_starts_operations_together() {
    let fake = Fake::new(23203);
    let (one, two) = (fake.comm(), fake.comm());
    let group = Group::start(&fake.nccl).unwrap();
    let memory = fake.memory(&[(MIB2, Kind::Device)]);
    let mut first = one.begin_register(memory.clone(), WindowFlags::empty()).unwrap();
    let second = two.begin_register(memory.clone(), WindowFlags::empty()).unwrap();
    // Nothing ends before the group does, so that nothing may wait for it.
    assert!(matches!(first.poll(), Err(Error::GroupOpen { .. })));
    assert!(matches!(one.register(memory, WindowFlags::empty()), Err(Error::GroupOpen { .. })));
    assert!(matches!(fake.try_comm(&Fake::config()), Err(Error::GroupOpen { .. })));
    assert!(matches!(one.create_dev_comm(&DevCommRequirements::new()), Err(Error::GroupOpen { .. })));
    assert!(matches!(one.split(None, 0, &Fake::config()), Err(Error::GroupOpen { .. })));
    assert!(matches!(one.revoke(), Err(Error::GroupOpen { .. })));
    assert!(matches!(Group::start(&fake.nccl), Err(Error::GroupOpen { .. })));
    group.end().unwrap();
    first.wait().unwrap().close().unwrap();
    second.wait().unwrap().close().unwrap();
    // Dropped, a group ends too; then calls are not queued any more.
    drop(Group::start(&fake.nccl).unwrap());
    one.close().unwrap();
    two.close().unwrap();
    world(|world| world.fail.insert("ncclGroupEnd", nccl_gin::sys::ncclResult_t::ncclInvalidUsage));
    let error = Group::start(&fake.nccl).unwrap().end().unwrap_err();
    assert!(error.to_string().contains("ncclGroupEnd failed: ncclInvalidUsage (5)"), "{error}");
    fake.finish();
}

#[test]
fn a_communicator_can_be_taken_over() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    let raw = comm.as_raw();
    std::mem::forget(comm);
    // SAFETY: the communicator is alive, and its first owner is forgotten.
    let comm = unsafe { Communicator::from_raw(&fake.nccl, &fake.device, raw, &Fake::config()) }.unwrap();
    assert_eq!((comm.rank(), comm.size()), (1, 2));
    comm.close().unwrap();
    world(|world| assert!(world.comms.is_empty()));
}
