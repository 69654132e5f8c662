//! Several of NCCL's threads at once: in one connection, and in two between the same ranks, while memory comes and goes.

use crate::harness::{DELAYED, MIB, Rank, ranks};
use crate::memory::Memory;
use crate::wire::{At, Wire};
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA};
use std::ffi::c_void;

/// Operations of each thread.
const COUNT: u64 = 1200;
/// Operations of a thread that may be under way.
const DEPTH: usize = 64;
/// Contexts of a connection, and so threads that use it.
const CONTEXTS: usize = 2;
/// The word of the window that every thread adds to.
const WORD: u64 = 0;

/// A connection as the threads of a process share it, and what is registered there.
struct Shared {
    wire: Wire,
    indexed: Memory,
    signals: *mut c_void,
    window: *mut c_void,
}

// SAFETY: the threads call the plugin's tables only, as several threads of NCCL do; the board is left to the thread that made the connection.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(rank: Rank, window: Memory) -> Self {
        let wire = rank.connect();
        let indexed = Memory::device(&wire.here, 2 * MIB, false);
        let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
        let window = wire.register(window, PTR_CUDA, MR_FORCE_ORDER);
        Self { wire, indexed, signals, window }
    }

    /// One thread's part: puts with a signal of its own, and adds to the word that is everybody's.
    fn work(&self, connection: usize, context: usize) {
        let (wire, to) = (&self.wire, 1 - self.wire.here.rank);
        let mut under_way = std::collections::VecDeque::new();
        for index in 0..COUNT {
            if under_way.len() == DEPTH
                && let Some(oldest) = under_way.pop_front()
            {
                wire.wait(oldest);
            }
            let request = if index % 2 == 0 {
                let at = place(connection, context, index);
                let (from, place) =
                    (At(self.window, (MIB + at) as u64), At(self.window, (2 * MIB + at) as u64));
                wire.put_signal(context as i32, from, 8, place, to, At(self.signals, 8 * context as u64), 1)
            } else {
                wire.signal(context as i32, to, At(self.window, WORD), 3)
            };
            under_way.push_back(request);
        }
        wire.wait_all(under_way);
    }

    fn close(self) -> Rank {
        let here = self.wire.close(&[self.signals, self.window]);
        self.indexed.free(&here);
        here
    }
}

/// Where a thread's operation puts its stamp.
fn place(connection: usize, context: usize, index: u64) -> usize {
    ((connection * CONTEXTS + context) * COUNT as usize + index as usize) * 8
}

fn many_threads(rank: Rank) {
    let twin = rank.twin();
    let window = Memory::device(&rank, 4 * MIB, true);
    let more = Memory::device(&rank, 2 * MIB, true);
    let connections = [Shared::new(rank, window), Shared::new(twin, window)];
    let me = connections[0].wire.here.rank as u64;
    let stamp = |rank: u64, at: usize| rank << 32 | at as u64 | 1 << 63;
    for at in (0..MIB / 2).step_by(8) {
        window.store(MIB + at, stamp(me, at));
    }
    connections[0].wire.here.barrier();
    std::thread::scope(|scope| {
        for (number, connection) in connections.iter().enumerate() {
            for context in 0..CONTEXTS {
                scope.spawn(move || connection.work(number, context));
            }
        }
        // Registrations are collective: both ranks make the same ones in the same order.
        for _ in 0..10 {
            for connection in &connections {
                let handle = connection.wire.register(more, PTR_CUDA, 0);
                connection.wire.deregister(handle);
            }
        }
    });
    connections[0].wire.here.barrier();
    let threads = (connections.len() * CONTEXTS) as u64;
    assert_eq!(window.load(WORD as usize), 3 * threads * COUNT / 2, "what all threads added to one word");
    for (number, connection) in connections.iter().enumerate() {
        for context in 0..CONTEXTS {
            assert_eq!(connection.indexed.load(8 * context), COUNT / 2);
            for index in (0..COUNT).step_by(2) {
                let at = place(number, context, index);
                assert_eq!(
                    window.load(2 * MIB + at),
                    stamp(1 - me, at),
                    "operation {index} of {number}/{context}"
                );
            }
        }
    }
    let [first, second] = connections;
    drop(second.close());
    let here = first.close();
    window.free(&here);
    more.free(&here);
    here.finish();
}

#[test]
fn many_threads_in_two_connections() {
    ranks("threads::many_threads_in_two_connections", 2, &[DELAYED], many_threads);
}

#[test]
fn many_threads_in_two_connections_over_tcp() {
    let tcp = ("NCCL_GIN_SOFT_TCP", "1");
    ranks("threads::many_threads_in_two_connections_over_tcp", 2, &[tcp], many_threads);
}
