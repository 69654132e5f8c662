//! Streams, and what is put into them: copies, and words written in order behind them.

use super::{Batch, Cuda};
use crate::error::{Error, Result};
use cuda_vmm_sys::{
    CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUresult, CUstream, CUstream_flags, CUstreamBatchMemOpParams,
    CUstreamBatchMemOpType,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Words that the driver writes in one call.
const MAX_WORDS: usize = 256;
/// `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`: a copy engine, not a kernel.
const PREFER_OVERLAP_WITH_COMPUTE: u32 = 1;

/// Copies that have no order among themselves.
#[derive(Default)]
pub(crate) struct Copies {
    to: Vec<u64>,
    from: Vec<u64>,
    lengths: Vec<usize>,
    /// Whether one of them is from the device to itself.
    inside: bool,
}

impl Copies {
    /// `inside` is for a copy from the device to itself.
    pub(crate) fn push(&mut self, to: u64, from: u64, length: u64, inside: bool) {
        self.inside |= inside;
        self.to.push(to);
        self.from.push(from);
        self.lengths.push(length as usize);
    }

    /// Makes the last copy longer, if this one begins where it ends, on both sides. Returns whether it does.
    pub(crate) fn extend(&mut self, to: u64, from: u64, length: u64) -> bool {
        let (Some(last_to), Some(last_from), Some(last)) =
            (self.to.last(), self.from.last(), self.lengths.last_mut())
        else {
            return false;
        };
        let goes_on = last_to + *last as u64 == to && last_from + *last as u64 == from;
        if goes_on {
            *last += length as usize;
        }
        goes_on
    }

    pub(crate) fn len(&self) -> usize {
        self.to.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.to.is_empty()
    }

    fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.lengths.clear();
        self.inside = false;
    }
}

/// Words to be written, in order.
#[derive(Default)]
pub(crate) struct Words(Vec<CUstreamBatchMemOpParams>);

impl Words {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes a 64-bit word.
    pub(crate) fn push64(&mut self, address: u64, value: u64) {
        let mut word = CUstreamBatchMemOpParams::default();
        word.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
        word.writeValue.address = address;
        word.writeValue.__bindgen_anon_1.value64 = value;
        self.0.push(word);
    }

    /// Writes a 32-bit word.
    pub(crate) fn push32(&mut self, address: u64, value: u32) {
        let mut word = CUstreamBatchMemOpParams::default();
        word.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
        word.writeValue.address = address;
        word.writeValue.__bindgen_anon_1.value = value;
        self.0.push(word);
    }

    /// Writes a 64-bit word, in place of an earlier value that was not submitted yet. All words of `self` must come from here.
    pub(crate) fn set64(&mut self, address: u64, value: u64) {
        for word in &mut self.0 {
            // SAFETY: every word here was made by `push64` or `set64`, which write this member whole.
            let write = unsafe { &mut word.writeValue };
            if write.address == address {
                write.__bindgen_anon_1.value64 = value;
                return;
            }
        }
        self.push64(address, value);
    }

    pub(crate) fn append(&mut self, other: &mut Self) {
        self.0.append(&mut other.0);
    }
}

/// A stream of the highest priority that has nothing to do with the legacy stream: it has hardware queues of its own, so that a kernel that
/// spins on a user's stream is not in its way.
pub(crate) struct Stream {
    cuda: Arc<Cuda>,
    raw: usize,
}

