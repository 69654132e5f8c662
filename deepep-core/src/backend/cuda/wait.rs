//! Bounded waits of the host.

use std::thread;
use std::time::{Duration, Instant};

use cuda_vmm::sys::{CUstreamCaptureMode, Driver};

use crate::error::Result;

/// How long a wait polls without a pause, and after how long it begins to sleep in between.
const SPIN: Duration = Duration::from_micros(200);
const YIELD: Duration = Duration::from_millis(5);
const SLEEP: Duration = Duration::from_micros(50);

/// Polls until there is a value; `None` if the time is up.
pub(crate) fn until<T>(limit: Duration, mut poll: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let start = Instant::now();
    loop {
        if let Some(value) = poll()? {
            return Ok(Some(value));
        }
        let waited = start.elapsed();
        if waited >= limit {
            // What has come since the last look counts.
            return poll();
        }
        match waited {
            _ if waited < SPIN => std::hint::spin_loop(),
            _ if waited < YIELD => thread::yield_now(),
            _ => thread::sleep(SLEEP),
        }
    }
}

/// While it lives, this thread may ask for the state of events though some other stream is being captured: the answers are not part of
/// anybody's graph.
pub(crate) struct Uncaptured<'a> {
    driver: &'a Driver,
    before: Option<CUstreamCaptureMode>,
}

impl<'a> Uncaptured<'a> {
    pub(crate) fn new(driver: &'a Driver) -> Self {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is valid for one read and one write; the mode is this thread's own.
        let changed = unsafe { driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self { driver, before: changed.is_ok().then_some(mode) }
    }
}

impl Drop for Uncaptured<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before {
            // SAFETY: as in `new`. A failure leaves the thread in the more permissive mode.
            let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end() {
        let mut polls = 0;
        let found = until(Duration::from_secs(10), || {
            polls += 1;
            Ok((polls == 3).then_some(polls))
        });
        assert_eq!(found.unwrap(), Some(3));
        let start = Instant::now();
        assert_eq!(until::<()>(Duration::from_millis(20), || Ok(None)).unwrap(), None);
        assert!(start.elapsed() >= Duration::from_millis(20));
    }
}
