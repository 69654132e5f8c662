//! Development tasks of the workspace: `cargo xtask <task>`.

mod bindgen;
mod cuda_functions;
mod wheels;

use anyhow::{Result, bail};

const USAGE: &str = "\
cargo xtask <task>

  test        everything CI runs: fmt, clippy, build, tests, doc, abi-check
  abi-check   compares the bindings with several versions of NVIDIA's headers
  bindgen     generates the bindings of cuda-vmm-sys again
";

fn main() -> Result<()> {
    let task = std::env::args().nth(1);
    match task.as_deref() {
        Some("bindgen") => bindgen::write(),
        Some(other) => bail!("no task named {other}\n\n{USAGE}"),
        None => bail!("{USAGE}"),
    }
}
