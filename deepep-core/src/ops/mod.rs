//! Operations: what the caller gives is validated and planned here, then launched on the buffer's backend.

mod combine;
mod dispatch;
mod site;

pub use combine::CombineArgs;
pub use dispatch::DispatchArgs;
pub(crate) use site::{Site, require_device};

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
