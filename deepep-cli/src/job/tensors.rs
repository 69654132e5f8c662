//! Tensors where a buffer's backend can use them: ordinary memory, or memory of the rank's GPU.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use deepep_core::device::{self, DeviceMemory};
use deepep_core::tensor::{DType, TensorMut, TensorRef};
use deepep_core::{BackendKind, ElasticBuffer, Result};

/// Tensors start at multiples of this.
const ALIGNMENT: usize = 256;
/// Device memory is taken in pieces of at least this size.
const PIECE: usize = 64 << 20;

/// Memory for the tensors of one rank. It is used again after [`reset`](Self::reset), and given back when dropped; nothing that was enqueued may
/// use it any more at either moment.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pieces: RefCell<Vec<Rc<DeviceMemory>>>,
    /// Bytes of the last piece that are taken.
    used: Cell<usize>,
}

impl Memory {
    /// All memory is free again: the tensors that were made are gone.
    pub(super) fn reset(&self) {
        let mut pieces = self.pieces.borrow_mut();
        // The last piece is the largest.
        if let Some(last) = pieces.pop() {
            pieces.clear();
            pieces.push(last);
        }
        self.used.set(0);
    }

    /// Gives up the memory without giving it back: something may still use it.
    pub(super) fn abandon(&self) {
        std::mem::forget(self.pieces.take());
    }

    fn take(&self, buffer: &ElasticBuffer, bytes: usize) -> Result<(Rc<DeviceMemory>, usize)> {
        let mut pieces = self.pieces.borrow_mut();
        let fits = pieces.last().is_some_and(|last| self.used.get() + bytes <= last.bytes());
        if !fits {
            let before = pieces.last().map_or(0, |last| last.bytes());
            let size = bytes.max(PIECE).max(2 * before);
            pieces.push(Rc::new(DeviceMemory::new(buffer.device(), size)?));
            self.used.set(0);
        }
        let (offset, piece) = (self.used.get(), &pieces[pieces.len() - 1]);
        self.used.set((offset + bytes).next_multiple_of(ALIGNMENT));
        Ok((piece.clone(), offset))
    }

    /// A contiguous matrix that starts with these bytes; what follows them is undefined.
    pub(super) fn matrix(
        &self,
        buffer: &ElasticBuffer,
        bytes: &[u8],
        dtype: DType,
        shape: [usize; 2],
    ) -> Result<Tensor> {
        self.strided(buffer, bytes, dtype, shape, [shape[1] as isize, 1])
    }

    /// A matrix with strides that fills its memory from the first byte to the last, or a contiguous one.
    pub(super) fn strided(
        &self,
        buffer: &ElasticBuffer,
        bytes: &[u8],
        dtype: DType,
        shape: [usize; 2],
        strides: [isize; 2],
    ) -> Result<Tensor> {
        let size = (shape[0] * shape[1] * dtype.size()).max(bytes.len());
        let home = if buffer.backend() == BackendKind::Cuda {
            let (memory, offset) = self.take(buffer, size)?;
            if !bytes.is_empty() {
                memory.write(offset, bytes)?;
            }
            Home::Device(memory, offset)
        } else {
            let mut words = vec![0_u64; size.div_ceil(8)];
            bytes_of_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
            Home::Host(words)
        };
        Ok(Tensor { home, dtype, shape, strides })
    }
}

#[derive(Debug)]
enum Home {
    /// Aligned for every element type.
    Host(Vec<u64>),
    Device(Rc<DeviceMemory>, usize),
}

/// A tensor of one rank.
#[derive(Debug)]
pub(super) struct Tensor {
    home: Home,
    dtype: DType,
    shape: [usize; 2],
    strides: [isize; 2],
}

