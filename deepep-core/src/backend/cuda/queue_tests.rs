//! Order and ends of operations, on the driver in software.

use std::sync::atomic::AtomicUsize;

use cuda_vmm::sys::{CUresult, CUstreamCaptureMode, Function};
use cuda_vmm::{Cuda, Device};
use cuda_vmm_emu::{Config, Emulator, Faults};

use super::super::pinned::free_all;
use super::super::status::StatusBlock;
use super::*;
use crate::device::DeviceMemory;
use crate::layout::StatusLayout;
use crate::stream::EventRef;

const PATIENCE: Duration = Duration::from_secs(20);

/// Streams and events need no kernels: they are tested on the driver in software.
fn on_emulator(body: impl FnOnce(&Device, &Queue)) {
    on_emulator_with_faults(|device, queue, _| body(device, queue));
}

fn on_emulator_with_faults(body: impl FnOnce(&Device, &Queue, &Faults)) {
    let emulator = Emulator::new(Config::h200x2()).unwrap();
    let device = Cuda::with_driver(emulator.driver()).unwrap().device(0).unwrap();
    {
        let context = device.primary_context().unwrap();
        let status = StatusBlock::new(&context, StatusLayout::new(4)).unwrap();
        let reports = Arc::new(Reports::new(status, 0, PATIENCE));
        body(&device, &Queue::new(&context, reports).unwrap(), emulator.faults());
        free_all(&context);
    }
    drop(device);
    emulator.assert_empty();
}

/// Work that takes as long as the word is not there.
fn blocked_by(queue: &Queue, memory: &DeviceMemory, stream: CUstream) {
    let _bound = queue.context().bind().unwrap();
    // SAFETY: the word lies in memory that outlives the work.
    unsafe { queue.driver().cuStreamWaitValue32(stream, memory.address(), 1, 0) }.unwrap();
}

#[test]
fn operations_follow_each_other_on_any_streams() {
    on_emulator(|device, queue| {
        let memory = DeviceMemory::new(device, 4).unwrap();
        memory.write(0, &[0; 4]).unwrap();
        let other = Stream::new(queue.context()).unwrap();
        assert!(queue.is_idle());
        let first = queue.turn(&Order::default(), false).unwrap();
        blocked_by(queue, &memory, first.stream);
        let first = first.end().unwrap();
        // The second is on another stream, and yet after the first.
        // SAFETY: the stream outlives its use here.
        let stream = Some(unsafe { StreamRef::from_raw(other.raw().cast()) });
        let second = queue.turn(&Order { stream, after: None }, false).unwrap();
        assert_eq!((second.stream, second.captured), (other.raw(), false));
        let second = second.end().unwrap();
        assert!(!first.is_complete().unwrap() && !second.is_complete().unwrap() && !queue.is_idle());
        let error = queue.synchronize(Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, Error::StillRunning { rank: 0, .. }), "{error}");
        memory.write(0, &1_u32.to_ne_bytes()).unwrap();
        queue.synchronize(PATIENCE).unwrap();
        assert!(first.is_complete().unwrap() && queue.is_idle());
    });
}

