//! The GPU of a rank.

use crate::error::{Error, Result};
use cuda_vmm_sys::{CUcontext, CUdevice, Driver};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

/// A GPU, with its primary context kept alive (the context that CUDA's runtime and most frameworks use).
///
/// NCCL creates a communicator and allocates memory on the device that is current on the calling thread. This crate makes the right
/// one current around each of its calls, and puts back what was current before. Clones share the context.
#[derive(Clone)]
pub struct Device(Arc<Primary>);

struct Primary {
    driver: Driver,
    ordinal: i32,
    handle: CUdevice,
    context: CUcontext,
}

// SAFETY: a CUDA context handle may be used from any thread; the driver does its own locking.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Device {
    /// The GPU with this ordinal, through the process's driver.
    ///
    /// # Errors
    /// The driver's error if there is no driver or no such device.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn open(ordinal: i32) -> Result<Self> {
        Self::with_driver(Driver::get()?, ordinal)
    }

    /// The GPU with this ordinal, through a given driver.
    ///
    /// # Errors
    /// The driver's error if there is no such device.
    pub fn with_driver(driver: &Driver, ordinal: i32) -> Result<Self> {
        let attempt = || format!("opening CUDA device {ordinal}");
        let (mut handle, mut context) = (0, ptr::null_mut());
        // SAFETY: cuInit takes no pointer, and the outputs are valid for one write each. The retained reference is given back when the
        // last clone is dropped.
        unsafe {
            driver.cuInit(0).map_err(Error::driver(attempt()))?;
            driver.cuDeviceGet(&mut handle, ordinal).map_err(Error::driver(attempt()))?;
            driver.cuDevicePrimaryCtxRetain(&mut context, handle).map_err(Error::driver(attempt()))?;
        }
        Ok(Self(Arc::new(Primary { driver: driver.clone(), ordinal, handle, context })))
    }

    /// The CUDA ordinal.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    /// The primary context.
    #[must_use]
    pub fn context(&self) -> CUcontext {
        self.0.context
    }

    /// Bytes of memory, if the driver tells.
    pub(crate) fn total_memory(&self) -> Option<usize> {
        let mut bytes = 0;
        // SAFETY: the output is valid for one write.
        let told = unsafe { self.driver().cuDeviceTotalMem(&mut bytes, self.0.handle) };
        told.ok().map(|()| bytes)
    }

    /// Makes this device current on the calling thread, for calls that are not this crate's.
    ///
    /// # Errors
    /// The driver's error.
    #[doc(alias = "cuCtxSetCurrent")]
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is alive while this handle is.
        unsafe { self.driver().cuCtxSetCurrent(self.0.context) }
            .map_err(Error::driver(format!("making CUDA device {} current", self.ordinal())))
    }

    /// Makes this device current until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is alive while this handle is, and the guard pops what is pushed here.
        unsafe { self.driver().cuCtxPushCurrent(self.0.context) }
            .map_err(Error::driver(format!("making CUDA device {} current", self.ordinal())))?;
        Ok(Entered { device: self, thread: PhantomData })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: this reference was retained in `with_driver` and is given back once. A failure (a driver that is shutting down)
        // leaves nothing to be done.
        unsafe { self.driver.cuDevicePrimaryCtxRelease(self.handle) }.ok();
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.ordinal()).finish_non_exhaustive()
    }
}

/// While this lives, a device is current on the thread that made it.
pub(crate) struct Entered<'a> {
    device: &'a Device,
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the output is valid for one write; `enter` pushed a context on this thread (the guard cannot leave it).
        unsafe { self.device.driver().cuCtxPopCurrent(&mut popped) }.ok();
    }
}
