//! Machine code on a device.

use std::ffi::{CStr, c_void};
use std::ptr;

use cuda_vmm::Context;
use cuda_vmm::sys::{
    CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUmodule,
};

use super::{Attempt, Result, Stream};

/// A loaded cubin. Dropping it unloads it (`cuModuleUnload`): after all its launches have run.
#[derive(Debug)]
#[doc(alias = "cuModuleUnload")]
pub struct Module {
    context: Context,
    raw: CUmodule,
}

/// A kernel of a module, alive as long as that.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    context: &'a Context,
    raw: CUfunction,
}

/// Blocks, threads of a block, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

// SAFETY: module handles may be used from any thread; they are addresses that are never dereferenced here.
unsafe impl Send for Module {}

impl Module {
    /// Loads a cubin.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    #[doc(alias = "cuModuleLoadData")]
    pub fn load(context: &Context, image: &[u8]) -> Result<Self> {
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for one write; the image is a whole ELF file, which the driver checks and copies.
        unsafe {
            context.device().cuda().driver().cuModuleLoadData(&mut raw, image.as_ptr().cast::<c_void>())
        }
        .attempt(|| format!("loading {} bytes of code", image.len()))?;
        Ok(Self { context: context.clone(), raw })
    }

    /// A kernel by name, which may use up to `shared` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    #[doc(alias = "cuModuleGetFunction")]
    pub fn function(&self, name: &CStr, shared: u32) -> Result<Function<'_>> {
        let driver = self.context.device().cuda().driver();
        let _bound = self.context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with NUL, and `raw` is valid for one write.
        unsafe { driver.cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) }
            .attempt(|| format!("finding the kernel {name:?}"))?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if shared > 0 {
            // SAFETY: the function belongs to the loaded module.
            unsafe { driver.cuFuncSetAttribute(raw, attribute, shared as i32) }
                .attempt(|| format!("allowing {name:?} {shared} bytes of shared memory"))?;
        }
        Ok(Function { context: &self.context, raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: loaded by `load`, unloaded once; functions borrow the module.
            let _ = unsafe { self.context.device().cuda().driver().cuModuleUnload(self.raw) };
        }
    }
}

impl Function<'_> {
    /// Enqueues the kernel, whose one parameter is a `P`, or which has none if `P` is `()`.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    ///
    /// # Safety
    /// `P` must be the kernel's parameter. What it points to must be as the kernel expects and live until it has run; the stream is one of
    /// this device.
    #[doc(alias = "cuLaunchKernel")]
    pub unsafe fn launch<P: Copy>(&self, stream: &Stream, shape: Shape, parameter: &P) -> Result<()> {
        let _bound = self.context.bind()?;
        let mut arguments = [ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        let given = if size_of::<P>() == 0 { ptr::null_mut() } else { arguments.as_mut_ptr() };
        // SAFETY: the caller vouches for the parameter, which the call copies, and for the stream.
        unsafe {
            self.context.device().cuda().driver().cuLaunchKernel(
                self.raw,
                shape.blocks,
                1,
                1,
                shape.threads,
                1,
                1,
                shape.shared,
                stream.as_raw(),
                given,
                ptr::null_mut(),
            )
        }
        .attempt(|| format!("launching a kernel with {shape:?}"))
    }

    /// The same while the kernel before it on the stream still runs (programmatic stream serialization).
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    ///
    /// # Safety
    /// As [`launch`](Self::launch); before the kernel has waited for its predecessor it touches nothing that others use.
    #[doc(alias = "cuLaunchKernelEx")]
    pub unsafe fn launch_early<P: Copy>(&self, stream: &Stream, shape: Shape, parameter: &P) -> Result<()> {
        let _bound = self.context.bind()?;
        let mut arguments = [ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: stream.as_raw(),
            attrs: &mut attribute,
            numAttrs: 1,
        };
        let driver = self.context.device().cuda().driver();
        // SAFETY: the caller vouches for the parameter and for the stream; the call copies it, the configuration and the attribute.
        unsafe { driver.cuLaunchKernelEx(&config, self.raw, arguments.as_mut_ptr(), ptr::null_mut()) }
            .attempt(|| format!("launching a kernel early with {shape:?}"))
    }
}
