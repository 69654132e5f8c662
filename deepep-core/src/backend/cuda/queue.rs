//! Where operations are enqueued: the caller's stream or the rank's own, in the order in which they are called.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUstream, CUstream_flags, CUstreamCaptureStatus, CallError, Driver};

use super::call_failed;
use super::events::{CudaEvent, EventPool};
use super::reports::Reports;
use crate::backend::Order;
use crate::error::{Error, Result};
use crate::stream::{Event, EventSource, StreamRef};

/// A stream of this crate's, independent of the device's default stream.
pub(crate) struct Stream {
    context: Context,
    raw: CUstream,
}

// SAFETY: streams may be used from any thread; the handle is an address that is never dereferenced here.
unsafe impl Send for Stream {}
// SAFETY: as above; calls on it are thread-safe in the driver.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: `raw` is valid for one write, and a context is current. Destroyed in Drop.
        unsafe { context.device().cuda().driver().cuStreamCreate(&mut raw, flags) }
            .map_err(|source| call_failed("creating a stream".into(), source))?;
        Ok(Self { context: context.clone(), raw })
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: created once, destroyed once. The driver lets enqueued work end, and does not wait for it here.
        let _ = unsafe { self.context.device().cuda().driver().cuStreamDestroy(self.raw) };
    }
}

/// The operations of one rank, in order, on whatever streams the calls name.
pub(crate) struct Queue {
    context: Context,
    own: Stream,
    events: Arc<EventPool>,
    reports: Arc<Reports>,
    /// The newest operation that was not captured: its stream and its end.
    last: Mutex<Option<(usize, Arc<CudaEvent>)>>,
}

/// One operation's turn: between [`Queue::begin`] and [`Queue::end`] its kernels are launched.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) stream: CUstream,
    /// The stream is being captured.
    pub(crate) captured: bool,
}

impl Queue {
    pub(crate) fn new(context: &Context, reports: Arc<Reports>) -> Result<Self> {
        let (own, events) = (Stream::new(context)?, EventPool::new(context.clone()));
        Ok(Self { context: context.clone(), own, events, reports, last: Mutex::default() })
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
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Orders an operation after the event that it names, and after the one before it if that was on another stream. An error if some
    /// rank gave up before.
    pub(crate) fn begin(&self, order: &Order<'_>) -> Result<Turn> {
        self.reports.check()?;
        let _bound = self.context.bind()?;
        let stream = self.stream(order);
        let captured = self.captured(stream)?;
        let failed = |source: CallError| call_failed("making a stream wait for an event".into(), source);
        if let Some(event) = &order.after {
            // SAFETY: the event is alive and was recorded (EventRef's promise), the stream is alive.
            unsafe { self.driver().cuStreamWaitEvent(stream, event.as_raw().cast(), 0) }.map_err(failed)?;
        }
        // What is captured has no place after work that runs now: there the caller sees to the order.
        if !captured
            && let Some((before, end)) = &*self.last.lock().unwrap_or_else(PoisonError::into_inner)
            && *before != stream as usize
        {
            // SAFETY: the event was recorded outside of a capture and is alive; so is the stream.
            unsafe { self.driver().cuStreamWaitEvent(stream, end.raw(), 0) }.map_err(failed)?;
        }
        Ok(Turn { stream, captured })
    }

    /// The end of an operation.
    pub(crate) fn end(&self, turn: Turn) -> Result<Arc<CudaEvent>> {
        let _bound = self.context.bind()?;
        let event = self.events.record(turn.stream, turn.captured, &self.reports)?;
        if !turn.captured {
            let last = (turn.stream as usize, event.clone());
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
        }
        Ok(event)
    }

    /// Blocks until every operation so far has run.
    pub(crate) fn synchronize(&self, timeout: Duration) -> Result<()> {
        match self.last() {
            Some(event) => event.wait(timeout),
            None => self.reports.check(),
        }
    }

    /// Whether no operation is running. Without an answer from the driver, there may be one.
    pub(crate) fn is_idle(&self) -> bool {
        let Ok(_bound) = self.context.bind() else { return false };
        self.last().is_none_or(|event| event.reached().unwrap_or(false))
    }

    fn last(&self) -> Option<Arc<CudaEvent>> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|(_, event)| event.clone())
    }
}

