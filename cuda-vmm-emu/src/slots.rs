//! Which emulator a C function belongs to.
//!
//! A function of a driver's table gets no context pointer, so each emulator of the process has a number, and there is one copy of
//! every function for each number. A number is taken while its emulator, or a driver made from it, exists.

use crate::core::Core;
use crate::status::{lock, read, write};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// Emulators that one process may have at a time.
pub(crate) const SLOTS: usize = 64;

static CURRENT: [RwLock<Weak<Core>>; SLOTS] = [const { RwLock::new(Weak::new()) }; SLOTS];
static TAKEN: Mutex<[bool; SLOTS]> = Mutex::new([false; SLOTS]);
static RETURNED: Condvar = Condvar::new();

/// A taken number; returned when dropped.
pub(crate) struct Slot(usize);

impl Slot {
    /// Takes a free number, waiting for one until the deadline.
    pub(crate) fn take(deadline: Duration) -> Option<Self> {
        let end = Instant::now() + deadline;
        let mut taken = lock(&TAKEN);
        loop {
            if let Some(number) = taken.iter().position(|taken| !taken) {
                taken[number] = true;
                return Some(Self(number));
            }
            let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            taken = RETURNED.wait_timeout(taken, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn number(&self) -> usize {
        self.0
    }

    /// Says whose calls arrive under this number.
    pub(crate) fn publish(&self, core: &Arc<Core>) {
        *write(&CURRENT[self.0]) = Arc::downgrade(core);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *write(&CURRENT[self.0]) = Weak::new();
        lock(&TAKEN)[self.0] = false;
        RETURNED.notify_one();
    }
}

/// Whose calls arrive under a number.
pub(crate) fn current(number: usize) -> Option<Arc<Core>> {
    read(CURRENT.get(number)?).upgrade()
}
