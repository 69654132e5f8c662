//! A rank's GPU, and how it shares it.

use std::os::unix::fs::MetadataExt as _;
use std::ptr;

use cuda_vmm::sys::{CUdevice_attribute, CUresult};
use cuda_vmm::{Context, Cuda, Device};

use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree_with;
use crate::error::{Error, Result};
use crate::tune::EARLY_LAUNCH;

/// Lowest compute capability: kernels use bulk copies, which Hopper has first.
const HOPPER: u32 = 9;

/// The devices that kernels run on.
pub(crate) fn capable(cuda: &Cuda) -> Result<Vec<Device>> {
    let mut capable = Vec::new();
    for device in cuda.devices()? {
        if compute_capability(&device)?[0] >= HOPPER {
            capable.push(device);
        }
    }
    Ok(capable)
}

/// Checks that there is a device that kernels run on.
pub(crate) fn require_capable(cuda: &Cuda) -> Result<()> {
    let devices = cuda.devices()?;
    if !capable(cuda)?.is_empty() {
        return Ok(());
    }
    // The first says enough.
    match devices.first() {
        None => Err(Error::invalid("backend", "cuda", "the driver shows no device")),
        Some(device) => capability(device).map(drop),
    }
}

/// Checks that a driver runs kernels: one in software may be about memory only.
pub(crate) fn require_kernels(cuda: &Cuda) -> Result<()> {
    let (mut module, image) = (ptr::null_mut(), [0_u8; 64]);
    let driver = cuda.driver();
    // SAFETY: `module` is valid for one write. The image is an empty string, which is no kernel: who runs kernels has something to say about that.
    match unsafe { driver.cuModuleLoadData(&mut module, image.as_ptr().cast()) } {
        Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_SUPPORTED) => {
            let need = "the driver that was given is one in software, which runs no kernels";
            Err(Error::invalid("backend", "cuda", need))
        }
        Err(_) => Ok(()),
        Ok(()) => {
            // SAFETY: loaded above, and nobody knows it.
            let _ = unsafe { driver.cuModuleUnload(module) };
            Ok(())
        }
    }
}

/// A device's compute capability, if kernels run on it.
pub(crate) fn capability(device: &Device) -> Result<[u32; 2]> {
    let [major, minor] = compute_capability(device)?;
    if major >= HOPPER {
        return Ok([major, minor]);
    }
    let (ordinal, name) = (device.ordinal(), device.name()?);
    let problem = format!(
        "device {ordinal} ({name}) has compute capability {major}.{minor}; kernels need 9.0; give the rank a device that has it, \
         or use the host backend"
    );
    Err(Error::invalid("backend", "cuda", problem))
}

fn compute_capability(device: &Device) -> Result<[u32; 2]> {
    let attribute = |which| device.attribute(which).map(|v| u32::try_from(v).unwrap_or(0));
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok([major, minor])
}

/// Tells this process from others: ids of processes mean something in their own namespace only, and ranks may be in several containers.
fn process() -> [u8; 12] {
    // Where it can't be read, ids alone must do.
    let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&namespace.to_le_bytes());
    bytes[8..].copy_from_slice(&std::process::id().to_le_bytes());
    bytes
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
        let identity = |uuid: &[u8; 16]| [&uuid[..], &process()].concat();
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

    /// Whether kernels of this rank are launched early; `asked`: what its caller wants. The blocks of an early kernel would take the place of another
    /// rank's, for which the one before it waits.
    pub(crate) fn early(&self, asked: Option<bool>) -> Result<bool> {
        match asked {
            Some(true) if self.sharing > 1 => {
                let (ordinal, sharing) = (self.context.device().ordinal(), self.sharing);
                let need = format!(
                    "{sharing} ranks share device {ordinal}, whose early kernels would keep each other out; give each rank a device, or leave it out"
                );
                Err(Error::invalid("early_launch", true, need))
            }
            Some(asked) => Ok(asked),
            None => Ok(EARLY_LAUNCH && self.sharing == 1),
        }
    }

    /// Multiprocessors that a kernel of this rank may use: what `most` says, and an equal share if ranks share the device, since
    /// all blocks of all their kernels must be resident at once.
    pub(crate) fn blocks(&self, most: Option<usize>) -> Result<usize> {
        let (device, which) =
            (self.context.device(), CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let all = usize::try_from(device.attribute(which)?).unwrap_or(1);
        let Some(share) = share(all, self.sharing) else {
            let (ordinal, sharing) = (device.ordinal(), self.sharing);
            let need = format!(
                "device {ordinal} has {all} multiprocessors, eleven twelfths of which are shared out: each rank needs one of its own"
            );
            return Err(Error::invalid("ranks on one device", sharing, need));
        };
        Ok(share.min(most.unwrap_or(usize::MAX)).max(1))
    }
}

