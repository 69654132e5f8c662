//! nccl-gin-soft with a real NCCL on real GPUs: kernels put, get and signal between processes that NCCL takes for nodes of their own.
//!
//! They need NCCL (`NCCL_GIN_LIBRARY` names one among several), NVRTC (`NVRTC_LIBRARY`) and CUDA's headers (`CUDA_INCLUDE`), and the plugin, which
//! cargo builds beside this executable (`GIN_SOFT_LIBRARY` names another place).

#[path = "../gin_soft/board.rs"]
mod board;
mod driver;
mod failures;
mod figures;
mod gpu;
#[path = "../../../nccl-gin-soft/examples/gin_put/nvrtc.rs"]
mod nvrtc;
mod properties;
mod segments;
mod suite;
mod world;
