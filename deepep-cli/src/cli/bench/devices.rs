//! The GPUs that this process sees.

use cuda_vmm::{Cuda, Device};
use deepep_core::device;

/// Visible GPUs that the kernels run on.
pub(super) struct Devices {
    pub(super) cuda: Option<&'static Cuda>,
    ordinals: Vec<i32>,
    /// Why there are none, if so.
    pub(super) why: String,
}

impl Devices {
    pub(super) fn find() -> Self {
        let none = |cuda, why| Self { cuda, ordinals: Vec::new(), why };
        let cuda = match Cuda::get() {
            Ok(cuda) => cuda,
            Err(error) => return none(None, error.to_string()),
        };
        let ordinals: Vec<i32> = match device::usable(cuda) {
            Ok(devices) => devices.iter().map(Device::ordinal).collect(),
            Err(error) => return none(Some(cuda), error.to_string()),
        };
        match (cuda.device_count(), &ordinals[..]) {
            (0, _) => none(Some(cuda), "the driver shows no device".into()),
            (_, []) => none(Some(cuda), "all devices are older than Hopper".into()),
            _ => Self { cuda: Some(cuda), ordinals, why: "as asked for".into() },
        }
    }

    /// How many.
    pub(super) fn usable(&self) -> usize {
        self.ordinals.len()
    }

    /// Their ordinals.
    pub(super) fn ordinals(&self) -> Vec<i32> {
        self.ordinals.clone()
    }
}
