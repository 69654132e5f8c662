//! What captures of streams forbid, to whom, and what is left of them at their end.

mod common;

use common::*;
use cuda_vmm_emu::Config;
use cuda_vmm_emu::sys::ffi::c_void;
use cuda_vmm_emu::sys::*;
use std::ptr::null_mut;

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const UNSUPPORTED: Result<(), CUresult> = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
const INVALIDATED: Result<(), CUresult> = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
const CAPTURED_EVENT: Result<(), CUresult> = Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
const NON_BLOCKING: u32 = 1;

/// A stream that can be handed to another thread: a number.
#[derive(Clone, Copy)]
struct Handle(usize);

impl Handle {
    fn stream(driver: &Driver) -> Self {
        Self(new_stream(driver, NON_BLOCKING) as usize)
    }

    fn raw(self) -> CUstream {
        self.0 as CUstream
    }
}

fn new_event(driver: &Driver) -> CUevent {
    let mut event = null_mut();
    call!(driver, cuEventCreate(&mut event, 2)).unwrap();
    event
}

fn begin(driver: &Driver, stream: Handle, mode: CUstreamCaptureMode) {
    call!(driver, cuStreamBeginCapture(stream.raw(), mode)).unwrap();
}

/// Ends a capture, and drops its graph.
fn end(driver: &Driver, stream: Handle) -> Result<(), CUresult> {
    let mut graph = null_mut();
    call!(driver, cuStreamEndCapture(stream.raw(), &mut graph))?;
    call!(driver, cuGraphDestroy(graph))
}

fn exchange_mode(driver: &Driver, mut mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    call!(driver, cuThreadExchangeStreamCaptureMode(&mut mode)).unwrap();
    mode
}

/// Runs on a thread of its own, with the context of device 0.
fn elsewhere<T: Send>(driver: &Driver, run: impl FnOnce() -> T + Send) -> T {
    let on_thread = || {
        make_current(driver, 0);
        let result = run();
        leave(driver, 0);
        result
    };
    std::thread::scope(|scope| scope.spawn(on_thread).join().unwrap())
}

/// A call, and what it does.
type Named<'a> = (&'a str, &'a mut dyn FnMut() -> Result<(), CUresult>);

