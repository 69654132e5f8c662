//! Which launches a device holds at once.
//!
//! A launch starts when all its blocks fit beside those of the launches that run, one block to a multiprocessor: more fit for some kernels, and
//! nobody was promised that they do. Kernels that wait for each other and do not fit together then wait in vain, as they would on a device. A launch of
//! more blocks than there are multiprocessors runs alone.

use crate::core::Core;
use crate::status::{Outcome, lock};
use crate::stream::{TICK, bounded};
use std::sync::{Condvar, Mutex, PoisonError};

/// The blocks that a device holds.
#[derive(Debug)]
pub(crate) struct Residency {
    multiprocessors: u64,
    blocks: Mutex<u64>,
    left: Condvar,
}

/// Blocks of a launch, held by the device as long as this lives.
pub(crate) struct Resident<'a> {
    on: &'a Residency,
    blocks: u64,
}

impl Residency {
    pub(crate) fn new(multiprocessors: u64) -> Self {
        Self { multiprocessors, blocks: Mutex::default(), left: Condvar::new() }
    }

    /// Waits until the device holds a launch, for the time that a stream waits at most.
    pub(crate) fn enter(&self, core: &Core, blocks: u64) -> Outcome<Resident<'_>> {
        bounded(core, || {
            let mut now = lock(&self.blocks);
            if *now == 0 || *now + blocks <= self.multiprocessors {
                *now += blocks;
                return Ok(true);
            }
            drop(self.left.wait_timeout(now, TICK).unwrap_or_else(PoisonError::into_inner));
            Ok(false)
        })?;
        Ok(Resident { on: self, blocks })
    }
}

impl Drop for Resident<'_> {
    fn drop(&mut self) {
        *lock(&self.on.blocks) -= self.blocks;
        self.on.left.notify_all();
    }
}
