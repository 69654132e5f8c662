//! The files behind memory: a memfd each, with a page at its end that says what it is.
//!
//! A process that imports a descriptor trusts nothing: the file must be a memfd that can neither grow nor shrink, and its last page must be
//! consistent with it.

use crate::status::{Outcome, code, os};
use bytemuck::{Pod, Zeroable};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, fcntl_dupfd_cloexec, pread, pwrite};
use std::os::fd::{AsRawFd, RawFd};

/// Bytes behind the memory itself.
const TAIL: u64 = 4096;
const MAGIC: [u8; 8] = *b"cuvmmemu";
const VERSION: u32 = 1;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum FileKind {
    /// Memory of `cuMemCreate`.
    Allocation = 1,
    /// Memory of `cuMemAlloc`.
    Plain = 2,
    /// State of a multicast object.
    Multicast = 3,
}

/// The last page of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Metadata {
    magic: [u8; 8],
    version: u32,
    kind: u32,
    /// Bytes of memory, without this page.
    pub(crate) size: u64,
    /// `CUmemLocationType`, and the id that goes with it: a NUMA node, nothing for a device, which is named by its UUID.
    pub(crate) location_type: u32,
    pub(crate) location_id: i32,
    pub(crate) uuid: [u8; 16],
    /// Handle types that were asked for at creation.
    pub(crate) handle_types: u32,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    checksum: u64,
}

impl Metadata {
    pub(crate) fn new(kind: FileKind, size: u64) -> Self {
        Self { magic: MAGIC, version: VERSION, kind: kind as u32, size, ..Self::zeroed() }
    }

    fn sum(&self) -> u64 {
        let unsummed = Self { checksum: 0, ..*self };
        checksum(bytemuck::bytes_of(&unsummed))
    }
}

/// FNV-1a: tells an accident from a message; it protects against nobody.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Device and inode of a file: what makes two descriptors the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// An open file of memory.
#[derive(Debug)]
pub(crate) struct Backing {
    fd: OwnedFd,
    pub(crate) metadata: Metadata,
    pub(crate) id: FileId,
}

