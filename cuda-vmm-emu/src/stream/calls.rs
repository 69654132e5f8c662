//! The functions of streams and events.

use super::{Event, Op, Stream, TICK};
use crate::core::Core;
use crate::status::{Outcome, code, lock, put, require};
use cuda_vmm_sys::ffi::{c_int, c_uint, c_void};
use cuda_vmm_sys::{
    CUcontext, CUevent, CUevent_flags, CUhostFn, CUstream, CUstream_flags, CUstreamCaptureMode,
    CUstreamCaptureStatus,
};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

thread_local! {
    /// What the thread said about captures: whose it respects.
    pub(crate) static CAPTURE_MODE: Cell<CUstreamCaptureMode> = const { Cell::new(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

impl Core {
    fn event(&self, handle: CUevent) -> Outcome<Arc<Event>> {
        lock(&self.contexts).events.get(&(handle as usize)).cloned().ok_or(code::INVALID_HANDLE)
    }

    fn create_stream(self: &Arc<Self>, out: *mut CUstream, flags: c_uint) -> Outcome {
        let non_blocking = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        require(!out.is_null() && flags & !non_blocking == 0)?;
        let device = self.current_healthy()?;
        let mut contexts = lock(&self.contexts);
        let poison = Arc::clone(&contexts.devices[device].poison);
        let stream = Stream::new(device, flags & non_blocking != 0, false, poison);
        let handle = stream.handle;
        contexts.streams.insert(handle, stream);
        // SAFETY: not null, and valid for a write by the contract of the function that was called.
        unsafe { put(out, handle as CUstream) }
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes. Handles are only
/// compared, never followed.
impl Core {
    pub(crate) unsafe fn cuStreamCreate(self: &Arc<Self>, stream: *mut CUstream, flags: c_uint) -> Outcome {
        self.create_stream(stream, flags)
    }

    pub(crate) unsafe fn cuStreamCreateWithPriority(
        self: &Arc<Self>,
        stream: *mut CUstream,
        flags: c_uint,
        _priority: c_int,
    ) -> Outcome {
        // A priority out of range is taken as the nearest by the driver; here all are equal.
        self.create_stream(stream, flags)
    }

    pub(crate) unsafe fn cuStreamDestroy(self: &Arc<Self>, stream: CUstream) -> Outcome {
        let mut contexts = lock(&self.contexts);
        let stream = contexts.streams.remove(&(stream as usize)).ok_or(code::INVALID_HANDLE)?;
        // What is queued still runs, and who waits for the context waits for it.
        let draining = &mut contexts.devices[stream.device].draining;
        draining.retain(|stream| stream.pending().is_some());
        if stream.pending().is_some() {
            draining.push(stream);
        }
        Ok(())
    }

    pub(crate) unsafe fn cuStreamSynchronize(self: &Arc<Self>, stream: CUstream) -> Outcome {
        let stream = self.stream(stream)?;
        stream.not_captured()?;
        stream.finish(self);
        // The default stream stands for the blocking ones as well.
        for (other, ticket) in if stream.legacy { self.before(&stream)? } else { Vec::new() } {
            other.await_ticket(self, ticket);
        }
        stream.poison.check()
    }

    pub(crate) unsafe fn cuStreamQuery(self: &Arc<Self>, stream: CUstream) -> Outcome {
        let stream = self.stream(stream)?;
        stream.not_captured()?;
        stream.poison.check()?;
        let others = stream.legacy && !self.before(&stream)?.is_empty();
        if stream.pending().is_some() || others { Err(code::NOT_READY) } else { Ok(()) }
    }

    pub(crate) unsafe fn cuStreamWaitEvent(
        self: &Arc<Self>,
        stream: CUstream,
        event: CUevent,
        flags: c_uint,
    ) -> Outcome {
        require(flags & !1 == 0)?;
        let stream = self.stream_for_work(stream)?;
        let event = self.event(event)?;
        if self.wait_in_capture(&stream, &event)? {
            return Ok(());
        }
        let generation = event.generation();
        stream.submit(self, Op::WaitEvent { event, generation }).map(drop)
    }

    pub(crate) unsafe fn cuStreamGetCtx(
        self: &Arc<Self>,
        stream: CUstream,
        context: *mut CUcontext,
    ) -> Outcome {
        let stream = self.stream(stream)?;
        let handle = lock(&self.contexts).devices[stream.device].handle;
        // SAFETY: the caller's contract.
        unsafe { put(context, handle as CUcontext) }
    }

    pub(crate) unsafe fn cuStreamGetId(
        self: &Arc<Self>,
        stream: CUstream,
        number: *mut std::ffi::c_ulonglong,
    ) -> Outcome {
        // Handles are never given out again, and those of default streams are no user's.
        let stream = self.stream(stream)?;
        // SAFETY: the caller's contract.
        unsafe { put(number, stream.handle as _) }
    }

    pub(crate) unsafe fn cuStreamIsCapturing(
        self: &Arc<Self>,
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
    ) -> Outcome {
        use CUstreamCaptureStatus as S;
        let stream = self.stream(stream)?;
        // SAFETY: the caller's contract.
        unsafe {
            put(
                status,
                match stream.capture() {
                    None => S::CU_STREAM_CAPTURE_STATUS_NONE,
                    Some(capture) if capture.is_broken() => S::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
                    Some(_) => S::CU_STREAM_CAPTURE_STATUS_ACTIVE,
                },
            )
        }
    }

    pub(crate) unsafe fn cuThreadExchangeStreamCaptureMode(
        self: &Arc<Self>,
        mode: *mut CUstreamCaptureMode,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        let new = unsafe { crate::status::get(mode)? };
        require(new.0 <= CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0)?;
        // SAFETY: the caller's contract.
        unsafe { put(mode, CAPTURE_MODE.replace(new)) }
    }

    pub(crate) unsafe fn cuLaunchHostFunc(
        self: &Arc<Self>,
        stream: CUstream,
        function: CUhostFn,
        data: *mut c_void,
    ) -> Outcome {
        let function = function.ok_or(code::INVALID_VALUE)?;
        let stream = self.stream_for_work(stream)?;
        stream.submit(self, Op::Call { function, data: data as usize }).map(drop)
    }

    pub(crate) unsafe fn cuEventCreate(self: &Arc<Self>, event: *mut CUevent, flags: c_uint) -> Outcome {
        let disabled = CUevent_flags::CU_EVENT_DISABLE_TIMING.0;
        let interprocess = CUevent_flags::CU_EVENT_INTERPROCESS.0;
        require(!event.is_null() && flags & !7 == 0)?;
        // An event of several processes keeps no time. The functions that share one are not in the table.
        require(flags & interprocess == 0 || flags & disabled != 0)?;
        let device = self.current_healthy()?;
        let new = Event::new(device, flags & disabled == 0);
        let handle = new.handle;
        lock(&self.contexts).events.insert(handle, new);
        // SAFETY: not null, and the caller's contract.
        unsafe { put(event, handle as CUevent) }
    }

    pub(crate) unsafe fn cuEventDestroy(self: &Arc<Self>, event: CUevent) -> Outcome {
        lock(&self.contexts).events.remove(&(event as usize)).map(drop).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) unsafe fn cuEventRecord(self: &Arc<Self>, event: CUevent, stream: CUstream) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        let event = self.event(event)?;
        if event.device != stream.device {
            return Err(code::INVALID_HANDLE);
        }
        if self.record_in_capture(&stream, &event)? {
            return Ok(());
        }
        let generation = event.record();
        let submitted = stream.submit(self, Op::Record { event: Arc::clone(&event), generation });
        if submitted.is_err() {
            event.unrecord(generation);
        }
        submitted.map(drop)
    }

    pub(crate) unsafe fn cuEventQuery(self: &Arc<Self>, event: CUevent) -> Outcome {
        let event = self.event(event)?;
        event.not_captured()?;
        self.refuse_in_capture()?;
        let poison = Arc::clone(&lock(&self.contexts).devices[event.device].poison);
        poison.check()?;
        if event.has_happened(event.generation()) { Ok(()) } else { Err(code::NOT_READY) }
    }

    pub(crate) unsafe fn cuEventSynchronize(self: &Arc<Self>, event: CUevent) -> Outcome {
        let event = self.event(event)?;
        event.not_captured()?;
        self.refuse_in_capture()?;
        let poison = Arc::clone(&lock(&self.contexts).devices[event.device].poison);
        let generation = event.generation();
        // Ends because every operation ahead of the record does: launches and host functions by themselves, others by a deadline.
        while !event.wait_a_tick(generation, TICK) {
            poison.check()?;
            if self.closed.load(Ordering::Acquire) {
                return Err(code::DEINITIALIZED);
            }
        }
        poison.check()
    }

    pub(crate) unsafe fn cuEventElapsedTime(
        self: &Arc<Self>,
        milliseconds: *mut f32,
        start: CUevent,
        end: CUevent,
    ) -> Outcome {
        let (start, end) = (self.event(start)?, self.event(end)?);
        let (start, end) = (start.time()?, end.time()?);
        let elapsed =
            if end >= start { (end - start).as_secs_f64() * 1e3 } else { (start - end).as_secs_f64() * -1e3 };
        // SAFETY: the caller's contract.
        unsafe { put(milliseconds, elapsed as f32) }
    }
}
