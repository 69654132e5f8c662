//! One operation's turn on the device: everything that its call asks of the driver, from the first question to the recorded end.

use std::sync::{Arc, MutexGuard};

use cuda_vmm::Bound;
use cuda_vmm::sys::CUstream;

use super::events::CudaEvent;
use crate::error::{Error, Result};

/// What is known of the end of the newest operation.
#[derive(Default)]
pub(super) enum Last {
    /// There was none.
    #[default]
    Nothing,
    /// Its stream and its end.
    Ends(StreamName, Arc<CudaEvent>),
    /// Something was enqueued there, and its end could not be recorded.
    Lost(CUstream),
}

// SAFETY: streams may be named from any thread; the handles are addresses that are never dereferenced here.
unsafe impl Send for Last {}

/// Which stream a handle means.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamName {
    pub(super) raw: CUstream,
    /// The driver's number of it, which no other stream ever has. None for the rank's own stream, which has its handle as long as the queue lives;
    /// and where the driver can't tell.
    pub(super) number: Option<u64>,
}

impl StreamName {
    /// Whether both are one stream, `own` being the rank's own. Equal handles of others' streams can be different streams: one for each thread, or
    /// one that was made after another was destroyed.
    pub(super) fn is_same(self, other: Self, own: CUstream) -> bool {
        self.raw == other.raw && (self.raw == own || (self.number.is_some() && self.number == other.number))
    }
}

/// Between [`Queue::begin`](super::queue::Queue::begin) and [`end`](Self::end) an operation's work is enqueued, and nobody else's. The context is
/// current meanwhile. A turn that is dropped was given up half-way: what it has enqueued until then counts.
pub(crate) struct Turn<'q> {
    pub(crate) stream: CUstream,
    /// The stream is being captured.
    pub(crate) captured: bool,
    number: Option<u64>,
    last: MutexGuard<'q, Last>,
    /// To be recorded at the end; made before anything is enqueued, so that only recording it can fail then.
    event: Option<Arc<CudaEvent>>,
    _bound: Bound<'q>,
}

impl<'q> Turn<'q> {
    pub(super) fn new(
        stream: StreamName,
        captured: bool,
        last: MutexGuard<'q, Last>,
        event: Arc<CudaEvent>,
        bound: Bound<'q>,
    ) -> Self {
        let StreamName { raw, number } = stream;
        Self { stream: raw, captured, number, last, event: Some(event), _bound: bound }
    }

    /// The end of the operation.
    pub(crate) fn end(mut self) -> Result<Arc<CudaEvent>> {
        let Some(event) = self.event.take() else {
            return Err(Error::invalid("end of an operation", "a second one", "an operation ends once"));
        };
        self.record(&event)?;
        Ok(event)
    }

    fn record(&mut self, event: &Arc<CudaEvent>) -> Result<()> {
        // SAFETY: the stream is the caller's, alive as long as the call, or the own one, of the context that this keeps current (`Queue::turn`). The event was
        // taken for this turn.
        let recorded = unsafe { event.record(self.stream) };
        // What is captured does not run.
        if !self.captured {
            *self.last = match recorded {
                Ok(()) => Last::Ends(StreamName { raw: self.stream, number: self.number }, event.clone()),
                Err(_) => Last::Lost(self.stream),
            };
        }
        recorded
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(event) = self.event.take()
            && !self.captured
        {
            // A failure is remembered by the queue.
            let _ = self.record(&event);
        }
    }
}
