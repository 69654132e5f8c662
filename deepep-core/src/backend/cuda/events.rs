//! Events: points in streams, from a pool, and what the caller can do with them.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUevent, CUevent_flags, CUresult, CUstream, Driver};

use super::call_failed;
use super::reports::Reports;
use super::wait::{Uncaptured, until};
use crate::error::{Error, Result};
use crate::stream::EventSource;

/// Events of one rank's operations, used again and again: making one takes longer than recording it.
pub(crate) struct EventPool {
    context: Context,
    reports: Arc<Reports>,
    /// All of them, the longest unused in front. Those that nobody else has are free.
    events: Mutex<VecDeque<Arc<CudaEvent>>>,
}

impl EventPool {
    /// Events that are looked at before one is made: a caller may hold many.
    const LOOKS: usize = 4;

    pub(crate) fn new(context: Context, reports: Arc<Reports>) -> Self {
        Self { context, reports, events: Mutex::default() }
    }

    /// An event that is to be recorded, in a stream of the pool's context, which is current. `captured`: the stream is being captured.
    pub(crate) fn take(&self, captured: bool) -> Result<Arc<CudaEvent>> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..events.len().min(Self::LOOKS) {
            let Some(mut event) = events.pop_front() else { break };
            let free = Arc::get_mut(&mut event).map(|event| event.captured = captured).is_some();
            events.push_back(event.clone());
            if free {
                return Ok(event);
            }
        }
        let driver = self.context.device().cuda().driver();
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for one write, and the context is current.
        unsafe { driver.cuEventCreate(&mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING.0) }
            .map_err(|source| call_failed("making an event".into(), source))?;
        let (context, reports) = (self.context.clone(), self.reports.clone());
        let event = Arc::new(CudaEvent { context, reports, raw, captured });
        events.push_back(event.clone());
        Ok(event)
    }

    /// Records an event at the end of a stream of the pool's context, which is current and not being captured.
    #[cfg(test)]
    pub(crate) fn record(&self, stream: &super::stream::Stream) -> Result<Arc<CudaEvent>> {
        let event = self.take(false)?;
        // SAFETY: the stream is borrowed; tests give one of the pool's context, and make that current.
        unsafe { event.record(stream.raw())? };
        Ok(event)
    }
}

/// An event, recorded unless its maker is about to. When nobody but the pool has it any more, it is recorded again, for another operation: whoever waits for it in a
/// stream, or has it in a graph, already has what it needs.
pub(crate) struct CudaEvent {
    context: Context,
    reports: Arc<Reports>,
    raw: CUevent,
    /// Recorded while its stream was captured: a point in a graph.
    captured: bool,
}

// SAFETY: events may be used from any thread; the handle is an address that is never dereferenced here.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; calls on it are thread-safe in the driver.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    fn driver(&self) -> &Driver {
        self.context.device().cuda().driver()
    }

    /// Records it at the end of a stream.
    ///
    /// # Safety
    /// The stream is alive, and belongs to the pool's context, which is current. The event was taken from the pool for this, and is nobody else's yet.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the event lives as long as this; the rest is the caller's promise.
        unsafe { self.driver().cuEventRecord(self.raw, stream) }
            .map_err(|source| call_failed("recording an event".into(), source))
    }

    /// Whether the stream has come here. Says nothing about kernels that gave up. The context is current.
    pub(crate) fn reached(&self) -> Result<bool> {
        self.require_direct()?;
        let _relaxed = Uncaptured::new(self.driver());
        self.query()
    }

    /// Checks that it is a point in a stream.
    fn require_direct(&self) -> Result<()> {
        if self.captured {
            let need = "it is a point in the graph that was captured; wait for the graph";
            return Err(Error::invalid("event", "captured", need));
        }
        Ok(())
    }

    fn query(&self) -> Result<bool> {
        // SAFETY: the event is alive and was recorded.
        match unsafe { self.driver().cuEventQuery(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(source) => Err(call_failed("waiting for an operation on the device".into(), source)),
        }
    }

    /// As [`reached`](Self::reached), whatever context is current.
    pub(crate) fn has_run(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        self.reached()
    }

    /// Blocks until the stream has come here.
    pub(crate) fn wait_reached(&self, what: &'static str, limit: Duration) -> Result<()> {
        self.require_direct()?;
        let _bound = self.context.bind()?;
        // One question a look: other threads of the process want to launch meanwhile.
        let _relaxed = Uncaptured::new(self.driver());
        let reached = until(limit, || Ok(self.query()?.then_some(())))?;
        let rank = self.reports.rank();
        reached.ok_or(Error::StillRunning { what, rank, waited: limit })
    }

    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl EventSource for CudaEvent {
    fn is_complete(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        let reached = self.reached()?;
        if reached {
            self.reports.check()?;
        }
        Ok(reached)
    }

    fn is_pending(&self) -> Result<bool> {
        if self.captured {
            return Ok(false);
        }
        Ok(!self.has_run()?)
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        self.wait_reached("an operation", timeout)?;
        self.reports.check()
    }

    fn as_raw(&self) -> *mut c_void {
        self.raw.cast()
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        let driver = self.driver();
        // None of this is part of a graph that somebody captures.
        let _relaxed = Uncaptured::new(driver);
        // SAFETY: made by the pool, and destroyed once: nobody has it any more. The driver keeps what waits for it.
        let _ = unsafe { driver.cuEventDestroy(self.raw) };
    }
}
