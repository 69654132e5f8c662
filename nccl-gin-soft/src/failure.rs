//! The first failure of a connection: it stays one, and every thread and caller learns of it.

use crate::error::Error;
use crate::log::warning;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Connections of this process that have failed and are not closed yet.
static FAILED: AtomicUsize = AtomicUsize::new(0);

/// Whether any open connection of this process has failed.
pub(crate) fn any() -> bool {
    FAILED.load(Ordering::Relaxed) > 0
}

#[derive(Default)]
pub(crate) struct Failure {
    /// Checked on the data path.
    failed: AtomicBool,
    first: OnceLock<Error>,
}

impl Failure {
    /// Keeps the error if it is the first one, and logs it.
    pub(crate) fn set(&self, error: Error) {
        if self.first.set(error).is_ok() {
            FAILED.fetch_add(1, Ordering::Relaxed);
            self.failed.store(true, Ordering::Release);
            if let Some(error) = self.first.get() {
                warning!("{error}");
            }
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// An error, if there has been one.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.has_failed() {
            return Ok(());
        }
        let text = self.first.get().map_or_else(|| "it is not known how".into(), ToString::to_string);
        Err(Error::Failed(text))
    }
}

impl Drop for Failure {
    fn drop(&mut self) {
        if *self.failed.get_mut() {
            FAILED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
