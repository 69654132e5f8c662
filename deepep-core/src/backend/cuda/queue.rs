//! Where operations are enqueued: the caller's stream or the rank's own, in the order in which they are called.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUresult, CUstream, CUstreamCaptureStatus, CallError, Driver};

use super::call_failed;
use super::events::{CudaEvent, EventPool};
use super::reports::Reports;
use super::stream::Stream;
use super::wait::{Uncaptured, until};
use crate::backend::Order;
use crate::error::{Error, Result};
use crate::stream::{Event, EventSource, StreamRef};

/// The operations of one rank, in order, on whatever streams the calls name.
pub(crate) struct Queue {
    context: Context,
    own: Stream,
    events: Arc<EventPool>,
    reports: Arc<Reports>,
    /// The newest operation that was not captured. Whoever has the turn holds it: a result's copies may come from another thread than
    /// the buffer's calls, and the order of waits is that of work and of events.
    last: Mutex<Last>,
    /// Something was captured: graphs may use the same memory at any time.
    captures: AtomicBool,
    closed: AtomicBool,
}

/// What is known of the end of the newest operation.
#[derive(Default)]
enum Last {
    /// There was none.
    #[default]
    Nothing,
    /// Its stream and its end.
    Ends(usize, Arc<CudaEvent>),
    /// Something was enqueued there, and its end could not be recorded.
    Lost(usize),
}

/// One operation's turn: between [`Queue::begin`] and [`Turn::end`] its work is enqueued, and nobody else's. A turn that is dropped was given up half-way: what it has
/// enqueued until then counts.
pub(crate) struct Turn<'q> {
    pub(crate) stream: CUstream,
    /// The stream is being captured.
    pub(crate) captured: bool,
    context: &'q Context,
    last: MutexGuard<'q, Last>,
    /// To be recorded at the end; made before anything is enqueued, so that only recording it can fail then.
    event: Option<CudaEvent>,
}

impl Turn<'_> {
    /// The end of the operation.
    pub(crate) fn end(mut self) -> Result<Arc<CudaEvent>> {
        let Some(event) = self.event.take() else {
            return Err(Error::invalid("end of an operation", "a second one", "an operation ends once"));
        };
        self.record(event)
    }

    fn record(&mut self, event: CudaEvent) -> Result<Arc<CudaEvent>> {
        let bound = self.context.bind();
        let event = bound.map_err(Error::from).and_then(|_bound| {
            event.record(self.stream)?;
            Ok(Arc::new(event))
        });
        // What is captured does not run.
        if !self.captured {
            *self.last = match &event {
                Ok(event) => Last::Ends(self.stream as usize, event.clone()),
                Err(_) => Last::Lost(self.stream as usize),
            };
        }
        event
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(event) = self.event.take()
            && !self.captured
        {
            // A failure is remembered by the queue.
            let _ = self.record(event);
        }
    }
}

impl Queue {
    pub(crate) fn new(context: &Context, reports: Arc<Reports>) -> Result<Self> {
        let (own, events) = (Stream::new(context)?, EventPool::new(context.clone()));
        let (captures, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { context: context.clone(), own, events, reports, last: Mutex::default(), captures, closed })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn reports(&self) -> &Arc<Reports> {
        &self.reports
    }

    fn driver(&self) -> &Driver {
        self.context.device().cuda().driver()
    }

    /// The stream of operations for which the caller gives none.
    pub(crate) fn own(&self) -> StreamRef<'_> {
        // SAFETY: the stream lives as long as this, in the context of the rank's device.
        unsafe { StreamRef::from_raw(self.own.raw().cast::<c_void>()) }
    }

    fn stream(&self, order: &Order<'_>) -> CUstream {
        order.stream.map_or(self.own.raw(), |stream| stream.as_raw().cast())
    }

