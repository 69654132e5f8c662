//! When to look for work, when to give way, when to sleep.

use std::time::{Duration, Instant};

/// Counts turns without work.
pub(crate) struct Idle {
    spin: Duration,
    turns: u32,
    since: Option<Instant>,
}

/// Turns after which a thread gives way to others, and how often it does from then on: a turn is much shorter than giving way.
const PATIENT_TURNS: u32 = 1024;
const YIELD_EVERY: u32 = 8;

impl Idle {
    /// Sleeping starts after `spin` without work.
    pub(crate) fn new(spin: Duration) -> Self {
        Self { spin, turns: 0, since: None }
    }

    /// There was work.
    pub(crate) fn reset(&mut self) {
        self.turns = 0;
        self.since = None;
    }

    /// There was none: spins, or gives way. Returns whether it is time to sleep.
    pub(crate) fn turn(&mut self) -> bool {
        self.turns = self.turns.saturating_add(1);
        if self.turns < PATIENT_TURNS {
            std::hint::spin_loop();
            return false;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.spin {
            return true;
        }
        if self.turns.is_multiple_of(YIELD_EVERY) {
            std::thread::yield_now();
        }
        false
    }
}
