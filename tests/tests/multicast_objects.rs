//! Multicast objects of one process, on the software driver: each step, each wrong order that types cannot see, each refusal.

use cuda_vmm::multicast::{Incomplete, Object, ObjectProperties, support, supported};
use cuda_vmm::sys::{CUdevice_attribute, CUresult, Function};
use cuda_vmm::{
    Access, Cuda, Error, Grant, Granularity, Location, PhysicalMemory, Properties, Reservation, Support,
};
use cuda_vmm_emu::{Config, Emulator};
use integration_tests::multicast::{GRANULE, Local, on};

/// An object with both devices.
fn complete(cuda: &Cuda, properties: &ObjectProperties) -> Object {
    let mut object = Incomplete::create(cuda, properties).unwrap();
    for device in cuda.devices().unwrap() {
        object.add_device(&device).unwrap();
    }
    object.complete().unwrap()
}

fn memory(cuda: &Cuda, device: i32, size: usize) -> PhysicalMemory {
    PhysicalMemory::create(cuda, size, &Properties::device(device)).unwrap()
}

#[test]
fn one_store_reaches_both_devices() {
    on("one_store_reaches_both_devices", Config::h200x2(), |emulator, cuda| {
        let size = 2 * GRANULE;
        let object = complete(cuda, &ObjectProperties::new(2, size));
        let local = [0, 1].map(|device| Local::new(cuda, device, size));
        let bindings = local.iter().map(|l| object.bind(0, &l.memory, 0, size).unwrap()).collect();
        let multicast =
            object.map().unwrap().activate(bindings, &[Grant::device(0), Grant::device(1)]).unwrap();
        assert_eq!((multicast.size(), multicast.bindings().len()), (size, 2));
        assert_eq!(multicast.access(Location::Device(1)).unwrap(), Access::ReadWrite);

        let at = multicast.address().get() + GRANULE as u64;
        emulator.multimem_store(0, at, &[1.5_f32]).unwrap();
        assert_eq!(local.each_ref().map(|l| l.get(GRANULE)), [1.5, 1.5]);
        local[1].set(GRANULE, 2.0);
        let mut sum = [0.0_f32];
        emulator.multimem_ld_reduce_add(1, at, &mut sum).unwrap();
        assert_eq!(sum, [3.5]);

        // The object, the mapping and the memory live for as long as what needs them.
        drop((object, local));
        emulator.multimem_ld_reduce_add(0, at, &mut sum).unwrap();
        assert_eq!(sum, [3.5]);
        let (mapped, bindings) = multicast.deactivate();
        mapped.unmap().unwrap();
        for binding in bindings {
            binding.unbind().unwrap();
        }
    });
}

#[test]
fn sizes_fit_the_object_and_its_memory() {
    let config = Config::h200x2().multicast_granularity(2 * GRANULE, 8 * GRANULE);
    on("sizes_fit_the_object_and_its_memory", config, |emulator, cuda| {
        let kind = Properties::device(0);
        let properties = ObjectProperties::fitting(cuda, 2, 1, &kind).unwrap();
        assert_eq!(properties.size(), 2 * GRANULE, "multicast's granularity is the larger one");
        let common = properties.common_granularities(cuda, &kind).unwrap();
        assert_eq!((common.minimum.bytes(), common.recommended.bytes()), (2 * GRANULE, 8 * GRANULE));

        let error = Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE)).unwrap_err();
        assert!(matches!(error, Error::Misaligned { value: GRANULE, .. }), "{error}");
        for (devices, size) in [(0, GRANULE), (2, 0)] {
            let error = Incomplete::create(cuda, &ObjectProperties::new(devices, size)).unwrap_err();
            assert!(matches!(error, Error::Zero { .. }), "{error}");
        }
        let huge = ObjectProperties::fitting(cuda, 2, usize::MAX, &kind).unwrap_err();
        assert!(matches!(huge, Error::Overflow { .. }), "{huge}");
        assert_eq!(emulator.faults().calls(Function::cuMulticastCreate), 0);
    });
    // And the other way round: the memory's granularity is the larger one.
    let config = Config::h200x2().granularity(2 * GRANULE).multicast_granularity(GRANULE / 2, GRANULE);
    on("sizes_fit_the_object_and_its_memory", config, |_, cuda| {
        let properties = ObjectProperties::fitting(cuda, 2, 1, &Properties::device(0)).unwrap();
        assert_eq!(properties.size(), 2 * GRANULE);
    });
}

