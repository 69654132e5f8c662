//! The emulator as its users see it.

use crate::config::Config;
use crate::core::Core;
use crate::error::EmulatorError;
use crate::faults::Faults;
use crate::ledger::Ledger;
use crate::memory::access::Need;
use crate::shims;
use crate::slots::{SLOTS, Slot};
use crate::status::read;
use cuda_vmm_sys::{CUdeviceptr, Driver, Function, LoadError};
use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;

/// A CUDA driver in software.
///
/// It gives out [`Driver`] tables like that of a loaded `libcuda.so.1`. A clone is the same emulator. Addresses, handles and memory live until
/// the emulator, its clones and all its drivers are dropped; then whatever is left is unmapped.
///
/// Several emulators of one process do not know each other, as if each were a process of its own: what one exports, another can import.
#[derive(Clone)]
pub struct Emulator {
    pub(crate) instance: Arc<Instance>,
    driver: Driver,
}

/// What an emulator and its drivers share.
pub(crate) struct Instance {
    pub(crate) core: Arc<Core>,
    slot: Slot,
}

impl Instance {
    fn driver(self: &Arc<Self>) -> Result<Driver, LoadError> {
        let instance = Arc::clone(self);
        let loader = move |name: &CStr| instance.find(name);
        // SAFETY: `find` gives functions with the C ABI and the signatures of the list that the table is made from, for the names of that list.
        // They are code of this crate, callable from any thread at any time.
        unsafe { Driver::from_loader(loader) }
    }

    /// Address of the function that is exported under a name, if this driver has it.
    fn find(&self, name: &CStr) -> *const std::ffi::c_void {
        let config = &self.core.config;
        let found = Function::ALL.iter().copied().find(|function| {
            function.symbol().as_bytes() == name.to_bytes()
                && function.since() as i32 <= config.driver_version
                && !config.missing.contains(function)
                && !self.core.faults.is_removed(*function)
        });
        found.map_or(std::ptr::null(), |function| shims::address(self.slot.number(), function))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl Emulator {
    /// Makes an emulator of the configured machine.
    ///
    /// # Errors
    /// [`EmulatorError::Config`] for a configuration that no machine could have, [`EmulatorError::NoSlot`] if the process has too many
    /// emulators and none ends in time, [`EmulatorError::Load`] if the configuration removes `cuDriverGetVersion`.
    pub fn new(config: Config) -> Result<Self, EmulatorError> {
        config.validate()?;
        let waited = config.slot_deadline;
        let slot = Slot::take(waited).ok_or(EmulatorError::NoSlot { slots: SLOTS, waited })?;
        let core = Arc::new(Core::new(config));
        slot.publish(&core);
        let instance = Arc::new(Instance { core, slot });
        let driver = instance.driver()?;
        Ok(Self { instance, driver })
    }

    /// The emulated driver's table. Every call gives the same table.
    #[must_use]
    pub fn driver(&self) -> Driver {
        self.driver.clone()
    }

    /// A table that has looked up no function yet, for tests of [`Faults::remove`].
    ///
    /// # Errors
    /// A [`LoadError`] if `cuDriverGetVersion` was removed or made to fail.
    pub fn fresh_driver(&self) -> Result<Driver, LoadError> {
        self.instance.driver()
    }

    /// The machine that is emulated.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// Faults on demand, and counts of calls.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.core().faults
    }

    /// Everything that is alive at this moment.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        Ledger::of(self.core())
    }

    /// For the end of a test: everything that was made is gone, and nothing went wrong on the side.
    ///
    /// # Panics
    /// With the ledger's text, if it is not empty or tells of incidents.
    #[track_caller]
    pub fn assert_empty(&self) {
        let ledger = self.ledger();
        assert!(
            ledger.is_empty() && ledger.incidents.is_empty(),
            "the emulator's ledger is not empty:\n{ledger}"
        );
    }

    /// Reads mapped memory, as the CPU would at this address, but with an error where the CPU would fault.
    ///
    /// # Errors
    /// [`EmulatorError::NotMapped`] or [`EmulatorError::NoAccess`].
    pub fn read(&self, address: CUdeviceptr, length: usize) -> Result<Vec<u8>, EmulatorError> {
        let space = read(&self.core().space);
        space.for_cpu(address, length, Need::Read)?;
        let mut bytes = vec![0; length];
        // SAFETY: the range is mapped readable, and `space` is held, so that it stays so. Other threads may write to it meanwhile, as
        // devices may: bytes are then old or new.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), length) };
        Ok(bytes)
    }

    /// Writes mapped memory, as the CPU would at this address, but with an error where the CPU would fault.
    ///
    /// # Errors
    /// [`EmulatorError::NotMapped`] or [`EmulatorError::NoAccess`].
    pub fn write(&self, address: CUdeviceptr, bytes: &[u8]) -> Result<(), EmulatorError> {
        let space = read(&self.core().space);
        space.for_cpu(address, bytes.len(), Need::Write)?;
        // SAFETY: the range is mapped writable, and `space` is held, so that it stays so; it is no Rust object.
        unsafe { std::ptr::copy(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.instance.core
    }
}

impl fmt::Debug for Emulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emulator")
            .field("devices", &self.config().devices.len())
            .field("driver_version", &self.config().driver_version)
            .finish_non_exhaustive()
    }
}
