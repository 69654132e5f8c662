//! Development tasks of the workspace: `cargo xtask <task>`.

mod abi_check;
mod attributes;
mod bindgen;
mod cuda_functions;
mod gpu_kit;
mod kernels;
mod nccl_abi;
mod nccl_bindgen;
mod nccl_functions;
mod software_gpu;
mod test;
mod wheels;

use anyhow::{Result, bail};

const USAGE: &str = "\
cargo xtask <task>

  test        everything CI runs: fmt, clippy, build, tests, doc, abi-check
  abi-check   compares the bindings with several versions of NVIDIA's headers; `abi-check all` with more of NCCL's
  gpu-kit     builds what a machine with GPUs and no cargo needs for the checks of docs/gpu-checks.md, into a folder
  kernels     compiles all kernels with NVRTC from PyPI, into a folder if one is named
  bindgen     generates the bindings of cuda-vmm-sys and nccl-gin-sys again, and a table of cuda-vmm-emu
";

fn main() -> std::process::ExitCode {
    match task(std::env::args().nth(1).as_deref()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn task(name: Option<&str>) -> Result<()> {
    match name {
        Some("abi-check") => abi_check::check(std::env::args().nth(2).as_deref() == Some("all")),
        Some("bindgen") => bindgen::write().and_then(|()| nccl_bindgen::write()),
        Some("gpu-kit") => gpu_kit::make(std::env::args().nth(2).as_deref()),
        Some("kernels") => kernels::check(std::env::args().nth(2).as_deref()),
        Some("test") => test::test(),
        Some(other) => bail!("no task named {other}\n\n{USAGE}"),
        None => bail!("which task?\n\n{USAGE}"),
    }
}
