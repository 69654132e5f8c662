//! Ranks: processes with a node name, a GPU, a communicator, two windows and a device communicator each.

use crate::board::Board;
use crate::gpu::Gpu;
use cuda_vmm::Cuda;
use cuda_vmm_emu::sys::ffi::c_int;
use integration_tests::gpu::{cuda, skipped};
use integration_tests::process::{Peer, role, scratch};
use nccl_gin::sys::Nccl;
use nccl_gin::{
    Communicator, Config, DevComm, DevCommRequirements, Device, GinConnection, GinType, MemAlloc, UniqueId,
    Window, WindowFlags, WindowMemory,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub const MIB: usize = 1 << 20;
/// In the window: sources, targets, and small things.
pub const SRC: usize = 0;
pub const DST: usize = 64 * MIB;
pub const MISC: usize = 128 * MIB;
pub const TOTAL: usize = 130 * MIB;
const PATIENCE: Duration = Duration::from_secs(200);

/// Who is where.
#[derive(Clone, Copy)]
pub struct Shape {
    pub ranks: usize,
    /// Ranks of one node name.
    pub node: usize,
    /// GPUs that the ranks are spread over, if there are as many. On fewer they share them.
    pub most_gpus: usize,
    pub rail: bool,
    /// The oldest NCCL that can do it.
    pub since: u32,
}

impl Shape {
    pub const fn new(ranks: usize, most_gpus: usize) -> Self {
        Self { ranks, node: 1, most_gpus, rail: false, since: 22907 }
    }

    /// GPUs that the ranks are spread over.
    pub fn gpus(self) -> usize {
        let there = Cuda::get().map_or(0, |cuda| cuda.device_count().max(0) as usize);
        self.most_gpus.min(there.max(1))
    }

    /// Whether a GPU has several ranks: by time slices of milliseconds, unless MPS lets them run beside each other.
    pub fn shares(self) -> bool {
        self.ranks > self.gpus()
    }

    /// GPU of a rank.
    pub fn gpu(self, rank: usize) -> usize {
        gpu_of(rank, self.node, self.gpus())
    }
}

/// Neighbours in a node and neighbours on a rail are on different GPUs, where there are two.
fn gpu_of(rank: usize, node: usize, gpus: usize) -> usize {
    (rank % node + rank / node) % gpus
}

#[test]
fn neighbours_are_on_different_gpus() {
    assert_eq!([0, 1].map(|rank| gpu_of(rank, 1, 2)), [0, 1]);
    assert_eq!([0, 1, 2, 3].map(|rank| gpu_of(rank, 2, 2)), [0, 1, 1, 0]);
    assert_eq!([0, 3, 4, 7].map(|rank| gpu_of(rank, 4, 2)), [0, 1, 1, 0]);
    assert_eq!([0, 1, 5].map(|rank| gpu_of(rank, 2, 1)), [0, 0, 0]);
}

const BOARD: &str = "GIN_TEST_BOARD";
/// Environment variable that names the plugin.
const LIBRARY: &str = "GIN_SOFT_LIBRARY";

fn plugin() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(LIBRARY) {
        return Some(named.into());
    }
    let executable = std::env::current_exe().ok()?;
    let folder = executable.parent()?;
    [folder, folder.parent()?]
        .map(|folder| folder.join(nccl_gin_soft::LIBRARY))
        .into_iter()
        .find(|path| path.is_file())
}

/// Runs `body` on each rank, in a process of its own; or says why not.
pub fn ranks(test: &str, shape: Shape, environment: &[(&str, &str)], body: impl FnOnce(usize, Board)) {
    if let Some((rank, board)) = rank_of(test) {
        return body(rank, board);
    }
    let Some(running) = start(test, shape, environment) else { return };
    for peer in running.1 {
        peer.finish();
    }
}

/// The rank that this process is, if it is one. It dies with the process that started it: nothing is left on the GPU when a test is killed.
pub fn rank_of(test: &str) -> Option<(usize, Board)> {
    let role = role(test)?;
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let path = PathBuf::from(std::env::var_os(BOARD).expect("the board's path"));
    Some((role.parse().unwrap(), Board::open(&path)))
}

