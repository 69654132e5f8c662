//! Structs that the host and the kernels share, declared once for both.

/// Declares a `#[repr(C)]` struct and, as its `CUDA` constant, the same declaration for kernels.
///
/// Fields are `u32`, `i32`, `u64`, `i64`, another such struct, or an array of one of these (`name: u64[8]`). Kernels name integers alike
/// (`arch/types.cuh`). For kernels of [`Compiler::compile_source`](crate::jit::Compiler::compile_source).
///
/// ```
/// deepep_core::device_struct! {
///     /// What a kernel of mine takes.
///     pub struct Mine {
///         /// Addresses on the ranks.
///         at: u64[8],
///         /// How many.
///         count: u32,
///         /// Not used.
///         pad: u32,
///     }
/// }
/// assert_eq!(size_of::<Mine>(), 72);
/// assert!(Mine::CUDA.contains("u64 at[8];"));
/// ```
#[macro_export]
macro_rules! device_struct {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ident $([$count:literal])?,)* }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $($(#[$field_meta])* $vis $field: $crate::device_struct!(@type $ty $($count)?),)*
        }

        impl $name {
            /// Declaration of the struct for kernels.
            pub const CUDA: &'static str = concat!(
                "struct ", stringify!($name), " {\n",
                $("    ", stringify!($ty), " ", stringify!($field), $("[", stringify!($count), "]",)? ";\n",)*
                "};\n"
            );
        }
    };
    (@type $ty:ident) => { $ty };
    (@type $ty:ident $count:literal) => { [$ty; $count] };
}

pub(crate) use device_struct;
