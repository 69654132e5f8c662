//! What `nccl-gin-soft` adds to an operation between two ranks of a host, *without the driver's time and without NCCL's*.
//!
//! `cargo bench -p benches --bench gin_soft`, on any machine with a core for each of the two threads that spin. Two ranks in one process, over the
//! emulator; from the start of the measurement on, copies return at once and do nothing, and words are written by the call that asks for them. So a
//! figure is: the call that NCCL makes, the command's way through the ring, the other rank's agent that finds it and makes the driver's calls, the
//! report's way back, and NCCL's question whether it is done. Half of that, roughly, is on the way of a signal.
//!
//! To the other rank, each of the two threads has its own lists. To the rank itself, the agent and the thread that calls share them, as they do where
//! ranks answer each other.
//!
//! The calls of the driver are counted: the second part of each line.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cuda_vmm_emu::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUresult, CUstream, CUstreamBatchMemOpParams,
    CUstreamBatchMemOpType, CallError, Driver, Function,
};
use cuda_vmm_emu::{Config, Emulator};
use nccl_gin_soft::abi::rma_v14::RmaConfig;
use nccl_gin_soft::abi::{MR_SIGNAL_NEVER_RESET, PTR_CUDA, PTR_HOST, ResultCode, SIGNAL_INC};
use nccl_gin_soft::{RMA_V14, set_driver};

/// Operations of a measurement.
const COUNT: usize = 20_000;
/// Fewer, where the threads have no core each and every operation waits for a turn.
const PATIENCE: Duration = Duration::from_secs(3);
const BYTES: usize = 2 << 20;
/// The longest wait for one operation.
const LIMIT: Duration = Duration::from_secs(20);

static BEHIND: OnceLock<Driver> = OnceLock::new();
/// Whether the driver's calls are as quick as they can be.
static QUICK: AtomicBool = AtomicBool::new(false);
static COPIES: AtomicU64 = AtomicU64::new(0);
static BATCHES: AtomicU64 = AtomicU64::new(0);
static WORDS: AtomicU64 = AtomicU64::new(0);

fn behind() -> &'static Driver {
    BEHIND.get().expect("set before any call")
}

fn code(result: Result<(), CallError>) -> CUresult {
    match result {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
    }
}

unsafe extern "C" fn version(out: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    code(unsafe { behind().cuDriverGetVersion(out) })
}

unsafe extern "C" fn copy(to: CUdeviceptr, from: CUdeviceptr, length: usize, stream: CUstream) -> CUresult {
    if QUICK.load(Ordering::Relaxed) {
        COPIES.fetch_add(1, Ordering::Relaxed);
        return CUresult::CUDA_SUCCESS;
    }
    // SAFETY: the caller's contract.
    code(unsafe { behind().cuMemcpyAsync(to, from, length, stream) })
}

unsafe extern "C" fn copies(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    kinds: usize,
    stream: CUstream,
) -> CUresult {
    if QUICK.load(Ordering::Relaxed) {
        COPIES.fetch_add(1, Ordering::Relaxed);
        return CUresult::CUDA_SUCCESS;
    }
    // SAFETY: the caller's contract.
    code(unsafe { behind().cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, first, kinds, stream) })
}

unsafe extern "C" fn write(
    stream: CUstream,
    count: c_uint,
    list: *mut CUstreamBatchMemOpParams,
    flags: c_uint,
) -> CUresult {
    if !QUICK.load(Ordering::Relaxed) {
        // SAFETY: the caller's contract.
        return code(unsafe { behind().cuStreamBatchMemOp(stream, count, list, flags) });
    }
    BATCHES.fetch_add(1, Ordering::Relaxed);
    WORDS.fetch_add(count.into(), Ordering::Relaxed);
    for index in 0..count as usize {
        // SAFETY: the list has `count` writes; each address is an aligned word of mapped memory, which the emulator has in this process.
        unsafe {
            let word = &(*list.add(index)).writeValue;
            assert_eq!(word.operation, CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64);
            AtomicU64::from_ptr(word.address as *mut u64)
                .store(word.__bindgen_anon_1.value64, Ordering::Release);
        }
    }
    CUresult::CUDA_SUCCESS
}

