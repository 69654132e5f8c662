//! Kernels compiled into the build (feature `aot`) are found where there is no NVRTC. Needs no GPU.

use std::collections::HashSet;
use std::io::Write as _;
use std::path::PathBuf;

use deepep_core::jit::{Arch, Cache, Embedded, JitError, Program, Supply};
use deepep_core::layout::MAX_RANKS;

/// NVRTC can't be found: the only place that is looked at has none.
fn supply() -> Supply {
    Supply::new(Some(PathBuf::from("/nonexistent/libnvrtc.so")), Cache::disabled())
}

fn skip(test: &str) -> bool {
    let none = Embedded::all().is_empty();
    if none {
        // Past the test runner's capture of what passing tests print.
        writeln!(std::io::stderr(), "skipped: {test}: DEEPEP_AOT_ARCHS was empty when this was built").ok();
    }
    none
}

fn programs() -> Vec<Program> {
    (1..=MAX_RANKS).flat_map(Program::all).collect()
}

/// Every architecture that a kernel is embedded for, as the crate names it at run time.
fn archs() -> Vec<Arch> {
    let names: HashSet<_> = Embedded::all().iter().map(Embedded::arch).collect();
    let known = (9..=12).flat_map(|major| (0..10).map(move |minor| Arch::new(major, minor)));
    let archs: Vec<_> = known.filter(|arch| names.contains(&*arch.to_string())).collect();
    assert_eq!(archs.len(), names.len(), "{names:?}");
    archs
}

#[test]
fn every_embedded_kernel_is_supplied_without_nvrtc() {
    if skip("every_embedded_kernel_is_supplied_without_nvrtc") {
        return;
    }
    let supply = supply();
    let mut supplied = 0;
    for arch in archs() {
        let ranks: HashSet<_> = programs()
            .into_iter()
            .filter(|&program| Embedded::find(program, arch).is_some())
            .map(|program| program.ranks())
            .collect();
        assert!(!ranks.is_empty());
        // All kernels for a number of ranks, or none.
        for program in programs().into_iter().filter(|program| ranks.contains(&program.ranks())) {
            let cubin = supply.get(program, arch).unwrap_or_else(|error| panic!("{error}"));
            assert!(cubin.embedded() && !cubin.compiled());
            let image = cubin.image();
            assert_eq!(&image[..4], b"\x7fELF", "{program:?}");
            assert_eq!(u16::from_le_bytes([image[18], image[19]]), 190, "{program:?} is no CUDA code");
            let section = format!("\0.text.{}\0", program.entry());
            let found = image.windows(section.len()).any(|part| part == section.as_bytes());
            assert!(found, "{program:?} has no {}", program.entry());
            assert_eq!(image.as_ptr() as usize % 16, 0);
            supplied += 1;
        }
    }
    assert_eq!(supplied, Embedded::all().len());
    eprintln!("{supplied} kernels from nvcc {}", Embedded::compiler().unwrap());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("nvrtc"), "NVRTC was loaded:\n{maps}");
}

/// Different programs have different code, unless the difference is of no meaning for one of them.
#[test]
fn embedded_kernels_are_those_that_are_named() {
    if skip("embedded_kernels_are_those_that_are_named") {
        return;
    }
    for arch in archs() {
        let all: Vec<_> = programs().into_iter().filter_map(|p| Embedded::find(p, arch)).collect();
        let images: HashSet<_> = all.iter().map(|kernel| kernel.image()).collect();
        let same = all.len() - images.len();
        assert_eq!(same, 0, "{same} of {} kernels for {arch} have the code of another", all.len());
    }
}

#[test]
fn what_is_neither_embedded_nor_compilable_is_an_error_that_names_both() {
    let error = supply().get(Program::Barrier { ranks: 2 }, Arch::new(42, 0)).unwrap_err();
    assert!(matches!(error, JitError::NotEmbedded { .. }), "{error}");
    let text = error.to_string();
    for part in ["Barrier { ranks: 2 } for sm_420a", "DEEPEP_AOT_ARCHS", "/nonexistent/libnvrtc.so"] {
        assert!(text.contains(part), "{text}");
    }
}
