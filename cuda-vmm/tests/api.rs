//! What users of the types rely on: they cross threads, errors convert, guards count.

use cuda_vmm::sys::{CUresult, Function};
use cuda_vmm::{
    Capabilities, Context, Cuda, Device, Error, Grant, Granularity, GrowableRange, HandleTypes, IpcMemory,
    Location, Mapping, PeerAccess, PhysicalMemory, PlainMemory, Properties, Reservation, SegmentedRange,
    Support, share,
};
use cuda_vmm_emu::{Config, Emulator};

const MIB: usize = 1 << 20;

#[test]
fn objects_cross_threads_and_errors_are_errors() {
    fn shared<T: Send + Sync + std::fmt::Debug + 'static>() {}
    shared::<Cuda>();
    shared::<Device>();
    shared::<Context>();
    shared::<PeerAccess>();
    shared::<PhysicalMemory>();
    shared::<Reservation>();
    shared::<Mapping>();
    shared::<SegmentedRange>();
    shared::<GrowableRange>();
    shared::<PlainMemory>();
    shared::<IpcMemory>();
    shared::<share::PidExport>();
    fn error<T: std::error::Error + Send + Sync + 'static>() {}
    error::<Error>();
    error::<cuda_vmm::Rejected<Mapping>>();
    error::<share::DescriptorError>();
}

/// Runs a body on a software driver and checks that nothing is left.
fn on(body: impl FnOnce(&Emulator, &Cuda) -> Result<(), Error>) {
    let emulator = Emulator::new(Config::h200x2()).unwrap();
    body(&emulator, &Cuda::with_driver(emulator.driver()).unwrap()).unwrap();
    emulator.assert_empty();
}

#[test]
fn peer_access_lasts_until_the_last_guard() {
    on(|emulator, cuda| {
        let (one, two) = (cuda.device(0)?.primary_context()?, cuda.device(1)?.primary_context()?);
        let calls = |function| emulator.faults().calls(function);
        let first = one.enable_peer_access(&two)?;
        let second = one.enable_peer_access(&two)?;
        assert_eq!(calls(Function::cuCtxEnablePeerAccess), 1);
        drop(first);
        assert_eq!(calls(Function::cuCtxDisablePeerAccess), 0);
        drop(second);
        assert_eq!(calls(Function::cuCtxDisablePeerAccess), 1);
        // What somebody else enabled is left to them.
        let bound = one.bind()?;
        // SAFETY: both contexts are retained, and flags are 0.
        unsafe { cuda.driver().cuCtxEnablePeerAccess(two.as_raw(), 0) }.unwrap();
        drop(one.enable_peer_access(&two)?);
        assert_eq!(calls(Function::cuCtxDisablePeerAccess), 1);
        // SAFETY: enabled above.
        unsafe { cuda.driver().cuCtxDisablePeerAccess(two.as_raw()) }.unwrap();
        drop(bound);
        let oneself = one.enable_peer_access(&one).unwrap_err();
        assert!(oneself.status().is_some(), "{oneself}");
        // A failure is not counted as a guard.
        emulator.faults().fail_once(Function::cuCtxEnablePeerAccess, CUresult::CUDA_ERROR_UNKNOWN);
        assert!(one.enable_peer_access(&two).is_err());
        drop(one.enable_peer_access(&two)?);
        assert_eq!(calls(Function::cuCtxDisablePeerAccess), 3);
        Ok(())
    });
}

#[test]
fn two_handles_of_one_driver_mix() {
    on(|emulator, cuda| {
        let again = Cuda::with_driver(cuda.driver().clone())?;
        assert!(cuda.is_same(&again));
        let memory = PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0))?;
        let reservation = Reservation::new(&again, 2 * MIB, Granularity::new(2 * MIB)?)?;
        // `?` takes a rejection as its reason.
        reservation.map(0, &memory)?.unmap()?;
        assert!(!cuda.is_same(&Cuda::with_driver(emulator.fresh_driver()?)?));
        Ok(())
    });
}

#[test]
fn grants_are_refused_before_anything_is_made() {
    on(|emulator, cuda| {
        let device = Properties::device(0);
        let range = |grant| SegmentedRange::builder(cuda).create(device, 2 * MIB).grant(grant).build();
        let grown = |grant| GrowableRange::new(cuda, device, 4 * MIB, 2 * MIB, &[grant]);
        assert!(matches!(range(Grant::device(9)), Err(Error::UnknownDevice { ordinal: 9, .. })));
        assert!(matches!(range(Grant::host()), Err(Error::AccessNotPossible { .. })));
        assert!(matches!(grown(Grant::device(9)), Err(Error::UnknownDevice { ordinal: 9, .. })));
        assert!(matches!(grown(Grant::host()), Err(Error::AccessNotPossible { .. })));
        assert_eq!(emulator.faults().calls(Function::cuMemCreate), 0);
        assert_eq!(emulator.faults().calls(Function::cuMemAddressReserve), 0);
        let made = range(Grant::device(0))?;
        assert!(matches!(made.set_access(&[]), Err(Error::Zero { .. })));
        assert!(matches!(made.set_access(&[Grant::host()]), Err(Error::AccessNotPossible { .. })));
        Ok(())
    });
}

