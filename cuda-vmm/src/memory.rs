//! Memory with an address, whatever it is made of.

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use std::fmt;

/// An address that devices use. For memory that was mapped by this crate it is the same on every device and on the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    pub(crate) const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The address as a number, for a kernel's arguments or another library.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Memory that has an address and stays mapped for as long as the object lives.
///
/// The objects of this crate implement it; [`Context::upload`](crate::Context::upload) and its siblings take it.
pub trait Memory: private::Sealed {
    /// First address.
    fn address(&self) -> DeviceAddress;

    /// Length in bytes.
    fn size(&self) -> usize;

    /// The driver.
    fn cuda(&self) -> &Cuda;

    /// Where the physical memory that holds `offset` ends, as an offset in bytes. Single calls of the driver do not go across it.
    #[doc(hidden)]
    fn piece_end(&self, offset: usize) -> usize {
        let _ = offset;
        self.size()
    }
}

mod private {
    pub trait Sealed {}
    impl Sealed for crate::Mapping {}
    impl Sealed for crate::SegmentedRange {}
    impl Sealed for crate::GrowableRange {}
    impl Sealed for crate::PlainMemory {}
    impl Sealed for crate::IpcMemory {}
}

/// Refuses a part that does not lie inside `memory`.
pub(crate) fn check_part(
    memory: &dyn Memory,
    what: &'static str,
    offset: usize,
    length: usize,
) -> Result<()> {
    let limit = memory.size();
    if offset.checked_add(length).is_some_and(|end| end <= limit) {
        Ok(())
    } else {
        Err(Error::OutOfBounds { what, offset, length, limit })
    }
}

/// The parts of `offset..offset + length` that lie in one piece of physical memory each, as (offset, length).
pub(crate) fn pieces(
    memory: &dyn Memory,
    offset: usize,
    length: usize,
) -> impl Iterator<Item = (usize, usize)> + '_ {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let start = at;
            // A piece holds at least one byte, so that this ends.
            at = memory.piece_end(start).clamp(start + 1, end);
            (start, at - start)
        })
    })
}
