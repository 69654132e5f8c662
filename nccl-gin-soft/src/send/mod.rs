//! The sender's side of a ring: operations become commands, in order, as far as there is room; the rest waits here.
//!
//! NCCL's threads make no CUDA call here. What needs one (payload that is staged) is left to the agent.

mod outbound;
mod staging;

pub(crate) use outbound::{Operation, Outbound, Pump};
