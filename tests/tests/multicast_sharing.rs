//! Multicast objects that travel between drivers, as between processes: descriptors, FABRIC handles, and what does not pass for an object.

use cuda_vmm::multicast::{Incomplete, ObjectProperties, SocketStar};
use cuda_vmm::share::{DescriptorError, FabricHandle};
use cuda_vmm::sys::CUresult;
use cuda_vmm::{Cuda, Error, HandleTypes, PhysicalMemory, Properties};
use cuda_vmm_emu::{Config, Emulator, Fabric};
use integration_tests::multicast::{GRANULE, Local, allowed, on};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(10);

#[test]
fn objects_travel_and_other_things_do_not_pass_for_them() {
    on("objects_travel_and_other_things_do_not_pass_for_them", Config::h200x2(), |_, cuda| {
        let other = Emulator::new(Config::h200x2()).unwrap();
        let there = Cuda::with_driver(other.driver()).unwrap();
        let (here, far) = UnixStream::pair().unwrap();

        let private = Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE)).unwrap();
        let error = private.send(&here, SOON).unwrap_err();
        assert!(matches!(error, Error::NotExportable { what: "a multicast object", .. }), "{error}");
        assert!(matches!(private.export_fabric(), Err(Error::NotExportable { .. })));

        // FABRIC is claimed and refused there: the best that is to be had is a file descriptor.
        let mut object = Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE).shareable()).unwrap();
        assert_eq!(object.handle_types(), HandleTypes::POSIX_FD);
        object.send(&here, SOON).unwrap();
        let mut import = Incomplete::receive(&there, &far, SOON).unwrap();
        assert_eq!((import.devices(), import.size()), (2, GRANULE));
        import.add_device(&there.device(1).unwrap()).unwrap();
        object.add_device(&cuda.device(0).unwrap()).unwrap();
        // The device that the other one added counts.
        let error = object.add_device(&cuda.device(1).unwrap()).unwrap_err();
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
        // Neither can tell alone that all are there.
        let rejected = object.complete().unwrap_err();
        assert!(matches!(rejected.error, Error::MissingDevices { added: 1, devices: 2, .. }), "{rejected}");
        let rejected = import.complete().unwrap_err();
        assert!(rejected.to_string().contains("complete_with"), "{rejected}");

        // Memory is no multicast object, and the other way round.
        let memory = Local::new(cuda, 0, GRANULE).memory;
        cuda_vmm::share::send(&here, &memory, SOON).unwrap();
        let error = Incomplete::receive(&there, &far, SOON).unwrap_err();
        assert!(matches!(error, Error::Descriptor(DescriptorError::Kind { found: "memory", .. })), "{error}");
        drop(rejected);
        let object = Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE).shareable()).unwrap();
        object.send(&here, SOON).unwrap();
        let error = cuda_vmm::share::receive(&there, &far, SOON).unwrap_err();
        assert!(
            matches!(error, Error::Descriptor(DescriptorError::Kind { expected: "memory", .. })),
            "{error}"
        );
        let mut forged =
            Incomplete::import_fd(&there, memory.export_fd().unwrap(), &ObjectProperties::new(2, GRANULE))
                .unwrap();
        let error = forged.add_device(&there.device(1).unwrap()).unwrap_err();
        assert!(error.to_string().contains("is the handle one of a multicast object"), "{error}");
        drop(forged);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let error = Incomplete::import_fd(&there, &file, &ObjectProperties::new(2, GRANULE)).unwrap_err();
        assert!(matches!(error, Error::Call { .. }), "{error}");
        let forged = FabricHandle::from_bytes([7; 64]);
        let error =
            Incomplete::import_fabric(&there, &forged, &ObjectProperties::new(2, GRANULE)).unwrap_err();
        assert!(matches!(error, Error::Call { .. }), "{error}");
        for (devices, size) in [(0, GRANULE), (2, 0), (2, GRANULE + 1)] {
            let properties = ObjectProperties::new(devices, size);
            assert!(Incomplete::import_fd(&there, &file, &properties).is_err());
        }
        // A bind through an exportable object needs exportable memory.
        let mut object = Incomplete::create(cuda, &ObjectProperties::new(1, GRANULE).shareable()).unwrap();
        object.add_device(&cuda.device(0).unwrap()).unwrap();
        let private = PhysicalMemory::create(cuda, GRANULE, &Properties::device(0)).unwrap();
        let error = object.complete().unwrap().bind(0, &private, 0, GRANULE).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        drop(far);
        other.assert_empty();
    });
}

#[test]
fn fabric_handles_carry_objects_where_there_is_an_imex_channel() {
    let config = || Config::h200x2().fabric(Fabric::Working);
    on("fabric_handles_carry_objects_where_there_is_an_imex_channel", config(), |_, cuda| {
        let other = Emulator::new(config()).unwrap();
        let there = Cuda::with_driver(other.driver()).unwrap();
        let properties = ObjectProperties::new(2, GRANULE);
        let object = Incomplete::create(cuda, &properties.shareable()).unwrap();
        assert_eq!(object.handle_types(), HandleTypes::POSIX_FD | HandleTypes::FABRIC);
        let fabric = object.export_fabric().unwrap();
        let mut import = Incomplete::import_fabric(&there, &fabric, &properties).unwrap();
        import.add_device(&there.device(1).unwrap()).unwrap();
        drop(import);

        // Only FABRIC: the handle travels in the message itself.
        let object = Incomplete::create(cuda, &properties.handle_types(HandleTypes::FABRIC)).unwrap();
        let (here, far) = UnixStream::pair().unwrap();
        object.send(&here, SOON).unwrap();
        Incomplete::receive(&there, &far, SOON).unwrap();
        other.assert_empty();
    });
}

#[test]
fn errors_of_agreement_leave_the_object() {
    if !allowed("errors_of_agreement_leave_the_object") {
        return;
    }
    // Two members whose devices are added, but one says that the object is for three.
    let (here, far) = UnixStream::pair().unwrap();
    let member = |rank: usize, devices: u32, mut star: SocketStar| {
        let emulator = Emulator::new(Config::new(3)).unwrap();
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        let mut object = Incomplete::create(&cuda, &ObjectProperties::new(devices, GRANULE)).unwrap();
        object.add_device(&cuda.device(rank as i32).unwrap()).unwrap();
        let rejected = object.complete_with(&mut star, SOON).unwrap_err();
        assert!(matches!(rejected.error, Error::Disagreement { .. }), "{rejected}");
        // Then they agree on the number, and miss a device.
        let mut object = rejected.object;
        if devices == 3 {
            object = Incomplete::create(&cuda, &ObjectProperties::new(2, GRANULE)).unwrap();
        }
        let rejected = object.complete_with(&mut star, SOON).unwrap_err();
        assert!(matches!(rejected.error, Error::MissingDevices { added: 1, devices: 2, .. }), "{rejected}");
        drop(rejected);
        emulator.assert_empty();
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| member(1, 3, SocketStar::member(1, 2, far)));
        member(0, 2, SocketStar::root(vec![here]));
        other.join().unwrap();
    });
}
