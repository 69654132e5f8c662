//! The state of one emulator, and what every call passes through.

use crate::config::Config;
use crate::context::Contexts;
use crate::faults::Faults;
use crate::graph::Graphs;
use crate::kernel::Modules;
use crate::ledger::Incident;
use crate::memory::physical::{Account, Handles};
use crate::memory::space::Space;
use crate::residency::Residency;
use crate::status::{Outcome, code, lock, write};
use cuda_vmm_sys::{CUdevice_attribute, Function};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// One emulated driver.
///
/// Locks are taken in the order `contexts`, `handles`, `space`, a stream's, an event's. `space` is held for reading while memory is
/// copied, so that nothing is unmapped under a copy.
pub(crate) struct Core {
    /// Number that no other emulator of this process has or had.
    pub(crate) id: u64,
    pub(crate) config: Config,
    pub(crate) faults: Faults,
    pub(crate) initialized: AtomicBool,
    /// Set when the emulator and its drivers are gone: waiting streams give up.
    pub(crate) closed: AtomicBool,
    /// Launches and host functions that run. What is mapped stays so meanwhile.
    running: AtomicUsize,
    /// Blocks that run on each device.
    pub(crate) residency: Vec<Residency>,
    /// Memory in use on each device.
    pub(crate) accounts: Vec<Arc<Account>>,
    /// Multicast objects that this emulator created and that exist.
    pub(crate) multicast_objects: Arc<AtomicUsize>,
    pub(crate) contexts: Mutex<Contexts>,
    pub(crate) handles: Mutex<Handles>,
    pub(crate) space: RwLock<Space>,
    pub(crate) modules: Mutex<Modules>,
    pub(crate) graphs: Mutex<Graphs>,
    incidents: Mutex<Vec<Incident>>,
}

thread_local! {
    /// Whether this thread is running a host function of a stream.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host function; calls of the driver from it are refused meanwhile.
pub(crate) fn as_host_function(run: impl FnOnce()) {
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            IN_HOST_FUNCTION.set(self.0);
        }
    }
    let _reset = Reset(IN_HOST_FUNCTION.replace(true));
    run();
}

/// A number for a handle that was never given out before in this process. A stale or foreign handle is thereby known as such.
pub(crate) fn fresh_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x0100_0000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl Core {
    pub(crate) fn new(config: Config) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let accounts = config.devices.iter().map(|device| Arc::new(Account::new(device.memory))).collect();
        let multiprocessors = |device| {
            let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            config.attribute(device, count).unwrap_or(1).unsigned_abs().into()
        };
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            faults: Faults::new(),
            initialized: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            residency: (0..config.devices.len()).map(multiprocessors).map(Residency::new).collect(),
            accounts,
            multicast_objects: Arc::default(),
            contexts: Mutex::new(Contexts::new(config.devices.len())),
            handles: Mutex::default(),
            space: RwLock::default(),
            modules: Mutex::default(),
            graphs: Mutex::default(),
            incidents: Mutex::default(),
            config,
        }
    }

    /// What every call passes: counting, faults, and the rules that hold for all functions. The implementation runs if this is `Ok`; else the
    /// code is what the call returns, `CUDA_SUCCESS` included.
    pub(crate) fn admit(&self, function: Function) -> Outcome {
        if let Some(forced) = self.faults.on_call(function) {
            // The call ends here, made to succeed or to fail.
            return forced.and(Err(code::SUCCESS));
        }
        use Function as F;
        let early =
            matches!(function, F::cuInit | F::cuDriverGetVersion | F::cuGetErrorName | F::cuGetErrorString);
        if !early && !self.initialized.load(Ordering::Acquire) {
            return Err(code::NOT_INITIALIZED);
        }
        if !early && IN_HOST_FUNCTION.get() {
            return Err(code::NOT_PERMITTED);
        }
        match function {
            F::cuMemAlloc
            | F::cuMemFree
            | F::cuMemHostAlloc
            | F::cuMemFreeHost
            | F::cuMemHostRegister
            | F::cuMemHostUnregister
            | F::cuModuleLoadData
            | F::cuModuleUnload
            | F::cuCtxSynchronize => self.refuse_in_capture(),
            _ => Ok(()),
        }
    }

    pub(crate) fn note(&self, incident: Incident) {
        lock(&self.incidents).push(incident);
    }

    pub(crate) fn incidents(&self) -> Vec<Incident> {
        lock(&self.incidents).clone()
    }

    /// Runs code of the user's that may touch what is mapped. If the emulator ends meanwhile, the last such code unmaps.
    pub(crate) fn while_mapped(&self, run: impl FnOnce() -> Outcome) -> Outcome {
        // Either `close` sees that something runs, or this sees that it was called: both orders are of all threads.
        self.running.fetch_add(1, Ordering::SeqCst);
        let outcome = if self.closed.load(Ordering::SeqCst) { Err(code::DEINITIALIZED) } else { run() };
        if self.running.fetch_sub(1, Ordering::SeqCst) == 1 && self.closed.load(Ordering::SeqCst) {
            write(&self.space).clear();
        }
        outcome
    }

    /// Ends the emulator: what is left is unmapped and closed, at once or when the kernels end that still run.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let contexts = std::mem::take(&mut *lock(&self.contexts));
        let handles = std::mem::take(&mut *lock(&self.handles));
        let modules = std::mem::take(&mut *lock(&self.modules));
        let graphs = std::mem::take(&mut *lock(&self.graphs));
        if self.running.load(Ordering::SeqCst) == 0 {
            write(&self.space).clear();
        }
        drop((contexts, handles, modules, graphs));
    }
}
