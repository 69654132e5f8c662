//! Events: marks in a stream.

use crate::core::fresh_handle;
use crate::graph::Mark;
use crate::status::{Outcome, code, lock};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One event. Each record is a generation; who waits waits for the one that was newest when it asked.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) handle: usize,
    pub(crate) device: usize,
    /// Whether it keeps the time.
    pub(crate) timed: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    recorded: u64,
    happened: u64,
    at: Option<Instant>,
    /// Where in a capture it was last recorded, if it was.
    mark: Option<Mark>,
}

impl Event {
    pub(crate) fn new(device: usize, timed: bool) -> Arc<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(Self { handle: fresh_handle(), device, timed, state, changed })
    }

    /// Starts a generation: a record was submitted.
    pub(super) fn record(&self) -> u64 {
        let mut state = lock(&self.state);
        state.recorded += 1;
        state.mark = None;
        state.recorded
    }

    /// Takes the newest generation back: its record was refused.
    pub(super) fn unrecord(&self, generation: u64) {
        let mut state = lock(&self.state);
        if state.recorded == generation {
            state.recorded -= 1;
        }
    }

    /// Remembers a place in a capture, or forgets it.
    pub(crate) fn set_mark(&self, mark: Option<Mark>) {
        lock(&self.state).mark = mark;
    }

    pub(crate) fn mark(&self) -> Option<Mark> {
        lock(&self.state).mark.clone()
    }

    /// Nobody can wait on the host for an event that was recorded in a capture; who tries ends the capture.
    pub(super) fn not_captured(&self) -> Outcome {
        match self.mark() {
            None => Ok(()),
            Some(mark) => {
                mark.break_off();
                Err(code::CAPTURED_EVENT)
            }
        }
    }

    /// The newest generation.
    pub(super) fn generation(&self) -> u64 {
        lock(&self.state).recorded
    }

    pub(super) fn happen(&self, generation: u64) {
        let mut state = lock(&self.state);
        if generation > state.happened {
            state.happened = generation;
            state.at = Some(Instant::now());
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn has_happened(&self, generation: u64) -> bool {
        lock(&self.state).happened >= generation
    }

    /// Waits at most `tick` for a generation. Returns whether it has happened.
    pub(super) fn wait_a_tick(&self, generation: u64, tick: Duration) -> bool {
        let state = lock(&self.state);
        if state.happened >= generation {
            return true;
        }
        let (state, _) = self.changed.wait_timeout(state, tick).unwrap_or_else(PoisonError::into_inner);
        state.happened >= generation
    }

    /// When the newest record happened.
    pub(super) fn time(&self) -> Outcome<Instant> {
        let state = lock(&self.state);
        match state.at {
            _ if !self.timed || state.recorded == 0 => Err(code::INVALID_HANDLE),
            Some(at) if state.happened >= state.recorded => Ok(at),
            _ => Err(code::NOT_READY),
        }
    }
}
