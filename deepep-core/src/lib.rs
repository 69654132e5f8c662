//! Mixture-of-experts communication over memory that all ranks of a host share.
//!
//! Every rank holds tokens. *Dispatch* sends each token to the ranks that own its top-k experts; the experts work; *combine*
//! brings their outputs back to where the tokens came from and sums them. All of it goes through one symmetric heap: a range
//! of memory of the same layout on every rank, which every other rank can read and write.

pub mod bootstrap;
pub mod error;
pub mod layout;
pub mod tensor;

pub use bootstrap::Bootstrap;
pub use error::{Error, Result};
