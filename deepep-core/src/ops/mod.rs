//! Operations: what the caller gives is validated and planned here, then launched on the buffer's backend.

mod combine;
mod dispatch;

pub use combine::CombineArgs;
pub use dispatch::DispatchArgs;

use crate::backend::Backend;
use crate::config::BackendKind;
use crate::error::{Error, Result};
use crate::layout::ROW_GRANULARITY;
use crate::tensor::{Extent, Space};

/// Checks that a backend can use a tensor where it lies.
pub(crate) fn require_space(backend: &dyn Backend, tensor: &'static str, extent: &Extent) -> Result<()> {
    let expected = match backend.kind() {
        BackendKind::Cuda => Space::Device,
        _ => Space::Host,
    };
    // A tensor without elements is never touched.
    if extent.bytes() == 0 || extent.space() == expected {
        return Ok(());
    }
    let (got, expected) = (extent.space().name(), expected.name());
    Err(Error::Memory { tensor, got, expected, backend: backend.kind().name() })
}

/// As [`require_space`], for rows that kernels move in bulk.
pub(crate) fn require_rows(backend: &dyn Backend, tensor: &'static str, extent: &Extent) -> Result<()> {
    require_space(backend, tensor, extent)?;
    let granularity = ROW_GRANULARITY as u64;
    if backend.kind() != BackendKind::Cuda
        || extent.bytes() == 0
        || extent.address().is_multiple_of(granularity)
    {
        return Ok(());
    }
    let problem =
        format!("starts at {:#x}; rows on a GPU start at multiples of {granularity} bytes", extent.address());
    Err(Error::Tensor { tensor, problem })
}

/// FNV-1a over 64-bit words, folded to 32 bits.
#[derive(Clone, Copy)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(mut self, value: usize) -> Self {
        for byte in (value as u64).to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self
    }

    pub(crate) fn finish(self) -> u32 {
        (self.0 ^ (self.0 >> 32)) as u32
    }
}
