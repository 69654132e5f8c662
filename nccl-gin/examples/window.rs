//! Two ranks share memory: each writes its number into the other's window, and reads what it was given.
//!
//! One thread a rank, each on its own GPU. With a single GPU set NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer).

use cuda_vmm_sys::{CallError, Driver};
use nccl_gin::sys::Nccl;
use nccl_gin::{Communicator, Config, Device, Error, MemAlloc, Result, UniqueId, WindowFlags};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn rank(
    nccl: &Nccl,
    id: &UniqueId,
    rank: u32,
    devices: i32,
    other: &(Sender<()>, Receiver<()>),
) -> Result<u32> {
    // Returns when the other rank has come here too, or has failed.
    let meet = || other.0.send(()).is_ok() && other.1.recv_timeout(LIMIT).is_ok();
    let failed = |cause: CallError| Error::Driver { attempt: "copying".into(), cause };

    let device = Device::open(rank as i32 % devices)?;
    let comm = Communicator::init(nccl, &device, id, 2, rank, &Config::new().timeout(LIMIT))?;
    let memory = Arc::new(MemAlloc::new(nccl, &device, 1 << 21)?);
    let window = comm.register(memory, WindowFlags::empty())?;
    let (here, there) = (window.address() as u64, window.lsa_pointer(1 - rank, 0)? as u64);

    device.make_current()?;
    let (driver, mut given) = (device.driver(), u32::MAX);
    // SAFETY: the peer's window is at least four bytes long and mapped until both ranks have met below; `rank` lives longer.
    unsafe { driver.cuMemcpyHtoDAsync(there, (&raw const rank).cast(), 4, null_mut()) }.map_err(failed)?;
    // SAFETY: the null stream is that of the current context.
    unsafe { driver.cuStreamSynchronize(null_mut()) }.map_err(failed)?;
    meet();
    // SAFETY: this rank's own memory, and a destination of four bytes that lives longer.
    unsafe { driver.cuMemcpyDtoHAsync((&raw mut given).cast(), here, 4, null_mut()) }.map_err(failed)?;
    // SAFETY: as above.
    unsafe { driver.cuStreamSynchronize(null_mut()) }.map_err(failed)?;
    meet();
    window.close()?;
    comm.close()?;
    Ok(given)
}

fn run() -> Result<()> {
    let (nccl, driver, mut devices) = (Nccl::get()?, Driver::get()?, 0);
    let _first = Device::open(0)?;
    let count = |cause| Error::Driver { attempt: "counting devices".into(), cause };
    // SAFETY: the driver is initialised, and the output is valid for one write.
    unsafe { driver.cuDeviceGetCount(&mut devices) }.map_err(count)?;
    let id = UniqueId::new(nccl)?;
    let (to_one, from_zero) = channel();
    let (to_zero, from_one) = channel();
    let one = std::thread::spawn(move || rank(nccl, &id, 1, devices, &(to_zero, from_zero)));
    let zero = rank(nccl, &id, 0, devices, &(to_one, from_one));
    println!("rank 0 was given {}", zero?);
    println!("rank 1 was given {}", one.join().expect("a rank does not panic")?);
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        println!("{error}");
    }
}
