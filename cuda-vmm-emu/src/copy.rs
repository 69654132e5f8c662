//! Copies and sets, in stream order.

use crate::core::Core;
use crate::memory::access::{Accessor, Need};
use crate::memory::raw;
use crate::memory::space::{Cover, Kind};
use crate::status::{Outcome, array, code, get, lock, put, read, require};
use crate::stream::{Op, Source, Stream, Whose};
use cuda_vmm_sys::ffi::{c_uchar, c_uint, c_void};
use cuda_vmm_sys::{
    CUDA_MEMCPY2D_v2, CUcontext, CUdeviceptr, CUmemcpyAttributes_v1, CUmemcpySrcAccessOrder, CUmemorytype,
    CUstream,
};
use std::sync::Arc;

/// One end of a copy.
#[derive(Clone, Copy)]
struct End {
    address: u64,
    /// Whose access counts.
    device: usize,
    /// Whether it must be memory of the driver's: the typed forms of a copy say so.
    known: bool,
}

impl Core {
    /// Checks one end of a copy, and says whose memory it is.
    fn check_end(&self, end: End, length: u64, need: Need) -> Outcome<Whose> {
        let who = Accessor::Device(end.device);
        if read(&self.space).check(end.address, length, who, need)? {
            return Ok(Whose::Driver(who));
        }
        // Pageable memory of the host: nobody can tell whether it may be read or written, but it must be there.
        require(!end.known && end.address != 0 && raw::is_mapped(end.address, length))?;
        Ok(Whose::Caller)
    }

    fn copy(self: &Arc<Self>, stream: &Arc<Stream>, to: End, from: End, length: usize) -> Outcome {
        stream.poison.check()?;
        if length == 0 {
            return Ok(());
        }
        let to_for = self.check_end(to, length as u64, Need::Write)?;
        let from_for = self.check_end(from, length as u64, Need::Read)?;
        // A graph reads the address whenever it runs.
        let source = if from_for == Whose::Caller && stream.capture().is_none() {
            let mut bytes = Vec::<u8>::new();
            bytes.try_reserve_exact(length).map_err(|_| code::OUT_OF_MEMORY)?;
            // SAFETY: the caller of the copy gave this range of its own memory to be read during the call; `bytes` has room for it.
            unsafe {
                std::ptr::copy_nonoverlapping(from.address as *const u8, bytes.as_mut_ptr(), length);
                bytes.set_len(length);
            }
            Source::Bytes(bytes)
        } else {
            Source::Address(from.address)
        };
        let op = Op::Copy { to: to.address, to_for, from: source, from_for, length: length as u64 };
        let ticket = stream.submit(self, op)?;
        if to_for == Whose::Caller {
            // As the driver: a copy into pageable memory is over when the call returns.
            stream.await_ticket(self, ticket);
            stream.poison.check()?;
        }
        Ok(())
    }

