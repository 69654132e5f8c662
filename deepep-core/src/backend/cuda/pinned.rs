//! Host memory that devices read and write, and device memory read through it.

use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use cuda_vmm::Context;
use cuda_vmm::sys::CallError;
use once_cell::sync::OnceCell;

use super::call_failed;
use super::events::EventPool;
use super::reports::Reports;
use super::stream::Stream;
use super::wait::Uncaptured;
use crate::error::{Error, Result};

/// `cuMemHostAlloc` flags: usable from every context, and mapped for devices.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// What nobody uses at present. It is never freed, only used again: freeing pinned memory can wait for all work of the device, hence for
/// kernels of other ranks of the process, and those for the rank that frees.
static FREE: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// Pinned host memory, zero at first. Kept for the next user in this process when dropped; whoever drops it knows that no kernel uses it.
pub(crate) struct PinnedMemory(ManuallyDrop<Pinned>);

/// An allocation, with the context that it belongs to, which stays as long.
struct Pinned {
    context: Context,
    host: NonNull<u8>,
    device: u64,
    bytes: usize,
}

// SAFETY: the memory is shared with the device anyway; users access it through atomics and volatile loads, or one at a time.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl PinnedMemory {
    pub(crate) fn new(context: &Context, bytes: usize) -> Result<Self> {
        let kept = {
            let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
            let found = free.iter().position(|p| p.bytes == bytes && is_same(&p.context, context));
            found.map(|i| free.swap_remove(i))
        };
        let pinned = match kept {
            Some(pinned) => pinned,
            None => Pinned::allocate(context, bytes)?,
        };
        // SAFETY: the memory has that many bytes, and is nobody else's: new, or given back by its last user.
        unsafe { pinned.host.as_ptr().write_bytes(0, bytes) };
        Ok(Self(ManuallyDrop::new(pinned)))
    }

    /// Its first byte; page-aligned.
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.0.host
    }

    /// Its address for kernels.
    pub(crate) fn device(&self) -> u64 {
        self.0.device
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used afterwards.
        let pinned = unsafe { ManuallyDrop::take(&mut self.0) };
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(pinned);
    }
}

impl Pinned {
    fn allocate(context: &Context, bytes: usize) -> Result<Self> {
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
        let mut device = 0;
        // SAFETY: the address is that of a mapped pinned allocation.
        if let Err(source) = unsafe { driver.cuMemHostGetDevicePointer(&mut device, raw, 0) } {
            // SAFETY: allocated above, and nobody knows it.
            let _ = unsafe { driver.cuMemFreeHost(raw) };
            return Err(failed(source));
        }
        Ok(Self { context: context.clone(), host, device, bytes })
    }
}

/// Whether both are one context: handles are unique in a driver, as long as somebody retains them.
fn is_same(a: &Context, b: &Context) -> bool {
    a.as_raw() == b.as_raw() && ptr::eq(a.device().cuda().driver(), b.device().cuda().driver())
}

/// Frees what is kept for a context, and lets go of it: drivers in software are expected to be left as they were.
#[cfg(test)]
pub(super) fn free_all(context: &Context) {
    let _bound = context.bind().unwrap();
    FREE.lock().unwrap_or_else(PoisonError::into_inner).retain(|pinned| {
        let other = !is_same(&pinned.context, context);
        if !other {
            let raw = pinned.host.as_ptr().cast();
            // SAFETY: allocated once by cuMemHostAlloc, freed once, and not in use: it is in the list, and leaves it.
            unsafe { context.device().cuda().driver().cuMemFreeHost(raw) }.unwrap();
        }
        other
    });
}

/// Reads small pieces of device memory, beside whatever runs on other streams.
pub(crate) struct Readback {
    context: Context,
    /// Made when it is first needed: streams of ranks that share a GPU share its queues, the more of them the more likely.
    stream: OnceCell<Stream>,
    events: EventPool,
    reports: Arc<Reports>,
    /// Nothing after a copy of which it is not known that it has run: the device may still write the memory, which stays.
    staging: Mutex<Option<PinnedMemory>>,
}

impl Readback {
    /// Longest piece.
    pub(crate) const BYTES: usize = 256;

    pub(crate) fn new(context: &Context, reports: &Arc<Reports>) -> Result<Self> {
        let staging = Mutex::new(Some(PinnedMemory::new(context, Self::BYTES)?));
        let (stream, events) = (OnceCell::new(), EventPool::new(context.clone(), reports.clone()));
        Ok(Self { context: context.clone(), stream, events, reports: reports.clone(), staging })
    }

