//! Places in the staging memory, given out and taken back in order.

use crate::ring::STAGING;
use std::collections::VecDeque;

/// A ring of bytes. Positions count up for ever.
#[derive(Default)]
pub(crate) struct Places {
    head: u64,
    tail: u64,
    /// Sequence number of each command with a place, and the position behind that.
    used: VecDeque<(u64, u64)>,
}

impl Places {
    /// Takes `size` bytes in one piece, if they are free. Returns their offset.
    pub(crate) fn take(&mut self, sequence: u64, size: u64) -> Option<u64> {
        let mut start = self.head;
        if start % STAGING + size > STAGING {
            start = start.next_multiple_of(STAGING);
        }
        if start + size - self.tail > STAGING {
            return None;
        }
        self.head = start + size;
        self.used.push_back((sequence, self.head));
        Some(start % STAGING)
    }

    /// Takes places back, oldest first, of commands that are done.
    pub(crate) fn reclaim(&mut self, is_done: impl Fn(u64) -> bool) {
        while let Some(&(sequence, end)) = self.used.front() {
            if !is_done(sequence) {
                break;
            }
            self.tail = end;
            self.used.pop_front();
        }
        if self.used.is_empty() {
            self.tail = self.head;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::CHUNK;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn places_under_way_never_overlap(sizes in proptest::collection::vec(1..=CHUNK, 1..200), lag in 1usize..20) {
            let mut places = Places::default();
            let mut live: VecDeque<(u64, u64, u64)> = VecDeque::new();
            for (sequence, size) in sizes.into_iter().enumerate() {
                let sequence = sequence as u64;
                while live.len() > lag {
                    live.pop_front();
                }
                let offset = loop {
                    let oldest = live.front().map_or(sequence, |one| one.0);
                    places.reclaim(|done| done < oldest);
                    match places.take(sequence, size) {
                        Some(offset) => break offset,
                        None => {
                            prop_assert!(!live.is_empty(), "an empty ring has room for any piece");
                            live.pop_front();
                        }
                    }
                };
                prop_assert!(offset + size <= STAGING);
                for &(_, other, length) in &live {
                    prop_assert!(offset + size <= other || other + length <= offset);
                }
                live.push_back((sequence, offset, size));
            }
        }
    }
}
