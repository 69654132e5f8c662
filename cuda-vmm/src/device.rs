//! Devices: what they are and how they reach each other.

use crate::context::Context;
use crate::cuda::Cuda;
use crate::error::{Attempt, Result};
use cuda_vmm_sys::ffi::{CStr, c_char, c_int};
use cuda_vmm_sys::{CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUresult, CUuuid};
use std::fmt;

/// A CUDA device.
#[derive(Clone)]
pub struct Device {
    cuda: Cuda,
    ordinal: i32,
    raw: CUdevice,
}

impl Cuda {
    /// The device with this ordinal, from zero.
    ///
    /// Calls `cuDeviceGet`.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`](crate::Error::UnknownDevice) if there is none.
    #[doc(alias = "cuDeviceGet")]
    pub fn device(&self, ordinal: i32) -> Result<Device> {
        self.check_device(ordinal)?;
        let mut raw = 0;
        // SAFETY: `raw` is valid for one write, and the ordinal was checked against the count.
        unsafe { self.driver().cuDeviceGet(&mut raw, ordinal) }
            .attempt(|| format!("getting device {ordinal}"))?;
        Ok(Device { cuda: self.clone(), ordinal, raw })
    }

    /// All devices.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn devices(&self) -> Result<Vec<Device>> {
        (0..self.device_count()).map(|ordinal| self.device(ordinal)).collect()
    }
}

/// Identity of a device: the same in every process, whatever `CUDA_VISIBLE_DEVICES` shows it as.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Device {
    /// The driver.
    #[must_use]
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The device's ordinal in this process.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The raw handle.
    #[must_use]
    pub fn as_raw(&self) -> CUdevice {
        self.raw
    }

    /// The device's name.
    ///
    /// Calls `cuDeviceGetName`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDeviceGetName")]
    pub fn name(&self) -> Result<String> {
        self.text("the name", |out, length| {
            // SAFETY: `out` is valid for `length` bytes.
            unsafe { self.cuda.driver().cuDeviceGetName(out, length, self.raw) }
        })
    }

    /// The PCI address, as `domain:bus:device.function` in hexadecimal.
    ///
    /// Calls `cuDeviceGetPCIBusId`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDeviceGetPCIBusId")]
    pub fn pci_bus_id(&self) -> Result<String> {
        self.text("the PCI address", |out, length| {
            // SAFETY: `out` is valid for `length` bytes.
            unsafe { self.cuda.driver().cuDeviceGetPCIBusId(out, length, self.raw) }
        })
    }

    fn text(
        &self,
        what: &str,
        call: impl FnOnce(*mut c_char, c_int) -> Result<(), cuda_vmm_sys::CallError>,
    ) -> Result<String> {
        let mut bytes = [0_u8; 256];
        // One byte less than there is: the text ends with a NUL whatever the driver does at the limit.
        call(bytes.as_mut_ptr().cast(), 255)
            .attempt(|| format!("asking device {} for {what}", self.ordinal))?;
        Ok(CStr::from_bytes_until_nul(&bytes)
            .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned()))
    }

    /// The device's identity.
    ///
    /// Calls `cuDeviceGetUuid`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDeviceGetUuid")]
    pub fn uuid(&self) -> Result<Uuid> {
        let mut uuid = CUuuid::default();
        // SAFETY: `uuid` is valid for one write.
        unsafe { self.cuda.driver().cuDeviceGetUuid(&mut uuid, self.raw) }
            .attempt(|| format!("asking device {} for its UUID", self.ordinal))?;
        Ok(Uuid(uuid.bytes.map(|byte| byte as u8)))
    }

    /// Bytes of memory on the device.
    ///
    /// Calls `cuDeviceTotalMem`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDeviceTotalMem")]
    pub fn total_memory(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: `bytes` is valid for one write.
        unsafe { self.cuda.driver().cuDeviceTotalMem(&mut bytes, self.raw) }
            .attempt(|| format!("asking device {} for its memory", self.ordinal))?;
        Ok(bytes)
    }

    /// One attribute.
    ///
    /// Calls `cuDeviceGetAttribute`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call); drivers that do not know the attribute return `CUDA_ERROR_INVALID_VALUE`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` is valid for one write.
        unsafe { self.cuda.driver().cuDeviceGetAttribute(&mut value, attribute, self.raw) }
            .attempt(|| format!("asking device {} for attribute {}", self.ordinal, attribute.0))?;
        Ok(value)
    }

    /// One attribute; `None` if the driver is too old to know it.
    fn known_attribute(&self, attribute: CUdevice_attribute) -> Result<Option<i32>> {
        match self.attribute(attribute) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_INVALID_VALUE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether an attribute is set. A driver that does not know it does not have the thing.
    pub(crate) fn claims(&self, attribute: CUdevice_attribute) -> Result<bool> {
        Ok(self.known_attribute(attribute)?.is_some_and(|value| value != 0))
    }

    /// NUMA node of the host that is closest to the device; `None` if the driver names none.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    pub fn host_numa_node(&self) -> Result<Option<i32>> {
        let node = self.known_attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID)?;
        Ok(node.filter(|&node| node >= 0))
    }

    /// Whether this device can address the memory of `peer`. A device reaches itself.
    ///
    /// Calls `cuDeviceCanAccessPeer`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDeviceCanAccessPeer")]
    pub fn can_access(&self, peer: &Self) -> Result<bool> {
        if self.raw == peer.raw {
            return Ok(true);
        }
        let mut yes = 0;
        // SAFETY: `yes` is valid for one write.
        unsafe { self.cuda.driver().cuDeviceCanAccessPeer(&mut yes, self.raw, peer.raw) }
            .attempt(|| format!("asking whether device {} reaches device {}", self.ordinal, peer.ordinal))?;
        Ok(yes != 0)
    }

    /// One attribute of the link from this device to `peer`.
    ///
    /// Calls `cuDeviceGetP2PAttribute`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDeviceGetP2PAttribute")]
    pub fn link_attribute(&self, peer: &Self, attribute: CUdevice_P2PAttribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` is valid for one write.
        unsafe { self.cuda.driver().cuDeviceGetP2PAttribute(&mut value, attribute, self.raw, peer.raw) }
            .attempt(|| {
                format!("asking for the link from device {} to device {}", self.ordinal, peer.ordinal)
            })?;
        Ok(value)
    }

    /// The device's primary context, the one that the CUDA runtime and every library in the process use.
    ///
    /// Calls `cuDevicePrimaryCtxRetain`.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn primary_context(&self) -> Result<Context> {
        Context::retain(self)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw && self.cuda.is_same(&other.cuda)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.ordinal).finish()
    }
}
