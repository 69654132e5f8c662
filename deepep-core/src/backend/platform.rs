//! Which driver a rank uses, and which backend goes with it.

use std::sync::Arc;

use cuda_vmm::sys::Origin;
use cuda_vmm::{Cuda, Device};
use cuda_vmm_emu::Emulator;

use super::Backend;
use super::cuda::{CudaBackend, Gpu, require_hopper};
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
    /// A driver of the caller's is used as it is: one in software goes with the host backend, a library with GPUs.
    pub(crate) fn choose(kind: BackendKind, given: Option<Cuda>) -> Result<Self> {
        let software = given.as_ref().is_some_and(|cuda| *cuda.driver().origin() == Origin::Custom);
        match (kind, given) {
            (BackendKind::Cuda, Some(_)) if software => {
                let need = "the driver that was given is one in software, which runs no kernels";
                Err(Error::invalid("backend", kind.name(), need))
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
            (BackendKind::Auto, None) => match Cuda::get() {
                Ok(cuda) if require_hopper(cuda).is_ok() => Self::gpus(cuda.clone()),
                _ => Self::emulated(),
            },
        }
    }

    fn gpus(cuda: Cuda) -> Result<Self> {
        require_hopper(&cuda)?;
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

    /// This rank's device: `wanted`, modulo the number of devices, so that several ranks may share one. Collective.
    pub(crate) fn seat<B: Bootstrap + ?Sized>(&self, bootstrap: &B, wanted: usize) -> Result<Seat> {
        let ordinal = (wanted % self.cuda.device_count().max(1) as usize) as i32;
        let device = agree(bootstrap, "finding the device", self.cuda.device(ordinal).map_err(Error::from))?;
        let gpu = match self.kind {
            BackendKind::Cuda => Some(Gpu::find(bootstrap, &self.cuda, ordinal)?),
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
    use super::*;

    fn emulator() -> Cuda {
        let emulator = Emulator::new(cuda_vmm_emu::Config::h200x2()).unwrap();
        Cuda::with_driver(emulator.driver()).unwrap()
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
            (Ok(cuda), chosen) => assert_eq!(chosen.is_ok(), require_hopper(cuda).is_ok()),
        }
    }
}
