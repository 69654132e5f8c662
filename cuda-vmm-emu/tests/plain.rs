//! Contexts, plain device and host memory, IPC handles, and what the driver tells about addresses and devices.

mod common;

use common::*;
use cuda_vmm_emu::Config;
use cuda_vmm_emu::sys::ffi::{CStr, c_char};
use cuda_vmm_emu::sys::{
    CUcontext, CUdevice_P2PAttribute, CUdevice_attribute, CUipcMemHandle_v1, CUpointer_attribute, CUresult,
    CUstream, CUuuid,
};
use std::ptr;

const DEFAULT: CUstream = ptr::null_mut();

#[test]
fn everything_but_a_few_needs_the_driver_to_be_initialised() {
    let emulator = cuda_vmm_emu::Emulator::new(Config::new(1)).unwrap();
    let driver = emulator.driver();
    let (mut count, mut version) = (0, 0);
    let early = call!(driver, cuDeviceGetCount(&mut count));
    assert_eq!(early, Err(CUresult::CUDA_ERROR_NOT_INITIALIZED));
    call!(driver, cuDriverGetVersion(&mut version)).unwrap();
    assert_eq!(version, 13_010);
    assert_eq!(call!(driver, cuInit(1)), INVALID_VALUE);
    call!(driver, cuInit(0)).unwrap();
    call!(driver, cuDeviceGetCount(&mut count)).unwrap();
    assert_eq!(count, 1);

    let (_none, driver) = {
        let emulator = cuda_vmm_emu::Emulator::new(Config::new(0)).unwrap();
        let driver = emulator.driver();
        (emulator, driver)
    };
    assert_eq!(call!(driver, cuInit(0)), Err(CUresult::CUDA_ERROR_NO_DEVICE));
}

#[test]
fn devices_tell_what_they_were_configured_to_be() {
    let config = Config::h200x2().device(1, |device| {
        device
            .uuid([3; 16])
            .numa_node(1)
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 7)
    });
    let (_emulator, driver) = start(config);
    let mut name = [1 as c_char; 64];
    call!(driver, cuDeviceGetName(name.as_mut_ptr(), 64, 1)).unwrap();
    // SAFETY: the driver wrote a C string.
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"NVIDIA H200");
    call!(driver, cuDeviceGetName(name.as_mut_ptr(), 7, 1)).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"NVIDIA");
    assert_eq!(call!(driver, cuDeviceGetName(name.as_mut_ptr(), 0, 1)), INVALID_VALUE);
    let mut uuid = CUuuid::default();
    call!(driver, cuDeviceGetUuid(&mut uuid, 1)).unwrap();
    assert_eq!(uuid.bytes, [3; 16]);
    let mut bytes = 0;
    call!(driver, cuDeviceTotalMem(&mut bytes, 0)).unwrap();
    assert_eq!(bytes, 143_771 << 20);
    let mut bus = [1 as c_char; 16];
    call!(driver, cuDeviceGetPCIBusId(bus.as_mut_ptr(), 16, 1)).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { CStr::from_ptr(bus.as_ptr()) }, c"0000:11:00.0");

    use CUdevice_attribute as A;
    let attribute = |attribute, device| {
        let mut value = -1;
        call!(driver, cuDeviceGetAttribute(&mut value, attribute, device)).map(|()| value)
    };
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), Ok(132));
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1), Ok(7));
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 1), Ok(1));
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0), Ok(1));
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0), Ok(1));
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED, 0), Ok(0));
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_MAX, 0), invalid);
    let invalid_device = Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 2), invalid_device);
    let mut device = 9;
    call!(driver, cuDeviceGet(&mut device, 1)).unwrap();
    assert_eq!(device, 1);
    assert_eq!(call!(driver, cuDeviceGet(&mut device, 2)), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));

    // An older driver does not know younger attributes.
    let (_old, old) = start(Config::new(1).driver_version(12_000));
    let mut value = 0;
    let multicast = A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
    assert_eq!(call!(old, cuDeviceGetAttribute(&mut value, multicast, 0)), INVALID_VALUE);
}

