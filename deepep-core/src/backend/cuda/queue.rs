//! Where operations are enqueued: the caller's stream or the rank's own, in the order in which they are called.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUevent, CUstream, CUstreamCaptureStatus, Driver};

use super::call_failed;
use super::events::{CudaEvent, EventPool};
use super::reports::Reports;
use super::stream::Stream;
use super::turn::{Last, StreamName, Turn};
use super::wait::{Uncaptured, until};
use crate::backend::Order;
use crate::error::{Error, Result};
use crate::stream::{Event, EventSource, StreamRef};

/// The operations of one rank, in order, on whatever streams the calls name.
pub(crate) struct Queue {
    context: Context,
    own: Stream,
    events: EventPool,
    reports: Arc<Reports>,
    /// The newest operation that was not captured. Whoever has the turn holds it: a result's copies may come from another thread than
    /// the buffer's calls, and the order of waits is that of work and of events.
    last: Mutex<Last>,
    /// Something was captured: graphs may use the same memory at any time.
    captures: AtomicBool,
    closed: AtomicBool,
}

impl Queue {
    pub(crate) fn new(context: &Context, reports: Arc<Reports>) -> Result<Self> {
        let (own, events) = (Stream::new(context)?, EventPool::new(context.clone(), reports.clone()));
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

    /// The turn of an operation in which ranks meet; `waits` if its host is to wait for it. An error if some rank gave up before. An inner one is about
    /// this call: nothing was enqueued, and it can be repeated.
    pub(crate) fn begin(&self, order: &Order<'_>, waits: bool) -> Result<Result<Turn<'_>>> {
        self.reports.check()?;
        Ok(self.turn(order, waits))
    }

    /// The turn of work in which ranks don't meet: orders it after the event that it names, and after the one before it unless both are on one stream. An
    /// error if it is not known when the operation before ends.
    pub(crate) fn turn(&self, order: &Order<'_>, waits: bool) -> Result<Turn<'_>> {
        let bound = self.context.bind()?;
        let raw = order.stream.map_or(self.own.raw(), |stream| stream.as_raw().cast());
        let captured = self.captured(raw)?;
        if captured && waits {
            let need = "a stream that is being captured does not run; dispatch with `without_counts`";
            return Err(Error::invalid("exact counts", "asked for", need));
        }
        let last = self.newest();
        if !captured && matches!(&*last, Last::Lost(_)) {
            return Err(Error::Broken { reason: "the end of an operation could not be recorded".into() });
        }
        let stream = StreamName { raw, number: if captured { None } else { self.number(raw) } };
        let event = self.events.take(captured)?;
        if let Some(event) = &order.after {
            // SAFETY: the event is alive and was recorded (EventRef's promise).
            unsafe { self.wait_for(raw, event.as_raw().cast())? };
        }
        match &*last {
            // What is captured has no place after work that runs now: there the caller sees to the order.
            Last::Ends(before, end) if !captured && !before.is_same(stream, self.own.raw()) => {
                // SAFETY: the event was recorded outside of a capture, and is alive.
                unsafe { self.wait_for(raw, end.raw())? };
            }
            _ => {}
        }
        if captured {
            self.captures.store(true, Ordering::Release);
        }
        Ok(Turn::new(stream, captured, last, event, bound))
    }

    fn captured(&self, stream: CUstream) -> Result<bool> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive (StreamRef's promise, or the own one); `status` is valid for one write.
        unsafe { self.driver().cuStreamIsCapturing(stream, &mut status) }
            .map_err(|source| call_failed("asking whether a stream is being captured".into(), source))?;
        is_captured(status)
    }

    /// The driver's number of a stream of a caller's; drivers before CUDA 12 have none.
    fn number(&self, stream: CUstream) -> Option<u64> {
        if stream == self.own.raw() {
            return None;
        }
        let mut number = 0;
        // SAFETY: the stream is alive (StreamRef's promise), and `number` is valid for one write.
        unsafe { self.driver().cuStreamGetId(stream, &mut number) }.is_ok().then_some(number)
    }

    /// Makes a stream wait for an event.
    ///
    /// # Safety
    /// Both are alive, the event was recorded.
    unsafe fn wait_for(&self, stream: CUstream, event: CUevent) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.driver().cuStreamWaitEvent(stream, event, 0) }
            .map_err(|source| call_failed("making a stream wait for an event".into(), source))
    }

    /// Blocks until every operation so far has run.
    pub(crate) fn synchronize(&self, timeout: Duration) -> Result<()> {
        let rank = self.reports.rank();
        let running = |waited| Error::StillRunning { what: "an operation", rank, waited };
        let event = match &*self.newest() {
            Last::Nothing => None,
            Last::Ends(_, event) => Some(event.clone()),
            // Another's stream may be gone.
            Last::Lost(stream) if *stream != self.own.raw() => return Err(running(Duration::ZERO)),
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
            Last::Lost(stream) => *stream == self.own.raw() && self.own_has_run().unwrap_or(false),
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
        self.own.has_run()
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
#[path = "queue_tests.rs"]
mod tests;