fn quick_driver(emulator: &Emulator) -> Driver {
    let inner = BEHIND.get_or_init(|| emulator.driver());
    let loader = |name: &CStr| match name.to_bytes() {
        b"cuDriverGetVersion" => version as *const c_void,
        b"cuMemcpyAsync" => copy as *const c_void,
        b"cuMemcpyBatchAsync_v2" => copies as *const c_void,
        b"cuStreamBatchMemOp_v2" => write as *const c_void,
        bytes => Function::ALL
            .iter()
            .find(|function| function.symbol().as_bytes() == bytes)
            .and_then(|&function| inner.address(function).ok())
            .unwrap_or(null()),
    };
    // SAFETY: the four functions have the signatures of cuda.h for their names; all others are the emulator's.
    unsafe { Driver::from_loader(loader) }.expect("the emulator tells its version")
}

#[track_caller]
fn ok(code: ResultCode) {
    assert_eq!(code, ResultCode::SUCCESS);
}

/// Memory of a device that can be exported.
fn device_memory(driver: &Driver, device: i32) -> u64 {
    let location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    let property = CUmemAllocationProp {
        type_: cuda_vmm_emu::sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ..CUmemAllocationProp::default()
    };
    let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    let (mut base, mut handle) = (0, 0);
    // SAFETY: pointers are to locals. The memory stays until the process ends.
    unsafe {
        driver.cuMemAddressReserve(&mut base, BYTES, BYTES, 0, 0).unwrap();
        driver.cuMemCreate(&mut handle, BYTES, &property, 0).unwrap();
        driver.cuMemMap(base, BYTES, 0, handle, 0).unwrap();
        driver.cuMemSetAccess(base, BYTES, &access, 1).unwrap();
    }
    base
}

/// A connected rank.
struct Rank {
    comm: *mut c_void,
    contexts: *mut c_void,
    window: *mut c_void,
    signals: *mut c_void,
    values: *mut c_void,
}

impl Rank {
    fn connect(driver: &Driver, rank: usize, handles: &Mutex<Vec<[u8; 128]>>, barrier: &Barrier) -> Self {
        let mut context = null_mut();
        let (mut plugin, mut door, mut handle) = (null_mut(), null_mut(), [0u8; 128]);
        let (mut comm, mut contexts) = (null_mut(), null_mut());
        // SAFETY: as NCCL does: live objects, a place for each result, as many handles as ranks.
        unsafe {
            driver.cuInit(0).unwrap();
            driver.cuDevicePrimaryCtxRetain(&mut context, rank as i32).unwrap();
            driver.cuCtxSetCurrent(context).unwrap();
            ok((RMA_V14.init)(&mut plugin, 1, None));
            ok((RMA_V14.listen)(plugin, 0, handle.as_mut_ptr().cast(), &mut door));
            handles.lock().unwrap()[rank] = handle;
            barrier.wait();
            let mut all = handles.lock().unwrap().clone();
            let mut list: Vec<*mut c_void> = all.iter_mut().map(|one| one.as_mut_ptr().cast()).collect();
            ok((RMA_V14.connect)(plugin, list.as_mut_ptr(), 2, rank as c_int, door, &mut comm));
            ok((RMA_V14.close_listen)(door));
            let mut config = RmaConfig { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            ok((RMA_V14.create_context)(comm, &mut config, &mut contexts));
        }
        let register = |base: u64, size: usize, kind: c_int, flags: u64| {
            let mut handle = null_mut();
            // SAFETY: live memory, which stays until the process ends, and a place for the handle.
            ok(unsafe { (RMA_V14.reg_mr_sym)(comm, base as *mut c_void, size, kind, flags, &mut handle) });
            handle
        };
        let values: &'static mut [u64] = Vec::leak(vec![7u64; 512]);
        Self {
            comm,
            contexts,
            window: register(device_memory(driver, rank as i32), BYTES, PTR_CUDA, 0),
            signals: register(device_memory(driver, rank as i32), BYTES, PTR_CUDA, MR_SIGNAL_NEVER_RESET),
            values: register(values.as_mut_ptr() as u64, 4096, PTR_HOST, 0),
        }
    }

    fn signal(&self, rank: u32, from: *mut c_void, size: usize) -> *mut c_void {
        let mut request = null_mut();
        let to = if size > 0 { self.window } else { null_mut() };
        // SAFETY: live objects and a place for the request; the plugin checks handles and offsets.
        ok(unsafe {
            (RMA_V14.iput_signal)(
                self.contexts,
                0,
                0,
                from,
                size,
                4096,
                to,
                rank,
                64,
                self.signals,
                1,
                SIGNAL_INC,
                true,
                &mut request,
            )
        });
        request
    }

    fn is_done(&self, request: *mut c_void) -> bool {
        let mut done = 0;
        // SAFETY: a live connection and a place for the answer; the request is a number.
        ok(unsafe { (RMA_V14.test)(self.comm, request, &mut done) });
        done != 0
    }

    fn wait(&self, request: *mut c_void) {
        let begin = Instant::now();
        while !self.is_done(request) {
            assert!(begin.elapsed() < LIMIT, "an operation does not end");
        }
    }

    fn close(self) {
        // SAFETY: made by `connect` and used no more.
        unsafe {
            ok((RMA_V14.destroy_context)(self.contexts));
            ok((RMA_V14.close_coll)(self.comm));
        }
    }
}

fn quantiles(mut times: Vec<Duration>) -> (u128, u128, u128) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_nanos();
    (at(10), at(50), at(90))
}

