//! Borrowed views.

use std::marker::PhantomData;

use super::{DType, Element, Extent, Home, Space};
use crate::error::{Error, Result};

/// A borrowed tensor that is only read.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    extent: Extent,
    memory: PhantomData<&'a [u8]>,
}

/// A borrowed tensor that is written.
#[derive(Debug)]
pub struct TensorMut<'a> {
    extent: Extent,
    memory: PhantomData<&'a mut [u8]>,
}

impl std::ops::Deref for TensorRef<'_> {
    type Target = Extent;
    fn deref(&self) -> &Extent {
        &self.extent
    }
}

impl std::ops::Deref for TensorMut<'_> {
    type Target = Extent;
    fn deref(&self) -> &Extent {
        &self.extent
    }
}

fn check_length(len: usize, rows: usize, columns: usize) -> Result<()> {
    if rows.checked_mul(columns) == Some(len) {
        return Ok(());
    }
    let expected = format!("{rows} × {columns} elements");
    Err(Error::Shape { tensor: "slice", got: format!("{len} elements"), expected })
}

impl<'a> TensorRef<'a> {
    /// A slice as a matrix, row after row.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) unless the slice has `rows * columns` elements.
    pub fn matrix<T: Element>(data: &'a [T], rows: usize, columns: usize) -> Result<Self> {
        check_length(data.len(), rows, columns)?;
        Ok(Self::host(data.as_ptr() as u64, T::DTYPE, [rows, columns]))
    }

    /// A slice as a vector.
    pub fn vector<T: Element>(data: &'a [T]) -> Self {
        Self::host(data.as_ptr() as u64, T::DTYPE, [data.len(), 1])
    }

    /// Bytes as a matrix of any element type, for example FP8.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) unless the slice has `rows * columns * dtype.size()` bytes; [`Tensor`](Error::Tensor) if its address isn't a
    /// multiple of the element's size.
    pub fn bytes_as(data: &'a [u8], dtype: DType, rows: usize, columns: usize) -> Result<Self> {
        check_length(data.len(), rows, columns.saturating_mul(dtype.size()))?;
        check_alignment(data.as_ptr() as u64, data.len(), dtype)?;
        Ok(Self::host(data.as_ptr() as u64, dtype, [rows, columns]))
    }

    /// A slice as a matrix with any strides (in elements, not negative), element `[0, 0]` first.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) if an element would lie outside of the slice.
    pub fn strided<T: Element>(
        data: &'a [T],
        rows: usize,
        columns: usize,
        strides: [isize; 2],
    ) -> Result<Self> {
        let mut view = Self::host(data.as_ptr() as u64, T::DTYPE, [rows, columns]);
        view.extent.strides = strides;
        let inside = match view.span() {
            Some((low, high)) => low >= 0 && (high as usize) < data.len(),
            None => rows == 0 || columns == 0,
        };
        if !inside {
            let expected = format!("elements up to [{rows}, {columns}] with strides {strides:?}");
            return Err(Error::Shape { tensor: "slice", got: format!("{} elements", data.len()), expected });
        }
        Ok(view)
    }

    /// A view of memory that someone else answers for, such as a tensor on a GPU.
    ///
    /// # Errors
    /// [`Tensor`](Error::Tensor) if the address isn't a multiple of the element's size; [`Shape`](Error::Shape) if offsets overflow.
    ///
    /// # Safety
    /// For as long as `'a`, and until all work that was enqueued with the view has run, every element must lie in memory that
    /// the processor of `space` can read, and nothing may write it. For [`Space::Device`] that processor is the device of whoever is given
    /// the view: of the [buffer](crate::ElasticBuffer::device), or the [collectives](crate::Collectives::device).
    ///
    /// This is also the way to give a view of one buffer's results to the operations of another, or to collectives, which refuse it
    /// otherwise: then the caller orders both, and keeps the result until the work has run.
    pub unsafe fn from_raw(
        address: u64,
        space: Space,
        dtype: DType,
        shape: [usize; 2],
        strides: [isize; 2],
    ) -> Result<Self> {
        let extent = Extent { address, dtype, shape, strides, home: Home::of_caller(space) };
        check_raw(&extent)?;
        Ok(Self { extent, memory: PhantomData })
    }

