//! Copies and sets: every form, what they may cross, and what they take from pageable memory.

mod common;

use common::*;
use cuda_vmm_emu::Config;
use cuda_vmm_emu::sys::{
    CUDA_MEMCPY2D_v2, CUmemcpyAttributes_v1, CUmemcpySrcAccessOrder, CUmemorytype, CUresult, CUstream,
};
use std::ptr;

const DEFAULT: CUstream = ptr::null_mut();

#[test]
fn copies_of_every_form_move_bytes() {
    let (emulator, driver) = start(Config::new(2));
    let one = make_current(&driver, 1);
    let zero = make_current(&driver, 0);
    let virtual_memory = Mapped::new(&driver, 0, GRAIN, NONE);
    let on_one = Mapped::new(&driver, 1, GRAIN, NONE);
    let mut plain = 0;
    call!(driver, cuMemAlloc(&mut plain, 1000)).unwrap();
    let source: Vec<u8> = (0..=255).collect();
    let mut back = vec![0_u8; 256];
    let length = source.len();
    let at = virtual_memory.address;

    call!(driver, cuMemcpyHtoDAsync(at, source.as_ptr().cast(), length, DEFAULT)).unwrap();
    call!(driver, cuMemcpyDtoDAsync(plain + 100, at, length, DEFAULT)).unwrap();
    call!(driver, cuMemcpyDtoHAsync(back.as_mut_ptr().cast(), plain + 100, length, DEFAULT)).unwrap();
    assert_eq!(back, source);
    call!(driver, cuMemcpyAsync(at + 512, back.as_ptr() as u64, length, DEFAULT)).unwrap();
    assert_eq!(emulator.read(at + 512, length).unwrap(), source);
    // Between contexts, each with access to its own memory only.
    call!(driver, cuMemcpyPeerAsync(on_one.address, one, plain + 100, zero, length, DEFAULT)).unwrap();
    assert_eq!(emulator.read(on_one.address, length).unwrap(), source);
    let wrong = call!(driver, cuMemcpyPeerAsync(on_one.address, zero, plain, zero, 8, DEFAULT));
    assert_eq!(wrong, INVALID_VALUE);
    // Overlapping, and of nothing at all.
    call!(driver, cuMemcpyDtoDAsync(at + 1, at, length, DEFAULT)).unwrap();
    assert_eq!(emulator.read(at + 1, length).unwrap(), source);
    call!(driver, cuMemcpyDtoDAsync(0, 0, 0, DEFAULT)).unwrap();

    // A copy may cross from mapping to mapping, if all of it is accessible.
    let refuse = |to, from, length| call!(driver, cuMemcpyAsync(to, from, length, DEFAULT));
    assert_eq!(refuse(at, on_one.address, 8), INVALID_VALUE);
    assert_eq!(refuse(at + GRAIN as u64 - 4, plain, 8), INVALID_VALUE);
    assert_eq!(refuse(plain + 999, at, 2), INVALID_VALUE);
    assert_eq!(refuse(at, 8, 8), INVALID_VALUE);
    assert_eq!(refuse(at, u64::MAX - 3, 8), INVALID_VALUE);
    let host = back.as_mut_ptr() as u64;
    assert_eq!(call!(driver, cuMemcpyDtoDAsync(at, host, 8, DEFAULT)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemcpyHtoDAsync(host, host as *const _, 8, DEFAULT)), INVALID_VALUE);
    call!(driver, cuMemFree(plain)).unwrap();
    // (To the untyped form it may be anybody's memory by now.)
    assert_eq!(call!(driver, cuMemcpyDtoDAsync(at, plain, 8, DEFAULT)), INVALID_VALUE);
    virtual_memory.free(&driver);
    on_one.free(&driver);
    leave(&driver, 0);
    call!(driver, cuDevicePrimaryCtxRelease(1)).unwrap();
    emulator.assert_empty();
}

