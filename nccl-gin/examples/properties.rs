//! What this machine supports: the NCCL that is found, its headers, and what a communicator on each GPU can do.
//!
//! Runs anywhere; without NCCL or a GPU it says what is missing.

use nccl_gin::sys::Nccl;
use nccl_gin::{Communicator, Config, Device, Error, UniqueId, multicast_disabled_by};

fn main() {
    let nccl = match Nccl::get() {
        Ok(nccl) => nccl,
        Err(error) => return println!("{error}"),
    };
    println!("NCCL {} from {}", nccl.version(), nccl.origin());
    println!("structs of generation {:?}, declared as {}", nccl.generation(), nccl.declared_version());
    match nccl.include_dir() {
        Ok(folder) => println!("headers in {}", folder.display()),
        Err(error) => println!("{error}"),
    }
    match multicast_disabled_by() {
        Some(setting) => println!("multicast is switched off by {setting}"),
        None => println!("multicast may be used where it is asked for"),
    }
    for ordinal in 0.. {
        let device = match Device::open(ordinal) {
            Ok(device) => device,
            Err(error) if ordinal == 0 => return println!("{error}"),
            // The first ordinal that there is no device for.
            Err(_) => return,
        };
        println!("CUDA device {ordinal}:");
        if let Err(error) = describe(nccl, &device) {
            println!("  {error}");
        }
    }
}

/// A communicator of one rank, and what it supports.
fn describe(nccl: &Nccl, device: &Device) -> Result<(), Error> {
    let comm = Communicator::init(nccl, device, &UniqueId::new(nccl)?, 1, 0, &Config::new())?;
    let properties = comm.properties()?;
    match &properties.support {
        None => println!("  this version does not tell what it supports"),
        Some(support) => {
            let kind =
                |kind: Option<nccl_gin::GinType>| kind.map_or("none".to_owned(), |kind| kind.to_string());
            println!("  device API: {}, multicast: {}", support.device_api, support.multimem);
            println!("  GIN: {}, along rails: {}", kind(support.gin), kind(support.railed_gin));
            println!("  one-sided operations from the host: {}", support.host_rma);
        }
    }
    comm.close()?;
    Ok(())
}
