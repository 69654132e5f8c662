//! When a wait ends.

use std::time::{Duration, Instant};

/// The moment at which a timeout that begins now ends. One beyond the clock's range is a year.
pub(crate) fn within(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(365 * 24 * 3600))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_timeout_ends() {
        let start = Instant::now();
        let end = within(Duration::from_secs(2)) - start;
        assert!((2..10).contains(&end.as_secs()), "{end:?}");
        assert!(within(Duration::MAX) - start >= Duration::from_secs(365 * 24 * 3600));
    }
}
