//! Raw CUDA driver API.
