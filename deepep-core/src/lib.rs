//! Mixture-of-experts communication over memory that all ranks of a host share.
//!
//! Every rank holds tokens. *Dispatch* sends each token to the ranks that own its top-k experts; the experts work; *combine*
//! brings their outputs back to where the tokens came from and sums them. All of it goes through one symmetric heap: a range
//! of memory of the same layout on every rank, which every other rank can read and write.
//!
//! # Backends
//!
//! On GPUs (Hopper or later, linked by NVLink or shared) operations are kernels on the caller's streams; where there is none they run on CPUs over a
//! driver in software, with the same protocol and the same bits. [`BackendKind::Auto`] takes GPUs if it finds some. Ranks are threads or
//! processes of one host; several may share a GPU.
//!
//! On GPUs a call returns before it has run, and its tensors belong to it until then: its [`Event`] says when, and
//! [`ElasticBuffer::synchronize`] when everything has. A dispatch waits only for its counts, and [without
//! them](DispatchArgs::without_counts) for nothing: then calls can be captured in a [CUDA graph](#cuda-graphs) and replayed, with other routes
//! each time. What goes wrong on the device is reported by the first wait after it. Without a stream of the caller's, operations run on one
//! of the buffer's own, which is not ordered with the device's default stream.
//!
//! # Several buffers
//!
//! Operations of one buffer are ordered by the buffer, whatever streams they are given. Nothing orders those of two, or of a buffer and
//! [`Collectives`], and a kernel that waits for another rank holds the multiprocessors that it has: if rank 0's device starts an operation of buffer
//! A first and rank 1's one of buffer B, each can wait for a kernel that can't start, until the deadline breaks both. So on each device the operations of all
//! buffers and collectives *run one after the other, in the same order on all ranks*: give all of them one stream, or make each wait for the one before by
//! its event (`after`). The same where ranks share a device, for the operations of the ranks' buffers: a rank's share of the multiprocessors is
//! reckoned for one operation at a time. What waits for nobody, such as the caller's own kernels, may run beside them.
//!
//! # CUDA graphs
//!
//! Dispatches without counts, cached dispatches, combines, barriers and collectives can be captured (of these the authors have
//! replayed the kernels of dispatch and combine, in measurements): give them the stream that is being captured. The graph then has kernels with
//! the addresses of this call's tensors and of the slots of its result and handle; the buffer does not learn of replays. So the caller keeps these
//! rules:
//!
//! * **Keep what was captured.** The [`Dispatched`], every [`Handle`] and [`CombineInput`] of captured calls, the tensors that they were given, and the buffer (or the
//!   collectives) stay until the graph is destroyed and its last replay has run. A result that is dropped earlier frees its slot for a later dispatch, and
//!   each replay then overwrites what that one delivered. A buffer that is [closed](ElasticBuffer::close) earlier unmaps memory under the replay's
//!   kernels: closing and [`synchronize`](ElasticBuffer::synchronize) wait for direct calls only. One that is dropped and not closed can't know whether a graph will
//!   run once more, and its memory stays until the process ends.
//! * **Order replays and direct calls.** On one stream they are in order. On different ones, record an event after the one and let the other wait for it:
//!   a direct call by its `after` or by its stream, a replay by its stream. Two replays at a time are two operations at a time.
//! * **Capture alike.** Captured dispatches count: a handle's number, which all ranks compare, is that of the call on its rank. All ranks capture the same calls, equally
//!   often, in the same places among their direct calls, also if a graph is never launched; and they launch the same graphs equally often in the same order.
//! * **Events stay inside.** An [`Event`] of a captured call, and one that a captured call waits for, belong to that capture: other streams that are captured with it can wait
//!   for it, nothing else. To know that a replay has run, record an event of your own after its launch.
//! * **Look for failures yourself.** A replay that failed is reported by the first direct call or wait after it; [`Dispatched::check`] tells whether the newest replay
//!   delivered everything, once it has run.
//!
//! # Feature `aot`
//!
//! By default the build needs no CUDA, and kernels are compiled when they are first needed, by NVRTC. With the feature `aot` nvcc compiles them when
//! the crate is built, and NVRTC is needed for those only that the build was not asked for; [`jit::Embedded`] says how to choose. All of them,
//! for two architectures, are some 700 kernels and tens of megabytes, and take minutes of processor time: who needs few numbers of ranks names them.

mod backend;
pub mod bootstrap;
mod buffer;
mod collectives;
mod combine_input;
mod config;
mod deadline;
pub mod device;
pub mod domain;
pub mod error;
mod handle;
pub mod jit;
pub mod layout;
mod left_behind;
mod ops;
mod stream;
pub mod symmetric;
pub mod tensor;
mod tune;

pub use backend::Counts;
pub use bootstrap::Bootstrap;
pub use buffer::{Builder, ElasticBuffer};
pub use collectives::{Collectives, CollectivesBuilder};
pub use combine_input::CombineInput;
pub use config::{BackendKind, Config, Reduction, Transfer};
pub use error::{Error, Result};
pub use handle::{Dispatched, Handle};
pub use ops::{CombineArgs, DispatchArgs};
pub use stream::{Event, EventRef, StreamRef};
pub use tune::CollectiveLimits;
