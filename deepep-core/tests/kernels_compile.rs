//! Every kernel compiles for every architecture we name, and keeps its values in registers. Needs NVRTC, but no GPU.

use std::io::Write as _;

use deepep_core::jit::{
    Arch, Cache, Collective, CollectiveKind, Compiler, Element, JitError, PacketSizes, Program, Way,
};
use deepep_core::layout::{IndexWidth, Placement};

fn compiler() -> Option<Compiler> {
    match Compiler::find(None) {
        Ok(compiler) => Some(compiler),
        Err(error @ JitError::NotFound { .. }) => {
            // Past the test runner's capture of what passing tests print.
            writeln!(std::io::stderr(), "skipped: {error}").ok();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Kernels of small batches for certain sizes: those of a decode step with FP8 and BF16 rows, and smallest and odd ones.
fn for_sizes(ranks: usize) -> Vec<Program> {
    let mut all = Vec::new();
    for placement in [Placement::Plain, Placement::Expanded] {
        for (max_tokens, topk, experts, row_bytes, scale_packs) in
            [(128, 8, 256, 7168, 56), (32, 8, 256, 14336, 0), (1, 1, 8, 16, 0), (65, 17, 104, 2064, 5)]
        {
            let sizes = PacketSizes { max_tokens, topk, experts, row_bytes, scale_packs };
            let index = IndexWidth::Bits64;
            all.push(Program::PacketDispatch { ranks, placement, index, sizes: Some(sizes) });
            let sizes = PacketSizes { scale_packs: 0, ..sizes };
            all.push(Program::PacketCombine { ranks, placement, sizes: Some(sizes) });
        }
    }
    all
}

#[test]
fn all_kernels_compile_without_local_memory() {
    let Some(compiler) = compiler() else { return };
    eprintln!("{compiler:?}");
    // For work on one kernel: only those whose names contain this, or all of several parts with & in between.
    let only = std::env::var("DEEPEP_TEST_KERNELS").unwrap_or_default();
    // Where images are kept, to be looked at.
    let folder = std::env::var_os("DEEPEP_TEST_KEEP").map(std::path::PathBuf::from);
    for arch in [Arch::new(9, 0), Arch::new(10, 0)] {
        let programs = [1, 2, 8].into_iter().flat_map(Program::all);
        let programs = programs.chain([1, 2, 8].into_iter().flat_map(for_sizes));
        let named = |p: &Program| only.split('&').all(|part| format!("{p:?}").contains(part));
        let programs: Vec<_> = programs.filter(named).collect();
        assert!(!programs.is_empty(), "no kernel's name has {only:?} in it");
        for (number, program) in programs.into_iter().enumerate() {
            let cubin = compiler.compile(program, arch).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(&cubin.image()[..4], b"\x7fELF");
            if let Some(folder) = &folder {
                std::fs::write(folder.join(format!("{number}.{arch}.cubin")), cubin.image()).unwrap();
            }
            let kernel = &cubin.resources()[0];
            eprintln!(
                "{number}: {arch} {program:?}: {} registers, {} B",
                kernel.registers,
                cubin.image().len()
            );
            assert_eq!(kernel.kernel, program.entry());
            // Two dispatches of small batches fit on a multiprocessor (2 · 384 · 80 registers of 65536), a combine alone (512 · 128).
            let most = match program {
                Program::PacketDispatch { ranks, sizes, .. } if ranks <= 2 || sizes.is_some() => 80,
                Program::PacketCombine { .. } => 128,
                _ => 255,
            };
            assert!(kernel.registers <= most, "{program:?}: {} registers", kernel.registers);
            let kept = cubin.resources().iter().all(|k| k.in_registers());
            assert!(kept, "{program:?}: {:?}", cubin.resources());
        }
    }
}

#[test]
fn a_second_compilation_comes_from_the_cache() {
    let Some(compiler) = compiler() else { return };
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let (program, arch) = (Program::Barrier { ranks: 2 }, Arch::new(9, 0));
    let first = compiler.compile_cached(program, arch, &cache).unwrap();
    let second = compiler.compile_cached(program, arch, &cache).unwrap();
    assert!(first.compiled() && !second.compiled());
    assert_eq!(first.image(), second.image());
    let other = compiler.compile_cached(Program::Barrier { ranks: 3 }, arch, &cache).unwrap();
    assert!(other.compiled());
}

#[test]
fn an_architecture_that_does_not_exist_is_an_error() {
    let Some(compiler) = compiler() else { return };
    let error = compiler.compile(Program::Barrier { ranks: 2 }, Arch::new(42, 0)).unwrap_err();
    assert!(matches!(error, JitError::TooOld { .. }), "{error}");
    assert!(error.to_string().contains("sm_420a"), "{error}");
}

/// What a collective's kernel must be made of, if it uses multicast.
fn multicast_instructions(collective: &Collective) -> Vec<&'static str> {
    let reduce = match collective.element {
        Element::F32 => "multimem.ld_reduce.weak.global.add.v4.f32 ",
        Element::Bf16 => "multimem.ld_reduce.weak.global.add.acc::f32.v4.bf16x2 ",
        Element::F16 => "multimem.ld_reduce.weak.global.add.acc::f32.v4.f16x2 ",
    };
    let cell = "multimem.st.relaxed.sys.global.u64 ";
    let store = "multimem.st.weak.global.v4.f32 ";
    let stages = ["multimem.st.release.sys.global.u32 ", "fence.proxy.alias;"];
    let own: &[&str] = match (collective.kind, collective.way) {
        (CollectiveKind::AllGather | CollectiveKind::AllReduce, Way::Cells) => return vec![cell],
        (CollectiveKind::AllGather, _) => &[store],
        (CollectiveKind::AllReduce, Way::TwoShot) => &[reduce, store],
        _ => &[reduce],
    };
    own.iter().chain(&stages).copied().collect()
}

#[test]
fn collectives_are_made_of_the_instructions_that_are_meant() {
    let Some(compiler) = compiler() else { return };
    let mut seen = 0;
    for arch in [Arch::new(9, 0), Arch::new(10, 0)] {
        for program in Program::all(2) {
            let cubin = compiler.compile(program, arch).unwrap_or_else(|e| panic!("{e}"));
            let expected = match program {
                Program::Collective(collective) if collective.multicast => {
                    multicast_instructions(&collective)
                }
                Program::MultimemBarrier { .. } => {
                    vec!["multimem.red.release.sys.global.xor.b32 ", "fence.proxy.alias;"]
                }
                // Nothing else touches a multicast address.
                _ => {
                    assert!(!cubin.assembly().contains("multimem"), "{arch} {program:?}");
                    continue;
                }
            };
            for instruction in expected {
                assert!(cubin.assembly().contains(instruction), "{arch} {program:?}: {instruction}");
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 2 * 15);
}
