//! Kernels that are Rust functions, and a machine of two devices that has them.

use crate::common;
use cuda_vmm_emu::sys::ffi::{CStr, c_void};
use cuda_vmm_emu::sys::*;
use cuda_vmm_emu::{Config, Emulator, Kernel, Kernels, Launch, Module};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// An image is the text `image`; it has a function for each variant.
#[derive(Debug)]
pub struct Host;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Function {
    /// Adds its second parameter to the word at its first, once for each thread.
    Add,
    /// Makes the word 31 times what it was and adds the second parameter, once for each thread: the order of launches shows.
    Append,
    /// Fails unless no other launch of it runs that has the same word.
    Alone,
    /// Says in [`LINGERING`] that it runs, and does so until told to end.
    Linger,
    /// Says in the next word that it runs, and waits until the word at its first parameter is not zero.
    Await,
    Fail,
    Panic,
}

/// 1: a launch runs; 2: it is to end; 3: it has ended.
pub static LINGERING: AtomicU32 = AtomicU32::new(0);

impl Kernels for Host {
    unsafe fn load(&self, image: *const c_void) -> Result<Box<dyn Module>, CUresult> {
        // SAFETY: images here are C strings.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        if text == c"image" { Ok(Box::new(Host)) } else { Err(CUresult::CUDA_ERROR_INVALID_IMAGE) }
    }
}

impl Module for Host {
    fn function(&self, name: &CStr) -> Option<Arc<dyn Kernel>> {
        Some(Arc::new(match name.to_bytes() {
            b"add" => Function::Add,
            b"append" => Function::Append,
            b"alone" => Function::Alone,
            b"linger" => Function::Linger,
            b"await" => Function::Await,
            b"fail" => Function::Fail,
            b"panic" => Function::Panic,
            _ => return None,
        }))
    }
}

impl Kernel for Function {
    fn parameters(&self) -> &[usize] {
        &[8, 4]
    }

    fn run(&self, launch: &Launch) -> Result<(), CUresult> {
        let at = u64::from_ne_bytes(launch.parameters[0][..].try_into().unwrap());
        let value = u32::from_ne_bytes(launch.parameters[1][..].try_into().unwrap());
        // SAFETY: the tests give the address of a mapped word, which is only accessed atomically.
        let word = unsafe { AtomicU32::from_ptr(at as *mut u32) };
        let threads: u32 = launch.grid.iter().chain(&launch.block).product();
        match self {
            Self::Append => {
                word.store(word.load(Ordering::SeqCst) * 31 + value * threads, Ordering::SeqCst);
                Ok(())
            }
            Self::Alone => {
                let others = word.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(20));
                word.fetch_sub(1, Ordering::SeqCst);
                if others == 0 { Ok(()) } else { Err(CUresult::CUDA_ERROR_LAUNCH_FAILED) }
            }
            Self::Linger => {
                LINGERING.store(1, Ordering::SeqCst);
                let end = Instant::now() + Duration::from_secs(10);
                while LINGERING.load(Ordering::SeqCst) == 1 && Instant::now() < end {
                    word.fetch_add(1, Ordering::SeqCst);
                }
                LINGERING.store(3, Ordering::SeqCst);
                Ok(())
            }
            Self::Add => {
                word.fetch_add(value * threads, Ordering::SeqCst);
                Ok(())
            }
            Self::Await => {
                // SAFETY: as above: there are 64 bytes.
                unsafe { AtomicU32::from_ptr((at + 4) as *mut u32) }.store(1, Ordering::SeqCst);
                let end = Instant::now() + Duration::from_secs(10);
                while word.load(Ordering::SeqCst) == 0 {
                    if Instant::now() > end {
                        return Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
            Self::Fail => Err(CUresult::CUDA_ERROR_LAUNCH_FAILED),
            Self::Panic => panic!("a kernel's own"),
        }
    }
}

pub struct Machine {
    pub emulator: Emulator,
    pub driver: Driver,
    pub module: CUmodule,
    pub memory: CUdeviceptr,
    pub stream: CUstream,
}

impl Machine {
    pub fn new() -> Self {
        Self::with(|config| config)
    }

    pub fn with(change: impl FnOnce(Config) -> Config) -> Self {
        let emulator = Emulator::new(change(Config::new(2).kernels(Arc::new(Host)))).unwrap();
        let driver = emulator.driver();
        let (mut context, mut module, mut memory, mut stream) = (null_mut(), null_mut(), 0, null_mut());
        // SAFETY: the pointers are valid for the calls.
        unsafe {
            driver.cuInit(0).unwrap();
            driver.cuDevicePrimaryCtxRetain(&mut context, 0).unwrap();
            driver.cuCtxSetCurrent(context).unwrap();
            driver.cuModuleLoadData(&mut module, c"image".as_ptr().cast()).unwrap();
            driver.cuMemAlloc(&mut memory, 64).unwrap();
            driver.cuMemsetD8Async(memory, 0, 64, null_mut()).unwrap();
            driver.cuStreamCreate(&mut stream, 1).unwrap();
        }
        Self { emulator, driver, module, memory, stream }
    }

    pub fn function(&self, name: &CStr) -> CUfunction {
        let mut function = null_mut();
        // SAFETY: the pointers are valid for the call.
        unsafe { self.driver.cuModuleGetFunction(&mut function, self.module, name.as_ptr()) }.unwrap();
        function
    }

    pub fn try_launch(&self, name: &CStr, value: u32, blocks: u32, stream: CUstream) -> Result<(), CUresult> {
        let (mut at, mut value) = (self.memory, value);
        let mut parameters = [(&raw mut at).cast::<c_void>(), (&raw mut value).cast()];
        let function = self.function(name);
        let parameters = parameters.as_mut_ptr();
        // SAFETY: there is an address for each parameter of the functions here.
        common::code(unsafe {
            self.driver.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, stream, parameters, null_mut())
        })
    }

    pub fn launch(&self, name: &CStr, value: u32) {
        self.try_launch(name, value, 2, self.stream).unwrap();
    }

    pub fn word(&self) -> u32 {
        u32::from_ne_bytes(self.emulator.read(self.memory, 4).unwrap().try_into().unwrap())
    }

    pub fn finish(&self) -> Result<(), CUresult> {
        // SAFETY: the stream exists.
        common::code(unsafe { self.driver.cuStreamSynchronize(self.stream) })
    }

    pub fn event(&self) -> CUevent {
        let mut event = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { self.driver.cuEventCreate(&mut event, 2) }.unwrap();
        event
    }

    pub fn begin(&self) {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists.
        unsafe { self.driver.cuStreamBeginCapture(self.stream, mode) }.unwrap();
    }

    pub fn end(&self) -> Result<CUgraph, CUresult> {
        let mut graph = null_mut();
        // SAFETY: the pointer is valid for the call.
        common::code(unsafe { self.driver.cuStreamEndCapture(self.stream, &mut graph) })?;
        Ok(graph)
    }
}
