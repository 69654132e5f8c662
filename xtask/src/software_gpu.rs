//! Tests that want GPUs, on GPUs in software (`tests/software-gpu`).

use crate::gpu_kit::built;
use crate::wheels::target;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::Command;

/// Test executables and what is chosen of each. Kernels run about a thousand times as long as on a device, so not everything is.
const CHECKS: &[(&str, &[&str])] = &[
    ("gpu_buffers", &[]),
    ("results", &["gpu"]),
    ("foreign_views", &["gpu"]),
    ("combine_input", &["gpu"]),
    ("bad_input", &["gpu"]),
    ("faults", &["gpu"]),
    ("ops", &["random_rounds::gpu", "ranks_are_processes::gpu", "gaps_are_zeroed_over_old_rows::gpu"]),
    ("collectives", &["gpu", "--skip", "every_rank_gets_the_oracles_bits"]),
];

/// Builds the library.
fn library() -> Result<PathBuf> {
    let made = built("dev", &["-p", "software-gpu"])?;
    let library = made.into_iter().find(|(_, place)| place.ends_with("libsoftware_gpu.so"));
    std::path::absolute(library.context("the build of software-gpu made no library")?.0).map_err(Into::into)
}

/// The commands that run the checks, with the library built. `cargo` makes a command of cargo's with arguments.
pub fn checks(cargo: impl Fn(&[&str]) -> Result<Command>) -> Result<Vec<Command>> {
    let library = library()?;
    let check = |test: &str, filters: &[&str]| {
        let mut command =
            cargo(&["test", "--workspace", "--all-features", "--no-fail-fast", "--test", test, "--"])?;
        command.args(filters);
        command.envs([("CUDA_VMM_DRIVER", &library), ("DEEPEP_NVRTC", &library)]);
        // Kernels that were compiled for this driver are kept apart from those of devices.
        command.env("XDG_CACHE_HOME", std::path::absolute(target().join("software-gpu"))?);
        command.envs([("CUDA_VMM_DISABLE_MULTICAST", "1"), ("REQUIRE_GPU", "1")]);
        command.envs([
            ("SOFTWARE_GPU_MULTIPROCESSORS", "5"),
            ("DEEPEP_TEST_ROUNDS", "24"),
            ("DEEPEP_TEST_REPLAYS", "20"),
            ("DEEPEP_TEST_RANKS", "2"),
        ]);
        Ok(command)
    };
    CHECKS.iter().map(|(test, filters)| check(test, filters)).collect()
}
