//! A communicator's handle, shared by everything that is made from it.

use crate::bytes::Bytes;
use crate::config::EncodedConfig;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::group::Ticket;
use crate::library;
use crate::memory::WindowMemory;
use crate::requirements::DEV_COMM_CAPACITY;
use nccl_gin_sys::{Function, MissingFunction, Nccl, ncclComm_t, ncclResult_t, ncclWindow_t};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How long an abort or a destroy, which wait for no other rank, may take before they are given up.
const LOCAL_LIMIT: Duration = Duration::from_secs(20);

/// What a handle is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Calls may be made.
    Alive,
    /// Destroyed or aborted: the handle is dangling.
    Gone,
    /// An abort did not end: NCCL may still use everything that was given to it.
    Stuck,
}

/// Whether an operation is under way.
pub(crate) enum Busy {
    No,
    /// One that was begun on its own.
    Alone,
    /// Those that were begun inside one group: they start and end together.
    Group(Ticket),
    /// One that nobody waits for any more, which may have ended.
    Abandoned,
}

/// A handle's state and whether an operation is under way on it.
pub(crate) struct Use {
    pub(crate) state: State,
    pub(crate) busy: Busy,
}

impl Use {
    /// Whether another operation may begin, inside the group of `ticket` or on its own.
    fn free_for(&self, ticket: Option<&Ticket>) -> bool {
        match (&self.busy, ticket) {
            (Busy::No, _) => true,
            (Busy::Group(theirs), Some(ours)) => theirs == ours,
            _ => false,
        }
    }

    /// Notes that an operation has begun.
    pub(crate) fn begin(&mut self, ticket: Option<&Ticket>) {
        self.busy = ticket.map_or(Busy::Alone, |ticket| Busy::Group(ticket.clone()));
    }
}

/// How far the operations of a communicator are.
pub(crate) enum Progress {
    Running,
    Done,
    /// One has failed, and all have ended.
    Failed(Error),
}

/// What makes the result of an operation, and drops it.
pub(crate) type Clean = Box<dyn FnOnce(&Arc<Inner>) + Send>;

/// What was dropped instead of closed, kept until the communicator is closed.
pub(crate) enum Leftover {
    /// An operation that nobody waited for.
    Unfinished(Clean),
    DevComm(Box<Bytes<DEV_COMM_CAPACITY>>),
    Window(RawWindow, Arc<dyn WindowMemory>),
}

/// A window's handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawWindow(pub(crate) ncclWindow_t);

// SAFETY: the handle is an address that only NCCL follows; calls with it are made under the communicator's lock.
unsafe impl Send for RawWindow {}
// SAFETY: as above.
unsafe impl Sync for RawWindow {}

pub(crate) struct Inner {
    pub(crate) nccl: Nccl,
    pub(crate) device: Device,
    raw: ncclComm_t,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) timeout: Duration,
    lock: Mutex<Use>,
    pub(crate) windows: AtomicUsize,
    pub(crate) dev_comms: AtomicUsize,
    /// Whether a device communicator with multicast has been created.
    pub(crate) multimem: AtomicBool,
    leftovers: Mutex<Vec<Leftover>>,
    /// NCCL keeps the pointers to the texts in it.
    config: Mutex<Option<EncodedConfigOwner>>,
}

