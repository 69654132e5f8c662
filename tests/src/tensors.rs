//! Tensors of a test's ranks, on either backend.

use deepep_cli::tensors::{Memory, Number, Owner, Tensor, numbers};
use deepep_core::device;
use deepep_core::tensor::{DType, TensorMut, TensorRef};

/// Makes tensors for one buffer. Keeps their memory, so that they are made before the buffer's operations and dropped after them.
#[derive(Debug, Default)]
pub struct Tensors {
    memory: Memory,
}

/// A tensor of a test. Its views are safe here because tests keep two rules: they wait for an operation before they touch what it was
/// given, and they synchronise the buffer after an operation that failed.
#[derive(Debug)]
pub struct Given(Tensor);

impl Tensors {
    /// A matrix of numbers.
    ///
    /// # Panics
    /// If the device has no memory for it.
    #[must_use]
    pub fn of<T: Number>(&self, owner: &impl Owner, numbers: &[T], rows: usize, columns: usize) -> Given {
        Given(self.memory.of(owner, numbers, rows, columns).expect("memory for a tensor"))
    }
}

impl Given {
    /// The whole tensor.
    ///
    /// # Panics
    /// If its shape is no shape.
    #[must_use]
    pub fn view(&self) -> TensorRef<'_> {
        // SAFETY: the rules above.
        unsafe { self.0.view() }.expect("a view of a whole tensor")
    }

    /// The start of the tensor's memory with another element type and shape, row after row.
    ///
    /// # Panics
    /// If it reaches beyond the memory.
    #[must_use]
    pub fn part(&self, dtype: DType, rows: usize, columns: usize) -> TensorRef<'_> {
        self.strided(dtype, [rows, columns], [columns as isize, 1])
    }

    /// The start of the tensor's memory with another element type, shape and strides.
    ///
    /// # Panics
    /// As [`part`](Self::part).
    #[must_use]
    pub fn strided(&self, dtype: DType, shape: [usize; 2], strides: [isize; 2]) -> TensorRef<'_> {
        // SAFETY: the rules above.
        unsafe { self.0.viewed_as(dtype, shape, strides) }.expect("a view inside the tensor")
    }

    /// The whole tensor, to be written.
    ///
    /// # Panics
    /// As [`view`](Self::view).
    #[must_use]
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        // SAFETY: the rules above.
        unsafe { self.0.view_mut() }.expect("a view of a whole tensor")
    }

    /// The start of the tensor's memory with another element type and shape, to be written.
    ///
    /// # Panics
    /// As [`part`](Self::part).
    #[must_use]
    pub fn part_mut(&mut self, dtype: DType, rows: usize, columns: usize) -> TensorMut<'_> {
        // SAFETY: the rules above.
        unsafe { self.0.viewed_mut_as(dtype, [rows, columns]) }.expect("a view inside the tensor")
    }

    /// Writes numbers at the start.
    ///
    /// # Panics
    /// If they don't fit.
    pub fn write<T: Number>(&mut self, numbers: &[T]) {
        self.0.write(&deepep_cli::tensors::bytes(numbers)).expect("writing a tensor");
    }

    /// The numbers, once what writes them has run.
    ///
    /// # Panics
    /// If the device has failed.
    #[must_use]
    pub fn read<T: Number>(&self, owner: &impl Owner) -> Vec<T> {
        read(owner, self.view())
    }
}

/// The numbers of any view, row after row, once what writes them has run.
///
/// # Panics
/// If the device has failed.
#[must_use]
pub fn read<T: Number>(owner: &impl Owner, view: TensorRef<'_>) -> Vec<T> {
    numbers(&device::read(owner.device(), view).expect("reading a view"))
}
