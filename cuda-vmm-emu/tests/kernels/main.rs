//! Launches, captures and graphs, with kernels that are Rust functions.

#[path = "../common/mod.rs"]
mod common;
mod graphs;
mod machine;

use cuda_vmm_emu::sys::ffi::c_void;
use cuda_vmm_emu::sys::*;
use cuda_vmm_emu::{Config, Emulator, Incident};
use machine::{LINGERING, Machine};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

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
