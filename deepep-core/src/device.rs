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
use cuda_vmm::{Context, Cuda, Device, Grant, Granularity, Properties, SegmentedRange};

use crate::backend::cuda::{Stream, Uncaptured, call_failed, capable, until};
use crate::error::{Error, Result};
use crate::ops::require_device;
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

/// The bytes of a view's elements, row after row, wherever it lies. What writes the view must have run.
///
/// Only elements are read, nothing that lies between them. Elements that follow each other, in rows or in columns, are read together.
///
/// # Errors
/// [`Vmm`](Error::Vmm) if the driver refuses; [`OtherDevice`](Error::OtherDevice) for memory of another device than this.
#[doc(alias = "cuMemcpyDtoHAsync")]
pub fn read(device: &Device, view: TensorRef<'_>) -> Result<Vec<u8>> {
    if view.bytes() == 0 {
        return Ok(Vec::new());
    }
    require_device("view", &view, Some(device.ordinal()))?;
    let pieces = Pieces::of(&view);
    let bytes = match view.space() {
        Space::Device => download(device, &view, pieces)?,
        Space::Host => {
            let mut bytes = Vec::with_capacity(view.bytes());
            for address in pieces.addresses(&view) {
                // SAFETY: the view promises that the CPU can read every element, for as long as the view is borrowed; a piece has nothing but
                // elements.
                bytes.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(address as *const u8, pieces.length)
                });
            }
            bytes
        }
    };
    Ok(if pieces.columns { transposed(&bytes, view.shape(), view.dtype().size()) } else { bytes })
}

/// Elements of a view that follow each other in memory without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pieces {
    /// Bytes of a piece.
    length: usize,
    /// Number of pieces in each dimension, and the bytes from one to the next.
    count: [usize; 2],
    step: [isize; 2],
    /// The pieces are columns, in order, and not rows or parts of them.
    columns: bool,
}

impl Pieces {
    fn of(view: &Extent) -> Self {
        let ([rows, columns], size) = (view.shape(), view.dtype().size());
        let step = view.strides().map(|stride| stride * size as isize);
        let whole =
            |length: usize, count: [usize; 2]| Self { length: length * size, count, step, columns: false };
        if view.is_contiguous() {
            whole(rows * columns, [1, 1])
        } else if columns == 1 || view.strides()[1] == 1 {
            whole(columns, [rows, 1])
        } else if rows > 1 && view.strides()[0] == 1 {
            Self { columns: true, ..whole(rows, [1, columns]) }
        } else {
            whole(1, [rows, columns])
        }
    }

    fn addresses(self, view: &Extent) -> impl Iterator<Item = u64> {
        let (start, [down, across]) = (view.address(), self.step);
        (0..self.count[0] as isize).flat_map(move |row| {
            (0..self.count[1] as isize)
                .map(move |column| start.wrapping_add_signed((row * down + column * across) as i64))
        })
    }
}

/// Rows of a matrix that came column by column.
fn transposed(bytes: &[u8], [rows, columns]: [usize; 2], size: usize) -> Vec<u8> {
    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (column * rows + row) * size));
    places.flat_map(|place| &bytes[place..place + size]).copied().collect()
}

fn download(device: &Device, view: &Extent, pieces: Pieces) -> Result<Vec<u8>> {
    let length = view.bytes();
    let context = device.primary_context()?;
    let stream = Stream::new(&context)?;
    let _bound = context.bind()?;
    let driver = device.cuda().driver();
    let failed = |source: CallError| call_failed(format!("reading {length} bytes of device memory"), source);
    let mut bytes = vec![0_u8; length];
    let enqueued =
        pieces.addresses(view).zip(bytes.chunks_exact_mut(pieces.length)).try_for_each(|(from, to)| {
            // SAFETY: the view that the caller has promises that its elements' memory is there, and a piece has nothing but elements; `to` has
            // that length, and is kept until the copies have run, or for good.
            unsafe { driver.cuMemcpyDtoHAsync(to.as_mut_ptr().cast(), from, to.len(), stream.raw()) }
        });
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
        return enqueued.map(|()| bytes).map_err(failed);
    }
    // Copies may still be running.
    std::mem::forget(bytes);
    enqueued.map_err(failed)?;
    copied?;
    let need = format!("must be there within {PATIENCE:?}");
    Err(Error::invalid("a copy from the device", format!("{length} bytes"), need))
}

