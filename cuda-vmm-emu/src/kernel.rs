//! Modules, functions and launches: what an emulator runs in place of a device's machine code.
//!
//! An emulator runs no GPU code. It gives images and launches to a [`Kernels`] of the caller's, which knows what they mean: machine code for
//! the host, say, that was compiled from the same source.

use crate::core::{Core, fresh_handle};
use crate::status::{Outcome, array, code, get, lock, put, require};
use crate::stream::Op;
use cuda_vmm_sys::ffi::{CStr, c_char, c_int, c_uint, c_void};
use cuda_vmm_sys::{
    CUdevice_attribute, CUfunction, CUfunction_attribute, CUlaunchAttributeID, CUlaunchConfig, CUmodule,
    CUresult, CUstream,
};
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Dynamic shared memory that a launch may have without asking for more.
const USUAL_SHARED_BYTES: u32 = 48 << 10;

/// What stands for the devices' instruction set: loads images.
pub trait Kernels: Send + Sync {
    /// Loads the image that `cuModuleLoadData` was given.
    ///
    /// # Errors
    /// What the function is to return, `CUDA_ERROR_INVALID_IMAGE` for instance.
    ///
    /// # Safety
    /// `image` is not null. As with the driver, how many bytes can be read there follows from the image itself.
    unsafe fn load(&self, image: *const c_void) -> Result<Box<dyn Module>, CUresult>;
}

/// A loaded image. Dropped when it is unloaded and no function of it is under way or in a graph.
pub trait Module: Send + Sync {
    /// A function of the module, by its name.
    fn function(&self, name: &CStr) -> Option<Arc<dyn Kernel>>;
}

/// A function that can be launched.
pub trait Kernel: Send + Sync {
    /// Bytes of each parameter.
    fn parameters(&self) -> &[usize];

    /// Runs a launch, and returns when it has ended. Called in stream order, on a thread that serves the stream: launches of different streams
    /// run side by side, and may wait for each other.
    ///
    /// # Ends
    /// After a time of its own: code can't be taken off its thread, so that the configured deadline does not end a launch, and who waits for the
    /// stream, an event behind the launch or the context waits as long as it runs.
    ///
    /// # Errors
    /// What ends the context, as `CUDA_ERROR_LAUNCH_FAILED` does; a panic is that error.
    fn run(&self, launch: &Launch) -> Result<(), CUresult>;
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// Ordinal of the device.
    pub device: usize,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether all blocks were asked to be resident together.
    pub cooperative: bool,
    /// The parameters' bytes, as they were when the launch was submitted.
    pub parameters: Vec<Vec<u8>>,
}

/// The caller's kernels in a [`Config`](crate::Config).
#[derive(Clone)]
pub(crate) struct Installed(pub(crate) Arc<dyn Kernels>);

// A panic in them is caught where a call enters the emulator, or where a launch runs; their state is their own business.
impl std::panic::RefUnwindSafe for Installed {}
impl std::panic::UnwindSafe for Installed {}

impl fmt::Debug for Installed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kernels")
    }
}

/// A function that was got from a module.
pub(crate) struct LoadedFunction {
    kernel: Arc<dyn Kernel>,
    /// Keeps the code while the function is used.
    _module: Arc<dyn Module>,
    /// Handle of the module.
    module: usize,
    device: usize,
    shared_bytes: AtomicU32,
}

/// A launch in a stream.
#[derive(Clone)]
pub(crate) struct Launched {
    function: Arc<LoadedFunction>,
    launch: Launch,
}

impl Launched {
    /// The device, and the blocks that it is to hold.
    pub(crate) fn place(&self) -> (usize, u64) {
        (self.launch.device, self.launch.grid.map(u64::from).iter().product())
    }

    /// Handle of the kernel's module, and the device.
    pub(crate) fn origin(&self) -> (usize, usize) {
        (self.function.module, self.launch.device)
    }

    /// Runs the launch. A kernel that panics has failed: its stream goes on, and nobody waits for it for ever.
    pub(crate) fn run(&self) -> Outcome {
        let run = AssertUnwindSafe(|| self.function.kernel.run(&self.launch));
        catch_unwind(run).unwrap_or(Err(code::LAUNCH_FAILED))
    }
}