#[test]
fn what_a_capture_does_not_see_is_refused_and_ends_it() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (stream, event) = (Handle::stream(&driver), new_event(&driver));
    let (mut device, mut host, mut own) = (0, null_mut::<c_void>(), vec![0_u8; 4096]);
    call!(driver, cuMemAlloc(&mut device, 64)).unwrap();
    call!(driver, cuMemHostAlloc(&mut host, 64, 0)).unwrap();
    call!(driver, cuEventRecord(event, stream.raw())).unwrap();
    let own = own.as_mut_ptr().cast::<c_void>();
    let (mut new_device, mut new_host, mut module) = (0, null_mut(), null_mut());
    let mut calls: [Named<'_>; 11] = [
        ("alloc", &mut || call!(driver, cuMemAlloc(&mut new_device, 64))),
        ("free", &mut || call!(driver, cuMemFree(device))),
        ("host alloc", &mut || call!(driver, cuMemHostAlloc(&mut new_host, 64, 0))),
        ("host free", &mut || call!(driver, cuMemFreeHost(host))),
        ("register", &mut || call!(driver, cuMemHostRegister(own, 4096, 0))),
        ("unregister", &mut || call!(driver, cuMemHostUnregister(own))),
        ("load", &mut || call!(driver, cuModuleLoadData(&mut module, c"".as_ptr().cast()))),
        ("unload", &mut || call!(driver, cuModuleUnload(null_mut()))),
        ("synchronize", &mut || call!(driver, cuCtxSynchronize())),
        ("query", &mut || call!(driver, cuEventQuery(event))),
        ("wait", &mut || call!(driver, cuEventSynchronize(event))),
    ];
    for mode in [GLOBAL, THREAD_LOCAL] {
        for (what, call) in &mut calls {
            begin(&driver, stream, mode);
            assert_eq!(call(), UNSUPPORTED, "{what} in {mode:?}");
            assert_eq!(end(&driver, stream), INVALIDATED, "{what} in {mode:?}");
        }
    }
    // A thread that says that it knows what it does, and a capture that leaves it to it.
    exchange_mode(&driver, RELAXED);
    begin(&driver, stream, GLOBAL);
    call!(driver, cuEventQuery(event)).unwrap();
    end(&driver, stream).unwrap();
    exchange_mode(&driver, GLOBAL);
    begin(&driver, stream, RELAXED);
    call!(driver, cuMemFree(device)).unwrap();
    call!(driver, cuMemFreeHost(host)).unwrap();
    // Its own context can't be waited for all the same.
    assert_eq!(call!(driver, cuCtxSynchronize()), UNSUPPORTED);
    assert_eq!(end(&driver, stream), INVALIDATED);
    call!(driver, cuEventDestroy(event)).unwrap();
    call!(driver, cuStreamDestroy(stream.raw())).unwrap();
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn other_threads_are_bound_as_their_mode_and_the_captures_say() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let stream = Handle::stream(&driver);
    let allocate = |mode| {
        exchange_mode(&driver, mode);
        let mut memory = 0;
        call!(driver, cuMemAlloc(&mut memory, 64))?;
        call!(driver, cuMemFree(memory))
    };
    let modes = [GLOBAL, THREAD_LOCAL, RELAXED];
    for (capture, thread) in modes.iter().flat_map(|&c| modes.map(|t| (c, t))) {
        begin(&driver, stream, capture);
        let forbidden = (capture, thread) == (GLOBAL, GLOBAL);
        let allocated = elsewhere(&driver, || allocate(thread));
        assert_eq!(allocated, if forbidden { UNSUPPORTED } else { Ok(()) }, "{capture:?} {thread:?}");
        assert_eq!(end(&driver, stream), if forbidden { INVALIDATED } else { Ok(()) });
    }
    // And the end belongs to the thread of the beginning.
    for mode in modes {
        begin(&driver, stream, mode);
        let foreign = elsewhere(&driver, || end(&driver, stream));
        if mode == RELAXED {
            foreign.unwrap();
        } else {
            assert_eq!(foreign, Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
            end(&driver, stream).unwrap();
        }
    }
    call!(driver, cuStreamDestroy(stream.raw())).unwrap();
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn an_event_of_a_capture_leads_nobody_into_it_after_its_end() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (stream, other, event) = (Handle::stream(&driver), Handle::stream(&driver), new_event(&driver));
    begin(&driver, stream, THREAD_LOCAL);
    call!(driver, cuEventRecord(event, stream.raw())).unwrap();
    end(&driver, stream).unwrap();
    assert_eq!(call!(driver, cuStreamWaitEvent(other.raw(), event, 0)), CAPTURED_EVENT);
    // What comes then runs.
    let mut memory = 0;
    call!(driver, cuMemAlloc(&mut memory, 64)).unwrap();
    call!(driver, cuMemsetD8Async(memory, 7, 64, other.raw())).unwrap();
    call!(driver, cuStreamSynchronize(other.raw())).unwrap();
    assert_eq!(emulator.read(memory, 64).unwrap(), [7; 64]);
    // Nor another capture.
    begin(&driver, other, THREAD_LOCAL);
    let merged = call!(driver, cuStreamWaitEvent(other.raw(), event, 0));
    assert_eq!(merged, Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE));
    assert_eq!(end(&driver, other), INVALIDATED);
    // Asked for on the host, it ends its capture.
    begin(&driver, stream, THREAD_LOCAL);
    call!(driver, cuEventRecord(event, stream.raw())).unwrap();
    assert_eq!(call!(driver, cuEventQuery(event)), CAPTURED_EVENT);
    assert_eq!(end(&driver, stream), INVALIDATED);
    // A record outside makes it an event as any other.
    call!(driver, cuEventRecord(event, stream.raw())).unwrap();
    call!(driver, cuStreamWaitEvent(other.raw(), event, 0)).unwrap();
    call!(driver, cuEventSynchronize(event)).unwrap();
    call!(driver, cuMemFree(memory)).unwrap();
    call!(driver, cuEventDestroy(event)).unwrap();
    for stream in [stream, other] {
        call!(driver, cuStreamDestroy(stream.raw())).unwrap();
    }
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn a_captured_copy_reads_pageable_memory_when_it_runs() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (stream, mut memory) = (Handle::stream(&driver), 0);
    call!(driver, cuMemAlloc(&mut memory, 64)).unwrap();
    let mut source = Box::new([1_u8; 64]);
    let from = source.as_mut_ptr();
    begin(&driver, stream, THREAD_LOCAL);
    call!(driver, cuMemcpyHtoDAsync(memory, from.cast(), 64, stream.raw())).unwrap();
    let (mut graph, mut exec) = (null_mut(), null_mut());
    call!(driver, cuStreamEndCapture(stream.raw(), &mut graph)).unwrap();
    call!(driver, cuGraphInstantiateWithFlags(&mut exec, graph, 0)).unwrap();
    for value in 2..5 {
        // SAFETY: the box lives, and nothing else uses it while the stream is idle.
        unsafe { from.write_bytes(value, 64) };
        call!(driver, cuGraphLaunch(exec, stream.raw())).unwrap();
        call!(driver, cuStreamSynchronize(stream.raw())).unwrap();
        assert_eq!(emulator.read(memory, 64).unwrap(), [value; 64]);
    }
    drop(source);
    call!(driver, cuGraphExecDestroy(exec)).unwrap();
    call!(driver, cuGraphDestroy(graph)).unwrap();
    call!(driver, cuMemFree(memory)).unwrap();
    call!(driver, cuStreamDestroy(stream.raw())).unwrap();
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn the_legacy_stream_takes_part_in_no_capture() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let (stream, event) = (Handle::stream(&driver), new_event(&driver));
    begin(&driver, stream, THREAD_LOCAL);
    call!(driver, cuEventRecord(event, stream.raw())).unwrap();
    let implicit = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    assert_eq!(call!(driver, cuStreamWaitEvent(null_mut(), event, 0)), implicit);
    assert_eq!(end(&driver, stream), INVALIDATED);
    call!(driver, cuStreamSynchronize(null_mut())).unwrap();
    call!(driver, cuEventDestroy(event)).unwrap();
    call!(driver, cuStreamDestroy(stream.raw())).unwrap();
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn streams_of_all_devices_leave_a_capture_at_its_end() {
    let (emulator, driver) = start(Config::new(2));
    make_current(&driver, 1);
    let there = Handle::stream(&driver);
    let joined = new_event(&driver);
    make_current(&driver, 0);
    let (here, forked) = (Handle::stream(&driver), new_event(&driver));
    begin(&driver, here, THREAD_LOCAL);
    call!(driver, cuEventRecord(forked, here.raw())).unwrap();
    call!(driver, cuStreamWaitEvent(there.raw(), forked, 0)).unwrap();
    call!(driver, cuEventRecord(joined, there.raw())).unwrap();
    call!(driver, cuStreamWaitEvent(here.raw(), joined, 0)).unwrap();
    end(&driver, here).unwrap();
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    call!(driver, cuStreamIsCapturing(there.raw(), &mut status)).unwrap();
    assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    call!(driver, cuStreamSynchronize(there.raw())).unwrap();
    for event in [forked, joined] {
        call!(driver, cuEventDestroy(event)).unwrap();
    }
    for stream in [here, there] {
        call!(driver, cuStreamDestroy(stream.raw())).unwrap();
    }
    leave(&driver, 0);
    call!(driver, cuDevicePrimaryCtxRelease(1)).unwrap();
    emulator.assert_empty();
}
