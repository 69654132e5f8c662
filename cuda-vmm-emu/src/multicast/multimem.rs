//! Multicast operations in software: what `multimem` instructions do on a device.

use super::{MemoryFile, Multicast};
use crate::emulator::Emulator;
use crate::error::EmulatorError;
use crate::memory::access::{Accessor, Need};
use crate::memory::backing::{read_all, write_all};
use crate::memory::physical::Object;
use crate::memory::space::{Kind, Range};
use crate::status::{Outcome, code, read};
use cuda_vmm_sys::{CUdeviceptr, CUresult};
use half::{bf16, f16};
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

mod sealed {
    /// Arithmetic of one element type.
    pub trait Arithmetic: Copy {
        /// What sums are kept in.
        type Sum: Copy;
        /// Reads an element from its bytes.
        fn load(bytes: &[u8]) -> Self;
        /// Writes an element's bytes.
        fn store(self, bytes: &mut [u8]);
        /// The element as a sum of one.
        fn widen(self) -> Self::Sum;
        /// Adds two sums.
        fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
        /// Rounds a sum to an element, once.
        fn narrow(sum: Self::Sum) -> Self;
    }
}

/// Element of a multicast operation: `f32`, `bf16`, `f16`, `u32`, `i32` or `u64`.
///
/// Sums of `bf16` and `f16` are kept in `f32` and rounded once, as by the instructions' `.acc::f32` forms; sums of integers wrap.
pub trait Element: sealed::Arithmetic {}

macro_rules! element {
    ($type:ty, $sum:ty, $widen:expr, $add:expr, $narrow:expr) => {
        impl sealed::Arithmetic for $type {
            type Sum = $sum;
            fn load(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$type>()];
                array.copy_from_slice(bytes);
                Self::from_ne_bytes(array)
            }
            fn store(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn widen(self) -> $sum {
                ($widen)(self)
            }
            fn add(a: $sum, b: $sum) -> $sum {
                ($add)(a, b)
            }
            fn narrow(sum: $sum) -> Self {
                ($narrow)(sum)
            }
        }
        impl Element for $type {}
    };
}

element!(f32, f32, |x| x, |a, b| a + b, |x| x);
element!(bf16, f32, bf16::to_f32, |a, b| a + b, bf16::from_f32);
element!(f16, f32, f16::to_f32, |a, b| a + b, f16::from_f32);
element!(u32, u32, |x| x, u32::wrapping_add, |x| x);
element!(i32, i32, |x| x, i32::wrapping_add, |x| x);
element!(u64, u64, |x| x, u64::wrapping_add, |x| x);

/// A run of bytes of one device's bound memory.
struct Piece {
    file: MemoryFile,
    at: u64,
    length: usize,
}

impl MemoryFile {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(memory) => memory.backing.fd(),
            Self::Foreign(fd) => fd.as_fd(),
        }
    }
}

/// One device's bound memory behind a range of the object, in order.
struct Replica(Vec<Piece>);

impl Replica {
    fn load(&self, bytes: &mut [u8]) -> Outcome {
        self.each(bytes.len(), |piece, range| read_all(piece.file.fd(), &mut bytes[range], piece.at))
    }

    fn store(&self, bytes: &[u8]) -> Outcome {
        self.each(bytes.len(), |piece, range| write_all(piece.file.fd(), &bytes[range], piece.at))
    }

    fn each(
        &self,
        length: usize,
        mut work: impl FnMut(&Piece, std::ops::Range<usize>) -> Outcome,
    ) -> Outcome {
        let mut start = 0;
        for piece in &self.0 {
            let end = (start + piece.length).min(length);
            work(piece, start..end)?;
            start = end;
        }
        Ok(())
    }
}

/// Why an operation on the replicas ended: some device has none there, or a system call failed.
enum Stop {
    NotBound { bound: usize },
    Failed,
}

impl Multicast {
    /// Runs `work` on the replicas of a range, one for each device, while nobody else uses the object.
    fn with_replicas(
        &self,
        offset: u64,
        length: usize,
        work: impl FnOnce(&[Replica]) -> Outcome,
    ) -> Result<(), Stop> {
        let mut stop = Stop::Failed;
        let outcome: Outcome = self.table.locked(|locked| {
            // Memory that nobody has bound any more is let go; what a process that is gone had bound is gone with it.
            locked.drop_stale()?;
            let table = &locked.table;
            crate::status::lock(&self.foreign).retain(|id, _| table.records.iter().any(|r| r.id() == *id));
            let mut replicas = Vec::with_capacity(table.team.len());
            for &uuid in &table.team {
                let (mut pieces, mut next, end) = (Vec::new(), offset, offset + length as u64);
                while next < end {
                    let Some(record) = table.records.iter().find(|record| record.covers(uuid, next)) else {
                        break;
                    };
                    let Ok(file) = self.memory_of(record) else { break };
                    let inner = next - record.offset;
                    let part = (record.size - inner).min(end - next);
                    pieces.push(Piece { file, at: record.memory_offset + inner, length: part as usize });
                    next += part;
                }
                if next >= end {
                    replicas.push(Replica(pieces));
                }
            }
            if replicas.len() < self.devices as usize {
                stop = Stop::NotBound { bound: replicas.len() };
                return Err(code::ILLEGAL_ADDRESS);
            }
            work(&replicas)
        });
        outcome.map_err(|_: CUresult| stop)
    }
}

