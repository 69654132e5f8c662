//! Raw NCCL, 2.28 to 2.32: communicators, windows, device communicators and GIN.
//!
//! What this crate does:
//! - gives the types and constants of `nccl.h` and `nccl_device.h` and a table of their functions ([`Nccl`]), each resolved on
//!   first use;
//! - finds the library at run time: nothing is linked, there is no build script, and neither NCCL nor CUDA is needed to build,
//!   test or document a crate that uses it;
//! - reads the library's version before anything else and refuses one that it does not know how to talk to;
//! - declares each struct whose layout changed between releases once a generation ([`v2_28_3`] to [`v2_32`]), with sizes and offsets
//!   asserted when the crate is compiled, and says which one the loaded library takes ([`Generation`]);
//! - returns typed errors where the library, or one function of it, is missing, or where two different NCCLs are loaded;
//! - finds the headers that belong to the loaded library ([`Nccl::include_dir`]), for device code compiled at run time;
//! - takes its functions from any loader ([`Nccl::from_loader`]), so that tests run on an NCCL in software.
//!
//! What it does not do: it makes nothing safe (that is `nccl-gin`). It never loads a second NCCL next to one that is in the process
//! already: two of them fight over the same devices, environment and plugins.
//!
//! ```
//! use nccl_gin_sys::Nccl;
//!
//! match Nccl::get() {
//!     Ok(nccl) => {
//!         println!("NCCL {} from {}", nccl.version(), nccl.origin());
//!         let mut id = nccl_gin_sys::ncclUniqueId::default();
//!         // SAFETY: `id` is valid for the one write.
//!         match unsafe { nccl.ncclGetUniqueId(&mut id) } {
//!             Ok(result) => println!("ncclGetUniqueId: {result}"),
//!             Err(missing) => println!("{missing}"),
//!         }
//!     }
//!     // A machine without NCCL: an error to match on, not a panic.
//!     Err(error) => println!("{error}"),
//! }
//! ```
//!
//! The types are generated from NVIDIA's wheels and compared with those of 2.28.3, 2.28.9, 2.29.7, 2.30.7, 2.31.2 and 2.32.3 by `cargo
//! xtask abi-check`; what they mean is said in NVIDIA's NCCL documentation. C enums are newtypes with associated constants, so that a
//! code that a newer library returns is a value like any other.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    rustdoc::all
)]
#[rustfmt::skip] // generated
mod bindings;
mod error;
mod functions;
mod headers;
mod layouts;
mod load;
mod mapped;
mod table;
mod version;

pub use bindings::*;
/// C types that the signatures use.
pub use core::ffi;
pub use error::{HeadersError, LoadError, MissingFunction, Tried, result_name};
pub use layouts::{v2_28, v2_28_3, v2_29, v2_30, v2_31, v2_32};
pub use load::{LIBRARY_ENV, Origin};
pub use table::{Function, Nccl};
pub use version::{Generation, Version};
