//! Safe CUDA virtual memory management: physical memory, address ranges, and handles that other processes can map.
//!
//! What this crate does:
//! - creates [physical memory](PhysicalMemory) on devices and on host NUMA nodes, [reserves](Reservation) addresses, [maps](Mapping) one
//!   into the other, and sets who may use it; parents outlive their children, and what fails midway leaves nothing behind;
//! - lays memory of several kinds into [one range](SegmentedRange) of addresses, and [grows](GrowableRange) ranges in place;
//! - hands memory to other processes ([`share`]): file descriptors over Unix sockets or pidfd, FABRIC handles across hosts, with a
//!   fallback where FABRIC is claimed but not to be had;
//! - makes [multicast objects](multicast), in one process or several, with the order of their steps kept by types;
//! - finds out what a device [really can do](Capabilities), which is not always what it claims;
//! - refuses bad sizes, offsets, devices and bytes with an [`Error`] that names the rule and the values, before the driver is
//!   called.
//!
//! What it does not do: it launches no kernels, orders no streams (the raw table of [`sys`] does both), and registers nothing with NCCL.
//! It needs neither a CUDA toolkit nor a GPU to build and test: without a driver
//! [`Cuda::get`] returns an error, and any table of functions can stand in for it, such as the software driver
//! `cuda-vmm-emu`.
//!
//! ```
//! use cuda_vmm::{Cuda, Grant, Properties, SegmentedRange};
//! # use cuda_vmm_emu::{Config, Emulator};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let emulator = Emulator::new(Config::default())?;
//! # let driver = emulator.driver();
//! // On a GPU: `let cuda = Cuda::get()?;`. Here: the software driver.
//! let cuda = Cuda::with_driver(driver)?;
//! let range = SegmentedRange::builder(&cuda)
//!     .create(Properties::device(0).shareable(), 4 << 20)
//!     .create(Properties::host_numa(0).shareable(), 2 << 20)
//!     .grant(Grant::device(0))
//!     .build()?;
//!
//! // One copy across both segments.
//! let context = cuda.device(0)?.primary_context()?;
//! context.upload(&range, (4 << 20) - 2, b"both")?;
//! let mut back = [0; 4];
//! context.download(&range, (4 << 20) - 2, &mut back)?;
//! assert_eq!(&back, b"both");
//! # Ok(())
//! # }
//! ```
//!
//! # Rules of CUDA that the types keep
//! - `cuMemAddressFree` only after everything in the range is unmapped: mappings hold their [`Reservation`].
//! - `cuMemRelease` may come before `cuMemUnmap`: mappings keep memory alive. The handle is kept all the same while a mapping lives,
//!   so that it can be exported at any time.
//! - `cuMemUnmap` takes whole mappings: a [`Mapping`] is one.
//! - `cuMemMap` takes whole allocations, offset zero: [`Reservation::map`] does.
//! - Access is set on whole mappings, and host access on host memory only.
//! - `cuMulticastBindMem` and `cuMemMap` of a multicast object block until every device is added: neither can be called before.
//! - `cuMulticastUnbind` takes exactly the values of the bind: a [`Binding`](multicast::Binding) keeps them.
//!
//! What no type can see is the work on a device: memory must not be dropped while a kernel uses its addresses.
//!
//! CUDA does not survive `fork`: a child process that goes on without `exec` must not use or drop objects of its parent.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod capabilities;
mod context;
mod copy;
mod cuda;
mod device;
mod dma_buf;
mod error;
mod granularity;
mod handle;
mod location;
mod memory;
pub mod multicast;
mod physical;
mod placed;
mod plain;
mod properties;
mod range;
mod release;
mod reservation;
pub mod share;
mod switch;

pub use capabilities::{Capabilities, Support};
pub use context::{Bound, Context, PeerAccess};
pub use cuda::Cuda;
pub use cuda_vmm_sys as sys;
pub use device::{Device, Uuid};
pub use error::{Error, Result};
pub use granularity::{Granularities, Granularity};
pub use location::{Access, Grant, Location};
pub use memory::{DeviceAddress, Memory};
pub use physical::PhysicalMemory;
pub use plain::{IpcHandle, IpcMemory, PlainMemory};
pub use properties::{HandleTypes, Properties, Shareable};
pub use range::{GrowableRange, Segment, SegmentedRange, SegmentedRangeBuilder};
pub use release::failed_releases;
pub use reservation::{Mapping, Rejected, Reservation};
pub use switch::multicast_disabled_by;
