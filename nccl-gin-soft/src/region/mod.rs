//! Registered memory: what each rank may read and write of the others.

mod agree;
mod share;

pub(crate) use agree::{Partner, Registration, conclude, prepare};
pub(crate) use share::Mapping;

use crate::abi::{MR_SIGNAL_NEVER_RESET, PTR_CUDA};
use crate::error::{Error, Result};
use crate::line::Line;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// Host memory up to this size travels in slots; larger registrations get staging memory.
pub(crate) const SMALL_HOST: u64 = 64 << 10;

/// One registration, on this rank. In cache lines of its own, as it is read for each command, and its neighbours may be written.
#[repr(align(128))]
pub(crate) struct Region {
    pub(crate) id: u64,
    pub(crate) base: u64,
    pub(crate) size: u64,
    /// Whether it is host memory that this process may read and write by itself.
    pub(crate) cpu: bool,
    /// Whether the device can address it: all but pageable memory.
    pub(crate) device: bool,
    /// Signals that nobody else writes: the value that each word has or is about to get.
    pub(crate) shadow: Option<Box<[Shadow]>>,
    pub(crate) peers: Box<[PeerView]>,
}

/// The same registration, as one other rank and this one see each other's. In cache lines of its own, too.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct PeerView {
    /// Bytes that the other rank registered.
    pub(crate) size: u64,
    /// The other rank's memory, if it can be mapped here.
    pub(crate) mapping: Option<Mapping>,
    /// Whether the other rank has mapped this one's.
    pub(crate) maps_ours: bool,
}

impl Region {
    /// The device's address of a range; `None` if it is out of bounds.
    pub(crate) fn at(&self, offset: u64, size: u64) -> Option<u64> {
        in_bounds(self.size, offset, size).then(|| self.base + offset)
    }

    /// The address here of a range of another rank's memory.
    pub(crate) fn at_peer(&self, rank: usize, offset: u64, size: u64) -> Option<u64> {
        let view = self.peers.get(rank)?;
        let mapping = view.mapping.as_ref()?;
        in_bounds(view.size, offset, size).then(|| mapping.start() + offset)
    }
}

/// Whether a range lies in a registration of `whole` bytes.
pub(crate) fn in_bounds(whole: u64, offset: u64, size: u64) -> bool {
    offset <= whole && size <= whole - offset
}

/// Whether payload of a registration needs the pair's staging memory: the receiver cannot fetch it, and it does not fit into slots.
/// Both ends answer this alike.
pub(crate) fn needs_staging(kind: u32, flags: u64, size: u64, mapped: bool) -> bool {
    let signals = flags & MR_SIGNAL_NEVER_RESET != 0;
    !mapped && !signals && (kind == PTR_CUDA as u32 || size > SMALL_HOST)
}

/// All registrations of a connection. A handle is a number: the one that NCCL is given is never followed as an address.
#[derive(Default)]
pub(crate) struct Regions {
    list: Line<RwLock<Vec<Option<Arc<Region>>>>>,
    /// Counts the changes.
    version: Line<AtomicU64>,
}

/// The agent's own list. NCCL's threads write the lock and the counts of owners for each operation; an agent that did so, too, would wait for
/// these lines to come from the other core, several times for each command.
#[derive(Default)]
pub(crate) struct Followed {
    version: u64,
    list: Vec<Option<Arc<Region>>>,
}

impl Followed {
    /// Takes over what has changed. What is no longer there is let go of.
    pub(crate) fn follow(&mut self, regions: &Regions) {
        // Acquire: pairs with the changes, which come before any command that needs them.
        if regions.version.load(Ordering::Acquire) != self.version {
            let list = regions.list.read().unwrap_or_else(PoisonError::into_inner);
            // Under the lock nobody changes it.
            self.version = regions.version.load(Ordering::Relaxed);
            self.list.clone_from(&list);
        }
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Arc<Region>> {
        self.list.get(usize::try_from(id).ok()?)?.as_ref()
    }
}

impl Regions {
    /// Makes room for the next registration, and names it. Registrations are collective and in the same order on all ranks.
    pub(crate) fn next(&self) -> u64 {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        list.push(None);
        list.len() as u64 - 1
    }

    pub(crate) fn insert(&self, region: Region) {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = list.get_mut(region.id as usize) {
            *place = Some(Arc::new(region));
            self.changed();
        }
    }

