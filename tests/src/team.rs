//! Teams of multicast whose members are threads, each with a software driver of its own, as if it were a process.

use crate::multicast::GRANULE;
use cuda_vmm::multicast::{Options, SocketStar, Team};
use cuda_vmm::{Cuda, Error, PhysicalMemory, Properties, Result};
use cuda_vmm_emu::{Config, Emulator};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Far more than a team takes here; whoever needs it waits for what does not come.
pub const LONG: Duration = Duration::from_secs(30);

/// Options of a team whose members are not slow.
#[must_use]
pub fn options() -> Options {
    Options::default().timeout(LONG).attempts(3).pause(Duration::from_millis(5))
}

/// The ends of a star for a number of ranks.
#[must_use]
pub fn stars(ranks: usize) -> Vec<SocketStar> {
    let pairs: Vec<_> = (1..ranks).map(|_| UnixStream::pair().expect("a member of a test's team")).collect();
    let (near, far): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let members = far.into_iter().zip(1..).map(|(socket, rank)| SocketStar::member(rank, ranks, socket));
    std::iter::once(SocketStar::root(near)).chain(members).collect()
}

/// One member: its rank, its driver, and its end of the agreement.
#[derive(Debug)]
pub struct Member {
    /// Its rank, and its device.
    pub rank: usize,
    /// Its driver.
    pub emulator: Emulator,
    /// The same, initialised.
    pub cuda: Cuda,
    /// Its end of the agreement.
    pub star: SocketStar,
}

impl Member {
    /// Memory of the device with the member's rank.
    #[must_use]
    pub fn memory(&self, size: usize) -> PhysicalMemory {
        let properties = Properties::device(self.rank as i32).shareable();
        PhysicalMemory::create(&self.cuda, size, &properties).expect("a member of a test's team")
    }

    /// The team of all members' memory.
    ///
    /// # Errors
    /// As [`Team::create`].
    pub fn team(&mut self) -> Result<Team> {
        let memory = self.memory(GRANULE);
        Team::create(&[memory], &mut self.star, &options())
    }
}

/// Runs a body on all members at the same time, and checks that each leaves nothing behind.
pub fn members<T: Send>(
    ranks: usize,
    config: impl Fn(usize) -> Config,
    body: impl Fn(&mut Member) -> T + Sync,
) -> Vec<T> {
    let members: Vec<_> = stars(ranks)
        .into_iter()
        .enumerate()
        .map(|(rank, star)| {
            let emulator = Emulator::new(config(rank)).expect("a member of a test's team");
            let cuda = Cuda::with_driver(emulator.driver()).expect("a member of a test's team");
            Member { rank, emulator, cuda, star }
        })
        .collect();
    let run = &|mut member: Member| {
        let result = body(&mut member);
        member.emulator.assert_empty();
        result
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = members.into_iter().map(|member| scope.spawn(move || run(member))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a member of a test's team")).collect()
    })
}

/// The errors of all members that wanted a team with a plan of their own.
pub fn errors(ranks: usize, plan: impl Fn(&mut Member) -> Result<Team> + Sync) -> Vec<Error> {
    members(ranks, |_| Config::new(ranks), |member| plan(member).expect_err("no team"))
}
