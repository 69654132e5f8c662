//! The real libraries of six releases, each in a process of its own: what they export, and that two are never mixed.
//!
//! They come from PyPI's wheels, which `cargo xtask test` fetches into `target/wheels`. No GPU is needed.

use nccl_gin_sys::{Function, Generation, LoadError, Nccl, Origin, ncclResult_t, ncclTeam};
use std::ffi::{CStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::time::{Duration, Instant};

/// Release, version code, generation, and how many of the table's functions it exports.
const RELEASES: [(&str, u32, Generation, usize); 6] = [
    ("2.28.3", 22803, Generation::V2_28_3, 49),
    ("2.28.9", 22809, Generation::V2_28, 51),
    ("2.29.7", 22907, Generation::V2_29, 65),
    ("2.30.7", 23007, Generation::V2_30, 79),
    ("2.31.2", 23102, Generation::V2_31, 92),
    ("2.32.3", 23203, Generation::V2_32, 93),
];

/// Which scenario a child runs, and with which files.
const SCENARIO: &str = "NCCL_GIN_TEST_SCENARIO";
const FIRST: &str = "NCCL_GIN_TEST_FIRST";
const SECOND: &str = "NCCL_GIN_TEST_SECOND";
const DEADLINE: Duration = Duration::from_secs(120);

/// Says so past the test runner's capture, which hides what passing tests print.
fn skipped(reason: &str) {
    use std::io::Write;
    std::io::stderr().write_all(format!("\nskipped: {reason}\n").as_bytes()).ok();
}

fn wheel(release: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("WHEELS_DIR").map_or_else(
        || {
            Path::new(env!("CARGO_TARGET_TMPDIR"))
                .parent()
                .map(|target| target.join("wheels"))
                .unwrap_or_default()
        },
        PathBuf::from,
    );
    let folder = folder.join(format!("nvidia-nccl-cu13-{release}/nvidia/nccl"));
    if folder.join("lib/libnccl.so.2").is_file() {
        return Some(folder);
    }
    skipped(&format!("no wheel of NCCL {release} at {} (cargo xtask test fetches it)", folder.display()));
    None
}

fn library(release: &str) -> Option<PathBuf> {
    Some(wheel(release)?.join("lib/libnccl.so.2"))
}

/// Runs a scenario in a new process of this test, and returns what it printed.
fn child(scenario: &str, first: &Path, second: Option<&Path>, named: Option<&Path>) -> String {
    let mut command = Command::new(std::env::current_exe().expect("the test knows its own file"));
    command.args(["--exact", "scenario", "--ignored", "--nocapture"]).env_remove("NCCL_GIN_LIBRARY");
    command.env(SCENARIO, scenario).env(FIRST, first).env(SECOND, second.map_or(OsString::new(), Into::into));
    if let Some(named) = named {
        command.env("NCCL_GIN_LIBRARY", named);
    }
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the test starts itself again");
    let output = wait(child);
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{scenario} of {}: {}\n{text}", first.display(), output.status);
    assert!(text.contains("1 passed"), "{scenario} did not run:\n{text}");
    text
}

fn wait(mut child: Child) -> std::process::Output {
    let end = Instant::now() + DEADLINE;
    while child.try_wait().expect("a child can be waited for").is_none() {
        if Instant::now() > end {
            child.kill().ok();
            panic!("a child took more than {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().expect("a child has an output")
}

fn given(name: &str) -> PathBuf {
    std::env::var_os(name).expect("the parent names the file").into()
}

#[test]
#[ignore = "run by the other tests, in a process of its own"]
fn scenario() {
    match std::env::var(SCENARIO).expect("the parent names the scenario").as_str() {
        "probe" => probe(),
        "second" => second(),
        "mixed" => mixed(),
        "prefers" => prefers(),
        other => panic!("no scenario {other}"),
    }
}

/// Everything that one library tells without a GPU.
fn probe() {
    let path = given(FIRST);
    let nccl = Nccl::open(&path).unwrap();
    let Origin::File(origin) = nccl.origin() else { panic!("not from a file") };
    assert_eq!(origin.canonicalize().unwrap(), path.canonicalize().unwrap());
    let include = nccl.include_dir().unwrap();
    assert!(include.join("nccl.h").is_file() && include.join("nccl_device.h").is_file());
    println!("version {} code {} include {}", nccl.version(), nccl.version().code(), include.display());

    let mut exported = 0;
    for &function in Function::ALL {
        let there = nccl.has(function);
        assert_eq!(there, nccl.version() >= function.since(), "{function:?} in {}", nccl.version());
        exported += usize::from(there);
        if !there {
            let error = nccl.address(function).unwrap_err().to_string();
            assert!(
                error.contains(function.symbol()) && error.contains(&function.since().to_string()),
                "{error}"
            );
        }
    }
    println!("exported {exported} generation {:?}", nccl.generation());

    // SAFETY: result codes are plain numbers, and the texts are static C strings.
    let text = unsafe { CStr::from_ptr(nccl.ncclGetErrorString(ncclResult_t::ncclInvalidUsage).unwrap()) };
    assert!(text.to_str().unwrap().contains("invalid usage"), "{text:?}");
    // SAFETY: as above; a code that no version has.
    let text = unsafe { CStr::from_ptr(nccl.ncclGetErrorString(ncclResult_t(4711)).unwrap()) };
    assert!(!text.is_empty());
    // SAFETY: pure arithmetic on integers.
    assert!(unsafe { nccl.ncclLLA2ACalcSlots(8, 16) }.unwrap() > 0);
    // SAFETY: a null communicator is refused, and `count` is valid for one write.
    let refused = unsafe { nccl.ncclCommCount(ptr::null_mut(), &mut 0) }.unwrap();
    assert_eq!(refused, ncclResult_t::ncclInvalidArgument);
    // SAFETY: a requirement of plain integers; both outputs are valid for one write.
    let made = unsafe {
        let (mut handle, mut needs) = (std::mem::zeroed(), std::mem::zeroed());
        let team = ncclTeam { nRanks: 2, rank: 0, stride: 1 };
        let result = nccl.ncclLsaBarrierCreateRequirement(team, 3, &mut handle, &mut needs).unwrap();
        (result, handle.nBarriers, needs.bufferSize)
    };
    assert_eq!((made.0, made.1), (ncclResult_t::ncclSuccess, 3));
    assert!(made.2 > 0);
    // SAFETY: a null communicator asks for the process's last error.
    let last = unsafe { nccl.ncclGetLastError(ptr::null_mut()) }.unwrap();
    assert!(!last.is_null());
}

/// With one library loaded, another one is refused before it is opened.
fn second() {
    let (first, second) = (given(FIRST), given(SECOND));
    let nccl = Nccl::open(&first).unwrap();
    let error = Nccl::open(&second).unwrap_err();
    let LoadError::SeveralLibraries { loaded, requested: Some(requested) } = &error else {
        panic!("{error}")
    };
    assert_eq!(requested, &second);
    assert_eq!(loaded[0].canonicalize().unwrap(), first.canonicalize().unwrap());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(second.to_str().unwrap()), "the second library was opened");
    // The first one is what everybody gets from here on, by any of its names.
    assert_eq!(Nccl::open(&first).unwrap().version(), nccl.version());
    assert_eq!(Nccl::get().unwrap().version(), nccl.version());
}

/// Somebody else has loaded two libraries: neither is taken.
fn mixed() {
    let files = [given(FIRST), given(SECOND)];
    // SAFETY: both are NCCL libraries, whose initialisers only set up their own state.
    let _both = files.each_ref().map(|file| unsafe { libloading::Library::new(file) }.unwrap());
    let error = Nccl::get().unwrap_err();
    let LoadError::SeveralLibraries { loaded, requested: None } = &error else { panic!("{error}") };
    assert_eq!(loaded.len(), 2, "{error}");
    assert!(matches!(Nccl::open(&files[0]), Err(LoadError::SeveralLibraries { .. })));
}

/// What is in the process already comes ahead of the environment variable.
fn prefers() {
    let first = given(FIRST);
    // SAFETY: an NCCL library, whose initialisers only set up its own state.
    let _loaded = unsafe { libloading::Library::new(&first) }.unwrap();
    let nccl = Nccl::get().unwrap();
    let Origin::File(origin) = nccl.origin() else { panic!("not from a file") };
    assert_eq!(origin.canonicalize().unwrap(), first.canonicalize().unwrap());
}

#[test]
fn each_release_tells_its_version_headers_and_functions() {
    for (release, code, generation, exported) in RELEASES {
        let Some(folder) = wheel(release) else { continue };
        let text = child("probe", &folder.join("lib/libnccl.so.2"), None, None);
        let include = folder.join("include").canonicalize().unwrap();
        assert!(text.contains(&format!("version {release} code {code} include ")), "{text}");
        let told = text.lines().find_map(|line| line.split_once(" include ")).expect("the child tells it").1;
        assert_eq!(Path::new(told).canonicalize().unwrap(), include, "{text}");
        assert!(text.contains(&format!("exported {exported} generation {generation:?}")), "{text}");
    }
}

#[test]
fn a_second_library_is_never_loaded() {
    if let (Some(old), Some(new)) = (library("2.28.3"), library("2.32.3")) {
        child("second", &old, Some(&new), None);
        child("second", &new, Some(&old), None);
        child("mixed", &old, Some(&new), None);
    }
}

#[test]
fn the_loaded_library_comes_first_then_the_variable() {
    if let (Some(old), Some(new)) = (library("2.29.7"), library("2.31.2")) {
        child("prefers", &old, None, Some(&new));
        child("prefers", &new, None, Some(&old));
    }
}
