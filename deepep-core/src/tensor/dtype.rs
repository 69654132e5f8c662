//! Element types.

use std::fmt;

use half::{bf16, f16};

/// Element type of a tensor. Names follow safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// FP8 with 4 exponent and 3 mantissa bits.
    F8E4M3,
    /// FP8 with 5 exponent and 2 mantissa bits.
    F8E5M2,
    /// Eight exponent bits and nothing else: a power-of-two scale.
    F8E8M0,
    /// Unsigned byte.
    U8,
    /// Signed 32-bit integer; as a scale, four packed [`F8E8M0`](Self::F8E8M0).
    I32,
    /// Signed 64-bit integer.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 | Self::U8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// The name safetensors uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::U8 => "U8",
            Self::I32 => "I32",
            Self::I64 => "I64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of a tensor. Any bit pattern is a valid value of it.
pub trait Element: Copy + sealed::Sealed + 'static {
    /// The element type of tensors of this type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(bf16 => Bf16, f16 => F16, f32 => F32, u8 => U8, i32 => I32, i64 => I64);