    /// Checks that an operation can be enqueued like this, and that the host can wait for it if it is to.
    pub(crate) fn admit(&self, order: &Order<'_>, waits: bool) -> Result<()> {
        let _bound = self.context.bind()?;
        if self.captured(self.stream(order))? && waits {
            let need = "a stream that is being captured does not run; dispatch with `without_counts`";
            return Err(Error::invalid("exact counts", "asked for", need));
        }
        Ok(())
    }

    fn captured(&self, stream: CUstream) -> Result<bool> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive (StreamRef's promise, or the own one); `status` is valid for one write.
        unsafe { self.driver().cuStreamIsCapturing(stream, &mut status) }
            .map_err(|source| call_failed("asking whether a stream is being captured".into(), source))?;
        is_captured(status)
    }

    /// The turn of an operation in which ranks meet. An error if some rank gave up before. An inner one is about this call: nothing was
    /// enqueued, and it can be repeated.
    pub(crate) fn begin(&self, order: &Order<'_>) -> Result<Result<Turn<'_>>> {
        self.reports.check()?;
        Ok(self.turn(order))
    }

    /// The turn of work in which ranks don't meet: orders it after the event that it names, and after the one before it unless both are on the own stream. An error if it is
    /// not known when the operation before ends.
    pub(crate) fn turn(&self, order: &Order<'_>) -> Result<Turn<'_>> {
        let _bound = self.context.bind()?;
        let stream = self.stream(order);
        let captured = self.captured(stream)?;
        let event = self.events.take(captured, &self.reports)?;
        let last = self.newest();
        let failed = |source: CallError| call_failed("making a stream wait for an event".into(), source);
        if let Some(event) = &order.after {
            // SAFETY: the event is alive and was recorded (EventRef's promise), the stream is alive.
            unsafe { self.driver().cuStreamWaitEvent(stream, event.as_raw().cast(), 0) }.map_err(failed)?;
        }
        // What is captured has no place after work that runs now: there the caller sees to the order.
        if !captured {
            match &*last {
                // Equal handles of others' streams can be different streams: one for each thread, or one that was made after another
                // was destroyed.
                Last::Ends(before, end) if *before != stream as usize || stream != self.own.raw() => {
                    // SAFETY: the event was recorded outside of a capture and is alive; so is the stream.
                    unsafe { self.driver().cuStreamWaitEvent(stream, end.raw(), 0) }.map_err(failed)?;
                }
                Last::Lost(_) => {
                    let reason = "the end of an operation could not be recorded".into();
                    return Err(Error::Broken { reason });
                }
                _ => {}
            }
        }
        if captured {
            self.captures.store(true, Ordering::Release);
        }
        Ok(Turn { stream, captured, context: &self.context, last, event: Some(event) })
    }

    /// Blocks until every operation so far has run.
    pub(crate) fn synchronize(&self, timeout: Duration) -> Result<()> {
        let rank = self.reports.rank();
        let running = |waited| Error::StillRunning { what: "an operation", rank, waited };
        let event = match &*self.newest() {
            Last::Nothing => None,
            Last::Ends(_, event) => Some(event.clone()),
            // Another's stream may be gone.
            Last::Lost(stream) if *stream != self.own.raw() as usize => return Err(running(Duration::ZERO)),
            Last::Lost(_) => {
                let _bound = self.context.bind()?;
                until(timeout, || Ok(self.own_has_run()?.then_some(())))?.ok_or_else(|| running(timeout))?;
                None
            }
        };
        match event {
            Some(event) => event.wait(timeout),
            None => self.reports.check(),
        }
    }

    /// Whether no operation is running. Without an answer from the driver, there may be one.
    pub(crate) fn is_idle(&self) -> bool {
        let Ok(_bound) = self.context.bind() else { return false };
        match &*self.newest() {
            Last::Nothing => true,
            Last::Ends(_, event) => event.reached().unwrap_or(false),
            Last::Lost(stream) => *stream == self.own.raw() as usize && self.own_has_run().unwrap_or(false),
        }
    }

    /// Blocks until every operation so far has run. The caller says that no graph will run what was captured.
    pub(crate) fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        self.synchronize(self.reports.patience())
    }

    /// Why the memory that operations use can't be given back, and what its owner has to do first.
    pub(crate) fn in_use(&self) -> Option<&'static str> {
        if !self.is_idle() {
            return Some("an operation was running (close first, or wait for the operation)");
        }
        // Whether a graph runs can't be seen from here.
        let graphs = self.captures.load(Ordering::Acquire) && !self.closed.load(Ordering::Acquire);
        graphs.then_some("CUDA graphs may run operations (destroy the graphs when they have run, then close)")
    }