#[test]
fn errors_have_names_and_descriptions() {
    let (_emulator, driver) = start(Config::new(1));
    let mut text = ptr::null();
    call!(driver, cuGetErrorName(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &mut text)).unwrap();
    // SAFETY: the driver wrote a static C string.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    call!(driver, cuGetErrorString(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &mut text)).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"out of memory");
    let mut unknown = CUresult::CUDA_SUCCESS;
    unknown.0 = 54_321;
    assert_eq!(call!(driver, cuGetErrorName(unknown, &mut text)), INVALID_VALUE);
    assert!(text.is_null());
}

#[test]
fn contexts_are_counted_and_stacked_by_thread() {
    let (emulator, driver) = start(Config::new(2));
    let current = || {
        let mut context: CUcontext = 1 as _;
        call!(driver, cuCtxGetCurrent(&mut context)).unwrap();
        context
    };
    assert!(current().is_null());
    let no_context = Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    let (mut address, mut stream, mut device) = (0, ptr::null_mut(), 0);
    assert_eq!(call!(driver, cuMemAlloc(&mut address, 64)), no_context);
    assert_eq!(call!(driver, cuStreamCreate(&mut stream, 0)), no_context);
    assert_eq!(call!(driver, cuCtxSynchronize()), no_context);
    assert_eq!(call!(driver, cuCtxGetDevice(&mut device)), no_context);
    assert_eq!(call!(driver, cuCtxSetCurrent(0x1234 as _)), no_context);
    assert_eq!(call!(driver, cuCtxPopCurrent(ptr::null_mut())), no_context);
    // Virtual memory needs none.
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);

    let (mut zero, mut again, mut one) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    call!(driver, cuDevicePrimaryCtxRetain(&mut zero, 0)).unwrap();
    call!(driver, cuDevicePrimaryCtxRetain(&mut again, 0)).unwrap();
    call!(driver, cuDevicePrimaryCtxRetain(&mut one, 1)).unwrap();
    assert_eq!(zero, again);
    assert_ne!(zero, one);
    assert!(current().is_null(), "retaining makes nothing current");
    call!(driver, cuCtxSetCurrent(zero)).unwrap();
    call!(driver, cuCtxPushCurrent(one)).unwrap();
    call!(driver, cuCtxGetDevice(&mut device)).unwrap();
    assert_eq!(device, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(current().is_null(), "a thread starts without a context"));
    });
    let mut popped = ptr::null_mut();
    call!(driver, cuCtxPopCurrent(&mut popped)).unwrap();
    assert_eq!((popped, current()), (one, zero));
    let (mut flags, mut active) = (1, 0);
    call!(driver, cuDevicePrimaryCtxGetState(0, &mut flags, &mut active)).unwrap();
    assert_eq!((flags, active), (0, 1));
    let (mut least, mut greatest) = (1, 1);
    call!(driver, cuCtxGetStreamPriorityRange(&mut least, &mut greatest)).unwrap();
    assert!(least >= greatest);

    // The last release takes what the context had; what is on the stack then is a context that is gone.
    let stream = new_stream(&driver, 0);
    call!(driver, cuMemAlloc(&mut address, 64)).unwrap();
    call!(driver, cuDevicePrimaryCtxRelease(0)).unwrap();
    assert_eq!(emulator.ledger().contexts.len(), 2);
    call!(driver, cuDevicePrimaryCtxRelease(0)).unwrap();
    call!(driver, cuDevicePrimaryCtxGetState(0, &mut flags, &mut active)).unwrap();
    assert_eq!(active, 0);
    assert_eq!(call!(driver, cuCtxSynchronize()), Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
    assert_eq!(call!(driver, cuStreamQuery(stream)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(call!(driver, cuDevicePrimaryCtxRelease(0)), no_context);
    call!(driver, cuCtxSetCurrent(ptr::null_mut())).unwrap();
    call!(driver, cuDevicePrimaryCtxRelease(1)).unwrap();
    memory.free(&driver);
    emulator.assert_empty();
}

#[test]
fn peers_are_enabled_once() {
    let (emulator, driver) = start(Config::new(3).no_peer_access(0, 2));
    let two = make_current(&driver, 2);
    let one = make_current(&driver, 1);
    let zero = make_current(&driver, 0);
    call!(driver, cuCtxEnablePeerAccess(one, 0)).unwrap();
    let enable = |context, flags| call!(driver, cuCtxEnablePeerAccess(context, flags));
    assert_eq!(enable(one, 0), Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED));
    assert_eq!(enable(two, 0), Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED));
    assert_eq!(enable(zero, 0), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    assert_eq!(enable(one, 1), INVALID_VALUE);
    call!(driver, cuCtxDisablePeerAccess(one)).unwrap();
    let disabled = call!(driver, cuCtxDisablePeerAccess(one));
    assert_eq!(disabled, Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED));

    let can = |from, to| {
        let mut can = -1;
        call!(driver, cuDeviceCanAccessPeer(&mut can, from, to)).map(|()| can)
    };
    assert_eq!((can(0, 1), can(0, 2), can(2, 0), can(1, 1)), (Ok(1), Ok(0), Ok(0), Ok(0)));
    assert_eq!(can(0, 3), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let mut atomics = -1;
    let attribute = CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    call!(driver, cuDeviceGetP2PAttribute(&mut atomics, attribute, 1, 2)).unwrap();
    assert_eq!(atomics, 1);
    let same = call!(driver, cuDeviceGetP2PAttribute(&mut atomics, attribute, 1, 1));
    assert_eq!(same, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    for device in 0..3 {
        call!(driver, cuDevicePrimaryCtxRelease(device)).unwrap();
    }
    emulator.assert_empty();
}

#[test]
fn plain_and_host_memory_come_and_go() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let mut address = 0;
    assert_eq!(call!(driver, cuMemAlloc(&mut address, 0)), INVALID_VALUE);
    call!(driver, cuMemAlloc(&mut address, 5000)).unwrap();
    let (mut base, mut size) = (0, 0);
    call!(driver, cuMemGetAddressRange(&mut base, &mut size, address + 4999)).unwrap();
    assert_eq!((base, size), (address, 5000));
    let beyond = call!(driver, cuMemGetAddressRange(&mut base, &mut size, address + 5000));
    assert_eq!(beyond, INVALID_VALUE);
    assert_eq!(call!(driver, cuMemFree(address + 8)), INVALID_VALUE);
    call!(driver, cuMemFree(address)).unwrap();
    assert_eq!(call!(driver, cuMemFree(address)), INVALID_VALUE);
    call!(driver, cuMemFree(0)).unwrap();

    let mut pointer = ptr::null_mut();
    call!(driver, cuMemHostAlloc(&mut pointer, 100, 3)).unwrap();
    assert_eq!(call!(driver, cuMemHostAlloc(&mut ptr::null_mut(), 100, 8)), INVALID_VALUE);
    let mut device_pointer = 0;
    // SAFETY: inside the allocation.
    let inner = unsafe { pointer.byte_add(10) };
    call!(driver, cuMemHostGetDevicePointer(&mut device_pointer, inner, 0)).unwrap();
    assert_eq!(device_pointer, pointer as u64 + 10);
    call!(driver, cuMemsetD8Async(device_pointer, 3, 90, DEFAULT)).unwrap();
    assert_eq!(emulator.read(pointer as u64 + 9, 2).unwrap(), [0, 3]);
    assert_eq!(call!(driver, cuMemFreeHost(inner)), INVALID_VALUE);
    call!(driver, cuMemFreeHost(pointer)).unwrap();

    let mut mine = vec![0_u8; 10_000];
    let start = mine.as_mut_ptr();
    let register = |offset: usize, size| {
        // SAFETY: an address in the vector or behind it, which is only looked up.
        call!(driver, cuMemHostRegister(start.wrapping_add(offset).cast(), size, 0))
    };
    register(0, 5000).unwrap();
    let already = Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    assert_eq!(register(0, 5000), already);
    assert_eq!(register(4000, 5000), already);
    assert_eq!(register(6000, 0), INVALID_VALUE);
    register(5000, 5000).unwrap();
    let unregister = |offset: usize| call!(driver, cuMemHostUnregister(start.wrapping_add(offset).cast()));
    assert_eq!(unregister(1), Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
    unregister(0).unwrap();
    unregister(5000).unwrap();
    let nowhere = call!(driver, cuMemHostRegister(0x10_0000 as *mut _, 4096, 0));
    assert_eq!(nowhere, INVALID_VALUE);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn addresses_tell_what_they_are() {
    use CUpointer_attribute as A;
    let (emulator, driver) = start(Config::new(2));
    let context = make_current(&driver, 0);
    let handle = create(&driver, on_device(1), GRAIN, FD).unwrap();
    let base = reserve(&driver, 2 * GRAIN);
    let at = base + GRAIN as u64;
    call!(driver, cuMemMap(at, GRAIN, 0, handle, 0)).unwrap();
    set_access(&driver, at, GRAIN, on_device(0), READ).unwrap();
    let mut plain = 0;
    call!(driver, cuMemAlloc(&mut plain, 100)).unwrap();
    let mut host = ptr::null_mut();
    call!(driver, cuMemHostAlloc(&mut host, 100, 0)).unwrap();

    let number = |attribute, address| {
        let mut value = 0_u64;
        call!(driver, cuPointerGetAttribute((&raw mut value).cast(), attribute, address)).map(|()| value)
    };
    let ordinal = A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    assert_eq!((number(ordinal, at), number(ordinal, plain + 5)), (Ok(1), Ok(0)));
    let kind = A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    assert_eq!((number(kind, at), number(kind, host as u64)), (Ok(2), Ok(1)));
    let ipc = A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    assert_eq!((number(ipc, at), number(ipc, plain)), (Ok(0), Ok(1)));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at + 9), Ok(base));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at + 9), Ok(2 * GRAIN as u64));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at + 9), Ok(at));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE, at + 9), Ok(GRAIN as u64));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, at), Ok(FD.0.into()));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, at), Ok(1));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_CONTEXT, plain), Ok(context as u64));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_CONTEXT, at), Ok(0));
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_HOST_POINTER, host as u64), Ok(host as u64));
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_HOST_POINTER, at), invalid);
    assert_eq!(number(kind, base), invalid);
    assert_eq!(number(A::CU_POINTER_ATTRIBUTE_P2P_TOKENS, at), invalid);

    call!(driver, cuMemUnmap(at, GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(base, 2 * GRAIN)).unwrap();
    call!(driver, cuMemRelease(handle)).unwrap();
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn ipc_handles_open_in_another_emulator_only() {
    let (exporter, ours) = start(Config::new(2));
    let (importer, theirs) = start(Config::new(2));
    make_current(&ours, 1);
    make_current(&theirs, 0);
    let mut address = 0;
    call!(ours, cuMemAlloc(&mut address, 6000)).unwrap();
    exporter.write(address + 5990, b"0123456789").unwrap();
    let mut handle = CUipcMemHandle_v1::default();
    call!(ours, cuIpcGetMemHandle(&mut handle, address)).unwrap();
    let mut opened = 0;
    let open = |driver: &cuda_vmm_emu::sys::Driver, opened: &mut u64, handle, flags| {
        call!(driver, cuIpcOpenMemHandle(opened, handle, flags))
    };
    assert_eq!(open(&ours, &mut opened, handle, 1), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    assert_eq!(open(&theirs, &mut opened, handle, 0), INVALID_VALUE);
    assert_eq!(open(&theirs, &mut opened, CUipcMemHandle_v1::default(), 1), INVALID_VALUE);
    open(&theirs, &mut opened, handle, 1).unwrap();
    let mut again = 0;
    open(&theirs, &mut again, handle, 1).unwrap();
    assert_eq!(again, opened);
    assert_eq!(importer.read(opened + 5990, 10).unwrap(), b"0123456789");
    importer.write(opened, b"back").unwrap();
    assert_eq!(exporter.read(address, 4).unwrap(), b"back");
    let mut ordinal = -1;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    call!(theirs, cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, opened)).unwrap();
    assert_eq!(ordinal, 1, "the memory is on the exporter's device");

    // Freed by the exporter, it stays with who has it open; nobody else can open it.
    call!(ours, cuMemFree(address)).unwrap();
    importer.write(opened, b"still").unwrap();
    assert_eq!(call!(theirs, cuMemFree(opened)), INVALID_VALUE);
    call!(theirs, cuIpcCloseMemHandle(opened)).unwrap();
    call!(theirs, cuIpcCloseMemHandle(opened)).unwrap();
    assert_eq!(call!(theirs, cuIpcCloseMemHandle(opened)), INVALID_VALUE);
    assert_eq!(open(&theirs, &mut opened, handle, 1), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));

    // Memory of the virtual memory functions has no such handle.
    let memory = Mapped::new(&ours, 1, GRAIN, FD);
    assert_eq!(call!(ours, cuIpcGetMemHandle(&mut handle, memory.address)), INVALID_VALUE);
    memory.free(&ours);
    leave(&ours, 1);
    leave(&theirs, 0);
    exporter.assert_empty();
    importer.assert_empty();
}
