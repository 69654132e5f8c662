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

use std::fmt;
use std::time::Duration;

use cuda_vmm::sys::{CUresult, CallError};
use cuda_vmm::{Context, Device, Grant, Granularity, Properties, SegmentedRange};

use crate::backend::cuda::{Stream, Uncaptured, call_failed, until};
use crate::error::{Error, Result};
use crate::tensor::{DType, Extent, Space, TensorMut, TensorRef};

/// Sizes are multiples of this, which every device's granularity divides.
const STEP: usize = 2 << 20;
/// The longest that a copy takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory of one device.
///
/// It is made with virtual memory management, so that neither making nor dropping it waits for kernels. Its size is rounded up to 2 MiB: one
/// range for many tensors is better than many ranges.
///
/// Copies have run when their call returns. They are not ordered with the operations of a buffer: wait for the event of the operation that uses
/// the memory first.
#[doc(alias = "cuMemCreate")]
pub struct DeviceMemory {
    context: Context,
    range: SegmentedRange,
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
        Ok(Self { context: device.primary_context()?, range })
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
    /// [`Vmm`](Error::Vmm) if they don't fit or the driver refuses.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.context.upload(&self.range, offset, bytes)?)
    }

    /// Reads bytes at an offset.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        Ok(self.context.download(&self.range, offset, bytes)?)
    }

    /// Sets bytes at an offset to one value.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[doc(alias = "cuMemsetD8Async")]
    pub fn fill(&self, offset: usize, length: usize, value: u8) -> Result<()> {
        Ok(self.context.fill(&self.range, offset, length, value)?)
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
        Ok(view)
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
        Ok(view)
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

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("device", &self.context.device().ordinal())
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.bytes())
            .finish()
    }
}

/// The bytes of a view's elements, row after row, wherever it lies. What writes the view must have run.
///
/// # Errors
/// [`Vmm`](Error::Vmm) if the driver refuses; [`Shape`](Error::Shape) for negative strides.
#[doc(alias = "cuMemcpyDtoHAsync")]
pub fn read(device: &Device, view: TensorRef<'_>) -> Result<Vec<u8>> {
    let Some((low, high)) = view.byte_span() else { return Ok(Vec::new()) };
    if low < 0 {
        let (got, expected) =
            (format!("strides {:?}", view.strides()), "strides that are not negative".into());
        return Err(Error::Shape { tensor: "view", got, expected });
    }
    let length = high as usize;
    let bytes = match view.space() {
        Space::Device => download(device, view.address(), length)?,
        // SAFETY: the view promises that the CPU can read every element; from the first to the end of the last is one borrowed slice, or
        // the buffer's heap.
        Space::Host => unsafe { std::slice::from_raw_parts(view.address() as *const u8, length) }.to_vec(),
    };
    if view.is_contiguous() {
        return Ok(bytes);
    }
    let ([rows, columns], size) = (view.shape(), view.dtype().size());
    let [down, across] = view.strides().map(|stride| stride as usize * size);
    let mut gathered = Vec::with_capacity(rows * columns * size);
    for row in 0..rows {
        for column in 0..columns {
            gathered.extend_from_slice(&bytes[row * down + column * across..][..size]);
        }
    }
    Ok(gathered)
}

fn download(device: &Device, address: u64, length: usize) -> Result<Vec<u8>> {
    let context = device.primary_context()?;
    let stream = Stream::new(&context)?;
    let _bound = context.bind()?;
    let driver = device.cuda().driver();
    let failed = |source: CallError| call_failed(format!("reading {length} bytes of device memory"), source);
    let mut bytes = vec![0_u8; length];
    // SAFETY: the view that the caller has promises that the device's memory is there; `bytes` has that length, and is kept until the copy
    // has run, or for good.
    unsafe { driver.cuMemcpyDtoHAsync(bytes.as_mut_ptr().cast(), address, length, stream.raw()) }
        .map_err(failed)?;
    let copied = until(PATIENCE, || {
        let _uncaptured = Uncaptured::new(driver);
        // SAFETY: the stream is alive.
        match unsafe { driver.cuStreamQuery(stream.raw()) } {
            Ok(()) => Ok(Some(())),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(None),
            Err(source) => Err(failed(source)),
        }
    });
    if let Ok(Some(())) = copied {
        return Ok(bytes);
    }
    // The copy may still be running.
    std::mem::forget(bytes);
    copied?;
    let need = format!("must be there within {PATIENCE:?}");
    Err(Error::invalid("a copy from the device", format!("{length} bytes"), need))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_vmm::Cuda;
    use cuda_vmm_emu::{Config, Emulator};

    fn on_emulator(body: impl FnOnce(&Device)) {
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
    fn views_of_host_memory_are_read_too() {
        on_emulator(|device| {
            let data: Vec<i32> = (0..12).collect();
            let columns = TensorRef::strided(&data, 4, 3, [1, 4]).unwrap();
            let got = read(device, columns).unwrap();
            assert_eq!(got[4..8], 4_i32.to_ne_bytes());
            assert_eq!(read(device, TensorRef::matrix(&data, 3, 4).unwrap().first_rows(0)).unwrap(), []);
        });
    }
}
