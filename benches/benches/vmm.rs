//! How long virtual memory management takes, by operation and size, on each driver of this machine.

use benches::backend;
use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use cuda_vmm::{Grant, Granularity, HandleTypes, PhysicalMemory, Properties, Reservation};
use std::hint::black_box;
use std::time::Duration;

const SIZES: [(&str, usize); 3] = [("2 MiB", 2 << 20), ("64 MiB", 64 << 20), ("1 GiB", 1 << 30)];

fn operations(criterion: &mut Criterion) {
    let properties = Properties::device(0).handle_types(HandleTypes::POSIX_FD);
    let granularity = Granularity::new(2 << 20).expect("a power of two");
    for backend in backend::all() {
        // Exports of a driver that does nothing are no file descriptors.
        if backend.name == "nothing" {
            continue;
        }
        let cuda = &backend.cuda;
        let create = |size| PhysicalMemory::create(cuda, size, &properties).expect("physical memory");
        let reserve = |size| Reservation::new(cuda, size, granularity).expect("a reservation");
        for (label, size) in SIZES {
            let id = |operation| BenchmarkId::new(format!("{}/{operation}", backend.name), label);
            let mut group = criterion.benchmark_group("vmm");
            group
                .sample_size(20)
                .warm_up_time(Duration::from_millis(300))
                .measurement_time(Duration::from_secs(1));
            group.bench_function(id("reserve"), |b| b.iter_with_large_drop(|| reserve(size)));
            group.bench_function(id("create"), |b| {
                // Dropped one by one: many at once would not fit.
                b.iter_batched(|| (), |()| create(size), BatchSize::PerIteration);
            });
            let memory = create(size);
            let reservation = reserve(size);
            group.bench_function(id("map"), |b| {
                b.iter_batched(
                    || (),
                    |()| reservation.map(0, &memory).expect("a mapping"),
                    BatchSize::PerIteration,
                );
            });
            group.bench_function(id("set access"), |b| {
                b.iter_batched(
                    || reservation.map(0, &memory).expect("a mapping"),
                    |mapping| {
                        mapping.set_access(&[Grant::device(0)]).expect("access");
                        mapping
                    },
                    BatchSize::PerIteration,
                );
            });
            group.bench_function(id("unmap"), |b| {
                b.iter_batched(
                    || {
                        let mapping = reservation.map(0, &memory).expect("a mapping");
                        mapping.set_access(&[Grant::device(0)]).expect("access");
                        mapping
                    },
                    |mapping| mapping.unmap().expect("unmapping"),
                    BatchSize::PerIteration,
                );
            });
            group.bench_function(id("export"), |b| {
                b.iter_batched(|| (), |()| memory.export_fd().expect("an export"), BatchSize::PerIteration);
            });
            let fd = memory.export_fd().expect("an export");
            group.bench_function(id("import"), |b| {
                b.iter_batched(
                    || (),
                    |()| black_box(PhysicalMemory::import_fd(cuda, &fd, size).expect("an import")),
                    BatchSize::PerIteration,
                );
            });
            group.finish();
        }
    }
}

criterion_group!(benches, operations);
criterion_main!(benches);
