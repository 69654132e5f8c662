//! Memory of a GPU, for callers that have no library of their own for it.
//!
//! [`DeviceMemory`] is a range of a device's memory whose parts can be given to operations as tensors, and [`read`] brings any view's elements to
//! the host.
//!
//! ```no_run
//! use deepep_core::ElasticBuffer;
//! use deepep_core::device::DeviceMemory;
//! use deepep_core::tensor::DType;
//! # fn example(buffer: &ElasticBuffer) -> deepep_core::Result<()> {
//! let memory = DeviceMemory::new(buffer.device(), 1 << 20)?;
//! memory.write(0, &[0; 64 * 128])?;
//! // SAFETY: the memory is neither written nor dropped before the work that gets the view has run.
//! let x = unsafe { memory.view(0, DType::Bf16, [64, 64])? };
//! # Ok(())
//! # }
//! ```

mod read;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuda_vmm::sys::{CUstream, CallError, Driver};
use cuda_vmm::{Context, Cuda, Device, Grant, Granularity, Properties, SegmentedRange};
use once_cell::sync::OnceCell;

pub use self::read::{read, read_into};
use crate::backend::cuda::{Stream, Uncaptured, call_failed, capable, until};
use crate::error::{Error, Result};
use crate::left_behind;
use crate::tensor::{DType, Extent, Space, TensorMut, TensorRef};

/// Sizes are multiples of this, which every device's granularity divides.
const STEP: usize = 2 << 20;
/// The longest that a copy takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that are copied at a time.
const PIECE: usize = 32 << 20;

/// Memory of one device.
///
/// It is made with virtual memory management, so that neither making nor dropping it waits for kernels. Its size is rounded up to 2 MiB: one
/// range for many tensors is better than many ranges.
///
/// Copies have run when their call returns without an error. They are on a stream of the memory's own, and ordered with nothing else: wait for the
/// event of the operation that uses the memory first. They don't wait for other work of the device, and streams may be captured meanwhile. Bytes come
/// from ordinary memory and go there, which the driver may do inside of its own call: that takes as long as the copy alone, and no deadline of this crate ends it
/// if the device hangs. (With memory that is pinned for it one would, but pinning can wait for kernels, hence for other ranks.) Whatever is left to do when
/// the driver's call returns is waited for at most a minute.
#[doc(alias = "cuMemCreate")]
pub struct DeviceMemory {
    context: Context,
    /// Of its copies, if there are any.
    stream: OnceCell<Stream>,
    /// A copy has failed or taken too long, and may still run.
    unfinished: AtomicBool,
    /// The longest wait for a copy.
    patience: Duration,
    /// Dropped only if no copy uses it.
    range: ManuallyDrop<SegmentedRange>,
}