#[test]
fn rows_are_copied_with_their_pitches_all_or_none() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let mut memory = 0;
    call!(driver, cuMemAlloc(&mut memory, 64)).unwrap();
    call!(driver, cuMemsetD8Async(memory, 0, 64, DEFAULT)).unwrap();
    let source: Vec<u8> = (1..=12).collect();
    let mut copy = CUDA_MEMCPY2D_v2 {
        srcXInBytes: 1,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: source.as_ptr().cast(),
        srcPitch: 4,
        dstY: 1,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstDevice: memory,
        dstPitch: 16,
        WidthInBytes: 2,
        Height: 3,
        ..Default::default()
    };
    call!(driver, cuMemcpy2DAsync(&copy, DEFAULT)).unwrap();
    let got = emulator.read(memory, 64).unwrap();
    let mut expected = [0; 64];
    for (row, bytes) in [[2, 3], [6, 7], [10, 11]].iter().enumerate() {
        expected[16 * (row + 1)..][..2].copy_from_slice(bytes);
    }
    assert_eq!(got, expected);
    // The last row does not fit.
    (copy.dstY, copy.srcXInBytes) = (2, 0);
    assert_eq!(call!(driver, cuMemcpy2DAsync(&copy, DEFAULT)), INVALID_VALUE);
    (copy.dstY, copy.srcPitch) = (1, 1);
    assert_eq!(call!(driver, cuMemcpy2DAsync(&copy, DEFAULT)), INVALID_VALUE);
    assert_eq!(emulator.read(memory, 64).unwrap(), expected);
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
    assert_eq!(call!(driver, cuMemcpy2DAsync(&copy, DEFAULT)), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
}

