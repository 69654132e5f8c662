//! Device communicators: what kernels need to work with the other ranks.

use crate::bytes::Bytes;
use crate::communicator::inner::{Inner, Leftover};
use crate::environment::multicast_disabled_by;
use crate::error::{Error, Result};
use crate::hint::no_window;
use crate::pending::Pending;
use crate::properties::Support;
use crate::requirements::{DEV_COMM_CAPACITY, DevCommRequirements, Limits};
use nccl_gin_sys::{
    Function, Generation, Version, ncclDevComm_t, ncclLsaBarrierHandle, v2_28, v2_28_3, v2_29, v2_30, v2_32,
};
use std::ffi::c_void;
use std::fmt;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What kernels need to work with the other ranks (`ncclDevComm_t`).
///
/// An opaque block that a kernel takes by value, as a parameter of type `ncclDevComm` from the headers of
/// [`DevComm::declared_version`]: pass [`DevComm::as_ptr`] as the parameter's address. What is useful without those headers is in
/// [`DevComm::info`].
///
/// Close it with [`DevComm::close`] when no kernel uses it any more; one that is dropped instead is kept until its communicator is
/// closed.
#[doc(alias = "ncclDevComm_t")]
pub struct DevComm {
    inner: Arc<Inner>,
    /// Taken when it is closed.
    block: Option<Box<Bytes<DEV_COMM_CAPACITY>>>,
    size: usize,
    version: Version,
    info: DevCommInfo,
}

/// The fields of a device communicator that are useful without NCCL's headers, whatever its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevCommInfo {
    /// This process's rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Rank in the LSA team.
    pub lsa_rank: u32,
    /// Ranks of the LSA team.
    pub lsa_size: u32,
    /// Barriers of the LSA team.
    pub lsa_barriers: u32,
    /// GIN connections, one for each NIC that is used.
    pub gin_connections: u32,
    /// GIN contexts.
    pub gin_contexts: u32,
    /// GIN signals.
    pub gin_signals: u32,
    /// GIN counters.
    pub gin_counters: u32,
}

/// The block that NCCL writes in the background.
struct Output(*mut Bytes<DEV_COMM_CAPACITY>);

// SAFETY: reached by NCCL alone until the operation has ended, then by the one that finishes it.
unsafe impl Send for Output {}

impl Output {
    fn new() -> Self {
        Self(Box::into_raw(Box::new(Bytes::zeroed())))
    }

