//! What the emulated machine looks like.

use crate::device::Device;
use crate::error::EmulatorError;
use crate::kernel::{Installed, Kernels};
use cuda_vmm_sys::Function;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How the driver treats FABRIC handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fabric {
    /// The device attribute says no, and creating returns `CUDA_ERROR_NOT_SUPPORTED`.
    Unsupported,
    /// The device attribute says yes, but there is no IMEX channel: creating and importing return `CUDA_ERROR_NOT_PERMITTED`.
    /// This is how 2×H200 without the IMEX service answered us.
    NoImexChannel,
    /// FABRIC handles work.
    Working,
}

/// The machine that an [`Emulator`](crate::Emulator) plays: devices, limits, and what its driver claims and refuses.
///
/// A builder by value. Sizes are in bytes. [`Config::h200x2`] mirrors a machine that was measured; [`Config::new`] gives small
/// devices with the same manners.
///
/// ```
/// use cuda_vmm_emu::{Config, Emulator, Fabric};
///
/// let config = Config::new(4).granularity(64 << 10).fabric(Fabric::Working).driver_version(12_080);
/// let emulator = Emulator::new(config)?;
/// assert_eq!(emulator.driver().version(), 12_080);
/// # Ok::<(), cuda_vmm_emu::EmulatorError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    pub(crate) devices: Vec<Device>,
    pub(crate) driver_version: i32,
    pub(crate) granularity: usize,
    pub(crate) recommended_granularity: usize,
    pub(crate) numa_nodes: Vec<i32>,
    pub(crate) unreachable: BTreeSet<(usize, usize)>,
    pub(crate) posix_fd: bool,
    pub(crate) fabric: Fabric,
    pub(crate) dma_buf: bool,
    pub(crate) host_memory: bool,
    pub(crate) host_access_to_devices: bool,
    pub(crate) multicast: bool,
    pub(crate) multicast_granularity: usize,
    pub(crate) multicast_recommended_granularity: usize,
    pub(crate) multicast_slots: usize,
    pub(crate) multicast_deadline: Duration,
    pub(crate) stream_deadline: Duration,
    pub(crate) slot_deadline: Duration,
    pub(crate) missing: BTreeSet<Function>,
    pub(crate) kernels: Option<Installed>,
}

impl Default for Config {
    /// Two small devices: [`Config::new(2)`](Config::new).
    fn default() -> Self {
        Self::new(2)
    }
}

impl Config {
    /// `devices` devices of 4 GiB on one NUMA node, all peers of each other, with the manners of the H200 machine: granularity 2 MiB,
    /// fds work, FABRIC is claimed and refused, multicast is supported, dma-buf is not, CUDA 13.1.
    #[must_use]
    pub fn new(devices: usize) -> Self {
        Self {
            devices: (0..devices).map(Device::new).collect(),
            driver_version: 13_010,
            granularity: 2 << 20,
            recommended_granularity: 2 << 20,
            numa_nodes: vec![0],
            unreachable: BTreeSet::new(),
            posix_fd: true,
            fabric: Fabric::NoImexChannel,
            dma_buf: false,
            host_memory: true,
            host_access_to_devices: false,
            multicast: true,
            multicast_granularity: 2 << 20,
            multicast_recommended_granularity: 2 << 20,
            multicast_slots: 64,
            multicast_deadline: Duration::from_secs(5),
            stream_deadline: Duration::from_secs(30),
            slot_deadline: Duration::from_secs(30),
            missing: BTreeSet::new(),
            kernels: None,
        }
    }

    /// The machine of two H200 on which the real driver was measured (driver 580.159, CUDA 13.0): 141 GB each, dma-buf, two devices
    /// that reach each other, FABRIC claimed and refused.
    #[must_use]
    pub fn h200x2() -> Self {
        let mut config = Self::new(2).driver_version(13_000).dma_buf(true);
        for device in &mut config.devices {
            *device = device.clone().name("NVIDIA H200").memory(143_771 << 20);
        }
        config
    }

