//! Kernels on a device: machine code, loaded, with its function.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cuda_vmm::Context;
use cuda_vmm::sys::{CUfunction, CUfunction_attribute, CUmodule, CallError};
use once_cell::sync::OnceCell;

use super::call_failed;
use crate::error::Result;
use crate::jit::{Arch, Program, Supply};

/// A loaded kernel.
pub(super) struct Kernel {
    context: Context,
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: module and function handles may be used from any thread; they are addresses that are never dereferenced here.
unsafe impl Send for Kernel {}
// SAFETY: as above; driver calls on them are thread-safe.
unsafe impl Sync for Kernel {}

impl Kernel {
    fn load(context: &Context, image: &[u8], program: Program, shared_bytes: usize) -> Result<Self> {
        let driver = context.device().cuda().driver();
        let _bound = context.bind()?;
        let failed = |source: CallError| call_failed(format!("loading {}", program.entry()), source);
        let mut module = ptr::null_mut();
        // SAFETY: a context is current; the image is a whole ELF file, which the driver checks and copies.
        unsafe { driver.cuModuleLoadData(&mut module, image.as_ptr().cast::<c_void>()) }.map_err(failed)?;
        let mut kernel = Self { context: context.clone(), module, function: ptr::null_mut() };
        let name = CString::new(program.entry()).unwrap_or_default();
        // SAFETY: the module is loaded; the name is NUL-terminated.
        unsafe { driver.cuModuleGetFunction(&mut kernel.function, module, name.as_ptr()) }.map_err(failed)?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to the loaded module.
        unsafe { driver.cuFuncSetAttribute(kernel.function, attribute, shared_bytes as i32) }
            .map_err(failed)?;
        Ok(kernel)
    }

    pub(super) fn function(&self) -> CUfunction {
        self.function
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // Without a context nothing can be unloaded; the driver does it with the context.
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: loaded once, unloaded once. What was loaded as a whole is kept for good (see `LOADED`; tests that load kernels for
        // themselves wait for them first), so nothing of the module was launched, or all of it has run.
        let _ = unsafe { self.context.device().cuda().driver().cuModuleUnload(self.module) };
    }
}

/// Driver, context, program and bytes of dynamic shared memory.
type Key = (usize, usize, Program, usize);

/// A kernel's place, filled by whoever needs it first.
type Place = Arc<OnceCell<Arc<Kernel>>>;

/// Every kernel that was loaded, for the next one in this process who needs it. Never unloaded: graphs may hold its launches, and unloading can
/// wait for other ranks' kernels, as those do for the rank that unloads. A kernel keeps its context, so that the keys stay different ones.
static LOADED: LazyLock<Mutex<HashMap<Key, Place>>> = LazyLock::new(Mutex::default);

/// Unloads what is kept for a context, and lets go of it: drivers in software are expected to be left as they were.
#[cfg(test)]
pub(super) fn unload_all(context: &Context) {
    let driver = ptr::from_ref(context.device().cuda().driver()) as usize;
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(of, raw, ..), _| (*of, *raw) != (driver, context.as_raw() as usize));
}

/// The kernels of one user of a device, loaded when they are first asked for.
pub(super) struct Kernels {
    context: Context,
    arch: Arch,
    shared_bytes: usize,
    supply: Supply,
    loaded: Mutex<HashMap<Program, Arc<Kernel>>>,
}

impl Kernels {
    pub(super) fn new(context: Context, arch: Arch, shared_bytes: usize, supply: Supply) -> Self {
        Self { context, arch, shared_bytes, supply, loaded: Mutex::new(HashMap::new()) }
    }

    /// The kernel; gets its code and loads it if this is the first time.
    pub(super) fn get(&self, program: Program) -> Result<Arc<Kernel>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.get(&program) {
            return Ok(kernel.clone());
        }
        let cubin = self.supply.get(program, self.arch)?;
        let kernel = self.load(cubin.image(), program)?;
        loaded.insert(program, kernel.clone());
        Ok(kernel)
    }

    /// The kernel that was made for a call's sizes, if it was loaded (a call compiles nothing that it can do without), or else the one for all.
    pub(super) fn best(&self, for_sizes: Option<Program>, for_all: Program) -> Result<Arc<Kernel>> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = for_sizes.and_then(|program| loaded.get(&program)) {
            return Ok(kernel.clone());
        }
        drop(loaded);
        self.get(for_all)
    }

    /// Loads kernels, so that no later call does. `party` of `parties` does so at the same time.
    pub(super) fn load_all(&self, programs: &[Program], party: usize, parties: usize) -> Result<()> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let missing: Vec<_> =
            programs.iter().copied().filter(|program| !loaded.contains_key(program)).collect();
        for (program, cubin) in self.supply.get_all(&missing, self.arch, party, parties)? {
            loaded.insert(program, self.load(cubin.image(), program)?);
        }
        Ok(())
    }

    /// The kernel of a program, loaded unless somebody in this process has done so.
    fn load(&self, image: &[u8], program: Program) -> Result<Arc<Kernel>> {
        let load = || Kernel::load(&self.context, image, program, self.shared_bytes).map(Arc::new);
        #[cfg(test)]
        if self.supply.is_altered() {
            return load();
        }
        let driver = ptr::from_ref(self.context.device().cuda().driver());
        let key = (driver as usize, self.context.as_raw() as usize, program, self.shared_bytes);
        // Loading takes long, and holds up only those who need the same kernel.
        let cell = {
            let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry(key).or_default().clone()
        };
        cell.get_or_try_init(load).cloned()
    }
}
