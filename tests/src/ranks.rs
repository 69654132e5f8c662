//! Groups of ranks, as threads of the test.

use std::thread;
use std::time::Duration;

use deepep_core::bootstrap::{ThreadBootstrap, thread_group};

/// Longest wait of a rank in a test in which nothing is to go wrong: far above what a busy machine needs.
pub const LONG: Duration = Duration::from_secs(50);

/// Runs `body` on every rank of a group of threads and returns what it returns, in rank order.
///
/// # Panics
/// If one of the threads did.
pub fn on_threads<T: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(ThreadBootstrap) -> T + Sync,
) -> Vec<T> {
    let group = thread_group(ranks, timeout).expect("a group of threads");
    let body = &body;
    thread::scope(|scope| {
        let running: Vec<_> = group.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        running.into_iter().map(|rank| rank.join().expect("a rank's thread")).collect()
    })
}
