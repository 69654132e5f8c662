//! What the test's processes share besides the plugin: NCCL's bootstrap, as far as it is needed.

use integration_tests::process::eventually;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const SIZE: usize = 128 << 10;
const HANDLES: usize = 4096;
const RANKS: usize = 64;
const ROUNDS: usize = 8;

/// A page of words in a file that all processes of a test map.
pub struct Board {
    base: *mut u8,
    barriers: std::cell::Cell<u64>,
    round: std::cell::Cell<usize>,
}

// SAFETY: the mapping is never undone, and all access to it is atomic or behind barriers. The cells are used by one rank's thread.
unsafe impl Send for Board {}

impl Board {
    /// Makes the file.
    pub fn create(path: &Path) {
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path).unwrap();
        file.set_len(SIZE as u64).unwrap();
    }

    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping of a file that has this size and is not truncated while the test runs.
        let base =
            unsafe { mmap(std::ptr::null_mut(), SIZE, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        Self { base: base.cast(), barriers: 0.into(), round: 0.into() }
    }

    /// A word of the board. The first 64 are free for tests.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < HANDLES / 8);
        // SAFETY: inside the mapping and aligned; all processes access it as an atomic word.
        unsafe { AtomicU64::from_ptr(self.base.add(index * 8).cast()) }
    }

    /// Waits for all ranks.
    pub fn barrier(&self, ranks: usize) {
        let count = self.barriers.get() + 1;
        self.barriers.set(count);
        let word = self.word(100);
        word.fetch_add(1, Ordering::AcqRel);
        eventually("a barrier of all ranks", || word.load(Ordering::Acquire) >= count * ranks as u64);
    }

    /// Everyone's 128 bytes.
    pub fn all_gather(&self, rank: usize, ranks: usize, handle: &[u8; 128]) -> Vec<[u8; 128]> {
        assert!(ranks <= RANKS);
        let round = self.round.get();
        self.round.set(round + 1);
        let base = HANDLES + (round % ROUNDS) * RANKS * 128;
        // SAFETY: each rank writes its own place, and reads the others' only behind the barrier; a place is used again after as many rounds as there
        // are barriers between.
        unsafe { self.base.add(base + rank * 128).cast::<[u8; 128]>().write(*handle) };
        self.barrier(ranks);
        // SAFETY: as above.
        let all = (0..ranks).map(|one| unsafe { self.base.add(base + one * 128).cast::<[u8; 128]>().read() });
        let all = all.collect();
        self.barrier(ranks);
        all
    }
}

const _: () = assert!(HANDLES + ROUNDS * RANKS * 128 <= SIZE);