/// One of `sharing` equal shares of a device's multiprocessors, with some left over for the callers' own kernels; `None` if that is none.
fn share(all: usize, sharing: usize) -> Option<usize> {
    match sharing {
        1 => Some(all),
        ranks => (all - all / 12).checked_div(ranks).filter(|&share| share > 0),
    }
}

#[cfg(test)]
mod tests {
    use cuda_vmm_emu::{Config, Emulator};

    use super::*;

    #[test]
    fn shares_fit_together() {
        assert_eq!(share(132, 1), Some(132));
        for all in [1, 7, 8, 78, 132, 148] {
            for ranks in 2..=8 {
                match share(all, ranks) {
                    Some(one) => assert!(one >= 1 && one * ranks <= all, "{all} {ranks}"),
                    // Blocks that are never all resident would wait until the deadline.
                    None => assert!(all - all / 12 < ranks, "{all} {ranks}"),
                }
            }
        }
        assert_eq!(share(132, 4), Some(30));
    }

    fn machine(majors: &[i32]) -> Cuda {
        let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let config =
            majors.iter().enumerate().fold(Config::new(majors.len()), |config, (ordinal, &value)| {
                config.device(ordinal, |device| device.attribute(major, value))
            });
        Cuda::with_driver(Emulator::new(config).unwrap().driver()).unwrap()
    }

    #[test]
    fn kernels_run_on_hopper_or_later() {
        let cuda = machine(&[7, 9, 8, 10]);
        let ordinals: Vec<i32> = capable(&cuda).unwrap().iter().map(Device::ordinal).collect();
        assert_eq!(ordinals, [1, 3]);
        require_capable(&cuda).unwrap();
        let error = capability(&cuda.device(2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("device 2 (") && error.contains("compute capability 8."), "{error}");
        let error = require_capable(&machine(&[8, 8])).unwrap_err().to_string();
        assert!(error.contains("device 0 ("), "{error}");
    }

    #[test]
    fn ranks_that_share_a_device_need_a_multiprocessor_each() {
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let config = Config::new(1).each_device(|device| device.attribute(which, 3));
        let emulator = Emulator::new(config).unwrap();
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        let context = cuda.device(0).unwrap().primary_context().unwrap();
        let gpu = |sharing| Gpu { context: context.clone(), sharing, in_process: sharing };
        assert_eq!(gpu(1).blocks(None).unwrap(), 3);
        assert_eq!(gpu(3).blocks(None).unwrap(), 1);
        assert_eq!(gpu(1).blocks(Some(2)).unwrap(), 2);
        let error = gpu(4).blocks(None).unwrap_err().to_string();
        assert!(error.starts_with("ranks on one device = 4: device 0 has 3 multiprocessors"), "{error}");
    }

    #[test]
    fn ranks_that_share_a_device_do_not_launch_early() {
        let emulator = Emulator::new(Config::new(1)).unwrap();
        let context =
            Cuda::with_driver(emulator.driver()).unwrap().device(0).unwrap().primary_context().unwrap();
        let gpu = |sharing| Gpu { context: context.clone(), sharing, in_process: 1 };
        assert_eq!(gpu(1).early(None).unwrap(), EARLY_LAUNCH);
        assert!(gpu(1).early(Some(true)).unwrap() && !gpu(1).early(Some(false)).unwrap());
        assert!(!gpu(2).early(None).unwrap() && !gpu(2).early(Some(false)).unwrap());
        let error = gpu(2).early(Some(true)).unwrap_err().to_string();
        assert!(error.starts_with("early_launch = true: 2 ranks share device 0"), "{error}");
    }

    #[test]
    fn a_process_knows_itself() {
        assert_eq!(process(), process());
        assert_eq!(process()[8..], std::process::id().to_le_bytes());
    }
}