/// An event for the caller.
pub(crate) fn public(event: Arc<CudaEvent>) -> Event {
    Event::enqueued(event)
}

#[cfg(test)]
mod tests {
    use super::super::pinned::Readback;
    use super::super::status::StatusBlock;
    use super::*;
    use crate::device::DeviceMemory;
    use crate::layout::StatusLayout;
    use crate::stream::EventRef;
    use cuda_vmm::{Cuda, Device};
    use cuda_vmm_emu::{Config, Emulator};

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Streams and events need no kernels: they are tested on the driver in software.
    fn on_emulator(body: impl FnOnce(&Device, &Queue)) {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let device = Cuda::with_driver(emulator.driver()).unwrap().device(0).unwrap();
        {
            let context = device.primary_context().unwrap();
            let status = StatusBlock::new(&context, StatusLayout::new(4)).unwrap();
            let reports = Arc::new(Reports::new(status, 0, PATIENCE));
            body(&device, &Queue::new(&context, reports).unwrap());
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
            let first = queue.begin(&Order::default()).unwrap();
            blocked_by(queue, &memory, first.stream);
            let first = queue.end(first).unwrap();
            // The second is on another stream, and yet after the first.
            // SAFETY: the stream outlives its use here.
            let stream = Some(unsafe { StreamRef::from_raw(other.raw().cast()) });
            let second = queue.begin(&Order { stream, after: None }).unwrap();
            assert_eq!((second.stream, second.captured), (other.raw(), false));
            let second = queue.end(second).unwrap();
            assert!(!first.is_complete().unwrap() && !second.is_complete().unwrap() && !queue.is_idle());
            let error = queue.synchronize(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, Error::StillRunning { rank: 0, .. }), "{error}");
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            queue.synchronize(PATIENCE).unwrap();
            assert!(first.is_complete().unwrap() && queue.is_idle());
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
                events.record(producer.raw(), false, queue.reports()).unwrap()
            };
            // SAFETY: the event was recorded and outlives its use.
            let after = Some(unsafe { EventRef::from_raw(ready.as_raw()) });
            let turn = queue.begin(&Order { stream: None, after }).unwrap();
            let end = public(queue.end(turn).unwrap());
            assert!(!end.is_complete().unwrap());
            assert!(end.as_raw().is_some());
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            end.wait(PATIENCE).unwrap();
            assert!(end.is_complete().unwrap());
        });
    }

    #[test]
    fn events_are_used_again() {
        on_emulator(|_, queue| {
            let mut seen = std::collections::HashSet::new();
            for _ in 0..100 {
                let turn = queue.begin(&Order::default()).unwrap();
                seen.insert(queue.end(turn).unwrap().as_raw() as usize);
            }
            // One is the newest operation's, one is being dropped.
            assert!(seen.len() <= 2, "{} events", seen.len());
        });
    }

    #[test]
    fn small_tables_are_read_beside_what_runs() {
        on_emulator(|device, queue| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            memory.write(0, &[0; 4]).unwrap();
            let numbers: Vec<u8> = (5..9_i32).flat_map(i32::to_ne_bytes).collect();
            memory.write(64, &numbers).unwrap();
            let readback = Readback::new(queue.context(), queue.reports()).unwrap();
            let turn = queue.begin(&Order::default()).unwrap();
            blocked_by(queue, &memory, turn.stream);
            queue.end(turn).unwrap();
            // SAFETY: the numbers are written above and not again.
            unsafe {
                assert_eq!(readback.numbers(memory.address() + 64, 4).unwrap(), [5, 6, 7, 8]);
                assert!(readback.numbers(memory.address(), Readback::BYTES).is_err());
            }
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            queue.synchronize(PATIENCE).unwrap();
        });
    }
}