#[test]
fn a_growable_range_opens_chunks_that_are_there_and_chunks_to_come() {
    on(|_, cuda| {
        let mut range =
            GrowableRange::new(cuda, Properties::device(0), 8 * MIB, 2 * MIB, &[Grant::device(0)])?;
        range.grow_to(2 * MIB)?;
        assert!(matches!(range.set_access(&[Grant::device(2)]), Err(Error::UnknownDevice { .. })));
        range.set_access(&[Grant::device(1), Grant::device(0).with(cuda_vmm::Access::Read)])?;
        range.grow_to(4 * MIB)?;
        for chunk in range.chunks() {
            assert_eq!(chunk.access(Location::Device(1))?, cuda_vmm::Access::ReadWrite);
            assert_eq!(chunk.access(Location::Device(0))?, cuda_vmm::Access::Read);
        }
        Ok(())
    });
}

#[test]
fn a_missing_function_is_a_missing_capability() {
    let emulator = Emulator::new(Config::h200x2()).unwrap();
    emulator.faults().remove(Function::cuMemExportToShareableHandle);
    let cuda = Cuda::with_driver(emulator.fresh_driver().unwrap()).unwrap();
    let capabilities = Capabilities::probe(&cuda.device(0).unwrap()).unwrap();
    assert_eq!(capabilities.virtual_memory, Support::Works);
    assert_eq!(capabilities.posix_fd, Support::MissingFunction(Function::cuMemExportToShareableHandle));
    assert!(capabilities.posix_fd.to_string().contains("lacks cuMemExport"), "{}", capabilities.posix_fd);
    emulator.assert_empty();
}

#[test]
fn memory_of_other_code_is_taken_over_or_shared() {
    on(|emulator, cuda| {
        let size = 2 * MIB;
        let ours =
            PhysicalMemory::create(cuda, size, &Properties::device(1).handle_types(HandleTypes::POSIX_FD))?;
        let mapping = Reservation::new(cuda, size, Granularity::new(size)?)?.map(0, &ours)?;
        // SAFETY: the mapping stays.
        let retained = unsafe { PhysicalMemory::retain(cuda, mapping.address().get(), size) }?;
        assert_eq!((retained.location(), retained.size()), (Location::Device(1), size));
        assert!(!retained.is_imported() && retained.handle_types() == HandleTypes::POSIX_FD);
        // SAFETY: nothing is done with the address but looking it up.
        let nowhere = unsafe { PhysicalMemory::retain(cuda, 0x1000, size) }.unwrap_err();
        assert!(nowhere.status().is_some(), "{nowhere}");

        let mut raw = 0;
        // SAFETY: `raw` is valid for one write, and the address is mapped.
        unsafe { cuda.driver().cuMemRetainAllocationHandle(&mut raw, mapping.address().get() as *mut _) }
            .unwrap();
        // SAFETY: the reference was just taken.
        let taken = unsafe { PhysicalMemory::from_raw(cuda, raw, size) }?;
        drop((mapping, ours, retained));
        taken.export_fd()?;

        // A refused takeover releases the reference all the same: the ledger would show it.
        let before = emulator.faults().calls(Function::cuMemRelease);
        let mapping = Reservation::new(cuda, size, Granularity::new(size)?)?.map(0, &taken)?;
        // SAFETY: as above.
        unsafe { cuda.driver().cuMemRetainAllocationHandle(&mut raw, mapping.address().get() as *mut _) }
            .unwrap();
        // SAFETY: as above.
        let error = unsafe { PhysicalMemory::from_raw(cuda, raw, 5) }.unwrap_err();
        assert!(matches!(error, Error::Misaligned { .. }), "{error}");
        assert_eq!(emulator.faults().calls(Function::cuMemRelease), before + 1);
        Ok(())
    });
}

#[test]
fn exported_descriptors_are_not_inherited() {
    on(|_, cuda| {
        let memory = PhysicalMemory::create(
            cuda,
            2 * MIB,
            &Properties::device(0).handle_types(HandleTypes::POSIX_FD),
        )?;
        let fd = memory.export_fd()?;
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        Ok(())
    });
}