impl Backing {
    /// Makes a file of zeroed memory.
    pub(crate) fn create(mut metadata: Metadata) -> Outcome<Self> {
        metadata.checksum = metadata.sum();
        let length = metadata.size.checked_add(TAIL).ok_or(code::OUT_OF_MEMORY)?;
        let fd =
            memfd_create(c"cuda-vmm-emu", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(os)?;
        ftruncate(&fd, length).map_err(|errno| match errno {
            // Larger than any file can be.
            Errno::FBIG | Errno::INVAL => code::OUT_OF_MEMORY,
            errno => os(errno),
        })?;
        write_all(fd.as_fd(), bytemuck::bytes_of(&metadata), metadata.size)?;
        fcntl_add_seals(&fd, SEALS | SealFlags::SEAL).map_err(os)?;
        let id = file_id(fd.as_fd())?;
        Ok(Self { fd, metadata, id })
    }

    /// Takes a file that another emulator made; whatever else it may be is refused.
    pub(crate) fn open(fd: OwnedFd) -> Outcome<Self> {
        let seals = fcntl_get_seals(&fd).map_err(|_| code::INVALID_VALUE)?;
        if !seals.contains(SEALS) {
            return Err(code::INVALID_VALUE);
        }
        let length = fstat(&fd).map_err(os)?.st_size;
        let size = u64::try_from(length).ok().and_then(|n| n.checked_sub(TAIL)).ok_or(code::INVALID_VALUE)?;
        let mut metadata = Metadata::zeroed();
        read_all(fd.as_fd(), bytemuck::bytes_of_mut(&mut metadata), size)?;
        let sound = metadata.magic == MAGIC
            && metadata.version == VERSION
            && metadata.size == size
            && metadata.checksum == metadata.sum();
        if !sound {
            return Err(code::INVALID_VALUE);
        }
        let id = file_id(fd.as_fd())?;
        Ok(Self { fd, metadata, id })
    }

    /// Takes a descriptor number that a caller passed for an open descriptor, without taking it away.
    pub(crate) fn open_raw(fd: RawFd) -> Outcome<Self> {
        if fd < 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the number is given to fcntl alone, which answers EBADF if it is not open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let own = fcntl_dupfd_cloexec(borrowed, 0).map_err(|errno| match errno {
            Errno::BADF => code::INVALID_VALUE,
            errno => os(errno),
        })?;
        Self::open(own)
    }

    pub(crate) fn is(&self, kind: FileKind) -> bool {
        self.metadata.kind == kind as u32
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A descriptor of the same file for somebody else, who closes it.
    pub(crate) fn duplicate(&self) -> Outcome<OwnedFd> {
        fcntl_dupfd_cloexec(&self.fd, 0).map_err(os)
    }

    pub(crate) fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) -> Outcome {
        read_all(self.fd(), bytes, offset)
    }

    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Outcome {
        write_all(self.fd(), bytes, offset)
    }
}

pub(crate) fn file_id(fd: BorrowedFd<'_>) -> Outcome<FileId> {
    let stat = fstat(fd).map_err(os)?;
    Ok(FileId { device: stat.st_dev, inode: stat.st_ino })
}

/// Reads all of `bytes` from a file; the file's end before that is an invalid value.
pub(crate) fn read_all(fd: BorrowedFd<'_>, mut bytes: &mut [u8], mut offset: u64) -> Outcome {
    while !bytes.is_empty() {
        match pread(fd, &mut *bytes, offset) {
            Ok(0) => return Err(code::INVALID_VALUE),
            Ok(count) => {
                bytes = &mut bytes[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(os(errno)),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to a file.
pub(crate) fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Outcome {
    while !bytes.is_empty() {
        match pwrite(fd, bytes, offset) {
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(os(errno)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_is_to_who_opens_it() {
        let mut metadata = Metadata::new(FileKind::Allocation, 1 << 21);
        metadata.handle_types = 9;
        let made = Backing::create(metadata).unwrap();
        made.write(b"hello", 42).unwrap();
        let opened = Backing::open(made.duplicate().unwrap()).unwrap();
        assert!(opened.is(FileKind::Allocation) && !opened.is(FileKind::Plain));
        assert_eq!((opened.metadata, opened.id), (made.metadata, made.id));
        let mut bytes = [0; 5];
        opened.read(&mut bytes, 42).unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn other_descriptors_are_refused() {
        assert_eq!(Backing::open_raw(-1).map(drop), Err(code::INVALID_VALUE));
        assert_eq!(Backing::open_raw(i32::MAX).map(drop), Err(code::INVALID_VALUE));
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(Backing::open_raw(file.as_raw_fd()).map(drop), Err(code::INVALID_VALUE));
        // A memfd, but not ours; then ours without seals; then ours with a changed page.
        let foreign = memfd_create(c"x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&foreign, 8192).unwrap();
        assert_eq!(Backing::open_raw(foreign.as_raw_fd()).map(drop), Err(code::INVALID_VALUE));
        fcntl_add_seals(&foreign, SEALS).unwrap();
        assert_eq!(Backing::open_raw(foreign.as_raw_fd()).map(drop), Err(code::INVALID_VALUE));
        let made = Backing::create(Metadata::new(FileKind::Plain, 4096)).unwrap();
        made.write(&[1], 4096 + 16).unwrap();
        assert_eq!(Backing::open_raw(made.number()).map(drop), Err(code::INVALID_VALUE));
    }

    #[test]
    fn a_file_larger_than_any_can_be_is_out_of_memory() {
        for size in [u64::MAX, i64::MAX as u64] {
            let made = Backing::create(Metadata::new(FileKind::Allocation, size));
            assert_eq!(made.map(drop), Err(code::OUT_OF_MEMORY));
        }
    }
}