impl fmt::Debug for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.launch.fmt(f)
    }
}

struct LoadedModule {
    module: Arc<dyn Module>,
    device: usize,
}

/// Modules and functions by their handles.
#[derive(Default)]
pub(crate) struct Modules {
    loaded: HashMap<usize, LoadedModule>,
    functions: HashMap<usize, Arc<LoadedFunction>>,
}

impl Modules {
    pub(crate) fn has(&self, handle: usize) -> bool {
        self.loaded.contains_key(&handle)
    }

    /// Takes modules out, and their functions, for the caller to drop. `of` knows them by handle and device.
    fn unload(&mut self, of: impl Fn(usize, usize) -> bool) -> (Vec<LoadedModule>, Vec<Arc<LoadedFunction>>) {
        let modules = self.loaded.extract_if(|&handle, loaded| of(handle, loaded.device));
        let functions = self.functions.extract_if(|_, function| of(function.module, function.device));
        (modules.map(|(_, module)| module).collect(), functions.map(|(_, function)| function).collect())
    }

    pub(crate) fn handles(&self) -> Vec<usize> {
        self.loaded.keys().copied().collect()
    }
}

/// A launch as it was asked for.
struct Request {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    cooperative: bool,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
}

impl Core {
    /// Takes the modules of a device's context, for the caller to drop.
    pub(crate) fn unload_context(&self, device: usize) {
        let gone = lock(&self.modules).unload(|_, of| of == device);
        // The caller's code ends outside of the lock.
        drop(gone);
    }

    fn function(&self, handle: CUfunction) -> Outcome<Arc<LoadedFunction>> {
        lock(&self.modules).functions.get(&(handle as usize)).cloned().ok_or(code::INVALID_HANDLE)
    }

