//! Windows, device communicators and their ends on real GPUs, one process a rank.
//!
//! `NCCL_GIN_LIBRARY` names the NCCL to test. Multicast is switched off in every process. Skipped, visibly, without two GPUs.

use cuda_vmm::{Cuda, Grant, Memory, PlainMemory, Properties, SegmentedRange};
use integration_tests::gpu::{self, skipped};
use integration_tests::kernel::{Counter, Module, architecture, free_memory};
use integration_tests::meeting::Meeting;
use integration_tests::nccl_headers::NcclHeaders;
use integration_tests::nvrtc::Nvrtc;
use integration_tests::process::{Peer, role, scratch};
use nccl_gin::sys::{Function, Generation, Nccl, Version};
use nccl_gin::{
    Communicator, Config, DevComm, DevCommRequirements, Device, Error, ForeignMemory, GinConnection, Group,
    MemAlloc, Shrink, UniqueId, Window, WindowFlags, WindowMemory,
};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// How long an operation may take in the tests that kill a rank.
const SHORT: Duration = Duration::from_secs(5);
/// How much later than that the error may come: an abort joins NCCL's threads.
const GRACE: Duration = Duration::from_secs(30);

/// One rank of a test, in a process of its own.
struct Rank {
    rank: u32,
    size: u32,
    nccl: &'static Nccl,
    device: Device,
    meeting: Meeting,
}

impl Rank {
    /// The rank that this process was spawned for, if it was.
    fn here(test: &str) -> Option<Self> {
        let role = role(test)?;
        let mut words = role.splitn(3, ' ');
        let mut word = || words.next().expect("a role of three words");
        let (rank, size) = (word().parse().expect("a rank"), word().parse().expect("a size"));
        let folder = word();
        let devices = Cuda::get().expect("a driver").device_count();
        let device = Device::open(rank as i32 % devices).unwrap();
        device.make_current().unwrap();
        let nccl = Nccl::get().unwrap();
        if rank == 0 {
            eprintln!("{test}: NCCL {} from {}", nccl.version(), nccl.origin());
        }
        Some(Self { rank, size, nccl, device, meeting: Meeting::new(folder, rank, size) })
    }

    fn config() -> Config {
        Config::new().timeout(Duration::from_secs(90))
    }

    /// An identifier that all ranks get, under a name that is used once.
    fn id(&self, name: &str) -> UniqueId {
        if self.rank == 0 {
            self.meeting.leave(name, UniqueId::new(self.nccl).unwrap().as_bytes());
        }
        UniqueId::from_bytes(self.meeting.find(name).try_into().expect("128 bytes"))
    }

    fn comm(&self, name: &str) -> Communicator {
        self.try_comm(name, &Self::config()).unwrap()
    }

    fn try_comm(&self, name: &str, config: &Config) -> nccl_gin::Result<Communicator> {
        Communicator::init(self.nccl, &self.device, &self.id(name), self.size, self.rank, config)
    }

    fn memory(&self, length: usize) -> Arc<MemAlloc> {
        Arc::new(MemAlloc::new(self.nccl, &self.device, length).unwrap())
    }
}

/// One test at a time: they look at the device's free memory.
static TURN: Mutex<()> = Mutex::new(());

/// Starts one process a rank and waits for all of them.
fn ranks(test: &str, size: u32, environment: &[(&str, &str)]) {
    let Some(_) = gpu::cuda(test, 2) else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, _) = scratch("meeting");
    let peers = spawn(test, size, folder.path(), environment);
    for peer in peers {
        peer.finish();
    }
}

fn spawn(test: &str, size: u32, folder: &std::path::Path, environment: &[(&str, &str)]) -> Vec<Peer> {
    let mut all = vec![("NCCL_NVLS_ENABLE", "0"), ("CUDA_VMM_DISABLE_MULTICAST", "1")];
    all.extend(environment);
    let role = |rank| format!("{rank} {size} {}", folder.display());
    let patience = Duration::from_secs(60 + 30 * u64::from(size));
    (0..size).map(|rank| Peer::spawn(test, &role(rank), &all).patience(patience)).collect()
}

