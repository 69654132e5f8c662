//! Streams: operations in order.
//!
//! An operation runs on the thread that submits it if the stream is idle and it need not wait. Otherwise it is queued, and a thread
//! of the stream's runs the queue dry and ends.

mod calls;
mod event;
mod op;
mod value;

pub(crate) use calls::CAPTURE_MODE;
pub(crate) use event::Event;
use op::Waiting;
pub(crate) use op::{Op, Source, Whose};

use crate::context::Poison;
use crate::core::{Core, fresh_handle};
use crate::graph::Capture;
use crate::ledger::Incident;
use crate::status::{Outcome, code, lock};
use cuda_vmm_sys::{CUresult, CUstream};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often who waits looks whether the emulator has ended.
pub(crate) const TICK: Duration = Duration::from_millis(5);

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) device: usize,
    /// Whether it keeps out of the legacy default stream's order.
    pub(crate) non_blocking: bool,
    /// Whether it is a legacy default stream.
    pub(crate) legacy: bool,
    pub(crate) poison: Arc<Poison>,
    state: Mutex<State>,
    changed: Condvar,
    capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Op>,
    submitted: u64,
    completed: u64,
    /// Whether some thread is running an operation of this stream.
    running: bool,
}

impl Stream {
    fn new(device: usize, non_blocking: bool, legacy: bool, poison: Arc<Poison>) -> Arc<Self> {
        Arc::new(Self {
            handle: fresh_handle(),
            device,
            non_blocking,
            legacy,
            poison,
            state: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::default(),
        })
    }

    /// Puts an operation at the stream's end. Returns the number by which [`await_ticket`](Self::await_ticket) knows it.
    pub(crate) fn submit(self: &Arc<Self>, core: &Arc<Core>, op: Op) -> Outcome<u64> {
        self.poison.check()?;
        if let Some(capture) = self.capture() {
            return capture.take(self.handle, op).map(|()| 0);
        }
        let others = core.before(self)?;
        if !others.is_empty() {
            self.push(core, Op::Join(others))?;
        }
        self.push(core, op)
    }

    fn push(self: &Arc<Self>, core: &Arc<Core>, op: Op) -> Outcome<u64> {
        let mut state = lock(&self.state);
        state.submitted += 1;
        let ticket = state.submitted;
        if state.running || !state.queue.is_empty() || !op.runs_at_once(core) {
            state.queue.push_back(op);
            if !state.running {
                state.running = true;
                drop(state);
                self.start_worker(core)?;
            }
            return Ok(ticket);
        }
        state.running = true;
        drop(state);
        let result = op.run(core);
        if let Err(error) = result {
            self.fail(core, error);
        }
        let mut state = lock(&self.state);
        state.completed += 1;
        let more = !state.queue.is_empty();
        state.running = more;
        drop(state);
        self.changed.notify_all();
        if more {
            self.start_worker(core)?;
        }
        result.map(|()| ticket)
    }