    /// The lock is held for writing.
    fn changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// All of them, to be looked at. Nothing is registered meanwhile.
    pub(crate) fn read(&self) -> Reading<'_> {
        Reading(self.list.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Region>> {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let region = list.get_mut(usize::try_from(id).ok()?)?.take();
        self.changed();
        region
    }

    pub(crate) fn clear(&self) {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        list.clear();
        self.changed();
    }

    /// The registration of a handle.
    pub(crate) fn of_handle(&self, handle: usize) -> Result<Arc<Region>> {
        self.read().of_handle(handle).cloned()
    }
}

/// What is registered, while nobody changes it. Who only looks counts as no owner: the count is in the cache line of what the agent reads of a
/// registration.
pub(crate) struct Reading<'a>(RwLockReadGuard<'a, Vec<Option<Arc<Region>>>>);

impl Reading<'_> {
    /// The registration of a handle.
    pub(crate) fn of_handle(&self, handle: usize) -> Result<&Arc<Region>> {
        handle
            .checked_sub(1)
            .and_then(|id| self.0.get(id)?.as_ref())
            .ok_or_else(|| Error::Argument(format!("{handle:#x} is no handle of registered memory")))
    }
}

/// The handle of a registration: not null, and below 2⁶³.
pub(crate) fn handle_of(id: u64) -> usize {
    id as usize + 1
}

/// A signal that only the agent writes.
pub(crate) struct Shadow {
    value: AtomicU64,
    /// Stream of the last write, counted from 1.
    stream: AtomicU8,
}

impl Shadow {
    /// The stream that the word was last written in, if that is another one.
    pub(crate) fn other_stream(&self, stream: usize) -> Option<usize> {
        let last = usize::from(self.stream.load(Ordering::Relaxed)).checked_sub(1)?;
        (last != stream).then_some(last)
    }

    /// Adds, in a stream, and returns the new value.
    pub(crate) fn add(&self, add: u64, stream: usize) -> u64 {
        // Only the agent does this: no other writer, no order with other memory.
        let value = self.value.load(Ordering::Relaxed).wrapping_add(add);
        self.value.store(value, Ordering::Relaxed);
        self.stream.store(stream as u8 + 1, Ordering::Relaxed);
        value
    }
}

pub(crate) fn zeroed_shadow(kind: i32, flags: u64, size: u64) -> Option<Box<[Shadow]>> {
    let shadowed = kind == PTR_CUDA && flags & MR_SIGNAL_NEVER_RESET != 0;
    let zero = || Shadow { value: AtomicU64::new(0), stream: AtomicU8::new(0) };
    shadowed.then(|| (0..size / 8).map(|_| zero()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(id: u64, size: u64) -> Region {
        Region { id, base: 0x1000, size, cpu: false, device: true, shadow: None, peers: Box::default() }
    }

    #[test]
    fn ranges_are_checked_without_overflow() {
        let region = region(0, 100);
        assert_eq!(region.at(0, 100), Some(0x1000));
        assert_eq!(region.at(100, 0), Some(0x1064));
        assert_eq!(region.at(1, 100), None);
        assert_eq!(region.at(u64::MAX, 2), None);
        assert_eq!(region.at(2, u64::MAX), None);
        assert_eq!(region.at_peer(0, 0, 1), None);
    }

    #[test]
    fn handles_are_numbers_that_are_looked_up() {
        let regions = Regions::default();
        let id = regions.next();
        assert!(regions.of_handle(handle_of(id)).is_err(), "not inserted yet");
        regions.insert(region(id, 8));
        assert_eq!(regions.of_handle(handle_of(id)).unwrap().size, 8);
        assert_eq!(regions.next(), 1);
        assert!(regions.of_handle(0).is_err() && regions.of_handle(usize::MAX).is_err());
        regions.remove(id);
        assert!(regions.of_handle(handle_of(id)).is_err());
    }

    #[test]
    fn who_follows_sees_each_change_and_keeps_nothing() {
        let (regions, mut own) = (Regions::default(), Followed::default());
        let (one, two) = (regions.next(), regions.next());
        own.follow(&regions);
        assert!(own.get(one).is_none());
        regions.insert(region(one, 8));
        regions.insert(region(two, 16));
        assert!(own.get(two).is_none(), "not before it follows");
        own.follow(&regions);
        assert_eq!((own.get(one).unwrap().size, own.get(two).unwrap().size), (8, 16));
        assert!(own.get(2).is_none() && own.get(u64::MAX).is_none());
        let gone = regions.remove(one).unwrap();
        assert_eq!(Arc::strong_count(&gone), 2);
        own.follow(&regions);
        assert!(own.get(one).is_none() && own.get(two).is_some());
        assert_eq!(Arc::strong_count(&gone), 1);
        let last = own.get(two).map(Arc::downgrade).unwrap();
        regions.clear();
        own.follow(&regions);
        assert!(last.upgrade().is_none());
    }

    #[test]
    fn staging_is_for_payload_that_nobody_can_fetch() {
        assert!(needs_staging(PTR_CUDA as u32, 0, 8, false));
        assert!(!needs_staging(PTR_CUDA as u32, 0, 8, true));
        assert!(!needs_staging(PTR_CUDA as u32, MR_SIGNAL_NEVER_RESET, 8, false));
        assert!(!needs_staging(1, 0, 4096, false) && needs_staging(1, 0, 1 << 20, false));
    }
}
