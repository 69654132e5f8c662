//! Calls on streams that are being captured.

use cuda_vmm::Context;
use cuda_vmm::sys::{CUresult, CUstreamCaptureMode};

use super::*;

/// A stream that is being captured.
struct Capture {
    context: Context,
    stream: Stream,
}

impl Capture {
    fn begin(buffer: &ElasticBuffer) -> Self {
        let context = buffer.device().primary_context().unwrap();
        let stream = Stream::new(&context).unwrap();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        {
            let _bound = context.bind().unwrap();
            // SAFETY: the stream was just made.
            unsafe { context.device().cuda().driver().cuStreamBeginCapture(stream.raw(), mode) }.unwrap();
        }
        Self { context, stream }
    }

    /// For calls before the end.
    fn stream(&self) -> StreamRef<'static> {
        // SAFETY: tests use it no longer than this lives.
        unsafe { StreamRef::from_raw(self.stream.raw().cast()) }
    }

    /// Does what no capture allows: waits for its stream.
    fn invalidate(&self) {
        let _bound = self.context.bind().unwrap();
        // SAFETY: the stream is alive.
        let error = unsafe { self.context.device().cuda().driver().cuStreamSynchronize(self.stream.raw()) };
        assert_eq!(error.unwrap_err().status(), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    }

    /// Ends the capture; its graph never runs.
    fn end(self) -> Result<(), Option<CUresult>> {
        let driver = self.context.device().cuda().driver();
        let mut graph = std::ptr::null_mut();
        let _bound = self.context.bind().unwrap();
        // SAFETY: the capture began on this stream and thread.
        unsafe { driver.cuStreamEndCapture(self.stream.raw(), &mut graph) }
            .map_err(|error| error.status())?;
        // SAFETY: it was just made, and is destroyed once.
        unsafe { driver.cuGraphDestroy(graph) }.map_err(|error| error.status())
    }
}

#[test]
fn a_captured_call_is_noticed_once() {
    Recorder::run(|driver, cuda| {
        let mut bench = Bench::new(cuda);
        for _ in 0..2 {
            drop(bench.dispatch(no_counts).unwrap());
        }
        let capture = Capture::begin(&bench.buffer);
        let on = capture.stream();
        // What would have to wait is refused, and takes nothing.
        let (refused, calls) = driver.calls(|| bench.dispatch(|args| args.stream(on)));
        assert!(matches!(refused, Err(Error::Invalid { parameter: "exact counts", .. })), "{refused:?}");
        assert_eq!(calls, [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuCtxPopCurrent]);
        // Captured: no wait for what runs outside, and one question, whether it is captured.
        let (captured, calls) = driver.calls(|| bench.dispatch(|args| no_counts(args).stream(on)).unwrap());
        assert_eq!(calls, STEADY);
        // It counts, since all ranks capture alike, and holds its slots.
        assert_eq!(captured.handle().0.number, 3);
        let other = bench.dispatch(|args| no_counts(args).stream(on)).unwrap();
        let held = bench.dispatch(|args| no_counts(args).stream(on));
        assert!(matches!(held, Err(Error::SlotsHeld { what: "dispatch result", slots: 2 })), "{held:?}");
        drop(other);
        // Its event is a point in the graph.
        let error = captured.event().is_complete().unwrap_err();
        assert!(matches!(error, Error::Invalid { parameter: "event", .. }), "{error}");
        assert!(captured.event().wait(LONG).is_err());
        capture.end().unwrap();
        let capture = Capture::begin(&bench.buffer);
        capture.invalidate();
        let (refused, calls) =
            driver.calls(|| bench.combine(&captured, |args| args.stream(capture.stream())));
        assert!(matches!(refused, Err(Error::Invalid { parameter: "stream", .. })), "{refused:?}");
        assert_eq!(calls, [F::cuCtxPushCurrent, F::cuStreamIsCapturing, F::cuCtxPopCurrent]);
        assert_eq!(capture.end(), Err(Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)));
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
        // Kernels are loaded and events made before.
        drop(bench.dispatch(no_counts).unwrap());
        let capture = Capture::begin(&bench.buffer);
        drop(bench.dispatch(|args| no_counts(args).stream(capture.stream())).unwrap());
        capture.end().unwrap();
        bench.buffer.synchronize(LONG).unwrap();
        let (_, calls) = driver.calls(|| drop(bench.buffer));
        assert!(!calls.contains(&F::cuMemUnmap) && !calls.contains(&F::cuStreamDestroy), "{calls:?}");
        drop(bench.memory);
    });
    assert!(!emulator.ledger().is_empty());
}
