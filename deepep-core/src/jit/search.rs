//! Where NVRTC may be.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// File names by which the dynamic linker may know NVRTC, newest first. The unversioned name belongs to a toolkit's build files.
pub(super) const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// Directories, below a Python environment's `site-packages`, in which NVIDIA's wheels put it.
const WHEELS: [&str; 3] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib"];

/// Everything worth trying, in order: bare names, CUDA installations, Python environments. Only files that exist, after the names.
pub(super) fn candidates() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let mut directories = Vec::new();
    for home in [variable("CUDA_HOME"), variable("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))] {
        directories.extend(home.map(|home| home.join("lib64")));
    }
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    for bin in std::env::split_paths(&path).filter(|bin| bin.join("python3").exists()) {
        prefixes.extend(bin.parent().map(Path::to_path_buf));
    }
    prefixes.extend(variable("HOME").map(|home| home.join(".local")));
    prefixes.push(PathBuf::from("/usr/local"));
    for prefix in prefixes {
        directories.extend(wheel_directories(&prefix));
    }
    for directory in directories {
        found.extend(NAMES.iter().map(|name| directory.join(name)).filter(|file| file.exists()));
    }
    let mut seen = std::collections::HashSet::new();
    found.retain(|file| seen.insert(file.clone()));
    found
}

/// Wheel directories of all Python versions below a prefix.
fn wheel_directories(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else { return Vec::new() };
    let mut pythons: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().and_then(OsStr::to_str).is_some_and(|n| n.starts_with("python3")))
        .collect();
    pythons.sort();
    let sites = ["site-packages", "dist-packages"];
    let mut directories = Vec::new();
    for python in pythons {
        for site in sites {
            directories.extend(WHEELS.iter().map(|wheel| python.join(site).join(wheel)));
        }
    }
    directories
}

/// NVRTC's helper library beside it. NVRTC opens it by bare name and finds it only if it is loaded or on the linker's path.
pub(super) fn builtins(nvrtc: &Path, major: i32, minor: i32) -> Option<PathBuf> {
    let file = nvrtc.parent()?.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
    (file.is_absolute() && file.exists()).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_below_a_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        assert!(wheel_directories(dir.path()).contains(&lib));
        assert!(wheel_directories(&dir.path().join("absent")).is_empty());
        assert_eq!(builtins(&lib.join("libnvrtc.so.13"), 13, 0), None);
        let file = lib.join("libnvrtc-builtins.so.13.0");
        std::fs::write(&file, b"").unwrap();
        assert_eq!(builtins(&lib.join("libnvrtc.so.13"), 13, 0), Some(file));
        assert_eq!(builtins(Path::new("libnvrtc.so.13"), 13, 0), None);
    }

    #[test]
    fn bare_names_come_first() {
        let all = candidates();
        assert_eq!(all[0], Path::new(NAMES[0]));
        assert_eq!(all[1], Path::new(NAMES[1]));
    }
}
