//! Launches, captures and graphs, with kernels that are Rust functions.

mod common;

use cuda_vmm_emu::sys::ffi::{CStr, c_void};
use cuda_vmm_emu::sys::*;
use cuda_vmm_emu::{Config, Emulator, Incident, Kernel, Kernels, Launch, Module};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// An image is the text `image`; it has a function for each variant.
#[derive(Debug)]
struct Host;

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
static LINGERING: AtomicU32 = AtomicU32::new(0);

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

struct Machine {
    emulator: Emulator,
    driver: Driver,
    module: CUmodule,
    memory: CUdeviceptr,
    stream: CUstream,
}

impl Machine {
    fn new() -> Self {
        Self::with(|config| config)
    }

    fn with(change: impl FnOnce(Config) -> Config) -> Self {
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

    fn function(&self, name: &CStr) -> CUfunction {
        let mut function = null_mut();
        // SAFETY: the pointers are valid for the call.
        unsafe { self.driver.cuModuleGetFunction(&mut function, self.module, name.as_ptr()) }.unwrap();
        function
    }

    fn try_launch(&self, name: &CStr, value: u32, blocks: u32, stream: CUstream) -> Result<(), CUresult> {
        let (mut at, mut value) = (self.memory, value);
        let mut parameters = [(&raw mut at).cast::<c_void>(), (&raw mut value).cast()];
        let function = self.function(name);
        let parameters = parameters.as_mut_ptr();
        // SAFETY: there is an address for each parameter of the functions here.
        common::code(unsafe {
            self.driver.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, stream, parameters, null_mut())
        })
    }

    fn launch(&self, name: &CStr, value: u32) {
        self.try_launch(name, value, 2, self.stream).unwrap();
    }

    fn word(&self) -> u32 {
        u32::from_ne_bytes(self.emulator.read(self.memory, 4).unwrap().try_into().unwrap())
    }

    fn finish(&self) -> Result<(), CUresult> {
        // SAFETY: the stream exists.
        common::code(unsafe { self.driver.cuStreamSynchronize(self.stream) })
    }

    fn event(&self) -> CUevent {
        let mut event = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { self.driver.cuEventCreate(&mut event, 2) }.unwrap();
        event
    }

    fn begin(&self) {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists.
        unsafe { self.driver.cuStreamBeginCapture(self.stream, mode) }.unwrap();
    }

    fn end(&self) -> Result<CUgraph, CUresult> {
        let mut graph = null_mut();
        // SAFETY: the pointer is valid for the call.
        common::code(unsafe { self.driver.cuStreamEndCapture(self.stream, &mut graph) })?;
        Ok(graph)
    }
}

#[test]
fn launches_run_in_stream_order_with_the_parameters_of_their_call() {
    let m = Machine::new();
    m.launch(c"append", 1);
    m.launch(c"append", 10);
    m.finish().unwrap();
    assert_eq!(m.word(), (64 * 31) + 640);
    // SAFETY: handles and memory are used no more.
    unsafe {
        m.driver.cuModuleUnload(m.module).unwrap();
        m.driver.cuStreamDestroy(m.stream).unwrap();
        m.driver.cuMemFree(m.memory).unwrap();
        m.driver.cuDevicePrimaryCtxRelease(0).unwrap();
    }
    m.emulator.assert_empty();
}

#[test]
fn kernels_of_two_streams_run_side_by_side() {
    let m = Machine::new();
    m.launch(c"await", 0);
    let mut other = null_mut();
    // SAFETY: the pointer is valid for the call.
    unsafe { m.driver.cuStreamCreate(&mut other, 1) }.unwrap();
    m.try_launch(c"add", 1, 1, other).unwrap();
    m.finish().unwrap();
    assert_eq!(m.word(), 32);
}

