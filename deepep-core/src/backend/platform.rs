//! Which driver a rank uses, and which backend goes with it.

use std::sync::Arc;

use cuda_vmm::sys::Origin;
use cuda_vmm::{Cuda, Device};
use cuda_vmm_emu::Emulator;

use super::Backend;
use super::cuda::{CudaBackend, Gpu, capability, capable, require_capable, require_kernels};
use super::host::HostBackend;
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree;
use crate::config::{BackendKind, Config};
use crate::error::{Error, Result};
use crate::layout::HeapLayout;
use crate::symmetric::Heap;
use crate::tensor::Space;

/// Memory of an emulated device: what the host can give, not the emulator, is the limit.
const EMULATED_BYTES: u64 = 1 << 44;

/// A driver, and what kind of backend works on its memory.
pub(crate) struct Platform {
    pub(crate) cuda: Cuda,
    pub(crate) kind: BackendKind,
}

impl Platform {
    /// A driver of the caller's is used as it is: a library goes with GPUs, one from a loader of the caller's own with the host backend, unless it runs kernels and
    /// the caller asks for that.
    pub(crate) fn choose(kind: BackendKind, given: Option<Cuda>) -> Result<Self> {
        let software = given.as_ref().is_some_and(|cuda| *cuda.driver().origin() == Origin::Custom);
        match (kind, given) {
            (BackendKind::Cuda, Some(cuda)) if software => {
                require_kernels(&cuda)?;
                Self::gpus(cuda)
            }
            (BackendKind::Host, Some(_)) if !software => {
                let need =
                    "the driver that was given is a real one, whose memory is not the CPU's; give none";
                Err(Error::invalid("backend", kind.name(), need))
            }
            (BackendKind::Host | BackendKind::Auto, Some(cuda)) if software => {
                Ok(Self { cuda, kind: BackendKind::Host })
            }
            (_, Some(cuda)) => Self::gpus(cuda),
            (BackendKind::Cuda, None) => Self::gpus(Cuda::get()?.clone()),
            (BackendKind::Host, None) => Self::emulated(),
            (BackendKind::Auto, None) => Self::auto(Cuda::get().ok()),
        }
    }

    /// GPUs if kernels run on any of them, else CPUs. A driver that can't tell is an error: nobody is to compute on CPUs for that reason.
    fn auto(cuda: Option<&Cuda>) -> Result<Self> {
        match cuda {
            Some(cuda) if !capable(cuda)?.is_empty() => Self::gpus(cuda.clone()),
            _ => Self::emulated(),
        }
    }

    fn gpus(cuda: Cuda) -> Result<Self> {
        require_capable(&cuda)?;
        Ok(Self { cuda, kind: BackendKind::Cuda })
    }

    /// A driver in software, one for each buffer.
    fn emulated() -> Result<Self> {
        let machine = cuda_vmm_emu::Config::new(1).each_device(|device| device.memory(EMULATED_BYTES));
        let emulator = Emulator::new(machine).map_err(|e| {
            Error::invalid("backend", "host", format!("the emulated driver doesn't start: {e}"))
        })?;
        Ok(Self { cuda: Cuda::with_driver(emulator.driver())?, kind: BackendKind::Host })
    }

    /// A rank's device: the one with the ordinal that was `asked` for, or else the one whose turn it is among those that kernels run on.
    /// Either starts again at the first if there are fewer, so that several ranks may share one.
    fn device(&self, asked: Option<usize>, local_rank: usize) -> Result<Device> {
        let mut devices = match (asked, self.kind) {
            (None, BackendKind::Cuda) => capable(&self.cuda)?,
            _ => self.cuda.devices()?,
        };
        if devices.is_empty() {
            return Err(Error::invalid("backend", self.kind.name(), "the driver shows no device to use"));
        }
        let device = devices.swap_remove(asked.unwrap_or(local_rank) % devices.len());
        if self.kind == BackendKind::Cuda {
            capability(&device)?;
        }
        Ok(device)
    }

    /// This rank's device, and who else has it. Collective.
    pub(crate) fn seat<B: Bootstrap + ?Sized>(
        &self,
        bootstrap: &B,
        asked: Option<usize>,
        local_rank: usize,
    ) -> Result<Seat> {
        let device = agree(bootstrap, "finding the device", self.device(asked, local_rank))?;
        let gpu = match self.kind {
            BackendKind::Cuda => Some(Gpu::find(bootstrap, &self.cuda, device.ordinal())?),
            BackendKind::Host | BackendKind::Auto => None,
        };
        Ok(Seat { device, gpu })
    }

