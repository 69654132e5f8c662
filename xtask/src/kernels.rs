//! Compiles every kernel for every architecture we name, with NVRTC from PyPI, and refuses those that use local memory.

use crate::wheels;
use anyhow::{Context, Result, bail};
use deepep_core::jit::{Arch, Cache, Compiler, Program};

const NVRTC: (&str, &str) = ("nvidia-cuda-nvrtc", "13.0.88");
const ARCHITECTURES: [Arch; 2] = [Arch::new(9, 0), Arch::new(10, 0)];
const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

/// Compiles all, and keeps the results in `folder` if one is given: a cache that can be copied to a machine of the same NVRTC version.
pub fn check(folder: Option<&str>) -> Result<()> {
    let library = wheels::wheel(NVRTC.0, NVRTC.1)?.join("nvidia/cu13/lib/libnvrtc.so.13");
    let compiler = Compiler::find(Some(&library)).context("opening NVRTC from PyPI")?;
    let cache = folder.map_or_else(Cache::disabled, Cache::at);
    let mut wasteful = Vec::new();
    let mut count = 0;
    for arch in ARCHITECTURES {
        for program in RANKS.into_iter().flat_map(Program::all) {
            let cubin = compiler.compile_cached(program, arch, &cache)?;
            count += 1;
            for kernel in cubin.resources() {
                println!("{arch} {program:?}: {} registers, {} bytes", kernel.registers, cubin.image().len());
                if !kernel.in_registers() {
                    wasteful.push(format!("{arch} {program:?}: {kernel:?}"));
                }
            }
        }
    }
    if !wasteful.is_empty() {
        bail!("kernels with local memory:\n{}", wasteful.join("\n"));
    }
    println!("{count} kernels compiled, none uses local memory");
    Ok(())
}
