//! Communicators that are made from others.

use super::inner::Inner;
use super::{Communicator, check_ranks, place};
use crate::config::{Config, EncodedConfig};
use crate::device::Device;
use crate::environment;
use crate::error::{Error, Result};
use crate::pending::Pending;
use crate::unique_id::UniqueId;
use crate::{group, library};
use nccl_gin_sys::{
    Function, MissingFunction, NCCL_SHRINK_ABORT, NCCL_SHRINK_DEFAULT, NCCL_SPLIT_NOCOLOR, Nccl, ncclComm_t,
    ncclResult_t, ncclUniqueId,
};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// What becomes of the parent's operations when it is shrunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shrink {
    /// They go on: every rank that stays is healthy.
    #[default]
    Default,
    /// They are stopped first: for a parent that has lost ranks.
    Abort,
}

/// A communicator that NCCL writes in the background, and the configuration that it reads.
struct Output {
    comm: ncclComm_t,
    config: EncodedConfig,
}

// SAFETY: it is only touched by the thread that has it, and by NCCL until the operation has ended.
unsafe impl Send for Output {}

impl Output {
    fn new(config: &Config, nccl: &Nccl) -> Result<*mut Self> {
        Ok(Box::into_raw(Box::new(Self { comm: ptr::null_mut(), config: config.encode(nccl)? })))
    }
}

/// Owns an [`Output`] that NCCL may still write to: it is reached through its pointer alone.
struct Owned(*mut Output);

// SAFETY: the only owner of the output.
unsafe impl Send for Owned {}

