//! Borrowed views of the tensors that operations read and write: address, element type, shape, strides, and nothing owned.
//!
//! A view of ordinary memory comes from a slice ([`TensorRef::matrix`], [`TensorRef::strided`] …) and is checked against its
//! length. A view of GPU memory comes from [`TensorRef::from_raw`], which is unsafe, or safely from a library that owns the memory
//! through one of the crate's interop features.

mod dtype;
mod extent;
mod view;

pub use dtype::{DType, Element};
pub(crate) use extent::Home;
pub use extent::{Extent, Space};
pub use view::{TensorMut, TensorRef};