/// The NCCL that the ranks will load, if it is new enough for several ranks on one GPU.
fn shares_gpus(test: &str) -> bool {
    let version = match Nccl::get() {
        Ok(nccl) => nccl.version(),
        Err(error) => {
            skipped(test, &error.to_string());
            return false;
        }
    };
    if version.code() < 23000 {
        skipped(test, &format!("NCCL {version} refuses several ranks on one GPU; 2.30 or newer is needed"));
        return false;
    }
    true
}

/// A cuda-vmm range as a window's memory.
struct Range(SegmentedRange);

// SAFETY: the range stays mapped, with access for its device, until it is dropped, and neither address nor size changes.
unsafe impl WindowMemory for Range {
    fn address(&self) -> NonNull<c_void> {
        NonNull::new(self.0.address().get() as *mut c_void).expect("a mapped range is not at null")
    }

    fn len(&self) -> usize {
        self.0.size()
    }
}

/// Device memory, host memory, device memory, back to back.
fn segmented(device: i32) -> Arc<Range> {
    let cuda = Cuda::get().unwrap();
    let node = cuda.device(device).unwrap().host_numa_node().unwrap().expect("a NUMA node for host memory");
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(device).shareable(), 4 * MIB)
        .create(Properties::host_numa(node).shareable(), 2 * MIB)
        .create(Properties::device(device).shareable(), 2 * MIB)
        .grant(Grant::device(device))
        .build()
        .unwrap();
    Arc::new(Range(range))
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Peers([u64; 8]);

/// Kernels that need no header of NCCL.
struct Plain<'a> {
    module: Module<'a>,
    driver: &'a cuda_vmm::sys::Driver,
}

impl<'a> Plain<'a> {
    fn new(nvrtc: &Nvrtc, driver: &'a cuda_vmm::sys::Driver) -> Self {
        let cubin = nvrtc.compile(include_str!("../kernels/peers.cu"), &architecture(driver), &[]).unwrap();
        Self { module: Module::load(driver, &cubin), driver }
    }

    /// Writes to each peer through its pointer, reads back from there, and checks what the peers wrote here.
    fn exchange(&self, rank: &Rank, window: &Window, name: &str, mut seed: u32) {
        let team = window.team_lsa();
        assert_eq!((team.size, team.rank), (rank.size, rank.rank), "one host is one LSA team");
        let mut peers = Peers([0; 8]);
        for (peer, address) in window.lsa_pointers(0).unwrap().into_iter().enumerate() {
            peers.0[peer] = address as u64;
            assert_eq!(window.peer_pointer(peer as u32, 0).unwrap(), Some(address));
        }
        let mut distinct = peers.0[..team.size as usize].to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(
            distinct.len(),
            team.size as usize,
            "each rank's memory has its own address: {distinct:x?}"
        );
        let (mut count, mut me) = (team.size, rank.rank);
        let mut words = (window.len() / 4) as u32 / count;
        let mut own = window.address() as u64;
        let wrong = Counter::new(self.driver);
        let mut counter = wrong.address();
        macro_rules! run {
            ($kernel:literal, $($argument:ident),*) => {{
                let kernel = self.module.kernel($kernel);
                let mut arguments = [$((&raw mut $argument).cast::<c_void>()),*];
                // SAFETY: the arguments are those of the kernel in peers.cu, and every slot lies inside the windows, which are open on
                // all ranks until they have met below.
                unsafe { self.module.run(kernel, 16, 256, &mut arguments) };
            }};
        }
        rank.meeting.meet(&format!("{name} open"));
        run!(c"write_peers", peers, count, me, words, seed);
        rank.meeting.meet(&format!("{name} written"));
        run!(c"check_peers", peers, count, me, words, seed, counter);
        assert_eq!(wrong.value(), 0, "{name}: words that came back otherwise than they were written");
        run!(c"check_own", own, count, me, words, seed, counter);
        assert_eq!(wrong.value(), 0, "{name}: words that are not what the peers wrote");
        rank.meeting.meet(&format!("{name} checked"));
    }
}

