//! Ranks that are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use super::Bootstrap;
use super::rendezvous::{Failure, Rendezvous, check_length};
use crate::error::{Error, Result};

/// Makes a group of `world_size` ranks inside this process; give each thread one of them, which is its rank.
///
/// # Errors
/// [`Invalid`](Error::Invalid) if `world_size` is 0.
///
/// ```
/// use std::time::Duration;
/// use deepep_core::bootstrap::{Bootstrap, thread_group};
///
/// let ranks = thread_group(2, Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     for rank in ranks {
///         scope.spawn(move || {
///             let all = rank.all_gather(&[rank.rank() as u8]).unwrap();
///             assert_eq!(all, [[0], [1]]);
///         });
///     }
/// });
/// # Ok::<(), deepep_core::Error>(())
/// ```
pub fn thread_group(world_size: usize, timeout: Duration) -> Result<Vec<ThreadBootstrap>> {
    if world_size == 0 {
        return Err(Error::invalid("world_size", 0, "a group has at least one rank"));
    }
    let shared = Rendezvous::new(world_size, timeout);
    Ok((0..world_size).map(|rank| ThreadBootstrap { shared: shared.clone(), rank, world_size }).collect())
}

/// One rank of a [`thread_group`]. Dropping it makes the others' next call fail with this rank's number.
pub struct ThreadBootstrap {
    shared: Arc<Rendezvous>,
    rank: usize,
    world_size: usize,
}

impl Bootstrap for ThreadBootstrap {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn timeout(&self) -> Duration {
        self.shared.timeout()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        check_length(bytes)?;
        let round = self
            .shared
            .gather(self.rank, bytes.to_vec(), false)
            .map_err(|failure| failure.into_error("bootstrap", self.rank))?;
        Ok(round.to_vec())
    }
}

impl Drop for ThreadBootstrap {
    fn drop(&mut self) {
        self.shared.fail(Failure::Left { rank: self.rank });
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn gathers_in_rank_order_many_times() {
        let ranks = thread_group(5, LONG).unwrap();
        thread::scope(|scope| {
            for b in ranks {
                scope.spawn(move || {
                    for round in 0..200u32 {
                        let mine = vec![b.rank() as u8; (round as usize + b.rank()) % 7];
                        let all = b.all_gather(&mine).unwrap();
                        for (r, bytes) in all.iter().enumerate() {
                            assert_eq!(*bytes, vec![r as u8; (round as usize + r) % 7]);
                        }
                    }
                    b.barrier().unwrap();
                });
            }
        });
    }

    #[test]
    fn the_longest_timeout_is_one() {
        let ranks = thread_group(2, Duration::MAX).unwrap();
        thread::scope(|scope| {
            for b in ranks {
                scope.spawn(move || assert_eq!(b.all_gather(&[b.rank() as u8]).unwrap(), [[0], [1]]));
            }
        });
    }

    #[test]
    fn names_the_ranks_that_are_late() {
        let ranks = thread_group(4, Duration::from_millis(50)).unwrap();
        let missing = thread::scope(|scope| {
            let waiting: Vec<_> = [0, 2]
                .map(|r| {
                    let b = &ranks[r];
                    scope.spawn(move || b.barrier())
                })
                .into_iter()
                .collect();
            waiting.into_iter().map(|t| t.join().unwrap().unwrap_err()).collect::<Vec<_>>()
        });
        for error in missing {
            assert!(matches!(&error, Error::PeerTimeout { missing, .. } if *missing == [1, 3]), "{error}");
        }
        // The group stays failed: a late rank is told at once instead of waiting for ranks that gave up.
        assert!(matches!(ranks[1].barrier(), Err(Error::PeerTimeout { .. })));
    }

    #[test]
    fn a_rank_that_leaves_is_named_at_once() {
        let mut ranks = thread_group(3, LONG).unwrap();
        drop(ranks.remove(1));
        let error = ranks[0].barrier().unwrap_err();
        assert!(matches!(error, Error::PeerLeft { rank: 1, .. }), "{error}");
    }

    #[test]
    fn leaving_after_the_last_call_disturbs_nobody() {
        for _ in 0..200 {
            let ranks = thread_group(3, LONG).unwrap();
            thread::scope(|scope| {
                for b in ranks {
                    scope.spawn(move || b.barrier().unwrap());
                }
            });
        }
    }

    #[test]
    fn refuses_what_is_too_long() {
        let ranks = thread_group(1, LONG).unwrap();
        let error = ranks[0].all_gather(&vec![0; super::super::MAX_CONTRIBUTION + 1]).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
}
