//! The meeting point of all ranks, in the memory of one process: used directly by ranks that are threads, and by the threads that
//! serve the TCP connections of remote ranks.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::MAX_CONTRIBUTION;
use crate::deadline;
use crate::error::{Error, Result};

/// Why no further round can complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Ranks did not contribute in time.
    Missing { ranks: Vec<usize>, waited: Duration },
    /// A rank left.
    Left { rank: usize },
    /// A rank broke the protocol.
    Protocol { rank: usize, problem: String },
}

impl Failure {
    pub(super) fn into_error(self, phase: &'static str, rank: usize) -> Error {
        match self {
            Self::Missing { ranks, waited } => Error::PeerTimeout {
                phase: phase.into(),
                rank,
                missing: ranks,
                waited,
                expected: None,
                seen: None,
            },
            Self::Left { rank } => Error::PeerLeft { phase: phase.into(), rank },
            Self::Protocol { rank, problem } => Error::protocol(format!("rank {rank}"), problem),
        }
    }
}

type Round = Arc<Vec<Vec<u8>>>;

struct Contribution {
    bytes: Vec<u8>,
    /// The result goes on over a connection.
    remote: bool,
}

struct State {
    /// Number of completed rounds.
    completed: u64,
    /// Contributions to the current round.
    pending: Vec<Option<Contribution>>,
    /// When the current round got its first contribution.
    opened: Option<Instant>,
    /// What the last completed round gathered.
    result: Round,
    /// Remote ranks that have a result or a failure coming and have not yet been sent it.
    undelivered: usize,
    failure: Option<Failure>,
}

impl State {
    /// Ends the service for the first reason given; who waits for the current round is told.
    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none() {
            self.undelivered += self.pending.iter().flatten().filter(|c| c.remote).count();
            self.failure = Some(failure);
        }
    }
}

pub(super) struct Rendezvous {
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
}

impl Rendezvous {
    pub(super) fn new(world_size: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                completed: 0,
                pending: (0..world_size).map(|_| None).collect(),
                opened: None,
                result: Arc::new(Vec::new()),
                undelivered: 0,
                failure: None,
            }),
            changed: Condvar::new(),
            timeout,
        })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    // No code panics while it holds the lock; a poisoned state is still consistent.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Contributes as `rank` and waits for the others. `remote` says that the result goes on over a connection and
    /// [`delivered`](Self::delivered) will be called.
    pub(super) fn gather(&self, rank: usize, bytes: Vec<u8>, remote: bool) -> Result<Round, Failure> {
        let mut state = self.lock();
        let refusal = match &state.failure {
            Some(failure) => Some(failure.clone()),
            // Only possible if two threads call at once for one rank.
            None if state.pending[rank].is_some() => {
                Some(Failure::Protocol { rank, problem: "contributed twice to one round".into() })
            }
            None => None,
        };
        if let Some(failure) = refusal {
            state.undelivered += usize::from(remote);
            return Err(failure);
        }
        let round = state.completed;
        let deadline = deadline::after(*state.opened.get_or_insert_with(Instant::now), self.timeout);
        state.pending[rank] = Some(Contribution { bytes, remote });
        if state.pending.iter().all(Option::is_some) {
            let all: Vec<_> = state.pending.iter_mut().filter_map(Option::take).collect();
            state.undelivered += all.iter().filter(|c| c.remote).count();
            state.result = Arc::new(all.into_iter().map(|c| c.bytes).collect());
            state.completed += 1;
            state.opened = None;
            self.changed.notify_all();
        }
        loop {
            if state.completed > round {
                // The next round can't complete before this rank contributes to it, so this is this round's result.
                return Ok(state.result.clone());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = (0..state.pending.len()).filter(|&r| state.pending[r].is_none()).collect();
                let failure = Failure::Missing { ranks: missing, waited: self.timeout };
                state.fail(failure.clone());
                self.changed.notify_all();
                return Err(failure);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A remote rank has been sent its result, or can't be.
    pub(super) fn delivered(&self) {
        let mut state = self.lock();
        state.undelivered = state.undelivered.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Waits until remote ranks have been sent the last result, so that the process may exit. Bounded; a rank that can't be
    /// reached shows up in the next round.
    pub(super) fn wait_delivered(&self) {
        let deadline = deadline::within(self.timeout);
        let mut state = self.lock();
        while state.undelivered > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the service for everybody, for the first reason given.
    pub(super) fn fail(&self, failure: Failure) {
        self.lock().fail(failure);
        self.changed.notify_all();
    }
}

/// Checks the length of a contribution before it is sent anywhere.
pub(super) fn check_length(bytes: &[u8]) -> Result<()> {
    if bytes.len() > MAX_CONTRIBUTION {
        let requirement = format!("at most {MAX_CONTRIBUTION} bytes can be gathered at once");
        return Err(Error::invalid("all_gather length", bytes.len(), requirement));
    }
    Ok(())
}