impl DeviceMemory {
    /// At least `bytes` bytes, readable and writable by the device. What they hold at first is undefined.
    ///
    /// # Errors
    /// [`Vmm`](Error::Vmm) if the driver refuses.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        let size = bytes.max(1).checked_next_multiple_of(STEP).ok_or_else(|| {
            Error::invalid("bytes of device memory", bytes, "can't be rounded up to a multiple of 2 MiB")
        })?;
        let range = SegmentedRange::builder(device.cuda())
            .alignment(Granularity::new(STEP)?)
            .create(Properties::device(device.ordinal()), size)
            .grant(Grant::device(device.ordinal()))
            .build()?;
        Ok(Self {
            context: device.primary_context()?,
            stream: OnceCell::new(),
            unfinished: AtomicBool::new(false),
            patience: PATIENCE,
            range: ManuallyDrop::new(range),
        })
    }

    /// The device whose memory it is.
    pub fn device(&self) -> &Device {
        self.context.device()
    }

    /// Where it starts: a multiple of 2 MiB.
    pub fn address(&self) -> u64 {
        self.range.address().get()
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.range.size()
    }

    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) if they don't fit, [`Vmm`](Error::Vmm) if the driver refuses, [`CopyUnfinished`](Error::CopyUnfinished) if they are not there after a
    /// minute: whatever the copy uses then stays until it has ended, if need be until the process does.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut to = self.part(offset, bytes.len())?;
        let mut from = Vec::new();
        for piece in bytes.chunks(PIECE) {
            from.clear();
            from.extend_from_slice(piece);
            from = self.copy(from, "writing", piece.len(), |driver, from, stream| {
                // SAFETY: the part lies inside the memory; `from` has as many bytes, and stays until the copy has run.
                unsafe { driver.cuMemcpyHtoDAsync(to, from.as_ptr().cast(), piece.len(), stream) }
            })?;
            to += piece.len() as u64;
        }
        Ok(())
    }

    /// Reads bytes at an offset.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let mut from = self.part(offset, bytes.len())?;
        let mut read = Vec::new();
        for piece in bytes.chunks_mut(PIECE) {
            let length = piece.len();
            read.resize(length, 0);
            read = self.copy(read, "reading", length, |driver, to, stream| {
                // SAFETY: the part lies inside the memory; `to` has as many bytes, and stays until the copy has run.
                unsafe { driver.cuMemcpyDtoHAsync(to.as_mut_ptr().cast(), from, length, stream) }
            })?;
            piece.copy_from_slice(&read);
            from += length as u64;
        }
        Ok(())
    }

    /// Sets bytes at an offset to one value.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[doc(alias = "cuMemsetD8Async")]
    pub fn fill(&self, offset: usize, length: usize, value: u8) -> Result<()> {
        let at = self.part(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        self.copy(Vec::new(), "setting", length, |driver, _, stream| {
            // SAFETY: the part lies inside the memory.
            unsafe { driver.cuMemsetD8Async(at, value, length, stream) }
        })
        .map(drop)
    }

    /// Where a part starts.
    fn part(&self, offset: usize, length: usize) -> Result<u64> {
        if offset.checked_add(length).is_some_and(|end| end <= self.bytes()) {
            return Ok(self.address() + offset as u64);
        }
        let (got, expected) =
            (format!("{length} bytes at {offset}"), format!("inside {} bytes", self.bytes()));
        Err(Error::Shape { tensor: "bytes", got, expected })
    }

    /// As [`copied`], on this memory's stream. What the copies use of this memory stays as long as they may run.
    fn copy(
        &self,
        bytes: Vec<u8>,
        verb: &str,
        length: usize,
        enqueue: impl FnOnce(&Driver, &mut [u8], CUstream) -> Result<(), CallError>,
    ) -> Result<Vec<u8>> {
        let stream = self.stream.get_or_try_init(|| Stream::new(&self.context))?;
        let what = format!("{verb} {length} bytes of device memory");
        let unfinished = || self.unfinished.store(true, Ordering::Release);
        copied(&self.context, stream, bytes, &what, self.patience, unfinished, enqueue)
    }

    /// A part as a matrix, row after row.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) if it reaches beyond the memory, [`Tensor`](Error::Tensor) if the offset is no multiple of the element's size.
    ///
    /// # Safety
    /// Until all work that was enqueued with the view has run, nothing may write the part, nor may the memory be dropped.
    pub unsafe fn view(&self, offset: usize, dtype: DType, shape: [usize; 2]) -> Result<TensorRef<'_>> {
        // SAFETY: the caller's promise.
        unsafe { self.strided(offset, dtype, shape, [shape[1] as isize, 1]) }
    }

    /// A part as a matrix with any strides (in elements, not negative), element `[0, 0]` at the offset.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    ///
    /// # Safety
    /// As [`view`](Self::view).
    pub unsafe fn strided(
        &self,
        offset: usize,
        dtype: DType,
        shape: [usize; 2],
        strides: [isize; 2],
    ) -> Result<TensorRef<'_>> {
        let address = self.address().saturating_add(offset as u64);
        // SAFETY: the device can read the memory as long as this is borrowed, and the part lies inside it (checked below, before anybody
        // gets the view); the rest is the caller's promise.
        let view = unsafe { TensorRef::from_raw(address, Space::Device, dtype, shape, strides)? };
        self.require_inside(offset, &view)?;
        Ok(view.on_device(self.context.device().ordinal()))
    }

    /// A part as a matrix to be written, row after row.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    ///
    /// # Safety
    /// Until all work that was enqueued with the view has run, nothing else may read or write the part, nor may the memory be dropped.
    pub unsafe fn view_mut(&self, offset: usize, dtype: DType, shape: [usize; 2]) -> Result<TensorMut<'_>> {
        let (address, strides) = (self.address().saturating_add(offset as u64), [shape[1] as isize, 1]);
        // SAFETY: as in `strided`; rows of a contiguous matrix don't overlap.
        let view = unsafe { TensorMut::from_raw(address, Space::Device, dtype, shape, strides)? };
        self.require_inside(offset, &view)?;
        Ok(view.on_device(self.context.device().ordinal()))
    }

    fn require_inside(&self, offset: usize, view: &Extent) -> Result<()> {
        let inside = match view.byte_span() {
            None => offset <= self.bytes(),
            Some((low, high)) => {
                low >= 0 && offset.checked_add(high as usize).is_some_and(|end| end <= self.bytes())
            }
        };
        if inside {
            return Ok(());
        }
        let got =
            format!("{:?} with strides {:?} of {} at {offset}", view.shape(), view.strides(), view.dtype());
        Err(Error::Shape { tensor: "view", got, expected: format!("inside {} bytes", self.bytes()) })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let has_run = |stream: &Stream| {
            let _bound = self.context.bind()?;
            let _uncaptured = Uncaptured::new(self.context.device().cuda().driver());
            stream.has_run()
        };
        let may_run = *self.unfinished.get_mut()
            && self.stream.get().is_some_and(|stream| !has_run(stream).unwrap_or(false));
        if may_run {
            let (bytes, device) = (self.bytes(), self.device().ordinal());
            return left_behind::say(format_args!(
                "{bytes} bytes of device {device} were dropped while a copy may still use them; they stay until the process ends"
            ));
        }
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.range) };
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("device", &self.context.device().ordinal())
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.bytes())
            .finish()
    }
}

