//! An NCCL and the part of a CUDA driver that the crate needs, in software: they can fail any call, and keep a ledger that must be empty
//! at the end.

pub mod cuda;
mod device_api;
mod nccl;

use nccl_gin::sys::{Nccl, ncclResult_t};
use nccl_gin::{Communicator, Config, Device, UniqueId, WindowMemory};
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What the driver knows about a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From cuMemCreate, on the device, with a handle type.
    Device,
    /// From cuMemCreate, on a NUMA node, with a handle type.
    Host,
    /// From cuMemAlloc.
    Plain,
    /// From cuMemCreate, without a handle type.
    Private,
    /// Without a handle type, and the driver exports it all the same.
    Untold,
    /// On a NUMA node, from another process: the driver tells no handle type, and does not export it.
    Imported,
}

/// Everything that both libraries remember.
#[derive(Default)]
pub struct World {
    pub version: u32,
    /// Functions that the library lacks.
    pub missing: HashSet<&'static str>,
    /// What the next call of a function returns in place of its work.
    pub fail: HashMap<&'static str, ncclResult_t>,
    /// Functions that succeed and give nothing.
    pub nothing: HashSet<&'static str>,
    /// What an operation of a function reports at its end.
    pub fail_later: HashMap<&'static str, ncclResult_t>,
    /// Functions whose operations never end.
    pub stuck: HashSet<&'static str>,
    /// How often an operation is in progress before it ends.
    pub polls: u32,
    pub last_error: Vec<u8>,
    /// Properties that the library tells.
    pub device_api: bool,
    pub lsa_size: i32,
    /// A device communicator that says another rank than it should.
    pub garbled: bool,
    /// Names of the calls, in order.
    pub log: Vec<&'static str>,
    /// The structs that were passed last.
    pub config: Vec<u8>,
    pub requirements: Vec<u8>,
    pub properties: Vec<u8>,
    pub exclude: Vec<i32>,
    // The ledger.
    pub comms: HashMap<usize, nccl::Comm>,
    pub windows: HashMap<usize, usize>,
    pub dev_comms: usize,
    pub allocations: HashSet<usize>,
    pub contexts: i32,
    pub pushed: i32,
    pub handles: i32,
    pub streams: i32,
    pub group_depth: i32,
    /// Ranges of addresses: start, length, kind.
    pub ranges: Vec<(usize, usize, Kind)>,
    pub next: usize,
}

impl World {
    fn address(&mut self, length: usize) -> usize {
        let at = self.next;
        self.next += length.next_multiple_of(1 << 21);
        at
    }
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

pub fn world<T>(f: impl FnOnce(&mut World) -> T) -> T {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    f(world.get_or_insert_with(World::default))
}

/// One test's turn with the fakes.
pub struct Fake {
    pub nccl: Nccl,
    pub device: Device,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    /// A library of this version, and a device.
    pub fn new(version: u32) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        world(|world| {
            *world = World {
                version,
                polls: 2,
                device_api: true,
                lsa_size: 2,
                next: 0x7000_0000_0000,
                last_error: b"\0".to_vec(),
                ..World::default()
            };
        });
        // SAFETY: the fakes' functions have the signatures that the headers declare for their names.
        let (nccl, driver) = unsafe {
            (
                Nccl::from_loader(nccl::resolve).unwrap(),
                cuda_vmm_sys::Driver::from_loader(cuda::resolve).unwrap(),
            )
        };
        let device = Device::with_driver(&driver, 1).unwrap();
        Self { nccl, device, _turn: turn }
    }

    pub fn config() -> Config {
        Config::new().timeout(Duration::from_secs(10))
    }

    pub fn try_comm(&self, config: &Config) -> nccl_gin::Result<Communicator> {
        Communicator::init(&self.nccl, &self.device, &UniqueId::from_bytes([7; 128]), 2, 1, config)
    }

    pub fn comm(&self) -> Communicator {
        self.try_comm(&Self::config()).unwrap()
    }

    /// Memory of the given pieces, one after the other.
    pub fn memory(&self, pieces: &[(usize, Kind)]) -> Arc<Piece> {
        let length = pieces.iter().map(|(length, _)| length).sum();
        world(|world| {
            let start = world.address(length);
            let mut at = start;
            for &(length, kind) in pieces {
                world.ranges.push((at, length, kind));
                at += length;
            }
            Arc::new(Piece { start, length })
        })
    }

    /// Checks that everything was given back.
    pub fn finish(self) {
        drop(self.device);
        world(|world| {
            assert!(world.comms.is_empty(), "{} communicators are left", world.comms.len());
            assert!(world.windows.is_empty(), "{} windows are left", world.windows.len());
            assert!(world.allocations.is_empty(), "{} allocations are left", world.allocations.len());
            assert_eq!(
                (
                    world.dev_comms,
                    world.contexts,
                    world.pushed,
                    world.handles,
                    world.streams,
                    world.group_depth
                ),
                (0, 0, 0, 0, 0, 0),
                "device communicators, contexts, pushed contexts, handles, streams, groups"
            );
        });
    }
}

/// Memory that a test made up: only its address is used.
pub struct Piece {
    pub start: usize,
    pub length: usize,
}

// SAFETY: the fakes never follow the address.
unsafe impl WindowMemory for Piece {
    fn address(&self) -> NonNull<c_void> {
        NonNull::new(std::ptr::without_provenance_mut(self.start)).expect("not null")
    }

    fn len(&self) -> usize {
        self.length
    }
}
