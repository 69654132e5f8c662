//! How long an operation takes: on the CPU's clock, or between two events of the stream it runs on.

use std::time::{Duration, Instant};

use deepep_core::{ElasticBuffer, StreamRef};

use super::JobError;
use crate::gpu::Event;

/// Started before an operation on the buffer's own stream.
pub(super) enum Clock {
    Host(Instant),
    Device(Event),
}

impl Clock {
    /// Starts when every rank has come here, and what it enqueued has run.
    pub(super) fn start(buffer: &mut ElasticBuffer) -> Result<Self, JobError> {
        buffer.barrier()?;
        Ok(match buffer.stream() {
            None => Self::Host(Instant::now()),
            Some(stream) => Self::Device(event(buffer, stream)?),
        })
    }

    /// Time since the start, once everything that was enqueued has run.
    pub(super) fn stop(self, buffer: &ElasticBuffer, timeout: Duration) -> Result<Duration, JobError> {
        match (self, buffer.stream()) {
            (Self::Device(start), Some(stream)) => {
                let end = event(buffer, stream)?;
                // The newest operation may have been an hour's work before it; its own waits are what is limited.
                buffer.synchronize(timeout.saturating_mul(2))?;
                end.wait(timeout)?;
                Ok(Duration::from_secs_f64(end.microseconds_since(&start)? / 1e6))
            }
            (Self::Host(start), _) => Ok(start.elapsed()),
            (Self::Device(_), None) => Ok(Duration::ZERO),
        }
    }
}

fn event(buffer: &ElasticBuffer, stream: StreamRef<'_>) -> Result<Event, JobError> {
    let event = Event::new(&buffer.device().primary_context().map_err(deepep_core::Error::from)?)?;
    event.record_on(stream)?;
    Ok(event)
}
