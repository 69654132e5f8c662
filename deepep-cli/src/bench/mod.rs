//! What `deepep bench` is made of.

pub mod ceilings;
pub mod stats;