/// Starts the processes, if all that they need is here. The folder must outlive them.
pub fn start(
    test: &str,
    shape: Shape,
    environment: &[(&str, &str)],
) -> Option<(tempfile::TempDir, Vec<Peer>)> {
    cuda(test, 1)?;
    let nccl = match Nccl::get() {
        Ok(nccl) if nccl.version().code() < shape.since => {
            skipped(test, &format!("NCCL {} is too old for it", nccl.version()));
            return None;
        }
        Ok(nccl) => nccl,
        Err(error) => {
            skipped(test, &error.to_string());
            return None;
        }
    };
    if let Err(error) = nccl.include_dir() {
        skipped(test, &error.to_string());
        return None;
    }
    let Some(library) = plugin() else {
        skipped(test, &format!("no {} beside this executable; name it in {LIBRARY}", nccl_gin_soft::LIBRARY));
        return None;
    };
    eprintln!(
        "{test}: NCCL {}, {} ranks on {} GPU(s), {}",
        nccl.version(),
        shape.ranks,
        shape.gpus(),
        library.display()
    );
    let (folder, path) = scratch("board");
    Board::create(&path);
    let path = path.to_str().expect("a path in UTF-8").to_owned();
    let peers = (0..shape.ranks).map(|rank| {
        let node = format!("node-{}", rank / shape.node);
        let variables = nccl_gin_soft::env(&library, &node);
        let mut all: Vec<(&str, &str)> =
            variables.iter().map(|(name, value)| (*name, value.to_str().expect("UTF-8"))).collect();
        // Multicast is switched off in every test: what it leaves behind when it fails is the whole machine's.
        all.extend([(BOARD, path.as_str()), ("NCCL_NVLS_ENABLE", "0"), ("CUDA_MODULE_LOADING", "EAGER")]);
        if shape.shares() {
            all.push(("NCCL_MULTI_RANK_GPU_ENABLE", "1"));
        }
        if shape.rail {
            all.push(("NCCL_CROSS_NIC", "0"));
        }
        all.extend_from_slice(environment);
        Peer::spawn(test, &rank.to_string(), &all).patience(PATIENCE)
    });
    Some((folder, peers.collect()))
}

/// A connected rank.
pub struct World {
    pub rank: usize,
    pub shape: Shape,
    pub board: Board,
    pub nccl: &'static Nccl,
    pub gpu: Gpu,
    pub comm: Communicator,
    pub window: Window,
    pub strict: Window,
    /// Where the memory of that window is here: 2 MiB.
    pub strict_address: u64,
    pub dev: DevComm,
}

impl World {
    pub fn new(rank: usize, shape: Shape, board: Board) -> Self {
        let (nccl, device, comm) = communicator(rank, shape, &board);
        let gpu = Gpu::new(nccl, &device);
        let memory = Arc::new(MemAlloc::new(nccl, &device, TOTAL).unwrap());
        let window = comm.register(memory, WindowFlags::empty()).unwrap();
        let dev = comm.create_dev_comm(&requirements(nccl, shape)).unwrap();
        // Registered after the device communicator: the other order.
        let memory = Arc::new(MemAlloc::new(nccl, &device, 2 * MIB).unwrap());
        let strict_address = memory.address().as_ptr() as u64;
        gpu.zero(strict_address, 2 * MIB);
        let strict = comm.register(memory, WindowFlags::STRICT_ORDERING).unwrap();
        let world = Self { rank, shape, board, nccl, gpu, comm, window, strict, strict_address, dev };
        world.meet();
        world
    }

    /// The neighbours in the ring of all ranks.
    pub fn neighbours(&self) -> (c_int, c_int) {
        let (rank, ranks) = (self.rank, self.shape.ranks);
        (((rank + 1) % ranks) as c_int, ((rank + ranks - 1) % ranks) as c_int)
    }

    pub fn meet(&self) {
        self.board.barrier(self.shape.ranks);
    }

    /// The device communicator, as a kernel's first argument.
    pub fn dev(&self) -> *mut std::ffi::c_void {
        self.dev.as_ptr().cast_mut()
    }

    /// Closes everything, together with the others.
    pub fn close(self) {
        let Self { shape, board, comm, window, strict, dev, .. } = self;
        let meet = || board.barrier(shape.ranks);
        meet();
        dev.close().unwrap();
        meet();
        strict.close().unwrap();
        window.close().unwrap();
        meet();
        comm.close().unwrap();
    }
}

/// A communicator with what GIN there must be.
pub fn communicator(rank: usize, shape: Shape, board: &Board) -> (&'static Nccl, Device, Communicator) {
    let nccl = Nccl::get().unwrap();
    let device = Device::open(shape.gpu(rank) as i32).unwrap();
    let mut bytes = [0; UniqueId::LENGTH];
    if rank == 0 {
        bytes = *UniqueId::new(nccl).unwrap().as_bytes();
    }
    let id = UniqueId::from_bytes(board.all_gather(rank, shape.ranks, &bytes)[0]);
    let config = Config::new().timeout(Duration::from_secs(60));
    let comm = Communicator::init(nccl, &device, &id, shape.ranks as u32, rank as u32, &config).unwrap();
    let properties = comm.properties().unwrap();
    let support = properties.support.expect("2.29.7 and later tell");
    if rank == 0 {
        eprintln!("NCCL {}: {support:?}", nccl.version());
    }
    assert!(support.device_api, "no device API: {support:?}");
    assert_eq!(support.railed_gin, Some(GinType::Proxy), "{support:?}");
    if !shape.rail {
        assert_eq!(support.gin, Some(GinType::Proxy), "{support:?}");
    }
    assert_eq!(support.lsa_teams as usize, shape.ranks / shape.node);
    (nccl, device, comm)
}

pub fn requirements(nccl: &Nccl, shape: Shape) -> DevCommRequirements {
    let connection = if shape.rail { GinConnection::Rail } else { GinConnection::Full };
    let mut requirements = DevCommRequirements::new()
        .gin(connection)
        .gin_contexts(2)
        .gin_signals(64)
        .gin_counters(4)
        .rail_barriers(2);
    if !shape.rail {
        requirements = requirements.barriers(2);
        if nccl.version().code() >= 23000 {
            requirements = requirements.world_barriers(2);
        }
    }
    requirements
}