impl Tensor {
    /// A view for an operation.
    ///
    /// # Safety
    /// Until the operation has run, the tensor is not written, and its [`Memory`] neither reset nor dropped.
    pub(super) unsafe fn view(&self) -> Result<TensorRef<'_>> {
        match &self.home {
            // SAFETY: the caller's promise.
            Home::Device(memory, offset) => unsafe {
                memory.strided(*offset, self.dtype, self.shape, self.strides)
            },
            Home::Host(words) => {
                let address = words.as_ptr() as u64;
                // SAFETY: the words hold every element (their number was computed from the shape, and strides permute it), aligned, and are
                // borrowed.
                unsafe {
                    TensorRef::from_raw(
                        address,
                        deepep_core::tensor::Space::Host,
                        self.dtype,
                        self.shape,
                        self.strides,
                    )
                }
            }
        }
    }

    /// A contiguous view for an operation that writes.
    ///
    /// # Safety
    /// Until the operation has run, the tensor is not used otherwise, and its [`Memory`] neither reset nor dropped.
    pub(super) unsafe fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        let (dtype, [rows, columns]) = (self.dtype, self.shape);
        match &mut self.home {
            // SAFETY: the caller's promise.
            Home::Device(memory, offset) => unsafe { memory.view_mut(*offset, dtype, self.shape) },
            Home::Host(words) => {
                let size = rows * columns * dtype.size();
                TensorMut::bytes_as(&mut bytes_of_mut(words)[..size], dtype, rows, columns)
            }
        }
    }

    /// The elements' bytes, once what writes them has run.
    pub(super) fn read(&self, buffer: &ElasticBuffer) -> Result<Vec<u8>> {
        // SAFETY: read here, before anything else happens.
        device::read(buffer.device(), unsafe { self.view()? })
    }
}

fn bytes_of_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: every byte of the words is initialised, any byte is valid in a word, and the length is the same number of bytes.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len() * 8) }
}

/// Bytes of numbers.
pub(super) fn bytes<T: Number>(numbers: &[T]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.bytes()).collect()
}

/// Numbers of bytes.
pub(super) fn numbers<T: Number>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::of).collect()
}

/// A number that tensors hold.
pub(super) trait Number: Copy {
    type Bytes: IntoIterator<Item = u8>;
    fn bytes(self) -> Self::Bytes;
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Bytes = [u8; size_of::<$type>()];
            fn bytes(self) -> Self::Bytes {
                self.to_ne_bytes()
            }
            fn of(bytes: &[u8]) -> Self {
                let mut whole = [0; size_of::<$type>()];
                whole.copy_from_slice(bytes);
                Self::from_ne_bytes(whole)
            }
        }
    )*};
}
number!(i32, i64, u32, f32, half::bf16);

#[cfg(test)]
mod tests {
    use super::*;
    use deepep_core::bootstrap::thread_group;
    use std::time::Duration;

    #[test]
    fn tensors_on_the_host() {
        let bootstrap = thread_group(1, Duration::from_secs(10)).unwrap().remove(0);
        let builder = ElasticBuffer::builder().max_tokens_per_rank(1).experts(1).topk(1).hidden(8);
        let buffer = builder.backend(BackendKind::Host).build(bootstrap).unwrap();
        let memory = Memory::default();
        let data = bytes(&[1_i32, 2, 3, 4, 5, 6]);
        let columns = memory.strided(&buffer, &data, DType::I32, [2, 3], [1, 2]).unwrap();
        assert_eq!(numbers::<i32>(&columns.read(&buffer).unwrap()), [1, 3, 5, 2, 4, 6]);
        let longer = memory.matrix(&buffer, &data, DType::I32, [4, 3]).unwrap();
        assert_eq!(longer.read(&buffer).unwrap().len(), 48);
        assert_eq!(longer.read(&buffer).unwrap()[..24], data);
        let mut empty = memory.matrix(&buffer, &[], DType::Bf16, [0, 8]).unwrap();
        // SAFETY: no operation gets the view.
        assert_eq!(unsafe { empty.view_mut() }.unwrap().bytes(), 0);
        memory.reset();
    }
}
