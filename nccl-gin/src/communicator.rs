//! Communicators.

mod close;
mod derive;
pub(crate) mod inner;

pub use derive::Shrink;

use crate::config::Config;
use crate::deadline;
use crate::dev_comm::DevComm;
use crate::device::Device;
use crate::environment;
use crate::error::{Error, Result};
use crate::group;
use crate::library;
use crate::memory::WindowMemory;
use crate::pending::Pending;
use crate::properties::Properties;
use crate::requirements::DevCommRequirements;
use crate::team::Team;
use crate::unique_id::UniqueId;
use crate::window::{Window, WindowFlags};
use inner::Inner;
use nccl_gin_sys::{Function, Generation, Nccl, ncclComm, ncclComm_t, ncclTeam, ncclUniqueId};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// A rank's part of a set of ranks that work together (`ncclComm_t`).
///
/// Creating, closing and most of what is made from it is collective: every rank makes the same calls in the same order. Methods
/// that wait for the other ranks do so for at most [`Config::timeout`]; each has a twin, named `begin_…`, that returns at once.
/// When time runs out the communicator is aborted: the rank gets its resources back, and later calls say [`Error::Gone`].
///
/// Close it with [`Communicator::close`]. A communicator that is dropped instead leaves its resources to the end of the process, because
/// giving them back would need the other ranks.
#[doc(alias = "ncclComm_t")]
pub struct Communicator {
    inner: Arc<Inner>,
}

impl Communicator {
    /// Creates this rank's part of a communicator of `size` ranks, on `device`. Collective over all ranks with the same `id`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank that is not below the size, NCCL's error, or [`Error::Timeout`] if a rank does not come.
    #[doc(alias = "ncclCommInitRankConfig")]
    pub fn init(
        nccl: &Nccl,
        device: &Device,
        id: &UniqueId,
        size: u32,
        rank: u32,
        config: &Config,
    ) -> Result<Self> {
        group::refuse_inside(|| format!("creating rank {rank} of {size}"))?;
        Self::begin(nccl, device, &[*id], size, rank, config)?.wait()
    }

    /// Begins to create this rank's part of a communicator, from one identifier or, for many ranks, several (each rank passes the same
    /// ones in the same order).
    ///
    /// # Errors
    /// As for [`Communicator::init`].
    #[doc(alias = "ncclCommInitRankScalable")]
    pub fn begin(
        nccl: &Nccl,
        device: &Device,
        ids: &[UniqueId],
        size: u32,
        rank: u32,
        config: &Config,
    ) -> Result<Pending<Self>> {
        let attempt = format!("creating rank {rank} of {size} on CUDA device {}", device.ordinal());
        check_ranks(size, rank)?;
        if ids.is_empty() || ids.len() > size as usize {
            return Err(Error::argument(
                "the number of identifiers",
                ids.len(),
                format!("from 1 to {size}, one a rank at most"),
            ));
        }
        environment::check()?;
        let mut encoded = config.encode(nccl)?;
        let mut raw_ids: Vec<ncclUniqueId> = ids.iter().map(|id| id.to_raw()).collect();
        let (c_size, c_rank, count) = (size.cast_signed(), rank.cast_signed(), ids.len() as i32);
        let mut comm: ncclComm_t = ptr::null_mut();
        let current = device.enter()?;
        let (function, result) = if let [id] = raw_ids[..] {
            // SAFETY: the output is valid for one write, which happens before the call returns; the configuration is of the library's
            // generation and lives as long as the communicator; the device is current.
            let result =
                unsafe { nccl.ncclCommInitRankConfig(&mut comm, c_size, id, c_rank, encoded.as_mut_ptr()) };
            (Function::ncclCommInitRankConfig, result?)
        } else {
            let ids = raw_ids.as_mut_ptr();
            // SAFETY: as above; the identifiers are copied before the call returns.
            let result = unsafe {
                nccl.ncclCommInitRankScalable(&mut comm, c_size, c_rank, count, ids, encoded.as_mut_ptr())
            };
            (Function::ncclCommInitRankScalable, result?)
        };
        library::check(nccl, function, result, || attempt.clone())?;
        drop(current);
        if comm.is_null() {
            return Err(Error::Nothing {
                attempt,
                function,
                missing: "communicator",
                advice: "NCCL_DEBUG=WARN says more",
            });
        }
        let inner =
            Inner::new(nccl, device, comm, (rank, size), config.operation_timeout(), Some(encoded.into()));
        Ok(Pending::created(inner, function, attempt))
    }

    /// Takes over a communicator that was created by other means.
    ///
    /// If NCCL counts it as a blocking one, NCCL's calls on it return when they are done, however long that takes, and time limits only
    /// hold for what they begin.
    ///
    /// # Errors
    /// NCCL's error if the communicator does not tell its rank and size; it is then the caller's as before.
    ///
    /// # Safety
    /// `comm` must be a communicator of `nccl` on `device` that has been created completely, and nobody else may use or destroy it.
    pub unsafe fn from_raw(
        nccl: &Nccl,
        device: &Device,
        comm: *mut ncclComm,
        config: &Config,
    ) -> Result<Self> {
        let place = place(nccl, comm, &|| format!("taking over the communicator {comm:p}"))?;
        Ok(Self { inner: Inner::new(nccl, device, comm, place, config.operation_timeout(), None) })
    }