impl Owned {
    fn take(self) -> Box<Output> {
        let pointer = std::mem::ManuallyDrop::new(self).0;
        // SAFETY: made by `Box::into_raw`, owned by this value alone, and the operation that wrote to it has ended.
        unsafe { Box::from_raw(pointer) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: as in `take`, which a value can see only once; whoever drops it knows that the operation has ended.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Communicator {
    /// Makes communicators of the ranks that pass the same colour, ordered by key, then by rank. Collective over this communicator; a rank
    /// that passes no colour gets none.
    ///
    /// # Errors
    /// [`Error::Argument`] for a colour that C's `int` cannot hold, NCCL's error, or [`Error::Timeout`], in which case this communicator
    /// has been aborted.
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<u32>, key: i32, config: &Config) -> Result<Option<Self>> {
        group::refuse_inside(|| format!("splitting {}", self.inner.name()))?;
        self.begin_split(color, key, config)?.wait()
    }

    /// Begins to split this communicator.
    ///
    /// # Errors
    /// As for [`Communicator::split`].
    pub fn begin_split(
        &self,
        color: Option<u32>,
        key: i32,
        config: &Config,
    ) -> Result<Pending<Option<Self>>> {
        let c_color = match color.map(i32::try_from) {
            None => NCCL_SPLIT_NOCOLOR,
            Some(Ok(color)) => color,
            Some(Err(_)) => {
                return Err(Error::argument(
                    "the colour",
                    color.unwrap_or_default(),
                    format!("at most {}", i32::MAX),
                ));
            }
        };
        let attempt = format!("splitting {} with colour {color:?} and key {key}", self.inner.name());
        self.begin_child(Function::ncclCommSplit, attempt, color.is_some(), config, |nccl, comm, output| {
            // SAFETY: the parent is alive; the output is reached by nobody else until the operation has ended.
            unsafe {
                nccl.ncclCommSplit(comm, c_color, key, &raw mut (*output).comm, (*output).config.as_mut_ptr())
            }
        })
    }

    /// Makes a communicator without the ranks in `exclude`, which do not take part. Collective over the others.
    ///
    /// # Errors
    /// [`Error::Argument`] if the list is empty, names this rank or one that there is not; NCCL's error; or [`Error::Timeout`], in which
    /// case this communicator has been aborted.
    #[doc(alias = "ncclCommShrink")]
    pub fn shrink(&self, exclude: &[u32], mode: Shrink, config: &Config) -> Result<Self> {
        let attempt = format!("shrinking {} by {exclude:?}", self.inner.name());
        group::refuse_inside(|| attempt.clone())?;
        if exclude.is_empty() {
            return Err(Error::argument("the list of excluded ranks", "empty", "at least one rank"));
        }
        for &rank in exclude {
            if rank >= self.size() || rank == self.rank() {
                return Err(Error::argument(
                    "an excluded rank",
                    rank,
                    format!("another one of {} ranks", self.size()),
                ));
            }
        }
        let mut ranks: Vec<i32> = exclude.iter().map(|rank| rank.cast_signed()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let flags = match mode {
            Shrink::Default => NCCL_SHRINK_DEFAULT,
            Shrink::Abort => NCCL_SHRINK_ABORT,
        };
        let function = Function::ncclCommShrink;
        let pending = self.begin_child(function, attempt.clone(), true, config, |nccl, comm, output| {
            let count = ranks.len() as i32;
            // SAFETY: the parent is alive; NCCL copies the list; the output is reached by nobody else until the operation has ended.
            unsafe {
                nccl.ncclCommShrink(
                    comm,
                    ranks.as_mut_ptr(),
                    count,
                    &raw mut (*output).comm,
                    (*output).config.as_mut_ptr(),
                    flags.cast_signed(),
                )
            }
        })?;
        pending.wait()?.ok_or(Error::Nothing { attempt, function, missing: "communicator", advice: NO_CHILD })
    }

    fn begin_child(
        &self,
        function: Function,
        attempt: String,
        expected: bool,
        config: &Config,
        call: impl FnOnce(&Nccl, ncclComm_t, *mut Output) -> Result<ncclResult_t, Box<MissingFunction>>,
    ) -> Result<Pending<Option<Self>>> {
        environment::check()?;
        let output = Owned(Output::new(config, self.nccl())?);
        let pointer = output.0;
        let timeout = config.operation_timeout();
        let what = attempt.clone();
        Pending::start(
            &self.inner,
            function,
            attempt,
            |nccl, comm| call(nccl, comm, pointer),
            move |parent| {
                let output = output.take();
                if output.comm.is_null() {
                    if expected {
                        return Err(Error::Nothing {
                            attempt: what,
                            function,
                            missing: "communicator",
                            advice: NO_CHILD,
                        });
                    }
                    return Ok(None);
                }
                adopt(&parent.nccl, &parent.device, *output, timeout, &what).map(Some)
            },
        )
    }

    /// An identifier with which new ranks join a communicator that grows ([`Communicator::join`]). One of the present ranks makes it;
    /// NCCL 2.29 and later.
    ///
    /// # Errors
    /// [`Error::Missing`] before 2.29, or NCCL's error.
    #[doc(alias = "ncclCommGetUniqueId")]
    pub fn grow_id(&self) -> Result<UniqueId> {
        let mut id = ncclUniqueId::default();
        let attempt = || format!("making an id for {} to grow by", self.inner.name());
        self.inner.call(Function::ncclCommGetUniqueId, &attempt, |nccl, comm| {
            // SAFETY: the communicator is alive, and the output is valid for one write.
            unsafe { nccl.ncclCommGetUniqueId(comm, &mut id) }
        })?;
        Ok(UniqueId::from_raw(id))
    }

    /// Makes a communicator of `size` ranks from this one's, which keep their ranks, and new ones, which call [`Communicator::join`].
    /// Collective over all of them; the rank that made the identifier passes it, the others pass none. NCCL 2.29 and later.
    ///
    /// # Errors
    /// [`Error::Missing`] before 2.29, [`Error::Argument`] for a size that is not larger, NCCL's error, or [`Error::Timeout`], in which
    /// case this communicator has been aborted.
    #[doc(alias = "ncclCommGrow")]
    pub fn grow(&self, size: u32, id: Option<&UniqueId>, config: &Config) -> Result<Self> {
        let attempt = format!("growing {} to {size} ranks", self.inner.name());
        group::refuse_inside(|| attempt.clone())?;
        if size <= self.size() || i32::try_from(size).is_err() {
            return Err(Error::argument(
                "the new number of ranks",
                size,
                format!("more than {}", self.size()),
            ));
        }
        if !self.inner.free_for(&mut self.inner.lock(), None) {
            return Err(Error::Busy { attempt });
        }
        let parent = Arc::clone(&self.inner);
        let grown = grow(
            &self.inner.nccl,
            &self.inner.device,
            Some(parent),
            size,
            id,
            (-1, self.rank()),
            config,
            &attempt,
        )?;
        grown.wait()
    }

    /// Joins a communicator that grows to `size` ranks, as its new rank `rank`. Collective with [`Communicator::grow`] on the present
    /// ranks. NCCL 2.29 and later.
    ///
    /// # Errors
    /// As for [`Communicator::grow`].
    pub fn join(
        nccl: &Nccl,
        device: &Device,
        id: &UniqueId,
        size: u32,
        rank: u32,
        config: &Config,
    ) -> Result<Self> {
        let attempt = format!("joining as rank {rank} of {size}");
        group::refuse_inside(|| attempt.clone())?;
        check_ranks(size, rank)?;
        grow(nccl, device, None, size, Some(id), (rank.cast_signed(), rank), config, &attempt)?.wait()
    }
}

const NO_CHILD: &str = "NCCL_DEBUG=WARN says more";

/// The communicator of a finished operation. One that does not tell its place is given back.
fn adopt(
    nccl: &Nccl,
    device: &Device,
    output: Output,
    timeout: Duration,
    attempt: &str,
) -> Result<Communicator> {
    let Output { comm, config } = output;
    match place(nccl, comm, &|| attempt.to_owned()) {
        Ok(place) => {
            let inner = Inner::new(nccl, device, comm, place, timeout, Some(config.into()));
            Ok(Communicator::from_inner(&inner))
        }
        Err(error) => {
            // Its rank and size are of no use to an abort.
            Inner::new(nccl, device, comm, (0, 1), timeout, Some(config.into())).abort();
            Err(error)
        }
    }
}

/// `ncclCommGrow`, which itself waits for other ranks, on a thread of its own.
#[expect(clippy::too_many_arguments, reason = "what ncclCommGrow takes")]
fn grow(
    nccl: &Nccl,
    device: &Device,
    parent: Option<Arc<Inner>>,
    size: u32,
    id: Option<&UniqueId>,
    (c_rank, rank): (i32, u32),
    config: &Config,
    attempt: &str,
) -> Result<Pending<Communicator>> {
    environment::check()?;
    nccl.address(Function::ncclCommGrow)?;
    let function = Function::ncclCommGrow;
    let timeout = config.operation_timeout();
    let output = Owned(Output::new(config, nccl)?);
    let id = id.map(|id| id.to_raw());
    let (done, ended) = mpsc::channel();
    // Set by whoever comes first: the thread with an answer, or the caller who gives up.
    let fate = Arc::new(AtomicBool::new(false));
    let thread_fate = Arc::clone(&fate);
    let (thread_nccl, thread_device, thread_parent) = (nccl.clone(), device.clone(), parent.clone());
    let worker = thread::Builder::new().name("nccl-grow".into()).spawn(move || {
        let result = thread_device.enter().and_then(|_current| {
            let comm = thread_parent.as_ref().map_or(ptr::null_mut(), |parent| parent.raw());
            let id = id.as_ref().map_or(ptr::null(), ptr::from_ref);
            let pointer = output.0;
            // SAFETY: the parent, if any, is alive (its owner waits for this thread or aborts it, upon which the call returns); the
            // identifier and the output live on this thread's stack and heap until the call has returned.
            let result = unsafe {
                let (comm_out, config) = (&raw mut (*pointer).comm, (*pointer).config.as_mut_ptr());
                thread_nccl.ncclCommGrow(comm, size.cast_signed(), id, c_rank, comm_out, config)
            };
            Ok(result?)
        });
        if thread_fate.swap(true, Ordering::AcqRel) {
            // Nobody waits any more: what came after all is stopped, upon which NCCL writes to the output no longer.
            // SAFETY: the call has returned, and this thread alone has its output.
            let comm = unsafe { (*output.0).comm };
            if let Ok(_current) = thread_device.enter()
                && !comm.is_null()
            {
                // SAFETY: the new communicator is known to this thread alone.
                unsafe { thread_nccl.ncclCommAbort(comm) }.ok();
            }
            return;
        }
        // Ahead of the answer: who gets it may rely on nothing being held here.
        drop((thread_nccl, thread_device, thread_parent));
        let _ = done.send((result, output));
    });
    let mut received = worker.ok().and_then(|_| ended.recv_timeout(timeout).ok());
    if received.is_none() && fate.swap(true, Ordering::AcqRel) {
        // The answer came at the last moment: it is being sent.
        received = ended.recv().ok();
    }
    let Some((result, output)) = received else {
        // A new rank has nothing to abort: its thread goes on alone.
        let aborted = parent.is_some_and(|parent| parent.abort());
        return Err(Error::Timeout { attempt: attempt.to_owned(), function, after: timeout, aborted });
    };
    library::check(nccl, function, result?, || attempt.to_owned())?;
    // SAFETY: the call has returned, which is when it has written the new communicator; its thread has sent the output here.
    let comm = unsafe { (*output.0).comm };
    if comm.is_null() {
        return Err(Error::Nothing {
            attempt: attempt.to_owned(),
            function,
            missing: "communicator",
            advice: NO_CHILD,
        });
    }
    // The new communicator's own state tells when it is complete. NCCL holds a pointer to the output until then.
    let inner = Inner::new(nccl, device, comm, (rank, size), timeout, None);
    Ok(Pending::started(inner, function, attempt.to_owned(), move |inner| {
        let output = output.take();
        inner.keep_config(output.config.into());
        Ok(Communicator::from_inner(inner))
    }))
}
