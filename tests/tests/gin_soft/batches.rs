//! How many calls of the driver it takes: a command that comes alone goes at once, many become few calls.

use crate::harness::{MIB, Rank, ranks};
use crate::memory::Memory;
use crate::wire::At;
use cuda_vmm_emu::sys::ffi::{c_int, c_uint, c_void};
use cuda_vmm_emu::sys::{
    CUdeviceptr, CUmemcpyAttributes_v1, CUresult, CUstream, CUstreamBatchMemOpParams, CallError, Driver,
    Function,
};
use integration_tests::process::eventually;
use nccl_gin_soft::abi::{MR_FORCE_ORDER, MR_SIGNAL_NEVER_RESET, PTR_CUDA};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

static INNER: OnceLock<Driver> = OnceLock::new();
/// Words that streams were asked to write, the calls that did, and calls that copy.
static WORDS: AtomicU64 = AtomicU64::new(0);
static BATCHES: AtomicU64 = AtomicU64::new(0);
static COPIES: AtomicU64 = AtomicU64::new(0);
/// Streams stop before the next words.
static HELD: AtomicBool = AtomicBool::new(false);

fn counting(inner: Driver) -> Driver {
    let behind = inner.clone();
    assert!(INNER.set(inner).is_ok(), "one counting driver a process");
    let loader = move |name: &std::ffi::CStr| match name.to_bytes() {
        b"cuMemcpyAsync" => copy as *const c_void,
        b"cuMemcpyBatchAsync_v2" => copies as *const c_void,
        b"cuStreamBatchMemOp_v2" => write as *const c_void,
        b"cuDriverGetVersion" => version as *const c_void,
        bytes => {
            let function = Function::ALL.iter().find(|function| function.symbol().as_bytes() == bytes);
            function.and_then(|&function| behind.address(function).ok()).unwrap_or(std::ptr::null())
        }
    };
    // SAFETY: the four functions have the signatures of cuda.h for their names; all others are the wrapped driver's own.
    unsafe { Driver::from_loader(loader) }.expect("the emulator tells its version")
}

fn inner() -> &'static Driver {
    INNER.get().expect("set before any call")
}

fn code(result: Result<(), CallError>) -> CUresult {
    match result {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
    }
}

unsafe extern "C" fn version(out: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    code(unsafe { inner().cuDriverGetVersion(out) })
}

unsafe extern "C" fn copy(to: CUdeviceptr, from: CUdeviceptr, length: usize, stream: CUstream) -> CUresult {
    COPIES.fetch_add(1, Ordering::AcqRel);
    // SAFETY: the caller's contract.
    code(unsafe { inner().cuMemcpyAsync(to, from, length, stream) })
}

unsafe extern "C" fn copies(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes_v1,
    first: *mut usize,
    kinds: usize,
    stream: CUstream,
) -> CUresult {
    COPIES.fetch_add(1, Ordering::AcqRel);
    // SAFETY: the caller's contract.
    code(unsafe { inner().cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, first, kinds, stream) })
}

unsafe extern "C" fn hold(_: *mut c_void) {
    let end = Instant::now() + Duration::from_secs(10);
    while HELD.load(Ordering::Acquire) && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(100));
    }
}

unsafe extern "C" fn write(
    stream: CUstream,
    count: c_uint,
    list: *mut CUstreamBatchMemOpParams,
    flags: c_uint,
) -> CUresult {
    BATCHES.fetch_add(1, Ordering::AcqRel);
    WORDS.fetch_add(count.into(), Ordering::AcqRel);
    if HELD.load(Ordering::Acquire) {
        // SAFETY: the function makes no CUDA call, and takes nothing.
        let _ = unsafe { inner().cuLaunchHostFunc(stream, Some(hold), std::ptr::null_mut()) };
    }
    // SAFETY: the caller's contract.
    code(unsafe { inner().cuStreamBatchMemOp(stream, count, list, flags) })
}

/// What was called since the last time: copies, batches of words, words.
fn called() -> [u64; 3] {
    [&COPIES, &BATCHES, &WORDS].map(|counter| counter.swap(0, Ordering::AcqRel))
}

fn calls(rank: Rank) {
    const MANY: u64 = 100;
    nccl_gin_soft::set_driver(counting(rank.driver.clone()));
    let wire = rank.connect();
    let me = wire.here.rank;
    let window = Memory::device(&wire.here, 4 * MIB, true);
    let indexed = Memory::device(&wire.here, 2 * MIB, false);
    let signals = wire.register(indexed, PTR_CUDA, MR_FORCE_ORDER | MR_SIGNAL_NEVER_RESET);
    let target = wire.register(window, PTR_CUDA, 0);
    let put = |index: u64| {
        let (from, to) = (At(target, 8 * index), At(target, 2 * MIB as u64 + 8 * index));
        wire.put_signal(0, from, 8, to, me, At(signals, 0), 1)
    };
    // Alone, with time for the agent to see that nothing is under way: a signal is a call of one word, its report another.
    let mut apart = 0;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(5));
        called();
        wire.wait(wire.signal(0, me, At(signals, 0), 1));
        let [copies, batches, words] = called();
        assert_eq!((copies, words), (0, 2), "a signal and its report");
        apart += u64::from(batches == 2);
    }
    assert!(apart >= 10, "{apart} of 20 signals went before their reports");
    // Behind a copy both words come in one call.
    for index in 0..20 {
        std::thread::sleep(Duration::from_millis(1));
        called();
        wire.wait(put(index));
        assert_eq!(called(), [1, 1, 2], "a copy, a signal and its report");
    }
    // With streams that stand still, what comes is collected.
    HELD.store(true, Ordering::Release);
    let later = |index: u64| {
        // Longer than the agent takes for a call: without a reason to wait there would be one for each.
        std::thread::sleep(Duration::from_micros(200));
        put(index)
    };
    let requests: Vec<_> = (0..MANY).map(later).collect();
    eventually("the first batches", || BATCHES.load(Ordering::Acquire) >= 2);
    std::thread::sleep(Duration::from_millis(100));
    HELD.store(false, Ordering::Release);
    wire.wait_all(requests);
    let [copies, batches, words] = called();
    assert!(copies <= MANY / 4 && batches <= MANY / 4, "{MANY} puts: {copies} copies, {batches} batches");
    assert_eq!(words, 2 * batches, "one signal and one report each");
    assert_eq!(indexed.load(0), 40 + MANY);
    let here = wire.close(&[signals, target]);
    window.free(&here);
    indexed.free(&here);
    here.finish();
}

#[test]
fn one_goes_at_once_and_many_together() {
    ranks("batches::one_goes_at_once_and_many_together", 1, &[], calls);
}
