//! The file of a multicast object: its header, the devices that were added, and the bindings of all processes.
//!
//! The file is locked while it is read or changed. The lock goes with its process, so that one that was killed blocks nobody.

use super::MAX_TEAM;
use crate::memory::backing::{Backing, FileId, FileKind, Metadata};
use crate::status::{Outcome, code, lock, os};
use bytemuck::{Pod, Zeroable};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Bytes of the file, without its last page.
const SIZE: u64 = 64 << 10;
const RECORDS_AT: u64 = size_of::<Header>() as u64 + 16 * MAX_TEAM as u64;
/// Bindings that one object may have, of all devices together.
const MAX_RECORDS: usize = ((SIZE - RECORDS_AT) / size_of::<Record>() as u64) as usize;
/// How long to wait for the lock. It is held for as long as one operation takes.
const LOCK_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Header {
    pub(super) size: u64,
    pub(super) granularity: u64,
    pub(super) devices: u32,
    pub(super) handle_types: u32,
    /// Devices that were added.
    pub(super) added: u32,
    /// Records that have ever been in use: those behind it are zero.
    records: u32,
}

/// One binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Record {
    uuid: [u8; 16],
    pub(super) offset: u64,
    /// Bytes; zero in a record that is free.
    pub(super) size: u64,
    pub(super) memory_offset: u64,
    device: u64,
    inode: u64,
    pub(super) process: u32,
    pub(super) descriptor: i32,
}

impl Record {
    pub(super) fn new(uuid: [u8; 16], offset: u64, size: u64, memory_offset: u64, memory: &Backing) -> Self {
        Self {
            uuid,
            offset,
            size,
            memory_offset,
            device: memory.id.device,
            inode: memory.id.inode,
            process: std::process::id(),
            descriptor: memory.number(),
        }
    }

    pub(super) fn is(&self, uuid: [u8; 16], offset: u64, size: u64) -> bool {
        (self.uuid, self.offset, self.size) == (uuid, offset, size)
    }

    pub(super) fn id(&self) -> FileId {
        FileId { device: self.device, inode: self.inode }
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.uuid == other.uuid
            && self.offset < other.offset.saturating_add(other.size)
            && other.offset < self.offset.saturating_add(self.size)
    }

    /// Whether the binding is of `uuid` and holds the object's byte `at`.
    pub(super) fn covers(&self, uuid: [u8; 16], at: u64) -> bool {
        self.uuid == uuid && at.checked_sub(self.offset).is_some_and(|inner| inner < self.size)
    }

    fn is_stale(&self) -> bool {
        if self.size == 0 || self.process == std::process::id() {
            return false;
        }
        let process = i32::try_from(self.process).ok().and_then(rustix::process::Pid::from_raw);
        process.is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// What the file holds.
pub(super) struct Table {
    pub(super) header: Header,
    pub(super) team: Vec<[u8; 16]>,
    pub(super) records: Vec<Record>,
}

impl Table {
    pub(super) fn new(size: u64, granularity: u64, devices: u32, handle_types: u32) -> Self {
        let header = Header { size, granularity, devices, handle_types, added: 0, records: 0 };
        Self { header, team: Vec::new(), records: Vec::new() }
    }
}

/// The file, and the lock of this process's threads.
#[derive(Debug)]
pub(super) struct TableFile {
    backing: Backing,
    threads: Mutex<()>,
}

/// The table while it is locked.
pub(super) struct Locked<'a> {
    file: &'a Backing,
    pub(super) table: Table,
}

impl TableFile {
    pub(super) fn create(table: Table) -> Outcome<Self> {
        let mut metadata = Metadata::new(FileKind::Multicast, SIZE);
        metadata.handle_types = table.header.handle_types;
        let backing = Backing::create(metadata)?;
        backing.write(bytemuck::bytes_of(&table.header), 0)?;
        Ok(Self { backing, threads: Mutex::default() })
    }

    pub(super) fn open(backing: Backing) -> Outcome<Self> {
        if backing.metadata.size != SIZE {
            return Err(code::INVALID_VALUE);
        }
        // A descriptor that was passed on shares its lock with the sender's: this process opens the file anew for a lock of its own.
        let path = format!("/proc/self/fd/{}", backing.number());
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(os)?;
        Ok(Self { backing: Backing::open(fd)?, threads: Mutex::default() })
    }

