//! Operations that go on in the background.

use crate::communicator::inner::{Busy, Inner, State, wait_until};
use crate::error::{Error, Result};
use crate::group::Ticket;
use nccl_gin_sys::{Function, MissingFunction, Nccl, ncclComm_t, ncclResult_t};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An operation that has been started, and what comes of it.
///
/// Poll it, or wait for it. Dropped before its end, it goes on in the background: its communicator takes no other operation until that
/// has ended, and what comes of it stays until the communicator is gone.
#[must_use = "an operation ends when it is polled or waited for"]
pub struct Pending<T> {
    operation: Option<Operation<T>>,
}

type Finish<T> = Box<dyn FnOnce(&Arc<Inner>) -> Result<T> + Send>;

struct Operation<T> {
    inner: Arc<Inner>,
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
            if used.state == State::Alive && !used.free_for(ticket.as_ref()) {
                return Err(Error::Busy { attempt });
            }
            // A call that fails at once writes nothing later: `finish`, and what it owns, may go.
            inner.call_locked(&used, function, &|| attempt.clone(), call)?;
            used.begin(ticket.as_ref());
        }
        let operation = Operation { inner: Arc::clone(inner), function, attempt, ticket, finish };
        Ok(Self { operation: Some(operation) })
    }

    /// An operation that has been started already, on a communicator that nobody else has yet.
    pub(crate) fn started(
        inner: Arc<Inner>,
        function: Function,
        attempt: String,
        finish: impl FnOnce(&Arc<Inner>) -> Result<T> + Send + 'static,
    ) -> Self {
        let ticket = crate::group::ticket();
        inner.lock().begin(ticket.as_ref());
        Self { operation: Some(Operation { inner, function, attempt, ticket, finish: Box::new(finish) }) }
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
        let ended = operation.inner.poll(operation.function, &|| operation.attempt.clone());
        match ended {
            Ok(false) => Ok(None),
            Ok(true) => match self.operation.take() {
                Some(operation) => {
                    operation.inner.lock().busy = Busy::No;
                    (operation.finish)(&operation.inner).map(Some)
                }
                None => Ok(None),
            },
            Err(error) => {
                if let Some(operation) = self.operation.take() {
                    operation.inner.lock().busy = Busy::No;
                    // NCCL reports a failure when the operation's thread is done with its outputs.
                    drop(operation.finish);
                }
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
        let end = Instant::now() + timeout;
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
        if !aborted {
            // NCCL may still write to what the operation was to give.
            std::mem::forget(finish);
        }
        Error::Timeout { attempt, function, after, aborted }
    }
}

impl Pending<crate::Communicator> {
    /// The creation of a communicator.
    pub(crate) fn created(inner: Arc<Inner>, function: Function, attempt: String) -> Self {
        Self::started(inner, function, attempt, |inner| Ok(crate::Communicator::from_inner(inner)))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.take() {
            let gone = operation.inner.lock().state == State::Gone;
            if !gone {
                // NCCL writes to its outputs at the operation's end, whenever that is.
                std::mem::forget(operation.finish);
            }
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attempt = self.operation.as_ref().map(|operation| operation.attempt.as_str());
        f.debug_struct("Pending").field("operation", &attempt).finish_non_exhaustive()
    }
}
