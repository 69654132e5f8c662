//! What kernels tell the host, and what becomes of it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_vmm::sys::CUresult;

use super::super::status::write_record;
use super::*;
use crate::jit::params::DispatchParams;
use crate::layout::{CountsLayout, RecordKind, StatusLayout, StatusRecord};

/// What a dispatch's kernel writes for the host: counts if it asks, and a record.
fn kernel(params: *const c_void, totals: [u32; 4], record: Option<(RecordKind, StatusRecord)>) {
    type C = CountsLayout;
    // SAFETY: tests call this for dispatches only, whose one parameter this is.
    let params = unsafe { &*params.cast::<DispatchParams>() };
    if let Some((kind, record)) = record {
        let at = params.domain.status + StatusLayout::new(1).record(kind) as u64;
        // SAFETY: the place of that record in the rank's status block, which the emulator's host and devices see at one address.
        unsafe { write_record(at as *mut u8, record) };
    }
    let cells = totals.into_iter().enumerate();
    let experts = [1, 2, 1, 1].into_iter().enumerate().map(|(j, n)| (C::EXPERT_COUNT + j, n));
    for (cell, value) in cells.chain([(C::RANK_PSUM, totals[C::TOKENS])]).chain(experts) {
        if params.count_tag != 0 {
            // SAFETY: a cell of the counts, aligned, in the same block.
            let cell = unsafe { AtomicU64::from_ptr((params.host_counts as *mut u64).add(cell)) };
            cell.store(u64::from(params.count_tag) << 32 | u64::from(value), Ordering::Release);
        }
    }
}

#[test]
fn exact_counts_are_no_further_calls() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        driver.on_launch(|_, params| kernel(params, [5, 5, 0, 0], None));
        for round in 0..4 {
            let (got, calls) = driver.calls(|| {
                let got = bench.dispatch(|args| args).unwrap();
                (got.tokens(), got.rows(), got.counts().unwrap().expert_counts.clone())
            });
            assert_eq!(got, (5, 5, vec![1, 2, 1, 1]), "{round}");
            // The first two make an event each.
            if round >= 2 {
                assert_eq!(calls, STEADY, "{round}");
            }
        }
        bench.buffer.synchronize(LONG).unwrap();
    });
}

fn bad_id(sequence: u32) -> (RecordKind, StatusRecord) {
    let record =
        StatusRecord { sequence, index: 3, lane: 1, seen: 7, expected: 4, ..StatusRecord::default() };
    (RecordKind::BadExpert, record)
}

#[test]
fn wrong_ids_do_not_lose_the_result() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        driver.on_launch(|_, params| kernel(params, [5, 5, 0, 0], Some(bad_id(1))));
        let outcome = bench.dispatch(|args| args);
        let Err(Error::WrongIds { problem, dispatched }) = outcome else { panic!("{outcome:?}") };
        let says = |error: &Error| {
            assert!(matches!(error, Error::ExpertOutOfRange { token: 3, lane: 1, expert: 7, experts: 4, .. }))
        };
        says(&problem);
        assert_eq!((dispatched.tokens(), dispatched.handle().counts().unwrap().rows), (5, 5));
        says(&dispatched.check().unwrap_err());
        driver.on_launch(|_, _| {});
        bench.combine(&dispatched, |args| args).unwrap().wait(LONG).unwrap();
        // A good call is not blamed for it, with counts or without.
        driver.on_launch(|_, params| kernel(params, [5, 5, 0, 0], None));
        bench.dispatch(|args| args).unwrap();
        let got = bench.dispatch(no_counts).unwrap();
        got.event().wait(LONG).unwrap();
        got.check().unwrap();
        drop(got);
        // Over capacity, which all ranks know of, comes first.
        driver.on_launch(|_, params| kernel(params, [0, 0, 9, 9], Some(bad_id(4))));
        let outcome = bench.dispatch(|args| args);
        assert!(matches!(outcome, Err(Error::CapacityExceeded { needed: 9, .. })), "{outcome:?}");
        drop(dispatched);
    });
}

/// Which lane of two was kept is read from the device: a detail, without which the call is no worse.
#[test]
fn a_detail_that_can_not_be_read_does_not_break_the_buffer() {
    let duplicate = |sequence| {
        let record = StatusRecord { sequence, index: 3, lane: 1, seen: 0, ..StatusRecord::default() };
        (RecordKind::DuplicateExpert, record)
    };
    for refused in [false, true] {
        Recorder::run(|driver, cuda| {
            let mut bench = Bench::new(cuda);
            driver.on_launch(move |_, params| kernel(params, [5, 5, 0, 0], Some(duplicate(1))));
            if refused {
                driver.fail_next(F::cuStreamCreate, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            let outcome = bench.dispatch(|args| args);
            assert!(!driver.spare());
            let Err(Error::WrongIds { problem, dispatched }) = outcome else { panic!("{outcome:?}") };
            // Kernels here write no tables: all lanes of the handle name expert 0.
            let Error::DuplicateExpert { token: 3, first, second: 1, expert: 0, .. } = *problem else {
                panic!("{problem}")
            };
            assert_eq!(first, if refused { None } else { Some(0) });
            let lanes = if refused { "in lane 1 and in one before it" } else { "in lanes 0 and 1" };
            assert!(problem.to_string().contains(lanes), "{problem}");
            driver.on_launch(|_, _| {});
            bench.combine(&dispatched, |args| args).unwrap().wait(LONG).unwrap();
            assert!(dispatched.check().unwrap_err().to_string().contains("in lanes 0 and 1"));
            drop(dispatched);
        });
    }
}

/// Nothing says any more that a copy out of the heap has ended: it stays.
#[test]
fn memory_stays_if_the_end_of_a_readback_is_lost() {
    let emulator = Recorder::run_leaving(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let got = bench.dispatch(no_counts).unwrap();
        got.event().wait(LONG).unwrap();
        driver.fail_next(F::cuEventRecord, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let lost = got.check();
        assert!(matches!(lost, Err(Error::Vmm(_))) && !driver.spare(), "{lost:?}");
        drop(got);
        bench.buffer.close().unwrap();
    });
    assert!(!emulator.ledger().is_empty());
}

#[test]
fn a_dispatch_that_has_not_run_can_not_be_checked() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        let gate = DeviceMemory::new(bench.buffer.device(), 4).unwrap();
        gate.write(0, &[0; 4]).unwrap();
        let context = bench.buffer.device().primary_context().unwrap();
        let stream = Stream::new(&context).unwrap();
        {
            let _bound = context.bind().unwrap();
            // SAFETY: the word lies in memory that outlives the wait.
            unsafe { cuda.driver().cuStreamWaitValue32(stream.raw(), gate.address(), 1, 0) }.unwrap();
        }
        // SAFETY: the stream outlives its use.
        let borrowed = unsafe { StreamRef::from_raw(stream.raw().cast()) };
        let got = bench.dispatch(|args| args.without_counts().stream(borrowed)).unwrap();
        let (checked, calls) = driver.calls(|| got.check());
        assert!(matches!(checked, Err(Error::StillRunning { what: "a dispatch", .. })), "{checked:?}");
        assert!(!calls.contains(&F::cuMemcpyDtoHAsync), "{calls:?}");
        gate.write(0, &1_u32.to_ne_bytes()).unwrap();
        got.event().wait(LONG).unwrap();
        got.check().unwrap();
    });
}