/// Multicast operations, as a kernel on a device would do them at an address that maps a multicast object.
///
/// The CPU cannot use such an address: it has no memory of its own, and a load or store faults. These methods stand for the device's
/// instructions. An operation is one step for all who use the object, in whatever process; plain loads of bound memory may see it element by element.
impl Emulator {
    /// Stores values to the memory of every device of the object (`multimem.st`), on behalf of the device with ordinal `device`.
    ///
    /// # Errors
    /// An [`EmulatorError`] if the address is misaligned or maps no multicast object, the device has no access, or some device has no memory bound there.
    #[doc(alias = "multimem.st")]
    pub fn multimem_store<T: Element>(
        &self,
        device: usize,
        address: CUdeviceptr,
        values: &[T],
    ) -> Result<(), EmulatorError> {
        let mut bytes = vec![0; size_of_val(values)];
        for (value, out) in values.iter().zip(bytes.chunks_exact_mut(size_of::<T>())) {
            value.store(out);
        }
        self.on_replicas::<T>(device, address, bytes.len(), Need::Write, |replicas| {
            replicas.iter().try_for_each(|replica| replica.store(&bytes))
        })
    }

    /// Loads from the memory of every device and adds up (`multimem.ld_reduce.add`), in the order in which devices were added.
    ///
    /// # Errors
    /// As [`multimem_store`](Self::multimem_store).
    #[doc(alias = "multimem.ld_reduce")]
    pub fn multimem_ld_reduce_add<T: Element>(
        &self,
        device: usize,
        address: CUdeviceptr,
        out: &mut [T],
    ) -> Result<(), EmulatorError> {
        let length = size_of_val(out);
        let mut bytes = vec![0; length];
        self.on_replicas::<T>(device, address, length, Need::Read, |replicas| {
            let mut sums: Vec<T::Sum> = Vec::with_capacity(out.len());
            for replica in replicas {
                replica.load(&mut bytes)?;
                let values = bytes.chunks_exact(size_of::<T>()).map(|bytes| T::load(bytes).widen());
                if sums.is_empty() {
                    sums.extend(values);
                } else {
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = T::add(*sum, value);
                    }
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::narrow(sum);
            }
            Ok(())
        })
    }

    /// Adds values to the memory of every device (`multimem.red.add`).
    ///
    /// # Errors
    /// As [`multimem_store`](Self::multimem_store).
    #[doc(alias = "multimem.red")]
    pub fn multimem_red_add<T: Element>(
        &self,
        device: usize,
        address: CUdeviceptr,
        values: &[T],
    ) -> Result<(), EmulatorError> {
        let length = size_of_val(values);
        let mut bytes = vec![0; length];
        self.on_replicas::<T>(device, address, length, Need::Write, |replicas| {
            for replica in replicas {
                replica.load(&mut bytes)?;
                for (value, bytes) in values.iter().zip(bytes.chunks_exact_mut(size_of::<T>())) {
                    T::narrow(T::add(T::load(bytes).widen(), value.widen())).store(bytes);
                }
                replica.store(&bytes)?;
            }
            Ok(())
        })
    }

    fn on_replicas<T>(
        &self,
        device: usize,
        address: CUdeviceptr,
        length: usize,
        need: Need,
        work: impl FnOnce(&[Replica]) -> Outcome,
    ) -> Result<(), EmulatorError> {
        let element = size_of::<T>();
        if !address.is_multiple_of(element as u64) {
            return Err(EmulatorError::Misaligned { address, length, element });
        }
        if length == 0 {
            return Ok(());
        }
        let (object, offset) = self.multicast_at(device, address, length, need)?;
        object.with_replicas(offset, length, work).map_err(|stop| match stop {
            Stop::NotBound { bound } => EmulatorError::NotBound {
                offset,
                end: offset + length as u64,
                bound,
                devices: object.devices as usize,
            },
            Stop::Failed => EmulatorError::System {
                what: "using the memory of a multicast object",
                reason: "its table or the bound memory could not be read or written".into(),
            },
        })
    }

    /// The object that is mapped at an address, and the address's offset in it.
    fn multicast_at(
        &self,
        device: usize,
        address: CUdeviceptr,
        length: usize,
        need: Need,
    ) -> Result<(Arc<Multicast>, u64), EmulatorError> {
        let space = read(&self.core().space);
        let Some((start, Range { size, kind: Kind::Mapping { object: Object::Multicast(object), access } })) =
            space.at(address)
        else {
            return Err(EmulatorError::NotMulticast { address });
        };
        let offset = address - start;
        if length as u64 > size - offset {
            return Err(EmulatorError::NotMapped { address, length });
        }
        if !access.of(Accessor::Device(device)).allows(need) {
            let needed = match need {
                Need::Read => "read",
                Need::Write => "read and write",
            };
            return Err(EmulatorError::NoAccess { address, length, needed, who: format!("device {device}") });
        }
        Ok((Arc::clone(object), offset))
    }
}
