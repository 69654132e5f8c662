//! Long work of the tests on all cores: data of many megabytes are drawn, copied and compared.

use std::sync::OnceLock;

use super::machine::Outcome;

/// Work on less is done at once, where it is asked for.
const LEAST_BYTES: usize = 1 << 20;
const PAGE: usize = 4096;

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// In how many parts of at least [`LEAST_BYTES`] something is worked on.
fn parts(bytes: usize) -> usize {
    (bytes / LEAST_BYTES).clamp(1, cores())
}

/// Lets `make` write everything, in parts that begin at multiples of `unit`; it gets the number of a part's first element.
pub(super) fn fill<T: Send>(all: &mut [T], unit: usize, make: impl Fn(usize, &mut [T]) + Sync) {
    let parts = parts(size_of_val(all));
    let each = all.len().div_ceil(parts).next_multiple_of(unit.max(1));
    if parts == 1 || each >= all.len() {
        return make(0, all);
    }
    std::thread::scope(|scope| {
        for (i, part) in all.chunks_mut(each).enumerate() {
            let make = &make;
            scope.spawn(move || make(i * each, part));
        }
    });
}

/// Bytes to be overwritten, whose pages are there.
pub(super) fn bytes(count: usize) -> Vec<u8> {
    let mut all = vec![0; count];
    fill(&mut all, PAGE, |_, part| part.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0));
    all
}

/// `check` of 0 to `count`, each of which looks at so many bytes; the failure of the lowest number that has one.
pub(super) fn check(
    count: usize,
    bytes: usize,
    check: impl Fn(usize) -> Result<(), String> + Sync,
) -> Outcome {
    let parts = parts(count * bytes).min(count.max(1));
    let some = |part: usize| (count * part / parts..count * (part + 1) / parts).try_for_each(&check);
    if parts == 1 {
        return Ok(some(0)?);
    }
    each(parts, |part| Ok(some(part)?))
}

/// `work` for each of 0 to `count`, all at the same time; the failure of the lowest number that has one.
pub(super) fn each(count: usize, work: impl Fn(usize) -> Outcome + Sync) -> Outcome {
    let mut outcomes = vec![Ok(()); count];
    std::thread::scope(|scope| {
        for (i, outcome) in outcomes.iter_mut().enumerate() {
            let work = &work;
            scope.spawn(move || *outcome = work(i).map_err(|e| e.to_string()));
        }
    });
    Ok(outcomes.into_iter().collect::<Result<(), String>>()?)
}

#[test]
fn every_part_has_its_turn() {
    for count in [0usize, 1, 7, 1 << 18, (3 << 20) + 5] {
        let mut all = vec![0u64; count];
        fill(&mut all, 8, |first, part| {
            assert!(first % 8 == 0);
            part.iter_mut().enumerate().for_each(|(i, value)| *value += (first + i) as u64);
        });
        assert!(all.iter().enumerate().all(|(i, &value)| value == i as u64));
        check(count, 8, |i| if all[i] == i as u64 { Ok(()) } else { Err(i.to_string()) }).unwrap();
    }
    let bad = |i: usize| if i == 77 || i == 999_000 { Err(i.to_string()) } else { Ok(()) };
    assert_eq!(check(1_000_000, 8, bad).unwrap_err().to_string(), "77");
    assert_eq!(bytes((2 << 20) + 3), vec![0; (2 << 20) + 3]);
    let failed = each(5, |i| if i % 2 == 1 { Err(format!("rank {i}").into()) } else { Ok(()) });
    assert_eq!(failed.unwrap_err().to_string(), "rank 1");
}
