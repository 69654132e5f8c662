//! One more address for the heap: a multicast address, behind which the device memory of all ranks lies.

use std::time::Duration;

use cuda_vmm::multicast::{Options, SocketStar, Team, support};
use cuda_vmm::{Location, Support, multicast_disabled_by};

use super::Heap;
use super::memory::device_memory;
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::agree_with;
use crate::bootstrap::sockets::connect_neighbours;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::left_behind;

const PHASE: &str = "joining the ranks' memory behind a multicast address";

/// A heap's memory behind one multicast address.
///
/// Dropped without [`close`](Self::close) it stays until the process ends: the other ranks may still use the address, and this rank's memory
/// behind it.
pub(crate) struct Multicast {
    address: u64,
    /// Gone once it is closed.
    team: Option<Team>,
    star: SocketStar,
}

/// Joins the memory of all ranks of the host behind an address; collective. The inner error says why there is none, the same way on all
/// ranks: nothing was created where it is switched off, where a rank's device doesn't support it, or where ranks share a device.
///
/// # Errors
/// Those of the bootstrap.
pub(crate) fn join<B: Bootstrap + ?Sized>(
    bootstrap: &B,
    domain: &Domain,
    heap: &Heap,
) -> Result<Result<Multicast, String>> {
    // Asked first, so that no rank connects for nothing.
    let mine = obstacle(heap);
    let told = agree_with(bootstrap, PHASE, Ok(()), |()| mine.clone().unwrap_or_default().into_bytes())?.1;
    if let Some(reason) = first(&told) {
        return Ok(Err(reason));
    }
    let mut streams = connect_neighbours(bootstrap, domain.neighbours())?;
    let (me, ranks) = (domain.local_rank(), streams.len());
    let mut star = match streams.iter_mut().next().and_then(Option::take) {
        Some(root) => SocketStar::member(me, ranks, root),
        None => SocketStar::root(streams.into_iter().flatten().collect()),
    };
    let memory: Vec<_> = device_memory(heap).cloned().into_iter().collect();
    let team = Team::create(&memory, &mut star, &Options::default().timeout(bootstrap.timeout()));
    // A rank that ran out of time may be alone in that: all use the address, or none.
    let why = team.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let told = agree_with(bootstrap, PHASE, Ok(()), |()| why.into_bytes())?.1;
    Ok(match (first(&told), team) {
        // Nobody has used the address, so that it may go without asking.
        (Some(reason), _) => Err(reason),
        (None, Ok(team)) => Ok(Multicast { address: team.address().get(), team: Some(team), star }),
        (None, Err(error)) => Err(error.to_string()),
    })
}

/// What is in the way on this rank.
fn obstacle(heap: &Heap) -> Option<String> {
    if let Some(variable) = multicast_disabled_by() {
        return Some(format!("{variable} in the environment switches it off"));
    }
    let Some(memory) = device_memory(heap) else { return Some("the heap is not from here".into()) };
    let Location::Device(ordinal) = memory.location() else {
        return Some("the memory is not a device's".into());
    };
    let answer = memory.cuda().device(ordinal).and_then(|device| support(&device));
    match answer {
        Ok(Support::Claimed) => None,
        Ok(other) => Some(format!("device {ordinal} doesn't support it ({other:?})")),
        Err(error) => Some(error.to_string()),
    }
}

/// The first rank's reason.
fn first(told: &[Vec<u8>]) -> Option<String> {
    let (rank, reason) = told.iter().enumerate().find(|(_, reason)| !reason.is_empty())?;
    Some(format!("rank {rank}: {}", String::from_utf8_lossy(reason)))
}