impl Stream {
    /// The context must be current.
    pub(crate) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        let mut raw: CUstream = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe {
            cuda.driver.cuStreamCreateWithPriority(
                &mut raw,
                CUstream_flags::CU_STREAM_NON_BLOCKING.0,
                cuda.greatest_priority,
            )
        }
        .map_err(Error::cuda("creating a stream"))?;
        Ok(Self { cuda: Arc::clone(cuda), raw: raw as usize })
    }

    fn raw(&self) -> CUstream {
        self.raw as CUstream
    }

    /// Submits the copies and empties the list.
    ///
    /// The ranges must be valid for the device until the stream has passed this point: the callers check them against registrations.
    pub(crate) fn copy(&self, copies: &mut Copies) -> Result<()> {
        let driver = &self.cuda.driver;
        let attempt = "copying payload";
        // A plain copy inside the device may be done by a kernel, which finds no room beside kernels that wait for it.
        let plain = copies.len() == 1 && !copies.inside;
        if plain || self.cuda.batch == Batch::Single {
            for ((&to, &from), &length) in copies.to.iter().zip(&copies.from).zip(&copies.lengths) {
                // SAFETY: both ranges lie in registrations or in memory of the plugin, as the callers checked; the stream is ours.
                unsafe { driver.cuMemcpyAsync(to, from, length, self.raw()) }
                    .map_err(Error::cuda(attempt))?;
            }
        } else if !copies.is_empty() {
            let mut attributes = CUmemcpyAttributes {
                srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                flags: PREFER_OVERLAP_WITH_COMPUTE,
                ..CUmemcpyAttributes::default()
            };
            let (mut first, mut failed) = (0, 0);
            let (to, from, lengths) =
                (copies.to.as_mut_ptr(), copies.from.as_mut_ptr(), copies.lengths.as_mut_ptr());
            let count = copies.to.len();
            // SAFETY: the three arrays have `count` elements, the attributes one, and all outlive the call. The ranges are valid as above.
            unsafe {
                if self.cuda.batch == Batch::V2 {
                    driver.cuMemcpyBatchAsync_v2(
                        to,
                        from,
                        lengths,
                        count,
                        &mut attributes,
                        &mut first,
                        1,
                        self.raw(),
                    )
                } else {
                    driver.cuMemcpyBatchAsync(
                        to,
                        from,
                        lengths,
                        count,
                        &mut attributes,
                        &mut first,
                        1,
                        &mut failed,
                        self.raw(),
                    )
                }
            }
            .map_err(Error::cuda(attempt))?;
        }
        copies.clear();
        Ok(())
    }

    /// Submits the words and empties the list. Whoever sees a word sees all that the stream did before it.
    pub(crate) fn write(&self, words: &mut Words) -> Result<()> {
        for part in words.0.chunks_mut(MAX_WORDS) {
            // SAFETY: the array outlives the call; each address is an aligned word of a registration or of the plugin, as the callers
            // checked; the default flags keep the order to earlier work.
            unsafe {
                self.cuda.driver.cuStreamBatchMemOp(self.raw(), part.len() as u32, part.as_mut_ptr(), 0)
            }
            .map_err(Error::cuda("writing signals"))?;
        }
        words.0.clear();
        Ok(())
    }

    /// Whether all work is done.
    ///
    /// # Errors
    /// What went wrong in the stream.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream is ours and alive.
        match unsafe { self.cuda.driver.cuStreamQuery(self.raw()) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(Error::cuda("working on a stream")(error)),
        }
    }

    /// Waits until all work is done, or the time is over. Returns whether it is done.
    ///
    /// # Errors
    /// What went wrong in the stream.
    pub(crate) fn drain(&self, within: Duration) -> Result<bool> {
        let deadline = Instant::now() + within;
        while !self.is_idle()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(true)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.cuda.enter("destroying a stream") else { return };
        // SAFETY: the stream is ours and used no more; the driver frees it when its work is done and does not wait for that.
        let _ = unsafe { self.cuda.driver.cuStreamDestroy(self.raw()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_follow_each_other_become_one() {
        let mut copies = Copies::default();
        assert!(!copies.extend(100, 200, 8), "nothing to go on from");
        copies.push(100, 200, 8, false);
        assert!(copies.extend(108, 208, 24));
        assert!(!copies.extend(132, 208, 8) && !copies.extend(108, 232, 8) && !copies.extend(140, 240, 8));
        assert_eq!((copies.len(), copies.lengths[0]), (1, 32));
        copies.push(140, 240, 4, false);
        assert!(copies.extend(144, 244, 4));
        assert_eq!((copies.len(), copies.lengths[1]), (2, 8));
    }
}
