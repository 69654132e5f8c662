//! The processes of a test, each a rank with the software driver.

use crate::board::Board;
use crate::delays;
use crate::wire::Wire;
use cuda_vmm_emu::sys::Driver;
use cuda_vmm_emu::{Config, Emulator};
use integration_tests::process::{Peer, role, scratch};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::time::Duration;

pub const MIB: usize = 1 << 20;
/// Contexts of a rank.
pub const CONTEXTS: i32 = 2;
/// The longest wait of a rank.
pub const LIMIT: Duration = Duration::from_secs(50);

const BOARD: &str = "GIN_TEST_BOARD";
const DELAYS: &str = "GIN_TEST_DELAYS";
const TABLE: &str = "GIN_TEST_TABLE";

/// Runs `body` on each of `ranks` processes. In the test's own process, starts them and waits.
pub fn ranks(test: &str, ranks: usize, environment: &[(&str, &str)], body: impl FnOnce(Rank)) {
    if let Some(role) = role(test) {
        body(Rank::of_role(&role));
        return;
    }
    for peer in start(test, ranks, environment).1 {
        peer.finish();
    }
}

/// Starts the processes of a test. The folder must outlive them.
pub fn start(test: &str, ranks: usize, environment: &[(&str, &str)]) -> (tempfile::TempDir, Vec<Peer>) {
    let (folder, path) = scratch("board");
    Board::create(&path);
    let path = path.to_str().expect("a path in UTF-8").to_owned();
    let environment: Vec<(&str, &str)> =
        [(BOARD, path.as_str())].into_iter().chain(environment.iter().copied()).collect();
    let peers = (0..ranks)
        .map(|rank| {
            Peer::spawn(test, &format!("{rank}/{ranks}"), &environment).patience(Duration::from_secs(100))
        })
        .collect();
    (folder, peers)
}

/// With delays and reordering in all streams.
pub const DELAYED: (&str, &str) = (DELAYS, "1");
/// Through an older table.
pub const V12: (&str, &str) = (TABLE, "12");
/// Through an older table.
pub const V13: (&str, &str) = (TABLE, "13");

/// A process, before it is connected.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub board: Board,
    pub emulator: Emulator,
    pub driver: Driver,
}

impl Rank {
    fn of_role(role: &str) -> Self {
        let (rank, ranks) = role.split_once('/').expect("rank/ranks");
        Self::from_environment(rank.parse().unwrap(), ranks.parse().unwrap())
    }

    /// With the board that the test's own process made.
    pub fn from_environment(rank: usize, ranks: usize) -> Self {
        let path = PathBuf::from(std::env::var_os(BOARD).expect("the board's path"));
        Self::new(rank, ranks, Board::open(&path))
    }

    pub fn new(rank: usize, ranks: usize, board: Board) -> Self {
        let emulator = Emulator::new(Config::new(2)).unwrap();
        let mut driver = emulator.driver();
        if std::env::var_os(DELAYS).is_some() {
            driver = delays::wrap(driver, 0x5eed_0000 + rank as u64);
        }
        nccl_gin_soft::set_driver(driver.clone());
        let rank = Self { rank, ranks, board, emulator, driver };
        rank.enter();
        rank
    }

    /// The same rank once more, for a second connection of its process: with a board of its own. All ranks ask for it.
    pub fn twin(&self) -> Self {
        let path = PathBuf::from(std::env::var_os(BOARD).expect("the board's path")).with_extension("twin");
        if self.rank == 0 {
            Board::create(&path);
        }
        self.barrier();
        let (board, driver) = (Board::open(&path), self.driver.clone());
        Self { rank: self.rank, ranks: self.ranks, board, emulator: self.emulator.clone(), driver }
    }

    /// Makes this rank's context current on the calling thread.
    pub fn enter(&self) {
        let mut context = null_mut();
        // SAFETY: the pointers are to locals; device ordinals are below the emulator's two.
        unsafe {
            self.driver.cuInit(0).unwrap();
            self.driver.cuDevicePrimaryCtxRetain(&mut context, self.device()).unwrap();
            self.driver.cuCtxSetCurrent(context).unwrap();
        }
    }

    pub fn device(&self) -> i32 {
        self.rank as i32 % 2
    }

    /// Leaves the context of the calling thread.
    pub fn leave(&self) {
        // SAFETY: gives back what `enter` retained; no context is current after it.
        unsafe {
            self.driver.cuCtxSetCurrent(null_mut()).unwrap();
            self.driver.cuDevicePrimaryCtxRelease(self.device()).unwrap();
        }
    }

    /// The end of a process: nothing that the plugin or the test made is left in the driver.
    pub fn finish(self) {
        self.leave();
        self.emulator.assert_empty();
    }

    /// The version of the table that this process was told to use.
    pub fn connect(self) -> Wire {
        let version = std::env::var(TABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(14);
        Wire::connect(self, version)
    }

    pub fn barrier(&self) {
        self.board.barrier(self.ranks);
    }
}
