//! Host memory that devices read and write, and device memory read through it.

use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use cuda_vmm::sys::CallError;

use super::call_failed;
use super::events::EventPool;
use super::reports::Reports;
use super::stream::Stream;
use crate::error::{Error, Result};

/// `cuMemHostAlloc` flags: usable from every context, and mapped for devices.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// Pinned host memory, zero at first.
pub(crate) struct Pinned {
    context: Context,
    host: NonNull<u8>,
    device: u64,
    bytes: usize,
}

// SAFETY: the memory is shared with the device anyway; users access it through atomics and volatile loads, or one at a time.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(context: &Context, bytes: usize) -> Result<Self> {
        let driver = context.device().cuda().driver();
        let _bound = context.bind()?;
        let failed = |source: CallError| call_failed(format!("pinning {bytes} bytes of host memory"), source);
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for one write, and a context is current.
        unsafe { driver.cuMemHostAlloc(&mut raw, bytes, PORTABLE_AND_MAPPED) }.map_err(failed)?;
        let Some(host) = NonNull::new(raw.cast::<u8>()) else {
            let need = "the driver said yes and gave no address";
            return Err(Error::invalid("pinned host memory", format!("{bytes} bytes"), need));
        };
        let mut pinned = Self { context: context.clone(), host, device: 0, bytes };
        // SAFETY: the driver gave that many bytes, page-aligned; nobody else knows them yet.
        unsafe { host.as_ptr().write_bytes(0, bytes) };
        // SAFETY: the address is that of a mapped pinned allocation.
        unsafe { driver.cuMemHostGetDevicePointer(&mut pinned.device, raw, 0) }.map_err(failed)?;
        Ok(pinned)
    }

    /// Its first byte; page-aligned.
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Its address for kernels.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: allocated once by cuMemHostAlloc, freed once; whoever drops it knows that no kernel uses it.
        let _ = unsafe { self.context.device().cuda().driver().cuMemFreeHost(self.host.as_ptr().cast()) };
    }
}

/// Reads small pieces of device memory, beside whatever runs on other streams.
pub(crate) struct Readback {
    context: Context,
    stream: Stream,
    events: Arc<EventPool>,
    reports: Arc<Reports>,
    staging: Mutex<Pinned>,
}

impl Readback {
    /// Longest piece.
    pub(crate) const BYTES: usize = 256;
    const LIMIT: Duration = Duration::from_secs(20);

    pub(crate) fn new(context: &Context, reports: &Arc<Reports>) -> Result<Self> {
        let staging = Mutex::new(Pinned::new(context, Self::BYTES)?);
        let (stream, events) = (Stream::new(context)?, EventPool::new(context.clone()));
        Ok(Self { context: context.clone(), stream, events, reports: reports.clone(), staging })
    }

    /// `count` numbers at an address of this device.
    ///
    /// # Safety
    /// They are device memory that nobody writes meanwhile.
    pub(crate) unsafe fn numbers(&self, address: u64, count: usize) -> Result<Vec<i32>> {
        let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = count * size_of::<i32>();
        if bytes > staging.bytes() {
            let need = format!("at most {} bytes are read at a time", staging.bytes());
            return Err(Error::invalid("bytes of a table", bytes, need));
        }
        let _bound = self.context.bind()?;
        let (driver, to) = (self.context.device().cuda().driver(), staging.host().as_ptr());
        // SAFETY: the staging memory has that many bytes (checked), is pinned, and is kept until the copy has run or for good; the caller
        // vouches for the source.
        unsafe { driver.cuMemcpyDtoHAsync(to.cast(), address, bytes, self.stream.raw()) }
            .map_err(|source| call_failed(format!("reading {bytes} bytes of device memory"), source))?;
        let copied = self.events.record(self.stream.raw(), &self.reports)?;
        copied.wait_reached("a copy of a small table", Self::LIMIT)?;
        // SAFETY: the copy has run; the memory holds `count` numbers, page-aligned, and the lock keeps others away.
        Ok(unsafe { std::slice::from_raw_parts(to.cast::<i32>(), count) }.to_vec())
    }
}
