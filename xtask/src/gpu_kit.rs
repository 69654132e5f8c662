//! `xtask gpu-kit`: the executables that checks on GPUs need in one folder, for a machine without cargo.

use crate::wheels::root;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The script that runs the checks; it names executables by their place in the kit.
const SCRIPT: &str = "tests/gpu-checks.sh";

/// Crates with something to run on a GPU, and the targets that are built of them.
const BUILDS: &[&[&str]] = &[
    &["-p", "deepep-core", "--lib", "--tests"],
    &["-p", "deepep-cli", "--bins"],
    &["-p", "integration-tests", "--tests"],
    &["-p", "nccl-gin", "-p", "nccl-gin-soft", "--lib", "--examples"],
    &["-p", "benches", "--benches"],
];

/// Builds, and puts what the script names into `folder`: `bin/`, `bench/`, `example/`, `lib/` (unit tests, the plugin), `test/`; and the
/// script.
pub fn make(folder: Option<&str>) -> Result<()> {
    let folder = Path::new(folder.context("into which folder?")?);
    let mut missing = named()?;
    for arguments in BUILDS {
        for (from, place) in built("kit", arguments)? {
            if !missing.remove(&place) {
                continue;
            }
            let to = folder.join(&place);
            std::fs::create_dir_all(to.parent().expect("every file has a folder"))?;
            std::fs::copy(&from, &to).with_context(|| format!("{} to {}", from.display(), to.display()))?;
            println!("{}", place.display());
        }
    }
    if !missing.is_empty() {
        bail!("{SCRIPT} names what no build makes: {missing:?}");
    }
    std::fs::copy(root().join(SCRIPT), folder.join("gpu-checks.sh"))?;
    Ok(())
}

/// The executables that the script names, by their place in the kit.
fn named() -> Result<BTreeSet<PathBuf>> {
    let out = Command::new("bash")
        .arg(root().join(SCRIPT))
        .args(["-n", "all"])
        .output()
        .context("could not start bash")?;
    let text = String::from_utf8(out.stdout)?;
    if !out.status.success() {
        bail!("{SCRIPT} -n all ended with {}", out.status);
    }
    let places = text.split_whitespace().filter_map(|word| {
        // The plugin is named by its full path.
        let from = word.find("lib/lib").filter(|_| word.ends_with(".so")).unwrap_or(0);
        let folder = word[from..].split_once('/')?.0;
        ["bin", "bench", "example", "lib", "test"].contains(&folder).then(|| PathBuf::from(&word[from..]))
    });
    Ok(places.collect())
}

/// Runs a build and says where its executables and libraries for others to load lie, and where they go in a kit.
pub fn built(profile: &str, arguments: &[&str]) -> Result<Vec<(PathBuf, PathBuf)>> {
    let output = Command::new("cargo")
        .args(["build", "--profile", profile, "--message-format=json-render-diagnostics"])
        .args(arguments)
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()
        .context("could not start cargo")?;
    if !output.status.success() {
        bail!("cargo build {} ended with {}", arguments.join(" "), output.status);
    }
    let mut files = Vec::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        files.extend(carried(&serde_json::from_str(line)?));
    }
    Ok(files)
}