    pub(crate) fn from_inner(inner: &Arc<Inner>) -> Self {
        Self { inner: Arc::clone(inner) }
    }

    /// This process's rank.
    #[must_use]
    #[doc(alias = "ncclCommUserRank")]
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// Number of ranks.
    #[must_use]
    #[doc(alias = "ncclCommCount")]
    pub fn size(&self) -> u32 {
        self.inner.size
    }

    /// The library.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.inner.nccl
    }

    /// The device.
    #[must_use]
    #[doc(alias = "ncclCommCuDevice")]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The handle, for calls of [`Nccl`] that this crate does not wrap, such as collectives. For NCCL it is a non-blocking communicator: after
    /// such a call, see with [`Communicator::wait`] that it has been accepted.
    #[must_use]
    pub fn as_raw(&self) -> *mut ncclComm {
        self.inner.raw()
    }

    /// Whether everything that was begun on this communicator has ended (`Ok(true)`), goes on (`Ok(false)`), or has failed.
    ///
    /// # Errors
    /// The failure of something in the background (a peer that died, for example), or [`Error::Gone`].
    #[doc(alias = "ncclCommGetAsyncError")]
    pub fn ready(&self) -> Result<bool> {
        self.inner.poll(Function::ncclCommGetAsyncError, &|| {
            format!("asking for the state of {}", self.inner.name())
        })
    }

    /// Waits until everything that was begun on this communicator has ended, for at most `timeout`; `Ok(false)` if it goes on. Nothing is
    /// aborted.
    ///
    /// # Errors
    /// As for [`Communicator::ready`].
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let attempt = || format!("waiting for {}", self.inner.name());
        group::refuse_inside(attempt)?;
        self.inner.wait(Function::ncclCommGetAsyncError, &attempt, deadline::within(timeout))
    }

    /// What this communicator supports.
    ///
    /// # Errors
    /// NCCL's error, or [`Error::Gone`].
    #[doc(alias = "ncclCommQueryProperties")]
    pub fn properties(&self) -> Result<Properties> {
        if self.nccl().generation() <= Generation::V2_28 {
            return Ok(Properties {
                rank: self.rank(),
                size: self.size(),
                cuda_device: self.device().ordinal(),
                support: None,
            });
        }
        let mut request = Properties::request(self.nccl());
        let attempt = || format!("asking what {} supports", self.inner.name());
        self.inner.call(Function::ncclCommQueryProperties, &attempt, |nccl, comm| {
            // SAFETY: the communicator is alive, and the struct is of the version that it declares.
            unsafe { nccl.ncclCommQueryProperties(comm, request.as_mut_ptr()) }
        })?;
        let properties = request.decode();
        if (properties.rank, properties.size) != (self.rank(), self.size()) {
            return Err(Error::Layout {
                what: "ncclCommProperties",
                version: self.nccl().version(),
                detail: format!(
                    "it says rank {} of {} for {}",
                    properties.rank,
                    properties.size,
                    self.inner.name()
                ),
            });
        }
        Ok(properties)
    }

    /// All ranks.
    #[must_use]
    #[doc(alias = "ncclTeamWorld")]
    pub fn team_world(&self) -> Team {
        Team { size: self.size(), rank: self.rank(), stride: 1 }
    }

    /// The ranks whose memory this one can address by load and store.
    ///
    /// # Errors
    /// [`Error::Nothing`] if NCCL cannot tell, or [`Error::Gone`].
    #[doc(alias = "ncclTeamLsa")]
    pub fn team_lsa(&self) -> Result<Team> {
        self.inner.team_lsa()
    }

    /// The ranks with the same place in their LSA teams.
    ///
    /// # Errors
    /// As for [`Communicator::team_lsa`].
    #[doc(alias = "ncclTeamRail")]
    pub fn team_rail(&self) -> Result<Team> {
        self.inner.team(Function::ncclTeamRail, |nccl, comm| {
            // SAFETY: the communicator is alive.
            unsafe { nccl.ncclTeamRail(comm) }
        })
    }

    /// Makes a window of memory, which all ranks can then reach. Collective: each rank registers its own memory. The window keeps `memory`
    /// alive.
    ///
    /// Windows of different lengths are possible from NCCL 2.29 on; a rank's own length bounds what it can reach. Make one window of an
    /// allocation and divide it by offsets: each window takes address space for the whole allocation.
    ///
    /// Host memory that other ranks created and this one imported can be part of it with `NCCL_SYM_REUSE_SYSMEM_HANDLES=1` alone, and then
    /// the host memory of all ranks' windows must be the same: see [`reuses_host_memory`](Self::reuses_host_memory). Where NCCL shares memory
    /// by FABRIC handles (several nodes of one NVLink domain) it exports it even then, and fails.
    ///
    /// # Errors
    /// [`Error::Memory`] for memory that cannot be shared (before any rank waits), [`Error::Nothing`] where windows are not supported (with
    /// 2.28.3 also on a communicator of one rank),
    /// NCCL's error, or [`Error::Timeout`] if a rank does not come.
    #[doc(alias = "ncclCommWindowRegister")]
    pub fn register(&self, memory: Arc<dyn WindowMemory>, flags: WindowFlags) -> Result<Window> {
        group::refuse_inside(|| format!("registering a window on {}", self.inner.name()))?;
        self.begin_register(memory, flags)?.wait()
    }

    /// Checks what [`Communicator::register`] checks before any rank waits in NCCL. Local: ranks that first tell each other the outcome do
    /// not wait for one that would not come.
    ///
    /// # Errors
    /// [`Error::Memory`] or [`Error::Unsupported`].
    pub fn check_memory(&self, memory: &dyn WindowMemory, flags: WindowFlags) -> Result<()> {
        Window::check(&self.inner, memory, flags)
    }

    /// Whether NCCL takes the host memory in this rank's window for that of every rank (`NCCL_SYM_REUSE_SYSMEM_HANDLES`, which 2.30.4 and newer
    /// read once in a process): in place of a peer's it maps this rank's own.
    ///
    /// That is right where all ranks have mapped the same physical memory, and the only way where they imported it. Where each rank brings host
    /// memory of its own, a peer's can then not be reached, and nothing says so: the memory looks the same to this crate, so who registers it
    /// has to ask.
    #[must_use]
    pub fn reuses_host_memory(&self) -> bool {
        environment::windows(self.inner.nccl.version()).reuses_host_memory
    }

    /// Begins to make a window of memory.
    ///
    /// # Errors
    /// As for [`Communicator::register`].
    pub fn begin_register(
        &self,
        memory: Arc<dyn WindowMemory>,
        flags: WindowFlags,
    ) -> Result<Pending<Window>> {
        Window::begin(&self.inner, memory, flags)
    }

    /// Creates a device communicator. Collective: each rank passes the same requirements.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::MulticastOff`] for what cannot be had (before any rank waits), NCCL's error, or
    /// [`Error::Timeout`] if a rank does not come.
    #[doc(alias = "ncclDevCommCreate")]
    pub fn create_dev_comm(&self, requirements: &DevCommRequirements) -> Result<DevComm> {
        group::refuse_inside(|| format!("creating a device communicator on {}", self.inner.name()))?;
        self.begin_dev_comm(requirements)?.wait()
    }

    /// Begins to create a device communicator.
    ///
    /// # Errors
    /// As for [`Communicator::create_dev_comm`].
    pub fn begin_dev_comm(&self, requirements: &DevCommRequirements) -> Result<Pending<DevComm>> {
        let properties = self.properties()?;
        DevComm::begin(&self.inner, requirements, properties.support.as_ref())
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("device", self.device())
            .finish_non_exhaustive()
    }
}