/// NCCL's own barrier in a kernel, compiled with the loaded library's headers.
fn barrier_rounds(rank: &Rank, nvrtc: &Nvrtc, window: &Window, dev_comm: &DevComm, rounds: u32, name: &str) {
    let driver = rank.device.driver();
    let include = match rank.nccl.include_dir() {
        Ok(include) => include,
        Err(error) => return skipped("the barrier kernel", &error.to_string()),
    };
    let headers = NcclHeaders::new(&include).unwrap();
    let options = headers.options(&nvrtc.cuda_headers());
    let source = include_str!("../kernels/lsa_barrier.cu");
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

/// Everything once: from the communicator to its end.
fn cycle(rank: &Rank, nvrtc: &Nvrtc, plain: &Plain<'_>, turn: u32) {
    let name = |what: &str| format!("{what} {turn}");
    let comm = rank.comm(&name("id"));
    let properties = comm.properties().unwrap();
    assert_eq!((properties.rank, properties.size), (rank.rank, rank.size));
    if let Some(support) = &properties.support {
        assert!(support.device_api && !support.multimem, "{support:?}");
        assert_eq!(support.lsa_teams, 1);
    }
    assert_eq!(comm.team_lsa().unwrap().size, rank.size);

    let memory = rank.memory(4 * MIB);
    let window = comm.register(memory.clone(), WindowFlags::empty()).unwrap();
    assert_eq!((window.address(), window.len()), (memory.address().as_ptr() as usize, 4 * MIB));
    plain.exchange(rank, &window, &name("NCCL's memory"), turn + 1);
    assert_eq!(window.multimem_pointer(0).unwrap(), None);

    // Memory of ours: one window over device and host memory.
    let range = segmented(rank.device.ordinal());
    let ours = comm.register(range.clone(), WindowFlags::empty());
    if rank.nccl.generation() < Generation::V2_30 {
        let error = ours.unwrap_err();
        assert!(matches!(error, Error::Memory { .. }) && error.to_string().contains("2.30"), "{error}");
    } else {
        let ours = ours.unwrap();
        plain.exchange(rank, &ours, &name("segmented memory"), turn + 17);
        ours.close().unwrap();
    }
    assert_eq!(Arc::strong_count(&range), 1);

    let error = comm.create_dev_comm(&DevCommRequirements::new().lsa_multimem(true)).unwrap_err();
    assert!(matches!(error, Error::MulticastOff { .. }), "{error}");
    if properties.support.is_some_and(|support| support.gin.is_none()) {
        let error = comm.create_dev_comm(&DevCommRequirements::new().gin(GinConnection::Full)).unwrap_err();
        assert!(
            matches!(error, Error::Unsupported { .. }) && error.to_string().contains("NCCL_GIN_PLUGIN"),
            "{error}"
        );
    }
    let created = comm.create_dev_comm(&DevCommRequirements::new().lsa_barriers(4));
    if rank.nccl.version() < Version::from_code(22809) {
        // Its structs are others: refused, not guessed.
        let error = created.unwrap_err();
        assert!(matches!(error, Error::Unsupported { what: "a device communicator", .. }), "{error}");
    } else {
        let dev_comm = created.unwrap();
        let info = dev_comm.info();
        assert_eq!((info.lsa_rank, info.lsa_size, info.lsa_barriers), (rank.rank, rank.size, 4), "{info:?}");
        // Ranks that share a GPU take turns of milliseconds.
        let rounds = if rank.size > 2 { 20 } else { 2000 };
        barrier_rounds(rank, nvrtc, &window, &dev_comm, rounds, &name("barrier"));
        dev_comm.close().unwrap();
    }
    window.close().unwrap();
    drop(memory);
    comm.close().unwrap();
}

/// Three cycles, and the device's memory before and after the last one.
fn cycles(test: &str, rank: &Rank) {
    let nvrtc = match Nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(error) => return skipped(test, &error),
    };
    let driver = rank.device.driver();
    let plain = Plain::new(&nvrtc, driver);
    let mut free = Vec::new();
    for turn in 0..3 {
        cycle(rank, &nvrtc, &plain, turn);
        // All have closed before anybody looks, and nobody goes on before all have looked.
        rank.meeting.meet(&format!("closed {turn}"));
        free.push(free_memory(driver));
        rank.meeting.meet(&format!("counted {turn}"));
    }
    eprintln!("{test}: rank {}: free bytes after each cycle: {free:?}", rank.rank);
    // The first cycle loads NCCL's kernels and fills its and the driver's pools; after that nothing may be lost.
    assert!(free[2] + MIB > free[1], "device memory is lost: {free:?}");
}