/// What a message of cargo says was made, if it is for the kit: an executable, or the plugin that NCCL loads.
fn carried(message: &Value) -> Option<(PathBuf, PathBuf)> {
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let target = &message["target"];
    let kind = target["kind"].as_array()?.iter().filter_map(Value::as_str).collect::<Vec<_>>();
    if let Some(executable) = message["executable"].as_str() {
        let folder = kind.iter().find(|k| ["bin", "bench", "example", "test"].contains(k)).unwrap_or(&"lib");
        return Some((executable.into(), Path::new(folder).join(target["name"].as_str()?)));
    }
    if !kind.contains(&"cdylib") {
        return None;
    }
    let library =
        message["filenames"].as_array()?.iter().filter_map(Value::as_str).find(|f| f.ends_with(".so"))?;
    Some((library.into(), Path::new("lib").join(Path::new(library).file_name()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the script runs are targets of this workspace.
    #[test]
    fn the_script_names_what_exists() {
        let named = named().unwrap();
        for place in &named {
            let (kind, name) = place.to_str().unwrap().split_once('/').unwrap();
            let source = match kind {
                "test" => [format!("tests/tests/{name}.rs"), format!("tests/tests/{name}/main.rs")],
                "bench" => [format!("benches/benches/{name}.rs"), String::new()],
                "example" => {
                    [format!("nccl-gin/examples/{name}.rs"), format!("nccl-gin-soft/examples/{name}/main.rs")]
                }
                "lib" => {
                    let package = name.trim_start_matches("lib").trim_end_matches(".so").replace('_', "-");
                    [package + "/src/lib.rs", String::new()]
                }
                _ => ["deepep-cli/src/main.rs".to_owned(), String::new()],
            };
            assert!(
                source.iter().any(|file| !file.is_empty() && root().join(file).is_file()),
                "{}",
                place.display()
            );
        }
        assert!(named.len() > 20 && named.contains(Path::new("lib/libnccl_gin_soft.so")), "{named:?}");
    }

    #[test]
    fn messages_of_cargo_are_understood() {
        let message = |text: &str| carried(&serde_json::from_str(text).unwrap());
        let test = r#"{"reason":"compiler-artifact","target":{"kind":["test"],"name":"ops"},"executable":"/x/ops-1","filenames":["/x/ops-1"]}"#;
        assert_eq!(message(test).unwrap(), ("/x/ops-1".into(), "test/ops".into()));
        let unit = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"core"},"executable":"/x/core-1","filenames":[]}"#;
        assert_eq!(message(unit).unwrap(), ("/x/core-1".into(), "lib/core".into()));
        let plugin = r#"{"reason":"compiler-artifact","target":{"kind":["lib","cdylib"],"name":"p"},"executable":null,"filenames":["/x/libp.rlib","/x/libp.so"]}"#;
        assert_eq!(message(plugin).unwrap(), ("/x/libp.so".into(), "lib/libp.so".into()));
        assert!(message(r#"{"reason":"build-finished","success":true}"#).is_none());
        let library = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"p"},"executable":null,"filenames":["/x/libp.rlib"]}"#;
        assert!(message(library).is_none());
    }

    /// What the script says of executables that print this, and of names that it does not know.
    #[cfg(unix)]
    #[test]
    fn what_ran_nothing_has_not_passed() {
        use std::os::unix::fs::PermissionsExt;
        let kit = tempfile::tempdir().unwrap();
        let script = kit.path().join("gpu-checks.sh");
        std::fs::copy(root().join(SCRIPT), &script).unwrap();
        std::fs::create_dir(kit.path().join("test")).unwrap();
        let judge = |what: &str| {
            let place = kit.path().join("test/vmm");
            std::fs::write(&place, format!("#!/bin/bash\nprintf '{what}'\n")).unwrap();
            std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o755)).unwrap();
            let mut command = Command::new("bash");
            let out = command.arg(&script).arg("memory/vmm").current_dir(kit.path()).output().unwrap();
            let text = String::from_utf8(out.stdout).unwrap();
            (out.status.code(), text.split_whitespace().next().unwrap_or_default().to_owned())
        };
        let result = |passed: usize, failed: usize| {
            format!("test result: ok. {passed} passed; {failed} failed; 0 ignored\\n")
        };
        assert_eq!(judge(&result(2, 0)), (Some(0), "ok".into()));
        assert_eq!(judge(&("skipped: a: b\\n".to_owned() + &result(2, 0))), (Some(0), "ok".into()));
        assert_eq!(judge(&("skipped: a: b\\n".repeat(2) + &result(1, 0))), (Some(1), "SKIPPED".into()));
        assert_eq!(judge(&result(0, 0)), (Some(1), "SKIPPED".into()));
        let out = Command::new("bash").arg(&script).args(["memory", "mmeory"]).output().unwrap();
        assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(2), &b"nothing is named mmeory\n"[..]));
    }
}
