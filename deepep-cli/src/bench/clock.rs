//! How calls are timed: by events on a stream, or by the CPU's clock where calls have run when they return.

use std::time::{Duration, Instant};

use cuda_vmm::PlainMemory;
use deepep_core::{BackendKind, ElasticBuffer, StreamRef};

use super::cpu_time::thread_time;
use super::rank::RankError;
use crate::gpu::{Event, Stream};

/// Bytes that are written to empty L2.
const FLUSH: usize = 256 << 20;

/// Times calls on one rank. Every sample begins with a barrier of all ranks.
pub(super) enum Clock {
    /// A call has run when it returns.
    Host,
    /// Calls are enqueued.
    Device(Box<Device>),
}

/// What it takes on a GPU.
pub(super) struct Device {
    pub(super) stream: Stream,
    start: Event,
    stop: Event,
    flush: PlainMemory,
    timeout: Duration,
}

/// What one sample took, in microseconds.
pub(super) struct Sample {
    /// From event to event.
    pub(super) total: f64,
    /// What all calls took on the host; none if a call has run when it returns.
    pub(super) host: Option<Host>,
}

/// What calls took on the host until the last one had returned, in microseconds.
#[derive(Clone, Copy)]
pub(super) struct Host {
    /// On the wall's clock.
    pub(super) wall: f64,
    /// Of the calling thread's CPU time.
    pub(super) cpu: f64,
}

impl Clock {
    pub(super) fn new(buffer: &ElasticBuffer, timeout: Duration) -> Result<Self, RankError> {
        if buffer.backend() != BackendKind::Cuda {
            return Ok(Self::Host);
        }
        let context = buffer.device().primary_context()?;
        Ok(Self::Device(Box::new(Device {
            stream: Stream::new(&context)?,
            start: Event::new(&context)?,
            stop: Event::new(&context)?,
            flush: PlainMemory::new(&context, FLUSH)?,
            timeout,
        })))
    }

    /// The stream for calls.
    pub(super) fn stream(&self) -> Option<&Stream> {
        match self {
            Self::Host => None,
            Self::Device(device) => Some(&device.stream),
        }
    }

    pub(super) fn borrow(&self) -> Option<StreamRef<'_>> {
        self.stream().map(Stream::borrow)
    }

    /// Waits until everything has run.
    pub(super) fn wait(&self, what: &str) -> Result<(), RankError> {
        match self {
            Self::Host => Ok(()),
            Self::Device(device) => Ok(device.stream.wait(device.timeout, || what.into())?),
        }
    }

    /// Times `calls` calls, one right after the other; `flush` empties L2 before.
    pub(super) fn sample(
        &self,
        buffer: &mut ElasticBuffer,
        flush: bool,
        calls: usize,
        mut call: impl FnMut(&mut ElasticBuffer, usize) -> Result<(), RankError>,
    ) -> Result<Sample, RankError> {
        match self {
            Self::Host => {
                buffer.barrier()?;
                let start = Instant::now();
                (0..calls).try_for_each(|i| call(buffer, i))?;
                Ok(Sample { total: microseconds(start), host: None })
            }
            Self::Device(device) => {
                if flush {
                    // SAFETY: the memory is this clock's and used for nothing else; the stream is waited for before it can go.
                    unsafe { device.stream.fill(&device.flush, 0) }?;
                }
                buffer.barrier_on(Some(device.stream.borrow()), None)?;
                device.start.record(&device.stream)?;
                let (wall, cpu) = (Instant::now(), thread_time());
                (0..calls).try_for_each(|i| call(buffer, i))?;
                let host =
                    Some(Host { cpu: (thread_time() - cpu).as_secs_f64() * 1e6, wall: microseconds(wall) });
                device.stop.record(&device.stream)?;
                device.stream.wait(device.timeout, || "a timed call".into())?;
                Ok(Sample { total: device.stop.microseconds_since(&device.start)?, host })
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // What is under way uses the memory that goes next; a kernel's waits are bounded, and so is this one.
        let _ = self.stream.wait(self.timeout, || "the last call".into());
    }
}

fn microseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}
