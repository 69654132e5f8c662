//! Faults on demand, older drivers, missing functions, and the limits of a process.

mod common;

use common::*;
use cuda_vmm_emu::sys::{CUresult, CallError, Function, LoadError, Origin};
use cuda_vmm_emu::{Config, Emulator, EmulatorError};
use std::collections::HashSet;
use std::ptr;
use std::time::{Duration, Instant};

#[test]
fn a_call_that_was_made_to_fail_does_nothing() {
    let (emulator, driver) = start(Config::new(1));
    let faults = emulator.faults();
    faults.fail_once(Function::cuMemCreate, CUresult::CUDA_ERROR_NOT_PERMITTED);
    assert_eq!(create(&driver, on_device(0), GRAIN, FD), Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
    emulator.assert_empty();
    let memory = Mapped::new(&driver, 0, GRAIN, FD);
    faults.fail_nth(Function::cuMemUnmap, 2, CUresult::CUDA_ERROR_UNKNOWN);
    faults.fail_always(Function::cuMemRelease, CUresult::CUDA_ERROR_DEINITIALIZED);
    call!(driver, cuMemUnmap(memory.address, GRAIN)).unwrap();
    assert_eq!(call!(driver, cuMemUnmap(memory.address, GRAIN)), Err(CUresult::CUDA_ERROR_UNKNOWN));
    assert_eq!(call!(driver, cuMemUnmap(memory.address, GRAIN)), INVALID_VALUE);
    for _ in 0..2 {
        let failed = call!(driver, cuMemRelease(memory.handle));
        assert_eq!(failed, Err(CUresult::CUDA_ERROR_DEINITIALIZED));
    }
    assert_eq!(emulator.ledger().handles.len(), 1);
    // Success without effect, as of a driver that lies.
    faults.clear();
    faults.fail_once(Function::cuMemRelease, CUresult::CUDA_SUCCESS);
    call!(driver, cuMemRelease(memory.handle)).unwrap();
    call!(driver, cuMemRelease(memory.handle)).unwrap();
    call!(driver, cuMemAddressFree(memory.address, GRAIN)).unwrap();
    emulator.assert_empty();
    assert_eq!(faults.calls(Function::cuMemRelease), 4);
    assert_eq!(faults.calls(Function::cuMemUnmap), 3);
}

#[test]
fn every_function_can_be_made_to_fail() {
    let (emulator, driver) = start(Config::new(1));
    for &function in Function::ALL {
        emulator.faults().fail_always(function, CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
    }
    let not_ready = Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
    let mut out = 0;
    assert_eq!(call!(driver, cuInit(0)), not_ready);
    assert_eq!(call!(driver, cuDeviceGetCount(&mut out)), not_ready);
    assert_eq!(call!(driver, cuMulticastAddDevice(1, 0)), not_ready);
    assert_eq!(call!(driver, cuModuleUnload(ptr::null_mut())), not_ready);
    let error = emulator.fresh_driver().unwrap_err();
    let status = CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    assert_eq!(error, LoadError::Version { origin: Origin::Custom, status });
    emulator.faults().clear();
    call!(driver, cuInit(0)).unwrap();
}

#[test]
fn a_delayed_call_is_late() {
    let (emulator, driver) = start(Config::new(1));
    emulator.faults().delay(Function::cuDeviceGetCount, Duration::from_millis(30));
    let mut count = 0;
    let start = Instant::now();
    call!(driver, cuDeviceGetCount(&mut count)).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(count, 1);
}

#[test]
fn a_missing_function_is_named_with_the_version_that_has_it() {
    let (emulator, driver) = start(Config::new(1).without(Function::cuMemRetainAllocationHandle));
    assert!(!driver.has(Function::cuMemRetainAllocationHandle));
    let mut handle = 0;
    // SAFETY: the function is missing, so that nothing is called.
    let error = unsafe { driver.cuMemRetainAllocationHandle(&mut handle, ptr::null_mut()) }.unwrap_err();
    assert!(matches!(&error, CallError::Missing(m) if m.function == Function::cuMemRetainAllocationHandle));
    assert_eq!(
        error.to_string(),
        "cuMemRetainAllocationHandle is not in the driver: it needs CUDA 11.0, and a custom loader supports CUDA 13.1"
    );
    // Removed later, it is missing from tables that have not used it.
    assert!(driver.has(Function::cuMemUnmap));
    emulator.faults().remove(Function::cuMemUnmap);
    emulator.faults().remove(Function::cuMemMap);
    assert!(driver.has(Function::cuMemUnmap) && !driver.has(Function::cuMemMap));
    assert!(!emulator.fresh_driver().unwrap().has(Function::cuMemUnmap));
    emulator.faults().clear();
    assert!(emulator.fresh_driver().unwrap().has(Function::cuMemMap));

    emulator.faults().remove(Function::cuDriverGetVersion);
    let error = emulator.fresh_driver().unwrap_err();
    assert_eq!(error, LoadError::NotADriver { origin: Origin::Custom, symbol: "cuDriverGetVersion" });
    let error = Emulator::new(Config::new(1).without(Function::cuDriverGetVersion)).unwrap_err();
    assert!(matches!(error, EmulatorError::Load(LoadError::NotADriver { .. })), "{error}");
}

#[test]
fn an_older_driver_has_what_it_had() {
    let (_emulator, driver) = start(Config::new(1).driver_version(12_000));
    assert_eq!(driver.version(), 12_000);
    for &function in Function::ALL {
        assert_eq!(driver.has(function), function.since() <= 12_000, "{function:?}");
    }
    // Nor does it know host NUMA memory.
    assert_eq!(create(&driver, on_node(0), GRAIN, NONE), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let newest = Emulator::new(Config::default()).unwrap().driver();
    assert!(Function::ALL.iter().all(|&function| newest.has(function)));
}

#[test]
fn functions_without_an_implementation_are_not_supported() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let not_supported = Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let mut module = ptr::null_mut();
    assert_eq!(call!(driver, cuModuleLoadData(&mut module, c"".as_ptr().cast())), not_supported);
    assert_eq!(call!(driver, cuFuncLoad(ptr::null_mut())), not_supported);
    assert_eq!(call!(driver, cuLibraryUnload(ptr::null_mut())), not_supported);
    let mut blocks = 0;
    let occupancy =
        call!(driver, cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, ptr::null_mut(), 1, 0));
    assert_eq!(occupancy, not_supported);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn many_emulators_live_side_by_side_and_know_nothing_of_each_other() {
    let machines: Vec<_> = (1..=8).map(|devices| start(Config::new(devices))).collect();
    let mut handles = HashSet::new();
    for (devices, (emulator, driver)) in machines.iter().enumerate() {
        let mut count = 0;
        call!(driver, cuDeviceGetCount(&mut count)).unwrap();
        assert_eq!(count as usize, devices + 1);
        let handle = create(driver, on_device(0), GRAIN, NONE).unwrap();
        assert!(handles.insert(handle), "handles are never used twice");
        let (_, other) = &machines[(devices + 1) % machines.len()];
        assert_eq!(call!(other, cuMemRelease(handle)), INVALID_VALUE);
        assert_eq!(emulator.ledger().handles.len(), 1);
        // Contexts are per emulator, on one thread too.
        make_current(driver, 0);
        let mut current = ptr::null_mut();
        call!(other, cuCtxGetCurrent(&mut current)).unwrap();
        assert!(devices + 1 == machines.len() || current.is_null());
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    for (emulator, driver) in &machines {
        leave(driver, 0);
        emulator.assert_empty();
    }
}
