//! Heaps of the software driver as windows of an NCCL that only takes notes.

use super::*;
use crate::bootstrap::thread_group;
use crate::domain::Domain;
use crate::symmetric::{Request, allocate};
use crate::tensor::Space;
use cuda_vmm::Cuda;
use cuda_vmm_emu::Emulator;
use nccl_gin::sys::{Nccl, ncclComm_t, ncclConfig_t, ncclResult_t, ncclTeam, ncclUniqueId, ncclWindow_t};
use nccl_gin::{Config, Device, UniqueId};
use std::ffi::{CStr, c_int};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const OK: ncclResult_t = ncclResult_t::ncclSuccess;
const LIMIT: Duration = Duration::from_secs(20);

/// What the library was asked, and what it is to do.
#[derive(Default)]
struct Notes {
    /// Rank, address, length and flags of each registration.
    registered: Vec<(usize, usize, usize, i32)>,
    deregistered: usize,
    /// The rank whose registration fails.
    fails: Option<usize>,
}

static NOTES: Mutex<Option<Notes>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

fn notes<T>(f: impl FnOnce(&mut Notes) -> T) -> T {
    f(NOTES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Notes::default))
}

/// One test at a time, with no notes yet.
fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    notes(|notes| *notes = Notes::default());
    turn
}

/// A communicator's handle is its rank, plus one.
unsafe extern "C" fn init(
    out: *mut ncclComm_t,
    _: c_int,
    _: ncclUniqueId,
    rank: c_int,
    _: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = ptr::without_provenance_mut(rank as usize + 1) };
    OK
}

unsafe extern "C" fn state(_: ncclComm_t, out: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = OK };
    OK
}

unsafe extern "C" fn done(_: ncclComm_t) -> ncclResult_t {
    OK
}

unsafe extern "C" fn register(
    comm: ncclComm_t,
    buffer: *mut c_void,
    length: usize,
    out: *mut ncclWindow_t,
    flags: c_int,
) -> ncclResult_t {
    let rank = comm.addr() - 1;
    notes(|notes| {
        if notes.fails == Some(rank) {
            return ncclResult_t::ncclSystemError;
        }
        notes.registered.push((rank, buffer.addr(), length, flags));
        // SAFETY: the caller passes a valid pointer.
        unsafe { *out = ptr::without_provenance_mut(0x1000 * (rank + 1)) };
        OK
    })
}

unsafe extern "C" fn deregister(_: ncclComm_t, _: ncclWindow_t) -> ncclResult_t {
    notes(|notes| notes.deregistered += 1);
    OK
}

unsafe extern "C" fn team(comm: ncclComm_t) -> ncclTeam {
    ncclTeam { nRanks: 2, rank: comm.addr() as c_int - 1, stride: 1 }
}

/// A library of one version.
fn library(strict: bool) -> Nccl {
    unsafe extern "C" fn newest(out: *mut c_int) -> ncclResult_t {
        // SAFETY: the table passes a valid pointer.
        unsafe { *out = 23203 };
        OK
    }
    unsafe extern "C" fn early(out: *mut c_int) -> ncclResult_t {
        // SAFETY: the table passes a valid pointer.
        unsafe { *out = 22906 };
        OK
    }
    let resolve = move |name: &CStr| -> *const c_void {
        match name.to_bytes() {
            b"ncclGetVersion" if strict => newest as *const c_void,
            b"ncclGetVersion" => early as *const c_void,
            b"ncclCommInitRankConfig" => init as *const c_void,
            b"ncclCommGetAsyncError" => state as *const c_void,
            b"ncclCommFinalize" | b"ncclCommDestroy" | b"ncclCommAbort" => done as *const c_void,
            b"ncclCommWindowRegister" => register as *const c_void,
            b"ncclCommWindowDeregister" => deregister as *const c_void,
            b"ncclTeamLsa" => team as *const c_void,
            _ => ptr::null(),
        }
    };
    // SAFETY: the functions have the signatures that NCCL's headers declare for their names.
    unsafe { Nccl::from_loader(resolve) }.unwrap()
}

