//! What the integration tests share: other processes with roles, deadlines, and GPUs that may not be there.

pub mod backend;
pub mod gpu;
pub mod process;
pub mod ranks;