    /// CUDA version that the driver reports, as `1000 * major + 10 * minor`. Functions that came later are absent from its table, and
    /// attributes that came later are refused.
    #[must_use]
    pub fn driver_version(mut self, version: i32) -> Self {
        self.driver_version = version;
        self
    }

    /// Changes the device with an ordinal; an ordinal that does not exist changes nothing.
    #[must_use]
    pub fn device(mut self, ordinal: usize, change: impl FnOnce(Device) -> Device) -> Self {
        if let Some(device) = self.devices.get_mut(ordinal) {
            *device = change(device.clone());
        }
        self
    }

    /// Changes every device.
    #[must_use]
    pub fn each_device(mut self, mut change: impl FnMut(Device) -> Device) -> Self {
        for device in &mut self.devices {
            *device = change(device.clone());
        }
        self
    }

    /// Minimum and recommended granularity of physical memory and of reservations.
    #[must_use]
    pub fn granularity(mut self, bytes: usize) -> Self {
        self.granularity = bytes;
        self.recommended_granularity = bytes;
        self
    }

    /// Recommended granularity alone.
    #[must_use]
    pub fn recommended_granularity(mut self, bytes: usize) -> Self {
        self.recommended_granularity = bytes;
        self
    }

    /// Host NUMA nodes that memory can be created on. Each must exist only in this list: memory is not placed.
    #[must_use]
    pub fn numa_nodes(mut self, nodes: impl IntoIterator<Item = i32>) -> Self {
        self.numa_nodes = nodes.into_iter().collect();
        self
    }

    /// Takes the link between two devices away, in both directions.
    #[must_use]
    pub fn no_peer_access(mut self, one: usize, other: usize) -> Self {
        self.unreachable.extend([(one, other), (other, one)]);
        self
    }

    /// Whether memory can be exported as a file descriptor.
    #[must_use]
    pub fn posix_fd(mut self, supported: bool) -> Self {
        self.posix_fd = supported;
        self
    }

    /// How FABRIC handles behave.
    #[must_use]
    pub fn fabric(mut self, fabric: Fabric) -> Self {
        self.fabric = fabric;
        self
    }

    /// Whether `cuMemGetHandleForAddressRange` gives a file descriptor.
    #[must_use]
    pub fn dma_buf(mut self, supported: bool) -> Self {
        self.dma_buf = supported;
        self
    }

    /// Whether memory can be created on the host at large (`CU_MEM_LOCATION_TYPE_HOST`).
    #[must_use]
    pub fn host_memory(mut self, supported: bool) -> Self {
        self.host_memory = supported;
        self
    }

    /// Whether the host may be given access to device memory, as on machines whose CPU and GPUs are coherent.
    #[must_use]
    pub fn host_access_to_devices(mut self, supported: bool) -> Self {
        self.host_access_to_devices = supported;
        self
    }

    /// Whether devices support multicast objects.
    #[must_use]
    pub fn multicast(mut self, supported: bool) -> Self {
        self.multicast = supported;
        self
    }

    /// Minimum and recommended granularity of multicast objects.
    #[must_use]
    pub fn multicast_granularity(mut self, minimum: usize, recommended: usize) -> Self {
        self.multicast_granularity = minimum;
        self.multicast_recommended_granularity = recommended;
        self
    }

    /// Multicast objects that this emulator may have created at a time; one more is `CUDA_ERROR_OUT_OF_MEMORY`.
    #[must_use]
    pub fn multicast_slots(mut self, objects: usize) -> Self {
        self.multicast_slots = objects;
        self
    }

    /// How long binding or mapping waits for the object's devices to be added. A driver would wait forever; here the call then returns
    /// `CUDA_ERROR_NOT_READY` and the ledger tells of it.
    #[must_use]
    pub fn multicast_deadline(mut self, deadline: Duration) -> Self {
        self.multicast_deadline = deadline;
        self
    }

