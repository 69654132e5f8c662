//! Symmetric memory over the software driver: the three kinds of ranges, and failures at every call of the driver.

use std::time::Duration;

use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUresult, Function};
use cuda_vmm_emu::{Config, Emulator};
use deepep_core::bootstrap::Bootstrap;
use deepep_core::domain::Domain;
use deepep_core::symmetric::{Heap, Request, Segments, allocate};
use deepep_core::tensor::Space;
use deepep_core::{Error, Result};
use integration_tests::ranks::{LONG, on_threads};

const MIB: usize = 1 << 20;

fn request(host_bytes: usize, hybrid: bool, rank: usize) -> Request {
    Request { device_bytes: 3 * MIB, host_bytes, hybrid, device: (rank % 2) as i32, space: Space::Host }
}

fn heap<B: Bootstrap>(bootstrap: &B, emulator: &Emulator, request: &Request) -> Result<Heap> {
    let domain = Domain::discover(bootstrap)?;
    let cuda = Cuda::with_driver(emulator.driver())?;
    allocate(bootstrap, &domain, &cuda, request)
}

/// Every rank marks its range, and every rank sees every mark where the offset says.
fn marks_are_seen(ranks: usize, host_bytes: usize, hybrid: bool) {
    let kind = Segments::choose(host_bytes, hybrid);
    on_threads(ranks, LONG, |bootstrap| {
        let me = bootstrap.rank();
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let heap = heap(&bootstrap, &emulator, &request(host_bytes, hybrid, me)).unwrap();
        let hosts = match kind {
            Segments::Device => 0,
            Segments::Elastic => 1,
            Segments::HybridElastic => ranks,
        };
        assert_eq!(heap.bytes(), 4 * MIB + hosts * host_bytes, "device memory is rounded up to 2 MiB");
        assert_eq!((heap.rank(), heap.ranks()), (me, ranks));
        assert!(heap.bases().iter().all(|base| base.is_multiple_of(2 * MIB as u64)));
        assert_eq!((heap.segments(), heap.device_bytes()), (kind, 4 * MIB));
        let zeros = emulator.read(heap.base(), heap.bytes()).unwrap();
        assert!(zeros.iter().all(|&b| b == 0), "new memory is zero");
        bootstrap.barrier().unwrap();
        let mark =
            |offset: usize, text: &str| emulator.write(heap.base() + offset as u64, text.as_bytes()).unwrap();
        mark(0, &format!("first {me}"));
        mark(4 * MIB - 16, &format!("last {me}"));
        if host_bytes > 0 {
            let end = heap.host_memory(me).unwrap().end - 16;
            emulator.write(end, format!("host {me}").as_bytes()).unwrap();
        }
        bootstrap.barrier().unwrap();
        let expect = |rank: usize, offset: usize, text: &str| {
            let address = heap.address(rank, offset).unwrap();
            assert_eq!(
                emulator.read(address, text.len()).unwrap(),
                text.as_bytes(),
                "rank {rank} at {offset}"
            );
            assert_eq!(heap.locate(address), Some((rank, offset)));
        };
        for peer in 0..ranks {
            if let Some(host) = heap.host_memory(peer) {
                let text = format!("host {peer}");
                assert_eq!(emulator.read(host.end - 16, text.len()).unwrap(), text.as_bytes());
            }
            expect(peer, 0, &format!("first {peer}"));
            expect(peer, 4 * MIB - 16, &format!("last {peer}"));
            match kind {
                Segments::Device => {}
                Segments::Elastic => expect(peer, 4 * MIB + host_bytes - 16, &format!("host {peer}")),
                // Everybody's host memory is in every range.
                Segments::HybridElastic => {
                    for owner in 0..ranks {
                        let end = 4 * MIB + (owner + 1) * host_bytes;
                        expect(peer, end - 16, &format!("host {owner}"));
                    }
                }
            }
        }
        bootstrap.barrier().unwrap();
        drop(heap);
        emulator.assert_empty();
    });
}

#[test]
fn device_memory_alone() {
    marks_are_seen(1, 0, false);
    marks_are_seen(4, 0, false);
    marks_are_seen(3, 0, true);
}

