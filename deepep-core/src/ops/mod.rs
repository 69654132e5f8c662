//! Operations: what the caller gives is validated and planned here, then launched on the buffer's backend.

mod combine;
mod dispatch;
mod site;

pub use combine::CombineArgs;
pub use dispatch::DispatchArgs;
pub(crate) use site::{Site, require_device};

/// Words mixed into one of 32 bits: the same on all ranks if and, almost surely, only if the words are.
#[derive(Clone, Copy)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(mut self, value: usize) -> Self {
        // An odd factor carries every bit upwards, the shift brings it down again.
        self.0 = (self.0 ^ value as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
        self
    }

    pub(crate) fn finish(self) -> u32 {
        self.0 as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_every_word_counts() {
        let digest = |words: &[usize]| words.iter().copied().fold(Digest::new(), Digest::add).finish();
        let words = [256, 8, 7168, 56, 0, 1, 0, 1, 4096, 4096, 1, 0];
        let mut seen = std::collections::HashSet::from([digest(&words)]);
        for at in 0..words.len() {
            for bit in 0..usize::BITS {
                let mut other = words;
                other[at] ^= 1 << bit;
                assert!(seen.insert(digest(&other)), "word {at}, bit {bit}");
            }
            // The order counts, too.
            let mut other = words;
            other.swap(at, (at + 3) % words.len());
            assert!(other == words || seen.insert(digest(&other)), "words {at} and the third after it");
        }
    }
}
