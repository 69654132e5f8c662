//! One rank's GPU: kernels, a stream, and the report that kernels write.

use crate::nvrtc;
use cuda_vmm_emu::sys::{
    CUdevice_attribute, CUfunction, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUmodule, CUresult, CUstream,
    CUstream_flags, Function,
};
use nccl_gin::sys::Nccl;
use nccl_gin::{Device, device_code};
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// The longest time that kernels may take: more than their own deadlines.
const LIMIT: Duration = Duration::from_secs(40);

/// Compiled kernels on a device.
pub struct Gpu {
    pub device: Device,
    module: CUmodule,
    stream: CUstream,
    report: u64,
}

/// Pointers to a kernel's arguments.
#[macro_export]
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => {
        [$((&raw const *Box::leak(Box::new($argument))).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}

impl Gpu {
    pub fn new(nccl: &Nccl, device: &Device) -> Self {
        let sources = device_code::sources(nccl.version(), nccl.include_dir().unwrap()).unwrap();
        let mut options = sources.options(nvrtc::cuda_include());
        let driver = device.driver();
        device.make_current().unwrap();
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the output is a local; the ordinal is the device's.
            unsafe { driver.cuDeviceGetAttribute(&mut value, which, device.ordinal()) }.unwrap();
            value
        };
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        options.push(format!("--gpu-architecture=sm_{major}{minor}"));
        let code = nvrtc::compile(include_str!("kernels.cu"), sources.headers(), &options).unwrap();
        let (mut module, mut stream, mut report) = (null_mut(), null_mut(), 0);
        // SAFETY: outputs are locals; the image is a whole cubin.
        unsafe {
            driver.cuModuleLoadData(&mut module, code.as_ptr().cast()).unwrap();
            driver.cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING.0).unwrap();
            driver.cuMemAlloc(&mut report, 64).unwrap();
        }
        let gpu = Self { device: device.clone(), module, stream, report };
        gpu.clear();
        gpu
    }

    /// Address of the report.
    pub fn report(&self) -> u64 {
        self.report
    }

    fn clear(&self) {
        // SAFETY: the report's own memory.
        unsafe { self.device.driver().cuMemsetD8Async(self.report, 0, 64, self.stream) }.unwrap();
    }

    pub fn zero(&self, address: u64, length: usize) {
        // SAFETY: memory of the caller, not in use.
        unsafe { self.device.driver().cuMemsetD8Async(address, 0, length, self.stream) }.unwrap();
        self.finish("zeroing");
    }

    pub fn function(&self, name: &str) -> CUfunction {
        let mut function = null_mut();
        let name = CString::new(name).unwrap();
        // SAFETY: the module is loaded, the output a local.
        unsafe { self.device.driver().cuModuleGetFunction(&mut function, self.module, name.as_ptr()) }
            .unwrap();
        function
    }

    pub fn has(&self, name: &str) -> bool {
        let mut function: CUfunction = null_mut();
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { self.device.driver().cuModuleGetFunction(&mut function, self.module, name.as_ptr()) }.is_ok()
    }

    pub fn launch(&self, name: &str, grid: u32, block: u32, arguments: &mut [*mut c_void]) {
        self.device.make_current().unwrap();
        let function = self.function(name);
        // SAFETY: the arguments are as many and of the types that the kernel has (see kernels.cu), and live.
        unsafe {
            self.device.driver().cuLaunchKernel(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                self.stream,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        }
        .unwrap();
    }

    /// Waits for the stream, within bounds.
    #[track_caller]
    pub fn finish(&self, what: &str) {
        let end = Instant::now() + LIMIT;
        loop {
            // SAFETY: the stream is this value's own.
            match unsafe { self.device.driver().cuStreamQuery(self.stream) } {
                Ok(()) => return,
                Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => {}
                Err(error) => panic!("{what}: {error}"),
            }
            if Instant::now() > end {
                // No unwinding: what would clean up waits for the same kernel.
                eprintln!("{what}: the GPU has not finished within {LIMIT:?}");
                std::process::exit(101);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Reads the report, and clears it: wrong bytes, waits that ended in vain, nanoseconds.
    #[track_caller]
    pub fn take_report(&self, what: &str) -> [u64; 3] {
        self.finish(what);
        let mut words = [0u64; 3];
        // SAFETY: the report's memory, and a local that is waited for.
        unsafe {
            self.device.driver().cuMemcpyDtoHAsync(words.as_mut_ptr().cast(), self.report, 24, self.stream)
        }
        .unwrap();
        self.finish(what);
        self.clear();
        words
    }

    /// Launches, waits, and checks that nothing was wrong. Returns the nanoseconds that the kernel told.
    #[track_caller]
    pub fn run(&self, what: &str, name: &str, grid: u32, block: u32, arguments: &mut [*mut c_void]) -> u64 {
        self.launch(name, grid, block, arguments);
        let [bad, late, nanoseconds] = self.take_report(what);
        assert!(bad == 0 && late == 0, "{what}: {bad} wrong, {late} waits in vain");
        nanoseconds
    }

    /// Copies again and again, by a copy engine as the plugin has it; bytes a nanosecond.
    pub fn copy_rate(&self, mut to: u64, mut from: u64, mut length: usize, count: u32) -> f64 {
        self.finish("a copy");
        let driver = self.device.driver();
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: inside a device, a plain copy is a kernel.
            flags: 1,
            ..CUmemcpyAttributes::default()
        };
        let engine = driver.has(Function::cuMemcpyBatchAsync_v2);
        let mut first = 0;
        let start = Instant::now();
        for _ in 0..count {
            // SAFETY: both ranges are mapped memory of the caller's; each list has its one element, and outlives the call.
            unsafe {
                if engine {
                    driver.cuMemcpyBatchAsync_v2(
                        &mut to,
                        &mut from,
                        &mut length,
                        1,
                        &mut attributes,
                        &mut first,
                        1,
                        self.stream,
                    )
                } else {
                    driver.cuMemcpyAsync(to, from, length, self.stream)
                }
            }
            .unwrap();
        }
        self.finish("copies");
        length as f64 * f64::from(count) / start.elapsed().as_nanos() as f64
    }
}
