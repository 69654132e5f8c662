//! What the tests of multicast objects share.

use cuda_vmm::{Context, Cuda, Grant, Mapping, PhysicalMemory, Properties, Reservation};
use cuda_vmm_emu::{Config, Emulator};

/// Size of the memory in these tests: one granule of multicast.
pub const GRANULE: usize = 2 << 20;

/// Whether multicast objects may be created here. If not, says that the test is skipped.
///
/// No object is ever created on a GPU by these tests: they run on the software driver only.
#[must_use]
pub fn allowed(test: &str) -> bool {
    match cuda_vmm::multicast_disabled_by() {
        None => true,
        Some(variable) => {
            crate::gpu::skipped(
                test,
                &format!("{variable} switches multicast off, on the software driver too"),
            );
            false
        }
    }
}

/// Runs a body on a software driver and checks that nothing is left. Skipped where multicast is switched off.
pub fn on(test: &str, config: Config, body: impl FnOnce(&Emulator, &Cuda)) {
    if !allowed(test) {
        return;
    }
    let emulator = Emulator::new(config).expect("an emulator");
    let cuda = Cuda::with_driver(emulator.driver()).expect("the software driver starts");
    body(&emulator, &cuda);
    emulator.assert_empty();
}

/// Memory of a device that can be exported, mapped where the device reaches it.
#[derive(Debug)]
pub struct Local {
    /// The memory.
    pub memory: PhysicalMemory,
    /// Where it is mapped.
    pub mapping: Mapping,
    context: Context,
}

impl Local {
    /// `size` bytes of a device.
    #[must_use]
    pub fn new(cuda: &Cuda, device: i32, size: usize) -> Self {
        let properties = Properties::device(device).shareable();
        let memory = PhysicalMemory::create(cuda, size, &properties).expect("memory");
        let granularity = cuda_vmm::Granularity::new(GRANULE).expect("a power of two");
        let mapping = Reservation::new(cuda, size, granularity)
            .and_then(|range| range.map(0, &memory))
            .expect("addresses");
        mapping.set_access(&[Grant::device(device)]).expect("access");
        let context = cuda.device(device).and_then(|device| device.primary_context()).expect("a context");
        Self { memory, mapping, context }
    }

    /// The number at an offset.
    #[must_use]
    pub fn get(&self, offset: usize) -> f32 {
        let mut bytes = [0; 4];
        self.context.download(&self.mapping, offset, &mut bytes).expect("a copy");
        f32::from_ne_bytes(bytes)
    }

    /// Sets the number at an offset.
    pub fn set(&self, offset: usize, value: f32) {
        self.context.upload(&self.mapping, offset, &value.to_ne_bytes()).expect("a copy");
    }
}
