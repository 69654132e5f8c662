//! GPUs in software: one library that is both a CUDA driver and an NVRTC, so that whole programs of this workspace run where there is no GPU.
//!
//! `CUDA_VMM_DRIVER` and `DEEPEP_NVRTC` name the library. The driver is `cuda-vmm-emu`; NVRTC is g++, which compiles kernels with CPU versions of
//! the files that wrap a device's instructions (`arch/`), and the runtime beside those runs them, one fiber a thread. So everything is real but the
//! device: host code, processes that share memory, kernels' logic. Not seen is what a weak memory order does, and times mean nothing.
//!
//! `SOFTWARE_GPU_DEVICES` (2) and `SOFTWARE_GPU_MULTIPROCESSORS` (12) say what there is. Devices have a compute capability that none has (9.9),
//! so that nobody's machine code for real ones is used. Needs g++.

mod driver;
mod image;
mod nvrtc;
