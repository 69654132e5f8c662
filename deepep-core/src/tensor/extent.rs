//! Where a tensor lies and how far it reaches.

use super::DType;
use crate::error::{Error, Result};

/// Which processor can use an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Space {
    /// The CPU: ordinary memory, and the heap of a buffer on the host backend.
    Host,
    /// The GPU: device memory, and host memory that is mapped for the device.
    Device,
}

impl Space {
    /// `host` or `device`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

/// Whose memory a view is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) space: Space,
    /// Ordinal of the device, where it is known.
    pub(crate) device: Option<i32>,
    /// Number of the buffer whose result, handle or combine input it is; `None` for what the caller answers for.
    pub(crate) buffer: Option<u64>,
}

impl Home {
    /// Memory that the caller answers for.
    pub(crate) const fn of_caller(space: Space) -> Self {
        Self { space, device: None, buffer: None }
    }
}

/// Address, element type and extent; what [`TensorRef`](super::TensorRef) and [`TensorMut`](super::TensorMut) have in common.
///
/// A vector of n elements has the shape `[n, 1]`. Strides are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub(super) address: u64,
    pub(super) dtype: DType,
    pub(super) shape: [usize; 2],
    pub(super) strides: [isize; 2],
    pub(super) home: Home,
}

impl Extent {
    /// Address of element `[0, 0]`.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.shape[1]
    }

    /// Distance from one row to the next and from one column to the next, in elements.
    pub fn strides(&self) -> [isize; 2] {
        self.strides
    }

    /// Which processor can use the address.
    pub fn space(&self) -> Space {
        self.home.space
    }

    /// Ordinal of the device whose memory it is, where that is known: of views of [`DeviceMemory`](crate::device::DeviceMemory), and of a
    /// buffer's results, handles and combine inputs on the CUDA backend.
    pub fn device(&self) -> Option<i32> {
        self.home.device
    }

    /// Number of the buffer whose result, handle or combine input this is a view of, as errors name it; `None` for memory that the caller answers for.
    ///
    /// Only that buffer's operations take the view: they are the ones that are ordered with what else happens to its memory, and that the
    /// memory outlives.
    pub fn buffer(&self) -> Option<u64> {
        self.home.buffer
    }

    /// Bytes of one row's elements.
    pub fn row_bytes(&self) -> usize {
        self.shape[1] * self.dtype.size()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.shape[0] * self.row_bytes()
    }

    /// Whether the elements lie row after row without gaps. A tensor without elements does.
    pub fn is_contiguous(&self) -> bool {
        let [rows, columns] = self.shape;
        rows == 0
            || columns == 0
            || ((columns == 1 || self.strides[1] == 1) && (rows == 1 || self.strides[0] == columns as isize))
    }

    pub(super) fn contiguous(address: u64, dtype: DType, shape: [usize; 2], home: Home) -> Self {
        Self { address, dtype, shape, strides: [shape[1] as isize, 1], home }
    }

    pub(crate) fn require_contiguous(&self, tensor: &'static str) -> Result<()> {
        if self.is_contiguous() {
            return Ok(());
        }
        Err(self.refuse_strides(tensor, "the rows must follow each other without gaps"))
    }

    /// The error of strides that a call can't take.
    pub(crate) fn refuse_strides(&self, tensor: &'static str, requirement: &'static str) -> Error {
        let (shape, strides) = (self.shape.to_vec(), self.strides.to_vec());
        Error::Stride { tensor, shape, strides, requirement }
    }

    pub(crate) fn require_shape(&self, tensor: &'static str, rows: usize, columns: usize) -> Result<()> {
        if self.shape == [rows, columns] {
            return Ok(());
        }
        let [got_rows, got_columns] = self.shape;
        let got = format!("[{got_rows}, {got_columns}]");
        Err(Error::Shape { tensor, got, expected: format!("[{rows}, {columns}]") })
    }

    pub(crate) fn require_dtype(
        &self,
        tensor: &'static str,
        accepted: &[DType],
        expected: &'static str,
    ) -> Result<()> {
        if accepted.contains(&self.dtype) {
            return Ok(());
        }
        Err(Error::DType { tensor, got: self.dtype, expected })
    }

    /// Offsets of the first byte and of the end of the last byte of all elements; `None` without elements.
    pub(crate) fn byte_span(&self) -> Option<(isize, isize)> {
        let size = self.dtype.size() as isize;
        let (low, high) = self.span()?;
        Some((low.checked_mul(size)?, high.checked_add(1)?.checked_mul(size)?))
    }

    /// Lowest and highest element offset, both included; `None` without elements or on overflow.
    pub(super) fn span(&self) -> Option<(isize, isize)> {
        let mut span = (0isize, 0isize);
        for (n, stride) in self.shape.into_iter().zip(self.strides) {
            let reach = isize::try_from(n.checked_sub(1)?).ok()?.checked_mul(stride)?;
            span = (span.0.checked_add(reach.min(0))?, span.1.checked_add(reach.max(0))?);
        }
        Some(span)
    }
}
