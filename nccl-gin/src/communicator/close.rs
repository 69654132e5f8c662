//! The end of a communicator.

use super::Communicator;
use super::inner::{Inner, Leftover};
use crate::error::{Error, NotClosed, Result};
use crate::{deadline, group, library};
use nccl_gin_sys::{Function, NCCL_REVOKE_DEFAULT, ncclResult_t};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Communicator {
    /// Closes the communicator, with all other ranks, within [`Config::timeout`](crate::Config::timeout).
    ///
    /// # Errors
    /// [`NotClosed`]. With [`Error::InUse`] or [`Error::Busy`] in it nothing has happened, and the communicator comes back. After any
    /// other error, [`Error::Timeout`] included, it has been aborted.
    #[doc(alias = "ncclCommFinalize")]
    #[doc(alias = "ncclCommDestroy")]
    pub fn close(self) -> Result<(), NotClosed> {
        let timeout = self.inner.timeout;
        self.close_within(timeout)
    }

    /// Closes the communicator, with all other ranks, within `timeout`.
    ///
    /// # Errors
    /// As for [`Communicator::close`].
    pub fn close_within(self, timeout: Duration) -> Result<(), NotClosed> {
        let inner = Arc::clone(&self.inner);
        if !inner.is_alive() {
            let error = Error::Gone { attempt: format!("closing {}", inner.name()) };
            return Err(NotClosed { error, communicator: None });
        }
        if let Err(error) = ready_to_close(&inner) {
            return Err(NotClosed { error, communicator: Some(self) });
        }
        match inner.close(timeout) {
            Ok(()) => Ok(()),
            Err(error) => {
                inner.abort();
                Err(NotClosed { error, communicator: None })
            }
        }
    }

    /// Stops what is under way and gives this rank's resources back, without the other ranks. Windows and device communicators of it are
    /// gone with it; memory of windows stays with its owners.
    ///
    /// Kernels that wait inside NCCL's barriers are released; kernels that wait by other means must have ended.
    ///
    /// # Errors
    /// [`Error::Timeout`] if NCCL does not come back from it.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(self) -> Result<()> {
        let attempt = format!("aborting {}", self.inner.name());
        let start = Instant::now();
        if !self.inner.is_alive() {
            return Err(Error::Gone { attempt });
        }
        if self.inner.abort() {
            return Ok(());
        }
        Err(Error::Timeout {
            attempt,
            function: Function::ncclCommAbort,
            after: start.elapsed(),
            aborted: false,
        })
    }

    /// Stops what is in flight on this communicator, on the ranks that call it, so that it can be shrunk or aborted; collectives and
    /// windows of it cannot be used afterwards. Returns when the communicator is quiet, within
    /// [`Config::timeout`](crate::Config::timeout).
    ///
    /// # Errors
    /// NCCL's error, or [`Error::Timeout`].
    #[doc(alias = "ncclCommRevoke")]
    pub fn revoke(&self) -> Result<()> {
        let function = Function::ncclCommRevoke;
        let attempt = || format!("revoking {}", self.inner.name());
        group::refuse_inside(attempt)?;
        self.inner.call(function, &attempt, |nccl, comm| {
            // SAFETY: the communicator is alive; 0 is the only flag there is.
            unsafe { nccl.ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT.cast_signed()) }
        })?;
        let timeout = self.inner.timeout;
        if self.inner.wait(function, &attempt, deadline::within(timeout))? {
            return Ok(());
        }
        let aborted = self.inner.abort();
        Err(Error::Timeout { attempt: attempt(), function, after: timeout, aborted })
    }
}

/// What keeps a communicator from being closed.
fn ready_to_close(inner: &Arc<Inner>) -> Result<()> {
    let attempt = || format!("closing {}", inner.name());
    group::refuse_inside(attempt)?;
    let (windows, device_communicators) = inner.in_use();
    if windows + device_communicators > 0 {
        return Err(Error::InUse { windows, device_communicators });
    }
    if !inner.free_for(&mut inner.lock(), None) {
        return Err(Error::Busy { attempt: attempt() });
    }
    Ok(())
}

impl Inner {
    pub(crate) fn is_alive(&self) -> bool {
        self.lock().state == super::inner::State::Alive
    }

    fn close(self: &Arc<Self>, timeout: Duration) -> Result<()> {
        let end = deadline::within(timeout);
        let attempt = || format!("closing {}", self.name());
        loop {
            let leftovers = self.take_leftovers();
            if leftovers.is_empty() {
                break;
            }
            for leftover in leftovers {
                // A failure here is not worth more than the end of the communicator, which frees them as well.
                match leftover {
                    Leftover::Unfinished(finish) => finish(self),
                    Leftover::DevComm(block) => drop(self.destroy_dev_comm(&block)),
                    Leftover::Window(window, _memory) => drop(self.deregister(window)),
                }
            }
        }
        self.call(Function::ncclCommFinalize, &attempt, |nccl, comm| {
            // SAFETY: the communicator is alive, and nothing of it is in use.
            unsafe { nccl.ncclCommFinalize(comm) }
        })?;
        let late =
            |function, aborted| Error::Timeout { attempt: attempt(), function, after: timeout, aborted };
        if !self.wait(Function::ncclCommFinalize, &attempt, end)? {
            let aborted = self.abort();
            return Err(late(Function::ncclCommFinalize, aborted));
        }
        let function = Function::ncclCommDestroy;
        let ended = self.end(|nccl, comm| {
            // SAFETY: the communicator was alive, has been finalized, and nobody uses it from here on: its state says so.
            unsafe { nccl.ncclCommDestroy(comm) }
        });
        match ended {
            None => Err(Error::Gone { attempt: attempt() }),
            Some(None) => Err(late(function, false)),
            Some(Some(ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)) => Ok(()),
            Some(Some(result)) => Err(library::failure(&self.nccl, function, result, attempt()).into()),
        }
    }
}