/// Keeps a configuration's texts in place.
pub(crate) struct EncodedConfigOwner(#[expect(dead_code, reason = "NCCL reads it")] EncodedConfig);

// SAFETY: the pointers in it are to its own heap texts, which move with it and are never written.
unsafe impl Send for EncodedConfigOwner {}
// SAFETY: as above.
unsafe impl Sync for EncodedConfigOwner {}

impl From<EncodedConfig> for EncodedConfigOwner {
    fn from(config: EncodedConfig) -> Self {
        Self(config)
    }
}

/// A communicator on its way to another thread.
struct SentComm(ncclComm_t);

// SAFETY: NCCL's communicators may be used from any thread, one call at a time.
unsafe impl Send for SentComm {}

impl SentComm {
    fn get(&self) -> ncclComm_t {
        self.0
    }
}

// SAFETY: NCCL's communicators may be used from any thread, one call at a time: all calls are made under `lock`.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    pub(crate) fn new(
        nccl: &Nccl,
        device: &Device,
        raw: ncclComm_t,
        (rank, size): (u32, u32),
        timeout: Duration,
        config: Option<EncodedConfigOwner>,
    ) -> Arc<Self> {
        Arc::new(Self {
            nccl: nccl.clone(),
            device: device.clone(),
            raw,
            rank,
            size,
            timeout,
            lock: Mutex::new(Use { state: State::Alive, busy: Busy::No }),
            windows: AtomicUsize::new(0),
            dev_comms: AtomicUsize::new(0),
            multimem: AtomicBool::new(false),
            leftovers: Mutex::default(),
            config: Mutex::new(config),
        })
    }

    pub(crate) fn raw(&self) -> ncclComm_t {
        self.raw
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Use> {
        // A panic under the lock (in a caller's closure there is none) leaves a state that is still true.
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `rank 0 of 2`.
    pub(crate) fn name(&self) -> String {
        format!("rank {} of {}", self.rank, self.size)
    }

    /// Makes one call, if the communicator is alive, with its device current.
    pub(crate) fn call<F>(&self, function: Function, attempt: &dyn Fn() -> String, call: F) -> Result<()>
    where
        F: FnOnce(&Nccl, ncclComm_t) -> Result<ncclResult_t, Box<MissingFunction>>,
    {
        let used = self.lock();
        self.call_locked(&used, function, attempt, call)
    }

    /// Makes one call that asks NCCL about what it knows already: it needs no current device.
    pub(crate) fn ask<F>(&self, function: Function, attempt: &dyn Fn() -> String, call: F) -> Result<()>
    where
        F: FnOnce(&Nccl) -> Result<ncclResult_t, Box<MissingFunction>>,
    {
        // Held until the call is back: an abort on another thread comes before it or after it.
        let used = self.lock();
        if used.state != State::Alive {
            return Err(Error::Gone { attempt: attempt() });
        }
        let result = call(&self.nccl)?;
        library::check(&self.nccl, function, result, attempt)
    }

    pub(crate) fn call_locked<F>(
        &self,
        used: &MutexGuard<'_, Use>,
        function: Function,
        attempt: &dyn Fn() -> String,
        call: F,
    ) -> Result<()>
    where
        F: FnOnce(&Nccl, ncclComm_t) -> Result<ncclResult_t, Box<MissingFunction>>,
    {
        if used.state != State::Alive {
            return Err(Error::Gone { attempt: attempt() });
        }
        let _current = self.device.enter()?;
        let result = call(&self.nccl, self.raw)?;
        library::check(&self.nccl, function, result, attempt)
    }

    /// What `ncclCommGetAsyncError` says.
    pub(crate) fn progress(&self, function: Function, attempt: &dyn Fn() -> String) -> Result<Progress> {
        let used = self.lock();
        self.progress_locked(&used, function, attempt)
    }

    fn progress_locked(
        &self,
        used: &MutexGuard<'_, Use>,
        function: Function,
        attempt: &dyn Fn() -> String,
    ) -> Result<Progress> {
        let mut state = ncclResult_t::ncclSuccess;
        self.call_locked(used, Function::ncclCommGetAsyncError, attempt, |nccl, comm| {
            // SAFETY: the communicator is alive, which `call_locked` checked, and the output is valid for one write.
            unsafe { nccl.ncclCommGetAsyncError(comm, &mut state) }
        })?;
        Ok(match state {
            ncclResult_t::ncclSuccess => Progress::Done,
            ncclResult_t::ncclInProgress => Progress::Running,
            failed => Progress::Failed(library::failure(&self.nccl, function, failed, attempt()).into()),
        })
    }

    /// Whether another operation may begin, inside the group of `ticket` or on its own.
    pub(crate) fn free_for(&self, used: &mut MutexGuard<'_, Use>, ticket: Option<&Ticket>) -> bool {
        if matches!(used.busy, Busy::Abandoned) {
            let progress = self.progress_locked(used, Function::ncclCommGetAsyncError, &|| self.name());
            if !matches!(progress, Ok(Progress::Done | Progress::Failed(_))) {
                return false;
            }
            used.busy = Busy::No;
        }
        used.free_for(ticket)
    }

    /// Whether everything so far has ended.
    pub(crate) fn poll(&self, function: Function, attempt: &dyn Fn() -> String) -> Result<bool> {
        match self.progress(function, attempt)? {
            Progress::Done => Ok(true),
            Progress::Running => Ok(false),
            Progress::Failed(error) => Err(error),
        }
    }

    /// Polls until everything has ended, or until `end`; `Ok(false)` at the end.
    pub(crate) fn wait(
        &self,
        function: Function,
        attempt: &dyn Fn() -> String,
        end: Instant,
    ) -> Result<bool> {
        wait_until(end, || self.poll(function, attempt))
    }

    /// Stops what is under way and gives back what is local, without the other ranks. Whether that ended in time.
    pub(crate) fn abort(&self) -> bool {
        let ended = self.end(|nccl, comm| {
            // SAFETY: the handle was alive, and nobody else uses it from here on: its state says so.
            unsafe { nccl.ncclCommAbort(comm) }
        });
        // What an abort returns is of no interest: the handle is gone either way.
        matches!(ended, Some(Some(_)))
    }

    /// Makes the last call on the handle, on a thread of its own, and waits for it for a limited time: what it returned, or `None` if it
    /// did not end. `None` without making it if the handle has seen its last call already.
    pub(crate) fn end<F>(&self, call: F) -> Option<Option<ncclResult_t>>
    where
        F: FnOnce(&Nccl, ncclComm_t) -> Result<ncclResult_t, Box<MissingFunction>> + Send + 'static,
    {
        {
            let mut used = self.lock();
            if used.state != State::Alive {
                return None;
            }
            // Until the call has ended NCCL may use anything.
            used.state = State::Stuck;
        }
        let (done, ended) = mpsc::channel();
        let (nccl, device, comm) = (self.nccl.clone(), self.device.clone(), SentComm(self.raw));
        let thread = thread::Builder::new().name("nccl-end".into()).spawn(move || {
            let result = device.enter().ok().and_then(|_current| call(&nccl, comm.get()).ok());
            // Ahead of the answer: who gets it may rely on nothing being held here.
            drop((nccl, device));
            if let Some(result) = result {
                // The receiver may have given up waiting.
                let _ = done.send(result);
            }
        });
        let result = thread.ok().and_then(|_| ended.recv_timeout(LOCAL_LIMIT).ok());
        if result.is_some() {
            self.lock().state = State::Gone;
        }
        Some(result)
    }

    /// Keeps something that was dropped instead of closed.
    pub(crate) fn keep(&self, leftover: Leftover) {
        static SAID: Once = Once::new();
        let what = match &leftover {
            Leftover::Unfinished(_) => "an operation that goes on",
            Leftover::DevComm(_) => "a device communicator",
            Leftover::Window(..) => "a window",
        };
        let state = self.lock().state;
        match state {
            State::Alive => {
                SAID.call_once(|| {
                    eprintln!(
                        "nccl-gin: {what} was dropped instead of waited for or closed; it is kept until its communicator is closed"
                    );
                });
                self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).push(leftover);
            }
            // Went with the communicator.
            State::Gone => drop(leftover),
            // NCCL may still use the memory.
            State::Stuck => std::mem::forget(leftover),
        }
    }

    /// Takes what was dropped instead of closed, device communicators first.
    pub(crate) fn take_leftovers(&self) -> Vec<Leftover> {
        let mut leftovers =
            std::mem::take(&mut *self.leftovers.lock().unwrap_or_else(PoisonError::into_inner));
        leftovers.sort_by_key(|leftover| matches!(leftover, Leftover::Window(..)));
        leftovers
    }

    /// Keeps a configuration for as long as the communicator.
    pub(crate) fn keep_config(&self, config: EncodedConfigOwner) {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = Some(config);
    }

    /// Windows and device communicators that are alive.
    pub(crate) fn in_use(&self) -> (usize, usize) {
        (self.windows.load(Ordering::Acquire), self.dev_comms.load(Ordering::Acquire))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let used = self.lock.get_mut().unwrap_or_else(PoisonError::into_inner);
        let leftovers = std::mem::take(self.leftovers.get_mut().unwrap_or_else(PoisonError::into_inner));
        if used.state == State::Gone {
            return;
        }
        // Destroying needs the other ranks, and NCCL goes on using what it was given until then.
        let config = self.config.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        std::mem::forget((leftovers, config, self.device.clone()));
        static SAID: Once = Once::new();
        if used.state == State::Alive {
            let (rank, size) = (self.rank, self.size);
            SAID.call_once(|| {
                eprintln!(
                    "nccl-gin: the communicator of rank {rank} of {size} was dropped instead of closed or aborted; its resources stay \
                     until the process ends"
                );
            });
        }
    }
}

/// Polls with growing pauses until `poll` says that it is done, fails, or `end` has come.
pub(crate) fn wait_until(end: Instant, mut poll: impl FnMut() -> Result<bool>) -> Result<bool> {
    let mut pause = Duration::from_micros(10);
    loop {
        if poll()? {
            return Ok(true);
        }
        let now = Instant::now();
        if now >= end {
            return Ok(false);
        }
        thread::sleep(pause.min(end - now));
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}
