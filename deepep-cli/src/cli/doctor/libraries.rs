//! NVRTC and NCCL.

use std::time::Duration;

use cuda_vmm::Cuda;
use deepep_core::jit::{Cache, Compiler, Embedded};
use nccl_gin::sys::{Nccl, Version};
use nccl_gin::{Communicator, Config, Device, Properties, UniqueId};

use super::{Finding, gin};

const COMPILER: &str = "compiler";
const NCCL: &str = "NCCL";

pub(super) fn check(findings: &mut Vec<Finding>) {
    if let Some(nvcc) = Embedded::compiler() {
        let mut archs: Vec<_> = Embedded::all().iter().map(Embedded::arch).collect();
        archs.sort_unstable();
        archs.dedup();
        let text = format!("{} for {}, from nvcc {nvcc}", Embedded::all().len(), archs.join(", "));
        findings.push(Finding::info(COMPILER, "kernels in this program", text));
    }
    match Compiler::find(None) {
        Ok(compiler) => {
            let (major, minor) = compiler.version();
            let text = format!("{major}.{minor}, {}", compiler.library().display());
            findings.push(Finding::yes(COMPILER, "NVRTC", text));
        }
        Err(error) => {
            let remedy = match Embedded::compiler() {
                Some(_) => {
                    "only GPUs need it, for kernels that are not in this program: pip install nvidia-cuda-nvrtc"
                }
                None => "only GPUs need it: pip install nvidia-cuda-nvrtc, or install the CUDA toolkit",
            };
            findings.push(Finding::no(COMPILER, "NVRTC", error, remedy));
        }
    }
    let cache = Cache::default_location();
    let place = cache.directory().map_or("none".into(), |path| path.display().to_string());
    findings.push(Finding::info(COMPILER, "cache of compiled kernels", place));

    let nccl = match Nccl::get() {
        Ok(nccl) => nccl,
        Err(error) => {
            let remedy =
                "NVLink within one host doesn't need it: pip install nvidia-nccl-cu13 for more than one host";
            findings.push(Finding::no(NCCL, "NCCL", error, remedy));
            return;
        }
    };
    findings.push(Finding::yes(NCCL, "NCCL", format!("{}, {}", nccl.version(), nccl.origin())));
    if Cuda::get().is_ok_and(|cuda| cuda.device_count() > 0) {
        match properties(nccl) {
            Ok(properties) => supported(nccl.version(), &properties, findings),
            Err(error) => {
                let remedy = "NCCL_DEBUG=INFO tells more; NVLink within one host doesn't need NCCL";
                findings.push(Finding::no(NCCL, "communicator of one rank", error, remedy));
            }
        }
    } else {
        gin::check(nccl.version(), None, findings);
    }
}

/// What a communicator of one rank says.
fn properties(nccl: &Nccl) -> nccl_gin::Result<Properties> {
    let device = Device::open(0)?;
    let id = UniqueId::new(nccl)?;
    let config = Config::new().timeout(Duration::from_secs(30));
    let communicator = Communicator::init(nccl, &device, &id, 1, 0, &config)?;
    let properties = communicator.properties();
    communicator.close()?;
    properties
}

fn supported(version: Version, properties: &Properties, findings: &mut Vec<Finding>) {
    let Some(support) = &properties.support else {
        let text = "this version doesn't tell; 2.29 and newer do";
        findings.push(Finding::info(NCCL, "device API and GIN", text));
        return;
    };
    let yes_or_no = |what: &str, yes: bool, remedy: &str| {
        if yes { Finding::yes(NCCL, what, "yes") } else { Finding::no(NCCL, what, "no", remedy) }
    };
    findings.push(yes_or_no(
        "windows and device communicators",
        support.device_api,
        "they need symmetric memory: NCCL_CUMEM_ENABLE must not be 0",
    ));
    gin::check(version, Some(support), findings);
}