#[test]
fn equal_handles_may_be_different_streams() {
    on_emulator_with_faults(|_, queue, faults| {
        let other = Stream::new(queue.context()).unwrap();
        // The second is each thread's own default stream.
        let named = [other.raw() as usize, 2];
        let waits = |stream: Option<usize>| {
            let before = faults.calls(Function::cuStreamWaitEvent);
            // SAFETY: the streams outlive their use here.
            let stream = stream.map(|raw| unsafe { StreamRef::from_raw(raw as *mut c_void) });
            queue.turn(&Order { stream, after: None }, false).unwrap().end().unwrap();
            faults.calls(Function::cuStreamWaitEvent) - before
        };
        let elsewhere =
            |at: usize| std::thread::scope(|scope| scope.spawn(|| waits(Some(named[at]))).join().unwrap());
        // The first has nothing before it; a stream keeps the order of what it is given.
        assert_eq!([waits(None), waits(None)], [0, 0]);
        assert_eq!([waits(Some(named[0])), waits(Some(named[0])), elsewhere(0)], [1, 0, 0]);
        assert_eq!([waits(None), waits(None)], [1, 0]);
        // One handle, and in each thread another stream.
        assert_eq!(
            [waits(Some(named[1])), waits(Some(named[1])), elsewhere(1), waits(Some(named[1]))],
            [1, 0, 1, 1]
        );
        // A driver that does not number streams.
        faults.fail_always(Function::cuStreamGetId, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!([waits(Some(named[0])), waits(Some(named[0]))], [1, 1]);
        assert_eq!([waits(None), waits(None)], [1, 0]);
    });
}

#[test]
fn operations_wait_for_the_callers_event() {
    on_emulator(|device, queue| {
        let memory = DeviceMemory::new(device, 4).unwrap();
        memory.write(0, &[0; 4]).unwrap();
        let (producer, events) = (
            Stream::new(queue.context()).unwrap(),
            EventPool::new(queue.context().clone(), queue.reports().clone()),
        );
        blocked_by(queue, &memory, producer.raw());
        let ready = {
            let _bound = queue.context().bind().unwrap();
            events.record(&producer).unwrap()
        };
        // SAFETY: the event was recorded and outlives its use.
        let after = Some(unsafe { EventRef::from_raw(ready.as_raw()) });
        let turn = queue.turn(&Order { stream: None, after }, false).unwrap();
        let end = public(turn.end().unwrap());
        assert!(!end.is_complete().unwrap());
        assert!(end.as_raw().is_some());
        memory.write(0, &1_u32.to_ne_bytes()).unwrap();
        end.wait(PATIENCE).unwrap();
        assert!(end.is_complete().unwrap());
    });
}

#[test]
fn turns_of_two_threads_do_not_overlap() {
    on_emulator(|_, queue| {
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let own = Stream::new(queue.context()).unwrap();
                    // SAFETY: the stream outlives its use here.
                    let stream = Some(unsafe { StreamRef::from_raw(own.raw().cast()) });
                    for _ in 0..200 {
                        let turn = queue.turn(&Order { stream, after: None }, false).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two have the turn");
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        turn.end().unwrap();
                    }
                    queue.synchronize(PATIENCE).unwrap();
                });
            }
        });
        assert!(queue.is_idle());
    });
}

#[test]
fn events_are_used_again() {
    on_emulator_with_faults(|_, queue, faults| {
        let turn = || queue.turn(&Order::default(), false).unwrap().end().unwrap();
        (0..100).for_each(|_| drop(turn()));
        // One is the newest operation's, one the next one's.
        assert_eq!(faults.calls(Function::cuEventCreate), 2);
        // What somebody holds means its operation.
        let held: Vec<_> = (0..20).map(|_| turn()).collect();
        (0..100).for_each(|_| assert!(!held.iter().any(|event| event.raw() == turn().raw())));
        let made = faults.calls(Function::cuEventCreate);
        drop(held);
        (0..100).for_each(|_| drop(turn()));
        assert_eq!(faults.calls(Function::cuEventCreate), made);
    });
}

#[test]
fn work_without_a_recorded_end_is_not_forgotten() {
    let refusal = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    on_emulator_with_faults(|device, queue, faults| {
        let memory = DeviceMemory::new(device, 4).unwrap();
        memory.write(0, &[0; 4]).unwrap();
        // No event: nothing was enqueued.
        faults.fail_nth(Function::cuEventCreate, 1, refusal);
        assert!(queue.turn(&Order::default(), false).is_err() && queue.is_idle());
        // Given up half-way: what was enqueued counts.
        let turn = queue.turn(&Order::default(), false).unwrap();
        blocked_by(queue, &memory, turn.stream);
        drop(turn);
        assert!(!queue.is_idle());
        memory.write(0, &1_u32.to_ne_bytes()).unwrap();
        queue.synchronize(PATIENCE).unwrap();
        assert!(queue.is_idle());
        memory.write(0, &[0; 4]).unwrap();
        // The end can't be recorded: on the own stream, all of it is waited for.
        let turn = queue.turn(&Order::default(), false).unwrap();
        blocked_by(queue, &memory, turn.stream);
        faults.fail_nth(Function::cuEventRecord, 1, refusal);
        assert!(turn.end().is_err() && !queue.is_idle());
        let error = queue.synchronize(Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, Error::StillRunning { rank: 0, .. }), "{error}");
        let error = queue.turn(&Order::default(), false).err().unwrap();
        assert!(matches!(error, Error::Broken { .. }), "{error}");
        memory.write(0, &1_u32.to_ne_bytes()).unwrap();
        queue.synchronize(PATIENCE).unwrap();
        assert!(queue.is_idle());
    });
    // On another's stream nobody can say when it ends.
    on_emulator_with_faults(|_, queue, faults| {
        let other = Stream::new(queue.context()).unwrap();
        // SAFETY: the stream outlives its use here.
        let stream = Some(unsafe { StreamRef::from_raw(other.raw().cast()) });
        let turn = queue.turn(&Order { stream, after: None }, false).unwrap();
        faults.fail_nth(Function::cuEventRecord, 1, refusal);
        drop(turn);
        let error = queue.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::StillRunning { .. }) && !queue.is_idle(), "{error}");
    });
}

