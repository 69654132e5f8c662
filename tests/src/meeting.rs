//! Where processes of one test meet: files in a folder that all of them know.

use crate::process::PATIENCE;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// One rank's place in a meeting of several processes.
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

    fn wait_for(&self, file: &Path) {
        let end = Instant::now() + self.patience;
        while !file.exists() {
            assert!(Instant::now() < end, "rank {}: nobody left {} in time", self.rank, file.display());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
