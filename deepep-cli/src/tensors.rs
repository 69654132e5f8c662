//! Tensors where a buffer's backend can use them: ordinary memory, or memory of the rank's GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_vmm::Device;
use deepep_core::device::{self, DeviceMemory};
use deepep_core::tensor::{DType, Space, TensorMut, TensorRef};
use deepep_core::{BackendKind, Collectives, ElasticBuffer, Error, Result};

/// Tensors start at multiples of this.
const ALIGNMENT: usize = 256;
/// Device memory is taken in pieces of at least this size.
const PIECE: usize = 64 << 20;

/// Whose operations use tensors.
pub trait Owner {
    /// Which processors run them.
    fn backend(&self) -> BackendKind;
    /// The device of its rank.
    fn device(&self) -> &Device;
}

macro_rules! owner {
    ($($type:ty),*) => {$(
        impl Owner for $type {
            fn backend(&self) -> BackendKind {
                self.backend()
            }
            fn device(&self) -> &Device {
                self.device()
            }
        }
    )*};
}
owner!(ElasticBuffer, Collectives);

/// Memory for the tensors of one rank. It is used again after [`reset`](Self::reset), and given back when it and its tensors are dropped;
/// nothing that was enqueued may use it any more at either moment.
#[derive(Debug, Default)]
pub struct Memory {
    pieces: Mutex<Pieces>,
}

#[derive(Debug, Default)]
struct Pieces {
    all: Vec<Arc<DeviceMemory>>,
    /// Bytes of the last piece that are taken.
    used: usize,
}

impl Memory {
    /// All memory is free again: the tensors that were made are gone. What was enqueued with them has run: they promised to outlive that, and
    /// so does this.
    ///
    /// # Errors
    /// [`Tensor`](Error::Tensor) if there are tensors on a device left, which the next ones would overwrite; then nothing has changed.
    pub fn reset(&self) -> Result<()> {
        let mut pieces = self.lock();
        let left: usize = pieces.all.iter().map(|piece| Arc::strong_count(piece) - 1).sum();
        if left > 0 {
            let problem = format!("{left} tensors still lie in it; drop them first");
            return Err(Error::Tensor { tensor: "memory", problem });
        }
        // The last piece is the largest.
        if let Some(last) = pieces.all.pop() {
            pieces.all.clear();
            pieces.all.push(last);
        }
        pieces.used = 0;
        Ok(())
    }

    /// Gives up the memory without giving it back: something may still use it.
    pub fn abandon(&self) {
        std::mem::forget(std::mem::take(&mut *self.lock()));
    }

    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, owner: &impl Owner, bytes: usize) -> Result<(Arc<DeviceMemory>, usize)> {
        let mut pieces = self.lock();
        let ordinal = owner.device().ordinal();
        // Several owners, on several devices, may share the memory.
        let fits = pieces
            .all
            .last()
            .is_some_and(|last| last.device().ordinal() == ordinal && pieces.used + bytes <= last.bytes());
        if !fits {
            let before = pieces.all.last().map_or(0, |last| last.bytes());
            let size = bytes.max(PIECE).max(2 * before);
            pieces.all.push(Arc::new(DeviceMemory::new(owner.device(), size)?));
            pieces.used = 0;
        }
        let (offset, piece) = (pieces.used, pieces.all[pieces.all.len() - 1].clone());
        pieces.used = (offset + bytes).next_multiple_of(ALIGNMENT);
        Ok((piece, offset))
    }

    /// A contiguous matrix that starts with these bytes; what follows them is undefined.
    ///
    /// # Errors
    /// Those of [`DeviceMemory`].
    pub fn matrix(
        &self,
        owner: &impl Owner,
        bytes: &[u8],
        dtype: DType,
        shape: [usize; 2],
    ) -> Result<Tensor> {
        let size = (shape[0] * shape[1] * dtype.size()).max(bytes.len());
        let home = if owner.backend() == BackendKind::Cuda {
            let (memory, offset) = self.take(owner, size)?;
            if !bytes.is_empty() {
                memory.write(offset, bytes)?;
            }
            Home::Device(memory, offset)
        } else {
            let mut words = vec![0_u64; size.div_ceil(8)];
            bytes_of_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
            Home::Host(words)
        };
        Ok(Tensor { home, size, dtype, shape })
    }

    /// A contiguous matrix of these numbers.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn of<T: Number>(
        &self,
        owner: &impl Owner,
        numbers: &[T],
        rows: usize,
        columns: usize,
    ) -> Result<Tensor> {
        self.matrix(owner, &bytes(numbers), T::DTYPE, [rows, columns])
    }
}

