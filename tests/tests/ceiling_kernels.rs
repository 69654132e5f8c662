//! The kernels of `deepep bench` compile for every architecture we name, and keep their values in registers. Needs NVRTC, but no GPU.

use deepep_cli::bench::ceilings;
use deepep_core::jit::{Arch, Cache, Compiler, JitError};
use integration_tests::nvrtc::wheels;

fn compiler() -> Option<Compiler> {
    let wheel = wheels().join("nvidia-cuda-nvrtc-13.0.88/nvidia/cu13/lib/libnvrtc.so.13");
    let found = Compiler::find(None);
    match found.or_else(|error| if wheel.is_file() { Compiler::find(Some(&wheel)) } else { Err(error) }) {
        Ok(compiler) => Some(compiler),
        Err(error @ JitError::NotFound { .. }) => {
            integration_tests::gpu::skipped("ceiling_kernels", &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn they_compile_without_local_memory() {
    let Some(compiler) = compiler() else { return };
    for arch in [Arch::new(9, 0), Arch::new(10, 0)] {
        let cubin =
            ceilings::compile(&compiler, arch, &Cache::disabled()).unwrap_or_else(|error| panic!("{error}"));
        let mut found: Vec<&str> = cubin.resources().iter().map(|kernel| kernel.kernel.as_str()).collect();
        let mut expected: Vec<&str> = ceilings::ENTRIES.iter().map(|name| name.to_str().unwrap()).collect();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "{arch}");
        for kernel in cubin.resources() {
            eprintln!("{arch} {kernel:?}");
            assert!(kernel.in_registers(), "{arch}: {kernel:?}");
        }
        // What their names promise.
        for instruction in [
            "st.global.cs.v4.u32",
            "cp.async.bulk.global.shared::cta",
            "cp.async.bulk.shared::cluster",
            "st.relaxed.sys.global.b128",
            "ld.relaxed.sys.global.b128",
            "griddepcontrol.wait",
        ] {
            assert!(cubin.assembly().contains(instruction), "{arch}: {instruction}");
        }
    }
}

#[test]
fn a_second_compilation_comes_from_the_cache_and_other_sources_do_not() {
    let Some(compiler) = compiler() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (cache, arch) = (Cache::at(folder.path()), Arch::new(9, 0));
    let kernel =
        "#include \"arch/time.cuh\"\nextern \"C\" __global__ void now(u64* t) { *t = arch::now_ns(); }\n";
    let first = compiler.compile_source("now", kernel, arch, &cache).unwrap();
    let second = compiler.compile_source("now", kernel, arch, &cache).unwrap();
    assert!(first.compiled() && !second.compiled());
    assert_eq!(first.image(), second.image());
    let other = compiler.compile_source("now", &kernel.replace("*t =", "t[1] ="), arch, &cache).unwrap();
    assert!(other.compiled());
    let error = compiler.compile_source("bad", "#include \"comm/wait.cuh\"\n", arch, &cache).unwrap_err();
    assert!(matches!(&error, JitError::Compile { program: "bad", .. }), "{error}");
}
