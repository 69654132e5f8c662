//! Captures and graphs.

use crate::common;
use crate::machine::Machine;
use cuda_vmm_emu::Incident;
use cuda_vmm_emu::sys::*;
use std::ptr::null_mut;

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
