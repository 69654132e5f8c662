//! Kernels that were compiled into this build load and run where there is no NVRTC.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use super::super::{Engine, EngineOptions, StatusBlock, describe};
use super::input::Case;
use super::machine::Buffer;
use super::{HANDLE_SLOTS, OUTPUT_SLOTS, machine};
use crate::jit::{Cache, Embedded, Program};
use crate::layout::{HeapConfig, HeapLayout, Placement, RecordKind};

#[test]
fn embedded_kernels_load_and_run_without_nvrtc() {
    let Some(machine) = machine() else { return };
    let context = machine.context(0).clone();
    let (arch, _) = describe(&context, 0).unwrap();
    let mut ranks = (1..=8).filter(|&n| Embedded::find(Program::Barrier { ranks: n }, arch).is_some());
    let (Some(few), rest) = (ranks.next(), ranks.collect::<Vec<_>>()) else {
        writeln!(std::io::stderr(), "skipped: no kernel for {arch} was compiled into this build").ok();
        return;
    };
    let case = Case::new(few, 16, Placement::Plain);
    let config = HeapConfig {
        dispatch: vec![case.dispatch_shape()],
        combine: vec![case.combine_shape()],
        output_slots: OUTPUT_SLOTS,
        handle_slots: HANDLE_SLOTS,
        receive_sets: case.sets,
        combine_inputs: 0,
        packets: case.packets,
    };
    let layout = HeapLayout::new(&config).unwrap();
    let heaps: Vec<_> = (0..few).map(|_| Buffer::new(&context, layout.bytes).unwrap()).collect();
    heaps.iter().for_each(|heap| heap.fill(0, layout.workspace.bytes, 0).unwrap());
    let bases: Vec<_> = heaps.iter().map(Buffer::address).collect();
    let statuses: Vec<_> = (0..few).map(|_| StatusBlock::new(&context, layout.status).unwrap()).collect();
    let engine = |rank: usize| {
        let options = EngineOptions {
            timeout: Duration::from_secs(4),
            cooperative: false,
            nvrtc: Some(PathBuf::from("/nonexistent/libnvrtc.so")),
            cache: Cache::disabled(),
            ..EngineOptions::default()
        };
        let status = statuses[rank].device_address();
        // SAFETY: every heap has this layout, lies on this device, was zeroed, and outlives the engines, which are waited for below.
        unsafe { Engine::new(context.clone(), layout, rank, &bases, status, options) }.unwrap()
    };
    let engines: Vec<_> = (0..few).map(engine).collect();
    let mut loaded = 0;
    for n in std::iter::once(few).chain(rest) {
        let programs = Program::all(n);
        engines[0].prewarm(&programs).unwrap_or_else(|error| panic!("{error}"));
        loaded += programs.len();
    }
    let bound = context.bind().unwrap();
    let driver = context.device().cuda().driver();
    let mut streams = Vec::new();
    for engine in &engines {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is valid for one write; a context is current. Destroyed below.
        unsafe { driver.cuStreamCreate(&mut stream, 1) }.unwrap();
        // SAFETY: the stream belongs to the engine's context, which is current.
        unsafe { engine.barrier(stream) }.unwrap();
        streams.push(stream);
    }
    for stream in streams {
        // SAFETY: created above, and destroyed once. The barrier ends within its timeout.
        unsafe { driver.cuStreamSynchronize(stream).and_then(|()| driver.cuStreamDestroy(stream)) }.unwrap();
    }
    drop(bound);
    assert!(statuses.iter().all(|status| status.report(RecordKind::Abort).is_none()));
    eprintln!("{loaded} embedded kernels loaded on {arch}, a barrier of {few} ranks ran");
}