    /// Whether all work of the own stream has run; it comes after every operation before. The context is current.
    fn own_has_run(&self) -> Result<bool> {
        let _relaxed = Uncaptured::new(self.driver());
        // SAFETY: the stream lives as long as this.
        match unsafe { self.driver().cuStreamQuery(self.own.raw()) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(source) => Err(call_failed("waiting for a stream".into(), source)),
        }
    }

    fn newest(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a stream is being captured. An error if it takes no work because its capture has failed.
fn is_captured(status: CUstreamCaptureStatus) -> Result<bool> {
    if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED {
        let need = "what was captured so far is invalid, and the stream takes no work; end the capture first";
        return Err(Error::invalid("stream", "its capture was invalidated", need));
    }
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// An event for the caller.
pub(crate) fn public(event: Arc<CudaEvent>) -> Event {
    Event::enqueued(event)
}

#[cfg(test)]
mod tests {
    use super::super::pinned::free_all;
    use super::super::status::StatusBlock;
    use super::*;
    use crate::device::DeviceMemory;
    use crate::layout::StatusLayout;
    use crate::stream::EventRef;
    use cuda_vmm::sys::Function;
    use cuda_vmm::{Cuda, Device};
    use cuda_vmm_emu::{Config, Emulator, Faults};
    use std::sync::atomic::AtomicUsize;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Streams and events need no kernels: they are tested on the driver in software.
    fn on_emulator(body: impl FnOnce(&Device, &Queue)) {
        on_emulator_with_faults(|device, queue, _| body(device, queue));
    }

    fn on_emulator_with_faults(body: impl FnOnce(&Device, &Queue, &Faults)) {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let device = Cuda::with_driver(emulator.driver()).unwrap().device(0).unwrap();
        {
            let context = device.primary_context().unwrap();
            let status = StatusBlock::new(&context, StatusLayout::new(4)).unwrap();
            let reports = Arc::new(Reports::new(status, 0, PATIENCE));
            body(&device, &Queue::new(&context, reports).unwrap(), emulator.faults());
            free_all(&context);
        }
        drop(device);
        emulator.assert_empty();
    }

    /// Work that takes as long as the word is not there.
    fn blocked_by(queue: &Queue, memory: &DeviceMemory, stream: CUstream) {
        let _bound = queue.context().bind().unwrap();
        // SAFETY: the word lies in memory that outlives the work.
        unsafe { queue.driver().cuStreamWaitValue32(stream, memory.address(), 1, 0) }.unwrap();
    }

    #[test]
    fn operations_follow_each_other_on_any_streams() {
        on_emulator(|device, queue| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            memory.write(0, &[0; 4]).unwrap();
            let other = Stream::new(queue.context()).unwrap();
            assert!(queue.is_idle());
            let first = queue.turn(&Order::default()).unwrap();
            blocked_by(queue, &memory, first.stream);
            let first = first.end().unwrap();
            // The second is on another stream, and yet after the first.
            // SAFETY: the stream outlives its use here.
            let stream = Some(unsafe { StreamRef::from_raw(other.raw().cast()) });
            let second = queue.turn(&Order { stream, after: None }).unwrap();
            assert_eq!((second.stream, second.captured), (other.raw(), false));
            let second = second.end().unwrap();
            assert!(!first.is_complete().unwrap() && !second.is_complete().unwrap() && !queue.is_idle());
            let error = queue.synchronize(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, Error::StillRunning { rank: 0, .. }), "{error}");
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            queue.synchronize(PATIENCE).unwrap();
            assert!(first.is_complete().unwrap() && queue.is_idle());
        });
    }

    #[test]
    fn equal_handles_may_be_different_streams() {
        on_emulator_with_faults(|_, queue, faults| {
            let other = Stream::new(queue.context()).unwrap();
            // SAFETY: the stream outlives its use here.
            let stream = Some(unsafe { StreamRef::from_raw(other.raw().cast()) });
            let waits = |order: &Order<'_>| {
                let before = faults.calls(Function::cuStreamWaitEvent);
                queue.turn(order).unwrap().end().unwrap();
                faults.calls(Function::cuStreamWaitEvent) - before
            };
            let (own, others) = (Order::default(), Order { stream, after: None });
            // The first has nothing before it, and the own stream keeps the order by itself.
            let orders = [(&own, 0), (&own, 0), (&others, 1), (&others, 1), (&own, 1), (&own, 0)];
            for (i, (order, expected)) in orders.into_iter().enumerate() {
                assert_eq!(waits(order), expected, "operation {i}");
            }
        });
    }

