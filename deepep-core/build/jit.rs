//! The part of the crate's `jit` module that says which kernels there are, and what they are made of.

#[allow(dead_code)]
#[path = "../src/jit/collective.rs"]
mod collective;
#[allow(dead_code)]
#[path = "../src/jit/params.rs"]
mod params;
#[allow(dead_code)]
#[path = "../src/jit/sizes.rs"]
mod sizes;
#[allow(dead_code)]
#[path = "../src/jit/source.rs"]
mod source;

pub(crate) use source::Program;
