//! Structs that the host and the kernels share, declared once for both.

/// Declares a `#[repr(C)]` struct and, as its `CUDA` constant, the same declaration for kernels.
///
/// Fields are `u32`, `i32`, `u64`, `i64`, another such struct, or an array of one of these (`name: u64[8]`). Kernels name integers alike.
macro_rules! device_struct {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ident $([$count:literal])?,)* }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $($(#[$field_meta])* $vis $field: device_struct!(@type $ty $($count)?),)*
        }

        impl $name {
            /// Declaration of the struct for kernels, with a check of its size.
            pub(crate) const CUDA: &'static str = concat!(
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