#[test]
fn kernels_that_a_device_does_not_hold_together_wait_in_vain() {
    // One waits for the other on a machine of 132 multiprocessors.
    for (blocks, fits) in [(131, true), (132, false), (200, false)] {
        let m = Machine::with(|config| config.stream_deadline(Duration::from_millis(200)));
        let mut other = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { m.driver.cuStreamCreate(&mut other, 1) }.unwrap();
        m.try_launch(c"await", 0, 1, m.stream).unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while m.emulator.read(m.memory + 4, 1).unwrap() == [0] {
            assert!(Instant::now() < end, "the first does not run");
        }
        m.try_launch(c"add", 1, blocks, other).unwrap();
        // SAFETY: the stream exists.
        let outcome = common::code(unsafe { m.driver.cuStreamSynchronize(other) });
        assert_eq!(outcome, if fits { Ok(()) } else { Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT) }, "{blocks}");
        m.emulator.write(m.memory, &[1]).unwrap();
    }
    // Alone, a launch of any size runs.
    let m = Machine::new();
    m.try_launch(c"add", 1, 1000, m.stream).unwrap();
    m.finish().unwrap();
    assert_eq!(m.word(), 32_000);
}

#[test]
fn what_a_driver_refuses_is_refused() {
    let m = Machine::new();
    let mut module = null_mut();
    // SAFETY: pointers are valid or null, which is refused.
    unsafe {
        let code = |result: Result<(), CallError>| common::code(result).unwrap_err();
        let bad = code(m.driver.cuModuleLoadData(&mut module, c"other".as_ptr().cast()));
        assert_eq!(bad, CUresult::CUDA_ERROR_INVALID_IMAGE);
        let mut function = null_mut();
        let missing = code(m.driver.cuModuleGetFunction(&mut function, m.module, c"nothing".as_ptr()));
        assert_eq!(missing, CUresult::CUDA_ERROR_NOT_FOUND);
        let shared = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let add = m.function(c"add");
        let config = |blocks, shared_bytes| CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: m.stream,
            attrs: null_mut(),
            numAttrs: 0,
        };
        let (mut at, mut one) = (m.memory, 1_u32);
        let mut parameters = [(&raw mut at).cast::<c_void>(), (&raw mut one).cast()];
        let mut launch = |config: CUlaunchConfig| {
            m.driver.cuLaunchKernelEx(&config, add, parameters.as_mut_ptr(), null_mut())
        };
        assert_eq!(code(launch(config(0, 0))), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(code(launch(config(1, 100_000))), CUresult::CUDA_ERROR_INVALID_VALUE);
        m.driver.cuFuncSetAttribute(add, shared, 100_000).unwrap();
        launch(config(1, 100_000)).unwrap();
        assert_eq!(
            code(m.driver.cuFuncSetAttribute(add, shared, 300_000)),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        let mut attribute = std::mem::zeroed::<CUlaunchAttribute>();
        attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attribute.value.cooperative = 1;
        let mut together = config(133, 0);
        (together.attrs, together.numAttrs) = (&mut attribute, 1);
        assert_eq!(code(launch(together)), CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
        launch(config(133, 0)).unwrap();
        // Clusters are not known; what may be left out is.
        attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        let mut asking = config(1, 0);
        (asking.attrs, asking.numAttrs) = (&mut attribute, 1);
        assert_eq!(code(launch(asking)), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        asking.attrs = &mut attribute;
        launch(asking).unwrap();
        m.driver.cuModuleUnload(m.module).unwrap();
        assert_eq!(code(launch(config(1, 0))), CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    m.finish().unwrap();
    assert_eq!(m.word(), 135 * 32);
}

#[test]
fn without_kernels_modules_are_not_supported() {
    let emulator = Emulator::new(Config::new(1)).unwrap();
    let driver = emulator.driver();
    let (mut context, mut module) = (null_mut(), null_mut());
    // SAFETY: the pointers are valid for the calls.
    unsafe {
        driver.cuInit(0).unwrap();
        driver.cuDevicePrimaryCtxRetain(&mut context, 0).unwrap();
        driver.cuCtxSetCurrent(context).unwrap();
        let error = driver.cuModuleLoadData(&mut module, c"image".as_ptr().cast()).unwrap_err();
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    }
}

#[test]
fn a_kernel_that_fails_ends_the_context() {
    for kernel in [c"fail", c"panic"] {
        let m = Machine::new();
        m.launch(kernel, 0);
        assert_eq!(m.finish(), Err(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        let seen = |incident: &Incident| matches!(incident, Incident::StreamFailed { device: 0, .. });
        assert!(m.emulator.ledger().incidents.iter().any(seen));
    }
}

#[test]
fn a_graph_replays_what_was_captured_and_nothing_ran_before() {
    let m = Machine::new();
    m.begin();
    m.launch(c"append", 1);
    // A stream that is forked off and comes back.
    let (fork, join, mut other) = (m.event(), m.event(), null_mut());
    let mut exec = null_mut();
    // SAFETY: the pointers are valid for the calls, and the handles exist.
    unsafe {
        m.driver.cuStreamCreate(&mut other, 1).unwrap();
        m.driver.cuEventRecord(fork, m.stream).unwrap();
        m.driver.cuStreamWaitEvent(other, fork, 0).unwrap();
        m.try_launch(c"append", 2, 1, other).unwrap();
        m.driver.cuEventRecord(join, other).unwrap();
        m.driver.cuStreamWaitEvent(m.stream, join, 0).unwrap();
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        m.driver.cuStreamIsCapturing(other, &mut status).unwrap();
        assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        let graph = m.end().unwrap();
        assert_eq!(
            m.driver.cuEventQuery(fork).unwrap_err().status(),
            Some(CUresult::CUDA_ERROR_CAPTURED_EVENT)
        );
        assert_eq!(m.word(), 0);
        m.driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0).unwrap();
        m.driver.cuGraphDestroy(graph).unwrap();
        for _ in 0..3 {
            m.driver.cuGraphLaunch(exec, m.stream).unwrap();
        }
        m.finish().unwrap();
        let once = |word: u32| (word * 31 + 64) * 31 + 64;
        assert_eq!(m.word(), once(once(once(0))));
        // Nothing of the capture is left in the streams.
        m.driver.cuStreamSynchronize(other).unwrap();
        m.driver.cuEventRecord(fork, other).unwrap();
        m.driver.cuEventSynchronize(fork).unwrap();
        m.driver.cuGraphExecDestroy(exec).unwrap();
    }
}

#[test]
fn a_capture_that_is_broken_says_so_at_its_end() {
    let m = Machine::new();
    // SAFETY: the handles exist.
    unsafe {
        let code = |result: Result<(), CallError>| common::code(result).unwrap_err();
        // Waited for on the host.
        m.begin();
        assert_eq!(m.finish(), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(
            m.try_launch(c"add", 1, 1, m.stream),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );
        assert_eq!(m.end(), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        // An event from outside.
        let event = m.event();
        m.driver.cuEventRecord(event, m.stream).unwrap();
        m.begin();
        let outside = code(m.driver.cuStreamWaitEvent(m.stream, event, 0));
        assert_eq!(outside, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        m.end().unwrap_err();
        // A stream that does not come back.
        let mut other = null_mut();
        m.driver.cuStreamCreate(&mut other, 1).unwrap();
        m.begin();
        m.driver.cuEventRecord(event, m.stream).unwrap();
        m.driver.cuStreamWaitEvent(other, event, 0).unwrap();
        m.try_launch(c"add", 1, 1, other).unwrap();
        assert_eq!(m.end(), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
        // The legacy stream, which would have to wait for a stream that is captured.
        let mut blocking = null_mut();
        m.driver.cuStreamCreate(&mut blocking, 0).unwrap();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        m.driver.cuStreamBeginCapture(blocking, mode).unwrap();
        let implicit = code(m.driver.cuMemsetD8Async(m.memory, 1, 4, null_mut()));
        assert_eq!(implicit, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        // No capture, no end.
        assert_eq!(m.end(), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    }
    m.launch(c"add", 1);
    m.finish().unwrap();
    assert_eq!(m.word(), 64);
}

#[test]
fn launches_of_one_executable_graph_follow_each_other_on_any_streams() {
    let m = Machine::new();
    m.begin();
    m.launch(c"alone", 0);
    let graph = m.end().unwrap();
    let (mut exec, mut other) = (null_mut(), null_mut());
    // SAFETY: the pointers are valid for the calls, and the handles exist.
    unsafe {
        m.driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0).unwrap();
        m.driver.cuStreamCreate(&mut other, 1).unwrap();
        for _ in 0..3 {
            m.driver.cuGraphLaunch(exec, m.stream).unwrap();
            m.driver.cuGraphLaunch(exec, other).unwrap();
        }
        m.driver.cuStreamSynchronize(other).unwrap();
        m.driver.cuGraphExecDestroy(exec).unwrap();
    }
    m.finish().unwrap();
}

#[test]
fn functions_and_graphs_end_with_their_module_and_modules_with_their_context() {
    let m = Machine::new();
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    m.begin();
    m.launch(c"add", 1);
    let graph = m.end().unwrap();
    let (mut exec, mut context, mut function) = (null_mut(), null_mut(), m.function(c"add"));
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the pointers are valid for the calls. Handles of what is gone are refused.
    unsafe {
        m.driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0).unwrap();
        m.driver.cuGraphLaunch(exec, m.stream).unwrap();
        m.finish().unwrap();
        assert_eq!(m.word(), 64);
        // All that a module is asked for needs a context.
        m.driver.cuCtxGetCurrent(&mut context).unwrap();
        m.driver.cuCtxSetCurrent(null_mut()).unwrap();
        let no_context = Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        let got = m.driver.cuModuleGetFunction(&mut function, m.module, c"add".as_ptr());
        assert_eq!(common::code(got), no_context);
        assert_eq!(common::code(m.driver.cuFuncSetAttribute(function, attribute, 1)), no_context);
        assert_eq!(common::code(m.driver.cuModuleUnload(m.module)), no_context);
        m.driver.cuCtxSetCurrent(context).unwrap();
        // The context ends, and another begins.
        m.driver.cuDevicePrimaryCtxRelease(0).unwrap();
        assert!(m.emulator.ledger().modules.is_empty());
        m.driver.cuDevicePrimaryCtxRetain(&mut context, 0).unwrap();
        m.driver.cuCtxSetCurrent(context).unwrap();
        assert_eq!(common::code(m.driver.cuFuncSetAttribute(function, attribute, 1)), invalid);
        assert_eq!(common::code(m.driver.cuModuleUnload(m.module)), invalid);
        assert!(m.emulator.ledger().incidents.is_empty());
        assert_eq!(common::code(m.driver.cuGraphLaunch(exec, null_mut())), invalid);
    }
    assert_eq!(m.emulator.ledger().incidents, [Incident::Unloaded { device: 0 }]);
}

#[test]
fn memory_stays_while_a_kernel_runs_that_nobody_waited_for() {
    let m = Machine::new();
    m.launch(c"linger", 0);
    let until = |what: u32| {
        let end = Instant::now() + Duration::from_secs(10);
        while LINGERING.load(Ordering::SeqCst) != what {
            assert!(Instant::now() < end, "the kernel is not at {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until(1);
    let at = m.memory;
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.starts_with(&format!("{at:x}-")))
    };
    assert!(is_mapped());
    drop(m);
    // It writes on.
    std::thread::sleep(Duration::from_millis(20));
    assert!(is_mapped());
    LINGERING.store(2, Ordering::SeqCst);
    until(3);
    // What is left goes with it.
    let end = Instant::now() + Duration::from_secs(10);
    while is_mapped() {
        assert!(Instant::now() < end, "the memory is still there");
        std::thread::sleep(Duration::from_millis(1));
    }
}
