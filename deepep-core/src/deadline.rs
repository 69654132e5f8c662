//! When a wait ends.

use std::time::{Duration, Instant};

/// The moment at which a timeout that began at `start` ends. One beyond the clock's range is a year.
pub(crate) fn after(start: Instant, timeout: Duration) -> Instant {
    start + timeout.min(Duration::from_secs(365 * 24 * 3600))
}

/// The same, from now on.
pub(crate) fn within(timeout: Duration) -> Instant {
    after(Instant::now(), timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_timeout_ends() {
        let start = Instant::now();
        assert_eq!(after(start, Duration::from_secs(2)) - start, Duration::from_secs(2));
        assert_eq!(after(start, Duration::MAX) - start, Duration::from_secs(365 * 24 * 3600));
        assert!(within(Duration::ZERO) >= start);
    }
}