/// Runs `work` on two ranks, with a heap each of 4 MiB of device memory and so much host memory, everybody's or one's own. `strict` says for
/// each whether its NCCL is a new one.
fn ranks(
    strict: [bool; 2],
    (host_bytes, hybrid): (usize, bool),
    work: impl Fn(&Communicator, &Arc<Heap>, &dyn Bootstrap) + Sync,
) -> Emulator {
    let emulator = Emulator::new(cuda_vmm_emu::Config::new(2)).unwrap();
    let (work, emulator_here) = (&work, &emulator);
    std::thread::scope(|scope| {
        for (rank, bootstrap) in thread_group(2, LIMIT).unwrap().into_iter().enumerate() {
            let nccl = library(strict[rank]);
            scope.spawn(move || {
                let cuda = Cuda::with_driver(emulator_here.driver()).unwrap();
                let domain = Domain::discover(&bootstrap).unwrap();
                let device = rank as i32;
                let request =
                    Request { device_bytes: 4 * MIB, host_bytes, hybrid, device, space: Space::Host };
                let heap = Arc::new(allocate(&bootstrap, &domain, &cuda, &request).unwrap());
                let device = Device::with_driver(cuda.driver(), device).unwrap();
                let id = UniqueId::from_bytes([1; 128]);
                let config = Config::new().timeout(LIMIT);
                let comm = Communicator::init(&nccl, &device, &id, 2, rank as u32, &config).unwrap();
                work(&comm, &heap, &bootstrap);
                comm.close().unwrap();
                assert_eq!(Arc::strong_count(&heap), 1, "the communicator's end lets go of the heap");
            });
        }
    });
    emulator
}

fn empty(emulator: Emulator) {
    let left = emulator.ledger();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_heap_is_one_strictly_ordered_window() {
    let _turn = turn();
    let emulator = ranks([true; 2], (2 * MIB, false), |comm, heap, bootstrap| {
        let window = Registrar::register(comm, heap, bootstrap).unwrap();
        assert!(window.is_strictly_ordered());
        assert_eq!(window.window().address() as u64, heap.base());
        assert_eq!(window.window().len(), 6 * MIB, "device and host memory in one");
        assert_eq!(window.heap().bytes(), 6 * MIB);
        let mine = (comm.rank() as usize, heap.base() as usize, 6 * MIB, 2);
        assert!(notes(|notes| notes.registered.contains(&mine)));
        window.close().unwrap();
    });
    notes(|notes| assert_eq!((notes.registered.len(), notes.deregistered), (2, 2)));
    empty(emulator);
}

#[test]
fn an_nccl_without_strict_ordering_makes_a_plain_window() {
    let _turn = turn();
    let emulator = ranks([false; 2], (0, false), |comm, heap, bootstrap| {
        let window = Registrar::register(comm, heap, bootstrap).unwrap();
        assert!(!window.is_strictly_ordered());
        window.close().unwrap();
    });
    notes(|notes| assert!(notes.registered.iter().all(|one| one.3 == 0)));
    empty(emulator);
}

#[test]
fn what_one_rank_cannot_register_fails_on_all() {
    let _turn = turn();
    notes(|notes| notes.fails = Some(1));
    let emulator = ranks([true; 2], (0, false), |comm, heap, bootstrap| {
        let error = Registrar::register(comm, heap, bootstrap).unwrap_err();
        match comm.rank() {
            1 => assert!(matches!(&error, Error::Nccl(nccl_gin::Error::Nccl(_))), "{error}"),
            _ => assert!(matches!(&error, Error::PeerFailed { rank: 1, .. }), "{error}"),
        }
        assert!(error.to_string().contains("ncclCommWindowRegister failed"), "{error}");
    });
    notes(|notes| {
        assert_eq!((notes.registered.len(), notes.deregistered), (1, 1), "what one rank had is given back")
    });
    empty(emulator);
}

#[test]
fn host_memory_that_the_version_cannot_take_is_refused_on_all_ranks() {
    let _turn = turn();
    let emulator = ranks([false; 2], (2 * MIB, false), |comm, heap, bootstrap| {
        let error = Registrar::register(comm, heap, bootstrap).unwrap_err();
        assert!(matches!(&error, Error::Nccl(nccl_gin::Error::Memory { .. })), "{error}");
        assert!(error.to_string().contains("2.30"), "{error}");
    });
    notes(|notes| assert!(notes.registered.is_empty()));
    empty(emulator);
}

#[test]
fn nobody_waits_in_nccl_for_a_rank_that_cannot_come() {
    let _turn = turn();
    let emulator = ranks([true, false], (2 * MIB, false), |comm, heap, bootstrap| {
        let error = Registrar::register(comm, heap, bootstrap).unwrap_err();
        match comm.rank() {
            1 => assert!(matches!(&error, Error::Nccl(nccl_gin::Error::Memory { .. })), "{error}"),
            _ => assert!(matches!(&error, Error::PeerFailed { rank: 1, .. }), "{error}"),
        }
    });
    notes(|notes| assert!(notes.registered.is_empty(), "no rank has begun"));
    empty(emulator);
}

#[test]
fn a_communicator_of_other_ranks_is_refused() {
    let _turn = turn();
    let emulator = ranks([true; 2], (0, false), |comm, heap, bootstrap| {
        struct Swapped<'a>(&'a dyn Bootstrap);
        impl Bootstrap for Swapped<'_> {
            fn rank(&self) -> usize {
                1 - self.0.rank()
            }
            fn world_size(&self) -> usize {
                self.0.world_size()
            }
            fn timeout(&self) -> Duration {
                self.0.timeout()
            }
            fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
                self.0.all_gather(bytes)
            }
        }
        let error = Registrar::register(comm, heap, &Swapped(bootstrap)).unwrap_err();
        assert!(matches!(&error, Error::Invalid { parameter: "communicator", .. }), "{error}");
    });
    notes(|notes| assert!(notes.registered.is_empty()));
    empty(emulator);
}

