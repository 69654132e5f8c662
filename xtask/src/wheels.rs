//! Wheels from PyPI, downloaded and unpacked once under `target/wheels`.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// The folder of build outputs that this run of cargo uses.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Unpacked contents of `name==version`, downloading them if they are not there yet.
///
/// `WHEELS_DIR` names a folder to use in place of `target/wheels`.
pub fn wheel(name: &str, version: &str) -> Result<PathBuf> {
    unpacked(&format!("{name}-{version}"), &[(name, version)])
}

/// nvcc with everything that it looks for beside itself, by its absolute path: build scripts run in other folders.
pub fn nvcc() -> Result<PathBuf> {
    let parts = [
        ("nvidia-cuda-nvcc", "13.0.88"),
        ("nvidia-nvvm", "13.0.88"),
        ("nvidia-cuda-crt", "13.0.88"),
        ("nvidia-cuda-runtime", "13.0.96"),
    ];
    Ok(std::path::absolute(unpacked("nvcc-13.0.88", &parts)?.join("nvidia/cu13/bin/nvcc"))?)
}

/// Contents of several wheels in one folder.
fn unpacked(folder: &str, wheels: &[(&str, &str)]) -> Result<PathBuf> {
    let cache = std::env::var_os("WHEELS_DIR").map_or_else(|| target().join("wheels"), PathBuf::from);
    let done = cache.join(folder);
    if done.is_dir() {
        return Ok(done);
    }
    std::fs::create_dir_all(&cache)?;
    let work = cache.join(format!(".{folder}.{}", std::process::id()));
    if work.exists() {
        std::fs::remove_dir_all(&work)?;
    }
    let specs: Vec<_> = wheels.iter().map(|(name, version)| format!("{name}=={version}")).collect();
    let all = specs.join(" ");
    eprintln!("xtask: fetching {all}");
    // The folder is the cache: pip's own would hold every wheel a second time.
    run(Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"])
        .args(["--no-cache-dir"])
        .args(["--disable-pip-version-check", "--root-user-action=ignore", "--target"])
        .arg(&work)
        .args(&specs))
    .with_context(|| format!("{all} from PyPI"))?;
    // Another run may have been faster; its copy is as good as ours.
    if std::fs::rename(&work, &done).is_err() && !done.is_dir() {
        bail!("could not move {} to {}", work.display(), done.display());
    }
    std::fs::remove_dir_all(&work).ok();
    Ok(done)
}

/// The CUDA headers of one runtime wheel.
pub struct CudaHeaders {
    /// Version of the wheel.
    pub version: &'static str,
    /// `CUDA_VERSION` of its `cuda.h`.
    pub cuda: u32,
    /// Wheel that holds them.
    wheel: &'static str,
    /// Folder of the headers inside the wheel.
    include: &'static str,
}

impl CudaHeaders {
    /// Folder with `cuda.h`, downloaded if need be.
    pub fn include(&self) -> Result<PathBuf> {
        Ok(wheel(self.wheel, self.version)?.join(self.include))
    }
}

/// Header versions that the bindings are compared with. The first one makes the types (it has every struct we use in the
/// form that all versions share), the last one the signatures (it has every function).
pub const CUDA_HEADERS: &[CudaHeaders] = &[
    CudaHeaders {
        version: "13.0.96",
        cuda: 13000,
        wheel: "nvidia-cuda-runtime",
        include: "nvidia/cu13/include",
    },
    CudaHeaders {
        version: "12.9.79",
        cuda: 12090,
        wheel: "nvidia-cuda-runtime-cu12",
        include: "nvidia/cuda_runtime/include",
    },
    CudaHeaders {
        version: "13.5.37",
        cuda: 13050,
        wheel: "nvidia-cuda-runtime",
        include: "nvidia/cu13/include",
    },
];

/// Runs a command and turns a failure into an error that shows it.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("could not start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}
