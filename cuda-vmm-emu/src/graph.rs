//! Captures of streams, and graphs.
//!
//! A graph is the list of what was captured, in the order of the calls: one of the orders that its dependencies allow. A launch runs it as one
//! operation of its stream.

use crate::core::{Core, fresh_handle};
use crate::ledger::Incident;
use crate::status::{Outcome, code, lock, put, require};
use crate::stream::{CAPTURE_MODE, Event, Op, Stream};
use cuda_vmm_sys::ffi::c_ulonglong;
use cuda_vmm_sys::{CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// One capture: what its streams would have done.
#[derive(Debug)]
pub(crate) struct Capture {
    /// Handle of the stream that it began with.
    origin: usize,
    mode: CUstreamCaptureMode,
    /// The thread that began it.
    thread: ThreadId,
    state: Mutex<Captured>,
}

#[derive(Debug, Default)]
struct Captured {
    ops: Vec<Op>,
    /// Handle of each stream that takes part → operations that it has captured, and how many of them some other stream has waited for.
    streams: HashMap<usize, (u64, u64)>,
    broken: bool,
    ended: bool,
}

/// A place in a capture, as an event remembers it.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    capture: Arc<Capture>,
    stream: usize,
    at: u64,
}

impl Mark {
    /// Ends the capture: the event was used in a way that no capture allows.
    pub(crate) fn break_off(&self) {
        self.capture.break_off();
    }
}

impl Capture {
    fn new(origin: usize, mode: CUstreamCaptureMode) -> Arc<Self> {
        Arc::new(Self { origin, mode, thread: std::thread::current().id(), state: Mutex::default() })
    }

    /// Whether a thread in a mode of its own must not do what the capture would not see.
    fn forbids(&self, thread_mode: CUstreamCaptureMode) -> bool {
        let own = self.thread == std::thread::current().id();
        match thread_mode {
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED => false,
            _ if own => self.mode != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL => false,
            _ => self.mode == CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        }
    }

    pub(crate) fn is_broken(&self) -> bool {
        lock(&self.state).broken
    }

    pub(crate) fn break_off(&self) {
        lock(&self.state).broken = true;
    }

    /// Takes an operation of a stream in place of running it.
    pub(crate) fn take(&self, stream: usize, op: Op) -> Outcome {
        let mut state = lock(&self.state);
        if state.broken || state.ended {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        state.streams.entry(stream).or_default().0 += 1;
        state.ops.push(op);
        Ok(())
    }

    /// What an event that is recorded now stands for.
    fn mark(self: &Arc<Self>, stream: usize) -> Mark {
        let at = lock(&self.state).streams.entry(stream).or_default().0;
        Mark { capture: Arc::clone(self), stream, at }
    }

    /// Ends the capture. Returns what was captured, if every stream that was forked off has come back.
    fn finish(&self) -> Outcome<Arc<Vec<Op>>> {
        let mut state = lock(&self.state);
        state.ended = true;
        if state.broken {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        if state.streams.iter().any(|(&stream, &(done, waited))| stream != self.origin && waited < done) {
            return Err(code::STREAM_CAPTURE_UNJOINED);
        }
        Ok(Arc::new(std::mem::take(&mut state.ops)))
    }
}

/// Graphs and executable graphs by their handles.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: HashMap<usize, Arc<Vec<Op>>>,
    executables: HashMap<usize, Executable>,
}

/// An executable graph: its operations, and the stream and number of its newest launch.
#[derive(Debug)]
struct Executable {
    ops: Arc<Vec<Op>>,
    newest: Option<(Arc<Stream>, u64)>,
}

impl Graphs {
    pub(crate) fn handles(&self) -> Vec<usize> {
        self.graphs.keys().chain(self.executables.keys()).copied().collect()
    }
}

impl Core {
    /// For calls that no stream sees: they end the captures that forbid them to this thread. `cuda.h` has no list of them; these wait, or may,
    /// as allocating, freeing and loading do.
    pub(crate) fn refuse_in_capture(&self) -> Outcome {
        let thread_mode = CAPTURE_MODE.get();
        self.break_off_captures(|_, capture| capture.forbids(thread_mode))
    }

    /// For calls that wait for all streams of a context: none of them can be captured, whatever the thread's mode.
    pub(crate) fn refuse_in_captured_context(&self, device: usize) -> Outcome {
        self.break_off_captures(|stream, _| stream.device == device)
    }

