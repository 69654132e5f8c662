//! The real libraries on a machine without a GPU: what they say there becomes this crate's errors. Each in a process of its own.
//!
//! They come from PyPI's wheels, which `cargo xtask test` fetches into `target/wheels`.

use crate::child;
use crate::fake::Fake;
use nccl_gin::sys::{Function, Nccl, ncclResult_t};
use nccl_gin::{Communicator, Config, Error, MemAlloc, UniqueId};
use std::path::{Path, PathBuf};
use std::time::Duration;

const RELEASES: [&str; 6] = ["2.28.3", "2.28.9", "2.29.7", "2.30.7", "2.31.2", "2.32.3"];
const LIBRARY: &str = "NCCL_GIN_TEST_LIBRARY";

/// Says so past the test runner's capture, which hides what passing tests print.
fn skipped(reason: &str) {
    use std::io::Write;
    std::io::stderr().write_all(format!("\nskipped: {reason}\n").as_bytes()).ok();
}

fn library(release: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("WHEELS_DIR").map_or_else(
        || {
            Path::new(env!("CARGO_TARGET_TMPDIR"))
                .parent()
                .map(|target| target.join("wheels"))
                .unwrap_or_default()
        },
        PathBuf::from,
    );
    let file = folder.join(format!("nvidia-nccl-cu13-{release}/nvidia/nccl/lib/libnccl.so.2"));
    if file.is_file() {
        return Some(file);
    }
    skipped(&format!("no wheel of NCCL {release} at {} (cargo xtask test fetches it)", file.display()));
    None
}

#[test]
fn real_libraries_tell_what_is_missing() {
    if cuda_vmm_sys::Driver::get().is_ok() {
        skipped("there is a CUDA driver here");
        return;
    }
    for release in RELEASES {
        let Some(file) = library(release) else { continue };
        child::passes("no_gpu::alone", &[(LIBRARY, file.as_os_str())]);
    }
}

#[test]
#[ignore = "run by the other test, in a process of its own"]
fn alone() {
    let nccl = Nccl::open(std::env::var_os(LIBRARY).expect("the parent names the library")).unwrap();
    // A device of the software driver stands in for the one that is not there; the real library does not know of it.
    let fake = Fake::new(nccl.version().code());
    let nccl_says = |error: Error, function: Function| {
        println!("{error}");
        let Error::Nccl(error) = error else { panic!("{error}") };
        assert_eq!(error.function, function);
        assert_ne!(error.result, ncclResult_t::ncclSuccess);
        assert!(error.hint.is_some(), "{error}");
    };
    let error = MemAlloc::new(&nccl, &fake.device, 1 << 21).unwrap_err();
    nccl_says(error, Function::ncclMemAlloc);
    // Whether an identifier can be made depends on the version, and on the network that there is.
    let id = match UniqueId::new(&nccl) {
        Ok(id) => id,
        Err(error) => {
            nccl_says(error, Function::ncclGetUniqueId);
            UniqueId::from_bytes([1; 128])
        }
    };
    let config = Config::new().timeout(Duration::from_secs(20));
    let error = Communicator::init(&nccl, &fake.device, &id, 1, 0, &config).unwrap_err();
    nccl_says(error, Function::ncclCommInitRankConfig);
    fake.finish();
}
