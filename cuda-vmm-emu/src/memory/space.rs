//! The address space: reservations, and the ranges in which there is memory.

use crate::error::EmulatorError;
use crate::memory::access::{AccessTable, Accessor, Need};
use crate::memory::physical::{Location, Object, Physical};
use crate::memory::raw::{self, Protection};
use crate::status::{Outcome, code};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What there is at a range of addresses.
#[derive(Debug)]
pub(crate) enum Kind {
    /// A mapping of `cuMemMap`.
    Mapping { object: Object, access: AccessTable },
    /// An allocation of `cuMemAlloc`.
    Plain { memory: Arc<Physical>, device: usize, reserved: u64 },
    /// Another process's allocation, opened by its IPC handle in a device's context.
    Opened { memory: Arc<Physical>, device: usize, references: u64, reserved: u64 },
    /// Page-locked memory of `cuMemHostAlloc`.
    Host { device: usize, reserved: u64 },
    /// The caller's own memory, page-locked.
    Registered { device: usize },
}

#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) size: u64,
    pub(crate) kind: Kind,
}

impl Range {
    /// Where the memory is; `None` for a multicast object, which is on many devices.
    pub(crate) fn location(&self) -> Option<Location> {
        match &self.kind {
            Kind::Mapping { object: Object::Physical(memory), .. }
            | Kind::Plain { memory, .. }
            | Kind::Opened { memory, .. } => Some(memory.location),
            Kind::Mapping { object: Object::Multicast(_), .. } => None,
            Kind::Host { .. } | Kind::Registered { .. } => Some(Location::Host),
        }
    }

    /// Whether copies, sets and stream operations of `who` may touch the range.
    fn allows(&self, who: Accessor, need: Need) -> bool {
        match &self.kind {
            // A multicast address takes multimem operations only.
            Kind::Mapping { object: Object::Multicast(_), .. } => false,
            Kind::Mapping { access, .. } => access.of(who).allows(need),
            // Unified addressing: the driver finds a way between any two of these.
            _ => true,
        }
    }

    fn cpu(&self) -> Protection {
        match &self.kind {
            Kind::Mapping { object: Object::Multicast(_), .. } => Protection::None,
            Kind::Mapping { access, .. } => access.protection(),
            _ => Protection::ReadWrite,
        }
    }
}

/// Addresses of one emulator.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Start → size.
    pub(crate) reservations: BTreeMap<u64, u64>,
    /// Start → what is there. Ranges do not overlap.
    pub(crate) ranges: BTreeMap<u64, Range>,
}

/// What is behind a range of addresses.
pub(crate) enum Cover<'a> {
    /// Nothing that the driver knows: the caller's own memory.
    Unknown,
    /// Ranges back to back, the first with the first address in it.
    Ranges(Vec<(u64, &'a Range)>),
}

impl Space {
    /// The range that holds an address.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, &Range)> {
        let (&start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.size).then_some((start, range))
    }

    /// The reservation that holds an address: its start and size.
    pub(crate) fn reservation(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &size) = self.reservations.range(..=address).next_back()?;
        (address - start < size).then_some((start, size))
    }

    /// Whether any range overlaps `[start, start + size)`.
    pub(crate) fn overlaps(&self, start: u64, size: u64) -> bool {
        let end = start.saturating_add(size);
        self.ranges.range(..end).next_back().is_some_and(|(&other, range)| other + range.size > start)
    }

    /// Whether any reservation overlaps `[start, start + size)`.
    pub(crate) fn overlaps_reservation(&self, start: u64, size: u64) -> bool {
        let end = start.saturating_add(size);
        self.reservations.range(..end).next_back().is_some_and(|(&other, &length)| other + length > start)
    }

    /// What is behind `length` bytes. A range that the driver knows in part, or that is reserved but not mapped, is refused.
    pub(crate) fn cover(&self, address: u64, length: u64) -> Outcome<Cover<'_>> {
        let end = address.checked_add(length).ok_or(code::INVALID_VALUE)?;
        if self.at(address).is_none() {
            let known =
                self.overlaps(address, length.max(1)) || self.overlaps_reservation(address, length.max(1));
            return if known { Err(code::INVALID_VALUE) } else { Ok(Cover::Unknown) };
        }
        let mut found = Vec::with_capacity(1);
        let mut next = address;
        loop {
            let (start, range) = self.at(next).ok_or(code::INVALID_VALUE)?;
            found.push((start, range));
            next = start + range.size;
            if next >= end {
                return Ok(Cover::Ranges(found));
            }
        }
    }

    /// Checks that `who` may access `length` bytes. `false` if the driver knows nothing about them.
    pub(crate) fn check(&self, address: u64, length: u64, who: Accessor, need: Need) -> Outcome<bool> {
        match self.cover(address, length)? {
            Cover::Unknown => Ok(false),
            Cover::Ranges(ranges) if ranges.iter().all(|(_, range)| range.allows(who, need)) => Ok(true),
            Cover::Ranges(_) => Err(code::INVALID_VALUE),
        }
    }

    /// Checks that the CPU may access `length` bytes of memory of this emulator.
    pub(crate) fn for_cpu(&self, address: u64, length: usize, need: Need) -> Result<(), EmulatorError> {
        let not_mapped = EmulatorError::NotMapped { address, length };
        let Ok(Cover::Ranges(ranges)) = self.cover(address, length as u64) else { return Err(not_mapped) };
        let enough = |protection| match need {
            Need::Read => protection != Protection::None,
            Need::Write => protection == Protection::ReadWrite,
        };
        if ranges.iter().all(|(_, range)| enough(range.cpu())) {
            return Ok(());
        }
        let needed = match need {
            Need::Read => "read",
            Need::Write => "read and write",
        };
        Err(EmulatorError::NoAccess { address, length, needed, who: "any location".into() })
    }

    /// The whole mappings that make up `[start, start + size)` exactly: their starts. Nothing else, and no part of one, will do.
    pub(crate) fn whole_mappings(&self, start: u64, size: u64) -> Outcome<Vec<u64>> {
        let end = start.checked_add(size).filter(|_| size > 0).ok_or(code::INVALID_VALUE)?;
        let mut starts = Vec::new();
        let mut next = start;
        while next < end {
            match self.ranges.get(&next) {
                Some(Range { size, kind: Kind::Mapping { .. } }) => {
                    starts.push(next);
                    next += size;
                }
                _ => return Err(code::INVALID_VALUE),
            }
        }
        if next == end { Ok(starts) } else { Err(code::INVALID_VALUE) }
    }

    /// Removes a range that is no mapping in a reservation; addresses that were taken for it alone go too.
    pub(crate) fn remove_whole(&mut self, start: u64) {
        let Some(range) = self.ranges.remove(&start) else { return };
        match range.kind {
            Kind::Plain { reserved, .. } | Kind::Opened { reserved, .. } | Kind::Host { reserved, .. } => {
                raw::release(start, reserved);
            }
            // Gone with their reservation, or not ours.
            Kind::Mapping { .. } | Kind::Registered { .. } => {}
        }
    }

    /// Takes all addresses out of the process.
    pub(crate) fn clear(&mut self) {
        while let Some((&start, _)) = self.ranges.first_key_value() {
            self.remove_whole(start);
        }
        for (start, size) in std::mem::take(&mut self.reservations) {
            raw::release(start, size);
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.clear();
    }
}