#[derive(Debug)]
enum Home {
    /// Aligned for every element type.
    Host(Vec<u64>),
    Device(Arc<DeviceMemory>, usize),
}

/// A tensor of one rank.
#[derive(Debug)]
pub struct Tensor {
    home: Home,
    size: usize,
    dtype: DType,
    shape: [usize; 2],
}

impl Tensor {
    /// A view for an operation.
    ///
    /// # Errors
    /// Those of [`DeviceMemory::strided`].
    ///
    /// # Safety
    /// Until the operation has run, the tensor is neither written nor dropped, and its [`Memory`] not dropped.
    pub unsafe fn view(&self) -> Result<TensorRef<'_>> {
        let [_, columns] = self.shape;
        // SAFETY: the caller's promise.
        unsafe { self.viewed_as(self.dtype, self.shape, [columns as isize, 1]) }
    }

    /// As [`view`](Self::view), of the same memory with another element type, shape and strides (in elements, not negative).
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) if an element would lie outside of the tensor's memory.
    ///
    /// # Safety
    /// As [`view`](Self::view).
    pub unsafe fn viewed_as(
        &self,
        dtype: DType,
        shape: [usize; 2],
        strides: [isize; 2],
    ) -> Result<TensorRef<'_>> {
        let reach = shape.into_iter().zip(strides).try_fold(0_usize, |reach, (n, stride)| {
            let step = usize::try_from(stride).ok()?;
            reach.checked_add(n.saturating_sub(1).checked_mul(step)?)
        });
        let end = reach.and_then(|reach| reach.checked_add(1)?.checked_mul(dtype.size()));
        if !shape.contains(&0) && end.is_none_or(|end| end > self.size) {
            let got = format!("{shape:?} of {dtype} with strides {strides:?}");
            return Err(Error::Shape {
                tensor: "view",
                got,
                expected: format!("inside {} bytes", self.size),
            });
        }
        match &self.home {
            // SAFETY: the caller's promise.
            Home::Device(memory, offset) => unsafe { memory.strided(*offset, dtype, shape, strides) },
            // SAFETY: the words hold every element (checked above), are aligned, and are borrowed; the rest is the caller's promise.
            Home::Host(words) => unsafe {
                TensorRef::from_raw(words.as_ptr() as u64, Space::Host, dtype, shape, strides)
            },
        }
    }

    /// A contiguous view for an operation that writes.
    ///
    /// # Errors
    /// Those of [`DeviceMemory::view_mut`].
    ///
    /// # Safety
    /// Until the operation has run, the tensor is neither used otherwise nor dropped, and its [`Memory`] not dropped.
    pub unsafe fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        // SAFETY: the caller's promise.
        unsafe { self.viewed_mut_as(self.dtype, self.shape) }
    }

    /// As [`view_mut`](Self::view_mut), of the same memory with another element type and shape.
    ///
    /// # Errors
    /// As [`viewed_as`](Self::viewed_as).
    ///
    /// # Safety
    /// As [`view_mut`](Self::view_mut).
    pub unsafe fn viewed_mut_as(&mut self, dtype: DType, shape: [usize; 2]) -> Result<TensorMut<'_>> {
        let [rows, columns] = shape;
        let size = rows.saturating_mul(columns).saturating_mul(dtype.size());
        if size > self.size {
            let (got, expected) = (format!("{shape:?} of {dtype}"), format!("inside {} bytes", self.size));
            return Err(Error::Shape { tensor: "view", got, expected });
        }
        match &mut self.home {
            // SAFETY: the caller's promise.
            Home::Device(memory, offset) => unsafe { memory.view_mut(*offset, dtype, shape) },
            Home::Host(words) => TensorMut::bytes_as(&mut bytes_of_mut(words)[..size], dtype, rows, columns),
        }
    }

    /// Writes bytes at its start. Nothing that was enqueued may use the tensor any more.
    ///
    /// # Errors
    /// Those of [`DeviceMemory::write`]; [`Shape`](Error::Shape) if they don't fit.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.size {
            let (got, expected) = (format!("{} bytes", bytes.len()), format!("at most {} bytes", self.size));
            return Err(Error::Shape { tensor: "bytes", got, expected });
        }
        match &mut self.home {
            Home::Device(memory, offset) => memory.write(*offset, bytes)?,
            Home::Host(words) => bytes_of_mut(words)[..bytes.len()].copy_from_slice(bytes),
        }
        Ok(())
    }

    /// The elements' bytes, once what writes them has run.
    ///
    /// # Errors
    /// Those of [`device::read`].
    pub fn read(&self, owner: &impl Owner) -> Result<Vec<u8>> {
        // SAFETY: read here, before anything else happens.
        device::read(owner.device(), unsafe { self.view()? })
    }
}