#[test]
fn what_was_captured_holds_the_memory_until_closed() {
    on_emulator(|device, queue| {
        let memory = DeviceMemory::new(device, 4).unwrap();
        memory.write(0, &[0; 4]).unwrap();
        assert_eq!(queue.in_use(), None);
        let turn = queue.turn(&Order::default(), false).unwrap();
        blocked_by(queue, &memory, turn.stream);
        turn.end().unwrap();
        assert!(queue.in_use().unwrap().contains("was running"));
        memory.write(0, &1_u32.to_ne_bytes()).unwrap();
        queue.synchronize(PATIENCE).unwrap();
        assert_eq!(queue.in_use(), None);
        let capture = || {
            let mut graph = std::ptr::null_mut();
            let _bound = queue.context().bind().unwrap();
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream is the queue's own and idle.
            unsafe { queue.driver().cuStreamBeginCapture(queue.own.raw(), mode) }.unwrap();
            let turn = queue.turn(&Order::default(), false).unwrap();
            assert!(turn.captured);
            turn.end().unwrap();
            // SAFETY: the capture began on this stream and thread; the graph is destroyed once.
            unsafe {
                queue.driver().cuStreamEndCapture(queue.own.raw(), &mut graph).unwrap();
                queue.driver().cuGraphDestroy(graph).unwrap();
            }
        };
        capture();
        queue.synchronize(PATIENCE).unwrap();
        assert!(queue.in_use().unwrap().contains("graphs"));
        queue.close().unwrap();
        assert_eq!(queue.in_use(), None);
    });
}

#[test]
fn a_call_that_can_not_be_ordered_can_be_repeated() {
    on_emulator_with_faults(|_, queue, faults| {
        let events = EventPool::new(queue.context().clone(), queue.reports().clone());
        let ready = {
            let _bound = queue.context().bind().unwrap();
            events.record(&queue.own).unwrap()
        };
        // SAFETY: the event was recorded and outlives its use.
        let after = Some(unsafe { EventRef::from_raw(ready.as_raw()) });
        let order = Order { stream: None, after };
        faults.fail_nth(Function::cuStreamWaitEvent, 1, CUresult::CUDA_ERROR_INVALID_VALUE);
        let refused = queue.begin(&order, false).unwrap();
        assert!(matches!(refused.err().unwrap(), Error::Vmm(_)));
        queue.begin(&order, false).unwrap().unwrap().end().unwrap();
        // When a rank has given up, ranks meet no more, and each can still copy what it has.
        queue.reports().write_abort();
        assert!(matches!(queue.begin(&order, false).err().unwrap(), Error::PeerTimeout { .. }));
        let end = queue.turn(&order, false).unwrap().end().unwrap();
        end.wait_reached("a copy", PATIENCE).unwrap();
    });
    type S = CUstreamCaptureStatus;
    assert!(!is_captured(S::CU_STREAM_CAPTURE_STATUS_NONE).unwrap());
    assert!(is_captured(S::CU_STREAM_CAPTURE_STATUS_ACTIVE).unwrap());
    let error = is_captured(S::CU_STREAM_CAPTURE_STATUS_INVALIDATED).unwrap_err();
    assert!(matches!(error, Error::Invalid { parameter: "stream", .. }), "{error}");
}
