//! nvcc: found, and asked for machine code.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A CUDA compiler that answers.
pub(crate) struct Nvcc {
    path: PathBuf,
    version: String,
}

impl Nvcc {
    /// The compiler that `NVCC` names, or `nvcc` on `PATH`, or that of the toolkit in `CUDA_HOME`, `CUDA_PATH` or `/usr/local/cuda`.
    pub(crate) fn find() -> Result<Self, String> {
        let mut tried = Vec::new();
        for path in candidates()? {
            match version(&path) {
                Ok(version) => return Ok(Self { path, version }),
                Err(problem) => tried.push(format!("{}: {problem}", path.display())),
            }
        }
        Err(format!(
            "the feature `aot` of deepep-core compiles kernels with nvcc, and none was found ({}).\n\
             Install the CUDA toolkit (or the Python packages nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt and nvidia-cuda-runtime) and \
             name its nvcc in NVCC; or build without the feature; or set DEEPEP_AOT_ARCHS to nothing, which embeds nothing.",
            tried.join("; ")
        ))
    }

    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Compiles one source to machine code for one architecture. Says so if registers do not suffice.
    pub(crate) fn compile(
        &self,
        source: &Path,
        include: &[&Path],
        arch: &str,
        image: &Path,
    ) -> Result<(), String> {
        let mut command = Command::new(&self.path);
        command.args(["-std=c++17", "-cubin", "-Xptxas=-warn-spills", &format!("-arch={arch}")]);
        for folder in include {
            command.arg("-I").arg(folder);
        }
        command.arg("-o").arg(image).arg(source);
        let output = command.output().map_err(|error| format!("{}: {error}", self.path.display()))?;
        let said = text(&output);
        if output.status.success() {
            let spills = said.lines().filter(|line| line.starts_with("ptxas warning"));
            spills.for_each(|line| println!("cargo::warning={arch}, {}: {line}", source.display()));
            return Ok(());
        }
        Err(format!(
            "nvcc {} could not compile for {arch} ({}):\n{command:?}\n{said}",
            self.version, output.status
        ))
    }
}

/// The environment's, as the crate `cc` reads it (`NVCC`, and its variants for a target); behind it the usual places.
fn candidates() -> Result<Vec<PathBuf>, String> {
    let mut build = cc::Build::new();
    build.cuda(true).ccbin(false).no_default_flags(true).inherit_rustflags(false).warnings(false);
    let tool = build.try_get_compiler().map_err(|error| format!("looking for nvcc: {error}"))?;
    // An explicit choice is not replaced by another compiler; a variable that is set to nothing is none.
    if ![Path::new("nvcc"), Path::new("")].contains(&tool.path()) {
        return Ok(vec![tool.path().to_owned()]);
    }
    let mut all = vec![PathBuf::from("nvcc")];
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
        all.extend(
            env::var_os(name).filter(|home| !home.is_empty()).map(|home| Path::new(&home).join("bin/nvcc")),
        );
    }
    all.push(PathBuf::from("/usr/local/cuda/bin/nvcc"));
    Ok(all)
}

/// `13.0.88`, from nvcc's own description.
fn version(path: &Path) -> Result<String, String> {
    let output = Command::new(path).arg("--version").output().map_err(|error| error.to_string())?;
    let said = text(&output);
    let version = said.split(", V").nth(1).and_then(|rest| rest.split_whitespace().next());
    match version {
        Some(version) if output.status.success() => Ok(version.to_owned()),
        _ => Err(format!("`--version` ended with {} and says {said:?}", output.status)),
    }
}

fn text(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}
