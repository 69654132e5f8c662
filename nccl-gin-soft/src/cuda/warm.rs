//! First use, before anything depends on it.

use super::{Copies, Cuda, Pinned, Stream, Words};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

const SIZE: usize = 4096;

/// Memory of the device, for as long as this lives.
struct Scratch<'a> {
    cuda: &'a Cuda,
    address: u64,
}

impl<'a> Scratch<'a> {
    fn new(cuda: &'a Cuda) -> Result<Self> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        unsafe { cuda.driver.cuMemAlloc(&mut address, SIZE) }
            .map_err(Error::cuda("allocating a page of the device"))?;
        Ok(Self { cuda, address })
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and freed once. Streams that use it have come to rest, or the driver waits for them.
        let _ = unsafe { self.cuda.driver.cuMemFree(self.address) };
    }
}

/// Has each stream do each kind of work once. A driver that allocates or loads something on first use does it now, and not while a kernel
/// that fills the GPU waits for a signal. The context must be current.
pub(crate) fn warm_up<'a>(
    cuda: &Arc<Cuda>,
    streams: impl Iterator<Item = &'a Stream>,
    within: Duration,
) -> Result<()> {
    let host = Pinned::create(cuda, SIZE)?;
    let device = Scratch::new(cuda)?;
    let (mut copies, mut words) = (Copies::default(), Words::default());
    let half = SIZE as u64 / 2;
    for stream in streams {
        // Two at once, and one alone, each way: the driver may treat them differently.
        let routes = [
            (device.address, host.device(0), false),
            (device.address + half, device.address, true),
            (host.device(0), device.address, false),
        ];
        for (to, from, inside) in routes {
            copies.push(to, from, 8, inside);
            copies.push(to + 8, from + 8, 1, inside);
            stream.copy(&mut copies)?;
            copies.push(to, from, half, inside);
            stream.copy(&mut copies)?;
        }
        words.push32(host.device(SIZE - 16), 1);
        words.push64(host.device(SIZE - 8), 1);
        words.push64(device.address, 1);
        stream.write(&mut words)?;
        if !stream.drain(within)? {
            let attempt = "waiting for the first copies of a new stream".to_owned();
            return Err(Error::Deadline { attempt, waited: within });
        }
    }
    Ok(())
}