#[test]
fn every_device_is_added_once() {
    let none =
        |d: cuda_vmm_emu::Device| d.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0);
    on("every_device_is_added_once", Config::new(4).device(3, none), |emulator, cuda| {
        let devices = cuda.devices().unwrap();
        let mut object = Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE)).unwrap();
        object.add_device(&devices[0]).unwrap();
        let calls = emulator.faults().calls(Function::cuMulticastAddDevice);

        let error = object.add_device(&devices[0]).unwrap_err();
        assert!(matches!(error, Error::DeviceTwice { ordinal: 0 }), "{error}");
        let error = object.add_device(&devices[3]).unwrap_err();
        assert!(matches!(error, Error::Unsupported { what: "multicast", .. }), "{error}");
        let other = Emulator::new(Config::new(2)).unwrap();
        let foreign = Cuda::with_driver(other.driver()).unwrap().device(1).unwrap();
        assert!(matches!(object.add_device(&foreign), Err(Error::ForeignDriver { .. })));
        let rejected = object.complete().unwrap_err();
        assert!(matches!(rejected.error, Error::MissingDevices { added: 1, devices: 2, .. }), "{rejected}");
        assert_eq!(emulator.faults().calls(Function::cuMulticastAddDevice), calls);

        // Nothing is lost: the object goes on.
        let mut object = rejected.object;
        object.add_device(&devices[2]).unwrap();
        let error = object.add_device(&devices[1]).unwrap_err();
        assert!(matches!(error, Error::TeamFull { ordinal: 1, devices: 2 }), "{error}");
        assert_eq!(object.added(), [devices[0].clone(), devices[2].clone()]);
        object.complete().unwrap();
        assert!(supported(&devices[0]) && !supported(&devices[3]));
        assert_eq!(support(&devices[3]).unwrap(), Support::No);
    });
}

#[test]
fn bindings_are_checked_before_the_driver() {
    on("bindings_are_checked_before_the_driver", Config::new(3), |emulator, cuda| {
        let mut object = Incomplete::create(cuda, &ObjectProperties::new(2, 4 * GRANULE)).unwrap();
        for ordinal in [0, 1] {
            object.add_device(&cuda.device(ordinal).unwrap()).unwrap();
        }
        let object = object.complete().unwrap();
        let four = memory(cuda, 0, 4 * GRANULE);
        let first = object.bind(GRANULE, &four, 0, 2 * GRANULE).unwrap();
        assert_eq!((first.offset(), first.size(), first.device().ordinal()), (GRANULE, 2 * GRANULE, 0));
        let calls = |emulator: &Emulator| {
            [Function::cuMulticastBindMem, Function::cuMulticastBindAddr].map(|f| emulator.faults().calls(f))
        };
        let before = calls(emulator);

        let bind = |offset, from, size| object.bind(offset, &four, from, size).unwrap_err();
        assert!(matches!(bind(0, 0, 0), Error::Zero { .. }));
        for (offset, from, size) in [(1, 0, GRANULE), (0, 4096, GRANULE), (0, 0, GRANULE + 1)] {
            let error = bind(offset, from, size);
            assert!(matches!(error, Error::Misaligned { granularity: GRANULE, .. }), "{error}");
        }
        let far = usize::MAX - GRANULE + 1;
        for (offset, from, size) in [
            (3 * GRANULE, 0, 2 * GRANULE),
            (far, 0, GRANULE),
            (0, 4 * GRANULE, GRANULE),
            (0, far, GRANULE),
            (4 * GRANULE, 0, GRANULE),
        ] {
            let error = bind(offset, from, size);
            assert!(matches!(error, Error::OutOfBounds { .. }), "{offset} {from} {size}: {error}");
        }
        for (offset, size) in [(0, 2 * GRANULE), (GRANULE, GRANULE), (2 * GRANULE, 2 * GRANULE)] {
            let error = bind(offset, 0, size);
            let Error::BindingOverlap { ordinal: 0, bound_offset: GRANULE, .. } = error else {
                panic!("{error}")
            };
        }
        // Memory of a device that is not in the team, and of the host.
        for foreign in [Properties::device(2), Properties::host_numa(0)] {
            let foreign = PhysicalMemory::create(cuda, GRANULE, &foreign).unwrap();
            let error = object.bind(0, &foreign, 0, GRANULE).unwrap_err();
            assert!(matches!(error, Error::NotInTeam { .. }), "{error}");
        }
        let other = Emulator::new(Config::new(3)).unwrap();
        let other = Cuda::with_driver(other.driver()).unwrap();
        let error = object.bind(0, &memory(&other, 0, GRANULE), 0, GRANULE).unwrap_err();
        assert!(matches!(error, Error::ForeignDriver { .. }), "{error}");

        let local = Local::new(cuda, 1, 2 * GRANULE);
        let by_address =
            |offset, from, size| object.bind_mapping(offset, &local.mapping, from, size).unwrap_err();
        assert!(matches!(by_address(0, 4096, GRANULE), Error::Misaligned { .. }));
        assert!(matches!(by_address(0, GRANULE, 2 * GRANULE), Error::OutOfBounds { .. }));
        assert!(matches!(by_address(0, far, GRANULE), Error::OutOfBounds { .. }));
        assert!(matches!(by_address(4 * GRANULE, 0, GRANULE), Error::OutOfBounds { .. }));
        let stranger = cuda.device(2).unwrap();
        let address = local.mapping.address().get();
        // SAFETY: refused before the address is used.
        let error = unsafe { object.bind_address(0, &stranger, address, GRANULE) }.unwrap_err();
        assert!(matches!(error, Error::NotInTeam { .. }), "{error}");
        assert_eq!(calls(emulator), before, "no refused binding reached the driver");

        // Another device may be bound at the same place, and the same again once it is free.
        let second = object.bind_mapping(GRANULE, &local.mapping, 0, 2 * GRANULE).unwrap();
        drop(first);
        object.bind(0, &four, GRANULE, 2 * GRANULE).unwrap().unbind().unwrap();
        drop(second);
    });
}

