//! Peers' addresses with NCCL 2.28, which has no function for them: computed from the window's struct in device memory, as NCCL's own
//! device code does. The part that is read has the same layout in every later release.

use crate::communicator::inner::wait_until;
use crate::deadline;
use crate::device::Device;
use crate::error::{Error, Result};
use cuda_vmm_sys::{CUdeviceptr, CUmemorytype_enum, CUpointer_attribute_enum, CUresult, CUstream_flags_enum};
use nccl_gin_sys::{ncclWindow_t, v2_28_3};
use std::mem::offset_of;
use std::ptr;
use std::time::Duration;

/// Bytes at the start of the struct that are read: all of it in 2.28.3, which has the smallest.
const PREFIX: usize = size_of::<v2_28_3::ncclWindow_vidmem>();

/// Where a window's memory lies in the LSA team's flat address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// LSA rank 0's first byte.
    base: usize,
    /// Distance between ranks, in units of 4 GiB.
    stride: u32,
}

impl Geometry {
    /// Reads a window's struct. `Err(None)` if the handle is no window: without symmetric memory 2.28 hands out something else.
    /// `ranks` is the most that the LSA team may have.
    pub(crate) fn read(
        device: &Device,
        window: ncclWindow_t,
        ranks: u32,
        timeout: Duration,
    ) -> Result<Self, Option<Error>> {
        let current = device.enter()?;
        let mut kind = 0_u32;
        // SAFETY: the output is valid for one write of the attribute's type; any address may be asked about.
        let told = unsafe {
            device.driver().cuPointerGetAttribute(
                (&raw mut kind).cast(),
                CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                window as CUdeviceptr,
            )
        };
        if told.is_err() || kind != CUmemorytype_enum::CU_MEMORYTYPE_DEVICE.0 {
            return Err(None);
        }
        let prefix = copy(device, window, timeout)?;
        drop(current);
        let geometry = Self::decode(&prefix);
        if geometry.base == 0 || geometry.stride == 0 || geometry.end(ranks).is_none() {
            return Err(None);
        }
        Ok(geometry)
    }

    /// Where the memory of so many ranks ends, if that is an address.
    fn end(&self, ranks: u32) -> Option<usize> {
        let units = (ranks as usize).checked_mul(self.stride as usize)?;
        self.base.checked_add(units.checked_mul(1 << 32)?)
    }

    fn decode(prefix: &[u8; PREFIX]) -> Self {
        let field = |offset: usize| &prefix[offset..];
        let word = |offset| field(offset).first_chunk().map_or(0, |bytes| usize::from_ne_bytes(*bytes));
        let half = |offset| field(offset).first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        Self {
            base: word(offset_of!(v2_28_3::ncclWindow_vidmem, lsaFlatBase)),
            stride: half(offset_of!(v2_28_3::ncclWindow_vidmem, stride4G)),
        }
    }

    /// Address of byte `offset` of LSA rank `peer`'s memory. No rank is beyond those that were read for, and no offset beyond their distance.
    pub(crate) fn address(&self, peer: u32, offset: usize) -> usize {
        self.base + ((peer as usize * self.stride as usize) << 32) + offset
    }
}

/// Copies the start of the struct to the host, on a stream of its own so that it waits for nobody's kernels.
fn copy(device: &Device, window: ncclWindow_t, timeout: Duration) -> Result<[u8; PREFIX]> {
    let driver = device.driver();
    let attempt = "reading a window's struct";
    let mut stream = ptr::null_mut();
    // SAFETY: the output is valid for one write, and the device is current.
    unsafe { driver.cuStreamCreate(&mut stream, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0) }
        .map_err(Error::driver(attempt))?;
    let mut prefix = Box::new([0; PREFIX]);
    // SAFETY: the source is device memory of at least as many bytes: no release has a smaller struct. The destination holds what is copied and
    // lives until the stream has ended.
    let started = unsafe {
        driver.cuMemcpyDtoHAsync(prefix.as_mut_ptr().cast(), window as CUdeviceptr, PREFIX, stream)
    };
    let ended = started.map_err(Error::driver(attempt)).and_then(|()| {
        let end = deadline::within(timeout);
        // SAFETY: the stream is alive.
        let done = wait_until(end, || match unsafe { driver.cuStreamQuery(stream) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(Error::driver(attempt)(error)),
        })?;
        if done {
            return Ok(());
        }
        Err(Error::Timeout {
            attempt: attempt.into(),
            function: nccl_gin_sys::Function::ncclCommWindowRegister,
            after: timeout,
            aborted: false,
        })
    });
    // SAFETY: nobody else has the stream; work that is still on it ends by itself.
    unsafe { driver.cuStreamDestroy(stream) }.ok();
    match ended {
        Ok(()) => Ok(*prefix),
        Err(error) => {
            // The copy may still be under way.
            std::mem::forget(prefix);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_nccls_device_code() {
        let mut prefix = [0; PREFIX];
        prefix[8..16].copy_from_slice(&0x7000_0020_0000_usize.to_ne_bytes());
        prefix[16..20].copy_from_slice(&1_u32.to_ne_bytes());
        prefix[24..28].copy_from_slice(&32_u32.to_ne_bytes());
        let geometry = Geometry::decode(&prefix);
        assert_eq!(geometry, Geometry { base: 0x7000_0020_0000, stride: 32 });
        assert_eq!(geometry.address(0, 5), 0x7000_0020_0005);
        assert_eq!(geometry.end(8), Some(0x7000_0020_0000 + 8 * (128 << 30)));
        assert_eq!(Geometry { base: 1, stride: u32::MAX }.end(2), None, "no struct of a window");
        // Two ranks of 128 GiB on.
        assert_eq!(geometry.address(2, 0), 0x7000_0020_0000 + 2 * (128 << 30));
    }
}
