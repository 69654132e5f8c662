//! Identifiers that bring the ranks of a communicator together.

use crate::error::Result;
use crate::library;
use nccl_gin_sys::{Function, NCCL_UNIQUE_ID_BYTES, Nccl, ncclUniqueId};
use std::fmt;

/// The identifier that all ranks of a communicator share (`ncclUniqueId`).
///
/// One rank makes it and hands its bytes to the others by any means. It holds the address of a listener in the process that made
/// it and a secret: who knows it can join, so its bytes are not printed by `Debug`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; Self::LENGTH]);

impl UniqueId {
    /// Bytes of an identifier.
    pub const LENGTH: usize = NCCL_UNIQUE_ID_BYTES as usize;

    /// Makes a new identifier, and starts the listener behind it in this process.
    ///
    /// # Errors
    /// NCCL's error if it finds no network interface (see `NCCL_SOCKET_IFNAME`) or cannot be initialised.
    #[doc(alias = "ncclGetUniqueId")]
    pub fn new(nccl: &Nccl) -> Result<Self> {
        let mut id = ncclUniqueId::default();
        // SAFETY: `id` is valid for the one write.
        let result = unsafe { nccl.ncclGetUniqueId(&mut id) }?;
        library::check(nccl, Function::ncclGetUniqueId, result, || "making a unique id".into())?;
        Ok(Self::from_raw(id))
    }

    /// The identifier with these bytes, as another rank got them from [`UniqueId::as_bytes`].
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        Self(bytes)
    }

    /// The bytes to hand to the other ranks.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }

    pub(crate) fn from_raw(id: ncclUniqueId) -> Self {
        Self(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    pub(crate) fn to_raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| std::ffi::c_char::from_ne_bytes([byte])) }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_way_through_c() {
        let bytes = std::array::from_fn(|index| index as u8 ^ 0x95);
        let id = UniqueId::from_bytes(bytes);
        assert_eq!(UniqueId::from_raw(id.to_raw()).as_bytes(), &bytes);
        assert_eq!(format!("{id:?}"), "UniqueId { .. }");
    }
}
