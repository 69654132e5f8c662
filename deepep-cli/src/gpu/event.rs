//! Points in time on a stream.

use std::ptr;
use std::time::{Duration, Instant};

use cuda_vmm::Context;
use cuda_vmm::sys::{CUevent, CUevent_flags, CUresult};
use deepep_core::StreamRef;

use super::{Attempt, GpuError, Result, Stream};

/// An event that knows when it happened. Dropping it calls `cuEventDestroy`.
#[derive(Debug)]
#[doc(alias = "cuEventDestroy")]
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: an event may be used from any thread; the handle is an address that is never dereferenced here.
unsafe impl Send for Event {}

impl Event {
    /// Calls `cuEventCreate`.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    #[doc(alias = "cuEventCreate")]
    pub fn new(context: &Context) -> Result<Self> {
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for one write, and a context is current. Destroyed in Drop.
        unsafe {
            context.device().cuda().driver().cuEventCreate(&mut raw, CUevent_flags::CU_EVENT_DEFAULT.0)
        }
        .attempt(|| format!("creating an event on device {}", context.device().ordinal()))?;
        Ok(Self { context: context.clone(), raw })
    }

    /// The raw handle, alive as long as this.
    pub fn as_raw(&self) -> CUevent {
        self.raw
    }

    /// Happens when everything enqueued on the stream so far has run.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    #[doc(alias = "cuEventRecord")]
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: both are alive; a stream of another context is refused by the driver.
        unsafe { self.context.device().cuda().driver().cuEventRecord(self.raw, stream.as_raw()) }
            .attempt(|| "recording an event".into())
    }

    /// As [`record`](Self::record), on a stream that somebody else owns.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    #[doc(alias = "cuEventRecord")]
    pub fn record_on(&self, stream: StreamRef<'_>) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the stream is alive and of its device's primary context (StreamRef's promise), and so is the event; one of
        // another context is refused by the driver.
        unsafe { self.context.device().cuda().driver().cuEventRecord(self.raw, stream.as_raw().cast()) }
            .attempt(|| "recording an event".into())
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// [`GpuError::Late`](super::GpuError::Late) after `timeout`, [`GpuError::Driver`](super::GpuError::Driver) with the failure of earlier work.
    #[doc(alias = "cuEventQuery")]
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let _bound = self.context.bind()?;
        let start = Instant::now();
        loop {
            // SAFETY: the event is alive.
            match unsafe { self.context.device().cuda().driver().cuEventQuery(self.raw) } {
                Ok(()) => return Ok(()),
                Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => {
                    if start.elapsed() > timeout {
                        let what = "work before an event".into();
                        return Err(GpuError::Late { what, seconds: timeout.as_secs_f64() });
                    }
                    std::thread::yield_now();
                }
                Err(error) => return Err(error).attempt(|| "waiting for an event".into()),
            }
        }
    }

    /// Microseconds from `earlier` to this event. Both have happened.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver), also if one has not happened.
    #[doc(alias = "cuEventElapsedTime")]
    pub fn microseconds_since(&self, earlier: &Self) -> Result<f64> {
        let _bound = self.context.bind()?;
        let mut milliseconds = 0f32;
        // SAFETY: both events are alive, and the output is valid for one write.
        unsafe {
            self.context.device().cuda().driver().cuEventElapsedTime(&mut milliseconds, earlier.raw, self.raw)
        }
        .attempt(|| "reading the time between two events".into())?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by `new`, destroyed once.
            let _ = unsafe { self.context.device().cuda().driver().cuEventDestroy(self.raw) };
        }
    }
}
