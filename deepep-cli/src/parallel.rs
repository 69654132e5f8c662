//! Work on many rows at a time, on all processors.

use std::ops::Range;
use std::thread;

/// Bytes that are worth a thread.
const WORTH: usize = 4 << 20;

/// Runs `work` on parts of `0..n`, on several threads if there is enough to do, and returns the error of the first part that has one. `sharing`
/// callers do so at the same time; an item has about `bytes` bytes.
pub(crate) fn in_parts<E: Send>(
    n: usize,
    bytes: usize,
    sharing: usize,
    work: impl Fn(Range<usize>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let parts = (processors / sharing.max(1)).min(n * bytes / WORTH).clamp(1, n.max(1));
    if parts == 1 {
        return work(0..n);
    }
    let (work, part) = (&work, |i: usize| n * i / parts..n * (i + 1) / parts);
    thread::scope(|scope| {
        let others: Vec<_> = (1..parts).map(|i| scope.spawn(move || work(part(i)))).collect();
        let first = work(part(0));
        others.into_iter().fold(first, |outcome, other| {
            // A part that panicked panics here.
            let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome.and(other)
        })
    })
}

/// As [`in_parts`], for rows of `row` elements of a slice: `work` gets the number of the first row and the rows.
pub(crate) fn on_rows<T: Send>(
    data: &mut [T],
    row: usize,
    sharing: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let rows = data.len() / row.max(1);
    let parts = (processors / sharing.max(1)).min(size_of_val(data) / WORTH).clamp(1, rows.max(1));
    let each = rows.div_ceil(parts).max(1);
    let work = &work;
    thread::scope(|scope| {
        let mut pieces = data.chunks_mut((each * row).max(1)).enumerate();
        let mine = pieces.next();
        for (i, piece) in pieces {
            scope.spawn(move || work(i * each, piece));
        }
        if let Some((_, piece)) = mine {
            work(0, piece);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_item_once() {
        for (n, bytes) in [(0, 100), (1, 100), (1000, 1), (1001, WORTH), (3, 100 * WORTH)] {
            let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            let work = |range: Range<usize>| {
                for i in range {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                }
                Ok::<(), ()>(())
            };
            in_parts(n, bytes, 1, work).unwrap();
            assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn the_first_error_counts() {
        let work = |range: Range<usize>| match range.into_iter().find(|i| [40, 90].contains(i)) {
            Some(i) => Err(i),
            None => Ok(()),
        };
        assert_eq!(in_parts(100, 10 * WORTH, 1, work), Err(40));
    }

    #[test]
    fn every_row_knows_its_number() {
        for rows in [0, 1, 7, 5000] {
            let mut data = vec![0u64; rows * 1024];
            on_rows(&mut data, 1024, 1, |first, part| {
                for (i, row) in part.chunks_mut(1024).enumerate() {
                    row.fill((first + i) as u64);
                }
            });
            assert!(data.chunks(1024).enumerate().all(|(i, row)| row.iter().all(|&x| x == i as u64)));
        }
    }
}