    #[test]
    fn operations_wait_for_the_callers_event() {
        on_emulator(|device, queue| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            memory.write(0, &[0; 4]).unwrap();
            let (producer, events) =
                (Stream::new(queue.context()).unwrap(), EventPool::new(queue.context().clone()));
            blocked_by(queue, &memory, producer.raw());
            let ready = {
                let _bound = queue.context().bind().unwrap();
                events.record(producer.raw(), queue.reports()).unwrap()
            };
            // SAFETY: the event was recorded and outlives its use.
            let after = Some(unsafe { EventRef::from_raw(ready.as_raw()) });
            let turn = queue.turn(&Order { stream: None, after }).unwrap();
            let end = public(turn.end().unwrap());
            assert!(!end.is_complete().unwrap());
            assert!(end.as_raw().is_some());
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            end.wait(PATIENCE).unwrap();
            assert!(end.is_complete().unwrap());
        });
    }

    #[test]
    fn turns_of_two_threads_do_not_overlap() {
        on_emulator(|_, queue| {
            let inside = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let own = Stream::new(queue.context()).unwrap();
                        // SAFETY: the stream outlives its use here.
                        let stream = Some(unsafe { StreamRef::from_raw(own.raw().cast()) });
                        for _ in 0..200 {
                            let turn = queue.turn(&Order { stream, after: None }).unwrap();
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two have the turn");
                            std::thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            turn.end().unwrap();
                        }
                        queue.synchronize(PATIENCE).unwrap();
                    });
                }
            });
            assert!(queue.is_idle());
        });
    }

    #[test]
    fn events_are_used_again() {
        on_emulator(|_, queue| {
            let mut seen = std::collections::HashSet::new();
            for _ in 0..100 {
                let turn = queue.turn(&Order::default()).unwrap();
                seen.insert(turn.end().unwrap().as_raw() as usize);
            }
            // One is the newest operation's, one is being dropped.
            assert!(seen.len() <= 2, "{} events", seen.len());
        });
    }

    #[test]
    fn work_without_a_recorded_end_is_not_forgotten() {
        let refusal = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        on_emulator_with_faults(|device, queue, faults| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            memory.write(0, &[0; 4]).unwrap();
            // No event: nothing was enqueued.
            faults.fail_nth(Function::cuEventCreate, 1, refusal);
            assert!(queue.turn(&Order::default()).is_err() && queue.is_idle());
            // Given up half-way: what was enqueued counts.
            let turn = queue.turn(&Order::default()).unwrap();
            blocked_by(queue, &memory, turn.stream);
            drop(turn);
            assert!(!queue.is_idle());
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            queue.synchronize(PATIENCE).unwrap();
            assert!(queue.is_idle());
            memory.write(0, &[0; 4]).unwrap();
            // The end can't be recorded: on the own stream, all of it is waited for.
            let turn = queue.turn(&Order::default()).unwrap();
            blocked_by(queue, &memory, turn.stream);
            faults.fail_nth(Function::cuEventRecord, 1, refusal);
            assert!(turn.end().is_err() && !queue.is_idle());
            let error = queue.synchronize(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, Error::StillRunning { rank: 0, .. }), "{error}");
            let error = queue.turn(&Order::default()).err().unwrap();
            assert!(matches!(error, Error::Broken { .. }), "{error}");
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            queue.synchronize(PATIENCE).unwrap();
            assert!(queue.is_idle());
        });
        // On another's stream nobody can say when it ends.
        on_emulator_with_faults(|_, queue, faults| {
            let other = Stream::new(queue.context()).unwrap();
            // SAFETY: the stream outlives its use here.
            let stream = Some(unsafe { StreamRef::from_raw(other.raw().cast()) });
            let turn = queue.turn(&Order { stream, after: None }).unwrap();
            faults.fail_nth(Function::cuEventRecord, 1, refusal);
            drop(turn);
            let error = queue.synchronize(PATIENCE).unwrap_err();
            assert!(matches!(error, Error::StillRunning { .. }) && !queue.is_idle(), "{error}");
        });
    }

    #[test]
    fn what_was_captured_holds_the_memory_until_closed() {
        on_emulator(|device, queue| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            memory.write(0, &[0; 4]).unwrap();
            assert_eq!(queue.in_use(), None);
            let turn = queue.turn(&Order::default()).unwrap();
            blocked_by(queue, &memory, turn.stream);
            turn.end().unwrap();
            assert!(queue.in_use().unwrap().contains("was running"));
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            queue.synchronize(PATIENCE).unwrap();
            assert_eq!(queue.in_use(), None);
            // The driver in software captures nothing: as `begin` does on a stream that is being captured.
            queue.captures.store(true, Ordering::Release);
            queue.synchronize(PATIENCE).unwrap();
            assert!(queue.in_use().unwrap().contains("graphs"));
            queue.close().unwrap();
            assert_eq!(queue.in_use(), None);
        });
    }

    #[test]
    fn a_call_that_can_not_be_ordered_can_be_repeated() {
        on_emulator_with_faults(|_, queue, faults| {
            let events = EventPool::new(queue.context().clone());
            let ready = {
                let _bound = queue.context().bind().unwrap();
                events.record(queue.own.raw(), queue.reports()).unwrap()
            };
            // SAFETY: the event was recorded and outlives its use.
            let after = Some(unsafe { EventRef::from_raw(ready.as_raw()) });
            let order = Order { stream: None, after };
            faults.fail_nth(Function::cuStreamWaitEvent, 1, CUresult::CUDA_ERROR_INVALID_VALUE);
            let refused = queue.begin(&order).unwrap();
            assert!(matches!(refused.err().unwrap(), Error::Vmm(_)));
            queue.begin(&order).unwrap().unwrap().end().unwrap();
            // When a rank has given up, ranks meet no more, and each can still copy what it has.
            queue.reports().write_abort();
            assert!(matches!(queue.begin(&order).err().unwrap(), Error::PeerTimeout { .. }));
            let end = queue.turn(&order).unwrap().end().unwrap();
            end.wait_reached("a copy", PATIENCE).unwrap();
        });
        type S = CUstreamCaptureStatus;
        assert!(!is_captured(S::CU_STREAM_CAPTURE_STATUS_NONE).unwrap());
        assert!(is_captured(S::CU_STREAM_CAPTURE_STATUS_ACTIVE).unwrap());
        let error = is_captured(S::CU_STREAM_CAPTURE_STATUS_INVALIDATED).unwrap_err();
        assert!(matches!(error, Error::Invalid { parameter: "stream", .. }), "{error}");
    }
}
