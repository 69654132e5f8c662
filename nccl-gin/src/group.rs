//! Calls that start together.

use crate::error::{Error, Result};
use crate::library;
use nccl_gin_sys::{Function, Nccl};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// Whether a group is open on this thread: its end is told through the flag.
    static OPEN: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// A group on the calling thread: calls of NCCL are queued until it ends, then start together.
///
/// What is begun inside ([`Communicator::begin_register`](crate::Communicator::begin_register) and its like) can be polled or waited for
/// after [`Group::end`]. Methods that wait are refused inside, since they would wait for ever.
///
/// ```no_run
/// # fn f(comms: &[nccl_gin::Communicator], memory: &[std::sync::Arc<nccl_gin::MemAlloc>]) -> Result<(), nccl_gin::Error> {
/// # use nccl_gin::{Group, WindowFlags};
/// // One thread that drives several ranks: all of them register at once.
/// let group = Group::start(comms[0].nccl())?;
/// let mut pending = Vec::new();
/// for (comm, memory) in comms.iter().zip(memory) {
///     pending.push(comm.begin_register(memory.clone(), WindowFlags::empty())?);
/// }
/// group.end()?;
/// let windows = pending.into_iter().map(|window| window.wait()).collect::<Result<Vec<_>, _>>()?;
/// # for window in windows { window.close()?; }
/// # Ok(())
/// # }
/// ```
#[must_use = "the group ends when it is dropped, without telling of a failure"]
#[derive(Debug)]
pub struct Group<'a> {
    nccl: &'a Nccl,
    ended: Arc<AtomicBool>,
    /// A group belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl<'a> Group<'a> {
    /// Opens a group on this thread.
    ///
    /// # Errors
    /// [`Error::GroupOpen`] if there is one already, or NCCL's error.
    #[doc(alias = "ncclGroupStart")]
    pub fn start(nccl: &'a Nccl) -> Result<Self> {
        refuse_inside(|| "starting a group".into())?;
        // SAFETY: takes no argument; the group is ended by `end` or on drop.
        let result = unsafe { nccl.ncclGroupStart() }?;
        library::check(nccl, Function::ncclGroupStart, result, || "starting a group".into())?;
        let ended = Arc::new(AtomicBool::new(false));
        OPEN.with(|open| open.replace(Some(Arc::clone(&ended))));
        Ok(Self { nccl, ended, thread: PhantomData })
    }

    /// Ends the group and starts what was queued.
    ///
    /// # Errors
    /// NCCL's error; nothing that was queued has then been started.
    #[doc(alias = "ncclGroupEnd")]
    pub fn end(self) -> Result<()> {
        self.finish()
    }

    fn finish(&self) -> Result<()> {
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        OPEN.with(|open| open.replace(None));
        // SAFETY: takes no argument; `start` opened the group on this thread, which this value cannot leave.
        let result = unsafe { self.nccl.ncclGroupEnd() }?;
        library::check(self.nccl, Function::ncclGroupEnd, result, || "ending a group".into())
    }
}

impl Drop for Group<'_> {
    /// Ends the group: otherwise every later call of this thread would be queued for ever. Non-blocking communicators, as those of this
    /// crate are, only start their work then.
    fn drop(&mut self) {
        self.finish().ok();
    }
}

/// What an operation that was begun inside a group keeps.
#[derive(Clone, Debug)]
pub(crate) struct Ticket(Arc<AtomicBool>);

impl PartialEq for Ticket {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Ticket {
    /// Whether the group has not ended yet.
    pub(crate) fn open(&self) -> bool {
        !self.0.load(Ordering::Acquire)
    }
}

/// The ticket of the group that is open on this thread, if any.
pub(crate) fn ticket() -> Option<Ticket> {
    OPEN.with(|open| open.borrow().clone().map(Ticket))
}

/// Refuses what waits while a group is open.
pub(crate) fn refuse_inside(attempt: impl FnOnce() -> String) -> Result<()> {
    match ticket() {
        Some(_) => Err(Error::GroupOpen { attempt: attempt() }),
        None => Ok(()),
    }
}
