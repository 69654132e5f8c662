//! Communicators that come from others, and several in one thread.

use crate::rank::{MIB, Rank, devices, place, ranks, run};
use nccl_gin::sys::{Function, Generation};
use nccl_gin::{Communicator, Device, Error, Group, MemAlloc, Shrink, UniqueId, WindowFlags};
use std::sync::Arc;

#[test]
fn communicators_come_from_others() {
    const TEST: &str = "communicators::communicators_come_from_others";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, 2) };
    let comm = rank.comm("id");
    // Both in one colour, in the other order; then each alone; then only one of them.
    let reversed = comm.split(Some(0), -(rank.rank as i32), &Rank::config()).unwrap().expect("a colour");
    assert_eq!((reversed.rank(), reversed.size()), (1 - rank.rank, 2));
    let alone = comm.split(Some(rank.rank), 0, &Rank::config()).unwrap().expect("a colour");
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    let one = comm.split((rank.rank == 0).then_some(0), 0, &Rank::config()).unwrap();
    assert_eq!(one.is_some(), rank.rank == 0);
    // A window of a split communicator, with its own rank order.
    let window = reversed.register(rank.memory(2 * MIB), WindowFlags::empty()).unwrap();
    assert_eq!(window.team_lsa().size, 2);
    window.close().unwrap();
    for child in [Some(reversed), Some(alone), one].into_iter().flatten() {
        child.close().unwrap();
    }
    rank.meeting.meet("split");
    // Rank 0 goes on alone, and rank 1 comes back to it.
    if rank.rank == 0 {
        let shrunk = comm.shrink(&[1], Shrink::Default, &Rank::config()).unwrap();
        assert_eq!((shrunk.rank(), shrunk.size()), (0, 1));
        if rank.nccl.generation() <= Generation::V2_28 {
            assert!(matches!(shrunk.grow_id(), Err(Error::Missing(_))));
        } else {
            let id = shrunk.grow_id().unwrap();
            rank.meeting.leave("grow", id.as_bytes());
            let grown = shrunk.grow(2, Some(&id), &Rank::config()).unwrap();
            assert_eq!((grown.rank(), grown.size()), (0, 2));
            rank.meeting.meet("grown");
            grown.close().unwrap();
        }
        shrunk.close().unwrap();
    } else if rank.nccl.generation() > Generation::V2_28 {
        let id = UniqueId::from_bytes(rank.meeting.find("grow").try_into().expect("128 bytes"));
        let grown = Communicator::join(rank.nccl, &rank.device, &id, 2, 1, &Rank::config()).unwrap();
        assert_eq!((grown.rank(), grown.size()), (1, 2));
        rank.meeting.meet("grown");
        grown.close().unwrap();
    }
    rank.meeting.meet("shrunk");
    if rank.nccl.has(Function::ncclCommRevoke) {
        comm.revoke().unwrap();
    } else {
        assert!(matches!(comm.revoke(), Err(Error::Missing(_))));
    }
    comm.abort().unwrap();
}

#[test]
fn one_thread_drives_two_ranks() {
    const TEST: &str = "communicators::one_thread_drives_two_ranks";
    let Some(rank) = Rank::here(TEST) else {
        return place(TEST, 2).map_or((), |environment| run(TEST, 1, &environment));
    };
    let devices = [0, 1 % devices()].map(|ordinal| Device::open(ordinal as i32).unwrap());
    let id = UniqueId::new(rank.nccl).unwrap();
    let begin = |index: usize| {
        Communicator::begin(rank.nccl, &devices[index], &[id], 2, index as u32, &Rank::config()).unwrap()
    };
    let comms = [begin(0), begin(1)].map(|pending| pending.wait().unwrap());
    let memory = [0, 1].map(|i| Arc::new(MemAlloc::new(rank.nccl, &devices[i], 2 * MIB).unwrap()));
    let group = Group::start(rank.nccl).unwrap();
    let pending = [0, 1].map(|i| comms[i].begin_register(memory[i].clone(), WindowFlags::empty()).unwrap());
    assert!(matches!(
        comms[0].register(memory[0].clone(), WindowFlags::empty()),
        Err(Error::GroupOpen { .. })
    ));
    group.end().unwrap();
    let windows = pending.map(|pending| pending.wait().unwrap());
    assert_ne!(windows[0].lsa_pointer(1, 0).unwrap(), windows[0].lsa_pointer(0, 0).unwrap());
    for window in windows {
        window.close().unwrap();
    }
    drop(memory);
    // Closing is collective too: both at once.
    std::thread::scope(|scope| {
        for thread in comms.map(|comm| scope.spawn(|| comm.close())) {
            thread.join().expect("closing does not panic").unwrap();
        }
    });
}
