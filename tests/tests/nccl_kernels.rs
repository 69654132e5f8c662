//! The kernels of the NCCL tests compile with the headers of every release, without a GPU.

use integration_tests::gpu::skipped;
use integration_tests::nccl_headers::NcclHeaders;
use integration_tests::nvrtc::{Nvrtc, wheels};

const RELEASES: [&str; 6] = ["2.28.3", "2.28.9", "2.29.7", "2.30.7", "2.31.2", "2.32.3"];
const ARCHITECTURES: [&str; 2] = ["sm_90", "sm_100"];

fn compiler(test: &str) -> Option<Nvrtc> {
    Nvrtc::find().map_err(|error| skipped(test, &error)).ok()
}

#[test]
fn plain_kernels_need_no_header() {
    let Some(nvrtc) = compiler("plain_kernels_need_no_header") else { return };
    for arch in ARCHITECTURES {
        let cubin = nvrtc.compile(include_str!("../kernels/peers.cu"), arch, &[]).unwrap();
        assert!(cubin.starts_with(b"\x7fELF"));
    }
    let log = nvrtc.compile("this is no CUDA", "sm_90", &[]).unwrap_err();
    assert!(log.contains("error"), "{log}");
}

#[test]
fn barrier_kernels_compile_with_every_release() {
    let test = "barrier_kernels_compile_with_every_release";
    let Some(nvrtc) = compiler(test) else { return };
    for release in RELEASES {
        let include = wheels().join(format!("nvidia-nccl-cu13-{release}/nvidia/nccl/include"));
        if !include.is_dir() {
            skipped(test, &format!("no wheel of NCCL {release} (cargo xtask test fetches it)"));
            continue;
        }
        let headers = NcclHeaders::new(&include).unwrap();
        let options = headers.options(&nvrtc.cuda_headers());
        for arch in ARCHITECTURES {
            let cubin = nvrtc
                .compile(include_str!("../kernels/lsa_barrier.cu"), arch, &options)
                .unwrap_or_else(|log| panic!("NCCL {release}, {arch}:\n{log}"));
            assert!(cubin.starts_with(b"\x7fELF"));
        }
    }
}