    /// Whether a copy may still be running: its end is not known.
    pub(crate) fn may_run(&self) -> bool {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// `count` numbers at an address of this device.
    ///
    /// # Safety
    /// They are device memory that nobody writes meanwhile.
    pub(crate) unsafe fn numbers(&self, address: u64, count: usize) -> Result<Vec<i32>> {
        let bytes = count * size_of::<i32>();
        if bytes > Self::BYTES {
            let need = format!("at most {} bytes are read at a time", Self::BYTES);
            return Err(Error::invalid("bytes of a table", bytes, need));
        }
        let mut place = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let _bound = self.context.bind()?;
        let driver = self.context.device().cuda().driver();
        // None of this is part of a graph that somebody captures.
        let _relaxed = Uncaptured::new(driver);
        let stream = self.stream.get_or_try_init(|| Stream::new(&self.context))?.raw();
        let copied = self.events.take(false)?;
        let Some(staging) = place.take().map(ManuallyDrop::new) else {
            let reason = "an earlier copy of a small table has not ended".into();
            return Err(Error::Broken { reason });
        };
        let to = staging.host().as_ptr();
        // SAFETY: the staging memory has that many bytes (checked), is pinned, and is never given back unless the copy is seen to have
        // run, below; the caller vouches for the source.
        unsafe { driver.cuMemcpyDtoHAsync(to.cast(), address, bytes, stream) }
            .map_err(|source| call_failed(format!("reading {bytes} bytes of device memory"), source))?;
        // SAFETY: the stream lives as long as this, and its context is current; the event was taken for this.
        unsafe { copied.record(stream)? };
        copied.wait_reached("a copy of a small table", self.reports.patience())?;
        // SAFETY: the copy has run; the memory holds `count` numbers, page-aligned, and the lock keeps others away.
        let numbers = unsafe { std::slice::from_raw_parts(to.cast::<i32>(), count) }.to_vec();
        *place = Some(ManuallyDrop::into_inner(staging));
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::super::status::StatusBlock;
    use super::*;
    use crate::device::DeviceMemory;
    use crate::layout::StatusLayout;
    use cuda_vmm::sys::{CUresult, Function};
    use cuda_vmm::{Cuda, Device};
    use cuda_vmm_emu::{Config, Emulator};
    use std::time::Duration;

    fn on_device(emulator: &Emulator, body: impl FnOnce(&Device, &Readback)) {
        let device = Cuda::with_driver(emulator.driver()).unwrap().device(0).unwrap();
        let context = device.primary_context().unwrap();
        let status = StatusBlock::new(&context, StatusLayout::new(4)).unwrap();
        let reports = Arc::new(Reports::new(status, 0, Duration::from_secs(10)));
        body(&device, &Readback::new(&context, &reports).unwrap());
        drop(reports);
        free_all(&context);
    }

    #[test]
    fn memory_is_used_again() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        on_device(&emulator, |device, readback| {
            let other = device.cuda().device(1).unwrap().primary_context().unwrap();
            let pinned = |context: &Context, bytes| {
                let memory = PinnedMemory::new(context, bytes).unwrap();
                // SAFETY: the memory has that many bytes, and is this test's.
                let bytes = unsafe { std::slice::from_raw_parts_mut(memory.host().as_ptr(), bytes) };
                assert!(bytes.iter().all(|&b| b == 0));
                bytes.fill(0xff);
                memory
            };
            let first = pinned(&readback.context, 4096);
            let (host, more) = (first.host(), pinned(&readback.context, 4096));
            assert_ne!(more.host(), host, "in use");
            drop(first);
            // Other sizes and other contexts get their own.
            assert_ne!(pinned(&readback.context, 8192).host(), host);
            assert_ne!(pinned(&other, 4096).host(), host);
            assert_eq!(pinned(&readback.context, 4096).host(), host);
            assert_eq!(emulator.faults().calls(Function::cuMemFreeHost), 0);
            free_all(&other);
        });
        emulator.assert_empty();
    }

    #[test]
    fn small_tables_are_read_beside_what_runs() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        on_device(&emulator, |device, readback| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            memory.write(0, &[0; 4]).unwrap();
            let numbers: Vec<u8> = (5..9_i32).flat_map(i32::to_ne_bytes).collect();
            memory.write(64, &numbers).unwrap();
            let busy = Stream::new(&readback.context).unwrap();
            let end = {
                let _bound = readback.context.bind().unwrap();
                // SAFETY: the word lies in memory that outlives the work.
                unsafe { device.cuda().driver().cuStreamWaitValue32(busy.raw(), memory.address(), 1, 0) }
                    .unwrap();
                readback.events.record(&busy).unwrap()
            };
            // SAFETY: the numbers are written above and not again.
            unsafe {
                assert_eq!(readback.numbers(memory.address() + 64, 4).unwrap(), [5, 6, 7, 8]);
                assert!(readback.numbers(memory.address(), Readback::BYTES).is_err());
            }
            memory.write(0, &1_u32.to_ne_bytes()).unwrap();
            end.wait_reached("the word", Duration::from_secs(20)).unwrap();
        });
        emulator.assert_empty();
    }

    #[test]
    fn memory_of_a_copy_that_may_still_run_is_not_used_again() {
        let (emulator, refusal) =
            (Emulator::new(Config::h200x2()).unwrap(), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        on_device(&emulator, |device, readback| {
            let memory = DeviceMemory::new(device, 4).unwrap();
            // SAFETY: nobody writes the memory meanwhile.
            let read = || unsafe { readback.numbers(memory.address(), 1) };
            // Nothing was enqueued.
            emulator.faults().fail_nth(Function::cuStreamCreate, 1, refusal);
            assert!(read().is_err());
            read().unwrap();
            // The copy was, and its end is not known.
            emulator.faults().fail_nth(Function::cuEventRecord, 1, refusal);
            assert!(matches!(read().unwrap_err(), Error::Vmm(_)));
            assert!(matches!(read().unwrap_err(), Error::Broken { .. }));
        });
        let left: Vec<_> = emulator.ledger().host_memory.iter().map(|span| span.size).collect();
        assert_eq!(left, [Readback::BYTES as u64]);
    }
}