#[test]
fn a_binding_is_undone_with_its_own_values() {
    on("a_binding_is_undone_with_its_own_values", Config::h200x2(), |emulator, cuda| {
        let object = complete(cuda, &ObjectProperties::new(2, 4 * GRANULE));
        let [local, other] = [0, 1].map(|device| Local::new(cuda, device, 4 * GRANULE));
        let by_handle = object.bind(0, &local.memory, 2 * GRANULE, GRANULE).unwrap();
        let by_mapping = object.bind_mapping(GRANULE, &local.mapping, 0, GRANULE).unwrap();
        let device = cuda.device(1).unwrap();
        // SAFETY: the memory is mapped for as long as the binding lives.
        let by_address = unsafe {
            object.bind_address(2 * GRANULE, &device, other.mapping.address().get(), 2 * GRANULE).unwrap()
        };
        let bound = |emulator: &Emulator| {
            let mut bound: Vec<_> =
                emulator.ledger().bindings.iter().map(|b| (b.device, b.offset, b.size)).collect();
            bound.sort_unstable();
            bound
        };
        let granule = GRANULE as u64;
        let all = [(0, 0, granule), (0, granule, granule), (1, 2 * granule, 2 * granule)];
        assert_eq!(bound(emulator), all);
        drop(by_mapping);
        assert_eq!(bound(emulator), [all[0], all[2]]);

        // A refusal gives the binding back as it was.
        emulator.faults().fail_once(Function::cuMulticastUnbind, CUresult::CUDA_ERROR_INVALID_VALUE);
        let rejected = by_handle.unbind().unwrap_err();
        assert_eq!(rejected.error.status(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
        assert_eq!(bound(emulator), [all[0], all[2]]);
        rejected.object.unbind().unwrap();
        by_address.unbind().unwrap();
        assert_eq!(bound(emulator), []);
        // The bindings outlive every other owner.
        let last = object.bind(0, &local.memory, 0, GRANULE).unwrap();
        drop((object, local));
        assert_eq!(bound(emulator), [all[0]]);
        drop(last);
    });
}

#[test]
fn an_address_needs_every_byte_on_every_device() {
    on("an_address_needs_every_byte_on_every_device", Config::new(3), |_, cuda| {
        let two = |a, b| {
            let mut object = Incomplete::create(cuda, &ObjectProperties::new(2, 2 * GRANULE)).unwrap();
            for ordinal in [a, b] {
                object.add_device(&cuda.device(ordinal).unwrap()).unwrap();
            }
            object.complete().unwrap()
        };
        let object = two(0, 1);
        let memories = [0, 1].map(|device| memory(cuda, device, 2 * GRANULE));
        let grants = [Grant::device(0), Grant::device(1)];
        let bindings = vec![object.bind(0, &memories[0], 0, 2 * GRANULE).unwrap()];
        let rejected = object.map().unwrap().activate(bindings, &grants).unwrap_err();
        assert!(matches!(rejected.error, Error::NotBound { ordinal: 1, offset: 0 }), "{rejected}");
        let (mapped, mut bindings) = rejected.object;
        bindings.push(object.bind(GRANULE, &memories[1], 0, GRANULE).unwrap());
        let rejected = mapped.activate(bindings, &grants).unwrap_err();
        assert!(matches!(rejected.error, Error::NotBound { ordinal: 1, offset: 0 }), "{rejected}");
        let (mapped, mut bindings) = rejected.object;
        drop(bindings.pop());
        bindings.push(object.bind(0, &memories[1], 0, GRANULE).unwrap());
        let rejected = mapped.activate(bindings, &grants).unwrap_err();
        assert!(matches!(rejected.error, Error::NotBound { ordinal: 1, offset: GRANULE }), "{rejected}");
        let (mapped, mut bindings) = rejected.object;
        // In two pieces, in any order.
        bindings.insert(0, object.bind(GRANULE, &memories[1], GRANULE, GRANULE).unwrap());

        let rejected = mapped.activate(bindings, &[]).unwrap_err();
        assert!(matches!(rejected.error, Error::Zero { .. }), "{rejected}");
        let (mut mapped, mut bindings) = rejected.object;
        for stranger in [Grant::device(2), Grant::host(), Grant::host_numa(0)] {
            let rejected = mapped.activate(bindings, &[stranger]).unwrap_err();
            assert!(matches!(rejected.error, Error::NotInTeam { .. }), "{rejected}");
            (mapped, bindings) = rejected.object;
        }
        let another = two(0, 2);
        bindings.push(another.bind(0, &memories[0], 0, GRANULE).unwrap());
        let rejected = mapped.activate(bindings, &grants).unwrap_err();
        assert!(matches!(rejected.error, Error::ForeignBinding), "{rejected}");
        let (mapped, mut bindings) = rejected.object;
        bindings.pop();
        let multicast = mapped.activate(bindings, &grants[..1]).unwrap();
        assert_eq!(multicast.access(Location::Device(1)).unwrap(), Access::None);
        multicast.set_access(&grants[1..]).unwrap();
        assert_eq!(multicast.access(Location::Device(1)).unwrap(), Access::ReadWrite);
        assert!(multicast.object() == &object && multicast.object() != &another);
    });
}

#[test]
fn addresses_are_aligned_and_free() {
    on("addresses_are_aligned_and_free", Config::h200x2().granularity(65536), |_, cuda| {
        let object = complete(cuda, &ObjectProperties::new(2, GRANULE));
        let small = Granularity::new(65536).unwrap();
        let reservation = Reservation::new(cuda, 4 * GRANULE, small).unwrap();
        let start = reservation.address().get() as usize;
        let aligned = start.next_multiple_of(GRANULE) - start;
        let error = object.map_at(&reservation, aligned + 65536).unwrap_err();
        assert!(matches!(error, Error::Misaligned { granularity: GRANULE, .. }), "{error}");
        let mapped = object.map_at(&reservation, aligned).unwrap();
        assert_eq!((mapped.offset(), mapped.size()), (aligned, GRANULE));
        assert!(matches!(object.map_at(&reservation, aligned), Err(Error::Overlap { .. })));
        let beyond = object.map_at(&reservation, aligned + 4 * GRANULE).unwrap_err();
        assert!(matches!(beyond, Error::OutOfBounds { .. }), "{beyond}");
        let last = usize::MAX - start;
        assert!(
            object.map_at(&reservation, last).is_err() && object.map_at(&reservation, usize::MAX).is_err()
        );
        assert_eq!(reservation.mapped_bytes(), GRANULE);
        drop(mapped);
        assert_eq!(reservation.mapped_bytes(), 0);
        let other = Emulator::new(Config::h200x2()).unwrap();
        let other = Cuda::with_driver(other.driver()).unwrap();
        let foreign = Reservation::new(&other, GRANULE, Granularity::new(GRANULE).unwrap()).unwrap();
        assert!(matches!(object.map_at(&foreign, 0), Err(Error::ForeignDriver { .. })));
    });
}

/// All steps, up to the first that fails.
fn all_steps(cuda: &Cuda) -> Result<(), Error> {
    let mut object = Incomplete::create(cuda, &ObjectProperties::new(2, GRANULE))?;
    for device in cuda.devices()? {
        object.add_device(&device)?;
    }
    let object = object.complete().map_err(|rejected| rejected.error)?;
    let memories = [0, 1].map(|device| memory(cuda, device, GRANULE));
    let bindings = memories.iter().map(|m| object.bind(0, m, 0, GRANULE)).collect::<Result<Vec<_>, _>>()?;
    let mapped = object.map()?;
    mapped.activate(bindings, &[Grant::device(0)]).map_err(|rejected| rejected.error)?;
    Ok(())
}

#[test]
fn a_driver_that_fails_at_any_step_leaves_nothing_behind() {
    use Function as F;
    on("a_driver_that_fails_at_any_step_leaves_nothing_behind", Config::h200x2(), |emulator, cuda| {
        all_steps(cuda).unwrap();
        emulator.assert_empty();
        let steps = [
            (F::cuMulticastGetGranularity, 2),
            (F::cuMulticastCreate, 1),
            (F::cuMulticastAddDevice, 2),
            (F::cuMulticastBindMem, 2),
            (F::cuMemAddressReserve, 1),
            (F::cuMemMap, 1),
            (F::cuMemSetAccess, 1),
        ];
        for (code, hint) in [
            (CUresult::CUDA_ERROR_ILLEGAL_STATE, "fabric manager"),
            (CUresult::CUDA_ERROR_SYSTEM_NOT_READY, "try again together"),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, "limited number of multicast objects"),
            (CUresult::CUDA_ERROR_NOT_PERMITTED, ""),
        ] {
            for (function, calls) in steps {
                for nth in 1..=calls {
                    emulator.faults().fail_nth(function, nth, code);
                    let error = all_steps(cuda).unwrap_err();
                    emulator.assert_empty();
                    emulator.faults().clear();
                    assert_eq!(error.status(), Some(code), "{function:?}: {error}");
                    let text = error.to_string();
                    if function.name().starts_with("cuMulticast") {
                        assert!(text.contains(hint) && text.contains(function.name()), "{text}");
                    }
                }
            }
        }
    });
}

#[test]
fn a_fabric_without_objects_left_says_so() {
    on("a_fabric_without_objects_left_says_so", Config::h200x2().multicast_slots(1), |_, cuda| {
        let properties = ObjectProperties::new(2, GRANULE);
        let first = Incomplete::create(cuda, &properties).unwrap();
        let error = Incomplete::create(cuda, &properties).unwrap_err();
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(error.to_string().contains("limited number"), "{error}");
        drop(first);
        Incomplete::create(cuda, &properties).unwrap();
    });
}

#[test]
fn refused_releases_are_counted_and_panic_nowhere() {
    on("refused_releases_are_counted_and_panic_nowhere", Config::h200x2(), |emulator, cuda| {
        let before = cuda_vmm::failed_releases();
        let object = complete(cuda, &ObjectProperties::new(2, GRANULE));
        let kept = memory(cuda, 0, GRANULE);
        let binding = object.bind(0, &kept, 0, GRANULE).unwrap();
        emulator.faults().fail_once(Function::cuMulticastUnbind, CUresult::CUDA_ERROR_UNKNOWN);
        drop(binding);
        // What the driver did not give back is not given out again by it, but nothing here stands in its way.
        let error = object.bind(0, &kept, 0, GRANULE).unwrap_err();
        assert!(matches!(error, Error::Call { .. }), "{error}");
        assert!(cuda_vmm::failed_releases() > before);
    });
}