#[test]
fn elastic() {
    marks_are_seen(1, 2 * MIB, false);
    marks_are_seen(3, 4 * MIB, false);
}

#[test]
fn hybrid_elastic() {
    marks_are_seen(1, 2 * MIB, true);
    marks_are_seen(4, 2 * MIB, true);
}

/// Memory that peers have mapped outlives its owner's heap.
#[test]
fn a_peers_memory_stays_after_it_left() {
    on_threads(2, LONG, |bootstrap| {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let heap = heap(&bootstrap, &emulator, &request(0, false, bootstrap.rank())).unwrap();
        if bootstrap.rank() == 0 {
            emulator.write(heap.base(), b"stays").unwrap();
            bootstrap.barrier().unwrap();
            drop(heap);
            bootstrap.barrier().unwrap();
        } else {
            bootstrap.barrier().unwrap();
            bootstrap.barrier().unwrap();
            assert_eq!(emulator.read(heap.address(0, 0).unwrap(), 5).unwrap(), b"stays");
            drop(heap);
        }
        emulator.assert_empty();
    });
}

/// Whichever driver call fails on one rank: every rank gets an error at once, and nothing is left on any of them.
#[test]
fn a_failure_on_one_rank_is_an_error_on_all_and_leaves_nothing() {
    let ranks = 3;
    let mut failures = 0;
    for function in [
        Function::cuMemCreate,
        Function::cuMemExportToShareableHandle,
        Function::cuMemImportFromShareableHandle,
        Function::cuMemAddressReserve,
        Function::cuMemMap,
        Function::cuMemSetAccess,
        Function::cuDeviceGetUuid,
    ] {
        for nth in 1..100 {
            assert!(nth < 99, "{function:?} is called without end");
            let results = on_threads(ranks, LONG, |bootstrap| {
                let me = bootstrap.rank();
                let emulator = Emulator::new(Config::h200x2()).unwrap();
                if me == 1 {
                    emulator.faults().fail_nth(function, nth, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
                }
                let result = heap(&bootstrap, &emulator, &request(2 * MIB, true, me));
                let hit = me != 1 || emulator.faults().calls(function) >= nth;
                // Results of all ranks exist before any heap goes.
                let _ = bootstrap.barrier();
                let error = result.map(drop).err();
                emulator.assert_empty();
                (error, hit)
            });
            if !results[1].1 {
                // The call is not made so often: the end of this function's calls.
                assert!(results.iter().all(|(error, _)| error.is_none()), "{results:?}");
                break;
            }
            failures += 1;
            for (rank, (error, _)) in results.iter().enumerate() {
                let error =
                    error.as_ref().unwrap_or_else(|| panic!("{function:?} {nth}: rank {rank} succeeded"));
                let expected = match rank {
                    1 => matches!(error, Error::Vmm(_)),
                    _ => matches!(error, Error::PeerFailed { rank: 1, .. }),
                };
                assert!(expected, "{function:?} {nth}, rank {rank}: {error}");
            }
        }
    }
    assert!(failures >= 20, "only {failures} calls were made to fail");
}

#[test]
fn a_host_size_that_is_no_multiple_is_an_error_on_all() {
    let results = on_threads(2, LONG, |bootstrap| {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let host_bytes = if bootstrap.rank() == 0 { 2 * MIB } else { 4096 };
        let result = heap(&bootstrap, &emulator, &request(host_bytes, false, 0)).map(drop);
        emulator.assert_empty();
        result
    });
    assert!(matches!(&results[0], Err(Error::PeerFailed { rank: 1, .. })), "{results:?}");
    assert!(matches!(&results[1], Err(Error::Invalid { parameter: "host_bytes", .. })), "{results:?}");
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let results = on_threads(3, Duration::from_millis(300), |bootstrap| {
        if bootstrap.rank() == 2 {
            std::thread::sleep(Duration::from_secs(1));
            return Ok(());
        }
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let result = heap(&bootstrap, &emulator, &request(0, false, 0)).map(drop);
        emulator.assert_empty();
        result
    });
    for result in &results[..2] {
        assert!(matches!(result, Err(Error::PeerTimeout { missing, .. }) if *missing == [2]), "{result:?}");
    }
}
