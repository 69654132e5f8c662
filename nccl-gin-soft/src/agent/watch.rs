//! Whether the other ranks are still there.

use crate::comm::Comm;
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often to look.
const PERIOD: Duration = Duration::from_millis(20);
/// A rank that closes in order says so before its socket ends; between hosts the two come by different connections.
const GRACE: Duration = Duration::from_millis(300);

pub(crate) struct Watch {
    last: Instant,
    /// Since when a rank's socket has been closed without a word.
    silent: Vec<Option<Instant>>,
}

impl Watch {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { last: Instant::now(), silent: vec![None; ranks] }
    }

    pub(crate) fn is_due(&self) -> bool {
        self.last.elapsed() >= PERIOD
    }

    /// Looks at all sockets.
    ///
    /// # Errors
    /// [`Error::PeerGone`] for a rank that left without closing.
    pub(crate) fn look(&mut self, comm: &Comm) -> Result<()> {
        self.last = Instant::now();
        let mut ranks = Vec::new();
        let mut fds = Vec::new();
        for (rank, peer) in comm.peers().filter(|(_, peer)| !peer.left.load(Ordering::Relaxed)) {
            ranks.push((rank, peer));
            fds.push(PollFd::from_borrowed_fd(peer.control.fd(), PollFlags::RDHUP));
        }
        if fds.is_empty() || poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_err() {
            return Ok(());
        }
        for ((rank, peer), fd) in ranks.into_iter().zip(&fds) {
            if !fd.revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
                continue;
            }
            if comm.inbound[rank].closed().load(Ordering::Acquire) != 0 {
                peer.left.store(true, Ordering::Relaxed);
            } else if self.silent[rank].get_or_insert(self.last).elapsed() >= GRACE {
                peer.left.store(true, Ordering::Relaxed);
                let reason = "its process ended, or closed its socket without a word".into();
                return Err(Error::PeerGone { rank, reason });
            }
        }
        Ok(())
    }

    /// Sockets whose end is news.
    pub(crate) fn sockets<'a>(&self, comm: &'a Comm) -> Vec<BorrowedFd<'a>> {
        comm.peers()
            .filter(|(rank, peer)| !peer.left.load(Ordering::Relaxed) && self.silent[*rank].is_none())
            .map(|(_, peer)| peer.control.fd())
            .collect()
    }
}
