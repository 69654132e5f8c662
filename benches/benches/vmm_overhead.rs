//! What `cuda-vmm` adds to the raw calls: both alternate in one run, and the median difference of neighbours is printed.
//!
//! `cargo bench -p benches --bench vmm_overhead`. On a driver whose calls do nothing the difference is our cost and little else; on a real
//! driver it also holds the noise of the call. The last lines are the cost of finding a function in the table.

use benches::{backend, raw::Raw};
use cuda_vmm::sys::Function;
use cuda_vmm::{Cuda, Grant, Granularity, HandleTypes, PhysicalMemory, Properties, Reservation};
use std::hint::black_box;
use std::time::{Duration, Instant};

const SIZE: usize = 2 << 20;
const ROUNDS: usize = 2001;

/// What two operations took that alternated: the median of each, and the median of the differences of neighbours, in nanoseconds.
struct Pair {
    raw: i128,
    ours: i128,
    difference: i128,
}

fn median(mut values: Vec<i128>) -> i128 {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Times two operations in turn. Calls that take long drift; neighbours drift together, so that their difference does not.
fn paired(mut raw: impl FnMut() -> Duration, mut ours: impl FnMut() -> Duration) -> Pair {
    let (mut a, mut b) = (Vec::with_capacity(ROUNDS), Vec::with_capacity(ROUNDS));
    for round in 0..ROUNDS {
        // Which goes first alternates too.
        if round % 2 == 0 {
            a.push(raw());
            b.push(ours());
        } else {
            b.push(ours());
            a.push(raw());
        }
    }
    let nanoseconds = |times: &[Duration]| times.iter().map(|t| t.as_nanos() as i128).collect::<Vec<_>>();
    let (a, b) = (nanoseconds(&a), nanoseconds(&b));
    let difference = median(b.iter().zip(&a).map(|(ours, raw)| ours - raw).collect());
    Pair { raw: median(a), ours: median(b), difference }
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = black_box(work());
    (start.elapsed(), result)
}

fn report(backend: &str, operation: &str, pair: &Pair) {
    let Pair { raw, ours, difference } = pair;
    println!("{backend:>9} {operation:>10} {raw:>10} ns {ours:>10} ns {difference:>8} ns");
}

fn operations(name: &str, cuda: &Cuda) {
    let raw = Raw(cuda.driver());
    let granularity = Granularity::new(SIZE).expect("a power of two");
    let properties = Properties::device(0).handle_types(HandleTypes::POSIX_FD);
    let create = || PhysicalMemory::create(cuda, SIZE, &properties).expect("physical memory");
    let reserve = || Reservation::new(cuda, SIZE, granularity).expect("a reservation");

    let pair = paired(
        || {
            let (time, address) = timed(|| raw.reserve(SIZE));
            raw.free(address, SIZE);
            time
        },
        || timed(reserve).0,
    );
    report(name, "reserve", &pair);

    let pair = paired(
        || {
            let (time, handle) = timed(|| raw.create(SIZE));
            raw.release(handle);
            time
        },
        || timed(create).0,
    );
    report(name, "create", &pair);

    let (memory, reservation) = (create(), reserve());
    let address = reservation.address().get();
    let pair = paired(
        || {
            let (time, ()) = timed(|| raw.map(address, SIZE, memory.as_raw()));
            raw.unmap(address, SIZE);
            time
        },
        || timed(|| reservation.map(0, &memory).expect("a mapping")).0,
    );
    report(name, "map", &pair);

    let pair = paired(
        || {
            raw.map(address, SIZE, memory.as_raw());
            let (time, ()) = timed(|| raw.set_access(address, SIZE));
            raw.unmap(address, SIZE);
            time
        },
        || {
            let mapping = reservation.map(0, &memory).expect("a mapping");
            timed(|| mapping.set_access(&[Grant::device(0)]).expect("access")).0
        },
    );
    report(name, "set access", &pair);

    let pair = paired(
        || {
            raw.map(address, SIZE, memory.as_raw());
            timed(|| raw.unmap(address, SIZE)).0
        },
        || {
            let mapping = reservation.map(0, &memory).expect("a mapping");
            timed(|| mapping.unmap().expect("unmapping")).0
        },
    );
    report(name, "unmap", &pair);

    // Exports of a driver that does nothing are no file descriptors.
    if name == "nothing" {
        return;
    }
    let pair = paired(
        || timed(|| raw.export(memory.as_raw())).0,
        || timed(|| memory.export_fd().expect("an export")).0,
    );
    report(name, "export", &pair);

    let fd = memory.export_fd().expect("an export");
    let pair = paired(
        || {
            let (time, handle) = timed(|| raw.import(std::os::fd::AsFd::as_fd(&fd)));
            raw.release(handle);
            time
        },
        || timed(|| PhysicalMemory::import_fd(cuda, &fd, SIZE).expect("an import")).0,
    );
    report(name, "import", &pair);
}

/// Time of one lookup in the table after the first, averaged over many.
fn lookup(name: &str, cuda: &Cuda) {
    const LOOKUPS: u32 = 1_000_000;
    let driver = cuda.driver();
    let mut best = Duration::MAX;
    for _ in 0..21 {
        let (time, ()) = timed(|| {
            for _ in 0..LOOKUPS {
                black_box(black_box(driver).address(black_box(Function::cuMemMap)).expect("cuMemMap"));
            }
        });
        best = best.min(time);
    }
    println!("{name:>9} lookup of a function {:.2} ns", best.as_secs_f64() * 1e9 / f64::from(LOOKUPS));
}

fn main() {
    println!(
        "  backend  operation      raw call       cuda-vmm   difference  ({SIZE} bytes, medians of {ROUNDS})"
    );
    let all = backend::all();
    for backend in &all {
        operations(backend.name, &backend.cuda);
    }
    for backend in &all {
        lookup(backend.name, &backend.cuda);
    }
}
