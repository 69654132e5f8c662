//! Copies of rows inside a device's memory, in stream order.

use cuda_vmm::Context;
use cuda_vmm::sys::{CUDA_MEMCPY2D_v2, CUmemorytype, CUstream, CallError};

use super::call_failed;
use crate::backend::Copy2d;
use crate::error::Result;

/// Largest distance between rows that the driver takes in one call (`CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every device).
const MAX_PITCH: usize = (1 << 31) - 1;

/// How a copy is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Nothing,
    /// Bytes without gaps on both sides.
    Whole(usize),
    /// Distances of the rows.
    Rows(usize, usize),
    OneByOne,
}

impl Way {
    fn of(copy: &Copy2d) -> Self {
        let pitch = |pitch: isize| {
            usize::try_from(pitch).ok().filter(|pitch| (copy.width..=MAX_PITCH).contains(pitch))
        };
        match (copy.width, copy.height, pitch(copy.from_pitch), pitch(copy.to_pitch)) {
            (0, ..) | (_, 0, ..) => Self::Nothing,
            (width, 1, ..) => Self::Whole(width),
            (width, height, Some(from), Some(to)) if from == width && to == width => {
                Self::Whole(width * height)
            }
            (_, _, Some(from), Some(to)) => Self::Rows(from, to),
            _ => Self::OneByOne,
        }
    }
}

/// Enqueues a copy. The context is current.
///
/// # Safety
/// Both sides are memory of the context's device, as [`Copy2d`] says, until the copy has run; they do not overlap. The stream belongs to the
/// context.
pub(super) unsafe fn enqueue(context: &Context, copy: &Copy2d, stream: CUstream) -> Result<()> {
    let driver = context.device().cuda().driver();
    let failed = |source: CallError| {
        call_failed(format!("copying {} × {} bytes on the device", copy.height, copy.width), source)
    };
    match Way::of(copy) {
        Way::Nothing => Ok(()),
        Way::Whole(bytes) => {
            // SAFETY: the caller's promise: `bytes` bytes lie without gaps on both sides.
            unsafe { driver.cuMemcpyDtoDAsync(copy.to, copy.from, bytes, stream) }.map_err(failed)
        }
        Way::Rows(from, to) => {
            let rows = CUDA_MEMCPY2D_v2 {
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcDevice: copy.from,
                srcPitch: from,
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstDevice: copy.to,
                dstPitch: to,
                WidthInBytes: copy.width,
                Height: copy.height,
                ..CUDA_MEMCPY2D_v2::default()
            };
            // SAFETY: the driver reads the struct during the call; what it describes is the caller's promise.
            unsafe { driver.cuMemcpy2DAsync(&rows, stream) }.map_err(failed)
        }
        Way::OneByOne => (0..copy.height as i64).try_for_each(|row| {
            let from = copy.from.wrapping_add_signed(row * copy.from_pitch as i64);
            let to = copy.to.wrapping_add_signed(row * copy.to_pitch as i64);
            // SAFETY: one row of the caller's copy.
            unsafe { driver.cuMemcpyDtoDAsync(to, from, copy.width, stream) }.map_err(failed)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(width: usize, height: usize, from_pitch: isize, to_pitch: isize) -> Way {
        Way::of(&Copy2d { from: 0, from_pitch, to: 0, to_pitch, width, height })
    }

    #[test]
    fn few_calls_for_many_rows() {
        assert_eq!(way(0, 9, 16, 16), Way::Nothing);
        assert_eq!(way(16, 0, 16, 16), Way::Nothing);
        assert_eq!(way(16, 9, 16, 16), Way::Whole(144));
        assert_eq!(way(16, 1, -16, 1 << 40), Way::Whole(16));
        assert_eq!(way(16, 9, 16, 48), Way::Rows(16, 48));
        assert_eq!(way(16, 9, 64, 16), Way::Rows(64, 16));
        // Backwards, onto the same row again, or too far for one call.
        for (from, to) in [(-16, 16), (0, 16), (16, 8), (16, 1 << 31)] {
            assert_eq!(way(16, 9, from, to), Way::OneByOne, "{from} {to}");
        }
    }
}
