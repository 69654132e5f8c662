//! The order of operations: streams and events, borrowed from whoever owns them.
//!
//! On the CUDA backend an operation is enqueued on a stream and runs when the work before it has run. A rank of the host backend has one
//! implicit stream, its calling thread: an operation has run when its call returns, and every event is complete.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;

/// A CUDA stream that someone else owns.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    raw: *mut c_void,
    owner: PhantomData<&'a c_void>,
}

impl StreamRef<'_> {
    /// Borrows a stream (`CUstream`); null is the device's default stream.
    ///
    /// # Safety
    /// The stream must exist for as long as `'a` and belong to the context of the buffer's device.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self { raw, owner: PhantomData }
    }

    /// The `CUstream`.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }
}

/// A CUDA event that someone else owns.
#[derive(Clone, Copy, Debug)]
pub struct EventRef<'a> {
    raw: *mut c_void,
    owner: PhantomData<&'a c_void>,
}

impl EventRef<'_> {
    /// Borrows an event (`CUevent`).
    ///
    /// # Safety
    /// The event must exist for as long as `'a` and have been recorded, on a stream of any device of the process. For a call on a stream that is
    /// being captured it must have been recorded in that same capture, and for any other call outside of captures.
    ///
    /// The `CUevent` of an [`Event`] exists, and means its operation, while that or a clone of it does.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self { raw, owner: PhantomData }
    }

    /// The `CUevent`.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }
}

/// What a backend's event can do.
pub(crate) trait EventSource: Send + Sync {
    fn is_complete(&self) -> Result<bool>;
    /// Whether the operation is known not to have run yet. Of captured ones nothing is known.
    fn is_pending(&self) -> Result<bool>;
    fn wait(&self, timeout: Duration) -> Result<()>;
    fn as_raw(&self) -> *mut c_void;
}

/// The point at which an operation has run.
#[derive(Clone)]
pub struct Event(Option<Arc<dyn EventSource>>);

impl Event {
    /// Of an operation that has run.
    pub(crate) fn complete() -> Self {
        Self(None)
    }

    /// Of an operation that was enqueued.
    pub(crate) fn enqueued(source: Arc<dyn EventSource>) -> Self {
        Self(Some(source))
    }

    /// Whether the operation has run.
    ///
    /// # Errors
    /// The backend's, if a kernel failed: this operation's, or another one's of the same buffer, before it or after it.
    pub fn is_complete(&self) -> Result<bool> {
        self.0.as_ref().map_or(Ok(true), |event| event.is_complete())
    }

    /// Whether the operation is known not to have run yet.
    pub(crate) fn is_pending(&self) -> Result<bool> {
        self.0.as_ref().map_or(Ok(false), |event| event.is_pending())
    }

    /// Blocks until the operation has run, at most for `timeout`.
    ///
    /// # Errors
    /// The backend's, if a kernel failed, this operation's or another one's of the same buffer, before it or after it; or if the time is up.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |event| event.wait(timeout))
    }

    /// The `CUevent` to make other streams wait for; `None` on the host backend, where the operation has run already.
    ///
    /// It stands for this operation as long as this event or a clone of it exists: afterwards it is recorded again, for another one. A wait that was
    /// enqueued before that (`cuStreamWaitEvent`) stays what it was. The event of a captured call means something inside of that capture only.
    pub fn as_raw(&self) -> Option<*mut c_void> {
        self.0.as_ref().map(|event| event.as_raw())
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            None => f.write_str("Event(complete)"),
            Some(event) => write!(f, "Event({:p})", event.as_raw()),
        }
    }
}
