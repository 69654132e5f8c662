//! Streams and events: order, waits that block one stream while others go on, and what happens when work fails.

mod common;

use common::*;
use cuda_vmm_emu::sys::{
    CUdevice_attribute, CUevent, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUstreamWaitValue_flags, Driver,
};
use cuda_vmm_emu::sys::{CUresult, ffi::c_void};
use cuda_vmm_emu::{Config, Incident};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const GEQ: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ.0;
const EQ: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ.0;
const NOT_READY: Result<(), CUresult> = Err(CUresult::CUDA_ERROR_NOT_READY);
const NON_BLOCKING: u32 = 1;

fn new_event(driver: &Driver) -> CUevent {
    let mut event = ptr::null_mut();
    call!(driver, cuEventCreate(&mut event, 0)).unwrap();
    event
}

fn word(driver: &Driver) -> (Mapped, u64) {
    let memory = Mapped::new(driver, 0, GRAIN, NONE);
    let address = memory.address;
    (memory, address)
}

#[test]
fn a_stream_waits_for_a_word_while_others_go_on() {
    let (emulator, driver) = start(Config::default());
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let (waiting, writing) = (new_stream(&driver, NON_BLOCKING), new_stream(&driver, NON_BLOCKING));
    let event = new_event(&driver);

    call!(driver, cuStreamWaitValue32(waiting, at, 2, GEQ)).unwrap();
    call!(driver, cuMemsetD8Async(at + 64, 7, 16, waiting)).unwrap();
    call!(driver, cuEventRecord(event, waiting)).unwrap();
    assert_eq!(call!(driver, cuStreamQuery(waiting)), NOT_READY);
    assert_eq!(call!(driver, cuEventQuery(event)), NOT_READY);
    call!(driver, cuStreamWriteValue32(writing, at, 1, 0)).unwrap();
    call!(driver, cuStreamSynchronize(writing)).unwrap();
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(call!(driver, cuStreamQuery(waiting)), NOT_READY);
    assert_eq!(emulator.read(at + 64, 1).unwrap(), [0]);
    call!(driver, cuStreamWriteValue32(writing, at, 3, 0)).unwrap();
    call!(driver, cuEventSynchronize(event)).unwrap();
    assert_eq!(emulator.read(at + 64, 1).unwrap(), [7]);
    call!(driver, cuStreamSynchronize(waiting)).unwrap();
    call!(driver, cuStreamQuery(waiting)).unwrap();

    // A word that the CPU writes will do as well, 64 bits wide too.
    call!(driver, cuStreamWaitValue64(waiting, at + 8, 1 << 40, EQ)).unwrap();
    emulator.write(at + 8, &(1_u64 << 40).to_ne_bytes()).unwrap();
    call!(driver, cuCtxSynchronize()).unwrap();

    for stream in [waiting, writing] {
        call!(driver, cuStreamDestroy(stream)).unwrap();
        assert_eq!(call!(driver, cuStreamQuery(stream)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    }
    call!(driver, cuEventDestroy(event)).unwrap();
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn a_wait_that_nobody_ends_fails_the_context_in_time() {
    let (emulator, driver) = start(Config::new(1).stream_deadline(Duration::from_millis(50)));
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let stream = new_stream(&driver, NON_BLOCKING);
    let event = new_event(&driver);
    call!(driver, cuStreamWaitValue32(stream, at, 1, GEQ)).unwrap();
    call!(driver, cuMemsetD8Async(at + 64, 7, 16, stream)).unwrap();
    call!(driver, cuEventRecord(event, stream)).unwrap();
    let start = Instant::now();
    let timeout = Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    assert_eq!(call!(driver, cuStreamSynchronize(stream)), timeout);
    assert!(start.elapsed() < Duration::from_secs(20));
    // What came after was not done, nobody waits for it, and the context is over.
    assert_eq!(emulator.read(at + 64, 1).unwrap(), [0]);
    assert_eq!(call!(driver, cuEventSynchronize(event)), timeout);
    assert_eq!(call!(driver, cuMemsetD8Async(at, 1, 1, stream)), timeout);
    let mut plain = 0;
    assert_eq!(call!(driver, cuMemAlloc(&mut plain, 1)), timeout);
    // Virtual memory belongs to no context, and goes on.
    memory.free(&driver);
    let incidents = emulator.ledger().incidents;
    assert_eq!(incidents, [Incident::StreamFailed { device: 0, error: CUresult::CUDA_ERROR_LAUNCH_TIMEOUT }]);
    assert!(incidents[0].to_string().contains("CUDA_ERROR_LAUNCH_TIMEOUT"));
    // A new context starts afresh, with the old one's streams and events gone.
    leave(&driver, 0);
    assert!(emulator.ledger().is_empty());
    make_current(&driver, 0);
    call!(driver, cuMemAlloc(&mut plain, 1)).unwrap();
    call!(driver, cuMemFree(plain)).unwrap();
    leave(&driver, 0);
}

#[test]
fn memory_that_goes_while_work_is_queued_is_an_illegal_address_and_no_crash() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (flag, at) = word(&driver);
    let victim = Mapped::new(&driver, 0, GRAIN, NONE);
    let stream = new_stream(&driver, NON_BLOCKING);
    call!(driver, cuStreamWaitValue32(stream, at, 1, GEQ)).unwrap();
    call!(driver, cuMemcpyDtoDAsync(victim.address, victim.address + 64, 64, stream)).unwrap();
    victim.free(&driver);
    emulator.write(at, &[1, 0, 0, 0]).unwrap();
    let illegal = Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(call!(driver, cuStreamSynchronize(stream)), illegal);
    assert_eq!(call!(driver, cuCtxSynchronize()), illegal);
    flag.free(&driver);
    leave(&driver, 0);
    assert!(emulator.ledger().is_empty());
}

#[test]
fn events_order_streams_and_keep_time() {
    let (emulator, driver) = start(Config::new(2));
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let (first, second) = (new_stream(&driver, NON_BLOCKING), new_stream(&driver, NON_BLOCKING));
    let (begin, end) = (new_event(&driver), new_event(&driver));
    let mut elapsed = -1.0;
    let never = call!(driver, cuEventElapsedTime(&mut elapsed, begin, end));
    assert_eq!(never, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    // An event that was never recorded has happened, and holds nobody up.
    call!(driver, cuEventQuery(begin)).unwrap();
    call!(driver, cuStreamWaitEvent(second, begin, 0)).unwrap();

    call!(driver, cuEventRecord(begin, first)).unwrap();
    call!(driver, cuStreamWaitValue32(first, at, 1, GEQ)).unwrap();
    call!(driver, cuEventRecord(end, first)).unwrap();
    call!(driver, cuStreamWaitEvent(second, end, 0)).unwrap();
    call!(driver, cuMemsetD32Async(at + 64, 0x0102_0304, 2, second)).unwrap();
    assert_eq!(call!(driver, cuEventElapsedTime(&mut elapsed, begin, end)), NOT_READY);
    assert_eq!(call!(driver, cuStreamQuery(second)), NOT_READY);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(emulator.read(at + 64, 4).unwrap(), [0; 4]);
    emulator.write(at, &[1]).unwrap();
    call!(driver, cuStreamSynchronize(second)).unwrap();
    assert_eq!(emulator.read(at + 64, 8).unwrap(), [4, 3, 2, 1, 4, 3, 2, 1]);
    call!(driver, cuEventElapsedTime(&mut elapsed, begin, end)).unwrap();
    assert!((20.0..20_000.0).contains(&elapsed), "{elapsed}");
    call!(driver, cuEventElapsedTime(&mut elapsed, end, begin)).unwrap();
    assert!(elapsed < 0.0);

    // An event belongs to its context; one without timing has no time.
    let mut untimed = ptr::null_mut();
    call!(driver, cuEventCreate(&mut untimed, 2)).unwrap();
    call!(driver, cuEventRecord(untimed, first)).unwrap();
    let no_time = call!(driver, cuEventElapsedTime(&mut elapsed, begin, untimed));
    assert_eq!(no_time, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    make_current(&driver, 1);
    let foreign = new_stream(&driver, 0);
    let wrong = call!(driver, cuEventRecord(begin, foreign));
    assert_eq!(wrong, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    call!(driver, cuStreamWaitEvent(foreign, begin, 0)).unwrap();
    leave(&driver, 1);
    memory.free(&driver);
    call!(driver, cuDevicePrimaryCtxRelease(0)).unwrap();
    emulator.assert_empty();
}

#[test]
fn the_default_stream_takes_turns_with_blocking_streams() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let default: CUstream = ptr::null_mut();
    let (blocking, apart) = (new_stream(&driver, 0), new_stream(&driver, NON_BLOCKING));
    call!(driver, cuStreamWaitValue32(blocking, at, 1, GEQ)).unwrap();
    call!(driver, cuMemsetD8Async(at + 64, 1, 1, default)).unwrap();
    call!(driver, cuMemsetD8Async(at + 65, 1, 1, apart)).unwrap();
    call!(driver, cuStreamSynchronize(apart)).unwrap();
    assert_eq!(call!(driver, cuStreamQuery(default)), NOT_READY);
    assert_eq!(emulator.read(at + 64, 2).unwrap(), [0, 1]);
    emulator.write(at, &[1]).unwrap();
    call!(driver, cuStreamSynchronize(default)).unwrap();
    assert_eq!(emulator.read(at + 64, 2).unwrap(), [1, 1]);
    // And the other way round.
    call!(driver, cuStreamWaitValue32(default, at, 2, GEQ)).unwrap();
    call!(driver, cuMemsetD8Async(at + 66, 1, 1, blocking)).unwrap();
    // Each thread has a default stream of its own that is a blocking one.
    let mine = 2 as CUstream;
    call!(driver, cuMemsetD8Async(at + 67, 1, 1, mine)).unwrap();
    assert_eq!(call!(driver, cuStreamQuery(blocking)), NOT_READY);
    assert_eq!(call!(driver, cuStreamQuery(mine)), NOT_READY);
    emulator.write(at, &[2]).unwrap();
    call!(driver, cuCtxSynchronize()).unwrap();
    assert_eq!(emulator.read(at + 66, 2).unwrap(), [1, 1]);
    let mut context = ptr::null_mut();
    call!(driver, cuStreamGetCtx(blocking, &mut context)).unwrap();
    let mut current = ptr::null_mut();
    call!(driver, cuCtxGetCurrent(&mut current)).unwrap();
    assert_eq!(context, current);
    let number = |stream| {
        let mut number = 0;
        call!(driver, cuStreamGetId(stream, &mut number)).map(|()| number)
    };
    let numbers = [ptr::null_mut(), 2 as CUstream, blocking, apart].map(|stream| number(stream).unwrap());
    for (i, one) in numbers.iter().enumerate() {
        assert!(!numbers[..i].contains(one), "{numbers:?}");
    }
    assert_eq!(number(1 as CUstream).unwrap(), numbers[0], "both are the legacy default stream");
    assert!(number(0x1234_5678 as CUstream).is_err());
    for stream in [blocking, apart] {
        call!(driver, cuStreamDestroy(stream)).unwrap();
    }
    assert_eq!(call!(driver, cuStreamDestroy(default)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn a_destroyed_stream_finishes_its_work_before_memory_goes() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let mut plain = 0;
    call!(driver, cuMemAlloc(&mut plain, 64)).unwrap();
    let stream = new_stream(&driver, NON_BLOCKING);
    call!(driver, cuStreamWaitValue32(stream, at, 1, GEQ)).unwrap();
    call!(driver, cuMemsetD8Async(plain, 7, 64, stream)).unwrap();
    call!(driver, cuMemcpyDtoDAsync(at + 64, plain, 64, stream)).unwrap();
    call!(driver, cuStreamDestroy(stream)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            emulator.write(at, &[1]).unwrap();
        });
        // Freeing waits for the work that uses the memory.
        call!(driver, cuMemFree(plain)).unwrap();
    });
    assert_eq!(emulator.read(at + 64, 64).unwrap(), [7; 64]);
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

struct Gate {
    driver: Driver,
    open: mpsc::Receiver<()>,
    seen: mpsc::Sender<Result<(), CUresult>>,
}

/// A host function that waits for what the submitting thread does next, and calls the driver, which is forbidden.
unsafe extern "C" fn through_the_gate(data: *mut c_void) {
    // SAFETY: the test passes a gate that it keeps until the stream has finished.
    let gate = unsafe { &*data.cast::<Gate>() };
    gate.open.recv_timeout(Duration::from_secs(20)).unwrap();
    let mut count = 0;
    gate.seen.send(call!(gate.driver, cuDeviceGetCount(&mut count))).unwrap();
}

#[test]
fn a_host_function_runs_in_order_on_a_thread_of_its_own() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let stream = new_stream(&driver, NON_BLOCKING);
    let (open, opened) = mpsc::channel();
    let (send, seen) = mpsc::channel();
    let gate = Gate { driver: driver.clone(), open: opened, seen: send };
    let data = ptr::from_ref(&gate).cast_mut().cast();
    call!(driver, cuLaunchHostFunc(stream, Some(through_the_gate), data)).unwrap();
    call!(driver, cuMemsetD8Async(at, 9, 1, stream)).unwrap();
    assert_eq!(call!(driver, cuStreamQuery(stream)), NOT_READY);
    assert_eq!(emulator.read(at, 1).unwrap(), [0]);
    open.send(()).unwrap();
    call!(driver, cuStreamSynchronize(stream)).unwrap();
    assert_eq!(seen.recv().unwrap(), Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
    assert_eq!(emulator.read(at, 1).unwrap(), [9]);
    assert_eq!(call!(driver, cuLaunchHostFunc(stream, None, data)), INVALID_VALUE);
    // This thread may call as before.
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn batches_write_and_wait_in_order() {
    use CUstreamBatchMemOpType as T;
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let stream = new_stream(&driver, NON_BLOCKING);
    let op = |operation, offset: u64, value: u64, wait: bool| {
        let mut params = CUstreamBatchMemOpParams::default();
        if wait {
            params.waitValue.operation = operation;
            params.waitValue.address = at + offset;
            params.waitValue.__bindgen_anon_1.value64 = value;
            params.waitValue.flags = GEQ;
        } else {
            params.writeValue.operation = operation;
            params.writeValue.address = at + offset;
            params.writeValue.__bindgen_anon_1.value64 = value;
        }
        params
    };
    let mut barrier = CUstreamBatchMemOpParams::default();
    barrier.memoryBarrier.operation = T::CU_STREAM_MEM_OP_BARRIER;
    let mut ops = [
        op(T::CU_STREAM_MEM_OP_WRITE_VALUE_32, 0, 5, false),
        op(T::CU_STREAM_MEM_OP_WAIT_VALUE_64, 8, 1 << 33, true),
        barrier,
        op(T::CU_STREAM_MEM_OP_WRITE_VALUE_64, 16, 1 << 34, false),
        op(T::CU_STREAM_MEM_OP_WAIT_VALUE_32, 0, 5, true),
    ];
    call!(driver, cuStreamBatchMemOp(stream, 5, ops.as_mut_ptr(), 0)).unwrap();
    assert_eq!(emulator.read(at, 4).unwrap(), 5_u32.to_ne_bytes());
    assert_eq!(emulator.read(at + 16, 8).unwrap(), [0; 8]);
    emulator.write(at + 8, &(1_u64 << 33).to_ne_bytes()).unwrap();
    call!(driver, cuStreamSynchronize(stream)).unwrap();
    assert_eq!(emulator.read(at + 16, 8).unwrap(), (1_u64 << 34).to_ne_bytes());

    // Nothing of a batch is done if a part of it is refused.
    ops[0] = op(T::CU_STREAM_MEM_OP_WRITE_VALUE_32, 0, 6, false);
    ops[1] = op(T::CU_STREAM_MEM_OP_WRITE_VALUE_32, GRAIN as u64, 6, false);
    assert_eq!(call!(driver, cuStreamBatchMemOp(stream, 2, ops.as_mut_ptr(), 0)), INVALID_VALUE);
    assert_eq!(emulator.read(at, 4).unwrap(), 5_u32.to_ne_bytes());
    assert_eq!(call!(driver, cuStreamBatchMemOp(stream, 257, ops.as_mut_ptr(), 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuStreamBatchMemOp(stream, 2, ops.as_mut_ptr(), 1)), INVALID_VALUE);
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn words_have_rules() {
    use CUdevice_attribute as A;
    let config = Config::new(2).device(1, |device| {
        device
            .attribute(A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0)
            .attribute(A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 0)
    });
    let (emulator, driver) = start(config);
    make_current(&driver, 0);
    let (memory, at) = word(&driver);
    let stream = new_stream(&driver, 0);
    let not_supported = Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(call!(driver, cuStreamWriteValue32(stream, at + 2, 1, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuStreamWriteValue64(stream, at + 4, 1, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuStreamWriteValue32(stream, at, 1, 8)), INVALID_VALUE);
    assert_eq!(call!(driver, cuStreamWaitValue32(stream, at, 1, 4)), INVALID_VALUE);
    assert_eq!(call!(driver, cuStreamWaitValue32(stream, at, 0, GEQ | 1 << 30)), not_supported);
    assert_eq!(call!(driver, cuStreamWriteValue32(stream, 0, 1, 0)), INVALID_VALUE);
    // Pageable memory is out of reach; registered memory is not.
    let mut pageable = Box::new([0_u64; 8]);
    let mine = pageable.as_mut_ptr() as u64;
    assert_eq!(call!(driver, cuStreamWriteValue32(stream, mine, 1, 0)), INVALID_VALUE);
    call!(driver, cuMemHostRegister(mine as *mut _, 64, 0)).unwrap();
    call!(driver, cuStreamWriteValue32(stream, mine, 77, 0)).unwrap();
    call!(driver, cuMemHostUnregister(mine as *mut _)).unwrap();
    // SAFETY: the stream has written the word, and nobody uses it any more.
    assert_eq!(unsafe { ptr::read_volatile(mine as *const u32) }, 77);

    // Another device: without access to the mapping, and without the attributes.
    make_current(&driver, 1);
    let other = new_stream(&driver, 0);
    assert_eq!(call!(driver, cuStreamWriteValue32(other, at, 1, 0)), INVALID_VALUE);
    set_access(&driver, at, GRAIN, on_device(1), READ).unwrap();
    call!(driver, cuStreamWaitValue32(other, at, 0, GEQ)).unwrap();
    assert_eq!(call!(driver, cuStreamWriteValue32(other, at, 1, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuStreamWaitValue64(other, at, 0, GEQ)), not_supported);
    assert_eq!(call!(driver, cuStreamWaitValue32(other, at, 0, 3)), not_supported);
    leave(&driver, 1);
    memory.free(&driver);
    call!(driver, cuDevicePrimaryCtxRelease(0)).unwrap();
    emulator.assert_empty();
}

#[test]
fn a_thread_keeps_its_capture_mode() {
    let (_emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let stream = new_stream(&driver, 0);
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    call!(driver, cuStreamIsCapturing(stream, &mut status)).unwrap();
    assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    call!(driver, cuThreadExchangeStreamCaptureMode(&mut mode)).unwrap();
    assert_eq!(mode, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    call!(driver, cuThreadExchangeStreamCaptureMode(&mut mode)).unwrap();
    assert_eq!(mode, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
}

static COUNTED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count(expected: *mut c_void) {
    let before = COUNTED.fetch_add(1, Ordering::SeqCst);
    assert_eq!(before as usize, expected as usize);
}

#[test]
fn many_threads_keep_each_streams_order() {
    let (emulator, driver) = start(Config::new(2));
    let threads: Vec<_> = (0..4_u64)
        .map(|thread| {
            let (emulator, driver) = (emulator.clone(), driver.clone());
            std::thread::spawn(move || {
                let device = (thread % 2) as i32;
                make_current(&driver, device);
                let memory = Mapped::new(&driver, device, GRAIN, NONE);
                let (one, two) = (new_stream(&driver, NON_BLOCKING), new_stream(&driver, NON_BLOCKING));
                let at = memory.address;
                // A ping-pong of two streams over two words, fifty times round.
                for round in 1..=50 {
                    call!(driver, cuStreamWriteValue32(one, at, round, 0)).unwrap();
                    call!(driver, cuStreamWaitValue32(two, at, round, GEQ)).unwrap();
                    call!(driver, cuMemsetD32Async(at + 64, round, 1, two)).unwrap();
                    call!(driver, cuStreamWriteValue32(two, at + 4, round, 0)).unwrap();
                    call!(driver, cuStreamWaitValue32(one, at + 4, round, GEQ)).unwrap();
                    if thread == 0 {
                        let expected = (round - 1) as usize as *mut c_void;
                        call!(driver, cuLaunchHostFunc(one, Some(count), expected)).unwrap();
                    }
                }
                call!(driver, cuStreamSynchronize(one)).unwrap();
                call!(driver, cuStreamSynchronize(two)).unwrap();
                assert_eq!(emulator.read(at + 64, 4).unwrap(), 50_u32.to_ne_bytes());
                for stream in [one, two] {
                    call!(driver, cuStreamDestroy(stream)).unwrap();
                }
                memory.free(&driver);
                leave(&driver, device);
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(COUNTED.load(Ordering::SeqCst), 50);
    emulator.assert_empty();
}