    fn host(address: u64, dtype: DType, shape: [usize; 2]) -> Self {
        let home = Home::of_caller(Space::Host);
        Self { extent: Extent::contiguous(address, dtype, shape, home), memory: PhantomData }
    }

    /// A contiguous view of memory of a buffer.
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw), and the address must be aligned. If the home names a buffer, nobody else's operations get the view:
    /// the promise need only cover work of that buffer.
    pub(crate) unsafe fn heap(address: u64, home: Home, dtype: DType, shape: [usize; 2]) -> Self {
        Self { extent: Extent::contiguous(address, dtype, shape, home), memory: PhantomData }
    }

    /// As [`heap`](Self::heap), with strides.
    ///
    /// # Safety
    /// As [`heap`](Self::heap).
    pub(crate) unsafe fn heap_strided(
        address: u64,
        home: Home,
        dtype: DType,
        shape: [usize; 2],
        strides: [isize; 2],
    ) -> Self {
        Self { extent: Extent { address, dtype, shape, strides, home }, memory: PhantomData }
    }

    /// The same view, known to be of memory of a device.
    pub(crate) fn on_device(mut self, ordinal: i32) -> Self {
        self.extent.home.device = Some(ordinal);
        self
    }

    /// The first `rows` rows, or all if there are fewer.
    #[must_use]
    pub fn first_rows(mut self, rows: usize) -> Self {
        self.extent.shape[0] = self.extent.shape[0].min(rows);
        self
    }

    /// The elements as a slice.
    ///
    /// # Errors
    /// [`Memory`](Error::Memory) for device memory, [`DType`](Error::DType) if `T` is not the element type, [`Stride`](Error::Stride) if there are gaps.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        if self.dtype != T::DTYPE {
            return Err(Error::DType { tensor: "view", got: self.dtype, expected: T::DTYPE.name() });
        }
        self.check_readable()?;
        let n = self.shape[0] * self.shape[1];
        if n == 0 {
            return Ok(&[]);
        }
        // SAFETY: the view promises n elements of T's type and alignment, readable by the CPU (checked: Host) and not written for 'a;
        // contiguity was checked, and any bit pattern is a T.
        Ok(unsafe { std::slice::from_raw_parts(self.address as *const T, n) })
    }

    /// The elements' bytes, whatever the element type.
    ///
    /// # Errors
    /// [`Memory`](Error::Memory) for device memory, [`Stride`](Error::Stride) if there are gaps.
    pub fn as_bytes(&self) -> Result<&'a [u8]> {
        self.check_readable()?;
        if self.bytes() == 0 {
            return Ok(&[]);
        }
        // SAFETY: as in `as_slice`; bytes have no alignment.
        Ok(unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes()) })
    }

    /// The elements row after row, whatever the strides.
    ///
    /// # Errors
    /// [`Memory`](Error::Memory) for device memory, [`DType`](Error::DType) if `T` is not the element type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.dtype != T::DTYPE {
            return Err(Error::DType { tensor: "view", got: self.dtype, expected: T::DTYPE.name() });
        }
        self.require_host()?;
        let [rows, columns] = self.shape;
        let elements = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        // SAFETY: the view promises that every element is readable by the CPU (checked: Host), aligned and not written for 'a; row and
        // column are in range, and any bit pattern is a T.
        Ok(elements.map(|(row, column)| unsafe { self.element(row, column).cast::<T>().read() }).collect())
    }

    fn require_host(&self) -> Result<()> {
        if self.space() == Space::Host {
            return Ok(());
        }
        let got = self.space().name();
        Err(Error::Memory { tensor: "view", got, expected: "host", backend: "CPU" })
    }

    fn check_readable(&self) -> Result<()> {
        self.require_host()?;
        self.require_contiguous("view")
    }

    /// One element's bytes.
    ///
    /// # Safety
    /// The space must be [`Space::Host`] and `row` and `column` in range.
    pub(crate) unsafe fn element(&self, row: usize, column: usize) -> *const u8 {
        let offset = row as isize * self.strides[0] + column as isize * self.strides[1];
        (self.address as *const u8).wrapping_offset(offset * self.dtype.size() as isize)
    }
}

