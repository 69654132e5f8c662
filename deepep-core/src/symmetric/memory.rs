//! Creating, exchanging and mapping the segments of a symmetric range.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use cuda_vmm::{Cuda, Grant, Granularity, PhysicalMemory, Properties, SegmentedRange, share};

use super::Heap;
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree;
use crate::bootstrap::sockets::connect_neighbours;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::layout::HEAP_ALIGNMENT;
use crate::tensor::Space;

/// Which segments make up a rank's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Segments {
    /// Device memory alone.
    Device,
    /// Device memory, then the rank's own host memory on the NUMA node next to its device.
    Elastic,
    /// Device memory, then the host memory of every rank of the host, in rank order: the same physical memory in every rank's range.
    HybridElastic,
}

impl Segments {
    /// The kind that the sizes ask for: host memory or none, and everybody's or one's own.
    pub fn choose(host_bytes: usize, hybrid: bool) -> Self {
        match (host_bytes, hybrid) {
            (0, _) => Self::Device,
            (_, false) => Self::Elastic,
            (_, true) => Self::HybridElastic,
        }
    }

    /// Host segments in the range of one of `ranks` ranks.
    pub(super) fn host_segments(self, ranks: usize) -> usize {
        match self {
            Self::Device => 0,
            Self::Elastic => 1,
            Self::HybridElastic => ranks,
        }
    }
}

/// What to allocate. The same on all ranks, but for the device.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes of device memory, rounded up to 2 MiB.
    pub device_bytes: usize,
    /// Bytes of host memory of each rank, a multiple of 2 MiB; 0 for none.
    pub host_bytes: usize,
    /// Whether every range holds the host memory of all ranks of the host.
    pub hybrid: bool,
    /// Ordinal of this rank's device.
    pub device: i32,
    /// Which processor uses the addresses.
    pub space: Space,
}

/// Everything that is mapped; unmapped and released when dropped.
struct Mapped {
    /// By position among the host's ranks.
    ranges: Vec<SegmentedRange>,
    /// This rank's device memory.
    own: PhysicalMemory,
}

/// The device memory of this rank's own range, if the heap was allocated here.
pub(super) fn device_memory(heap: &Heap) -> Option<&PhysicalMemory> {
    heap.owner::<Mapped>().map(|mapped| &mapped.own)
}

/// This rank's physical memory.
struct Own {
    device: PhysicalMemory,
    host: Option<PhysicalMemory>,
}

impl Own {
    fn create(cuda: &Cuda, request: &Request) -> Result<Self> {
        let size = request.device_bytes.next_multiple_of(HEAP_ALIGNMENT);
        let device = Properties::device(request.device).shareable();
        let node = cuda.device(request.device)?.host_numa_node()?.unwrap_or(0);
        let host = match request.host_bytes {
            0 => None,
            bytes if bytes.is_multiple_of(HEAP_ALIGNMENT) => {
                Some(PhysicalMemory::create(cuda, bytes, &Properties::host_numa(node).shareable())?)
            }
            bytes => {
                let need = format!("must be a multiple of {HEAP_ALIGNMENT}");
                return Err(Error::invalid("host_bytes", bytes, need));
            }
        };
        Ok(Self { device: PhysicalMemory::create(cuda, size, &device)?, host })
    }
}

/// Allocates a range on every rank of this host and maps all of them here. Collective; if any step fails on any rank, every rank gets an
/// error and nothing is left behind.
///
/// # Errors
/// [`Vmm`](Error::Vmm) for what the driver refuses, [`PeerFailed`](Error::PeerFailed) if it does so on another rank; else those of the bootstrap.
pub fn allocate<B: Bootstrap + ?Sized>(
    bootstrap: &B,
    domain: &Domain,
    cuda: &Cuda,
    request: &Request,
) -> Result<Heap> {
    let neighbours = domain.neighbours();
    let own = agree(bootstrap, "allocating symmetric memory", Own::create(cuda, request))?;
    let streams = connect_neighbours(bootstrap, neighbours)?;
    // Nobody waits for memory that its owner failed to send.
    let sent = give(&own, &streams, bootstrap.timeout());
    agree(bootstrap, "exporting symmetric memory", sent)?;
    let peers =
        agree(bootstrap, "importing symmetric memory", take(cuda, &own, &streams, bootstrap.timeout()))?;
    drop(streams);
    let mapped = agree(bootstrap, "mapping symmetric memory", map(cuda, request, &own, &peers))?;
    let bases: Vec<u64> = mapped.ranges.iter().map(|range| range.address().get()).collect();
    let segments = Segments::choose(request.host_bytes, request.hybrid);
    let segments = (segments, own.device.size(), request.host_bytes);
    // SAFETY: every range is mapped read-write for this rank's device (and on the emulator for the CPU) until `mapped` is dropped; ranges start at
    // multiples of 2 MiB and are imports of different physical memory. New physical memory is zero.
    Ok(unsafe { Heap::from_parts(domain.local_rank(), bases, segments, request.space, Box::new(mapped)) })
}

/// Sends this rank's memory to the neighbours: device first, then host. A few hundred bytes each, which fit into the sockets' buffers.
fn give(own: &Own, streams: &[Option<UnixStream>], timeout: Duration) -> Result<()> {
    for stream in streams.iter().flatten() {
        share::send(stream, &own.device, timeout)?;
        if let Some(host) = &own.host {
            share::send(stream, host, timeout)?;
        }
    }
    Ok(())
}

/// Takes the neighbours' memory, in their order; this rank's own at its place.
fn take(cuda: &Cuda, own: &Own, streams: &[Option<UnixStream>], timeout: Duration) -> Result<Vec<Own>> {
    let one = |stream: &UnixStream, expected: usize| -> Result<PhysicalMemory> {
        let memory = share::receive(cuda, stream, timeout)?;
        if memory.size() != expected {
            let problem = format!("shared {} bytes, {expected} were agreed", memory.size());
            return Err(Error::protocol("a rank of the host", problem));
        }
        Ok(memory)
    };
    let all = streams.iter().map(|stream| match stream {
        None => Ok(Own { device: own.device.clone(), host: own.host.clone() }),
        Some(stream) => Ok(Own {
            device: one(stream, own.device.size())?,
            host: own.host.as_ref().map(|host| one(stream, host.size())).transpose()?,
        }),
    });
    all.collect()
}

fn map(cuda: &Cuda, request: &Request, own: &Own, ranks: &[Own]) -> Result<Mapped> {
    let alignment = Granularity::new(HEAP_ALIGNMENT)?;
    let hosts = ranks.iter().filter_map(|rank| rank.host.as_ref());
    let range = |rank: &Own| {
        let mut range = SegmentedRange::builder(cuda)
            .alignment(alignment)
            .grant(Grant::device(request.device))
            .existing(rank.device.clone());
        match Segments::choose(request.host_bytes, request.hybrid) {
            Segments::Device => {}
            Segments::Elastic => {
                range = rank.host.iter().cloned().fold(range, |range, host| range.existing(host))
            }
            Segments::HybridElastic => {
                range = hosts.clone().cloned().fold(range, |range, host| range.existing(host))
            }
        }
        range.build()
    };
    let ranges = ranks.iter().map(range).collect::<cuda_vmm::Result<_>>()?;
    Ok(Mapped { ranges, own: own.device.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_choose_the_segments() {
        assert_eq!(Segments::choose(0, false), Segments::Device);
        assert_eq!(Segments::choose(0, true), Segments::Device);
        assert_eq!(Segments::choose(1 << 21, false), Segments::Elastic);
        assert_eq!(Segments::choose(1 << 21, true), Segments::HybridElastic);
    }
}
