//! Waking a thread of this process or another one.

use crate::error::{Error, Result};
use crate::net::timespec;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{read, write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// A counter that a sleeping thread polls.
#[derive(Clone)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(crate) fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("making an eventfd"))?;
        Ok(Self(Arc::new(fd)))
    }

    /// The bell of another process.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Wakes the sleeper. A counter that is full wakes it as well.
    pub(crate) fn ring(&self) {
        let _ = write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Sleeps until the bell rings, one of the sockets has lost its other end, or the time is over.
    pub(crate) fn wait(&self, sockets: &[BorrowedFd<'_>], time: Duration) {
        let mut fds = vec![PollFd::new(&*self.0, PollFlags::IN)];
        fds.extend(sockets.iter().map(|socket| PollFd::from_borrowed_fd(*socket, PollFlags::RDHUP)));
        // Whatever ends the wait, the caller looks at everything again.
        let _ = poll(&mut fds, Some(&timespec(time)));
    }

    /// Makes the bell silent again.
    pub(crate) fn hush(&self) {
        let _ = read(&*self.0, &mut [0; 8]);
    }
}