    /// Copies between two addresses of a stream's device or of the host. Each says whether it must be one that this driver knows.
    fn copy_here(
        self: &Arc<Self>,
        stream: CUstream,
        to: (u64, bool),
        from: (u64, bool),
        length: usize,
    ) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        let end = |(address, known)| End { address, device: stream.device, known };
        self.copy(&stream, end(to), end(from), length)
    }

    /// Copies rows, each as a copy of its own. Arrays are not supported.
    ///
    /// # Safety
    /// As for `cuMemcpy2DAsync`.
    unsafe fn copy_rows(self: &Arc<Self>, copy: &CUDA_MEMCPY2D_v2, stream: CUstream) -> Outcome {
        use CUmemorytype as M;
        let end = |kind, host: *const c_void, device, pitch: usize, x: usize, y: usize| {
            let (base, known) = match kind {
                M::CU_MEMORYTYPE_HOST => (host as u64, false),
                M::CU_MEMORYTYPE_DEVICE => (device, true),
                M::CU_MEMORYTYPE_UNIFIED => (device, false),
                M::CU_MEMORYTYPE_ARRAY => return Err(code::NOT_SUPPORTED),
                _ => return Err(code::INVALID_VALUE),
            };
            let row_end = x.checked_add(copy.WidthInBytes).ok_or(code::INVALID_VALUE)?;
            // A pitch of zero stands for rows without gaps.
            require(pitch == 0 || pitch >= row_end)?;
            let pitch = if pitch == 0 { copy.WidthInBytes } else { pitch };
            // If the end of the rows is an address, all that lies before it is.
            let last =
                y.checked_add(copy.Height).and_then(|rows| rows.checked_mul(pitch)?.checked_add(row_end));
            require(last.is_some_and(|last| base.checked_add(last as u64).is_some()))?;
            Ok(move |row: usize| (base + ((y + row) * pitch + x) as u64, known))
        };
        let c = copy;
        let from = end(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcPitch, c.srcXInBytes, c.srcY)?;
        let to = end(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstPitch, c.dstXInBytes, c.dstY)?;
        // All rows or none.
        let device = self.stream_for_work(stream)?.device;
        let check = |(address, known), need| {
            self.check_end(End { address, device, known }, c.WidthInBytes as u64, need)
        };
        for row in 0..if c.WidthInBytes == 0 { 0 } else { c.Height } {
            check(to(row), Need::Write)?;
            check(from(row), Need::Read)?;
        }
        (0..c.Height).try_for_each(|row| self.copy_here(stream, to(row), from(row), c.WidthInBytes))
    }

    /// Checks a set: aligned, in one range, and within reach of the stream's device.
    fn check_set(&self, stream: &Stream, address: u64, length: u64) -> Outcome {
        let contexts = lock(&self.contexts);
        let space = read(&self.space);
        match space.cover(address, length)? {
            // The driver refuses to set across the boundary of device and host memory; here, across any boundary.
            Cover::Ranges(ranges) if ranges.len() == 1 => {
                let (_, range) = ranges[0];
                match &range.kind {
                    Kind::Plain { device, .. } if *device != stream.device => {
                        require(contexts.devices[stream.device].peers.contains(device))?;
                    }
                    _ => {}
                }
                space.check(address, length, Accessor::Device(stream.device), Need::Write).map(drop)
            }
            _ => Err(code::INVALID_VALUE),
        }
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemcpyAsync(
        self: &Arc<Self>,
        to: CUdeviceptr,
        from: CUdeviceptr,
        length: usize,
        stream: CUstream,
    ) -> Outcome {
        self.copy_here(stream, (to, false), (from, false), length)
    }

    pub(crate) unsafe fn cuMemcpy2DAsync(
        self: &Arc<Self>,
        copy: *const CUDA_MEMCPY2D_v2,
        stream: CUstream,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { self.copy_rows(&get(copy)?, stream) }
    }

    pub(crate) unsafe fn cuMemcpyHtoDAsync(
        self: &Arc<Self>,
        to: CUdeviceptr,
        from: *const c_void,
        length: usize,
        stream: CUstream,
    ) -> Outcome {
        self.copy_here(stream, (to, true), (from as u64, false), length)
    }

    pub(crate) unsafe fn cuMemcpyDtoHAsync(
        self: &Arc<Self>,
        to: *mut c_void,
        from: CUdeviceptr,
        length: usize,
        stream: CUstream,
    ) -> Outcome {
        self.copy_here(stream, (to as u64, false), (from, true), length)
    }

    pub(crate) unsafe fn cuMemcpyDtoDAsync(
        self: &Arc<Self>,
        to: CUdeviceptr,
        from: CUdeviceptr,
        length: usize,
        stream: CUstream,
    ) -> Outcome {
        self.copy_here(stream, (to, true), (from, true), length)
    }

    pub(crate) unsafe fn cuMemcpyPeerAsync(
        self: &Arc<Self>,
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        length: usize,
        stream: CUstream,
    ) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        let to = End { address: to, device: self.device_of(to_context)?, known: true };
        let from = End { address: from, device: self.device_of(from_context)?, known: true };
        self.copy(&stream, to, from, length)
    }

    pub(crate) unsafe fn cuMemcpyBatchAsync(
        self: &Arc<Self>,
        to: *mut CUdeviceptr,
        from: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        attributes: *mut CUmemcpyAttributes_v1,
        attribute_starts: *mut usize,
        attribute_count: usize,
        failed: *mut usize,
        stream: CUstream,
    ) -> Outcome {
        let mut index = usize::MAX;
        // SAFETY: the caller's contract.
        let outcome = unsafe {
            self.batch(
                to,
                from,
                sizes,
                count,
                attributes,
                attribute_starts,
                attribute_count,
                &mut index,
                stream,
            )
        };
        if outcome.is_err() && !failed.is_null() {
            // SAFETY: not null, and the caller's contract.
            unsafe { put(failed, index)? };
        }
        outcome
    }

    pub(crate) unsafe fn cuMemcpyBatchAsync_v2(
        self: &Arc<Self>,
        to: *mut CUdeviceptr,
        from: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        attributes: *mut CUmemcpyAttributes_v1,
        attribute_starts: *mut usize,
        attribute_count: usize,
        stream: CUstream,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe {
            self.batch(to, from, sizes, count, attributes, attribute_starts, attribute_count, &mut 0, stream)
        }
    }

    /// Many copies. `failed` gets the index of the one that was refused, if it was one alone; then none of them has run.
    unsafe fn batch(
        self: &Arc<Self>,
        to: *const CUdeviceptr,
        from: *const CUdeviceptr,
        sizes: *const usize,
        count: usize,
        attributes: *const CUmemcpyAttributes_v1,
        attribute_starts: *const usize,
        attribute_count: usize,
        failed: &mut usize,
        stream: CUstream,
    ) -> Outcome {
        // The legacy default stream takes no batches.
        require(count > 0 && stream as usize > 1)?;
        let stream = self.stream_for_work(stream)?;
        // SAFETY: the caller's contract.
        let (to, from, sizes, attributes, starts) = unsafe {
            (
                array(to, count)?,
                array(from, count)?,
                array(sizes, count)?,
                array(attributes, attribute_count)?,
                array(attribute_starts, attribute_count)?,
            )
        };
        let ordered = starts.first() == Some(&0) && starts.windows(2).all(|pair| pair[0] < pair[1]);
        require(ordered && starts.last().is_some_and(|&last| last < count))?;
        let stream_order = CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM.0;
        let any_order = CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_ANY.0;
        require(attributes.iter().all(|a| (stream_order..=any_order).contains(&a.srcAccessOrder.0)))?;

        let end = |address| End { address, device: stream.device, known: false };
        let copies = || to.iter().zip(&from).zip(&sizes).enumerate();
        for (index, ((&to, &from), &size)) in copies() {
            let checked = require(size > 0)
                .and_then(|()| self.check_end(end(to), size as u64, Need::Write))
                .and_then(|_| self.check_end(end(from), size as u64, Need::Read));
            if let Err(error) = checked {
                *failed = index;
                return Err(error);
            }
        }
        for (_, ((&to, &from), &size)) in copies() {
            self.copy(&stream, end(to), end(from), size)?;
        }
        Ok(())
    }

    pub(crate) unsafe fn cuMemsetD8Async(
        self: &Arc<Self>,
        to: CUdeviceptr,
        value: c_uchar,
        count: usize,
        stream: CUstream,
    ) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        stream.poison.check()?;
        if count == 0 {
            return Ok(());
        }
        self.check_set(&stream, to, count as u64)?;
        let who = Accessor::Device(stream.device);
        stream.submit(self, Op::Set8 { to, value, count: count as u64, who }).map(drop)
    }

    pub(crate) unsafe fn cuMemsetD32Async(
        self: &Arc<Self>,
        to: CUdeviceptr,
        value: c_uint,
        count: usize,
        stream: CUstream,
    ) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        stream.poison.check()?;
        if count == 0 {
            return Ok(());
        }
        require(to.is_multiple_of(4))?;
        let length = (count as u64).checked_mul(4).ok_or(code::INVALID_VALUE)?;
        self.check_set(&stream, to, length)?;
        let who = Accessor::Device(stream.device);
        stream.submit(self, Op::Set32 { to, value, count: count as u64, who }).map(drop)
    }
}