#[test]
fn a_heap_of_everybodys_host_memory_needs_a_setting() {
    {
        let _turn = turn();
        let emulator = ranks([true; 2], (2 * MIB, true), |comm, heap, bootstrap| {
            let error = Registrar::register(comm, heap, bootstrap).unwrap_err();
            assert!(matches!(&error, Error::Nccl(nccl_gin::Error::Memory { .. })), "{error}");
            assert!(error.to_string().contains("set NCCL_SYM_REUSE_SYSMEM_HANDLES=1"), "{error}");
        });
        notes(|notes| assert!(notes.registered.is_empty(), "no rank has begun"));
        empty(emulator);
    }
    // NCCL reads the setting once in a process, and so no test sets it in this one.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "symmetric::window::tests::with_the_setting", "--ignored"])
        .env("NCCL_SYM_REUSE_SYSMEM_HANDLES", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let text = said_in_time(child);
    assert!(text.contains("1 passed"), "{text}");
}

/// What a child says that ends well. It says less than a pipe holds.
fn said_in_time(mut child: Child) -> String {
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("the child runs for longer than two minutes");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn with_the_setting() {
    let _turn = turn();
    let emulator = ranks([true; 2], (2 * MIB, true), |comm, heap, bootstrap| {
        let window = Registrar::register(comm, heap, bootstrap).unwrap();
        assert_eq!(window.window().len(), 8 * MIB, "device memory and the host memory of both ranks");
        window.close().unwrap();
    });
    notes(|notes| assert_eq!((notes.registered.len(), notes.deregistered), (2, 2)));
    empty(emulator);
    // Each rank's own host memory would be taken for the other's.
    let emulator = ranks([true; 2], (2 * MIB, false), |comm, heap, bootstrap| {
        let error = Registrar::register(comm, heap, bootstrap).unwrap_err();
        assert!(matches!(&error, Error::Nccl(nccl_gin::Error::Environment { .. })), "{error}");
        let text = error.to_string();
        assert!(text.contains("NCCL_SYM_REUSE_SYSMEM_HANDLES") && text.contains("unset it"), "{text}");
    });
    notes(|notes| assert_eq!(notes.registered.len(), 2, "no rank has begun"));
    empty(emulator);
    // Without host memory the setting changes nothing.
    let emulator = ranks([true; 2], (0, true), |comm, heap, bootstrap| {
        Registrar::register(comm, heap, bootstrap).unwrap().close().unwrap();
    });
    notes(|notes| assert_eq!((notes.registered.len(), notes.deregistered), (4, 4)));
    empty(emulator);
}