fn measure(rank: &Rank, peer: u32) {
    let to = if peer == 0 { "to itself" } else { "to the other rank" };
    for (name, from, size) in [
        ("signal", null_mut(), 0),
        ("8-byte value with signal", rank.values, 8),
        ("8-byte put with signal", rank.window, 8),
    ] {
        for counter in [&COPIES, &BATCHES, &WORDS] {
            counter.store(0, Ordering::Relaxed);
        }
        let (mut calls, mut whole) = (Vec::with_capacity(COUNT), Vec::with_capacity(COUNT));
        let start = Instant::now();
        while whole.len() < COUNT && start.elapsed() < PATIENCE {
            let begin = Instant::now();
            let request = rank.signal(peer, from, size);
            calls.push(begin.elapsed());
            rank.wait(request);
            whole.push(begin.elapsed());
            // As long as a signal's way on a GPU: the agent looks in vain meanwhile.
            let rest = Instant::now();
            while rest.elapsed() < Duration::from_micros(15) {
                std::hint::spin_loop();
            }
        }
        let count = whole.len() as f64;
        let ((_, call, _), (best, median, worst)) = (quantiles(calls), quantiles(whole));
        let each = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64 / count;
        println!(
            "{to}, {name}: {call} ns to call, done after {best} / {median} / {worst} ns (10 / 50 / 90 %); driver: {:.2} copies, {:.2} batches of {:.2} words",
            each(&COPIES),
            each(&BATCHES),
            each(&WORDS) / each(&BATCHES)
        );
    }
    // One behind the other: what the two threads can take.
    for (name, size) in [("signals", 0), ("8-byte puts with signals", 8)] {
        let mut last = null_mut();
        let begin = Instant::now();
        for _ in 0..COUNT {
            last = rank.signal(peer, if size > 0 { rank.window } else { null_mut() }, size);
        }
        rank.wait(last);
        println!("{to}, {name} one behind the other: {} ns each", begin.elapsed().as_nanos() / COUNT as u128);
    }
}

fn main() {
    let emulator = Emulator::new(Config::new(2)).expect("an emulator");
    let driver = quick_driver(&emulator);
    set_driver(driver.clone());
    let (handles, barrier) = (Mutex::new(vec![[0u8; 128]; 2]), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let rank = Rank::connect(&driver, 1, &handles, &barrier);
            barrier.wait();
            // The agent works; this thread sleeps.
            barrier.wait();
            rank.close();
        });
        let rank = Rank::connect(&driver, 0, &handles, &barrier);
        barrier.wait();
        QUICK.store(true, Ordering::Release);
        for peer in [1, 0] {
            measure(&rank, peer);
        }
        QUICK.store(false, Ordering::Release);
        barrier.wait();
        rank.close();
    });
}