    /// A graph does not keep its kernels' modules: who launches it keeps them.
    fn check_loaded(&self, ops: &[Op]) -> Outcome {
        for op in ops {
            match op {
                Op::Graph(ops) => self.check_loaded(ops)?,
                Op::Launch(launched) => {
                    let (module, device) = launched.origin();
                    if !lock(&self.modules).has(module) {
                        self.note(Incident::Unloaded { device });
                        return Err(code::INVALID_HANDLE);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn break_off_captures(&self, of: impl Fn(&Stream, &Capture) -> bool) -> Outcome {
        let all = lock(&self.contexts).all_streams();
        let captures = all.iter().filter_map(|stream| stream.capture().filter(|capture| of(stream, capture)));
        // All of them.
        if captures.map(|capture| capture.break_off()).count() == 0 {
            Ok(())
        } else {
            Err(code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }

    /// Records an event in a stream that is captured. False if the stream is not.
    pub(crate) fn record_in_capture(&self, stream: &Stream, event: &Event) -> Outcome<bool> {
        let Some(capture) = stream.capture() else { return Ok(false) };
        if capture.is_broken() {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        event.set_mark(Some(capture.mark(stream.handle)));
        Ok(true)
    }

    /// Lets a stream wait for an event if either is part of a capture. False if neither is.
    pub(crate) fn wait_in_capture(&self, stream: &Stream, event: &Event) -> Outcome<bool> {
        match (stream.capture(), event.mark()) {
            (None, None) => Ok(false),
            (Some(capture), None) => {
                capture.break_off();
                Err(code::STREAM_CAPTURE_ISOLATION)
            }
            (Some(capture), Some(mark)) if !Arc::ptr_eq(&capture, &mark.capture) => {
                capture.break_off();
                mark.capture.break_off();
                Err(code::STREAM_CAPTURE_MERGE)
            }
            (own, Some(mark)) => {
                let mut state = lock(&mark.capture.state);
                if state.ended {
                    return Err(code::CAPTURED_EVENT);
                }
                if state.broken {
                    return Err(code::STREAM_CAPTURE_INVALIDATED);
                }
                if stream.legacy {
                    state.broken = true;
                    return Err(code::STREAM_CAPTURE_IMPLICIT);
                }
                if own.is_none() {
                    stream.set_capture(Some(Arc::clone(&mark.capture)));
                }
                if stream.handle != mark.stream {
                    let waited = &mut state.streams.entry(mark.stream).or_default().1;
                    *waited = (*waited).max(mark.at);
                }
                // A stream takes part from its first wait on.
                state.streams.entry(stream.handle).or_default().0 +=
                    u64::from(stream.handle != mark.capture.origin);
                Ok(true)
            }
        }
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes. Handles are only
/// compared, never followed.
impl Core {
    pub(crate) unsafe fn cuStreamBeginCapture(
        self: &Arc<Self>,
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) -> Outcome {
        require(mode.0 <= CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0)?;
        let stream = self.stream_for_work(stream)?;
        if stream.legacy {
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if stream.capture().is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        stream.set_capture(Some(Capture::new(stream.handle, mode)));
        Ok(())
    }

    pub(crate) unsafe fn cuStreamEndCapture(
        self: &Arc<Self>,
        stream: CUstream,
        graph: *mut CUgraph,
    ) -> Outcome {
        require(!graph.is_null())?;
        let stream = self.stream_for_work(stream)?;
        let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
        if capture.origin != stream.handle {
            capture.break_off();
            return Err(code::STREAM_CAPTURE_UNMATCHED);
        }
        let relaxed = capture.mode == CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        if !relaxed && capture.thread != std::thread::current().id() {
            return Err(code::STREAM_CAPTURE_WRONG_THREAD);
        }
        // SAFETY: not null, and valid for a write by the caller's contract.
        unsafe { put(graph, std::ptr::null_mut()) }?;
        let ops = capture.finish();
        let of_capture = |other: &Arc<Stream>| other.capture().is_some_and(|c| Arc::ptr_eq(&c, &capture));
        let all = lock(&self.contexts).all_streams();
        all.iter().filter(|other| of_capture(other)).for_each(|other| other.set_capture(None));
        let ops = ops?;
        let handle = fresh_handle();
        lock(&self.graphs).graphs.insert(handle, ops);
        // SAFETY: as above.
        unsafe { put(graph, handle as CUgraph) }
    }

    pub(crate) unsafe fn cuGraphInstantiateWithFlags(
        self: &Arc<Self>,
        executable: *mut CUgraphExec,
        graph: CUgraph,
        _flags: c_ulonglong,
    ) -> Outcome {
        require(!executable.is_null())?;
        let mut graphs = lock(&self.graphs);
        let ops = graphs.graphs.get(&(graph as usize)).cloned().ok_or(code::INVALID_VALUE)?;
        let handle = fresh_handle();
        graphs.executables.insert(handle, Executable { ops, newest: None });
        // SAFETY: not null, and valid for a write by the caller's contract.
        unsafe { put(executable, handle as CUgraphExec) }
    }

    pub(crate) unsafe fn cuGraphUpload(
        self: &Arc<Self>,
        executable: CUgraphExec,
        stream: CUstream,
    ) -> Outcome {
        self.stream_for_work(stream)?;
        require(lock(&self.graphs).executables.contains_key(&(executable as usize)))
    }

    pub(crate) unsafe fn cuGraphLaunch(
        self: &Arc<Self>,
        executable: CUgraphExec,
        stream: CUstream,
    ) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        let (ops, before) = {
            let graphs = lock(&self.graphs);
            let found = graphs.executables.get(&(executable as usize)).ok_or(code::INVALID_VALUE)?;
            (Arc::clone(&found.ops), found.newest.clone())
        };
        self.check_loaded(&ops)?;
        if stream.capture().is_some() {
            return stream.submit(self, Op::Graph(ops)).map(drop);
        }
        // Launches of one executable graph follow each other, whatever their streams.
        if let Some(before) = before.filter(|(other, _)| !Arc::ptr_eq(other, &stream)) {
            stream.submit(self, Op::Join(vec![before]))?;
        }
        let ticket = stream.submit(self, Op::Graph(ops))?;
        if let Some(found) = lock(&self.graphs).executables.get_mut(&(executable as usize)) {
            found.newest = Some((stream, ticket));
        }
        Ok(())
    }

    pub(crate) unsafe fn cuGraphExecDestroy(self: &Arc<Self>, executable: CUgraphExec) -> Outcome {
        lock(&self.graphs).executables.remove(&(executable as usize)).map(drop).ok_or(code::INVALID_VALUE)
    }

    pub(crate) unsafe fn cuGraphDestroy(self: &Arc<Self>, graph: CUgraph) -> Outcome {
        lock(&self.graphs).graphs.remove(&(graph as usize)).map(drop).ok_or(code::INVALID_VALUE)
    }
}
