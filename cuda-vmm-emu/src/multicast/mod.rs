//! Multicast objects.
//!
//! An object is a file that every process of its team has open. The file holds who was added and what is bound where, so that the rules hold
//! across processes, and so that an operation in one process reaches memory that another has bound.

mod calls;
pub(crate) mod multimem;
mod table;

use crate::config::Config;
use crate::core::{Core, fresh_handle};
use crate::ledger::{Binding, Incident};
use crate::memory::backing::{Backing, FileId};
use crate::memory::physical::Physical;
use crate::share::open_of_process;
use crate::status::{Outcome, code, lock, require};
use cuda_vmm_sys::Function;
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use table::{Record, Table, TableFile};

/// Devices that one object may have.
pub(crate) const MAX_TEAM: u32 = 64;

/// One multicast object, as this emulator has it.
#[derive(Debug)]
pub(crate) struct Multicast {
    pub(crate) handle: u64,
    pub(crate) size: u64,
    pub(crate) granularity: u64,
    pub(crate) devices: u32,
    pub(crate) handle_types: u32,
    pub(crate) imported: bool,
    table: TableFile,
    own: Mutex<Vec<OwnBinding>>,
    /// Memory that other processes have bound, opened when it was first needed.
    foreign: Mutex<HashMap<FileId, Arc<OwnedFd>>>,
    _slot: Option<ObjectSlot>,
}

/// A binding that this emulator made. It keeps the memory.
#[derive(Debug)]
struct OwnBinding {
    record: Record,
    memory: Arc<Physical>,
    device: usize,
}

/// One of the objects that an emulator may have created at a time.
#[derive(Debug)]
struct ObjectSlot(Arc<AtomicUsize>);

impl ObjectSlot {
    fn take(core: &Core) -> Outcome<Self> {
        let limit = core.config.multicast_slots;
        core.multicast_objects
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| (used < limit).then_some(used + 1))
            .map_err(|_| code::OUT_OF_MEMORY)?;
        Ok(Self(Arc::clone(&core.multicast_objects)))
    }
}

impl Drop for ObjectSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Multicast {
    fn create(core: &Core, size: u64, devices: u32, handle_types: u32) -> Outcome<Self> {
        let slot = ObjectSlot::take(core)?;
        let granularity = core.config.multicast_granularity as u64;
        let table = TableFile::create(Table::new(size, granularity, devices, handle_types))?;
        Ok(Self::with(table, size, granularity, devices, handle_types, Some(slot)))
    }

    /// An object that another emulator created.
    pub(crate) fn import(config: &Config, backing: Backing) -> Outcome<Self> {
        if !config.multicast {
            return Err(code::NOT_SUPPORTED);
        }
        let table = TableFile::open(backing)?;
        let header = table.locked(|locked| Ok(locked.table.header))?;
        let sound = header.granularity.is_power_of_two()
            && header.size > 0
            && header.size % header.granularity == 0
            && (1..=MAX_TEAM).contains(&header.devices)
            && header.added <= header.devices;
        require(sound)?;
        Ok(Self::with(table, header.size, header.granularity, header.devices, header.handle_types, None))
    }

    fn with(
        table: TableFile,
        size: u64,
        granularity: u64,
        devices: u32,
        handle_types: u32,
        slot: Option<ObjectSlot>,
    ) -> Self {
        Self {
            handle: fresh_handle() as u64,
            size,
            granularity,
            devices,
            handle_types,
            imported: slot.is_none(),
            table,
            own: Mutex::default(),
            foreign: Mutex::default(),
            _slot: slot,
        }
    }

    pub(crate) fn backing(&self) -> &Backing {
        self.table.backing()
    }

    fn add_device(&self, uuid: [u8; 16]) -> Outcome {
        self.table.locked(|locked| {
            // Each once, and no more than the object is for.
            require(!locked.table.team.contains(&uuid) && locked.table.header.added < self.devices)?;
            locked.add_device(uuid)
        })
    }

    pub(crate) fn has_device(&self, uuid: [u8; 16]) -> Outcome<bool> {
        self.table.locked(|locked| Ok(locked.table.team.contains(&uuid)))
    }

    /// Waits until every device has been added, for the configured time at most.
    pub(crate) fn await_devices(&self, core: &Core, function: Function) -> Outcome {
        let end = Instant::now() + core.config.multicast_deadline;
        loop {
            let added = self.table.locked(|locked| Ok(locked.table.header.added))?;
            if added == self.devices {
                return Ok(());
            }
            if Instant::now() >= end || core.closed.load(Ordering::Acquire) {
                core.note(Incident::WouldBlock { function, added, devices: self.devices });
                return Err(code::NOT_READY);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Binds `size` bytes of memory at an offset of the object. All devices are there, and offsets and sizes were checked.
    fn bind(
        &self,
        device: usize,
        uuid: [u8; 16],
        offset: u64,
        memory: Arc<Physical>,
        memory_offset: u64,
        size: u64,
    ) -> Outcome {
        let record = Record::new(uuid, offset, size, memory_offset, &memory.backing);
        self.table.locked(|locked| {
            if !locked.table.team.contains(&uuid) {
                return Err(code::INVALID_DEVICE);
            }
            locked.drop_stale()?;
            require(!locked.table.records.iter().any(|other| other.overlaps(&record)))?;
            locked.insert(record)?;
            lock(&self.own).push(OwnBinding { record, memory, device });
            Ok(())
        })
    }

    /// Takes back exactly what one bind of this emulator bound.
    fn unbind(&self, uuid: [u8; 16], offset: u64, size: u64) -> Outcome {
        let gone = self.table.locked(|locked| {
            let mut own = lock(&self.own);
            let index = own
                .iter()
                .position(|binding| binding.record.is(uuid, offset, size))
                .ok_or(code::INVALID_VALUE)?;
            locked.remove(&own[index].record)?;
            Ok(own.swap_remove(index))
        })?;
        drop(gone);
        Ok(())
    }

    /// The file of bound memory: this emulator's, or opened through the process that bound it.
    fn memory_of(&self, record: &Record) -> Outcome<MemoryFile> {
        let id = record.id();
        if let Some(own) = lock(&self.own).iter().find(|own| own.memory.backing.id == id) {
            return Ok(MemoryFile::Own(Arc::clone(&own.memory)));
        }
        let mut foreign = lock(&self.foreign);
        if let Some(fd) = foreign.get(&id) {
            return Ok(MemoryFile::Foreign(Arc::clone(fd)));
        }
        let fd = Arc::new(open_of_process(record.process, record.descriptor, id)?);
        foreign.insert(id, Arc::clone(&fd));
        Ok(MemoryFile::Foreign(fd))
    }

    /// What this emulator has bound, for the ledger.
    pub(crate) fn own_bindings(&self) -> Vec<Binding> {
        lock(&self.own)
            .iter()
            .map(|own| Binding {
                object: self.handle,
                memory: own.memory.handle,
                device: own.device,
                offset: own.record.offset,
                size: own.record.size,
            })
            .collect()
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        let own = std::mem::take(self.own.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner));
        if !own.is_empty() {
            // If the table cannot be had, the records stay: they are stale once this process is gone.
            let _ = self.table.locked(|locked| own.iter().try_for_each(|own| locked.remove(&own.record)));
        }
    }
}

/// A file of bound memory.
enum MemoryFile {
    Own(Arc<Physical>),
    Foreign(Arc<OwnedFd>),
}