#[test]
fn two_ranks_on_two_gpus() {
    const TEST: &str = "two_ranks_on_two_gpus";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None => ranks(TEST, 2, &[]),
    }
}

#[test]
fn four_ranks_on_two_gpus() {
    const TEST: &str = "four_ranks_on_two_gpus";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None if gpu::cuda(TEST, 2).is_some() && shares_gpus(TEST) => {
            ranks(TEST, 4, &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]);
        }
        None => {}
    }
}

#[test]
fn eight_ranks_on_two_gpus() {
    const TEST: &str = "eight_ranks_on_two_gpus";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None if gpu::cuda(TEST, 2).is_some() && shares_gpus(TEST) => {
            ranks(TEST, 8, &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]);
        }
        None => {}
    }
}

#[test]
fn sharing_a_gpu_without_leave_is_refused_with_the_remedy() {
    const TEST: &str = "sharing_a_gpu_without_leave_is_refused_with_the_remedy";
    let Some(mut rank) = Rank::here(TEST) else {
        return ranks(TEST, 2, &[("NCCL_MULTI_RANK_GPU_ENABLE", "0")]);
    };
    rank.device = Device::open(0).unwrap();
    let error = rank.try_comm("id", &Config::new().timeout(Duration::from_secs(30))).unwrap_err();
    eprintln!("{TEST}: rank {}: {error}", rank.rank);
    assert!(error.to_string().contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{error}");
}

#[test]
fn memory_that_cannot_be_shared_is_refused() {
    const TEST: &str = "memory_that_cannot_be_shared_is_refused";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, 2, &[]) };
    let comm = rank.comm("id");
    let context = Cuda::get().unwrap().device(rank.device.ordinal()).unwrap().primary_context().unwrap();
    let plain = PlainMemory::new(&context, 4 * MIB).unwrap();
    let memory = rank.memory(2 * MIB);
    let at = |address: usize, length| {
        let address = NonNull::new(address as *mut c_void).expect("not null");
        // SAFETY: the memory outlives every use: no window comes of it.
        Arc::new(unsafe { ForeignMemory::new(address, length) })
    };
    let own = memory.address().as_ptr() as usize;
    for (memory, needle) in [
        (at(plain.address().get() as usize, 2 * MIB), "was not allocated with cuMemCreate"),
        (at(own + 256, MIB), "not a multiple of 4096"),
        (at(0x1000, 4096), "is no memory of CUDA"),
    ] {
        let error = comm.register(memory, WindowFlags::empty()).unwrap_err();
        assert!(matches!(error, Error::Memory { .. }) && error.to_string().contains(needle), "{error}");
    }
    // Nothing was lost: the communicator makes windows as before.
    let window = comm.register(memory, WindowFlags::empty()).unwrap();
    assert!(matches!(window.lsa_pointer(2, 0), Err(Error::Argument { .. })));
    window.close().unwrap();
    comm.close().unwrap();
}