/// The devices that kernels run on: those of compute capability 9.0 or newer (Hopper). There may be none.
///
/// # Errors
/// [`Vmm`](Error::Vmm) if the driver can't tell.
#[doc(alias = "cuDeviceGetAttribute")]
pub fn usable(cuda: &Cuda) -> Result<Vec<Device>> {
    capable(cuda)
}

/// Enqueues copies from or into `bytes` and waits until they have run, at most for `limit`. Bytes that copies may still use then stay for good, and `unfinished`
/// sees to whatever else they use.
fn copied(
    context: &Context,
    stream: &Stream,
    mut bytes: Vec<u8>,
    what: &str,
    limit: Duration,
    unfinished: impl FnOnce(),
    enqueue: impl FnOnce(&Driver, &mut [u8], CUstream) -> Result<(), CallError>,
) -> Result<Vec<u8>> {
    let _bound = context.bind()?;
    let driver = context.device().cuda().driver();
    // None of this is part of a graph that somebody captures.
    let _uncaptured = Uncaptured::new(driver);
    let failed = |source: CallError| call_failed(what.to_owned(), source);
    let enqueued = enqueue(driver, &mut bytes, stream.raw());
    let ended = until(limit, || Ok(stream.has_run()?.then_some(())));
    if let Ok(Some(())) = ended {
        return enqueued.map(|()| bytes).map_err(failed);
    }
    // Copies may still be running.
    std::mem::forget(bytes);
    unfinished();
    enqueued.map_err(failed)?;
    ended?;
    Err(Error::CopyUnfinished { what: what.to_owned(), waited: limit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_vmm::sys::CUresult;
    use cuda_vmm_emu::{Config, Emulator};

    pub(super) fn on_emulator(body: impl FnOnce(&Device)) {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        body(&Cuda::with_driver(emulator.driver()).unwrap().device(1).unwrap());
        emulator.assert_empty();
    }

    #[test]
    fn parts_are_views_that_stay_inside() {
        on_emulator(|device| {
            let memory = DeviceMemory::new(device, 5).unwrap();
            assert_eq!((memory.bytes(), memory.address() % (2 << 20)), (2 << 20, 0));
            let numbers: Vec<u8> = (0..12_i32).flat_map(i32::to_ne_bytes).collect();
            memory.write(256, &numbers).unwrap();
            // SAFETY: nothing is enqueued with any of the views.
            unsafe {
                let rows = memory.view(256, DType::I32, [3, 4]).unwrap();
                assert_eq!((rows.address(), rows.space()), (memory.address() + 256, Space::Device));
                assert_eq!(read(device, rows).unwrap(), numbers);
                // The transposed matrix, read row after row.
                let columns = memory.strided(256, DType::I32, [4, 3], [1, 4]).unwrap();
                let expected: Vec<u8> = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11_i32]
                    .into_iter()
                    .flat_map(i32::to_ne_bytes)
                    .collect();
                assert_eq!(read(device, columns).unwrap(), expected);
                let all = memory.bytes();
                assert!(memory.view(all - 8, DType::I64, [1, 1]).is_ok());
                assert!(memory.view(all, DType::I64, [0, 7]).is_ok());
                assert!(matches!(memory.view(all - 4, DType::I64, [1, 1]), Err(Error::Tensor { .. })));
                assert!(matches!(memory.view(all - 8, DType::I32, [3, 1]), Err(Error::Shape { .. })));
                assert!(matches!(memory.view_mut(all + 1, DType::U8, [0, 1]), Err(Error::Shape { .. })));
                assert!(matches!(memory.strided(0, DType::U8, [2, 1], [-1, 1]), Err(Error::Shape { .. })));
            }
            assert!(memory.write(memory.bytes() - 1, &[1, 2]).is_err());
            memory.fill(0, 3, 9).unwrap();
            let mut got = [0; 4];
            memory.read(0, &mut got).unwrap();
            assert_eq!(got[..3], [9; 3]);
        });
    }

    #[test]
    fn copies_wait_for_no_other_work() {
        on_emulator(|device| {
            let (memory, gate) =
                (DeviceMemory::new(device, 64).unwrap(), DeviceMemory::new(device, 4).unwrap());
            gate.write(0, &[0; 4]).unwrap();
            let context = device.primary_context().unwrap();
            let _bound = context.bind().unwrap();
            let driver = device.cuda().driver();
            // SAFETY: the word lies in memory that outlives the wait. The stream is the device's default one, which waits for all streams that
            // do not keep out of its order, and they for it.
            unsafe { driver.cuStreamWaitValue32(std::ptr::null_mut(), gate.address(), 1, 0) }.unwrap();
            memory.fill(0, 8, 7).unwrap();
            memory.write(4, &[1, 2]).unwrap();
            let mut got = [0; 8];
            memory.read(0, &mut got).unwrap();
            assert_eq!(got, [7, 7, 7, 7, 1, 2, 7, 7]);
            // SAFETY: no operation gets the view.
            let view = unsafe { memory.view(0, DType::U8, [1, 8]).unwrap() };
            assert_eq!(read(device, view).unwrap(), got);
            // SAFETY: the null handle is the default stream.
            let busy = unsafe { driver.cuStreamQuery(std::ptr::null_mut()) };
            assert_eq!(busy.unwrap_err().status(), Some(CUresult::CUDA_ERROR_NOT_READY));
            gate.write(0, &1_u32.to_ne_bytes()).unwrap();
            // SAFETY: as above; what it waits for is there.
            unsafe { driver.cuStreamSynchronize(std::ptr::null_mut()) }.unwrap();
        });
    }

    #[test]
    fn memory_of_a_copy_that_may_still_run_stays() {
        for (opened, left) in [(true, 0), (false, 1)] {
            let emulator = Emulator::new(Config::h200x2()).unwrap();
            {
                let device = Cuda::with_driver(emulator.driver()).unwrap().device(1).unwrap();
                let mut memory = DeviceMemory::new(&device, 64).unwrap();
                let gate = DeviceMemory::new(&device, 4).unwrap();
                gate.write(0, &[0; 4]).unwrap();
                memory.patience = Duration::from_millis(20);
                memory.fill(0, 8, 1).unwrap();
                {
                    let context = device.primary_context().unwrap();
                    let (_bound, stream) = (context.bind().unwrap(), memory.stream.get().unwrap());
                    // SAFETY: the word lies in memory that outlives the wait.
                    unsafe { device.cuda().driver().cuStreamWaitValue32(stream.raw(), gate.address(), 1, 0) }
                        .unwrap();
                }
                let late = memory.fill(0, 8, 2).unwrap_err();
                assert!(matches!(late, Error::CopyUnfinished { .. }), "{late}");
                let says = "setting 8 bytes of device memory has not ended after 20ms";
                assert!(late.to_string().starts_with(says), "{late}");
                let address = memory.address();
                let open = || gate.write(0, &1_u32.to_ne_bytes()).unwrap();
                if opened {
                    open();
                    // Ordered behind the late one.
                    memory.patience = PATIENCE;
                    let mut got = [0; 2];
                    memory.read(0, &mut got).unwrap();
                    assert_eq!(got, [2, 2]);
                }
                drop(memory);
                if !opened {
                    open();
                    // It ends well.
                    let ended =
                        until(PATIENCE, || Ok((emulator.read(address, 2).unwrap() == [2, 2]).then_some(())));
                    assert_eq!(ended.unwrap(), Some(()));
                }
            }
            let ledger = emulator.ledger();
            assert_eq!(ledger.reservations.len(), left, "{ledger}");
            assert!(ledger.incidents.is_empty(), "{ledger}");
        }
    }

    #[test]
    fn long_copies_go_piece_by_piece() {
        on_emulator(|device| {
            let memory = DeviceMemory::new(device, PIECE + 5).unwrap();
            let bytes: Vec<u8> = (0..PIECE + 3).map(|i| (i % 251) as u8).collect();
            memory.write(1, &bytes).unwrap();
            let mut got = vec![0; bytes.len()];
            memory.read(1, &mut got).unwrap();
            assert!(got == bytes);
            for (offset, length) in [(memory.bytes(), 1), (usize::MAX, 2)] {
                let refused = memory.fill(offset, length, 0).unwrap_err();
                assert!(matches!(refused, Error::Shape { tensor: "bytes", .. }), "{refused}");
            }
            memory.fill(memory.bytes(), 0, 0).unwrap();
        });
    }
}
