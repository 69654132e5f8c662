//! The crate on an NCCL and a CUDA driver in software, and on the real libraries without a GPU.

mod errors;
mod fake;
mod life;
mod no_gpu;