impl<'a> TensorMut<'a> {
    /// A slice as a matrix, row after row.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) unless the slice has `rows * columns` elements.
    pub fn matrix<T: Element>(data: &'a mut [T], rows: usize, columns: usize) -> Result<Self> {
        check_length(data.len(), rows, columns)?;
        Ok(Self::host(data.as_mut_ptr() as u64, T::DTYPE, [rows, columns]))
    }

    /// A slice as a vector.
    pub fn vector<T: Element>(data: &'a mut [T]) -> Self {
        Self::host(data.as_mut_ptr() as u64, T::DTYPE, [data.len(), 1])
    }

    /// Bytes as a matrix of any element type, for example FP8.
    ///
    /// # Errors
    /// As [`TensorRef::bytes_as`].
    pub fn bytes_as(data: &'a mut [u8], dtype: DType, rows: usize, columns: usize) -> Result<Self> {
        check_length(data.len(), rows, columns.saturating_mul(dtype.size()))?;
        check_alignment(data.as_ptr() as u64, data.len(), dtype)?;
        Ok(Self::host(data.as_mut_ptr() as u64, dtype, [rows, columns]))
    }

    /// A view of memory that someone else answers for, such as a tensor on a GPU.
    ///
    /// # Errors
    /// As [`TensorRef::from_raw`].
    ///
    /// # Safety
    /// For as long as `'a`, and until all work that was enqueued with the view has run, every element must lie in memory that the
    /// processor of `space` can write (see [`TensorRef::from_raw`]), distinct elements must not overlap, and nothing else may read or write
    /// them.
    pub unsafe fn from_raw(
        address: u64,
        space: Space,
        dtype: DType,
        shape: [usize; 2],
        strides: [isize; 2],
    ) -> Result<Self> {
        let extent = Extent { address, dtype, shape, strides, home: Home::of_caller(space) };
        check_raw(&extent)?;
        Ok(Self { extent, memory: PhantomData })
    }

    fn host(address: u64, dtype: DType, shape: [usize; 2]) -> Self {
        let home = Home::of_caller(Space::Host);
        Self { extent: Extent::contiguous(address, dtype, shape, home), memory: PhantomData }
    }

    /// A contiguous view of memory of a buffer.
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw), and the address must be aligned. If the home names a buffer, nobody else's operations get the view:
    /// the promise need only cover work of that buffer.
    pub(crate) unsafe fn heap(address: u64, home: Home, dtype: DType, shape: [usize; 2]) -> Self {
        Self { extent: Extent::contiguous(address, dtype, shape, home), memory: PhantomData }
    }

    /// The same view, known to be of memory of a device.
    pub(crate) fn on_device(mut self, ordinal: i32) -> Self {
        self.extent.home.device = Some(ordinal);
        self
    }

    /// The elements as a slice to be written.
    ///
    /// # Errors
    /// As [`TensorRef::as_slice`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let n = self.as_ref().as_slice::<T>()?.len();
        if n == 0 {
            return Ok(&mut []);
        }
        // SAFETY: `as_slice` has checked the element type, that the CPU can use the memory and that there are no gaps; the view is an exclusive borrow
        // of n elements, itself borrowed exclusively, and any bit pattern is a T.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.extent.address as *mut T, n) })
    }

    /// Reads the tensor for as long as this is borrowed.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { extent: self.extent, memory: PhantomData }
    }

    /// A second view for as long as this one is borrowed.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { extent: self.extent, memory: PhantomData }
    }
}

/// Memory without elements needs no alignment: it is never touched.
fn check_alignment(address: u64, bytes: usize, dtype: DType) -> Result<()> {
    if bytes == 0 || address.is_multiple_of(dtype.size() as u64) {
        return Ok(());
    }
    let problem = format!("address {address:#x} is not a multiple of the {} bytes of {dtype}", dtype.size());
    Err(Error::Tensor { tensor: "view", problem })
}