#[test]
fn communicators_come_from_others() {
    const TEST: &str = "communicators_come_from_others";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, 2, &[]) };
    let comm = rank.comm("id");
    // Both in one colour, in the other order; then each alone; then only one of them.
    let reversed = comm.split(Some(0), -(rank.rank as i32), &Rank::config()).unwrap().expect("a colour");
    assert_eq!((reversed.rank(), reversed.size()), (1 - rank.rank, 2));
    let alone = comm.split(Some(rank.rank), 0, &Rank::config()).unwrap().expect("a colour");
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    let one = comm.split((rank.rank == 0).then_some(0), 0, &Rank::config()).unwrap();
    assert_eq!(one.is_some(), rank.rank == 0);
    // A window of a split communicator, with its own rank order.
    let window = reversed.register(rank.memory(2 * MIB), WindowFlags::empty()).unwrap();
    assert_eq!(window.team_lsa().size, 2);
    window.close().unwrap();
    for child in [Some(reversed), Some(alone), one].into_iter().flatten() {
        child.close().unwrap();
    }
    rank.meeting.meet("split");
    // Rank 0 goes on alone, and rank 1 comes back to it.
    if rank.rank == 0 {
        let shrunk = comm.shrink(&[1], Shrink::Default, &Rank::config()).unwrap();
        assert_eq!((shrunk.rank(), shrunk.size()), (0, 1));
        if rank.nccl.generation() == Generation::V2_28 {
            assert!(matches!(shrunk.grow_id(), Err(Error::Missing(_))));
        } else {
            let id = shrunk.grow_id().unwrap();
            rank.meeting.leave("grow", id.as_bytes());
            let grown = shrunk.grow(2, Some(&id), &Rank::config()).unwrap();
            assert_eq!((grown.rank(), grown.size()), (0, 2));
            rank.meeting.meet("grown");
            grown.close().unwrap();
        }
        shrunk.close().unwrap();
    } else if rank.nccl.generation() > Generation::V2_28 {
        let id = UniqueId::from_bytes(rank.meeting.find("grow").try_into().expect("128 bytes"));
        let grown = Communicator::join(rank.nccl, &rank.device, &id, 2, 1, &Rank::config()).unwrap();
        assert_eq!((grown.rank(), grown.size()), (1, 2));
        rank.meeting.meet("grown");
        grown.close().unwrap();
    }
    rank.meeting.meet("shrunk");
    if rank.nccl.has(Function::ncclCommRevoke) {
        comm.revoke().unwrap();
    } else {
        assert!(matches!(comm.revoke(), Err(Error::Missing(_))));
    }
    comm.abort().unwrap();
}

#[test]
fn one_thread_drives_two_ranks() {
    const TEST: &str = "one_thread_drives_two_ranks";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, 1, &[]) };
    let devices = [0, 1].map(|ordinal| Device::open(ordinal).unwrap());
    let id = UniqueId::new(rank.nccl).unwrap();
    let begin = |index: usize| {
        Communicator::begin(rank.nccl, &devices[index], &[id], 2, index as u32, &Rank::config()).unwrap()
    };
    let comms = [begin(0), begin(1)].map(|pending| pending.wait().unwrap());
    let memory = [0, 1].map(|i| Arc::new(MemAlloc::new(rank.nccl, &devices[i], 2 * MIB).unwrap()));
    let group = Group::start(rank.nccl).unwrap();
    let pending = [0, 1].map(|i| comms[i].begin_register(memory[i].clone(), WindowFlags::empty()).unwrap());
    assert!(matches!(
        comms[0].register(memory[0].clone(), WindowFlags::empty()),
        Err(Error::GroupOpen { .. })
    ));
    group.end().unwrap();
    let windows = pending.map(|pending| pending.wait().unwrap());
    assert_ne!(windows[0].lsa_pointer(1, 0).unwrap(), windows[0].lsa_pointer(0, 0).unwrap());
    for window in windows {
        window.close().unwrap();
    }
    drop(memory);
    // Closing is collective too: both at once.
    std::thread::scope(|scope| {
        for thread in comms.map(|comm| scope.spawn(|| comm.close())) {
            thread.join().expect("closing does not panic").unwrap();
        }
    });
}

