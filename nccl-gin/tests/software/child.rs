//! Tests that need a process of their own: an ignored test of this executable, run with more environment.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs the ignored test `name` in a new process and fails with what it printed if it does not pass in two minutes.
pub fn passes(name: &str, environment: &[(&str, &std::ffi::OsStr)]) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().ok();
            panic!("{name} does not come back");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{name} with {environment:?}: {}\n{text}",
        output.status
    );
}