fn check_raw(extent: &Extent) -> Result<()> {
    let [rows, columns] = extent.shape;
    let bytes = rows.checked_mul(columns).and_then(|n| n.checked_mul(extent.dtype.size()));
    check_alignment(extent.address, bytes.unwrap_or(usize::MAX), extent.dtype)?;
    let span = extent
        .span()
        .and_then(|(low, high)| high.checked_sub(low)?.checked_mul(extent.dtype.size() as isize));
    if bytes.is_none() || (span.is_none() && rows != 0 && columns != 0) {
        let got = format!("[{rows}, {columns}] with strides {:?}", extent.strides);
        return Err(Error::Shape {
            tensor: "view",
            got,
            expected: "offsets that fit into an address".into(),
        });
    }
    Ok(())
}

// SAFETY: a view is a borrow of bytes that are only read; sending it to another thread is sending a `&[u8]`.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a mutable view is an exclusive borrow of bytes, as `&mut [u8]`.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: a shared reference to the view can only read.
unsafe impl Sync for TensorMut<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_checked() {
        let data = [0f32; 12];
        let m = TensorRef::matrix(&data, 3, 4).unwrap();
        assert_eq!((m.shape(), m.strides(), m.row_bytes(), m.bytes()), ([3, 4], [4, 1], 16, 48));
        assert!(m.is_contiguous());
        assert!(matches!(TensorRef::matrix(&data, 4, 4), Err(Error::Shape { .. })));
        assert!(matches!(TensorRef::matrix(&data, usize::MAX, 2), Err(Error::Shape { .. })));
        assert_eq!(m.as_slice::<f32>().unwrap().len(), 12);
        assert!(matches!(m.as_slice::<i32>(), Err(Error::DType { .. })));
        assert_eq!(m.first_rows(2).shape(), [2, 4]);
    }

    #[test]
    fn strides_stay_inside() {
        let data: Vec<i32> = (0..12).collect();
        let columns = TensorRef::strided(&data, 4, 3, [1, 4]).unwrap();
        assert!(!columns.is_contiguous());
        assert!(matches!(columns.as_slice::<i32>(), Err(Error::Stride { .. })));
        // SAFETY: a view of a slice, indices in range.
        let last = unsafe { columns.element(3, 2).cast::<i32>().read() };
        assert_eq!(last, 11);
        for (rows, cols, strides) in
            [(4, 3, [1, 5]), (4, 3, [-1, 4]), (5, 3, [1, 4]), (2, 2, [isize::MAX, 1])]
        {
            assert!(TensorRef::strided(&data, rows, cols, strides).is_err(), "{strides:?}");
        }
        assert!(TensorRef::strided(&data, 0, 3, [100, 100]).is_ok());
        // Broadcast of one row.
        assert!(TensorRef::strided(&data, 100, 3, [0, 1]).is_ok());
    }

    #[test]
    fn bytes_as_fp8_and_misaligned_words() {
        let data = [0u8; 32];
        assert!(TensorRef::bytes_as(&data, DType::F8E4M3, 2, 16).is_ok());
        assert!(TensorRef::bytes_as(&data, DType::Bf16, 2, 16).is_err());
        let odd = &data[1..17];
        let even = &data[2..18];
        let both = [odd, even].map(|bytes| TensorRef::bytes_as(bytes, DType::Bf16, 1, 8).is_ok());
        assert_eq!(both.iter().filter(|&&ok| ok).count(), 1, "exactly one of two neighbours is aligned");
    }

    #[test]
    fn device_memory_is_not_read() {
        // SAFETY: the address is never used: only the refusal is tested.
        let view =
            unsafe { TensorRef::from_raw(0x1000, Space::Device, DType::U8, [1, 16], [16, 1]) }.unwrap();
        assert!(matches!(view.as_bytes(), Err(Error::Memory { .. })));
    }
}