    fn take(self) -> Box<Bytes<DEV_COMM_CAPACITY>> {
        let pointer = std::mem::ManuallyDrop::new(self).0;
        // SAFETY: made by `Box::into_raw`, taken once, when the operation that writes it has ended.
        unsafe { Box::from_raw(pointer) }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // SAFETY: as in `take`, which a value can see only once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl DevComm {
    pub(crate) fn begin(
        inner: &Arc<Inner>,
        requirements: &DevCommRequirements,
        support: Option<&Support>,
    ) -> Result<Pending<Self>> {
        let limits = Limits { support, multicast_off: multicast_disabled_by() };
        let encoded = requirements.encode(&inner.nccl, &limits)?;
        let attempt = format!("creating a device communicator on {}", inner.name());
        let what = attempt.clone();
        let output = Output::new();
        let pointer: *mut ncclDevComm_t = output.0.cast();
        let (version, size) = (encoded.version, encoded.dev_comm_size);
        let multimem = requirements.wants_multimem();
        Pending::start(
            inner,
            Function::ncclDevCommCreate,
            attempt,
            // SAFETY: the communicator is alive; the requirements are of the version that they declare and hold no lists, and NCCL copies
            // them; the output is as large as any layout and lives until the operation has ended.
            |nccl, comm| unsafe { nccl.ncclDevCommCreate(comm, encoded.as_ptr(), pointer) },
            move |inner| {
                let block = output.take();
                if block.as_slice()[..size].iter().all(|&byte| byte == 0) {
                    // There is nothing to give back.
                    return Err(Error::Nothing {
                        attempt: what,
                        function: Function::ncclDevCommCreate,
                        missing: "device communicator",
                        advice: no_window(inner.nccl.generation(), inner.size),
                    });
                }
                // A newer library's own layout starts as that of the newest generation.
                let generation = Generation::of(version).unwrap_or_else(|| inner.nccl.generation());
                let info = DevCommInfo::decode(&block, generation);
                if (info.rank, info.size) != (inner.rank, inner.size) || info.lsa_rank >= info.lsa_size {
                    let error = Error::Layout {
                        what: "ncclDevComm",
                        version: inner.nccl.version(),
                        detail: format!("{info:?} for {}", inner.name()),
                    };
                    drop(inner.destroy_dev_comm(&block));
                    return Err(error);
                }
                if multimem {
                    inner.multimem.store(true, Ordering::Release);
                }
                inner.dev_comms.fetch_add(1, Ordering::AcqRel);
                Ok(Self { inner: Arc::clone(inner), block: Some(block), size, version, info })
            },
        )
    }

    /// Address, on the host, of the block: what a launch takes as the address of a kernel's parameter of type `ncclDevComm`. At least 512
    /// bytes can be read there.
    #[must_use]
    pub fn as_ptr(&self) -> *const c_void {
        self.block.as_ref().map_or(std::ptr::null(), |block| block.as_ptr())
    }

    /// The block: as many bytes as `ncclDevComm` has in the headers of [`DevComm::declared_version`].
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], |block| &block.as_slice()[..self.size])
    }

    /// Version of NCCL whose headers device code that takes this block must be compiled with (one of the same minor version will do).
    #[must_use]
    pub fn declared_version(&self) -> Version {
        self.version
    }

    /// The fields that are useful without NCCL's headers.
    #[must_use]
    pub fn info(&self) -> DevCommInfo {
        self.info
    }

    /// Gives the device communicator back. Local, but no kernel of any rank may use it any more.
    ///
    /// # Errors
    /// NCCL's error; it is then kept until its communicator is closed. [`Error::Gone`] if that has been aborted, which ended this too.
    #[doc(alias = "ncclDevCommDestroy")]
    pub fn close(mut self) -> Result<()> {
        if let Some(block) = &self.block {
            self.inner.destroy_dev_comm(block)?;
        }
        self.block = None;
        Ok(())
    }
}

impl Drop for DevComm {
    fn drop(&mut self) {
        self.inner.dev_comms.fetch_sub(1, Ordering::AcqRel);
        if let Some(block) = self.block.take() {
            self.inner.keep(Leftover::DevComm(block));
        }
    }
}

impl fmt::Debug for DevComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevComm")
            .field("version", &self.version)
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Gives a device communicator back.
    pub(crate) fn destroy_dev_comm(&self, block: &Bytes<DEV_COMM_CAPACITY>) -> Result<()> {
        let attempt = || format!("closing a device communicator of {}", self.name());
        self.call(Function::ncclDevCommDestroy, &attempt, |nccl, comm| {
            // SAFETY: the communicator is alive, and the block is the one that NCCL wrote; its owner gives it up.
            unsafe { nccl.ncclDevCommDestroy(comm, block.as_ptr().cast()) }
        })
    }
}

