//! Multicast objects (NVLink SHARP): one address behind which the memory of several devices lies.
//!
//! A store to the address goes to the memory of every device, and a load can reduce over all of them, done by the NVLink switches
//! (`multimem` instructions). Between the object and the address stand four steps in a fixed order, and CUDA blocks or leaves the
//! outcome undefined where the order is not kept. Here each step is a type of its own, so that the wrong order does not compile:
//!
//! 1. [`Incomplete`]: the object, [created](Incomplete::create) or imported from another process. [Devices](Incomplete::add_device)
//!    are added to it, each once.
//! 2. [`Object`]: all devices are there. Within one process [`Incomplete::complete`] counts them; across processes
//!    [`Incomplete::complete_with`] has all members agree on it. Memory is [bound](Object::bind), and the object [mapped](Object::map).
//! 3. [`Binding`] and [`MappedObject`]: one device's memory as a part of the object, and the object at addresses that nobody may use yet.
//! 4. [`Multicast`]: the address, once every byte is bound on every device.
//!
//! Dropping goes the other way: what is unmapped, unbound and released last is what came first, and a binding is undone with exactly
//! the values that it was made with.
//!
//! [`Team`] takes all the steps for several processes, with an agreement after each of them: a member that fails, or is gone, makes
//! every member return an error by a deadline instead of waiting for it.
//!
//! ```
//! use cuda_vmm::multicast::{Incomplete, ObjectProperties};
//! use cuda_vmm::{Cuda, Grant, PhysicalMemory};
//! # use cuda_vmm_emu::{Config, Emulator};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # if cuda_vmm::multicast_disabled_by().is_some() { return Ok(()) }
//! # let emulator = Emulator::new(Config::h200x2())?;
//! # let cuda = Cuda::with_driver(emulator.driver())?;
//! // One process with two devices.
//! let properties = ObjectProperties::fitting(&cuda, 2, 1 << 20, &cuda_vmm::Properties::device(0))?;
//! let mut object = Incomplete::create(&cuda, &properties)?;
//! for device in cuda.devices()? {
//!     object.add_device(&device)?;
//! }
//! let object = object.complete()?;
//! let mut bindings = Vec::new();
//! for device in 0..2 {
//!     let kind = cuda_vmm::Properties::device(device);
//!     let memory = PhysicalMemory::create(&cuda, object.size(), &kind)?;
//!     bindings.push(object.bind(0, &memory, 0, object.size())?);
//! }
//! let grants = [Grant::device(0), Grant::device(1)];
//! let multicast = object.map()?.activate(bindings, &grants)?;
//! println!("kernels store to both devices at {}", multicast.address());
//! # Ok(())
//! # }
//! ```
//!
//! # What has been run
//! All of this is tested on the software driver, in one process and several. **No multicast object has been created on hardware by the
//! authors**: on GPUs only the support and granularity queries, and the refusal below, have been run.
//!
//! # Switched off
//! Multicast objects take resources of the whole NVLink fabric. With `CUDA_VMM_DISABLE_MULTICAST=1` or `NCCL_NVLS_ENABLE=0` in the
//! environment, whatever would create or import one returns [`Error::MulticastDisabled`] before the driver is called.

mod agreement;
mod binding;
mod mapped;
mod object;
mod outcome;
mod properties;
mod star;
mod team;

pub use agreement::Agreement;
pub use binding::Binding;
pub use mapped::{MappedObject, Multicast};
pub use object::{Incomplete, Object};
pub use properties::ObjectProperties;
pub use star::SocketStar;
pub use team::{Options, Team};

use crate::capabilities::Support;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::switch::multicast_disabled_by;
use cuda_vmm_sys::{CUdevice_attribute, Function};
use std::time::{Duration, Instant};

/// What a device says of multicast: [`Support::No`], [`Support::Claimed`] (never tried: trying would create an object), or
/// [`Support::SwitchedOff`]. A driver that does not know the attribute has no multicast.
///
/// # Errors
/// [`Error::Call`] if the driver does not answer.
#[doc(alias = "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED")]
pub fn support(device: &Device) -> Result<Support> {
    let claimed = device.claims(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)?
        && device.cuda().driver().has(Function::cuMulticastCreate);
    Ok(match multicast_disabled_by() {
        _ if !claimed => Support::No,
        Some(variable) => Support::SwitchedOff(variable),
        None => Support::Claimed,
    })
}

/// Whether a device can take part in multicast objects in this process: it claims so, and nothing switches them off.
#[must_use]
pub fn supported(device: &Device) -> bool {
    support(device).is_ok_and(|support| support == Support::Claimed)
}

/// Refuses where multicast is switched off.
fn check_switch() -> Result<()> {
    match multicast_disabled_by() {
        Some(variable) => Err(Error::MulticastDisabled { variable }),
        None => Ok(()),
    }
}

/// The moment that a timeout ends. One beyond the clock's range is a year.
fn until(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(365 * 24 * 3600))
}
