//! nccl-gin-soft without NCCL and without a GPU: its tables are driven as NCCL drives them, on memory of the software driver, between real processes.

mod batches;
mod board;
mod delays;
mod failures;
mod harness;
mod leave;
mod loss;
mod memory;
mod namespaces;
mod order;
mod suite;
mod teardown;
mod threads;
mod wire;
