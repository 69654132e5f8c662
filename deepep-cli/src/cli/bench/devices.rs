//! The GPUs that this process sees.

use cuda_vmm::Cuda;
use cuda_vmm::sys::CUdevice_attribute;

/// Visible GPUs that the kernels run on.
pub(super) struct Devices {
    pub(super) cuda: Option<&'static Cuda>,
    /// How many.
    pub(super) usable: usize,
    /// Why there are none, if so.
    pub(super) why: String,
}

impl Devices {
    pub(super) fn find() -> Self {
        let none = |cuda, why| Self { cuda, usable: 0, why };
        let cuda = match Cuda::get() {
            Ok(cuda) => cuda,
            Err(_) => return none(None, "no CUDA driver on this machine".into()),
        };
        let devices = cuda.devices().unwrap_or_default();
        if devices.is_empty() {
            return none(Some(cuda), "the driver shows no device".into());
        }
        let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        match devices.iter().find(|device| device.attribute(major).unwrap_or(0) < 9) {
            Some(device) => {
                let why = format!("device {} is older than Hopper", device.ordinal());
                none(Some(cuda), why)
            }
            None => Self { cuda: Some(cuda), usable: devices.len(), why: "as asked for".into() },
        }
    }

    /// Their ordinals.
    pub(super) fn ordinals(&self) -> Vec<i32> {
        (0..self.usable as i32).collect()
    }
}
