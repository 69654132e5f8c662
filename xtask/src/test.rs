//! `xtask test`: everything CI runs, in the order that fails fastest.

use crate::wheels::{root, run};
use anyhow::{Context, Result};
use std::process::Command;
use std::time::Instant;

/// Crates that are published; each must package on its own.
const PUBLISHED: &[&str] = &["cuda-vmm-sys"];

/// Runs every step and says how long each took.
pub fn test() -> Result<()> {
    let start = Instant::now();
    step("fmt", || cargo(&["fmt", "--all", "--check"]))?;
    step("clippy", || {
        cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])
    })?;
    step("test", || cargo(&["test", "--workspace", "--all-features"]))?;
    step("doc", || {
        run(Command::new("cargo")
            .args(["doc", "--workspace", "--all-features", "--no-deps"])
            .env("RUSTDOCFLAGS", "-D warnings")
            .current_dir(root()))
    })?;
    step("package", || {
        let mut arguments = vec!["package", "--allow-dirty", "--no-verify", "--quiet"];
        arguments.extend(PUBLISHED.iter().flat_map(|name| ["-p", name]));
        cargo(&arguments)
    })?;
    step("abi-check", crate::abi_check::check)?;
    skipped();
    println!("xtask test: all steps passed in {} s", start.elapsed().as_secs());
    Ok(())
}

/// Says what this machine could not show.
fn skipped() {
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        println!("xtask test: skipped: no CUDA device here, so everything ran on the software driver only");
    }
}

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("xtask test: {name} ...");
    let start = Instant::now();
    work().with_context(|| format!("step {name} failed"))?;
    println!("xtask test: {name} passed in {} s", start.elapsed().as_secs());
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run(Command::new("cargo").args(arguments).current_dir(root()))
}
