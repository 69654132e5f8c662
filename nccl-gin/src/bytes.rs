//! Structs of a foreign layout, built and read by offset, so that no padding is ever left to chance.

use std::ffi::{c_char, c_void};

/// `N` bytes, zero at first, aligned for every struct of NCCL.
#[derive(Clone)]
#[repr(C, align(16))]
pub(crate) struct Bytes<const N: usize>([u8; N]);

/// What a field can hold.
pub(crate) trait Field: Copy {
    /// The field's bytes, as C stores them.
    type Bytes: AsRef<[u8]> + AsMut<[u8]> + Default;
    /// Into bytes.
    fn to_bytes(self) -> Self::Bytes;
    /// From bytes.
    fn from_bytes(bytes: Self::Bytes) -> Self;
}

macro_rules! number {
    ($($ty:ident)*) => { $(
        impl Field for $ty {
            type Bytes = [u8; size_of::<Self>()];
            fn to_bytes(self) -> Self::Bytes {
                self.to_ne_bytes()
            }
            fn from_bytes(bytes: Self::Bytes) -> Self {
                Self::from_ne_bytes(bytes)
            }
        }
    )* };
}

number!(i32 u32 u64 usize);

impl Field for bool {
    type Bytes = [u8; 1];
    fn to_bytes(self) -> [u8; 1] {
        [self.into()]
    }
    fn from_bytes(bytes: [u8; 1]) -> Self {
        bytes != [0]
    }
}

impl Field for *const c_char {
    type Bytes = [u8; size_of::<usize>()];
    fn to_bytes(self) -> Self::Bytes {
        self.expose_provenance().to_ne_bytes()
    }
    fn from_bytes(bytes: Self::Bytes) -> Self {
        std::ptr::with_exposed_provenance(usize::from_ne_bytes(bytes))
    }
}

impl<const N: usize> Bytes<N> {
    pub(crate) const fn zeroed() -> Self {
        Self([0; N])
    }

    /// Writes a field. The offset is that of a struct that fits.
    pub(crate) fn put<T: Field>(&mut self, offset: usize, value: T) {
        let bytes = value.to_bytes();
        let bytes = bytes.as_ref();
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads a field.
    pub(crate) fn get<T: Field>(&self, offset: usize) -> T {
        let mut bytes = T::Bytes::default();
        let length = bytes.as_ref().len();
        bytes.as_mut().copy_from_slice(&self.0[offset..offset + length]);
        T::from_bytes(bytes)
    }

    pub(crate) fn as_ptr(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }

    pub(crate) fn as_slice(&self) -> &[u8; N] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_to_their_bytes() {
        let mut bytes = Bytes::<16>::zeroed();
        bytes.put(4, -1_i32);
        bytes.put(9, true);
        assert_eq!(bytes.as_slice(), &[0, 0, 0, 0, 255, 255, 255, 255, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes.get::<i32>(4), -1);
        assert!(bytes.get::<bool>(9) && !bytes.get::<bool>(10));
        assert_eq!(bytes.as_ptr() as usize % 16, 0);
    }
}
