//! Calls on streams that are being captured.

use cuda_vmm::sys::CUstreamCaptureStatus;

use super::*;

#[test]
fn a_captured_call_is_noticed_once() {
    type S = CUstreamCaptureStatus;
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        for _ in 0..2 {
            drop(bench.dispatch(no_counts).unwrap());
        }
        driver.capture(S::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        // What would have to wait is refused, and takes nothing.
        let (refused, calls) = driver.calls(|| bench.dispatch(|args| args));
        assert!(matches!(refused, Err(Error::Invalid { parameter: "exact counts", .. })), "{refused:?}");
        assert_eq!(calls, [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuCtxPopCurrent]);
        // Captured: no wait for what runs outside, and one question, whether it is captured.
        let (captured, calls) = driver.calls(|| bench.dispatch(no_counts).unwrap());
        assert_eq!(calls, STEADY);
        // It counts, since all ranks capture alike, and holds its slots.
        assert_eq!(captured.handle().0.number, 3);
        let other = bench.dispatch(no_counts).unwrap();
        let held = bench.dispatch(no_counts);
        assert!(matches!(held, Err(Error::SlotsHeld { what: "dispatch result", slots: 2 })), "{held:?}");
        drop(other);
        // Its event is a point in the graph.
        let error = captured.event().is_complete().unwrap_err();
        assert!(matches!(error, Error::Invalid { parameter: "event", .. }), "{error}");
        assert!(captured.event().wait(LONG).is_err());
        driver.capture(S::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        let (refused, calls) = driver.calls(|| bench.buffer.barrier());
        assert!(matches!(refused, Err(Error::Invalid { parameter: "stream", .. })), "{refused:?}");
        assert_eq!(calls, [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuCtxPopCurrent]);
        driver.capture(S::CU_STREAM_CAPTURE_STATUS_NONE);
        // A result of a captured dispatch is looked at when the caller says so.
        captured.check().unwrap();
        let direct = bench.dispatch(no_counts).unwrap();
        direct.event().wait(LONG).unwrap();
        // Closing is the caller's word that no graph will run.
        drop((direct, captured));
        let Bench { buffer, memory } = bench;
        buffer.close().unwrap();
        drop(memory);
    });
}

#[test]
fn a_captured_buffer_that_is_not_closed_keeps_its_memory() {
    let emulator = Recorder::run_leaving(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        driver.capture(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        drop(bench.dispatch(no_counts).unwrap());
        driver.capture(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        bench.buffer.synchronize(LONG).unwrap();
        let (_, calls) = driver.calls(|| drop(bench.buffer));
        assert!(!calls.contains(&F::cuMemUnmap) && !calls.contains(&F::cuStreamDestroy), "{calls:?}");
        drop(bench.memory);
    });
    assert!(!emulator.ledger().is_empty());
}
