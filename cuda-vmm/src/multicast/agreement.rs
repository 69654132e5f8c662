//! How members of a team tell each other how they fared.

use crate::error::{Error, Result};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

/// What the members of a team exchange with: implemented by whatever bootstrap they have, such as MPI or a TCP store, or by
/// [`SocketStar`](super::SocketStar).
///
/// All members call the same methods in the same order. No call may wait past its deadline, whatever the others do: a call that cannot be
/// finished returns an error, on every member, by then.
pub trait Agreement {
    /// This member's rank, from zero.
    fn rank(&self) -> usize;

    /// Number of members.
    fn ranks(&self) -> usize;

    /// Gives `mine` to all members, and returns what each of them gave, in the order of their ranks. The length is the same on all.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Member`] for a member that is known to be missing, [`Error::Transport`] or whatever else fits.
    fn exchange(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>>;

    /// Whether [`distribute`](Self::distribute) works: whether all members are on one host and connected so that file descriptors pass.
    /// Without it, a team needs FABRIC handles.
    fn carries_fds(&self) -> bool {
        false
    }

    /// Gives a file descriptor of rank 0 to all other members: rank 0 passes one and gets `None`, the others pass none and get one.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange). A member that could not take its descriptor, for example at the limit of open files, returns an error,
    /// and the following calls work all the same.
    fn distribute(&mut self, fd: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Option<OwnedFd>> {
        let _ = (fd, deadline);
        let why = "this agreement carries no file descriptors".into();
        Err(Error::Unsupported { what: "distributing a file descriptor", why })
    }
}
