//! What `cuda-vmm` adds to the raw calls, as a difference in one run.
//!
//! `cargo bench -p benches --bench vmm_overhead`. The raw call and ours are made in fours: raw, ours, ours, raw, then ours, raw, raw, ours, again and
//! again. A difference is that of one such four, so that what drifts falls out, and so does what depends on the call before. Two differences are
//! printed, each the median of all fours with its 95 % confidence interval:
//! - end to end: of the whole operations. What it can resolve is the width of its interval: for a call that takes a millisecond and whose length
//!   varies by a percent, not much below a microsecond. It also holds what the driver takes more or less for the same call, depending on where its
//!   arguments lie and what was done before.
//! - outside of the driver: of what is left of each operation when the time between a call's entry into the driver and its return is taken off. It
//!   does not depend on how long the call takes, and is the one that tells what the crate costs. It needs two readings of the clock in each call,
//!   which both ways have.
//!
//! The backends are the GPU, if there is one; the software driver; and a driver whose calls do nothing: our cost with everything in the caches.
//! `cold` is that driver where its calls leave the caches cold, as one does that waits in the kernel: for the call that takes about a millisecond on
//! a GPU, since our code around it is then fetched from memory. The last lines are the cost of finding a function in the table.

use benches::watched::{take_inside, watched};
use benches::{backend, raw::Raw};
use cuda_vmm::sys::Function;
use cuda_vmm::{Cuda, Grant, Granularity, HandleTypes, PhysicalMemory, Properties, Reservation};
use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

const SIZE: usize = 2 << 20;

/// What one operation took, in nanoseconds.
#[derive(Clone, Copy)]
struct Time {
    whole: f64,
    outside: f64,
}

/// A median, and the interval in which it lies with a probability of 95 %.
struct Median {
    low: f64,
    middle: f64,
    high: f64,
}

impl Median {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len() as f64;
        // By ranks: whatever the distribution is, the number of values below its median is binomial.
        let reach = 0.98 * count.sqrt();
        let at = |rank: f64| values[rank.clamp(0.0, count - 1.0) as usize];
        Self { low: at(count / 2.0 - reach), middle: at(count / 2.0), high: at(count / 2.0 + reach) }
    }
}

impl fmt::Display for Median {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>7.0} [{:>6.0}, {:>6.0}]", self.middle, self.low, self.high)
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (Time, T) {
    take_inside();
    let start = Instant::now();
    let result = black_box(work());
    let whole = start.elapsed();
    let nanoseconds = |time: Duration| time.as_secs_f64() * 1e9;
    let outside = nanoseconds(whole) - nanoseconds(take_inside());
    (Time { whole: nanoseconds(whole), outside }, result)
}

/// One backend's table.
struct Table<'name> {
    name: &'name str,
    fours: usize,
}

impl Table<'_> {
    /// Times two operations and prints a line.
    fn compare(&self, operation: &str, mut raw: impl FnMut() -> Time, mut ours: impl FnMut() -> Time) {
        let (mut whole, mut outside) = (Vec::new(), Vec::new());
        let (mut raws, mut all) = (Vec::new(), Vec::new());
        for four in 0..self.fours + self.fours / 10 {
            let ((a, d), (b, c)) = if four % 2 == 0 {
                let (a, b, c, d) = (raw(), ours(), ours(), raw());
                ((a, d), (b, c))
            } else {
                let (b, a, d, c) = (ours(), raw(), raw(), ours());
                ((a, d), (b, c))
            };
            // The first ones warm up.
            if four < self.fours / 10 {
                continue;
            }
            raws.extend([a.whole, d.whole]);
            all.extend([b.whole, c.whole]);
            whole.push((b.whole + c.whole - a.whole - d.whole) / 2.0);
            outside.push((b.outside + c.outside - a.outside - d.outside) / 2.0);
        }
        let (raws, all) = (Median::of(raws), Median::of(all));
        println!(
            "{:>9} {operation:>10} {:>9.0} {:>9.0}  {}  {}",
            self.name,
            raws.middle,
            all.middle,
            Median::of(whole),
            Median::of(outside)
        );
    }
}

fn operations(name: &str, cuda: &Cuda, fours: usize) {
    let raw = Raw(cuda.driver());
    let table = Table { name, fours };
    let granularity = Granularity::new(SIZE).expect("a power of two");
    let properties = Properties::device(0).handle_types(HandleTypes::POSIX_FD);
    let create = || PhysicalMemory::create(cuda, SIZE, &properties).expect("physical memory");
    let reserve = || Reservation::new(cuda, SIZE, granularity).expect("a reservation");
    let (memory, reservation) = (create(), reserve());
    let address = reservation.address().get();

    table.compare(
        "set access",
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
    if name == "cold" {
        return;
    }
    table.compare(
        "reserve",
        || {
            let (time, address) = timed(|| raw.reserve(SIZE));
            raw.free(address, SIZE);
            time
        },
        || timed(reserve).0,
    );
    table.compare(
        "create",
        || {
            let (time, handle) = timed(|| raw.create(SIZE));
            raw.release(handle);
            time
        },
        || timed(create).0,
    );
    table.compare(
        "map",
        || {
            let (time, ()) = timed(|| raw.map(address, SIZE, memory.as_raw()));
            raw.unmap(address, SIZE);
            time
        },
        || timed(|| reservation.map(0, &memory).expect("a mapping")).0,
    );
    table.compare(
        "unmap",
        || {
            raw.map(address, SIZE, memory.as_raw());
            timed(|| raw.unmap(address, SIZE)).0
        },
        || {
            let mapping = reservation.map(0, &memory).expect("a mapping");
            timed(|| mapping.unmap().expect("unmapping")).0
        },
    );

    // Exports of a driver that does nothing are no file descriptors.
    if name == "nothing" {
        return;
    }
    table.compare(
        "export",
        || timed(|| raw.export(memory.as_raw())).0,
        || timed(|| memory.export_fd().expect("an export")).0,
    );
    let fd = memory.export_fd().expect("an export");
    table.compare(
        "import",
        || {
            let (time, handle) = timed(|| raw.import(std::os::fd::AsFd::as_fd(&fd)));
            raw.release(handle);
            time
        },
        || timed(|| PhysicalMemory::import_fd(cuda, &fd, SIZE).expect("an import")).0,
    );
}

/// Time of one lookup in the table after the first, averaged over many.
fn lookup(name: &str, cuda: &Cuda) {
    const LOOKUPS: u32 = 1_000_000;
    let driver = cuda.driver();
    let mut best = Duration::MAX;
    for _ in 0..21 {
        let start = Instant::now();
        for _ in 0..LOOKUPS {
            black_box(black_box(driver).address(black_box(Function::cuMemMap)).expect("cuMemMap"));
        }
        best = best.min(start.elapsed());
    }
    println!("{name:>9} lookup of a function {:.2} ns", best.as_secs_f64() * 1e9 / f64::from(LOOKUPS));
}

fn main() {
    println!("{SIZE} bytes; nanoseconds; medians, with their 95 % confidence intervals in brackets.");
    println!(
        "End to end a difference below half the width of its interval is not resolved; outside of the driver it is."
    );
    println!(
        "  backend  operation       raw  cuda-vmm  difference, end to end    difference, outside of the driver"
    );
    let all = backend::all();
    for backend in &all {
        watched(&backend.cuda, |cuda| operations(backend.name, cuda, 1000));
        if backend.name == "nothing" {
            backend::cold(|cold| watched(&cold.cuda, |cuda| operations(cold.name, cuda, 400)));
        }
    }
    for backend in &all {
        lookup(backend.name, &backend.cuda);
    }
}
