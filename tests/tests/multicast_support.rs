//! Who has multicast: drivers that are too old, the process-wide switch, and real GPUs, on which nothing is created.

use cuda_vmm::multicast::{Incomplete, ObjectProperties, Options, SocketStar, Team, support, supported};
use cuda_vmm::share::FabricHandle;
use cuda_vmm::sys::{CUresult, Function};
use cuda_vmm::{Capabilities, Cuda, Error, PhysicalMemory, Properties, Support};
use cuda_vmm_emu::{Config, Emulator};
use integration_tests::gpu;
use integration_tests::multicast::{GRANULE, on};
use integration_tests::process::{Peer, role};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[test]
fn drivers_without_multicast_say_no() {
    let test = "drivers_without_multicast_say_no";
    let create = |cuda: &Cuda| Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE)).unwrap_err();
    // Too old: it knows neither the attribute nor the functions.
    on(test, Config::h200x2().driver_version(12_000), |_, cuda| {
        let device = cuda.device(0).unwrap();
        assert_eq!((support(&device).unwrap(), supported(&device)), (Support::No, false));
        assert_eq!(Capabilities::probe(&device).unwrap().multicast, Support::No);
        let error = create(cuda);
        assert!(error.to_string().contains("it needs CUDA 12.1"), "{error}");
    });
    on(test, Config::h200x2().without(Function::cuMulticastCreate), |_, cuda| {
        assert_eq!(support(&cuda.device(0).unwrap()).unwrap(), Support::No);
        assert!(matches!(create(cuda), Error::Call { .. }));
    });
    on(test, Config::h200x2().multicast(false), |_, cuda| {
        assert_eq!(create(cuda).status(), Some(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    });
    // A driver that does not answer is no driver that says no.
    on(test, Config::h200x2(), |emulator, cuda| {
        let device = cuda.device(0).unwrap();
        assert_eq!(support(&device).unwrap(), Support::Claimed);
        emulator.faults().fail_once(Function::cuDeviceGetAttribute, CUresult::CUDA_ERROR_UNKNOWN);
        assert_eq!(support(&device).unwrap_err().status(), Some(CUresult::CUDA_ERROR_UNKNOWN));
        assert!(supported(&device));
    });
}

/// In a process of its own, because the switch is read from the environment. Nothing reaches the driver that could create an object.
#[test]
fn the_switch_refuses_before_the_driver() {
    const TEST: &str = "the_switch_refuses_before_the_driver";
    if let Some(variable) = role(TEST) {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        refuses(&Cuda::with_driver(emulator.driver()).unwrap(), &variable);
        assert_eq!(emulator.faults().calls(Function::cuMulticastCreate), 0);
        assert_eq!(emulator.faults().calls(Function::cuMemImportFromShareableHandle), 0);
        emulator.assert_empty();
        return;
    }
    for (variable, value) in [("CUDA_VMM_DISABLE_MULTICAST", "1"), ("NCCL_NVLS_ENABLE", "0")] {
        let other =
            if value == "1" { ("NCCL_NVLS_ENABLE", "1") } else { ("CUDA_VMM_DISABLE_MULTICAST", "0") };
        Peer::spawn(TEST, variable, &[(variable, value), other]).finish();
    }
}

/// What is refused where a variable switches multicast off, and what still works.
fn refuses(cuda: &Cuda, variable: &str) {
    let device = cuda.device(0).unwrap();
    assert!(matches!(support(&device).unwrap(), Support::SwitchedOff(by) if by == variable));
    assert!(!supported(&device));
    let properties = ObjectProperties::new(2, GRANULE).shareable();
    let minimum = properties.granularities(cuda).unwrap().minimum;
    assert_eq!(minimum.bytes(), GRANULE);

    let is_off = |error: Error| {
        assert!(matches!(&error, Error::MulticastDisabled { variable: by } if *by == variable), "{error}");
    };
    is_off(Incomplete::create(cuda, &properties).unwrap_err());
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    is_off(Incomplete::import_fd(cuda, &file, &properties).unwrap_err());
    is_off(Incomplete::import_fabric(cuda, &FabricHandle::from_bytes([0; 64]), &properties).unwrap_err());
    let (_here, there) = UnixStream::pair().unwrap();
    is_off(Incomplete::receive(cuda, &there, Duration::from_secs(10)).unwrap_err());
    let memory = PhysicalMemory::create(cuda, GRANULE, &Properties::device(0)).unwrap();
    let mut alone = SocketStar::root(Vec::<OwnedFd>::new());
    let options = Options::default();
    is_off(Team::create(&[memory], &mut alone, &options).unwrap_err());
}

/// On GPUs: only what creates nothing. The switch is set in a process of its own, so that whatever happens nothing can be created.
#[test]
fn gpus_tell_their_support_and_granularity_and_the_switch_refuses() {
    const TEST: &str = "gpus_tell_their_support_and_granularity_and_the_switch_refuses";
    const VARIABLE: &str = "CUDA_VMM_DISABLE_MULTICAST";
    if role(TEST).is_none() {
        return Peer::spawn(TEST, "reader", &[(VARIABLE, "1")]).finish();
    }
    let Some(cuda) = gpu::cuda(TEST, 1) else { return };
    assert_eq!(cuda_vmm::multicast_disabled_by(), Some(VARIABLE));
    for device in cuda.devices().unwrap() {
        println!("device {}: multicast {}", device.ordinal(), support(&device).unwrap());
        assert!(!supported(&device));
    }
    let devices = cuda.device_count() as u32;
    if support(&cuda.device(0).unwrap()).unwrap() == Support::No {
        return gpu::skipped(TEST, "the device has no multicast");
    }
    let properties = ObjectProperties::new(devices, 64 << 20);
    let granularities = properties.granularities(cuda).unwrap();
    println!(
        "{devices} devices: minimum {}, recommended {}",
        granularities.minimum, granularities.recommended
    );
    let fitting = ObjectProperties::fitting(cuda, devices, 1, &Properties::device(0)).unwrap();
    assert!(granularities.minimum.divides(fitting.size()));
    let error = Incomplete::create(cuda, &properties).unwrap_err();
    assert!(matches!(error, Error::MulticastDisabled { variable: VARIABLE }), "{error}");
}
