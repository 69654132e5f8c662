//! Granularities: what sizes and offsets must be multiples of.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::properties::Properties;
use cuda_vmm_sys::CUmemAllocationGranularity_flags;
use std::fmt;

/// What sizes and offsets must be a multiple of, in bytes: a power of two, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Granularity(usize);

impl Granularity {
    /// A granularity of `bytes`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `bytes` is not a power of two.
    pub fn new(bytes: usize) -> Result<Self> {
        if bytes.is_power_of_two() {
            Ok(Self(bytes))
        } else {
            let why = format!("{bytes} is not a power of two");
            Err(Error::Unsupported { what: "this granularity", why })
        }
    }

    /// The granularity in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.0
    }

    /// Whether `bytes` is a multiple.
    #[must_use]
    pub const fn divides(self, bytes: usize) -> bool {
        bytes & (self.0 - 1) == 0
    }

    /// The smallest multiple that is not smaller than `bytes`.
    ///
    /// # Errors
    /// [`Error::Overflow`] if it does not fit into the address space.
    pub fn round_up(self, bytes: usize) -> Result<usize> {
        bytes.checked_next_multiple_of(self.0).ok_or(Error::Overflow { what: "a size rounded up" })
    }

    /// Refuses zero and what is not a multiple.
    pub(crate) fn check(self, what: &'static str, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Err(Error::Zero { what });
        }
        self.check_offset(what, bytes)
    }

    /// Refuses what is not a multiple.
    pub(crate) fn check_offset(self, what: &'static str, bytes: usize) -> Result<()> {
        if self.divides(bytes) {
            Ok(())
        } else {
            Err(Error::Misaligned { what, value: bytes, granularity: self.0 })
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)
    }
}

/// Both granularities of one kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularities {
    /// What sizes must be multiples of.
    pub minimum: Granularity,
    /// What sizes should be multiples of for speed; a multiple of the minimum.
    pub recommended: Granularity,
}

impl Granularities {
    /// Granularities of physical memory with these properties.
    ///
    /// Calls `cuMemGetAllocationGranularity`.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`], or [`Error::Call`] if the driver refuses the properties.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    pub fn of(cuda: &Cuda, properties: &Properties) -> Result<Self> {
        properties.check(cuda)?;
        cuda.granularities(properties)
    }

    pub(crate) fn query(cuda: &Cuda, properties: &Properties) -> Result<Self> {
        let raw = properties.as_raw();
        let ask = |option| {
            let mut bytes = 0;
            // SAFETY: `bytes` is valid for one write and `raw` for one read; the call has no other effect.
            unsafe { cuda.driver().cuMemGetAllocationGranularity(&mut bytes, &raw, option) }
                .attempt(|| format!("asking for the granularity of memory on {}", properties.location()))?;
            Granularity::new(bytes)
        };
        Ok(Self {
            minimum: ask(CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM)?,
            recommended: ask(CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_and_checks() {
        let g = Granularity::new(4096).unwrap();
        assert_eq!(
            (g.round_up(0).unwrap(), g.round_up(1).unwrap(), g.round_up(4096).unwrap()),
            (0, 4096, 4096)
        );
        assert!(matches!(g.round_up(usize::MAX), Err(Error::Overflow { .. })));
        assert!(matches!(g.check("size", 0), Err(Error::Zero { what: "size" })));
        assert!(matches!(
            g.check("size", 4097),
            Err(Error::Misaligned { value: 4097, granularity: 4096, .. })
        ));
        assert!(g.check("size", 8192).is_ok());
        assert!(g.check_offset("offset", 0).is_ok());
        assert!(Granularity::new(0).is_err() && Granularity::new(3).is_err());
    }
}
