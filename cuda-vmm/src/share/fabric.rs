//! FABRIC handles.

use std::fmt;

/// A FABRIC handle: 64 bytes that let any process of the same IMEX domain import the memory. Whoever has them can read and
/// write it, so that they are not printed in full.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FabricHandle([u8; 64]);

impl FabricHandle {
    /// The handle that these bytes are.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 64]) -> Self {
        Self(bytes)
    }

    /// The bytes, to be sent to another process.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 64] {
        &self.0
    }
}

impl fmt::Debug for FabricHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, ..] = self.0;
        write!(f, "FabricHandle({a:02x}{b:02x}..)")
    }
}
