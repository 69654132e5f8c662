//! Tensors where a backend's operations use them: in a vector, or on a device.

use cuda_vmm::Device;
use deepep_core::device::DeviceMemory;
use deepep_core::tensor::{DType, Element, TensorMut, TensorRef};
use deepep_core::{BackendKind, Collectives};

/// A contiguous tensor of one type that owns its memory.
pub enum Tensor {
    /// On the host backend. Words, so that every element type is aligned.
    Host(Vec<u64>, usize),
    /// On a device: memory and bytes.
    Device(DeviceMemory, usize),
}

impl Tensor {
    /// A tensor of these elements, where the collectives can use it.
    #[must_use]
    pub fn of<T: Element>(collectives: &Collectives, values: &[T]) -> Self {
        let bytes = TensorRef::vector(values).as_bytes().expect("a slice is contiguous").to_vec();
        match collectives.backend() {
            BackendKind::Cuda => Self::on_device(collectives.device(), &bytes),
            _ => {
                let mut words = vec![0; bytes.len().div_ceil(8)];
                for (word, part) in words.iter_mut().zip(bytes.chunks(8)) {
                    let mut eight = [0; 8];
                    eight[..part.len()].copy_from_slice(part);
                    *word = u64::from_ne_bytes(eight);
                }
                Self::Host(words, bytes.len())
            }
        }
    }

    fn on_device(device: &Device, bytes: &[u8]) -> Self {
        let memory = DeviceMemory::new(device, bytes.len()).expect("device memory");
        if !bytes.is_empty() {
            memory.write(0, bytes).expect("a copy to the device");
        }
        Self::Device(memory, bytes.len())
    }

    /// The tensor as a matrix.
    ///
    /// # Safety
    /// Whatever is enqueued with it has run before the tensor is written or dropped.
    #[must_use]
    pub unsafe fn view(&self, dtype: DType, rows: usize, columns: usize) -> TensorRef<'_> {
        match self {
            Self::Host(words, bytes) => {
                TensorRef::bytes_as(&u8s(words)[..*bytes], dtype, rows, columns).expect("a view")
            }
            // SAFETY: the caller's promise.
            Self::Device(memory, _) => unsafe { memory.view(0, dtype, [rows, columns]) }.expect("a view"),
        }
    }

    /// The tensor as a matrix to be written.
    ///
    /// # Safety
    /// Whatever is enqueued with it has run before the tensor is used or dropped.
    #[must_use]
    pub unsafe fn view_mut(&mut self, dtype: DType, rows: usize, columns: usize) -> TensorMut<'_> {
        match self {
            Self::Host(words, bytes) => {
                let all = &mut u8s_mut(words)[..*bytes];
                TensorMut::bytes_as(all, dtype, rows, columns).expect("a view")
            }
            // SAFETY: the caller's promise.
            Self::Device(memory, _) => unsafe { memory.view_mut(0, dtype, [rows, columns]) }.expect("a view"),
        }
    }

    /// Its elements. What writes it has run.
    #[must_use]
    pub fn read<T: Element>(&self) -> Vec<T> {
        let bytes = match self {
            Self::Host(words, bytes) => u8s(words)[..*bytes].to_vec(),
            Self::Device(memory, bytes) => {
                let mut out = vec![0; *bytes];
                if !out.is_empty() {
                    memory.read(0, &mut out).expect("a copy from the device");
                }
                out
            }
        };
        elements(&bytes)
    }
}

/// Bytes as elements, wherever they lie.
#[must_use]
pub fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    let size = size_of::<T>();
    assert_eq!(bytes.len() % size, 0);
    // SAFETY: every chunk has the size of an element, and any bit pattern is a valid one (Element's promise).
    bytes.chunks_exact(size).map(|one| unsafe { one.as_ptr().cast::<T>().read_unaligned() }).collect()
}

fn u8s(words: &[u64]) -> &[u8] {
    // SAFETY: the same memory; bytes have no alignment and no invalid values.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

fn u8s_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: as above, borrowed exclusively; any bytes make a word.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
