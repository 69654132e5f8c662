//! Windows: memory that other ranks can reach.

use crate::communicator::inner::{Inner, Leftover, RawWindow};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::hint::{NO_SYMMETRIC_MEMORY, no_window};
use crate::memory::WindowMemory;
use crate::pending::Pending;
use crate::team::Team;
use crate::{segments, window_2_28};
use nccl_gin_sys::{
    Function, Generation, NCCL_WIN_CFT_COUNTED, NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_GIN_ONLY,
    NCCL_WIN_STRICT_ORDERING, Version, ncclWindow_t,
};
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

bitflags::bitflags! {
    /// How a window is registered (`NCCL_WIN_…`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct WindowFlags: u32 {
        /// For NCCL's own symmetric collectives. It makes NCCL set those up, multicast included where it is not switched off; kernels that
        /// only compute addresses do without.
        const COLL_SYMMETRIC = NCCL_WIN_COLL_SYMMETRIC;
        /// Writes through GIN arrive in order, as signals by address need (NCCL 2.29.7 and later).
        const STRICT_ORDERING = NCCL_WIN_STRICT_ORDERING;
        /// For GIN alone (NCCL 2.32 and later).
        const GIN_ONLY = NCCL_WIN_GIN_ONLY;
        /// For counted CFT objects alone (NCCL 2.32 and later).
        const CFT_COUNTED = NCCL_WIN_CFT_COUNTED;
    }
}

/// Memory that other ranks can reach (`ncclWindow_t`).
///
/// It keeps the memory's owner alive. Close it with [`Window::close`] when no kernel of any rank uses it any more; a window that is
/// dropped instead is kept until its communicator is closed.
#[doc(alias = "ncclWindow_t")]
pub struct Window {
    inner: Arc<Inner>,
    raw: RawWindow,
    /// Taken when the window is closed.
    memory: Option<Arc<dyn WindowMemory>>,
    address: usize,
    length: usize,
    flags: WindowFlags,
    lsa: Team,
    /// Where 2.28, which has no function for it, keeps the peers' memory.
    geometry: Option<window_2_28::Geometry>,
}

/// The handle that NCCL writes when it is done.
struct Output(*mut ncclWindow_t);

// SAFETY: reached by NCCL alone until the operation has ended, then by the one that finishes it.
unsafe impl Send for Output {}

impl Output {
    fn new() -> Self {
        Self(Box::into_raw(Box::new(ptr::null_mut())))
    }

