//! Memory where a backend's processor can use it: ordinary memory, or a GPU's.

use cuda_vmm::Context;
use deepep_core::device::DeviceMemory;
use deepep_core::tensor::{DType, Space, TensorMut, TensorRef};
use deepep_core::{BackendKind, ElasticBuffer, Error, Result};

/// Where tensors lie.
#[derive(Clone, Debug)]
pub enum Place {
    /// In the memory of the process.
    Host,
    /// On a GPU.
    Device(Context),
}

impl Place {
    /// Where a buffer's operations take and leave tensors.
    ///
    /// # Errors
    /// [`Error::Vmm`] if the GPU's context can't be had.
    pub fn of(buffer: &ElasticBuffer) -> Result<Self> {
        Ok(match buffer.backend() {
            BackendKind::Cuda => Self::Device(buffer.device().primary_context()?),
            _ => Self::Host,
        })
    }

    /// `bytes` bytes, 0 at first.
    ///
    /// # Errors
    /// [`Error::Vmm`] if the GPU has no room.
    pub fn block(&self, bytes: usize) -> Result<Block> {
        let memory = match self {
            Self::Host => Storage::Host(vec![0; bytes.div_ceil(8)]),
            Self::Device(context) => {
                let memory = DeviceMemory::new(context.device(), bytes)?;
                memory.fill(0, bytes, 0)?;
                Storage::Device(memory)
            }
        };
        Ok(Block { storage: memory, bytes })
    }

    /// A block with these contents.
    ///
    /// # Errors
    /// As [`block`](Self::block).
    pub fn block_of(&self, contents: &[u8]) -> Result<Block> {
        let mut block = self.block(contents.len())?;
        block.write(contents)?;
        Ok(block)
    }
}

#[derive(Debug)]
enum Storage {
    /// Words, for alignment.
    Host(Vec<u64>),
    Device(DeviceMemory),
}

/// A piece of memory for tensors. It is dropped only after all work that uses it has run.
#[derive(Debug)]
pub struct Block {
    storage: Storage,
    bytes: usize,
}

impl Block {
    /// Length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Replaces the first bytes, and waits for it.
    ///
    /// # Errors
    /// [`Error::Vmm`].
    pub fn write(&mut self, contents: &[u8]) -> Result<()> {
        match &mut self.storage {
            Storage::Host(words) => {
                bytemuck::cast_slice_mut(words)[..contents.len()].copy_from_slice(contents)
            }
            Storage::Device(memory) if !contents.is_empty() => {
                memory.write(0, contents)?;
            }
            Storage::Device(_) => {}
        }
        Ok(())
    }

    /// Sets all bytes, and waits for it.
    ///
    /// # Errors
    /// [`Error::Vmm`].
    pub fn fill(&mut self, value: u8) -> Result<()> {
        match &mut self.storage {
            Storage::Host(words) => words.fill(u64::from_ne_bytes([value; 8])),
            Storage::Device(memory) if self.bytes > 0 => memory.fill(0, self.bytes, value)?,
            Storage::Device(_) => {}
        }
        Ok(())
    }

    /// All bytes.
    ///
    /// # Errors
    /// [`Error::Vmm`], also for the failure of work on the device.
    pub fn read(&self) -> Result<Vec<u8>> {
        match &self.storage {
            Storage::Host(words) => Ok(bytemuck::cast_slice(words)[..self.bytes].to_vec()),
            Storage::Device(memory) => {
                let mut bytes = vec![0; self.bytes];
                if !bytes.is_empty() {
                    memory.read(0, &mut bytes)?;
                }
                Ok(bytes)
            }
        }
    }

    fn require(&self, dtype: DType, rows: usize, columns: usize) -> Result<()> {
        if rows.saturating_mul(columns).saturating_mul(dtype.size()) <= self.bytes {
            return Ok(());
        }
        let (got, expected) = (format!("{} bytes", self.bytes), format!("{rows} × {columns} of {dtype}"));
        Err(Error::Shape { tensor: "block", got, expected })
    }

    /// The first bytes as a matrix, row after row.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer.
    pub fn view(&self, dtype: DType, rows: usize, columns: usize) -> Result<TensorRef<'_>> {
        self.require(dtype, rows, columns)?;
        let (address, space) = match &self.storage {
            Storage::Host(words) => (words.as_ptr() as u64, Space::Host),
            Storage::Device(memory) => (memory.address(), Space::Device),
        };
        // SAFETY: that many bytes lie there (checked), aligned to 8, and as long as the block is borrowed nobody gets a mutable view; a
        // block outlives the work that uses it.
        unsafe { TensorRef::from_raw(address, space, dtype, [rows, columns], [columns as isize, 1]) }
    }

    /// The first bytes as a matrix to write.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_mut(&mut self, dtype: DType, rows: usize, columns: usize) -> Result<TensorMut<'_>> {
        self.require(dtype, rows, columns)?;
        let (address, space) = match &mut self.storage {
            Storage::Host(words) => (words.as_mut_ptr() as u64, Space::Host),
            Storage::Device(memory) => (memory.address(), Space::Device),
        };
        // SAFETY: as in `view`, and the block is exclusively borrowed.
        unsafe { TensorMut::from_raw(address, space, dtype, [rows, columns], [columns as isize, 1]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_what_is_written() {
        let mut block = Place::Host.block_of(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]).unwrap();
        assert_eq!(block.bytes(), 12);
        assert_eq!(block.view(DType::U8, 3, 4).unwrap().as_bytes().unwrap()[8..], [9, 10, 11, 12]);
        assert!(matches!(block.view(DType::F32, 2, 2), Err(Error::Shape { .. })));
        block.fill(7).unwrap();
        block.write(&[0]).unwrap();
        assert_eq!(block.read().unwrap(), [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
        let view = block.view_mut(DType::I32, 1, 3).unwrap();
        assert_eq!((view.shape(), view.space()), ([1, 3], Space::Host));
        assert!(Place::Host.block(0).unwrap().read().unwrap().is_empty());
    }
}