    /// How long one operation of a stream waits for a value or an event. A driver would wait forever; here the context then fails
    /// with `CUDA_ERROR_LAUNCH_TIMEOUT` and the ledger tells of it.
    #[must_use]
    pub fn stream_deadline(mut self, deadline: Duration) -> Self {
        self.stream_deadline = deadline;
        self
    }

    /// How long [`Emulator::new`](crate::Emulator::new) waits while all emulators of the process are in use.
    #[must_use]
    pub fn slot_deadline(mut self, deadline: Duration) -> Self {
        self.slot_deadline = deadline;
        self
    }

    /// Leaves a function out of the driver's table, as in a driver that lacks it.
    #[must_use]
    pub fn without(mut self, function: Function) -> Self {
        self.missing.insert(function);
        self
    }

    /// What runs in place of the devices' kernels. Without it, loading a module is `CUDA_ERROR_NOT_SUPPORTED`.
    #[must_use]
    pub fn kernels(mut self, kernels: Arc<dyn Kernels>) -> Self {
        self.kernels = Some(Installed(kernels));
        self
    }

    /// Whether one device reaches another's memory; each reaches its own.
    pub(crate) fn reaches(&self, from: usize, to: usize) -> bool {
        from == to || !self.unreachable.contains(&(from, to))
    }

    /// Handle types that this driver knows, as a bit mask.
    pub(crate) fn known_handle_types(&self) -> u32 {
        const FD: u32 = 1;
        const FABRIC: u32 = 8;
        if self.driver_version >= 12_030 { FD | FABRIC } else { FD }
    }

    pub(crate) fn validate(&self) -> Result<(), EmulatorError> {
        let fail = |field, problem| Err(EmulatorError::Config { field, problem });
        if self.devices.len() > MAX_DEVICES {
            return fail("devices", format!("are {}, more than {MAX_DEVICES}", self.devices.len()));
        }
        let page = rustix::param::page_size();
        for (field, bytes) in [
            ("granularity", self.granularity),
            ("recommended granularity", self.recommended_granularity),
            ("multicast granularity", self.multicast_granularity),
            ("recommended multicast granularity", self.multicast_recommended_granularity),
        ] {
            if !bytes.is_power_of_two() || bytes < page {
                return fail(field, format!("is {bytes}, not a power of two of at least a page ({page})"));
            }
        }
        if self.recommended_granularity < self.granularity {
            return fail("recommended granularity", "is less than the minimum".into());
        }
        if self.multicast_recommended_granularity < self.multicast_granularity {
            return fail("recommended multicast granularity", "is less than the minimum".into());
        }
        for (ordinal, device) in self.devices.iter().enumerate() {
            if self.devices[..ordinal].iter().any(|other| other.uuid == device.uuid) {
                return fail("uuid", format!("of device {ordinal} is another device's"));
            }
        }
        if let Some((a, b)) = self.unreachable.iter().find(|(a, b)| a.max(b) >= &self.devices.len()) {
            return fail("peer access", format!("names devices {a} and {b} of {}", self.devices.len()));
        }
        if self.driver_version < 10_020 {
            return fail("driver version", format!("is {}, older than virtual memory", self.driver_version));
        }
        Ok(())
    }
}

/// Devices that one emulator may have.
pub(crate) const MAX_DEVICES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_machine_could_have_is_refused_with_the_value() {
        for (config, field) in [
            (Config::new(1).granularity(3), "granularity"),
            (Config::new(1).granularity(1 << 20).recommended_granularity(1 << 16), "recommended granularity"),
            (Config::new(1).multicast_granularity(1 << 21, 1 << 16), "recommended multicast granularity"),
            (Config::new(2).device(1, |d| d.uuid(Device::new(0).uuid)), "uuid"),
            (Config::new(2).no_peer_access(0, 2), "peer access"),
            (Config::new(65), "devices"),
            (Config::new(1).driver_version(9000), "driver version"),
        ] {
            match config.validate() {
                Err(EmulatorError::Config { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
        }
        assert_eq!(Config::h200x2().validate(), Ok(()));
        assert_eq!(Config::default().validate(), Ok(()));
    }
}