fn bytes_of_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: every byte of the words is initialised, any byte is valid in a word, and the length is the same number of bytes.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len() * 8) }
}

/// Bytes of numbers.
pub fn bytes<T: Number>(numbers: &[T]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.bytes()).collect()
}

/// Numbers of bytes.
pub fn numbers<T: Number>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::of).collect()
}

/// A number that tensors hold.
pub trait Number: Copy {
    /// Its element type.
    const DTYPE: DType;
    /// Its bytes.
    type Bytes: IntoIterator<Item = u8>;
    /// Its bytes in memory.
    fn bytes(self) -> Self::Bytes;
    /// The number with these bytes, as many as it has.
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! number {
    ($($type:ty => $dtype:ident),*) => {$(
        impl Number for $type {
            const DTYPE: DType = DType::$dtype;
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
// Words of four bytes without a type of their own travel as I32.
number!(u8 => U8, i32 => I32, u32 => I32, i64 => I64, f32 => F32, half::bf16 => Bf16, half::f16 => F16);

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
        let mut numbered = memory.of(&buffer, &[1_i32, 2, 3, 4, 5, 6], 3, 2).unwrap();
        // SAFETY: no operation gets the views.
        unsafe {
            let columns = numbered.viewed_as(DType::I32, [2, 3], [1, 2]).unwrap();
            let columns: Vec<i32> = numbers(&device::read(buffer.device(), columns).unwrap());
            assert_eq!(columns, [1, 3, 5, 2, 4, 6]);
            assert!(matches!(numbered.viewed_as(DType::I32, [2, 3], [2, 2]), Err(Error::Shape { .. })));
            assert!(matches!(numbered.viewed_as(DType::I32, [2, 3], [-1, 2]), Err(Error::Shape { .. })));
            assert!(matches!(numbered.viewed_mut_as(DType::I64, [2, 2]), Err(Error::Shape { .. })));
            assert_eq!(numbered.viewed_mut_as(DType::I64, [3, 1]).unwrap().bytes(), 24);
        }
        numbered.write(&[7, 0, 0, 0]).unwrap();
        assert_eq!(numbers::<i32>(&numbered.read(&buffer).unwrap()), [7, 2, 3, 4, 5, 6]);
        assert!(numbered.write(&[0; 25]).is_err());
        let longer = memory.matrix(&buffer, &bytes(&[9_i64]), DType::I64, [4, 3]).unwrap();
        assert_eq!(longer.read(&buffer).unwrap().len(), 96);
        assert_eq!(longer.read(&buffer).unwrap()[..8], bytes(&[9_i64]));
        let mut empty = memory.matrix(&buffer, &[], DType::Bf16, [0, 8]).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { empty.view_mut() }.unwrap().bytes(), 0);
        memory.reset().unwrap();
    }

    /// On a driver in software, which does what a real one does with memory.
    struct OnDevice(Device);

    impl Owner for OnDevice {
        fn backend(&self) -> BackendKind {
            BackendKind::Cuda
        }
        fn device(&self) -> &Device {
            &self.0
        }
    }

    #[test]
    fn tensors_on_devices() {
        let emulator = cuda_vmm_emu::Emulator::new(cuda_vmm_emu::Config::h200x2()).unwrap();
        {
            let cuda = cuda_vmm::Cuda::with_driver(emulator.driver()).unwrap();
            let [one, two] = [0, 1].map(|ordinal| OnDevice(cuda.device(ordinal).unwrap()));
            let memory = Memory::default();
            let first = memory.of(&one, &[1_i32; 8], 2, 4).unwrap();
            let second = memory.of(&two, &[2_i32; 8], 2, 4).unwrap();
            let third = memory.of(&one, &[3_i32; 8], 2, 4).unwrap();
            // SAFETY: no operation gets the views.
            let devices = [&first, &second, &third].map(|tensor| unsafe { tensor.view() }.unwrap().device());
            assert_eq!(devices, [Some(0), Some(1), Some(0)]);
            let refused = memory.reset().unwrap_err();
            assert!(refused.to_string().contains("3 tensors"), "{refused}");
            for (owner, tensor, number) in [(&one, &first, 1), (&two, &second, 2), (&one, &third, 3)] {
                assert_eq!(numbers::<i32>(&tensor.read(owner).unwrap()), [number; 8]);
            }
            drop((first, second, third));
            memory.reset().unwrap();
            // What was kept is used again.
            let again = memory.of(&one, &[4_i32; 8], 2, 4).unwrap();
            assert_eq!(memory.lock().all.len(), 1);
            assert_eq!(numbers::<i32>(&again.read(&one).unwrap()), [4; 8]);
        }
        emulator.assert_empty();
    }
}
