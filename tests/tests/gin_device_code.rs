//! NCCL's device API compiles with NVRTC, for the headers of every release. No GPU is needed; the headers come from wheels.

use integration_tests::gpu::skipped;
use nccl_gin::device_code::sources;
use nccl_gin::sys::Version;
use std::path::{Path, PathBuf};

#[path = "../../nccl-gin-soft/examples/gin_put/nvrtc.rs"]
mod nvrtc;

const KERNELS: &str = include_str!("gin_gpu/kernels.cu");
const EXAMPLE: &str = include_str!("../../nccl-gin-soft/examples/gin_put/kernel.cu");

/// Layouts as NCCL's own threads, compiled by a host compiler, have them.
const LAYOUTS: &str = r#"
#include "nccl_gin.h"
#if NCCL_VERSION_CODE >= 22907
static_assert(sizeof(ncclGinProxyGfd_t) % 8 == 0, "requests are whole words");
static_assert(sizeof(ncclGinProxyQword_t) == 8, "a word of a request is packed");
#endif
extern "C" __global__ void nothing(ncclDevComm comm) {}
"#;

fn wheels() -> PathBuf {
    let beside = || Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map(|target| target.join("wheels"));
    std::env::var_os("WHEELS_DIR").map(PathBuf::from).or_else(beside).unwrap_or_default()
}

#[test]
fn kernels_compile_against_every_release() {
    const TEST: &str = "kernels_compile_against_every_release";
    if let Err(reason) = nvrtc::compile("", &[], &[]) {
        return skipped(TEST, &reason);
    }
    let cuda = nvrtc::cuda_include();
    if !cuda.join("cuda_fp16.h").is_file() {
        return skipped(
            TEST,
            &format!("no CUDA headers in {}; name them in {}", cuda.display(), nvrtc::INCLUDE_ENV),
        );
    }
    for (release, code) in [
        ("2.28.3", 22803),
        ("2.28.9", 22809),
        ("2.29.7", 22907),
        ("2.30.7", 23007),
        ("2.31.2", 23102),
        ("2.32.3", 23203),
    ] {
        let include = wheels().join(format!("nvidia-nccl-cu13-{release}/nvidia/nccl/include"));
        if !include.join("nccl_device.h").is_file() {
            skipped(TEST, &format!("no headers of NCCL {release} in {}", include.display()));
            continue;
        }
        let sources = sources(Version::from_code(code), include).unwrap();
        let mut options = sources.options(&cuda);
        options.push("--gpu-architecture=sm_90".into());
        // 2.28.3 has no GIN, and the rest of 2.28 neither signals by address nor barriers with a fence.
        let all = [
            ("layouts", LAYOUTS, 0),
            ("the example", EXAMPLE, 22809),
            ("the tests' kernels", KERNELS, 22907),
        ];
        for (name, source, _) in all.into_iter().filter(|one| code >= one.2) {
            match nvrtc::compile(source, sources.headers(), &options) {
                Ok(code) => println!("NCCL {release}: {name}: {} bytes", code.len()),
                Err(error) => panic!("NCCL {release}: {name}: {error}"),
            }
        }
    }
}