    pub(super) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Runs `work` on the table while nobody else has it.
    pub(super) fn locked<T>(&self, work: impl FnOnce(&mut Locked<'_>) -> Outcome<T>) -> Outcome<T> {
        struct Unlock<'a>(&'a Backing);
        impl Drop for Unlock<'_> {
            fn drop(&mut self) {
                let _ = flock(self.0.fd(), FlockOperation::Unlock);
            }
        }
        let _threads = lock(&self.threads);
        let end = Instant::now() + LOCK_DEADLINE;
        loop {
            match flock(self.backing.fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_micros(50));
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => return Err(code::NOT_READY),
                Err(errno) => return Err(os(errno)),
            }
        }
        let _unlock = Unlock(&self.backing);
        let mut header = Header::zeroed();
        self.backing.read(bytemuck::bytes_of_mut(&mut header), 0)?;
        // Other processes write this file: nothing in it is taken for granted.
        if header.added > MAX_TEAM || header.records as usize > MAX_RECORDS {
            return Err(code::INVALID_VALUE);
        }
        let mut team = vec![[0; 16]; header.added as usize];
        self.backing.read(bytemuck::cast_slice_mut(&mut team), size_of::<Header>() as u64)?;
        let mut records = vec![Record::zeroed(); header.records as usize];
        self.backing.read(bytemuck::cast_slice_mut(&mut records), RECORDS_AT)?;
        work(&mut Locked { file: &self.backing, table: Table { header, team, records } })
    }
}

impl Locked<'_> {
    fn write_header(&self) -> Outcome {
        self.file.write(bytemuck::bytes_of(&self.table.header), 0)
    }

    fn write_record(&mut self, index: usize, record: Record) -> Outcome {
        self.table.records[index] = record;
        let at = RECORDS_AT + (index * size_of::<Record>()) as u64;
        self.file.write(bytemuck::bytes_of(&record), at)
    }

    pub(super) fn add_device(&mut self, uuid: [u8; 16]) -> Outcome {
        let at = size_of::<Header>() as u64 + 16 * u64::from(self.table.header.added);
        self.file.write(&uuid, at)?;
        self.table.team.push(uuid);
        self.table.header.added += 1;
        self.write_header()
    }

    /// Frees the records of processes that are gone.
    pub(super) fn drop_stale(&mut self) -> Outcome {
        for index in 0..self.table.records.len() {
            if self.table.records[index].is_stale() {
                self.write_record(index, Record::zeroed())?;
            }
        }
        Ok(())
    }

    pub(super) fn insert(&mut self, record: Record) -> Outcome {
        let free = self.table.records.iter().position(|record| record.size == 0);
        let index = match free {
            Some(index) => index,
            None if self.table.records.len() < MAX_RECORDS => {
                self.table.records.push(Record::zeroed());
                self.table.records.len() - 1
            }
            None => return Err(code::OUT_OF_MEMORY),
        };
        self.write_record(index, record)?;
        self.table.header.records = self.table.records.len() as u32;
        self.write_header()
    }

    pub(super) fn remove(&mut self, record: &Record) -> Outcome {
        match self.table.records.iter().position(|other| other == record) {
            Some(index) => self.write_record(index, Record::zeroed()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn two_openings_of_a_table_see_each_other_and_take_turns() {
        let made = Arc::new(TableFile::create(Table::new(1 << 21, 1 << 21, 2, 1)).unwrap());
        let copy = Backing::open(made.backing().duplicate().unwrap()).unwrap();
        let opened = Arc::new(TableFile::open(copy).unwrap());
        made.locked(|locked| locked.add_device([7; 16])).unwrap();
        opened.locked(|locked| locked.add_device([8; 16])).unwrap();
        let team = made.locked(|locked| Ok(locked.table.team.clone())).unwrap();
        assert_eq!(team, [[7; 16], [8; 16]]);

        // Records come and go under contention without one being lost.
        let memory = Arc::new(Backing::create(Metadata::new(FileKind::Allocation, 4096)).unwrap());
        let threads: Vec<_> = (0..8_u64)
            .map(|thread| {
                let table = Arc::clone(if thread % 2 == 0 { &made } else { &opened });
                let memory = Arc::clone(&memory);
                std::thread::spawn(move || {
                    for round in 0..20 {
                        let record = Record::new([7; 16], thread << 21, 1 + round, 0, &memory);
                        table.locked(|locked| locked.insert(record)).unwrap();
                        if round != 19 {
                            table.locked(|locked| locked.remove(&record)).unwrap();
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let live = made.locked(|locked| Ok(locked.table.records.iter().filter(|r| r.size == 20).count()));
        assert_eq!(live, Ok(8));
    }

    #[test]
    fn a_table_is_full_at_its_limit() {
        let made = TableFile::create(Table::new(1 << 21, 1 << 21, 1, 1)).unwrap();
        let memory = Backing::create(Metadata::new(FileKind::Allocation, 4096)).unwrap();
        let record = |index: usize| Record::new([1; 16], index as u64, 1, 0, &memory);
        for index in 0..MAX_RECORDS {
            made.locked(|locked| locked.insert(record(index))).unwrap();
        }
        let one_more = made.locked(|locked| locked.insert(record(MAX_RECORDS)));
        assert_eq!(one_more, Err(code::OUT_OF_MEMORY));
    }
}
