//! Where a run takes place: devices, clocks, versions.

use std::process::Command;
use std::time::{Duration, SystemTime};

use cuda_vmm::sys::CUdevice_attribute;
use cuda_vmm::{Cuda, Device};
use deepep_core::jit::Compiler;
use serde::{Deserialize, Serialize};

use crate::process::short_output;

/// The longest that `nvidia-smi` is waited for; without persistence mode it starts the driver first.
const NVIDIA_SMI: Duration = Duration::from_secs(20);

/// The machine and the software on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Version of this program.
    pub deepep: String,
    /// CUDA version that the driver supports.
    pub cuda: Option<String>,
    /// The driver's own version, if `nvidia-smi` or the kernel module tells it.
    pub driver: Option<String>,
    /// Version of the compiler.
    pub nvrtc: Option<String>,
    /// Architecture, number of processors, and their name.
    pub host: String,
    /// Visible devices.
    pub devices: Vec<DeviceInfo>,
}

/// One device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceInfo {
    /// Name.
    pub name: String,
    /// Multiprocessors.
    pub sms: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// PCI address.
    pub pci: String,
    /// Highest clock of multiprocessors, MHz.
    pub max_sm_mhz: Option<f64>,
    /// Highest clock of memory, MHz.
    pub max_memory_mhz: Option<f64>,
    /// Clock of multiprocessors at the end of the run, MHz, if `nvidia-smi` tells it.
    pub sm_mhz: Option<f64>,
    /// Clock of memory at the end of the run, MHz, if `nvidia-smi` tells it.
    pub memory_mhz: Option<f64>,
    /// Limit of power, W, if `nvidia-smi` tells it.
    pub power_limit_w: Option<f64>,
}

/// Now, UTC, to the second.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

impl Machine {
    /// Looks around. With `gpus`, at the devices, too; what can't be found out is left out.
    pub fn find(gpus: bool) -> Self {
        let processors = std::thread::available_parallelism().map_or(0, usize::from);
        let mut machine = Self {
            deepep: env!("CARGO_PKG_VERSION").into(),
            host: format!("{}, {processors} processors{}", std::env::consts::ARCH, processor_name()),
            ..Self::default()
        };
        if !gpus {
            return machine;
        }
        machine.nvrtc = Compiler::find(None).ok().map(|compiler| {
            let (major, minor) = compiler.version();
            format!("{major}.{minor}")
        });
        let Ok(cuda) = Cuda::get() else { return machine };
        let version = cuda.driver().version();
        machine.cuda = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
        machine.devices = cuda.devices().unwrap_or_default().iter().map(DeviceInfo::of).collect();
        let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        machine.driver = module_version(&module);
        let query = "pci.bus_id,driver_version,clocks.sm,clocks.mem,power.limit";
        let format = "--format=csv,noheader,nounits";
        let mut smi = Command::new("nvidia-smi");
        smi.args([&format!("--query-gpu={query}"), format]);
        if let Some(told) = short_output(&mut smi, NVIDIA_SMI) {
            machine.add_told(&told);
        }
        machine
    }

    /// Reads what `nvidia-smi` says; devices are recognised by their PCI address.
    fn add_told(&mut self, text: &str) {
        for line in text.lines() {
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let [pci, driver, sm, memory, power] = fields[..] else { continue };
            let same = |device: &&mut DeviceInfo| {
                // Domains of eight digits there, of four here.
                let tail = |pci: &str| pci.to_lowercase().rsplit(':').take(2).map(str::to_owned).collect();
                let (a, b): (Vec<_>, Vec<_>) = (tail(&device.pci), tail(pci));
                a == b
            };
            if let Some(device) = self.devices.iter_mut().find(same) {
                device.sm_mhz = sm.parse().ok();
                device.memory_mhz = memory.parse().ok();
                device.power_limit_w = power.parse().ok();
                self.driver = Some(driver.into());
            }
        }
    }
}

/// The version in what the kernel module says about itself.
fn module_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(version).map(str::to_owned)
}

/// With a comma before it; nothing if the kernel doesn't tell.
fn processor_name() -> String {
    let told = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = told.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or(String::new(), |(_, name)| format!(", {}", name.trim()))
}

impl DeviceInfo {
    fn of(device: &Device) -> Self {
        let number = |attribute| device.attribute(attribute).ok().filter(|&n| n > 0);
        let megahertz = |attribute| number(attribute).map(|kilohertz| f64::from(kilohertz) / 1e3);
        Self {
            name: device.name().unwrap_or_default(),
            sms: number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).unwrap_or(0) as u32,
            memory: device.total_memory().unwrap_or(0) as u64,
            pci: device.pci_bus_id().unwrap_or_default(),
            max_sm_mhz: megahertz(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            max_memory_mhz: megahertz(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nvidia_smi_says_goes_to_the_right_device() {
        let device = |pci: &str| DeviceInfo { pci: pci.into(), ..DeviceInfo::default() };
        let mut machine =
            Machine { devices: vec![device("0000:0F:00.0"), device("0000:1b:00.0")], ..Machine::default() };
        machine.add_told(
            "00000000:1B:00.0, 580.1, 1980, 3201, 700.00\n00000000:0F:00.0, 580.1, 345, [N/A], 650\nbroken",
        );
        assert_eq!(machine.driver.as_deref(), Some("580.1"));
        let [first, second] = &machine.devices[..] else { panic!() };
        assert_eq!((first.sm_mhz, first.memory_mhz, first.power_limit_w), (Some(345.0), None, Some(650.0)));
        assert_eq!((second.sm_mhz, second.memory_mhz), (Some(1980.0), Some(3201.0)));
    }

    #[test]
    fn the_kernel_module_knows_its_version() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder)\nGCC version: gcc 12.3.0\n";
        assert_eq!(module_version(open).as_deref(), Some("580.159.04"));
        assert_eq!(module_version("GCC version: gcc 12.3.0"), None);
        assert_eq!(module_version(""), None);
    }

    #[test]
    fn dates_are_utc() {
        let now = now();
        assert!(now.len() == 20 && now.ends_with('Z') && now.as_bytes()[10] == b'T', "{now}");
    }
}
