//! What is left when the driver refuses a part of a call.

use std::sync::{Arc, Barrier};
use std::thread;

use cuda_vmm::sys::CUresult;
use cuda_vmm_emu::{Config, Emulator};

use super::super::recorder::Nothing;
use super::*;
use crate::Collectives;

/// An operation of a bench, and how many dispatches it is.
type Operation = (&'static str, fn(&mut Bench, &Dispatched) -> Result<Event>, u32);

const OPERATIONS: [Operation; 5] = [
    ("dispatch", |bench, _| bench.dispatch(no_counts).map(|got| got.event().clone()), 1),
    ("cached dispatch", |bench, kept| bench.cached(kept.handle()).map(|got| got.event().clone()), 1),
    ("combine", |bench, kept| bench.combine(kept, |args| args), 0),
    ("barrier", |bench, _| bench.buffer.barrier(), 0),
    ("copy", |bench, kept| bench.copy_out(kept), 0),
];

/// Refuses one call of the driver that an operation makes, after `before` others, and says which. None if it makes no more.
fn refuse_one(&(name, operation, dispatches): &Operation, before: usize) -> Option<F> {
    let mut refused = None;
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let kept = bench.dispatch(no_counts).unwrap();
        // With these two events in somebody's hands the operation needs another.
        let held = bench.buffer.barrier().unwrap();
        let (result, calls) = driver.calls(|| {
            driver.fail(before, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            operation(&mut bench, &kept)
        });
        if driver.spare() {
            return bench.buffer.synchronize(LONG).unwrap();
        }
        let call = calls[before];
        refused = Some(call);
        if call != F::cuCtxPopCurrent {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Vmm(_)), "{name}, {call:?}: {error}");
            assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{name}, {call:?}: {error}");
        } else {
            // All is done by then.
            result.unwrap();
        }
        let again = operation(&mut bench, &kept);
        if call == F::cuEventRecord {
            // It runs, and nobody can be told when it has run. The other ranks have it behind them, or wait for it.
            let error = again.unwrap_err();
            assert!(matches!(error, Error::Broken { .. }), "{name}: {error}");
            return bench.buffer.synchronize(LONG).unwrap();
        }
        // Nothing was enqueued, and nothing counted.
        again.unwrap().wait(LONG).unwrap();
        let last = bench.dispatch(no_counts).unwrap();
        let ran = if call == F::cuCtxPopCurrent { 2 } else { 1 };
        assert_eq!(last.handle().0.number, 1 + ran * dispatches + 1, "{name}, {call:?}");
        bench.buffer.synchronize(LONG).unwrap();
        drop(held);
    });
    refused
}

#[test]
fn a_refused_call_can_be_repeated_unless_its_end_is_lost() {
    for operation in &OPERATIONS {
        let refused: Vec<F> = (0..).map_while(|before| refuse_one(operation, before)).collect();
        let mut expected = STEADY.to_vec();
        expected.insert(2, F::cuEventCreate);
        if operation.0 == "copy" {
            expected[3] = F::cuMemcpyDtoDAsync;
        }
        assert_eq!(refused, expected, "{}", operation.0);
    }
}

/// One rank copies; several launch one kernel, whatever the size, and a refusal leaves the others waiting for the next call.
#[test]
fn a_refused_collective_can_be_repeated() {
    for (ranks, function) in [(1, F::cuMemcpyDtoDAsync), (2, F::cuLaunchKernelEx)] {
        let emulator = Emulator::new(Config::h200x2().kernels(Arc::new(Nothing))).unwrap();
        let faults = emulator.faults();
        let built = Barrier::new(ranks);
        thread::scope(|scope| {
            for (rank, bootstrap) in thread_group(ranks, LONG).unwrap().into_iter().enumerate() {
                let (driver, built) = (emulator.driver(), &built);
                scope.spawn(move || {
                    let cuda = Cuda::with_driver(driver).unwrap();
                    let builder = Collectives::builder().backend(BackendKind::Cuda).driver(cuda);
                    let mut collectives = builder.build(bootstrap).unwrap();
                    let memory = DeviceMemory::new(collectives.device(), 1).unwrap();
                    for elements in [64, 0] {
                        let mut sum = || {
                            // SAFETY: kernels do nothing, and copies have run before the memory goes.
                            let (given, got) = unsafe {
                                let given = memory.view(0, DType::F32, [1, elements]).unwrap();
                                (given, memory.view_mut(4096, DType::F32, [1, elements]).unwrap())
                            };
                            collectives.all_reduce(given, got)
                        };
                        built.wait();
                        if rank == 0 && (ranks > 1 || elements > 0) {
                            faults.fail_nth(function, 1, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
                            let refused = sum().unwrap_err().to_string();
                            assert!(refused.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{refused}");
                        }
                        built.wait();
                        sum().unwrap().wait(LONG).unwrap();
                    }
                    collectives.close().unwrap();
                });
            }
        });
    }
}

/// Another's stream whose work has no known end: the memory stays, since nobody can say when it is not used any more.
#[test]
fn memory_stays_if_an_end_is_lost_on_the_callers_stream() {
    let emulator = Recorder::run_leaving(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let stream = Stream::new(&bench.buffer.device().primary_context().unwrap()).unwrap();
        // SAFETY: the stream outlives its use.
        let borrowed = unsafe { StreamRef::from_raw(stream.raw().cast()) };
        for _ in 0..2 {
            drop(bench.dispatch(|args| args.without_counts().stream(borrowed)).unwrap());
        }
        let record = NAMED.iter().position(|&f| f == F::cuEventRecord).unwrap();
        driver.fail(record, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let lost = bench.dispatch(|args| args.without_counts().stream(borrowed));
        assert!(matches!(lost, Err(Error::Vmm(_))), "{lost:?}");
        let error = bench.buffer.synchronize(LONG).unwrap_err();
        assert!(matches!(error, Error::StillRunning { .. }), "{error}");
        drop(bench);
    });
    assert!(!emulator.ledger().is_empty());
}

#[test]
fn a_wait_for_another_stream_or_an_event_can_be_refused() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let stream = Stream::new(&bench.buffer.device().primary_context().unwrap()).unwrap();
        // SAFETY: the stream outlives its use.
        let borrowed = unsafe { StreamRef::from_raw(stream.raw().cast()) };
        let before = bench.dispatch(no_counts).unwrap();
        drop(bench.dispatch(no_counts));
        // SAFETY: the event was recorded, and means what it means as long as the result is there.
        let after = unsafe { EventRef::from_raw(before.event().as_raw().unwrap()) };
        // Both waits; a driver that can't number the stream is no error.
        for (at, is_error) in [(3, true), (4, true), (2, false)] {
            driver.fail(at, CUresult::CUDA_ERROR_INVALID_VALUE);
            let (got, calls) = driver.calls(|| {
                bench.dispatch(|args| args.without_counts().stream(borrowed).after(after)).map(drop)
            });
            assert!(!driver.spare());
            assert_eq!(got.is_err(), is_error, "{calls:?}");
            assert_eq!(calls.contains(&F::cuLaunchKernelEx), !is_error, "{calls:?}");
        }
        assert_eq!(bench.dispatch(no_counts).unwrap().handle().0.number, 4);
        bench.buffer.synchronize(LONG).unwrap();
    });
}
