//! The same test bodies on the software driver and on real GPUs.

use crate::gpu;
use cuda_vmm::Cuda;
use cuda_vmm_emu::{Config, Emulator};

/// The driver that a test runs on.
#[derive(Debug)]
pub enum Backend {
    /// The software driver. Everything that was made must be gone at the end.
    Emulator(Emulator),
    /// Real GPUs.
    Gpu,
}

impl Backend {
    /// A software driver of two H200.
    #[must_use]
    pub fn emulator() -> Self {
        Self::Emulator(Emulator::new(Config::h200x2()).expect("an emulator"))
    }

    /// The backend of a name: what [`name`](Self::name) returned in another process.
    #[must_use]
    pub fn named(name: &str) -> Self {
        if name == "gpu" { Self::Gpu } else { Self::emulator() }
    }

    /// Name of the backend, for other processes.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Emulator(_) => "emulator",
            Self::Gpu => "gpu",
        }
    }

    /// Whether this is real hardware.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpu)
    }

    /// Runs a test body, and checks that it left nothing behind. Skipped, visibly, if there are fewer than `devices` devices.
    pub fn run(&self, test: &str, devices: i32, body: impl FnOnce(&Self, &Cuda)) {
        let failed = cuda_vmm::failed_releases();
        match self {
            Self::Emulator(emulator) => {
                let cuda = Cuda::with_driver(emulator.driver()).expect("the software driver starts");
                body(self, &cuda);
                emulator.assert_empty();
            }
            Self::Gpu => {
                let Some(cuda) = gpu::cuda(test, devices) else { return };
                body(self, cuda);
            }
        }
        assert_eq!(cuda_vmm::failed_releases(), failed, "{test}: a destructor was refused");
    }
}

/// Makes two tests of one body: `both!(name, devices, |backend, cuda| { ... })`.
#[macro_export]
macro_rules! both {
    ($(#[$meta:meta])* $name:ident, $devices:literal, $body:expr) => {
        $(#[$meta])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            use $crate::backend::Backend;

            fn body() -> impl FnOnce(&Backend, &cuda_vmm::Cuda) {
                $body
            }

            #[test]
            fn emulator() {
                Backend::emulator().run(stringify!($name), $devices, body());
            }

            #[test]
            fn gpu() {
                Backend::Gpu.run(stringify!($name), $devices, body());
            }
        }
    };
}