    /// The capture that the stream takes part in.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        lock(&self.capture).clone()
    }

    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        *lock(&self.capture) = capture;
    }

    /// For calls that a stream must not get while it is captured; they end the capture.
    fn not_captured(&self) -> Outcome {
        match self.capture() {
            None => Ok(()),
            Some(capture) => {
                capture.break_off();
                Err(code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Starts the thread that runs the queue. The caller has set `running`.
    fn start_worker(self: &Arc<Self>, core: &Arc<Core>) -> Outcome {
        let (stream, core_of_worker) = (Arc::clone(self), Arc::clone(core));
        let thread = std::thread::Builder::new().name("cuda-vmm-emu stream".into());
        let started = thread.spawn(move || stream.work(&core_of_worker));
        if started.is_err() {
            // No thread to be had: the context cannot go on, and who waits must not wait for nothing.
            self.fail(core, code::OPERATING_SYSTEM);
            self.work(core);
            return Err(code::OPERATING_SYSTEM);
        }
        Ok(())
    }

    /// Runs the queue dry.
    fn work(self: &Arc<Self>, core: &Arc<Core>) {
        loop {
            let mut state = lock(&self.state);
            let Some(op) = state.queue.pop_front() else {
                state.running = false;
                drop(state);
                self.changed.notify_all();
                return;
            };
            drop(state);
            if self.poison.check().is_err() {
                op.skip();
            } else if let Err(error) = op.await_and_run(core) {
                op.skip();
                self.fail(core, error);
            }
            // What the operation holds goes before it counts as done.
            drop(op);
            lock(&self.state).completed += 1;
            self.changed.notify_all();
        }
    }

    fn fail(&self, core: &Core, error: CUresult) {
        if !core.closed.load(Ordering::Acquire) && self.poison.check().is_ok() {
            core.note(Incident::StreamFailed { device: self.device, error });
        }
        self.poison.set(error);
    }

    /// Number of the last operation, if it is not done.
    pub(crate) fn pending(&self) -> Option<u64> {
        let state = lock(&self.state);
        (state.completed < state.submitted).then_some(state.submitted)
    }

    fn is_done(&self, ticket: u64) -> bool {
        lock(&self.state).completed >= ticket
    }

    /// Waits a tick at most for an operation. Returns whether it is done.
    fn wait_a_tick(&self, ticket: u64) -> bool {
        let state = lock(&self.state);
        if state.completed >= ticket {
            return true;
        }
        let (state, _) = self.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner);
        state.completed >= ticket
    }

    /// Waits for an operation, and all before it. Ends because each of them does: launches and host functions by themselves, others by a deadline.
    pub(crate) fn await_ticket(&self, core: &Core, ticket: u64) {
        while !self.wait_a_tick(ticket) {
            if core.closed.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Waits for all that was submitted so far.
    pub(crate) fn finish(&self, core: &Core) {
        if let Some(ticket) = self.pending() {
            self.await_ticket(core, ticket);
        }
    }
}

/// Waits until `done` says so, for the configured time at most.
pub(crate) fn bounded(core: &Core, mut done: impl FnMut() -> Outcome<bool>) -> Outcome {
    let end = Instant::now() + core.config.stream_deadline;
    while !done()? {
        if core.closed.load(Ordering::Acquire) {
            return Err(code::DEINITIALIZED);
        }
        if Instant::now() >= end {
            return Err(code::LAUNCH_TIMEOUT);
        }
    }
    Ok(())
}

impl Core {
    /// What must be done before the next operation of a stream: the legacy default stream and the blocking streams of its context
    /// take turns.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` if a stream that the legacy default stream would wait for is captured.
    fn before(&self, stream: &Stream) -> Outcome<Vec<(Arc<Stream>, u64)>> {
        if stream.non_blocking {
            return Ok(Vec::new());
        }
        let contexts = lock(&self.contexts);
        let Some(context) = contexts.devices.get(stream.device) else { return Ok(Vec::new()) };
        let pending = |other: &Arc<Stream>| other.pending().map(|ticket| (Arc::clone(other), ticket));
        if !stream.legacy {
            return Ok(context.default_stream.iter().filter_map(pending).collect());
        }
        let all = contexts.streams.values().chain(context.thread_streams.values()).chain(&context.draining);
        let blocking = || all.clone().filter(|other| other.device == stream.device && !other.non_blocking);
        if let Some(capture) = blocking().find_map(|other| other.capture()) {
            capture.break_off();
            return Err(code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(blocking().filter_map(pending).collect())
    }

    /// The stream behind a handle: one that was created, or a default stream of the current context.
    pub(crate) fn stream(&self, handle: CUstream) -> Outcome<Arc<Stream>> {
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        let handle = handle as usize;
        if handle > PER_THREAD {
            return lock(&self.contexts).streams.get(&handle).cloned().ok_or(code::INVALID_HANDLE);
        }
        let device = self.current()?;
        let mut contexts = lock(&self.contexts);
        let context = &mut contexts.devices[device];
        let poison = Arc::clone(&context.poison);
        Ok(match handle {
            0 | LEGACY => {
                let make = || Stream::new(device, false, true, poison);
                Arc::clone(context.default_stream.get_or_insert_with(make))
            }
            _ => {
                let make = || Stream::new(device, false, false, poison);
                Arc::clone(context.thread_streams.entry(std::thread::current().id()).or_insert_with(make))
            }
        })
    }

    /// The stream for new work: as [`stream`](Self::stream), and some context must be current, as the driver asks.
    pub(crate) fn stream_for_work(&self, handle: CUstream) -> Outcome<Arc<Stream>> {
        self.current()?;
        self.stream(handle)
    }
}
