//! Which ranks reach each other by load and store, and how operations are cut along that line.
//!
//! The *physical* domain of a rank is the set of ranks on its host. The *logical* shape says how operations treat the group: scale-up
//! ranks exchange rows through the shared heap, scale-out ranks over a network.

use std::fs;

use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree_with;
use crate::error::{Error, Result};

/// The group's physical shape: hosts, and ranks on each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    rank: usize,
    /// Ranks of each host, ascending; hosts in order of their lowest rank.
    hosts: Vec<Vec<usize>>,
    /// Index of this rank's host.
    host: usize,
}

/// Logical shape: the number of groups that exchange over a network, and the ranks of a group that share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogicalShape {
    /// Groups.
    pub scale_out: usize,
    /// Ranks of a group.
    pub scale_up: usize,
}

impl Domain {
    /// Finds out which ranks are on which host. Collective.
    ///
    /// # Errors
    /// Those of the bootstrap.
    pub fn discover<B: Bootstrap + ?Sized>(bootstrap: &B) -> Result<Self> {
        let (_, identities) =
            agree_with(bootstrap, "host identity", host_identity(), |id| id.clone().into_bytes())?;
        Ok(Self::from_identities(bootstrap.rank(), &identities))
    }

    fn from_identities(rank: usize, identities: &[Vec<u8>]) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (r, identity) in identities.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| identities[ranks[0]] == *identity) {
                Some(ranks) => ranks.push(r),
                None => hosts.push(vec![r]),
            }
        }
        let host = hosts.iter().position(|ranks| ranks.contains(&rank)).unwrap_or(0);
        Self { rank, hosts, host }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }

    /// Ranks of this rank's host, itself included, ascending.
    pub fn neighbours(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// This rank's number among its host's.
    pub fn local_rank(&self) -> usize {
        self.neighbours().iter().position(|&r| r == self.rank).unwrap_or(0)
    }

    /// Number of hosts.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The shape that operations use: one group of all ranks if they share a host, else one group for each host.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) if hosts have different numbers of ranks, or a host's ranks don't follow each other.
    pub fn logical(&self) -> Result<LogicalShape> {
        let scale_up = self.hosts[0].len();
        let expected = |i: usize| (i * scale_up..(i + 1) * scale_up).collect::<Vec<_>>();
        if self.hosts.iter().enumerate().all(|(i, ranks)| *ranks == expected(i)) {
            return Ok(LogicalShape { scale_out: self.hosts.len(), scale_up });
        }
        let need = "every host must have the same number of ranks, numbered one after the other";
        Err(Error::invalid("ranks of each host", format!("{:?}", self.hosts), need))
    }
}

/// The same text for all processes that can pass each other file descriptors: the kernel's boot id and its network namespace, where
/// abstract Unix sockets live.
fn host_identity() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let boot = fs::read_to_string(path).map_err(|e| Error::io(format!("reading {path}"), e))?;
    let path = "/proc/self/ns/net";
    let namespace = fs::read_link(path).map_err(|e| Error::io(format!("reading {path}"), e))?;
    Ok(format!("{} {}", boot.trim(), namespace.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(rank: usize, hosts: &[&str]) -> Domain {
        let identities: Vec<_> = hosts.iter().map(|h| h.as_bytes().to_vec()).collect();
        Domain::from_identities(rank, &identities)
    }

    #[test]
    fn one_host() {
        let d = domain(2, &["a", "a", "a"]);
        assert_eq!((d.neighbours(), d.local_rank(), d.world_size()), (&[0, 1, 2][..], 2, 3));
        assert_eq!(d.logical().unwrap(), LogicalShape { scale_out: 1, scale_up: 3 });
    }

    #[test]
    fn two_hosts() {
        let d = domain(3, &["a", "a", "b", "b"]);
        assert_eq!((d.neighbours(), d.local_rank(), d.hosts()), (&[2, 3][..], 1, 2));
        assert_eq!(d.logical().unwrap(), LogicalShape { scale_out: 2, scale_up: 2 });
    }

    #[test]
    fn unequal_or_interleaved_hosts_are_refused() {
        assert!(domain(0, &["a", "a", "b"]).logical().is_err());
        assert!(domain(0, &["a", "b", "a", "b"]).logical().is_err());
    }

    #[test]
    fn this_host_has_an_identity() {
        assert_eq!(host_identity().unwrap(), host_identity().unwrap());
    }
}
