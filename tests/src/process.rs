//! Tests that need several processes: the test's own executable runs again, for one test, with a role in its environment.
//!
//! ```no_run
//! use integration_tests::process::{Peer, role};
//!
//! // In a `#[test] fn two_processes()`:
//! if let Some(role) = role("two_processes") {
//!     // This is the other process.
//!     println!("I am {role}");
//!     return;
//! }
//! let peer = Peer::spawn("two_processes", "reader", &[]);
//! peer.finish();
//! ```

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TEST: &str = "INTEGRATION_TEST";
const ROLE: &str = "INTEGRATION_ROLE";

/// Longest time that a test waits for another process, unless it says otherwise.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The role of this process in a test, if it was spawned for it.
#[must_use]
pub fn role(test: &str) -> Option<String> {
    let mine = std::env::var(TEST).is_ok_and(|name| name == test);
    mine.then(|| std::env::var(ROLE).unwrap_or_default())
}

/// Another process that runs one test of this executable. Killed when dropped, so that a failed test leaves none behind.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    name: String,
    patience: Duration,
    /// Reads what the process prints, as it prints it: a full pipe would stop the process.
    output: Option<JoinHandle<String>>,
}

impl Peer {
    /// Starts a process for a role, with more environment. `test` is the test's full name inside its file.
    #[must_use]
    pub fn spawn(test: &str, role: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("the test's own executable"))
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env(ROLE, role)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("starting another process of the test");
        let mut pipe = child.stdout.take().expect("the pipe that was asked for");
        let output = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).ok();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Self { child, name: format!("{test} as {role}"), patience: PATIENCE, output: Some(output) }
    }

    /// Waits longer, or less long.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The process's id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process with SIGKILL and reaps it.
    pub fn kill(mut self) {
        self.child.kill().expect("killing another process of the test");
        self.child.wait().expect("reaping another process of the test");
    }

    /// Waits for the process to end, and fails the test if it failed, did not run the test, or takes too long.
    pub fn finish(mut self) {
        let status = self.wait();
        let output =
            self.output.take().map(|reader| reader.join().expect("reading another process's output"));
        let output = output.unwrap_or_default();
        assert!(status.success(), "{}: {status}\n{output}", self.name);
        assert!(output.contains("1 passed"), "{} ran no test:\n{output}", self.name);
    }

    fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + self.patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("waiting for another process of the test") {
                return status;
            }
            assert!(Instant::now() < end, "{} did not end within {:?}", self.name, self.patience);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

/// A path for a socket or file of one test, unique to this process, in a folder that goes with the returned guard.
#[must_use]
pub fn scratch(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    (folder, path)
}

/// Waits until `condition` holds, and fails the test if it does not within [`PATIENCE`].
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not come true within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
