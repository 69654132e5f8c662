//! Where processes of one test meet: files in a folder that all of them know.

use crate::process::PATIENCE;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// One rank's place in a meeting of several processes. One that goes because its test fails tells the others, which wait for it no longer.
#[derive(Debug)]
pub struct Meeting {
    folder: PathBuf,
    rank: u32,
    size: u32,
    patience: Duration,
}

impl Meeting {
    /// The place of `rank` among `size` processes that all know `folder`.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>, rank: u32, size: u32) -> Self {
        Self { folder: folder.into(), rank, size, patience: PATIENCE * 2 }
    }

    /// Leaves something for the others, under a name that is used once.
    pub fn leave(&self, name: &str, bytes: &[u8]) {
        // Renamed into place, so that nobody sees half of it.
        let unfinished = self.folder.join(format!(".{name}.{}", self.rank));
        fs::write(&unfinished, bytes).expect("writing into the test's folder");
        fs::rename(unfinished, self.folder.join(name)).expect("renaming inside the test's folder");
    }

    /// Waits for what somebody leaves under a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Vec<u8> {
        let file = self.folder.join(name);
        self.wait_for(&file);
        fs::read(file).expect("reading in the test's folder")
    }

    /// Waits until all processes have come to the meeting of this name, which is used once.
    pub fn meet(&self, name: &str) {
        self.leave(&format!("{name}.{}", self.rank), b"");
        for rank in 0..self.size {
            self.wait_for(&self.folder.join(format!("{name}.{rank}")));
        }
    }

    fn failed(&self, rank: u32) -> PathBuf {
        self.folder.join(format!("failed.{rank}"))
    }

    fn wait_for(&self, file: &Path) {
        let end = Instant::now() + self.patience;
        while !file.exists() {
            // Who has failed comes to no meeting any more.
            if let Some(other) = (0..self.size).find(|&other| self.failed(other).exists()) {
                panic!("rank {}: rank {other} has failed, and {} was not there", self.rank, file.display());
            }
            assert!(Instant::now() < end, "rank {}: nobody left {} in time", self.rank, file.display());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if std::thread::panicking() {
            fs::write(self.failed(self.rank), b"").ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::scratch;

    #[test]
    fn who_waits_for_one_that_failed_is_told() {
        let (folder, _) = scratch("meeting");
        let begin = Instant::now();
        let ranks: Vec<_> = [0, 1].map(|rank| (rank, folder.path().to_path_buf())).into();
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|(rank, folder)| {
                std::thread::spawn(move || {
                    let meeting = Meeting::new(folder, rank, 2);
                    meeting.meet("first");
                    assert_ne!(rank, 1, "on purpose");
                    meeting.meet("second");
                })
            })
            .collect();
        let failures =
            threads.into_iter().map(|thread| *thread.join().unwrap_err().downcast::<String>().unwrap());
        let failures: Vec<_> = failures.collect();
        assert!(failures[0].contains("rank 0: rank 1 has failed"), "{failures:?}");
        assert!(failures[1].contains("on purpose"), "{failures:?}");
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
        // One that goes in peace says nothing.
        let (folder, _) = scratch("meeting");
        drop(Meeting::new(folder.path(), 1, 2));
        assert!(folder.path().read_dir().unwrap().next().is_none());
    }
}
