//! Events: points in streams, from a pool, and what the caller can do with them.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUevent, CUevent_flags, CUresult, CUstream};

use super::call_failed;
use super::reports::Reports;
use super::wait::{Uncaptured, until};
use crate::error::{Error, Result};
use crate::stream::EventSource;

/// Events of one context, used again and again: making one takes longer than recording it.
pub(crate) struct EventPool {
    context: Context,
    free: Mutex<Vec<CUevent>>,
}

// SAFETY: events may be used from any thread; the handles are addresses that are never dereferenced here.
unsafe impl Send for EventPool {}
// SAFETY: as above; calls on them are thread-safe in the driver.
unsafe impl Sync for EventPool {}

impl EventPool {
    pub(crate) fn new(context: Context) -> Arc<Self> {
        Arc::new(Self { context, free: Mutex::default() })
    }

    /// An event that is not recorded yet, for a stream of the pool's context, which is current. `captured`: the stream is being captured.
    pub(crate) fn take(self: &Arc<Self>, captured: bool, reports: &Arc<Reports>) -> Result<CudaEvent> {
        let driver = self.context.device().cuda().driver();
        let kept = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let raw = match kept {
            Some(raw) => raw,
            None => {
                let mut raw = ptr::null_mut();
                // SAFETY: `raw` is valid for one write, and the context is current.
                unsafe { driver.cuEventCreate(&mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING.0) }
                    .map_err(|source| call_failed("making an event".into(), source))?;
                raw
            }
        };
        Ok(CudaEvent { pool: self.clone(), reports: reports.clone(), raw, captured })
    }

    /// Records an event at the end of a stream of the pool's context, which is current and not being captured.
    #[cfg(test)]
    pub(crate) fn record(
        self: &Arc<Self>,
        stream: CUstream,
        reports: &Arc<Reports>,
    ) -> Result<Arc<CudaEvent>> {
        let event = self.take(false, reports)?;
        event.record(stream)?;
        Ok(Arc::new(event))
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        let driver = self.context.device().cuda().driver();
        for &raw in self.free.get_mut().unwrap_or_else(PoisonError::into_inner).iter() {
            // SAFETY: the event was created by the pool and is destroyed once; the driver keeps what waits for it.
            let _ = unsafe { driver.cuEventDestroy(raw) };
        }
    }
}

/// An event, recorded unless its maker is about to. Goes back to the pool when dropped, which waits for nothing: whoever waits for it in a stream, or has it in a
/// graph, already has what it needs.
pub(crate) struct CudaEvent {
    pool: Arc<EventPool>,
    reports: Arc<Reports>,
    raw: CUevent,
    /// Recorded while its stream was captured: a point in a graph.
    captured: bool,
}

// SAFETY: as the pool's.
unsafe impl Send for CudaEvent {}
// SAFETY: as the pool's.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Records it at the end of a stream of the pool's context, which is current.
    pub(crate) fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the event came from the pool and is nobody else's yet; the stream belongs to the current context.
        unsafe { self.pool.context.device().cuda().driver().cuEventRecord(self.raw, stream) }
            .map_err(|source| call_failed("recording an event".into(), source))
    }

    /// Whether the stream has come here. Says nothing about kernels that gave up.
    pub(crate) fn reached(&self) -> Result<bool> {
        if self.captured {
            let need = "it is a point in the graph that was captured; wait for the graph";
            return Err(Error::invalid("event", "captured", need));
        }
        let driver = self.pool.context.device().cuda().driver();
        let _relaxed = Uncaptured::new(driver);
        // SAFETY: the event is alive and was recorded.
        match unsafe { driver.cuEventQuery(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(source) => Err(call_failed("waiting for an operation on the device".into(), source)),
        }
    }

    /// Blocks until the stream has come here.
    pub(crate) fn wait_reached(&self, what: &'static str, limit: Duration) -> Result<()> {
        let _bound = self.pool.context.bind()?;
        let reached = until(limit, || Ok(self.reached()?.then_some(())))?;
        let rank = self.reports.rank();
        reached.ok_or(Error::StillRunning { what, rank, waited: limit })
    }

    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl EventSource for CudaEvent {
    fn is_complete(&self) -> Result<bool> {
        let _bound = self.pool.context.bind()?;
        let reached = self.reached()?;
        if reached {
            self.reports.check()?;
        }
        Ok(reached)
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
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.raw);
    }
}