    pub(crate) fn space(&self) -> Space {
        match self.kind {
            BackendKind::Cuda => Space::Device,
            BackendKind::Host | BackendKind::Auto => Space::Host,
        }
    }
}

/// A rank's device.
pub(crate) struct Seat {
    pub(crate) device: Device,
    /// On the CUDA backend.
    pub(crate) gpu: Option<Gpu>,
}

impl Seat {
    /// Starts the backend on a heap.
    pub(crate) fn start(
        &self,
        heap: &Arc<Heap>,
        layout: &HeapLayout,
        config: &Config,
    ) -> Result<Box<dyn Backend>> {
        let heap = heap.clone();
        Ok(match &self.gpu {
            None => Box::new(HostBackend::new(heap, *layout, config.timeout)?),
            Some(gpu) => Box::new(CudaBackend::new(heap, *layout, config, gpu)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use cuda_vmm::sys::CUdevice_attribute;

    use super::*;

    fn emulator() -> Cuda {
        machine(&[9, 9])
    }

    /// Devices of these generations.
    fn machine(majors: &[i32]) -> Cuda {
        let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let config = cuda_vmm_emu::Config::new(majors.len());
        let config = majors.iter().enumerate().fold(config, |config, (ordinal, &value)| {
            config.device(ordinal, |device| device.attribute(major, value))
        });
        Cuda::with_driver(Emulator::new(config).unwrap().driver()).unwrap()
    }

    #[test]
    fn cpus_are_taken_only_where_no_device_runs_kernels() {
        let kind = |cuda: Option<&Cuda>| Platform::auto(cuda).unwrap().kind;
        assert_eq!(kind(Some(&machine(&[9]))), BackendKind::Cuda);
        assert_eq!(kind(Some(&machine(&[7, 9]))), BackendKind::Cuda);
        assert_eq!(kind(Some(&machine(&[7, 8]))), BackendKind::Host);
        assert_eq!(kind(None), BackendKind::Host);
        assert!(Platform::gpus(machine(&[7, 8])).is_err());
    }

    #[test]
    fn ranks_get_devices_that_run_kernels() {
        let platform = Platform::gpus(machine(&[7, 9, 8, 10])).unwrap();
        let turn = |rank| platform.device(None, rank).unwrap().ordinal();
        assert_eq!([0, 1, 2, 3].map(turn), [1, 3, 1, 3]);
        let asked = |ordinal| platform.device(Some(ordinal), 0).map(|device| device.ordinal());
        assert_eq!((asked(1).unwrap(), asked(3).unwrap(), asked(5).unwrap()), (1, 3, 1));
        // Who asks for a device by its ordinal gets this one or an error.
        let error = asked(2).unwrap_err().to_string();
        assert!(error.contains("device 2 (") && error.contains("compute capability 8."), "{error}");
        // Emulated devices have no generation.
        let platform = Platform { cuda: machine(&[7, 7]), kind: BackendKind::Host };
        assert_eq!([0, 1, 2].map(|rank| platform.device(None, rank).unwrap().ordinal()), [0, 1, 0]);
    }

    #[test]
    fn a_driver_in_software_goes_with_the_host_backend() {
        for kind in [BackendKind::Auto, BackendKind::Host] {
            assert_eq!(Platform::choose(kind, Some(emulator())).unwrap().kind, BackendKind::Host);
        }
        let error = Platform::choose(BackendKind::Cuda, Some(emulator())).err().unwrap().to_string();
        assert!(error.starts_with("backend = cuda") && error.contains("software"), "{error}");
    }

    #[test]
    fn gpus_that_are_not_there_are_an_error_that_says_why() {
        match (Cuda::get(), Platform::choose(BackendKind::Cuda, None)) {
            (Err(why), Err(error)) => assert_eq!(error.to_string(), why.to_string()),
            (Err(why), Ok(_)) => panic!("{why}"),
            (Ok(cuda), chosen) => assert_eq!(chosen.is_ok(), require_capable(cuda).is_ok()),
        }
    }
}