    fn read(&self) -> ncclWindow_t {
        // SAFETY: allocated in `new`; the operation that writes it has ended.
        unsafe { *self.0 }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw`, and freed once, when the operation has ended.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Window {
    pub(crate) fn begin(
        inner: &Arc<Inner>,
        memory: Arc<dyn WindowMemory>,
        flags: WindowFlags,
    ) -> Result<Pending<Self>> {
        let function = Function::ncclCommWindowRegister;
        let (buffer, length) = (memory.address().as_ptr(), memory.len());
        let address = buffer as usize;
        let attempt = format!("registering {length} bytes at {address:#x} on {}", inner.name());
        Self::check(inner, &*memory, flags)?;
        let output = Output::new();
        let pointer = output.0;
        let what = attempt.clone();
        let c_flags = flags.bits().cast_signed();
        Pending::start(
            inner,
            function,
            attempt,
            // SAFETY: the communicator is alive; the memory is mapped, aligned and exportable, which was checked above and its owner
            // promises, and is kept by the closure below; the output lives until the operation has ended.
            |nccl, comm| unsafe { nccl.ncclCommWindowRegister(comm, buffer, length, pointer, c_flags) },
            move |inner| {
                let raw = output.read();
                let nothing = || Error::Nothing {
                    attempt: what.clone(),
                    function,
                    missing: "window",
                    advice: no_window(inner.nccl.generation(), inner.size),
                };
                if raw.is_null() {
                    return Err(nothing());
                }
                let geometry = if inner.nccl.generation() <= Generation::V2_28 {
                    match window_2_28::Geometry::read(&inner.device, raw, inner.size, inner.timeout) {
                        Ok(geometry) => Some(geometry),
                        Err(error) => {
                            // Where windows are not supported 2.28 hands out something else, to be given back the same way.
                            drop(inner.deregister(RawWindow(raw)));
                            return Err(error.unwrap_or_else(nothing));
                        }
                    }
                } else {
                    None
                };
                let lsa = inner.team_lsa().inspect_err(|_| drop(inner.deregister(RawWindow(raw))))?;
                inner.windows.fetch_add(1, Ordering::AcqRel);
                Ok(Self {
                    inner: Arc::clone(inner),
                    raw: RawWindow(raw),
                    address,
                    memory: Some(memory),
                    length,
                    flags,
                    lsa,
                    geometry,
                })
            },
        )
    }

    /// Whether NCCL can make a window of memory, as far as that can be told without it.
    pub(crate) fn check(inner: &Inner, memory: &dyn WindowMemory, flags: WindowFlags) -> Result<()> {
        check_flags(flags, inner.nccl.version())?;
        let address = memory.address().as_ptr() as usize;
        let _current = inner.device.enter()?;
        segments::check(&inner.device, &inner.nccl, address, memory.len())
    }

    /// The handle, which kernels take: an address of the device.
    #[must_use]
    pub fn as_raw(&self) -> ncclWindow_t {
        self.raw.0
    }

    /// Address, on this device, of this rank's memory, as it was registered.
    #[must_use]
    #[doc(alias = "ncclWinGetUserPtr")]
    pub fn address(&self) -> usize {
        self.address
    }

    /// Length of this rank's memory in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: a window has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// How it was registered.
    #[must_use]
    pub fn flags(&self) -> WindowFlags {
        self.flags
    }

    /// The ranks whose memory this one can address.
    #[must_use]
    pub fn team_lsa(&self) -> Team {
        self.lsa
    }

    /// The communicator's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Address, on this device, of byte `offset` of the memory of LSA rank `peer`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank outside the team or an offset outside the window, NCCL's error, or [`Error::Gone`].
    #[doc(alias = "ncclGetLsaDevicePointer")]
    pub fn lsa_pointer(&self, peer: u32, offset: usize) -> Result<usize> {
        if peer >= self.lsa.size {
            return Err(Error::argument(
                "the LSA rank",
                peer,
                format!("below the size of the LSA team, {}", self.lsa.size),
            ));
        }
        self.check_offset(offset)?;
        if let Some(geometry) = &self.geometry {
            if !self.inner.is_alive() {
                return Err(Error::Gone { attempt: self.attempt("an LSA address") });
            }
            return Ok(geometry.address(peer, offset));
        }
        let address =
            self.query(Function::ncclGetLsaDevicePointer, "an LSA address", |nccl, window, out| {
                // SAFETY: the window is alive while this value is, and the output is valid for one write.
                unsafe { nccl.ncclGetLsaDevicePointer(window, offset, peer.cast_signed(), out) }
            })?;
        address.ok_or_else(|| Error::Nothing {
            attempt: self.attempt("an LSA address"),
            function: Function::ncclGetLsaDevicePointer,
            missing: "address",
            advice: NO_SYMMETRIC_MEMORY,
        })
    }

    /// Address, on this device, of byte `offset` of each LSA rank's memory, in the order of their LSA ranks.
    ///
    /// # Errors
    /// As for [`Window::lsa_pointer`].
    pub fn lsa_pointers(&self, offset: usize) -> Result<Vec<usize>> {
        (0..self.lsa.size).map(|peer| self.lsa_pointer(peer, offset)).collect()
    }

    /// Address, on this device, of byte `offset` of the memory of world rank `peer`, or `None` if that rank is not in the LSA team.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank outside the communicator or an offset outside the window, NCCL's error, or [`Error::Gone`].
    #[doc(alias = "ncclGetPeerDevicePointer")]
    pub fn peer_pointer(&self, peer: u32, offset: usize) -> Result<Option<usize>> {
        if peer >= self.inner.size {
            return Err(Error::argument(
                "the rank",
                peer,
                format!("below the number of ranks, {}", self.inner.size),
            ));
        }
        self.check_offset(offset)?;
        if self.geometry.is_some() {
            let Some(peer) = self.lsa.rank_of(peer, self.inner.rank) else { return Ok(None) };
            return self.lsa_pointer(peer, offset).map(Some);
        }
        self.query(Function::ncclGetPeerDevicePointer, "a peer's address", |nccl, window, out| {
            // SAFETY: the window is alive while this value is, and the output is valid for one write.
            unsafe { nccl.ncclGetPeerDevicePointer(window, offset, peer.cast_signed(), out) }
        })
    }

    /// Multicast address of byte `offset` for the LSA team, or `None` where there is none: without NVLink SHARP, with NCCL 2.28, and before
    /// a device communicator with [`lsa_multimem`](crate::DevCommRequirements::lsa_multimem) has been created.
    ///
    /// # Errors
    /// [`Error::Argument`] for an offset outside the window, NCCL's error, or [`Error::Gone`].
    #[doc(alias = "ncclGetLsaMultimemDevicePointer")]
    pub fn multimem_pointer(&self, offset: usize) -> Result<Option<usize>> {
        self.check_offset(offset)?;
        // Asked for without such a device communicator, NCCL might create multicast objects for the answer.
        if self.geometry.is_some() || !self.inner.multimem.load(Ordering::Acquire) {
            return Ok(None);
        }
        // Unlike the others it may have work to do on the device.
        let _current = self.inner.device.enter()?;
        self.query(Function::ncclGetLsaMultimemDevicePointer, "a multicast address", |nccl, window, out| {
            // SAFETY: the window is alive while this value is, and the output is valid for one write.
            unsafe { nccl.ncclGetLsaMultimemDevicePointer(window, offset, out) }
        })
    }

    /// Gives the window back. Local, but no kernel of any rank may use the window any more, and no collective of another thread may be
    /// starting. The memory is released to its owner.
    ///
    /// # Errors
    /// NCCL's error; the window is then kept until its communicator is closed. [`Error::Gone`] if that has been aborted, which ended
    /// the window too.
    #[doc(alias = "ncclCommWindowDeregister")]
    pub fn close(mut self) -> Result<()> {
        self.inner.deregister(self.raw)?;
        self.memory = None;
        Ok(())
    }

    fn attempt(&self, what: &str) -> String {
        format!("asking {} for {what} in a window of {} bytes", self.inner.name(), self.length)
    }

    fn check_offset(&self, offset: usize) -> Result<()> {
        if offset >= self.length {
            return Err(Error::argument(
                "the offset",
                offset,
                format!("inside the window of {} bytes", self.length),
            ));
        }
        Ok(())
    }

    fn query(
        &self,
        function: Function,
        what: &str,
        call: impl FnOnce(
            &nccl_gin_sys::Nccl,
            ncclWindow_t,
            *mut *mut c_void,
        ) -> Result<nccl_gin_sys::ncclResult_t, Box<nccl_gin_sys::MissingFunction>>,
    ) -> Result<Option<usize>> {
        let mut address = ptr::null_mut();
        self.inner.ask(function, &|| self.attempt(what), |nccl| call(nccl, self.raw.0, &mut address))?;
        Ok((!address.is_null()).then_some(address as usize))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.inner.windows.fetch_sub(1, Ordering::AcqRel);
        if let Some(memory) = self.memory.take() {
            self.inner.keep(Leftover::Window(self.raw, memory));
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("address", &format_args!("{:#x}", self.address))
            .field("length", &self.length)
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Gives a window back.
    pub(crate) fn deregister(&self, window: RawWindow) -> Result<()> {
        let attempt = || format!("closing a window of {}", self.name());
        self.call(Function::ncclCommWindowDeregister, &attempt, |nccl, comm| {
            // SAFETY: communicator and window are alive; the window's owner gives it up.
            unsafe { nccl.ncclCommWindowDeregister(comm, window.0) }
        })
    }
}

/// Each flag against the version that has it: an older one ignores it silently.
fn check_flags(flags: WindowFlags, version: Version) -> Result<()> {
    for (flag, what, since) in [
        (WindowFlags::STRICT_ORDERING, "a window with STRICT_ORDERING", 22907),
        (WindowFlags::GIN_ONLY, "a window with GIN_ONLY", 23200),
        (WindowFlags::CFT_COUNTED, "a window with CFT_COUNTED", 23200),
    ] {
        let since = Version::from_code(since);
        if flags.contains(flag) && version < since {
            return Err(Error::Unsupported {
                what,
                reason: format!("it needs NCCL {since} or newer, and {version} is loaded"),
            });
        }
    }
    if !WindowFlags::all().contains(flags) {
        return Err(Error::argument("the window's flags", format!("{flags:?}"), "those that are known"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_refused_where_they_would_be_ignored() {
        let check = |flags, code| check_flags(flags, Version::from_code(code));
        assert!(check(WindowFlags::empty(), 22809).is_ok());
        assert!(check(WindowFlags::COLL_SYMMETRIC, 22809).is_ok());
        assert!(check(WindowFlags::STRICT_ORDERING, 22907).is_ok());
        let error = check(WindowFlags::STRICT_ORDERING, 22809).unwrap_err();
        assert!(error.to_string().contains("2.29.7 or newer"), "{error}");
        let error = check(WindowFlags::GIN_ONLY, 23102).unwrap_err();
        assert!(error.to_string().contains("2.32.0 or newer"), "{error}");
        assert!(check(WindowFlags::CFT_COUNTED, 23203).is_ok());
        assert!(matches!(check(WindowFlags::from_bits_retain(1 << 20), 23203), Err(Error::Argument { .. })));
    }
}
