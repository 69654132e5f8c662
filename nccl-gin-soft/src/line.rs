//! Cache lines that threads do not share by accident.

use std::ops::Deref;

/// A value with cache lines of its own: what one thread writes again and again is not in the way of others that look at the neighbours.
/// Two lines, as processors fetch them in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Line<T>(pub(crate) T);

impl<T> Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
