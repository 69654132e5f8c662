//! GIN for NCCL on hosts without an RDMA NIC: a plugin in software.
//!
//! NCCL's kernels can put, get and signal across nodes by themselves (GIN), if the hosts have RDMA adapters. As soft-RoCE did for RDMA, this
//! plugin makes the same calls work without: on one machine with one or two GPUs, scale-out code can be written, run and tested.
//!
//! What it does:
//! - gives NCCL 2.29.7 to 2.32.3 the PROXY kind of GIN ([`abi`] says which version takes which table), unpatched;
//! - inside a host, passes commands through shared memory, and payload from GPU to GPU: the receiver's copy engines fetch it from the sender's
//!   memory, and stream memory operations write signals and completions behind it. No kernel runs, no user kernel is in the way;
//! - between hosts (or where memory cannot be shared), takes the payload through page-locked memory and TCP;
//! - puts, puts of values, gets, flushes, indexed signals, signals in windows, counters; windows on device memory, on host memory of a NUMA
//!   node, and on several segments; any number of contexts, connections, progress threads and communicators;
//! - turns a lost process or connection into an error of the communicator on all others, within seconds.
//!
//! What it does not: be as fast as a NIC for small messages (about 13 µs one way), or encrypt. Who listens on a network that is not trusted should know that
//! the tokens that keep strangers out travel through NCCL's own bootstrap.
//!
//! # Use
//! Build it (`cargo build --release -p nccl-gin-soft`), and give each process the variables that [`env()`] lists before its first NCCL call:
//!
//! ```
//! for (name, value) in nccl_gin_soft::env("/opt/lib/libnccl_gin_soft.so", "node-1") {
//!     println!("{name}={}", value.to_string_lossy());
//! }
//! ```
//!
//! Processes with different node names are nodes of their own to NCCL, even on one GPU. There they take turns by time slices, 4.5 ms for each round
//! trip: correct, and slow. Under MPS (`nvidia-cuda-mps-control -d`, and `CUDA_MPS_PIPE_DIRECTORY` for all processes) they run beside each other,
//! and a round trip takes tens of microseconds. Several ranks of *one* node on a GPU also need `NCCL_MULTI_RANK_GPU_ENABLE=1` (2.30.5 and later).
//!
//! NCCL 2.29.7 resets signals by writing them, so that each one must be read before it is added to, as signals at an address always are: about three times
//! as slow as indexed signals of later versions. It does not ask for errors either: when a process is lost, communicators of the others say nothing.
//!
//! Memory of a GPU that a process cannot map (it has no peer access to it, or `CUDA_VISIBLE_DEVICES` hides it) goes through the host instead, about ten times
//! as slow; `NCCL_DEBUG=INFO` says so at each registration.
//!
//! # Settings
//! Environment variables, read for each connection:
//!
//! | variable | meaning |
//! |---|---|
//! | `NCCL_GIN_SOFT_TIMEOUT` | seconds that ranks wait for each other when connecting and registering (60) |
//! | `NCCL_GIN_SOFT_SPIN_US` | microseconds that a thread looks for work before it sleeps (5000) |
//! | `NCCL_GIN_SOFT_STAGE=1` | payload goes through host memory even inside a host |
//! | `NCCL_GIN_SOFT_TCP=1` | TCP even inside a host |
//! | `NCCL_GIN_SOFT_ADDR` | addresses for other hosts, separated by commas, in place of the interfaces' |
//! | `NCCL_GIN_SOFT_DIR` | folder for Unix sockets, for containers that share one but no network namespace |
//! | `NCCL_GIN_SOFT_DMABUF=0` | windows of several segments are left to NCCL to refuse |
//! | `NCCL_SOCKET_IFNAME` | interfaces, as for NCCL itself |
//!
//! # Without a GPU
//! As a Rust library, the plugin takes its driver from [`set_driver`]; the tests drive its tables over `cuda-vmm-emu` as NCCL would.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod abi;
mod agent;
mod comm;
mod cuda;
mod entry;
mod env;
mod error;
mod failure;
mod idle;
mod line;
mod log;
mod net;
mod ops;
mod region;
mod ring;
mod send;
mod settings;
mod ticket;

pub use cuda::set_driver;
pub use entry::{GIN_V12, GIN_V13, RMA_V14};
pub use env::{LIBRARY, env};
pub use error::{Error, Result};
