//! What the program `deepep` is made of, apart from its command line: routing, recorded or generated; input values that every rank can
//! compute for every other; tensors where a backend uses them; and an oracle that says what each rank must receive.
//!
//! The workspace's tests use the same pieces. For an engine, the library to use is `deepep-core`.

pub mod bench;
pub mod gpu;
pub mod inputs;
pub mod job;
pub mod oracle;
mod parallel;
pub mod process;
pub mod routing;
pub mod tensors;
pub mod trace;