impl DevCommInfo {
    fn decode(block: &Bytes<DEV_COMM_CAPACITY>, generation: Generation) -> Self {
        let count = |offset: usize| u32::try_from(block.get::<i32>(offset)).unwrap_or(0);
        let byte = |offset: usize| u32::from(block.as_slice()[offset]);
        macro_rules! decode {
            ($module:ident) => {
                Self {
                    rank: count(offset_of!($module::ncclDevComm, rank)),
                    size: count(offset_of!($module::ncclDevComm, nRanks)),
                    lsa_rank: count(offset_of!($module::ncclDevComm, lsaRank)),
                    lsa_size: count(offset_of!($module::ncclDevComm, lsaSize)),
                    lsa_barriers: count(
                        offset_of!($module::ncclDevComm, lsaBarrier)
                            + offset_of!(ncclLsaBarrierHandle, nBarriers),
                    ),
                    gin_connections: 0,
                    gin_contexts: 0,
                    gin_signals: 0,
                    gin_counters: 0,
                }
            };
            ($module:ident, connections: $connections:ident, contexts: $width:ident) => {
                Self {
                    gin_connections: byte(offset_of!($module::ncclDevComm, $connections)),
                    gin_contexts: $width(offset_of!($module::ncclDevComm, ginContextCount)),
                    gin_signals: count(offset_of!($module::ncclDevComm, ginSignalCount)),
                    gin_counters: count(offset_of!($module::ncclDevComm, ginCounterCount)),
                    ..decode!($module)
                }
            };
        }
        match generation {
            // 2.28.3 has no GIN, and the rest of 2.28 one context a connection.
            Generation::V2_28_3 => decode!(v2_28_3),
            Generation::V2_28 => decode!(v2_28, connections: ginContextCount, contexts: byte),
            Generation::V2_29 => decode!(v2_29, connections: ginConnectionCount, contexts: count),
            Generation::V2_30 => decode!(v2_30, connections: ginConnectionCount, contexts: count),
            // 2.31 and 2.32 have one layout.
            _ => decode!(v2_32, connections: ginConnectionCount, contexts: count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layout_is_read_from_its_places() {
        // 2.28.3 has no GIN; whatever stands behind its struct is not taken for it.
        let mut block = Bytes::zeroed();
        for (offset, value) in [(0, 1), (4, 2), (12, 3), (16, 4), (84, 5)] {
            block.put::<u32>(offset, value);
        }
        for offset in (88..248).step_by(4) {
            block.put::<u32>(offset, 0x0909_0909);
        }
        let info = DevCommInfo::decode(&block, Generation::V2_28_3);
        let gin = (info.gin_connections, info.gin_contexts, info.gin_signals, info.gin_counters);
        assert_eq!((info.rank, info.size, info.lsa_rank, info.lsa_size, info.lsa_barriers), (1, 2, 3, 4, 5));
        assert_eq!(gin, (0, 0, 0, 0));
        // Offsets of rank, size, LSA rank, LSA size, barriers, connections, contexts (and their width), signals and counters.
        for (generation, at, narrow) in [
            (Generation::V2_28, [0, 4, 12, 16, 124, 136, 136, 180, 188], true),
            (Generation::V2_29, [0, 4, 12, 16, 124, 136, 200, 180, 188], false),
            (Generation::V2_30, [8, 12, 20, 24, 132, 144, 200, 184, 188], false),
            (Generation::V2_31, [8, 12, 20, 24, 84, 96, 152, 136, 140], false),
            (Generation::V2_32, [8, 12, 20, 24, 84, 96, 152, 136, 140], false),
        ] {
            let mut block = Bytes::zeroed();
            for (index, offset) in at.into_iter().enumerate() {
                if index == 5 || (index == 6 && narrow) {
                    // A byte, whose neighbours belong to other fields.
                    let word: u32 = block.get(offset);
                    block.put::<u32>(offset, (word & !0xff) | 6);
                } else {
                    block.put::<u32>(offset, index as u32 + 1);
                }
            }
            let info = DevCommInfo::decode(&block, generation);
            let contexts = if narrow { 6 } else { 7 };
            let want = DevCommInfo {
                rank: 1,
                size: 2,
                lsa_rank: 3,
                lsa_size: 4,
                lsa_barriers: 5,
                gin_connections: 6,
                gin_contexts: contexts,
                gin_signals: 8,
                gin_counters: 9,
            };
            assert_eq!(info, want, "{generation:?}");
        }
    }
}
