//! The memory half of a CUDA driver in software.
//!
//! What this crate does:
//! - fills the function table of [`cuda_vmm_sys`] without a GPU: devices, contexts, virtual memory, sharing between processes, copies and
//!   sets, streams and events, multicast objects;
//! - works with real things, so that what is built on it is tested for real: addresses are reserved with `mmap`, memory is a memfd, an
//!   export is a file descriptor that another process can import, a load from memory without access faults;
//! - keeps the driver's rules, and refuses with the driver's codes what a driver refuses;
//! - lies where drivers lie: FABRIC is claimed and refused unless the [`Config`] says otherwise;
//! - captures streams into graphs, and replays them;
//! - fails on demand ([`Faults`]): a call by function and number, late, or missing from the table; or plays an older driver;
//! - keeps a [`Ledger`] of everything alive, for tests to find empty.
//!
//! What it does not do:
//! - run GPU code: modules and launches go to what [`Config::kernels`] was given, and are `CUDA_ERROR_NOT_SUPPORTED` without it;
//! - place memory: a NUMA node, a device or compression is a label;
//! - check host pointers: a copy from or to memory that the driver does not know goes to that address as the CPU would;
//! - start a kernel before the one ahead in its stream has ended: programmatic serialization is accepted, and serial;
//! - know what else launches can ask for, clusters for instance: attributes but that and COOPERATIVE are `CUDA_ERROR_NOT_SUPPORTED`;
//! - measure anything: its times are those of a CPU;
//! - account for memory across processes: an exporter's device gets memory back when the exporter has released it, imported or not.
//!
//! ```
//! use cuda_vmm_emu::sys::{
//!     CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType,
//! };
//! use cuda_vmm_emu::{Config, Emulator};
//!
//! let emulator = Emulator::new(Config::h200x2())?;
//! let driver = emulator.driver();
//! let location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
//! let prop = CUmemAllocationProp {
//!     type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
//!     location,
//!     ..Default::default()
//! };
//! let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
//! let (size, mut address, mut handle) = (2 << 20, 0, 0);
//! // SAFETY: the pointers are valid for the calls, and nothing else uses the memory.
//! unsafe {
//!     driver.cuInit(0)?;
//!     driver.cuMemAddressReserve(&mut address, size, 0, 0, 0)?;
//!     driver.cuMemCreate(&mut handle, size, &prop, 0)?;
//!     driver.cuMemMap(address, size, 0, handle, 0)?;
//!     driver.cuMemSetAccess(address, size, &access, 1)?;
//!     *(address as *mut u32) = 42;
//! }
//! assert_eq!(emulator.read(address, 4)?, 42_u32.to_ne_bytes());
//! assert_eq!(emulator.ledger().device_bytes, [2 << 20, 0]);
//! // SAFETY: the memory is not used any more.
//! unsafe {
//!     driver.cuMemUnmap(address, size)?;
//!     driver.cuMemRelease(handle)?;
//!     driver.cuMemAddressFree(address, size)?;
//! }
//! emulator.assert_empty();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Access
//!
//! The CPU stands for every device and for the host: an address can be read, or written, as soon as any location was given that access with
//! `cuMemSetAccess`, and faults before. What each location was given is kept apart: copies, sets and stream operations are refused
//! with `CUDA_ERROR_INVALID_VALUE` in the context of a device without access, and `cuMemGetAccess` answers for each location.
//! An address that maps a multicast object has no memory of its own and always faults; [`Emulator::multimem_store`] and its
//! siblings do what the device's instructions do.
//!
//! # Where it is stricter than a driver
//!
//! - A reservation's size must be a multiple of the granularity, not only of the page size.
//! - A set must not cross from one mapping into another. (The driver was seen to refuse the boundary of device and host memory.)
//! - Unbinding multicast memory with other values than it was bound with is refused; the driver leaves it undefined.
//! - Calls that captures forbid, which `cuda.h` does not list, are those that allocate or free plain memory, pin it, load or unload modules, or ask
//!   for an event or wait for a context on the host.
//! - A device holds one block on each multiprocessor, and a launch starts when all its blocks fit beside those that run; one of more blocks than
//!   there are multiprocessors runs alone. Other processes' launches do not count.
//! - Nothing waits forever: a stream's wait ends the context with `CUDA_ERROR_LAUNCH_TIMEOUT`, a multicast call whose devices do not all
//!   come returns `CUDA_ERROR_NOT_READY`, each after a time that the [`Config`] sets; the ledger tells of both.
//! - A stale or foreign handle is always `CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_INVALID_HANDLE` or `CUDA_ERROR_INVALID_CONTEXT`, never a crash.
//!
//! # Not affiliated with NVIDIA
//!
//! The rules come from NVIDIA's public CUDA Driver API reference and from measurements on a driver of CUDA 13.0. Multicast objects have not
//! been compared with hardware.

#![cfg_attr(docsrs, feature(doc_cfg))]
// The implementation's methods carry the names and the arguments of the C functions.
#![allow(non_snake_case, clippy::too_many_arguments)]

#[cfg(not(target_os = "linux"))]
compile_error!("cuda-vmm-emu needs Linux: memory is a memfd, and processes find each other through /proc");

mod attributes;
mod config;
mod context;
mod copy;
mod core;
mod device;
mod emulator;
mod error;
mod faults;
mod graph;
mod kernel;
pub mod ledger;
mod memory;
mod multicast;
mod residency;
mod share;
mod shims;
mod slots;
mod status;
mod stream;

pub use config::{Config, Fabric};
pub use cuda_vmm_sys as sys;
pub use device::Device;
pub use emulator::Emulator;
pub use error::EmulatorError;
pub use faults::Faults;
pub use kernel::{Kernel, Kernels, Launch, Module};
pub use ledger::{Incident, Ledger};
pub use memory::access::Access;
pub use memory::physical::Location;
pub use multicast::multimem::Element;