#[cfg(test)]
mod tests {
    use super::*;
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

    /// Between the elements there is no memory.
    #[test]
    fn nothing_between_elements_is_read() {
        on_emulator(|device| {
            let mut three = [0; 3].map(|_| DeviceMemory::new(device, STEP).unwrap());
            three.sort_by_key(DeviceMemory::address);
            let [low, between, high] = three;
            drop(between);
            low.write(0, &[1, 2, 3, 4]).unwrap();
            high.write(0, &[5, 6, 7, 8]).unwrap();
            let (address, far) = (low.address(), (high.address() - low.address()) as isize);
            let views = [
                (address, [2, 4], [far, 1], vec![1, 2, 3, 4, 5, 6, 7, 8]),
                (address, [4, 2], [1, far], vec![1, 5, 2, 6, 3, 7, 4, 8]),
                (address, [2, 2], [far, 2], vec![1, 3, 5, 7]),
                (address, [2, 1], [far, 9], vec![1, 5]),
                (high.address() + 3, [2, 2], [-far, -2], vec![8, 6, 4, 2]),
                // One row twice.
                (address, [2, 4], [0, 1], vec![1, 2, 3, 4, 1, 2, 3, 4]),
            ];
            for (address, shape, strides, expected) in views {
                // SAFETY: every element lies in one of the memories; no operation gets the view.
                let view = unsafe { TensorRef::from_raw(address, Space::Device, DType::U8, shape, strides) };
                assert_eq!(read(device, view.unwrap()).unwrap(), expected, "{shape:?} {strides:?}");
            }
            // SAFETY: no operation gets the view, and only the emulator looks at it.
            let hole =
                unsafe { TensorRef::from_raw(address, Space::Device, DType::U8, [2, 2], [far / 2, 1]) };
            assert!(matches!(read(device, hole.unwrap()), Err(Error::Vmm(_))));
        });
    }

    #[test]
    fn pieces_are_as_long_as_they_can_be() {
        let data = [0_i32; 64];
        let pieces = |rows, columns, strides| {
            let pieces = Pieces::of(&TensorRef::strided(&data, rows, columns, strides).unwrap());
            (pieces.length, pieces.count, pieces.columns)
        };
        assert_eq!(pieces(8, 8, [8, 1]), (256, [1, 1], false));
        assert_eq!(pieces(4, 4, [8, 1]), (16, [4, 1], false));
        assert_eq!(pieces(4, 8, [1, 8]), (16, [1, 8], true));
        assert_eq!(pieces(4, 1, [8, 3]), (4, [4, 1], false));
        assert_eq!(pieces(1, 4, [1, 2]), (4, [1, 4], false));
        assert_eq!(pieces(4, 2, [8, 2]), (4, [4, 2], false));
    }

    #[test]
    fn another_device_does_not_read() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        {
            let cuda = Cuda::with_driver(emulator.driver()).unwrap();
            let memory = DeviceMemory::new(&cuda.device(1).unwrap(), 64).unwrap();
            // SAFETY: no operation gets the view.
            let view = unsafe { memory.view(0, DType::U8, [1, 64]).unwrap() };
            let refused = read(&cuda.device(0).unwrap(), view).unwrap_err();
            assert!(matches!(refused, Error::OtherDevice { got: 1, expected: 0, .. }), "{refused}");
            assert_eq!(read(&cuda.device(1).unwrap(), view).unwrap().len(), 64);
        }
        emulator.assert_empty();
    }
}
