//! How the ranks of a connection find each other, and what they tell each other outside of the data path.

mod control;
mod handle;
mod listen;
mod mesh;
pub(crate) mod tcp;

pub(crate) use control::{Control, MAX_FDS, Message, timespec};
pub(crate) use handle::Handle;
pub(crate) use listen::Listener;
pub(crate) use mesh::connect;

use std::time::{Duration, Instant};

/// Version of the protocol, as messages and frames carry it.
pub(crate) fn handle_version() -> u16 {
    handle::VERSION as u16
}

/// A point in time that everything in a step must be over at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    whole: Duration,
}

impl Deadline {
    pub(crate) fn after(whole: Duration) -> Self {
        Self { at: Instant::now() + whole, whole }
    }

    /// What is left; zero when it has passed.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// The time that was given at the start.
    pub(crate) fn whole(self) -> Duration {
        self.whole
    }

    /// This one, or one sooner.
    pub(crate) fn within(self, other: Duration) -> Self {
        if self.left() < other { self } else { Self::after(other) }
    }
}