impl Multicast {
    /// The address, as this rank's device sees it.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Gives the address up with the consent of all ranks, which use it no more.
    pub(crate) fn close(mut self, timeout: Duration) -> Result<()> {
        let Some(team) = self.team.take() else { return Ok(()) };
        team.close(&mut self.star, timeout).map_err(|rejected| {
            self.team = Some(rejected.object);
            Error::from(rejected.error)
        })
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        if let Some(team) = self.team.take() {
            let bytes = team.size();
            std::mem::forget(team);
            left_behind::say(format_args!(
                "a multicast address of {bytes} bytes was not given up by all ranks, and stays until the process ends (close the collectives)"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use cuda_vmm::Cuda;
    use cuda_vmm::sys::{CUresult, Function};
    use cuda_vmm_emu::{Config, Emulator};

    use super::*;
    use crate::bootstrap::{ThreadBootstrap, thread_group};
    use crate::symmetric::{self, Request};
    use crate::tensor::Space;

    const VALUES: [f32; 3] = [1.5, -2.0, 7.25];
    const SOON: Duration = Duration::from_secs(20);

    /// Ranks as threads with a device each (or all with device 0), and what they make of it.
    fn on_ranks<T: Send>(
        emulator: &Emulator,
        apart: bool,
        body: impl Fn(&ThreadBootstrap, &Domain, &Heap) -> T + Sync,
    ) -> Vec<T> {
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        let rank = |bootstrap: ThreadBootstrap| {
            let domain = Domain::discover(&bootstrap).unwrap();
            let device = if apart { domain.local_rank() as i32 } else { 0 };
            let request =
                Request { device_bytes: 100, host_bytes: 0, hybrid: false, device, space: Space::Host };
            let heap = symmetric::allocate(&bootstrap, &domain, &cuda, &request).unwrap();
            body(&bootstrap, &domain, &heap)
        };
        let group = thread_group(2, SOON).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = group.into_iter().map(|b| scope.spawn(|| rank(b))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Rank 1 stores to the address, and both find the values in the heaps of both.
    fn store_and_look(emulator: &Emulator, bootstrap: &ThreadBootstrap, heap: &Heap, address: u64) {
        bootstrap.barrier().unwrap();
        if heap.rank() == 1 {
            emulator.multimem_store(1, address + 40, &VALUES).unwrap();
        }
        bootstrap.barrier().unwrap();
        for rank in 0..2 {
            let at = heap.address(rank, 40).unwrap() as *const f32;
            // SAFETY: inside the heap, which the emulator maps for the CPU, and aligned; nobody writes it now.
            assert_eq!(unsafe { std::slice::from_raw_parts(at, 3) }, VALUES);
        }
        bootstrap.barrier().unwrap();
    }

    #[test]
    fn a_store_to_the_address_reaches_the_heap_of_every_rank() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let off = multicast_disabled_by();
        on_ranks(&emulator, true, |bootstrap, domain, heap| {
            let joined = join(bootstrap, domain, heap).unwrap();
            if let Some(variable) = off {
                assert!(joined.err().unwrap().contains(variable));
                return;
            }
            let multicast = joined.unwrap_or_else(|reason| panic!("{reason}"));
            store_and_look(&emulator, bootstrap, heap, multicast.address());
            multicast.close(SOON).unwrap();
        });
        emulator.assert_empty();
    }

    #[test]
    fn an_address_that_is_dropped_stays_for_the_other_ranks() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        if let Some(variable) = multicast_disabled_by() {
            use std::io::Write as _;
            // Past the test runner's capture of what passing tests print.
            let test = "an_address_that_is_dropped_stays_for_the_other_ranks";
            writeln!(std::io::stderr(), "skipped: {test}: {variable} switches multicast off").ok();
            return;
        }
        on_ranks(&emulator, true, |bootstrap, domain, heap| {
            let multicast =
                join(bootstrap, domain, heap).unwrap().unwrap_or_else(|reason| panic!("{reason}"));
            let address = multicast.address();
            drop(multicast);
            store_and_look(&emulator, bootstrap, heap, address);
        });
    }

    #[test]
    fn ranks_that_share_a_device_have_none_and_say_so() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let reasons = on_ranks(&emulator, false, |bootstrap, domain, heap| {
            join(bootstrap, domain, heap).unwrap().err().unwrap()
        });
        assert!(reasons.iter().all(|reason| *reason == reasons[0] && !reason.is_empty()), "{reasons:?}");
        emulator.assert_empty();
    }

    #[test]
    fn a_driver_that_refuses_leaves_nothing_behind() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let refusal = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        emulator.faults().fail_nth(Function::cuMulticastBindMem, 2, refusal);
        on_ranks(&emulator, true, |bootstrap, domain, heap| {
            let reason = join(bootstrap, domain, heap).unwrap().err().unwrap();
            assert!(!reason.is_empty());
        });
        emulator.assert_empty();
    }
}
