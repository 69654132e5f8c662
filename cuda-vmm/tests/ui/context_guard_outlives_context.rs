//! A binding does not outlive its context.

use cuda_vmm::{Bound, Context};

fn escape(context: Context) -> Bound<'static> {
    context.bind().unwrap()
}

fn main() {}
