//! A rank of a test, and the processes that its ranks run in.

use cuda_vmm::Cuda;
use integration_tests::gpu::{self, skipped};
use integration_tests::meeting::Meeting;
use integration_tests::process::{Peer, role, scratch};
use nccl_gin::sys::{Generation, Nccl};
use nccl_gin::{Communicator, Config, Device, Error, MemAlloc, UniqueId};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub const MIB: usize = 1 << 20;

/// One rank of a test, in a process of its own.
pub struct Rank {
    pub rank: u32,
    pub size: u32,
    pub nccl: &'static Nccl,
    pub device: Device,
    /// Whether ranks share a GPU, and so take turns of milliseconds.
    pub shares: bool,
    pub meeting: Meeting,
}

impl Rank {
    /// The rank that this process was spawned for, if it was.
    pub fn here(test: &str) -> Option<Self> {
        let role = role(test)?;
        let mut words = role.splitn(3, ' ');
        let mut word = || words.next().expect("a role of three words");
        let (rank, size) = (word().parse().expect("a rank"), word().parse().expect("a size"));
        let folder = word();
        let devices = devices();
        let device = Device::open((rank % devices) as i32).unwrap();
        device.make_current().unwrap();
        let nccl = Nccl::get().unwrap();
        if rank == 0 {
            eprintln!("{test}: NCCL {} from {}", nccl.version(), nccl.origin());
        }
        Some(Self {
            rank,
            size,
            nccl,
            device,
            shares: size > devices,
            meeting: Meeting::new(folder, rank, size),
        })
    }

    /// Whether NCCL makes windows here: 2.28.3 does not on a communicator of one rank.
    pub fn has_windows(&self) -> bool {
        self.size > 1 || self.nccl.generation() > Generation::V2_28_3
    }

    /// Checks the error of a window that this NCCL does not make.
    pub fn no_window(&self, error: &Error) {
        assert!(matches!(error, Error::Nothing { missing: "window", .. }), "{error}");
        assert!(error.to_string().contains("2.28.3 makes no windows"), "{error}");
    }

    pub fn config() -> Config {
        Config::new().timeout(Duration::from_secs(90))
    }

    /// An identifier that all ranks get, under a name that is used once.
    pub fn id(&self, name: &str) -> UniqueId {
        if self.rank == 0 {
            self.meeting.leave(name, UniqueId::new(self.nccl).unwrap().as_bytes());
        }
        UniqueId::from_bytes(self.meeting.find(name).try_into().expect("128 bytes"))
    }

    pub fn comm(&self, name: &str) -> Communicator {
        self.try_comm(name, &Self::config()).unwrap()
    }

    pub fn try_comm(&self, name: &str, config: &Config) -> nccl_gin::Result<Communicator> {
        Communicator::init(self.nccl, &self.device, &self.id(name), self.size, self.rank, config)
    }

    pub fn memory(&self, length: usize) -> Arc<MemAlloc> {
        Arc::new(MemAlloc::new(self.nccl, &self.device, length).unwrap())
    }
}

/// GPUs that this process sees.
pub fn devices() -> u32 {
    Cuda::get().map_or(0, |cuda| cuda.device_count() as u32)
}

/// How many of `size` ranks the machine takes: all with a GPU for each, or with an NCCL that lets them share.
pub fn most(size: u32) -> u32 {
    let shares = Nccl::get().is_ok_and(|nccl| nccl.version().code() >= 23000);
    if shares { size } else { size.min(devices()) }
}

/// What the environment of `size` ranks must say. `None`, and a word about it, if they cannot run here.
pub fn place(test: &str, size: u32) -> Option<Vec<(&'static str, &'static str)>> {
    gpu::cuda(test, 1)?;
    if devices() >= size {
        return Some(Vec::new());
    }
    match Nccl::get() {
        Ok(_) if most(size) == size => Some(vec![("NCCL_MULTI_RANK_GPU_ENABLE", "1")]),
        Ok(nccl) => {
            let (version, devices) = (nccl.version(), devices());
            let reason =
                format!("{size} ranks, {devices} GPU(s), and NCCL {version} lets none share (2.30 does)");
            skipped(test, &reason);
            None
        }
        Err(error) => {
            skipped(test, &error.to_string());
            None
        }
    }
}

/// One test at a time: they look at the device's free memory.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts one process a rank, if they can run here, and waits for all of them.
pub fn ranks(test: &str, size: u32) {
    if let Some(environment) = place(test, size) {
        run(test, size, &environment);
    }
}

/// Starts one process a rank and waits for all of them.
pub fn run(test: &str, size: u32, environment: &[(&str, &str)]) {
    let _turn = turn();
    let (folder, _) = scratch("meeting");
    for peer in spawn(test, size, folder.path(), environment) {
        peer.finish();
    }
}

/// Starts one process a rank.
pub fn spawn(test: &str, size: u32, folder: &Path, environment: &[(&str, &str)]) -> Vec<Peer> {
    let mut all = vec![("NCCL_NVLS_ENABLE", "0"), ("CUDA_VMM_DISABLE_MULTICAST", "1")];
    all.extend(environment);
    let role = |rank| format!("{rank} {size} {}", folder.display());
    let patience = Duration::from_secs(60 + 30 * u64::from(size));
    (0..size).map(|rank| Peer::spawn(test, &role(rank), &all).patience(patience)).collect()
}
