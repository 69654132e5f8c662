//! A rank's GPU, and how it shares it.

use cuda_vmm::sys::CUdevice_attribute;
use cuda_vmm::{Context, Cuda, Device};

use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree_with;
use crate::error::{Error, Result};

/// Lowest compute capability: kernels use bulk copies, which Hopper has first.
const HOPPER: u32 = 9;

/// Checks that kernels run on every device that the driver shows.
pub(crate) fn require_hopper(cuda: &Cuda) -> Result<()> {
    let devices = cuda.devices()?;
    if devices.is_empty() {
        return Err(Error::invalid("backend", "cuda", "the driver shows no device"));
    }
    devices.iter().try_for_each(|device| capability(device).map(drop))
}

/// A device's compute capability, if kernels run on it.
pub(super) fn capability(device: &Device) -> Result<[u32; 2]> {
    let attribute = |which| device.attribute(which).map(|v| u32::try_from(v).unwrap_or(0));
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major < HOPPER {
        let (ordinal, name) = (device.ordinal(), device.name()?);
        let problem = format!(
            "device {ordinal} ({name}) has compute capability {major}.{minor}; kernels need 9.0; \
             hide it with CUDA_VISIBLE_DEVICES or use the host backend"
        );
        return Err(Error::invalid("backend", "cuda", problem));
    }
    Ok([major, minor])
}

/// One rank's GPU.
#[derive(Clone)]
pub(crate) struct Gpu {
    context: Context,
    /// Ranks on this device, and those of them that are in this process.
    sharing: usize,
    in_process: usize,
}

impl Gpu {
    /// Finds out which ranks are on the same device. Collective.
    pub(crate) fn find<B: Bootstrap + ?Sized>(bootstrap: &B, cuda: &Cuda, ordinal: i32) -> Result<Self> {
        let open = || -> Result<(Device, Context, [u8; 16])> {
            let device = cuda.device(ordinal)?;
            let (context, uuid) = (device.primary_context()?, device.uuid()?);
            Ok((device, context, uuid.0))
        };
        let process = std::process::id().to_le_bytes();
        let identity = |uuid: &[u8; 16]| [&uuid[..], &process].concat();
        let opened = open();
        let ((_, context, uuid), all) =
            agree_with(bootstrap, "opening the device", opened, |(_, _, uuid)| identity(uuid))?;
        let in_process = all.iter().filter(|other| **other == identity(&uuid)).count();
        let sharing = all.iter().filter(|other| other.starts_with(&uuid)).count();
        Ok(Self { context, sharing: sharing.max(1), in_process: in_process.max(1) })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Whether no other rank launches kernels in this context: then the driver sees to it that all blocks of a kernel are resident.
    pub(crate) fn has_context_alone(&self) -> bool {
        self.in_process == 1
    }

    /// Multiprocessors that a kernel of this rank may use: what `most` says, and an equal share if ranks share the device, since
    /// all blocks of all their kernels must be resident at once.
    pub(crate) fn blocks(&self, most: Option<usize>) -> Result<usize> {
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let all = usize::try_from(self.context.device().attribute(which)?).unwrap_or(1);
        Ok(share(all, self.sharing).min(most.unwrap_or(usize::MAX)).max(1))
    }
}

/// One of `sharing` equal shares of a device's multiprocessors, with some left over for the callers' own kernels.
fn share(all: usize, sharing: usize) -> usize {
    match sharing {
        1 => all,
        ranks => ((all - all / 12) / ranks).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_fit_together() {
        assert_eq!(share(132, 1), 132);
        for all in [1, 7, 8, 78, 132, 148] {
            for ranks in 2..=8 {
                let one = share(all, ranks);
                assert!(one >= 1 && (one * ranks <= all || all < ranks), "{all} {ranks}");
            }
        }
        assert_eq!(share(132, 4), 30);
    }
}
