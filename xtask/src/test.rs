//! `xtask test`: everything CI runs, in the order that fails fastest.

use crate::software_gpu;
use crate::wheels::{self, root, run};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Numbers of ranks whose kernels are compiled by nvcc: one, which has fewer kernels, and the fewest that has all of them.
const AOT_RANKS: &str = "1,2";

/// Runs every step and says how long each took.
pub fn test() -> Result<()> {
    let start = Instant::now();
    step("fmt", || run(Command::new("cargo").args(["fmt", "--all", "--check"]).current_dir(root())))?;
    // Before the first build with all features: that of deepep-core's kernels needs nvcc.
    step("wheels", || crate::nccl_bindgen::fetch().and_then(|()| wheels::nvcc().map(drop)))?;
    step("clippy", || {
        cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])
    })?;
    let mut counts = Counts::default();
    step("test", || {
        counts = counted(&mut command(&["test", "--workspace", "--all-features", "--no-fail-fast"])?)?;
        Ok(())
    })?;
    step("software GPU", || {
        for mut check in software_gpu::checks(command)? {
            let found = counted(&mut check)?;
            if found.passed == 0 || found.skipped > 0 {
                bail!("{check:?} was to run tests on GPUs in software: {found:?}");
            }
            counts.add(&found);
        }
        Ok(())
    })?;
    step("doc", || {
        let arguments = ["doc", "--workspace", "--all-features", "--no-deps"];
        run(command(&arguments)?.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("package", || {
        let names = published()?;
        let mut arguments = vec!["package", "--allow-dirty", "--no-verify", "--quiet"];
        arguments.extend(names.iter().flat_map(|name| ["-p", name.as_str()]));
        cargo(&arguments)?;
        names.iter().try_for_each(|name| packaged(name))
    })?;
    step("abi-check", || crate::abi_check::check(false))?;
    println!("xtask test: all steps passed in {} s", start.elapsed().as_secs());
    if counts.skipped > 0 {
        println!("xtask test: what was skipped, and why, is in the lines above that start with `skipped:`");
    }
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
    Ok(())
}

/// The members of the workspace that are published: all that do not say otherwise.
fn published() -> Result<Vec<String>> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml"))?;
    let list = manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let (members, _) = list.context("the workspace lists no members")?;
    let mut names = Vec::new();
    for name in members.split(',').map(|member| member.trim().trim_matches('"')).filter(|n| !n.is_empty()) {
        let manifest = root().join(name).join("Cargo.toml");
        let text = std::fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
        if !text.lines().any(|line| line.trim() == "publish = false") {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Whether the package holds what must go with it: both licences and a page for the registry, which says whose it is not.
fn packaged(name: &str) -> Result<()> {
    let out = Command::new("cargo")
        .args(["package", "--list", "--allow-dirty", "-p", name])
        .current_dir(root())
        .output()
        .context("could not start cargo")?;
    let list = String::from_utf8_lossy(&out.stdout);
    for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
        if !list.lines().any(|line| line == file) {
            bail!("the package of {name} has no {file}");
        }
    }
    let page = std::fs::read_to_string(root().join(name).join("README.md"))?;
    if !page.contains("Not affiliated with NVIDIA") {
        bail!("the README of {name} does not say that it is not affiliated with NVIDIA");
    }
    Ok(())
}

/// Outcomes of tests. A skipped test is one that passed and said `skipped: …`.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Reads one line of the test runner's output.
    fn read(&mut self, line: &str) {
        if line.starts_with("skipped: ") {
            self.skipped += 1;
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            let number = |what: &str| {
                let before = counts.split(what).next().filter(|before| before.len() < counts.len());
                before.and_then(|text| text.split([' ', ';']).rfind(|word| !word.is_empty())?.parse().ok())
            };
            self.passed += number(" passed").unwrap_or(0);
            self.failed += number(" failed").unwrap_or(0);
        }
    }
}

/// Runs tests, shows what they print, and counts.
fn counted(command: &mut Command) -> Result<Counts> {
    // One stream, so that lines keep their order.
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().context("could not start cargo")?;
    // The pipe ends when the last process that holds it does; this one must not.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut counts = Counts::default();
    for line in BufReader::new(reader).lines() {
        let line = line?;
        println!("{line}");
        counts.read(&line);
    }
    // To the runner a skipped test passed.
    counts.passed = counts.passed.saturating_sub(counts.skipped);
    let status = child.wait()?;
    if !status.success() {
        bail!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
    }
    Ok(counts)
}

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("xtask test: {name} ...");
    let start = Instant::now();
    work().with_context(|| format!("step {name} failed"))?;
    println!("xtask test: {name} passed in {} s", start.elapsed().as_secs());
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run(&mut command(arguments)?)
}

/// Cargo, for builds in which nvcc compiles deepep-core's kernels. The same for all steps, so that it does so once.
fn command(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(root());
    if std::env::var_os("NVCC").is_none() {
        command.env("NVCC", wheels::nvcc()?);
    }
    if std::env::var_os("DEEPEP_AOT_RANKS").is_none() {
        command.env("DEEPEP_AOT_RANKS", AOT_RANKS);
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_is_what_does_not_say_otherwise() {
        let names = published().unwrap();
        assert!(
            names.iter().any(|name| name == "cuda-vmm") && names.iter().any(|name| name == "deepep-core")
        );
        assert!(
            !names.iter().any(|name| matches!(name.as_str(), "xtask" | "benches" | "tests")),
            "{names:?}"
        );
    }

    #[test]
    fn outcomes_are_counted() {
        let mut counts = Counts::default();
        for line in [
            "skipped: gpu: no CUDA device",
            "test result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "skipped: other: no CUDA device",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ] {
            counts.read(line);
        }
        assert_eq!(counts, Counts { passed: 11, failed: 2, skipped: 2 });
    }
}