#[test]
fn rows_end_within_their_pitch_and_within_all_addresses() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);
    // Where a row starts counts; and numbers that no address can hold are refused, not computed with.
    let whole = CUDA_MEMCPY2D_v2 {
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcDevice: memory.address,
        srcPitch: 64,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstDevice: memory.address + 4096,
        dstPitch: 64,
        WidthInBytes: 16,
        Height: 2,
        ..Default::default()
    };
    let rows = |copy: CUDA_MEMCPY2D_v2| call!(driver, cuMemcpy2DAsync(&copy, DEFAULT));
    rows(CUDA_MEMCPY2D_v2 { srcXInBytes: 48, ..whole }).unwrap();
    assert_eq!(rows(CUDA_MEMCPY2D_v2 { srcXInBytes: 49, ..whole }), INVALID_VALUE);
    assert_eq!(rows(CUDA_MEMCPY2D_v2 { dstXInBytes: 49, ..whole }), INVALID_VALUE);
    // Without a pitch there is nothing to end in.
    rows(CUDA_MEMCPY2D_v2 { srcXInBytes: 49, srcPitch: 0, Height: 1, ..whole }).unwrap();
    for copy in [
        CUDA_MEMCPY2D_v2 { srcXInBytes: usize::MAX, ..whole },
        CUDA_MEMCPY2D_v2 { srcY: usize::MAX, ..whole },
        CUDA_MEMCPY2D_v2 { dstY: usize::MAX / 64, ..whole },
        CUDA_MEMCPY2D_v2 { dstPitch: usize::MAX, ..whole },
        CUDA_MEMCPY2D_v2 { srcXInBytes: usize::MAX - 16, srcPitch: 0, ..whole },
    ] {
        assert_eq!(rows(copy), INVALID_VALUE);
    }
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn a_queued_copy_took_pageable_memory_when_it_was_submitted() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);
    let stream = new_stream(&driver, 1);
    call!(driver, cuStreamWaitValue32(stream, memory.address, 1, 0)).unwrap();
    let mut source = vec![5_u8; 100];
    call!(driver, cuMemcpyHtoDAsync(memory.address + 64, source.as_ptr().cast(), 100, stream)).unwrap();
    source.fill(6);
    drop(source);
    emulator.write(memory.address, &[1]).unwrap();
    let mut back = [0_u8; 100];
    call!(driver, cuMemcpyDtoHAsync(back.as_mut_ptr().cast(), memory.address + 64, 100, stream)).unwrap();
    assert_eq!(back, [5; 100], "and a copy into pageable memory is over when the call returns");
    call!(driver, cuStreamDestroy(stream)).unwrap();
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn batches_of_copies_run_all_or_none() {
    let (emulator, driver) = start(Config::new(1));
    make_current(&driver, 0);
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);
    let stream = new_stream(&driver, 1);
    let at = memory.address;
    emulator.write(at, b"abcdefgh").unwrap();
    let mut attributes = [CUmemcpyAttributes_v1 {
        srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        ..Default::default()
    }];
    let (mut to, mut from, mut sizes) = ([at + 100, at + 200], [at, at + 4], [4, 4]);
    let mut starts = [0_usize];
    let mut failed = 77;
    let mut batch = |to: &mut [u64; 2], starts: &mut [usize; 1], stream, failed: &mut usize| {
        call!(
            driver,
            cuMemcpyBatchAsync(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                2,
                attributes.as_mut_ptr(),
                starts.as_mut_ptr(),
                1,
                failed,
                stream
            )
        )
    };
    batch(&mut to, &mut starts, stream, &mut failed).unwrap();
    assert_eq!(failed, 77);
    assert_eq!(emulator.read(at + 100, 4).unwrap(), b"abcd");
    assert_eq!(emulator.read(at + 200, 4).unwrap(), b"efgh");
    assert_eq!(batch(&mut to, &mut [1], stream, &mut failed), INVALID_VALUE);
    assert_eq!(failed, usize::MAX);
    assert_eq!(batch(&mut to, &mut starts, DEFAULT, &mut failed), INVALID_VALUE);
    to = [at + 300, at + GRAIN as u64];
    assert_eq!(batch(&mut to, &mut starts, stream, &mut failed), INVALID_VALUE);
    assert_eq!(failed, 1);
    assert_eq!(emulator.read(at + 300, 4).unwrap(), [0; 4]);
    to = [at + 300, at + 400];
    let second_form = call!(
        driver,
        cuMemcpyBatchAsync_v2(
            to.as_mut_ptr(),
            from.as_mut_ptr(),
            sizes.as_mut_ptr(),
            2,
            attributes.as_mut_ptr(),
            starts.as_mut_ptr(),
            1,
            stream
        )
    );
    assert_eq!(second_form, Ok(()));
    assert_eq!(emulator.read(at + 400, 4).unwrap(), b"efgh");
    call!(driver, cuStreamDestroy(stream)).unwrap();
    memory.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn sets_stay_in_one_mapping() {
    let (emulator, driver) = start(Config::new(2));
    make_current(&driver, 0);
    let device = create(&driver, on_device(0), GRAIN, NONE).unwrap();
    let host = create(&driver, on_node(0), GRAIN, NONE).unwrap();
    let base = reserve(&driver, 2 * GRAIN);
    let boundary = base + GRAIN as u64;
    call!(driver, cuMemMap(base, GRAIN, 0, device, 0)).unwrap();
    call!(driver, cuMemMap(boundary, GRAIN, 0, host, 0)).unwrap();
    set_access(&driver, base, 2 * GRAIN, on_device(0), READ_WRITE).unwrap();

    let set32 = |at, count| call!(driver, cuMemsetD32Async(at, 0x0403_0201, count, DEFAULT));
    assert_eq!(set32(boundary - 4, 2), INVALID_VALUE);
    assert_eq!(set32(base + 1, 1), INVALID_VALUE);
    assert_eq!(set32(base, usize::MAX / 2), INVALID_VALUE);
    set32(boundary - 4, 1).unwrap();
    set32(boundary, 1).unwrap();
    call!(driver, cuMemsetD8Async(base, 9, 3, DEFAULT)).unwrap();
    call!(driver, cuMemsetD8Async(base, 9, 0, DEFAULT)).unwrap();
    assert_eq!(emulator.read(boundary - 4, 8).unwrap(), [1, 2, 3, 4, 1, 2, 3, 4]);
    assert_eq!(emulator.read(base, 4).unwrap(), [9, 9, 9, 0]);
    // A copy may cross.
    call!(driver, cuMemcpyDtoDAsync(base + 64, boundary - 4, 8, DEFAULT)).unwrap();
    assert_eq!(emulator.read(base + 64, 8).unwrap(), [1, 2, 3, 4, 1, 2, 3, 4]);

    // Pageable memory, memory that may only be read, and another device's without peer access.
    let mut mine = [0_u8; 8];
    let pageable = mine.as_mut_ptr() as u64;
    assert_eq!(call!(driver, cuMemsetD8Async(pageable, 1, 8, DEFAULT)), INVALID_VALUE);
    set_access(&driver, base, GRAIN, on_device(0), READ).unwrap();
    assert_eq!(call!(driver, cuMemsetD8Async(base, 1, 8, DEFAULT)), INVALID_VALUE);
    let mut plain = 0;
    call!(driver, cuMemAlloc(&mut plain, 8)).unwrap();
    let zero = {
        let mut zero = ptr::null_mut();
        call!(driver, cuCtxGetCurrent(&mut zero)).unwrap();
        zero
    };
    make_current(&driver, 1);
    assert_eq!(call!(driver, cuMemsetD8Async(plain, 1, 8, DEFAULT)), INVALID_VALUE);
    call!(driver, cuCtxEnablePeerAccess(zero, 0)).unwrap();
    call!(driver, cuMemsetD8Async(plain, 1, 8, DEFAULT)).unwrap();
    leave(&driver, 1);

    call!(driver, cuMemUnmap(base, 2 * GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(base, 2 * GRAIN)).unwrap();
    for handle in [device, host] {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    call!(driver, cuDevicePrimaryCtxRelease(0)).unwrap();
    emulator.assert_empty();
}
