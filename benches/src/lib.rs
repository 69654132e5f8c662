//! What the benchmarks share: the drivers they run on, and the raw calls they compare with.

pub mod backend;
mod front;
pub mod nccl;
pub mod quick;
pub mod raw;
pub mod watched;
