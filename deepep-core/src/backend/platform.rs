//! Which driver a rank uses, and which backend goes with it.

use std::sync::Arc;

use cuda_vmm::Cuda;
use cuda_vmm_emu::Emulator;

use super::Backend;
use super::host::HostBackend;
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
    pub(crate) fn choose(kind: BackendKind, given: Option<Cuda>) -> Result<Self> {
        match (kind, given) {
            (BackendKind::Cuda, _) => {
                Err(Error::invalid("backend", kind.name(), "this version runs on the host backend only"))
            }
            (BackendKind::Host | BackendKind::Auto, Some(cuda)) => Ok(Self { cuda, kind: BackendKind::Host }),
            (BackendKind::Host | BackendKind::Auto, None) => Self::emulated(),
        }
    }

    /// A driver in software, one for each buffer.
    fn emulated() -> Result<Self> {
        let machine = cuda_vmm_emu::Config::new(1).each_device(|device| device.memory(EMULATED_BYTES));
        let emulator = Emulator::new(machine).map_err(|e| {
            Error::invalid("backend", "host", format!("the emulated driver doesn't start: {e}"))
        })?;
        Ok(Self { cuda: Cuda::with_driver(emulator.driver())?, kind: BackendKind::Host })
    }

    /// The device for this rank: `wanted`, modulo the number of devices, so that several ranks may share one.
    pub(crate) fn device(&self, wanted: usize) -> i32 {
        (wanted % self.cuda.device_count().max(1) as usize) as i32
    }

    pub(crate) fn space(&self) -> Space {
        match self.kind {
            BackendKind::Cuda => Space::Device,
            BackendKind::Host | BackendKind::Auto => Space::Host,
        }
    }
}

/// Starts the backend of a kind on a heap.
pub(crate) fn start(
    kind: BackendKind,
    heap: &Arc<Heap>,
    layout: &HeapLayout,
    config: &Config,
) -> Result<Box<dyn Backend>> {
    match kind {
        BackendKind::Host | BackendKind::Auto => {
            Ok(Box::new(HostBackend::new(heap.clone(), *layout, config.timeout)?))
        }
        BackendKind::Cuda => {
            Err(Error::invalid("backend", kind.name(), "this version runs on the host backend only"))
        }
    }
}
