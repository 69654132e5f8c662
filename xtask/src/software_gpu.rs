//! Tests that want GPUs, on GPUs in software (`tests/software-gpu`).

use crate::wheels::{run, target};
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::Command;

/// Test executables and what is chosen of them. Kernels run about a thousand times as long as on a device, so not everything is.
struct Check {
    tests: &'static [&'static str],
    filters: &'static [&'static str],
}

const CHECKS: &[Check] = &[
    Check { tests: &["gpu_buffers"], filters: &[] },
    Check { tests: &["results", "foreign_views", "combine_input", "bad_input", "faults"], filters: &["gpu"] },
    Check {
        tests: &["ops"],
        filters: &["random_rounds::gpu", "ranks_are_processes::gpu", "gaps_are_zeroed_over_old_rows::gpu"],
    },
    Check { tests: &["collectives"], filters: &["gpu", "--skip", "every_rank_gets_the_oracles_bits"] },
];

/// Builds the library; `cargo` is a command without arguments.
fn library(cargo: &mut Command) -> Result<PathBuf> {
    run(cargo.args(["build", "-p", "software-gpu"]))?;
    let path = std::path::absolute(target().join("debug/libsoftware_gpu.so"))?;
    if !path.is_file() {
        bail!("the build of software-gpu made no {}", path.display());
    }
    Ok(path)
}

/// The commands that run the checks, once the library is built. `cargo` makes a command of cargo's with arguments.
pub fn checks(cargo: impl Fn(&[&str]) -> Result<Command>) -> Result<Vec<Command>> {
    let library = library(&mut cargo(&[])?)?;
    let check = |check: &Check| {
        let mut command = cargo(&["test", "--workspace", "--all-features", "--no-fail-fast"])?;
        command.args(check.tests.iter().flat_map(|&test| ["--test", test]));
        command.arg("--").args(check.filters);
        command.envs([("CUDA_VMM_DRIVER", &library), ("DEEPEP_NVRTC", &library)]);
        // Kernels that were compiled for this driver are kept apart from those of devices.
        command.env("XDG_CACHE_HOME", std::path::absolute(target().join("software-gpu"))?);
        command.envs([("CUDA_VMM_DISABLE_MULTICAST", "1"), ("REQUIRE_GPU", "1")]);
        command.envs([
            ("SOFTWARE_GPU_MULTIPROCESSORS", "5"),
            ("DEEPEP_TEST_ROUNDS", "24"),
            ("DEEPEP_TEST_RANKS", "2"),
        ]);
        Ok(command)
    };
    CHECKS.iter().map(check).collect()
}
