//! Sums of BF16 rows: single precision, one rounding to nearest even.

use half::bf16;

/// What NaN results are.
const NAN: u16 = 0x7fff;

/// Adds up rows in the order they are given: none is +0, one keeps its bits, unless the sum starts from a bias.
pub(super) struct Sum {
    terms: usize,
    /// A sum that starts from a bias is rounded, even if nothing is added.
    rounded: bool,
    total: Vec<f32>,
}

impl Sum {
    pub(super) fn new(columns: usize) -> Self {
        Self { terms: 0, rounded: false, total: vec![0.0; columns] }
    }

    pub(super) fn clear(&mut self) {
        self.terms = 0;
        self.rounded = false;
    }

    /// Starts, or goes on, from a bias.
    pub(super) fn bias(&mut self, row: &[u16]) {
        self.add(row);
        self.rounded = true;
    }

    pub(super) fn add(&mut self, row: &[u16]) {
        if self.terms == 0 {
            for (total, &x) in self.total.iter_mut().zip(row) {
                *total = widen(x);
            }
        } else {
            for (total, &x) in self.total.iter_mut().zip(row) {
                *total += widen(x);
            }
        }
        self.terms += 1;
    }

    /// Writes the sum, bytes in memory order.
    ///
    /// # Safety
    /// `out` must be valid for writing two bytes for each column.
    pub(super) unsafe fn write(&self, out: *mut u8) {
        let out = out.cast::<u16>();
        for (i, &total) in self.total.iter().enumerate() {
            let bits = match self.terms {
                0 => 0,
                // Widening and narrowing keep every bit, NaN payloads included.
                1 if !self.rounded => (total.to_bits() >> 16) as u16,
                _ => narrow(total),
            };
            // SAFETY: the caller vouches for the memory.
            unsafe { out.add(i).write_unaligned(bits) };
        }
    }
}

fn widen(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

fn narrow(x: f32) -> u16 {
    if x.is_nan() { NAN } else { bf16::from_f32(x).to_bits() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(terms: &[u16]) -> u16 {
        let mut sum = Sum::new(1);
        terms.iter().for_each(|&t| sum.add(&[t]));
        let mut out = 0u16;
        // SAFETY: room for one column.
        unsafe { sum.write((&raw mut out).cast()) };
        out
    }

    #[test]
    fn rules() {
        let bits = |x: f32| bf16::from_f32(x).to_bits();
        assert_eq!(sum(&[]), 0);
        for copied in [0x8000, 0x7f81, 0xffff, 0x0001] {
            assert_eq!(sum(&[copied]), copied);
        }
        assert_eq!(sum(&[0x7f81, 0]), NAN);
        let mut biased = Sum::new(2);
        biased.bias(&[0x7f81, 0x8000]);
        let mut out = [0u16; 2];
        // SAFETY: room for two columns.
        unsafe { biased.write(out.as_mut_ptr().cast()) };
        assert_eq!(out, [NAN, 0x8000]);
        assert_eq!(sum(&[bits(1.0), bits(1.0 / 256.0)]), bits(1.0));
        assert_eq!(sum(&[bits(1.0), bits(1.0 / 256.0), bits(1.0 / 256.0)]), bits(1.0 + 1.0 / 128.0));
        assert_eq!(sum(&[0x8000, 0x8000]), 0x8000);
        assert_eq!(sum(&[0x0001, 0x0001]), 0x0002);
    }
}
