//! NCCL windows and device communicators, safely, for NCCL 2.28 to 2.32 (2.29 from 2.29.5 on: the releases before it are refused).
//!
//! What this crate does:
//! - creates communicators ([`Communicator`]), splits, shrinks and grows them, and never waits for another rank without a limit: a peer
//!   that dies becomes an error on the others;
//! - makes windows ([`Window`]) of any device memory whose owner it can keep alive ([`WindowMemory`]), and gives the addresses of each
//!   peer's memory, for kernels that load and store there without any NCCL header;
//! - tells what a communicator supports ([`Properties`]): the device API, GIN, LSA teams, multicast;
//! - creates device communicators ([`DevComm`]) for kernels that use NCCL's device API (LSA barriers, GIN), from requirements
//!   ([`DevCommRequirements`]) that are built for the version that is loaded: a struct of another version crashes NCCL;
//! - says with each error what was attempted, what came back and what to do about it ([`Error`]);
//! - creates nothing multicast unless asked to, and not even then where the environment forbids it ([`multicast_disabled_by`]).
//!
//! What it does not do: it wraps no collectives (call them through [`Communicator::as_raw`] and [`sys`]), brings no kernels and no
//! NIC code, and does not exchange identifiers between ranks: hand the bytes of a [`UniqueId`] over by any means.
//!
//! Nothing is linked and there is no build script: crates that use this one build and test on machines without NCCL and CUDA.
//!
//! ```
//! use nccl_gin::{Communicator, Config, DevCommRequirements, Device, Error, MemAlloc, UniqueId, WindowFlags, sys::Nccl};
//! use std::sync::Arc;
//!
//! /// One rank alone: a communicator, a window, a device communicator.
//! fn run() -> Result<(), Error> {
//!     let nccl = Nccl::get()?;
//!     let device = Device::open(0)?;
//!     let id = UniqueId::new(nccl)?; // on one rank; the others get its bytes
//!     let comm = Communicator::init(nccl, &device, &id, 1, 0, &Config::new())?;
//!     let memory = Arc::new(MemAlloc::new(nccl, &device, 1 << 21)?);
//!     let window = comm.register(memory, WindowFlags::empty())?;
//!     println!("rank 0's memory is at {:#x}", window.lsa_pointer(0, 0)?);
//!     let dev_comm = comm.create_dev_comm(&DevCommRequirements::new().lsa_barriers(1))?;
//!     println!("{:?}", dev_comm.info());
//!     dev_comm.close()?;
//!     window.close()?;
//!     comm.close()?;
//!     Ok(())
//! }
//!
//! if let Err(error) = run() {
//!     // Without NCCL or a GPU: an error that says what is missing.
//!     println!("{error}");
//! }
//! ```
//!
//! # Order
//! Windows and device communicators are closed before their communicator, whose [`close`](Communicator::close) refuses otherwise; closing
//! is collective, and can time out. What is dropped instead of closed takes part in nothing: a window or device communicator is kept until
//! its communicator is closed, a communicator until the process ends, and the first of each is told on the error stream.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod bytes;
mod communicator;
mod config;
mod deadline;
mod dev_comm;
mod device;
pub mod device_code;
mod environment;
mod error;
mod group;
mod hint;
mod library;
mod memory;
mod pending;
mod properties;
mod requirements;
mod segments;
mod team;
#[cfg(test)]
mod testing;
mod unique_id;
mod window;
mod window_2_28;

pub use communicator::{Communicator, Shrink};
pub use config::Config;
pub use dev_comm::{DevComm, DevCommInfo};
pub use device::Device;
pub use environment::multicast_disabled_by;
pub use error::{Error, NcclError, NotClosed, Result};
pub use group::Group;
pub use memory::{ForeignMemory, MemAlloc, WindowMemory};
/// Raw NCCL.
pub use nccl_gin_sys as sys;
pub use pending::Pending;
pub use properties::{GinConnection, GinType, Properties, Support};
pub use requirements::DevCommRequirements;
pub use team::Team;
pub use unique_id::UniqueId;
pub use window::{Window, WindowFlags};
