//! What kernels do with windows: ours over plain pointers, and NCCL's own barrier.

use crate::rank::Rank;
use integration_tests::gpu::skipped;
use integration_tests::kernel::{Counter, Module, architecture};
use integration_tests::nccl_headers::NcclHeaders;
use integration_tests::nvrtc::Nvrtc;
use nccl_gin::{DevComm, Window};
use std::ffi::c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct Peers([u64; 8]);

/// Kernels that need no header of NCCL.
pub struct Plain<'a> {
    module: Module<'a>,
    driver: &'a cuda_vmm::sys::Driver,
}

impl<'a> Plain<'a> {
    pub fn new(nvrtc: &Nvrtc, driver: &'a cuda_vmm::sys::Driver) -> Self {
        let cubin =
            nvrtc.compile(include_str!("../../kernels/peers.cu"), &architecture(driver), &[]).unwrap();
        Self { module: Module::load(driver, &cubin), driver }
    }

    /// Writes to each peer through its pointer in a window, reads back from there, and checks what the peers wrote here.
    pub fn exchange(&self, rank: &Rank, window: &Window, name: &str, seed: u32) {
        let team = window.team_lsa();
        assert_eq!((team.size, team.rank), (rank.size, rank.rank), "one host is one LSA team");
        let addresses = window.lsa_pointers(0).unwrap();
        for (peer, &address) in addresses.iter().enumerate() {
            assert_eq!(window.peer_pointer(peer as u32, 0).unwrap(), Some(address));
        }
        let addresses: Vec<u64> = addresses.into_iter().map(|address| address as u64).collect();
        self.through(rank, (&addresses, &addresses), window.address() as u64, window.len(), name, seed);
    }

    /// Writes to each rank's memory through the first addresses, reads back through the second ones, and checks what the others wrote into
    /// this rank's memory, at `own`. All of them are `length` bytes of the same memory.
    pub fn through(
        &self,
        rank: &Rank,
        (to, from): (&[u64], &[u64]),
        mut own: u64,
        length: usize,
        name: &str,
        mut seed: u32,
    ) {
        let peers = |addresses: &[u64]| {
            let mut distinct = addresses.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), rank.size as usize, "one address a rank: {addresses:x?}");
            let mut peers = Peers([0; 8]);
            peers.0[..addresses.len()].copy_from_slice(addresses);
            peers
        };
        let (mut to, mut from) = (peers(to), peers(from));
        let (mut count, mut me) = (rank.size, rank.rank);
        let mut words = (length / 4) as u32 / count;
        let wrong = Counter::new(self.driver);
        let mut counter = wrong.address();
        macro_rules! run {
            ($kernel:literal, $($argument:ident),*) => {{
                let kernel = self.module.kernel($kernel);
                let mut arguments = [$((&raw mut $argument).cast::<c_void>()),*];
                // SAFETY: the arguments are those of the kernel in peers.cu, and every slot lies inside memory that all ranks keep mapped until
                // they have met below.
                unsafe { self.module.run(kernel, 16, 256, &mut arguments) };
            }};
        }
        rank.meeting.meet(&format!("{name} open"));
        run!(c"write_peers", to, count, me, words, seed);
        rank.meeting.meet(&format!("{name} written"));
        run!(c"check_peers", from, count, me, words, seed, counter);
        assert_eq!(wrong.value(), 0, "{name}: words that came back otherwise than they were written");
        run!(c"check_own", own, count, me, words, seed, counter);
        assert_eq!(wrong.value(), 0, "{name}: words that are not what the peers wrote");
        rank.meeting.meet(&format!("{name} checked"));
    }
}

/// NCCL's own barrier in a kernel, compiled with the loaded library's headers.
pub fn barrier_rounds(
    rank: &Rank,
    nvrtc: &Nvrtc,
    window: &Window,
    dev_comm: &DevComm,
    rounds: u32,
    name: &str,
) {
    let driver = rank.device.driver();
    let include = match rank.nccl.include_dir() {
        Ok(include) => include,
        Err(error) => return skipped("the barrier kernel", &error.to_string()),
    };
    let headers = NcclHeaders::new(&include).unwrap();
    let options = headers.options(&nvrtc.cuda_headers());
    let source = include_str!("../../kernels/lsa_barrier.cu");
    let cubin = nvrtc.compile(source, &architecture(driver), &options).unwrap_or_else(|log| panic!("{log}"));
    let module = Module::load(driver, &cubin);
    let kernel = module.kernel(c"barrier_rounds");
    let wrong = Counter::new(driver);
    let (mut raw, mut words, mut rounds, mut counter) = (window.as_raw(), 1024_u32, rounds, wrong.address());
    assert!(window.len() >= rank.size as usize * 4 * 1024 * 4);
    let mut arguments = [
        dev_comm.as_ptr().cast_mut(),
        (&raw mut raw).cast(),
        (&raw mut words).cast(),
        (&raw mut rounds).cast(),
        (&raw mut counter).cast(),
    ];
    rank.meeting.meet(&format!("{name} start"));
    // SAFETY: the block is an ncclDevComm of the headers' version, the window is open on all ranks until they have met below and has a
    // slot for each of the four blocks of each rank, and four LSA barriers were asked for.
    unsafe { module.run(kernel, 4, 256, &mut arguments) };
    assert_eq!(wrong.value(), 0, "{name}: words that a barrier let through too early");
    rank.meeting.meet(&format!("{name} end"));
}