    /// Checks a launch as the driver does, and puts it into its stream.
    ///
    /// # Safety
    /// `request.parameters` holds an address for each parameter, from which its bytes can be read.
    unsafe fn launch(self: &Arc<Self>, function: CUfunction, request: &Request) -> Outcome {
        use CUdevice_attribute as A;
        let function = self.function(function)?;
        let stream = self.stream_for_work(request.stream)?;
        if stream.device != function.device {
            return Err(code::INVALID_HANDLE);
        }
        if !request.extra.is_null() {
            return Err(code::NOT_SUPPORTED);
        }
        let limit = |attribute| self.config.attribute(function.device, attribute).map(c_int::unsigned_abs);
        let product =
            |of: [u32; 3]| of.iter().try_fold(1_u32, |all, &n| all.checked_mul(n)).filter(|&n| n > 0);
        let (Some(blocks), Some(threads)) = (product(request.grid), product(request.block)) else {
            return Err(code::INVALID_VALUE);
        };
        require(threads <= limit(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?)?;
        require(request.shared_bytes <= function.shared_bytes.load(Ordering::Acquire))?;
        // One block at least fits on a multiprocessor; more are not promised.
        if request.cooperative && blocks > limit(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? {
            return Err(code::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        let sizes = function.kernel.parameters();
        // SAFETY: the caller's contract.
        let addresses = unsafe { array(request.parameters.cast_const(), sizes.len()) }?;
        let parameter = |(&from, &bytes): (&*mut c_void, &usize)| {
            // SAFETY: the caller's contract: the parameter's bytes can be read from its address.
            unsafe { array(from.cast::<u8>().cast_const(), bytes) }
        };
        let launch = Launch {
            device: function.device,
            grid: request.grid,
            block: request.block,
            shared_bytes: request.shared_bytes,
            cooperative: request.cooperative,
            parameters: addresses.iter().zip(sizes).map(parameter).collect::<Outcome<_>>()?,
        };
        stream.submit(self, Op::Launch(Launched { function, launch })).map(drop)
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes. Handles are only
/// compared, never followed.
impl Core {
    pub(crate) unsafe fn cuModuleLoadData(
        self: &Arc<Self>,
        module: *mut CUmodule,
        image: *const c_void,
    ) -> Outcome {
        let Installed(kernels) = self.config.kernels.as_ref().ok_or(code::NOT_SUPPORTED)?;
        require(!module.is_null() && !image.is_null())?;
        let device = self.current_healthy()?;
        // SAFETY: not null; the caller's contract.
        let loaded: Arc<dyn Module> = unsafe { kernels.load(image) }?.into();
        let handle = fresh_handle();
        lock(&self.modules).loaded.insert(handle, LoadedModule { module: loaded, device });
        // SAFETY: not null, and valid for a write by the caller's contract.
        unsafe { put(module, handle as CUmodule) }
    }

    pub(crate) unsafe fn cuModuleUnload(self: &Arc<Self>, module: CUmodule) -> Outcome {
        self.current()?;
        let (module, mut modules) = (module as usize, lock(&self.modules));
        if !modules.has(module) {
            return Err(code::INVALID_HANDLE);
        }
        let gone = modules.unload(|handle, _| handle == module);
        // The caller's code ends outside of the lock.
        drop(modules);
        drop(gone);
        Ok(())
    }

    pub(crate) unsafe fn cuModuleGetFunction(
        self: &Arc<Self>,
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> Outcome {
        require(!function.is_null() && !name.is_null())?;
        self.current()?;
        let (from, device) = {
            let modules = lock(&self.modules);
            let found = modules.loaded.get(&(module as usize)).ok_or(code::INVALID_HANDLE)?;
            (Arc::clone(&found.module), found.device)
        };
        // The caller's code runs outside of the lock.
        // SAFETY: not null, and a string by the caller's contract.
        let kernel = from.function(unsafe { CStr::from_ptr(name) }).ok_or(code::NOT_FOUND)?;
        let handle = fresh_handle();
        let shared_bytes = AtomicU32::new(USUAL_SHARED_BYTES);
        let loaded = LoadedFunction { kernel, _module: from, module: module as usize, device, shared_bytes };
        let mut modules = lock(&self.modules);
        // Unloaded meanwhile.
        if !modules.has(module as usize) {
            return Err(code::INVALID_HANDLE);
        }
        modules.functions.insert(handle, Arc::new(loaded));
        drop(modules);
        // SAFETY: not null, and valid for a write by the caller's contract.
        unsafe { put(function, handle as CUfunction) }
    }

    pub(crate) unsafe fn cuFuncSetAttribute(
        self: &Arc<Self>,
        function: CUfunction,
        attribute: CUfunction_attribute,
        value: c_int,
    ) -> Outcome {
        self.current()?;
        let function = self.function(function)?;
        require(attribute == CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        let most = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        require((0..=self.config.attribute(function.device, most)?).contains(&value))?;
        function.shared_bytes.store(value.unsigned_abs(), Ordering::Release);
        Ok(())
    }

    pub(crate) unsafe fn cuLaunchKernel(
        self: &Arc<Self>,
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Outcome {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let request = Request { grid, block, shared_bytes, cooperative: false, stream, parameters, extra };
        // SAFETY: the caller's contract.
        unsafe { self.launch(function, &request) }
    }

    pub(crate) unsafe fn cuLaunchKernelEx(
        self: &Arc<Self>,
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Outcome {
        use CUlaunchAttributeID as Id;
        // SAFETY: the caller's contract.
        let config = unsafe { get(config) }?;
        // SAFETY: as above: the attributes are an array of this length.
        let attributes = unsafe { array(config.attrs.cast_const(), config.numAttrs as usize) }?;
        let mut cooperative = false;
        for attribute in attributes {
            match attribute.id {
                Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE => {
                    // SAFETY: the attribute's number says which value it has; all of the union's bytes were given.
                    cooperative = unsafe { attribute.value.cooperative } != 0;
                }
                // A kernel may start early, and need not.
                Id::CU_LAUNCH_ATTRIBUTE_IGNORE
                | Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION => {}
                _ => return Err(code::NOT_SUPPORTED),
            }
        }
        let request = Request {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared_bytes: config.sharedMemBytes,
            cooperative,
            stream: config.hStream,
            parameters,
            extra,
        };
        // SAFETY: the caller's contract.
        unsafe { self.launch(function, &request) }
    }
}
