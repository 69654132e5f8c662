//! Build script: with the feature `aot`, compiles the kernels with nvcc and embeds the machine code. Without it there is nothing to do, and no
//! CUDA toolkit is needed.

#[cfg(feature = "aot")]
mod compile;
#[cfg(feature = "aot")]
mod error;
#[cfg(feature = "aot")]
mod nvcc;
#[cfg(feature = "aot")]
mod request;

// The list of kernels and their generated header exist once: in the crate's own files, which this script is made of, too.
#[cfg(feature = "aot")]
mod jit;
#[cfg(feature = "aot")]
#[allow(dead_code, unused_imports)]
#[path = "../src/layout/mod.rs"]
mod layout;

fn main() -> std::process::ExitCode {
    println!("cargo::rerun-if-changed=build/main.rs");
    #[cfg(feature = "aot")]
    if let Err(problem) = compile::run() {
        for line in problem.to_string().lines() {
            println!("cargo::error={line}");
        }
        return std::process::ExitCode::FAILURE;
    }
    std::process::ExitCode::SUCCESS
}
