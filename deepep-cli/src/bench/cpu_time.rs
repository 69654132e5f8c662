//! CPU time, which does not count what others do meanwhile.

use std::time::Duration;

/// What the calling thread has used of a CPU. Reading it takes about as long as enqueuing an event does: not between calls.
pub fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_sleeps_uses_no_time() {
        let (wall, start) = (Instant::now(), thread_time());
        std::thread::sleep(Duration::from_millis(50));
        let slept = thread_time() - start;
        assert!(
            wall.elapsed() >= Duration::from_millis(50) && slept < Duration::from_millis(25),
            "{slept:?}"
        );
        let (wall, start) = (Instant::now(), thread_time());
        while thread_time() - start < Duration::from_millis(5) && wall.elapsed() < Duration::from_secs(20) {
            std::hint::spin_loop();
        }
        let worked = thread_time() - start;
        assert!(worked >= Duration::from_millis(5), "{worked:?} in {:?}", wall.elapsed());
    }
}