/// A rank that dies at once, as by SIGKILL.
fn die() -> ! {
    let me = std::process::id().to_string();
    std::process::Command::new("kill").args(["-KILL", &me]).status().ok();
    std::process::abort()
}

/// Two ranks of which rank 1 dies: the other must end well.
fn one_dies(test: &str) {
    let Some(_) = gpu::cuda(test, 2) else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, _) = scratch("meeting");
    let mut peers = spawn(test, 2, folder.path(), &[]);
    let victim = peers.pop().expect("two ranks");
    peers.pop().expect("two ranks").finish();
    victim.kill();
}

/// Checks that an error came within the configured time.
fn in_time(test: &str, error: &Error, start: Instant) {
    eprintln!("{test}: after {:?}: {error}", start.elapsed());
    assert!(start.elapsed() < SHORT + GRACE, "{error} came after {:?}", start.elapsed());
    assert!(matches!(error, Error::Timeout { .. } | Error::Nccl(_)), "{error}");
}

#[test]
fn a_rank_killed_in_init_becomes_an_error() {
    const TEST: &str = "a_rank_killed_in_init_becomes_an_error";
    let Some(rank) = Rank::here(TEST) else { return one_dies(TEST) };
    let config = Config::new().timeout(SHORT);
    let id = rank.id("id");
    if rank.rank == 1 {
        let _pending = Communicator::begin(rank.nccl, &rank.device, &[id], 2, 1, &config).unwrap();
        die();
    }
    let start = Instant::now();
    // Either the connection breaks, or nobody answers.
    match Communicator::init(rank.nccl, &rank.device, &id, 2, 0, &config) {
        Err(error) => in_time(TEST, &error, start),
        // The victim may have come far enough for this rank to be done; then the next step must notice.
        Ok(comm) => {
            let start = Instant::now();
            in_time(TEST, &comm.register(rank.memory(2 * MIB), WindowFlags::empty()).unwrap_err(), start);
        }
    }
}

#[test]
fn a_rank_killed_in_register_becomes_an_error() {
    const TEST: &str = "a_rank_killed_in_register_becomes_an_error";
    let Some(rank) = Rank::here(TEST) else { return one_dies(TEST) };
    let comm = rank.try_comm("id", &Config::new().timeout(SHORT)).unwrap();
    let memory = rank.memory(2 * MIB);
    let window = comm.register(memory.clone(), WindowFlags::empty()).unwrap();
    rank.meeting.meet("ready");
    if rank.rank == 1 {
        die();
    }
    let start = Instant::now();
    let error = comm.register(rank.memory(2 * MIB), WindowFlags::empty()).unwrap_err();
    in_time(TEST, &error, start);
    if matches!(error, Error::Timeout { .. }) {
        assert!(matches!(window.lsa_pointer(0, 0), Err(Error::Gone { .. })), "the communicator was aborted");
        assert!(matches!(window.close(), Err(Error::Gone { .. })));
    } else {
        drop(window);
        comm.abort().unwrap();
    }
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn ranks_that_disagree_about_their_number_do_not_hang() {
    const TEST: &str = "ranks_that_disagree_about_their_number_do_not_hang";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, 2, &[]) };
    let id = rank.id("id");
    let start = Instant::now();
    let size = 2 + rank.rank;
    let config = Config::new().timeout(SHORT);
    let error = Communicator::init(rank.nccl, &rank.device, &id, size, rank.rank, &config).unwrap_err();
    in_time(TEST, &error, start);
    rank.meeting.meet("done");
}
