//! Primary contexts: what copies, plain allocations and peer access need. Virtual memory management itself needs none.

use crate::device::Device;
use crate::error::{Attempt, Result};
use crate::release::released;
use cuda_vmm_sys::{CUcontext, CUresult};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

/// A retained primary context; clones share the reference, and the last one gives it back.
///
/// Dropping the last one calls `cuDevicePrimaryCtxRelease`.
#[derive(Clone, Debug)]
#[doc(alias = "cuDevicePrimaryCtxRelease")]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    raw: CUcontext,
}

// SAFETY: CUDA contexts may be used from any thread; the handle is an address that is never dereferenced here.
unsafe impl Send for Inner {}
// SAFETY: as above; all calls on it are thread-safe in the driver.
unsafe impl Sync for Inner {}

impl Context {
    pub(crate) fn retain(device: &Device) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for one write; the reference is given back in Drop.
        unsafe { device.cuda().driver().cuDevicePrimaryCtxRetain(&mut raw, device.as_raw()) }
            .attempt(|| format!("retaining the primary context of device {}", device.ordinal()))?;
        Ok(Self { inner: Arc::new(Inner { device: device.clone(), raw }) })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The raw handle, alive as long as this object or a clone of it.
    #[must_use]
    pub fn as_raw(&self) -> CUcontext {
        self.inner.raw
    }

    /// Makes the context current on this thread until the guard is dropped. Guards end in the reverse of the order they began.
    ///
    /// Calls `cuCtxPushCurrent`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuCtxPushCurrent")]
    pub fn bind(&self) -> Result<Bound<'_>> {
        // SAFETY: the context is retained, so it is alive.
        unsafe { self.device().cuda().driver().cuCtxPushCurrent(self.inner.raw) }
            .attempt(|| format!("binding the context of device {}", self.device().ordinal()))?;
        Ok(Bound { context: self, not_send: PhantomData })
    }

    /// Waits until all work of the context is done.
    ///
    /// Calls `cuCtxSynchronize`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call), also for the failure of earlier work.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: a context is current.
        unsafe { self.device().cuda().driver().cuCtxSynchronize() }
            .attempt(|| format!("waiting for device {}", self.device().ordinal()))
    }

    /// Lets this context address the plain allocations of `peer`'s, until the last guard for the two devices is dropped
    /// (`cuCtxEnablePeerAccess`). Memory that was mapped with [`Grant`](crate::Grant)s does not need it.
    ///
    /// # Errors
    /// [`Error::ForeignDriver`](crate::Error::ForeignDriver), or [`Error::Call`](crate::Error::Call).
    /// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED` counts as success: somebody else enabled the access, and the guard leaves it to them.
    #[doc(alias = "cuCtxEnablePeerAccess")]
    pub fn enable_peer_access(&self, peer: &Self) -> Result<PeerAccess> {
        let cuda = self.device().cuda();
        cuda.check_same(peer.device().cuda(), "context")?;
        let (from, to) = (self.device().ordinal(), peer.device().ordinal());
        let mut guards = cuda.peer_guards();
        let ours = match guards.get_mut(&(from, to)) {
            Some(count) => {
                *count += 1;
                true
            }
            None => {
                let _bound = self.bind()?;
                // SAFETY: both contexts are retained; flags must be 0.
                match unsafe { cuda.driver().cuCtxEnablePeerAccess(peer.as_raw(), 0) } {
                    Err(error)
                        if error.status() == Some(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) =>
                    {
                        false
                    }
                    result => {
                        result.attempt(|| format!("enabling access from device {from} to device {to}"))?;
                        guards.insert((from, to), 1);
                        true
                    }
                }
            }
        };
        drop(guards);
        Ok(PeerAccess { from: self.clone(), to: peer.clone(), ours })
    }

    /// Free and total bytes of the device's memory, as the driver sees them now.
    ///
    /// Calls `cuMemGetInfo`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuMemGetInfo")]
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for one write, and a context is current.
        unsafe { self.device().cuda().driver().cuMemGetInfo(&mut free, &mut total) }
            .attempt(|| format!("asking device {} for its free memory", self.device().ordinal()))?;
        Ok((free, total))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: gives back the one reference that `retain` took.
        released("primary context", unsafe {
            self.device.cuda().driver().cuDevicePrimaryCtxRelease(self.device.as_raw())
        });
    }
}

/// Keeps a context current on this thread.
///
/// Dropping it calls `cuCtxPopCurrent`.
#[derive(Debug)]
#[must_use = "the context is current for as long as the guard lives"]
#[doc(alias = "cuCtxPopCurrent")]
pub struct Bound<'context> {
    context: &'context Context,
    /// The stack of contexts belongs to the thread.
    not_send: PhantomData<*const ()>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: pops what `bind` pushed on this thread; `popped` is valid for one write.
        released("current context", unsafe {
            self.context.device().cuda().driver().cuCtxPopCurrent(&mut popped)
        });
    }
}

/// Keeps peer access from one primary context to another enabled (`cuCtxDisablePeerAccess` after the last guard).
#[derive(Debug)]
#[must_use = "access ends when the guard is dropped"]
#[doc(alias = "cuCtxDisablePeerAccess")]
pub struct PeerAccess {
    from: Context,
    to: Context,
    /// Whether this crate enabled the access, so that it is counted.
    ours: bool,
}

impl Drop for PeerAccess {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        let cuda = self.from.device().cuda();
        let pair = (self.from.device().ordinal(), self.to.device().ordinal());
        let mut guards = cuda.peer_guards();
        if let Some(count) = guards.get_mut(&pair)
            && *count > 1
        {
            *count -= 1;
            return;
        }
        guards.remove(&pair);
        if let Ok(_bound) = self.from.bind() {
            // SAFETY: this crate enabled the access, and no other guard needs it; both contexts are retained.
            released("peer access", unsafe { cuda.driver().cuCtxDisablePeerAccess(self.to.as_raw()) });
        }
    }
}
