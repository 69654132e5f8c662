//! Checked access to shared memory: cells that several processes use, and tables and rows whose turn the protocol decides.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::error::{Error, Result};
use crate::symmetric::Heap;
use crate::tensor::{Extent, Space};

/// One rank's range of the heap.
#[derive(Clone, Copy)]
pub(super) struct Area<'a> {
    base: *mut u8,
    bytes: usize,
    heap: PhantomData<&'a Heap>,
}

/// A value that may be read from memory another process wrote: any bits are valid.
pub(super) trait Plain: Copy {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for f32 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for [u32; 2] {}

impl<'a> Area<'a> {
    /// The range of `rank`.
    pub(super) fn new(heap: &'a Heap, rank: usize) -> Result<Self> {
        if heap.space() != Space::Host {
            return Err(Error::invalid("backend", "host", "the heap is not memory of the CPU"));
        }
        let base = heap.address(rank, 0)? as *mut u8;
        Ok(Self { base, bytes: heap.bytes(), heap: PhantomData })
    }

    /// Address of `len` bytes that lie inside the range and start at a multiple of `align`.
    fn span(&self, offset: usize, len: usize, align: usize) -> Result<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        if !inside || !offset.is_multiple_of(align) {
            let problem =
                format!("{len} bytes at offset {offset} are outside of the heap's {} bytes", self.bytes);
            return Err(Error::protocol("the symmetric heap", problem));
        }
        Ok(self.base.wrapping_add(offset))
    }

    pub(super) fn cell32(&self, offset: usize) -> Result<&'a AtomicU32> {
        let cell = self.span(offset, 4, 4)?;
        // SAFETY: inside the range and aligned (checked; the base is aligned to 256). The heap outlives 'a, and every process uses
        // this cell through atomics only.
        Ok(unsafe { AtomicU32::from_ptr(cell.cast()) })
    }

    pub(super) fn cell64(&self, offset: usize) -> Result<&'a AtomicU64> {
        let cell = self.span(offset, 8, 8)?;
        // SAFETY: as in `cell32`.
        Ok(unsafe { AtomicU64::from_ptr(cell.cast()) })
    }

    pub(super) fn table<T: Plain>(&self, offset: usize, len: usize) -> Result<Table<'a, T>> {
        let bytes = len.saturating_mul(size_of::<T>());
        let start = self.span(offset, bytes, align_of::<T>())?.cast();
        Ok(Table { start, len, memory: PhantomData })
    }

    /// `len` rows of `row_bytes` bytes.
    pub(super) fn rows(&self, offset: usize, len: usize, row_bytes: usize) -> Result<Rows<'a>> {
        let start = self.span(offset, len.saturating_mul(row_bytes), 1)?;
        Ok(Rows { start, len, row_bytes, memory: PhantomData })
    }
}

/// Elements of which only one process is the writer at a time, and nobody the reader meanwhile: the protocol's cells, read with acquire
/// and written with release, say whose turn it is.
#[derive(Clone, Copy)]
pub(super) struct Table<'a, T> {
    start: *mut T,
    len: usize,
    memory: PhantomData<&'a Heap>,
}

fn out_of_range(what: &str, index: usize, len: usize) -> Error {
    Error::protocol("the symmetric heap", format!("{what} {index} of {len}: a rank has written nonsense"))
}

impl<'a, T: Plain> Table<'a, T> {
    /// No elements.
    pub(super) fn none() -> Self {
        Self { start: std::ptr::null_mut(), len: 0, memory: PhantomData }
    }

    /// The elements of a contiguous tensor.
    pub(super) fn of(tensor: &Extent) -> Self {
        let len = tensor.bytes() / size_of::<T>();
        Self { start: tensor.address() as *mut T, len, memory: PhantomData }
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Result<T> {
        if index >= self.len {
            return Err(out_of_range("entry", index, self.len));
        }
        // SAFETY: inside the table (checked when it was made, and here), aligned, and any bits are a T. By the protocol nobody writes
        // it now.
        Ok(unsafe { self.start.add(index).read() })
    }

    #[inline]
    pub(super) fn set(&self, index: usize, value: T) -> Result<()> {
        if index >= self.len {
            return Err(out_of_range("entry", index, self.len));
        }
        // SAFETY: as in `get`; by the protocol nobody else uses it now.
        unsafe { self.start.add(index).write(value) };
        Ok(())
    }
}

/// Rows of bytes, under the same rule as [`Table`].
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    start: *mut u8,
    len: usize,
    row_bytes: usize,
    memory: PhantomData<&'a Heap>,
}

impl<'a> Rows<'a> {
    /// The rows of a contiguous tensor.
    pub(super) fn of(tensor: &Extent) -> Self {
        Self {
            start: tensor.address() as *mut u8,
            len: tensor.rows(),
            row_bytes: tensor.row_bytes(),
            memory: PhantomData,
        }
    }

    #[inline]
    pub(super) fn at(&self, index: usize) -> Result<*mut u8> {
        if index >= self.len {
            return Err(out_of_range("row", index, self.len));
        }
        Ok(self.start.wrapping_add(index * self.row_bytes))
    }

    /// Copies one row of another table of the same row size.
    #[inline]
    pub(super) fn copy_from(&self, index: usize, from: &Rows<'_>, row: usize) -> Result<()> {
        let (to, from, bytes) = (self.at(index)?, from.at(row)?, self.row_bytes.min(from.row_bytes));
        // SAFETY: both rows are inside their tables (checked). They may be the same row, hence `copy`. By the protocol nobody writes
        // the source, and nobody else uses the destination, now.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }

    pub(super) fn zero(&self, index: usize) -> Result<()> {
        let to = self.at(index)?;
        // SAFETY: inside the table (checked); by the protocol nobody else uses it now.
        unsafe { to.write_bytes(0, self.row_bytes) };
        Ok(())
    }

    /// A row as BF16 bits, to read.
    pub(super) fn read(&self, index: usize) -> Result<&'a [u16]> {
        let row = self.at(index)?;
        debug_assert!(row.cast::<u16>().is_aligned());
        // SAFETY: inside the table (checked), aligned (rows start at multiples of 2: the heap's regions do, and tensors of BF16 are
        // checked to); by the protocol nobody writes it before this operation ends.
        Ok(unsafe { std::slice::from_raw_parts(row.cast(), self.row_bytes / 2) })
    }
}
