//! Operations that go on in the background.

use crate::communicator::inner::{Busy, Inner, Leftover, Progress, State, wait_until};
use crate::deadline;
use crate::error::{Error, Result};
use crate::group::Ticket;
use nccl_gin_sys::{Function, MissingFunction, Nccl, ncclComm_t, ncclResult_t};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An operation that has been started, and what comes of it.
///
/// Poll it, or wait for it. Dropped before its end, it goes on in the background: its communicator takes no other operation until that
/// has ended, and what comes of it is kept until the communicator is closed.
#[must_use = "an operation ends when it is polled or waited for"]
pub struct Pending<T: 'static> {
    operation: Option<Operation<T>>,
}

type Finish<T> = Box<dyn FnOnce(&Arc<Inner>) -> Result<T> + Send>;

struct Operation<T: 'static> {
    inner: Arc<Inner>,
    /// Whether the operation creates the communicator that it is on, which is of no use if it fails.
    creates: bool,
    function: Function,
    attempt: String,
    ticket: Option<Ticket>,
    finish: Finish<T>,
}

impl<T> Pending<T> {
    /// Starts an operation on a communicator: claims it, and makes the call that starts it. `finish` makes the result when the operation has
    /// ended well; it owns all memory that the call writes to, which lives on if the operation is given up.
    pub(crate) fn start<C>(
        inner: &Arc<Inner>,
        function: Function,
        attempt: String,
        call: C,
        finish: impl FnOnce(&Arc<Inner>) -> Result<T> + Send + 'static,
    ) -> Result<Self>
    where
        C: FnOnce(&Nccl, ncclComm_t) -> Result<ncclResult_t, Box<MissingFunction>>,
    {
        let finish: Finish<T> = Box::new(finish);
        let ticket = crate::group::ticket();
        {
            let mut used = inner.lock();
            if used.state == State::Alive && !inner.free_for(&mut used, ticket.as_ref()) {
                return Err(Error::Busy { attempt });
            }
            // A call that fails at once writes nothing later: `finish`, and what it owns, may go.
            inner.call_locked(&used, function, &|| attempt.clone(), call)?;
            used.begin(ticket.as_ref());
        }
        let operation =
            Operation { inner: Arc::clone(inner), creates: false, function, attempt, ticket, finish };
        Ok(Self { operation: Some(operation) })
    }

    /// The creation of a communicator, which has been started already.
    pub(crate) fn started(
        inner: Arc<Inner>,
        function: Function,
        attempt: String,
        finish: impl FnOnce(&Arc<Inner>) -> Result<T> + Send + 'static,
    ) -> Self {
        let ticket = crate::group::ticket();
        inner.lock().begin(ticket.as_ref());
        Self {
            operation: Some(Operation {
                inner,
                creates: true,
                function,
                attempt,
                ticket,
                finish: Box::new(finish),
            }),
        }
    }

    /// Whether the operation has ended: its result, or `None` while it goes on.
    ///
    /// # Errors
    /// What went wrong. The operation is over then, and so is this value: polling it again is an error too.
    #[doc(alias = "ncclCommGetAsyncError")]
    pub fn poll(&mut self) -> Result<Option<T>> {
        let Some(operation) = &self.operation else {
            return Err(Error::Gone { attempt: "polling an operation that has ended".into() });
        };
        if operation.ticket.as_ref().is_some_and(Ticket::open) {
            return Err(Error::GroupOpen { attempt: operation.attempt.clone() });
        }
        let progress = operation.inner.progress(operation.function, &|| operation.attempt.clone());
        if matches!(progress, Ok(Progress::Running)) {
            return Ok(None);
        }
        let Some(operation) = self.operation.take() else { return Ok(None) };
        let Operation { inner, creates, finish, .. } = operation;
        match progress {
            Ok(Progress::Running) => Ok(None),
            Ok(Progress::Done) => {
                inner.lock().busy = Busy::No;
                finish(&inner).map(Some)
            }
            Ok(Progress::Failed(error)) => {
                // NCCL reports a failure when the operation is done with its outputs, which may go now.
                drop(finish);
                inner.lock().busy = Busy::No;
                if creates {
                    inner.abort();
                }
                Err(error)
            }
            Err(error) => {
                // Whether it has ended is not known.
                abandon(&inner, finish);
                Err(error)
            }
        }
    }

    /// Waits for the end of the operation, for as long as the communicator's configuration allows.
    ///
    /// # Errors
    /// What went wrong; [`Error::Timeout`] when the time is over, in which case the communicator has been aborted.
    pub fn wait(self) -> Result<T> {
        let timeout = self.operation.as_ref().map_or(Duration::ZERO, |operation| operation.inner.timeout);
        self.wait_for(timeout)
    }

    /// Waits for the end of the operation, for at most `timeout`.
    ///
    /// # Errors
    /// As for [`Pending::wait`].
    pub fn wait_for(mut self, timeout: Duration) -> Result<T> {
        let end = deadline::within(timeout);
        let mut result = None;
        let ended = wait_until(end, || {
            result = self.poll()?;
            Ok(result.is_some())
        })?;
        match result {
            Some(result) if ended => Ok(result),
            _ => Err(self.give_up(timeout)),
        }
    }

    /// Aborts the communicator, and with it the operation.
    fn give_up(&mut self, after: Duration) -> Error {
        let Some(operation) = self.operation.take() else {
            return Error::Gone { attempt: "waiting for an operation that has ended".into() };
        };
        let Operation { inner, function, attempt, finish, .. } = operation;
        let aborted = inner.abort();
        // Dropped, or left where NCCL may still write to it.
        abandon(&inner, finish);
        Error::Timeout { attempt, function, after, aborted }
    }
}

impl Pending<crate::Communicator> {
    /// The creation of a communicator.
    pub(crate) fn created(inner: Arc<Inner>, function: Function, attempt: String) -> Self {
        Self::started(inner, function, attempt, |inner| Ok(crate::Communicator::from_inner(inner)))
    }
}

/// Leaves what an operation was to give with its communicator, for as long as NCCL may write to it.
fn abandon<T: 'static>(inner: &Arc<Inner>, finish: Finish<T>) {
    inner.lock().busy = Busy::Abandoned;
    inner.keep(Leftover::Unfinished(Box::new(move |inner| drop(finish(inner)))));
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.take() {
            abandon(&operation.inner, operation.finish);
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attempt = self.operation.as_ref().map(|operation| operation.attempt.as_str());
        f.debug_struct("Pending").field("operation", &attempt).finish_non_exhaustive()
    }
}
