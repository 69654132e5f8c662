//! The script that runs the peers beside us: what it reads, its table, and its run with this program on the host backend.

use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

/// Says so past the test runner's capture of what passing tests print.
fn skipped(reason: &str) {
    let line = format!("\nskipped: peers: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).ok();
}

#[test]
fn the_script_reads_compares_and_refuses() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/peers/test_results.py");
    if !script.exists() {
        return skipped("benches/peers is not part of this package");
    }
    let mut command = Command::new("python3");
    command.arg("-B").arg(&script).arg(env!("CARGO_BIN_EXE_deepep")).stdin(Stdio::null());
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => return skipped("there is no python3"),
        Err(error) => panic!("python3: {error}"),
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert_eq!(out.trim(), "peers: all checks passed");
}
