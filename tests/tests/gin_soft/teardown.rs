//! Nothing is left behind: NCCL unloads the library after the last connection.

use crate::harness::{MIB, Rank, ranks};
use crate::memory::Memory;
use crate::wire::At;
use integration_tests::process::eventually;
use nccl_gin_soft::LIBRARY;
use nccl_gin_soft::abi::gin_v12::{GinV12, NetPropertiesV11};
use nccl_gin_soft::abi::gin_v13::GinV13;
use nccl_gin_soft::abi::rma_v14::RmaV14;
use nccl_gin_soft::abi::{HANDLE_SIZE, NetProperties, PTR_CUDA, ResultCode};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the process's threads");
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect()
}

/// A thread that was joined may still be seen for a moment.
pub fn assert_no_threads_left() {
    let end = Instant::now() + Duration::from_secs(2);
    loop {
        let left: Vec<String> = threads().into_iter().filter(|name| name.starts_with("gin-soft")).collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < end, "threads of the plugin are left: {left:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the process's descriptors").count()
}

/// Connects and closes many times; threads, descriptors and the driver's objects are then as before.
fn again_and_again(rank: Rank) {
    let mut here = rank;
    let mut before = 0;
    for round in 0..12 {
        let wire = here.connect();
        eventually("a thread of the plugin", || threads().iter().any(|name| name.starts_with("gin-soft")));
        let window = Memory::device(&wire.here, 2 * MIB, true);
        let private = Memory::device(&wire.here, 2 * MIB, false);
        let target = wire.register(window, PTR_CUDA, 0);
        let other = wire.register(private, PTR_CUDA, 0);
        let peer = (wire.here.rank + 1) % wire.here.ranks;
        for source in [target, other] {
            let request = wire.put(0, At(source, 0), 100_000, At(target, MIB as u64), peer);
            wire.wait(request);
        }
        wire.here.barrier();
        // In one round a rank leaves long before the others: no error for them.
        if round == 3 && wire.here.rank != 0 {
            std::thread::sleep(Duration::from_millis(800));
            assert!(!wire.has_error(), "a rank that closes in order is no error");
        }
        here = wire.close(&[target, other]);
        window.free(&here);
        private.free(&here);
        assert_no_threads_left();
        here.barrier();
        if round == 1 {
            before = descriptors();
        }
    }
    assert_eq!(descriptors(), before, "descriptors are left open");
    here.finish();
}

#[test]
fn connections_leave_nothing() {
    ranks("teardown::connections_leave_nothing", 3, &[], again_and_again);
}

#[test]
fn connections_leave_nothing_over_tcp() {
    ranks("teardown::connections_leave_nothing_over_tcp", 2, &[("NCCL_GIN_SOFT_TCP", "1")], again_and_again);
}

/// The library beside this test's executable, as cargo builds it.
fn library() -> PathBuf {
    let folder = std::env::current_exe().expect("the test's own executable");
    let folder = folder.parent().expect("a folder").to_owned();
    let path = folder.join(LIBRARY);
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// The shared library exports the three tables, works without a GPU as far as that goes, and can be unloaded.
#[test]
fn the_library_is_loaded_and_unloaded() {
    for _ in 0..3 {
        // SAFETY: the library has no initialisers of its own; the symbols have the types that their names stand for.
        unsafe {
            let library = libloading::Library::new(library()).unwrap();
            let v14: *const RmaV14 = *library.get(b"ncclRmaPlugin_v14\0").unwrap();
            let v13: *const GinV13 = *library.get(b"ncclGinPlugin_v13\0").unwrap();
            let v12: *const GinV12 = *library.get(b"ncclGinPlugin_v12\0").unwrap();
            for name in [(*v14).name, (*v13).name, (*v12).name] {
                assert_eq!(CStr::from_ptr(name), c"GIN_SOFT");
            }
            let v14 = &*v14;
            let (mut context, mut door, mut comm) = (null_mut(), null_mut(), null_mut());
            let mut count = 0;
            let mut properties = MaybeUninit::<NetProperties>::uninit();
            assert_eq!((v14.init)(&mut context, 7, None), ResultCode::SUCCESS);
            assert_eq!((v14.devices)(&mut count), ResultCode::SUCCESS);
            assert_eq!(count, 1);
            assert_eq!((v14.get_properties)(0, properties.as_mut_ptr()), ResultCode::SUCCESS);
            let properties = properties.assume_init();
            assert_eq!(CStr::from_ptr(properties.name), c"ginsoft0");
            assert_eq!(properties.net_device_type, 2);
            // NCCL's queues are 32 times this, a power of two.
            assert!((properties.max_recvs as u32).is_power_of_two());
            assert_eq!((v14.get_properties)(1, null_mut()), ResultCode::INVALID_ARGUMENT);
            // The older form is smaller: what lies behind it is the caller's.
            const BEHIND: u64 = 0xa5a5_a5a5_a5a5_a5a5;
            let mut older = [BEHIND; size_of::<NetPropertiesV11>() / 8 + 4];
            let place = older.as_mut_ptr().cast::<NetPropertiesV11>();
            assert_eq!(((*v12).get_properties)(0, place), ResultCode::SUCCESS);
            let told = place.read();
            assert_eq!((told.net_device_type, told.max_recvs, told.max_multi_request_size), (2, 8, 1));
            assert_eq!(older[size_of::<NetPropertiesV11>() / 8..], [BEHIND; 4]);
            let mut handle = [0u8; HANDLE_SIZE];
            assert_eq!((v14.listen)(context, 0, handle.as_mut_ptr().cast(), &mut door), ResultCode::SUCCESS);
            let mut handles = [handle.as_mut_ptr().cast()];
            let code = (v14.connect)(context, handles.as_mut_ptr(), 1, 0, door, &mut comm);
            // No driver, or one with no context current here.
            assert_eq!(code, ResultCode::UNHANDLED_CUDA_ERROR);
            assert_eq!(
                (v14.connect)(context, handles.as_mut_ptr(), 1, 5, door, &mut comm),
                ResultCode::INVALID_ARGUMENT
            );
            assert_eq!((v14.close_listen)(door), ResultCode::SUCCESS);
            assert_eq!((v14.close_coll)(null_mut()), ResultCode::INVALID_ARGUMENT);
            assert_eq!((v14.finalize)(context), ResultCode::SUCCESS);
            library.close().unwrap();
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains(LIBRARY), "the library is still mapped");
    }
}
