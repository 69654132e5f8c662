//! Ranges made of several pieces of physical memory.

mod growable;
mod segmented;

pub use growable::GrowableRange;
pub use segmented::{Segment, SegmentedRange, SegmentedRangeBuilder};
