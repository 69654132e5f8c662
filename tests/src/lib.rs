//! What the integration tests share: other processes with roles, deadlines, and GPUs that may not be there.

pub mod backend;
pub mod good;
pub mod gpu;
pub mod kernel;
pub mod meeting;
pub mod multicast;
pub mod nccl_headers;
pub mod nvrtc;
pub mod process;
pub mod ranks;
pub mod sides;
pub mod team;
pub mod tensors;
