//! Words that streams write and wait for.

use super::{Op, Stream, Waiting};
use crate::core::Core;
use crate::memory::access::{Accessor, Need};
use crate::status::{Outcome, array, code, read, require};
use cuda_vmm_sys::ffi::c_uint;
use cuda_vmm_sys::{
    CUdevice_attribute, CUdeviceptr, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType,
    CUstreamWaitValue_flags, CUstreamWriteValue_flags,
};
use std::sync::Arc;

/// Operations that one batch may have.
const MAX_BATCH: c_uint = 256;

impl Core {
    /// Checks a word's address for a stream's device.
    fn check_word(&self, stream: &Stream, address: u64, wide: bool, need: Need) -> Outcome {
        use CUdevice_attribute as A;
        let size = if wide { 8 } else { 4 };
        if wide && !self.config.can(stream.device, A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) {
            return Err(code::NOT_SUPPORTED);
        }
        require(address.is_multiple_of(size))?;
        // Pageable memory of the host is out of a device's reach.
        require(read(&self.space).check(address, size, Accessor::Device(stream.device), need)?)
    }

    fn write_op(&self, stream: &Stream, address: u64, value: u64, wide: bool, flags: c_uint) -> Outcome<Op> {
        let known = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER.0;
        require(flags & !known == 0)?;
        self.check_word(stream, address, wide, Need::Write)?;
        Ok(Op::Write { to: address, value, wide, who: Accessor::Device(stream.device) })
    }

    fn wait_op(&self, stream: &Stream, address: u64, value: u64, wide: bool, flags: c_uint) -> Outcome<Op> {
        use CUdevice_attribute as A;
        use CUstreamWaitValue_flags as F;
        let flush = F::CU_STREAM_WAIT_VALUE_FLUSH.0;
        let until = match flags & !flush {
            flag if flag == F::CU_STREAM_WAIT_VALUE_GEQ.0 => Waiting::Geq,
            flag if flag == F::CU_STREAM_WAIT_VALUE_EQ.0 => Waiting::Eq,
            flag if flag == F::CU_STREAM_WAIT_VALUE_AND.0 => Waiting::And,
            flag if flag == F::CU_STREAM_WAIT_VALUE_NOR.0 => Waiting::Nor,
            _ => return Err(code::INVALID_VALUE),
        };
        let can = |attribute| self.config.can(stream.device, attribute);
        let no_flush = flags & flush != 0 && !can(A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);
        let no_nor = until == Waiting::Nor && !can(A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR);
        if no_flush || no_nor {
            return Err(code::NOT_SUPPORTED);
        }
        self.check_word(stream, address, wide, Need::Read)?;
        Ok(Op::Wait { at: address, value, wide, until, who: Accessor::Device(stream.device) })
    }

    /// Submits one operation, made for the stream that a handle stands for.
    fn submit_with(self: &Arc<Self>, stream: CUstream, op: impl FnOnce(&Stream) -> Outcome<Op>) -> Outcome {
        let stream = self.stream_for_work(stream)?;
        let op = op(&stream)?;
        stream.submit(self, op).map(drop)
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuStreamWriteValue32(
        self: &Arc<Self>,
        stream: CUstream,
        address: CUdeviceptr,
        value: u32,
        flags: c_uint,
    ) -> Outcome {
        self.submit_with(stream, |stream| self.write_op(stream, address, value.into(), false, flags))
    }

    pub(crate) unsafe fn cuStreamWriteValue64(
        self: &Arc<Self>,
        stream: CUstream,
        address: CUdeviceptr,
        value: u64,
        flags: c_uint,
    ) -> Outcome {
        self.submit_with(stream, |stream| self.write_op(stream, address, value, true, flags))
    }

    pub(crate) unsafe fn cuStreamWaitValue32(
        self: &Arc<Self>,
        stream: CUstream,
        address: CUdeviceptr,
        value: u32,
        flags: c_uint,
    ) -> Outcome {
        self.submit_with(stream, |stream| self.wait_op(stream, address, value.into(), false, flags))
    }

    pub(crate) unsafe fn cuStreamWaitValue64(
        self: &Arc<Self>,
        stream: CUstream,
        address: CUdeviceptr,
        value: u64,
        flags: c_uint,
    ) -> Outcome {
        self.submit_with(stream, |stream| self.wait_op(stream, address, value, true, flags))
    }

    pub(crate) unsafe fn cuStreamBatchMemOp(
        self: &Arc<Self>,
        stream: CUstream,
        count: c_uint,
        params: *mut CUstreamBatchMemOpParams,
        flags: c_uint,
    ) -> Outcome {
        use CUstreamBatchMemOpType as T;
        require(count <= MAX_BATCH && flags == 0)?;
        let stream = self.stream_for_work(stream)?;
        // SAFETY: the caller's contract.
        let params = unsafe { array(params.cast_const(), count as usize)? };
        let mut ops = Vec::with_capacity(params.len());
        for params in params {
            // SAFETY: every member of the union starts with the operation; the member that it names is the one that was written. Its values are
            // plain numbers. A 32-bit operation has its value in the low half of the 64-bit one on every machine that has CUDA.
            let op = unsafe {
                match params.operation {
                    kind @ (T::CU_STREAM_MEM_OP_WAIT_VALUE_32 | T::CU_STREAM_MEM_OP_WAIT_VALUE_64) => {
                        let wait = params.waitValue;
                        let wide = kind == T::CU_STREAM_MEM_OP_WAIT_VALUE_64;
                        let value = if wide {
                            wait.__bindgen_anon_1.value64
                        } else {
                            wait.__bindgen_anon_1.value.into()
                        };
                        self.wait_op(&stream, wait.address, value, wide, wait.flags)?
                    }
                    kind @ (T::CU_STREAM_MEM_OP_WRITE_VALUE_32 | T::CU_STREAM_MEM_OP_WRITE_VALUE_64) => {
                        let write = params.writeValue;
                        let wide = kind == T::CU_STREAM_MEM_OP_WRITE_VALUE_64;
                        let value = if wide {
                            write.__bindgen_anon_1.value64
                        } else {
                            write.__bindgen_anon_1.value.into()
                        };
                        self.write_op(&stream, write.address, value, wide, write.flags)?
                    }
                    // Memory is coherent here: a barrier has nothing to do.
                    T::CU_STREAM_MEM_OP_BARRIER => continue,
                    T::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES => {
                        let flush = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES;
                        if self.config.can(stream.device, flush) {
                            continue;
                        }
                        return Err(code::NOT_SUPPORTED);
                    }
                    _ => return Err(code::INVALID_VALUE),
                }
            };
            ops.push(op);
        }
        for op in ops {
            stream.submit(self, op)?;
        }
        Ok(())
    }
}
