//! Raw CUDA driver API for memory, streams and launches.
//!
//! What this crate does:
//! - gives the types and constants of `cuda.h` and a table of its functions ([`Driver`]), each resolved on first use;
//! - finds the driver at run time: nothing is linked, there is no build script, and no CUDA toolkit is needed to build, test or
//!   document a crate that uses it;
//! - returns typed errors where the library, or one function of it, is missing: a driver that lacks a function costs only that
//!   function;
//! - takes its functions from any loader ([`Driver::from_loader`]), so that tests run on a driver in software.
//!
//! What it does not do: it makes nothing safe (that is `cuda-vmm`), covers only what memory sharing and kernel launches need, and
//! never loads the unversioned `libcuda.so`, which is the toolkit's stub.
//!
//! ```
//! use cuda_vmm_sys::{CUresult, Driver, ffi::c_int};
//!
//! match Driver::get() {
//!     Ok(driver) => {
//!         println!("CUDA {} from {:?}", driver.version(), driver.origin());
//!         let mut count: c_int = 0;
//!         // SAFETY: cuInit takes no pointer; `count` is valid for the one write of cuDeviceGetCount.
//!         let result = unsafe { driver.cuInit(0).and_then(|()| driver.cuDeviceGetCount(&mut count)) };
//!         match result {
//!             Ok(()) => println!("{count} devices"),
//!             Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NO_DEVICE) => println!("no device"),
//!             Err(error) => println!("{error}"),
//!         }
//!     }
//!     // A machine without a GPU: an error to match on, not a panic.
//!     Err(error) => println!("{error}"),
//! }
//! ```
//!
//! The types are generated from the headers of CUDA 13.0 and compared with those of 12.9 and 13.5 by `cargo xtask abi-check`;
//! what they mean is said in NVIDIA's CUDA Driver API reference. C enums are newtypes with associated constants, so that a code
//! that a newer driver returns is a value like any other.

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
#[rustfmt::skip]
mod bindings;
mod error;
#[macro_use]
#[rustfmt::skip]
mod functions;
mod load;
mod table;

pub use bindings::*;
/// C types that the signatures use.
pub use core::ffi;
pub use error::{CallError, LoadError, MissingFunction, Tried};
pub use load::{DRIVER_ENV, Origin};
pub use table::{Driver, Function};
