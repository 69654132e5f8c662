//! Windows, device communicators and their ends on real GPUs, one process a rank.
//!
//! `NCCL_GIN_LIBRARY` names the NCCL to test. Multicast is switched off in every process. With fewer GPUs than ranks, ranks share them, which
//! NCCL does from 2.30 on; before that one rank runs alone, and what needs more of them is skipped, visibly.

mod communicators;
mod cycles;
mod exchange;
mod faults;
mod heap;
mod rank;
