//! The crate on an NCCL and a CUDA driver in software, and on the real libraries without a GPU.

mod child;
mod errors;
mod fake;
mod life;
mod memory;
mod no_gpu;
