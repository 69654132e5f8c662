//! The driver, the devices, and how they reach each other.

use cuda_vmm::sys::{CUdevice_P2PAttribute, CUdevice_attribute, LoadError};
use cuda_vmm::{Capabilities, Cuda, Device, Error, Support, multicast_disabled_by};

use super::Finding;
use crate::cli::paint;

const DRIVER: &str = "driver";
const DEVICES: &str = "devices";
const LINKS: &str = "links";

pub(super) fn check(findings: &mut Vec<Finding>) {
    let cuda = match Cuda::get() {
        Ok(cuda) => cuda,
        Err(error) => {
            let remedy = match &error {
                Error::Load(LoadError::NotFound { .. }) => {
                    "install NVIDIA's driver if this machine has a GPU; without one, ranks are emulated on CPUs"
                }
                _ => "fix the driver, or run emulated ranks with --backend host",
            };
            findings.push(Finding::no(DRIVER, "CUDA driver", error, remedy));
            return;
        }
    };
    let version = cuda.driver().version();
    let text = format!("CUDA {}.{}, {}", version / 1000, version % 1000 / 10, cuda.driver().origin());
    findings.push(Finding::yes(DRIVER, "CUDA driver", text));
    let devices = match cuda.devices() {
        Ok(devices) => devices,
        Err(error) => {
            findings.push(Finding::no(DEVICES, "devices", error, "see nvidia-smi"));
            return;
        }
    };
    if devices.is_empty() {
        let remedy = "is CUDA_VISIBLE_DEVICES empty? Without a device, ranks are emulated on CPUs";
        findings.push(Finding::no(DEVICES, "devices", "none visible", remedy));
    }
    for device in &devices {
        describe(device, findings);
    }
    links(&devices, findings);
}

fn describe(device: &Device, findings: &mut Vec<Finding>) {
    let what = format!("device {}", device.ordinal());
    let number = |attribute| device.attribute(attribute).unwrap_or(0);
    let name = device.name().unwrap_or_else(|error| error.to_string());
    let memory = device.total_memory().map(paint::bytes).unwrap_or_default();
    let major = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    let bus = device.pci_bus_id().unwrap_or_default();
    let text = format!("{name}, {memory}, compute capability {major}.{minor}, {bus}");
    findings.push(if major >= 9 {
        Finding::yes(DEVICES, &what, text)
    } else {
        let remedy = "the kernels need compute capability 9.0 or newer (Hopper): ranks use other devices, or CPUs if there are none";
        Finding::no(DEVICES, &what, text, remedy)
    });
    match device.host_numa_node() {
        Ok(Some(node)) => findings.push(Finding::info(DEVICES, format!("{what}: NUMA node"), node)),
        Ok(None) => {
            let remedy = "host memory comes from node 0; nothing to do on a machine with one node";
            findings.push(Finding::no(DEVICES, format!("{what}: NUMA node"), "not told", remedy));
        }
        Err(error) => {
            findings.push(Finding::no(DEVICES, format!("{what}: NUMA node"), error, "update the driver"))
        }
    }
    match Capabilities::probe(device) {
        Ok(capabilities) => {
            for (name, support) in capabilities.rows() {
                findings.push(capability(format!("{what}: {name}"), name, support));
            }
        }
        Err(error) => {
            let remedy = "is the device in use up to its last byte, or in exclusive mode?";
            findings.push(Finding::no(DEVICES, format!("{what}: capabilities"), error, remedy));
        }
    }
}

fn capability(what: String, name: &str, support: Support) -> Finding {
    let remedy = match name {
        "export as FABRIC handle" | "host-NUMA export as FABRIC handle" => {
            "needed between hosts only: give the process an IMEX channel (nvidia-modprobe, /dev/nvidia-caps-imex-channels)"
        }
        "multicast" => match multicast_disabled_by() {
            Some(_) => "unset the variable to use multicast; nothing else needs it",
            None => "multicast needs NVSwitch; nothing else needs it",
        },
        "GPUDirect RDMA" => "needed between hosts only: load nvidia-peermem, or use dma-buf",
        "dma-buf" => "needed between hosts only: use the open kernel modules",
        "virtual memory management" | "export as POSIX fd" => {
            "symmetric memory needs it: update the driver, leave vGPU or WSL"
        }
        _ => "update the driver",
    };
    match support {
        Support::Works | Support::Claimed => Finding::yes(DEVICES, what, support),
        _ => Finding::no(DEVICES, what, support, remedy),
    }
}

fn links(devices: &[Device], findings: &mut Vec<Finding>) {
    for from in devices {
        for to in devices.iter().filter(|to| to.ordinal() > from.ordinal()) {
            let what = format!("device {} and {}", from.ordinal(), to.ordinal());
            let remedy = "ranks on these devices can't share memory: use devices linked by NVLink, or one of them alone";
            match (from.can_access(to), to.can_access(from)) {
                (Ok(true), Ok(true)) => {
                    let attribute = |which| from.link_attribute(to, which).unwrap_or(0);
                    let rank = attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK);
                    let atomics =
                        attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
                    // PCIe has no native atomics between GPUs.
                    let kind = if atomics == 1 { "NVLink" } else { "PCIe" };
                    findings.push(Finding::yes(LINKS, what, format!("{kind}, performance rank {rank}")));
                }
                (Err(error), _) | (_, Err(error)) => findings.push(Finding::no(LINKS, what, error, remedy)),
                _ => findings.push(Finding::no(LINKS, what, "no peer access", remedy)),
            }
        }
    }
}