/// Rank and size, as a communicator that is complete tells them.
fn place(nccl: &Nccl, comm: ncclComm_t, attempt: &dyn Fn() -> String) -> Result<(u32, u32)> {
    let (mut rank, mut size) = (0, 0);
    // SAFETY: the callers have a communicator that is alive, and the outputs are valid for one write each.
    let results = unsafe { (nccl.ncclCommUserRank(comm, &mut rank)?, nccl.ncclCommCount(comm, &mut size)?) };
    library::check(nccl, Function::ncclCommUserRank, results.0, attempt)?;
    library::check(nccl, Function::ncclCommCount, results.1, attempt)?;
    let (rank, size) = (rank.cast_unsigned(), size.cast_unsigned());
    check_ranks(size, rank)?;
    Ok((rank, size))
}

/// A rank below a size that C's `int` holds.
fn check_ranks(size: u32, rank: u32) -> Result<()> {
    if size == 0 || i32::try_from(size).is_err() {
        return Err(Error::argument("the number of ranks", size, format!("from 1 to {}", i32::MAX)));
    }
    if rank >= size {
        return Err(Error::argument("the rank", rank, format!("below the number of ranks, {size}")));
    }
    Ok(())
}

impl Inner {
    pub(crate) fn team_lsa(&self) -> Result<Team> {
        self.team(Function::ncclTeamLsa, |nccl, comm| {
            // SAFETY: the communicator is alive.
            unsafe { nccl.ncclTeamLsa(comm) }
        })
    }

    fn team(
        &self,
        function: Function,
        call: impl FnOnce(&Nccl, ncclComm_t) -> Result<ncclTeam, Box<nccl_gin_sys::MissingFunction>>,
    ) -> Result<Team> {
        let attempt = || format!("asking {} for a team", self.name());
        let mut team = ncclTeam { nRanks: 0, rank: 0, stride: 0 };
        self.call(function, &attempt, |nccl, comm| {
            team = call(nccl, comm)?;
            Ok(nccl_gin_sys::ncclResult_t::ncclSuccess)
        })?;
        Team::from_raw(team).ok_or_else(|| Error::Nothing {
            attempt: attempt(),
            function,
            missing: "team",
            advice: crate::hint::NO_SYMMETRIC_MEMORY,
        })
    }
}
