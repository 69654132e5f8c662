//! Tests of operations that run on both backends: on CPUs always, on GPUs where there is one.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cuda_vmm::Context;
use deepep_core::BackendKind;

use crate::gpu;
use crate::ranks::LONG;

/// The backend that a test runs on.
#[derive(Debug)]
pub struct Side {
    /// For the buffer's builder.
    pub backend: BackendKind,
    /// The test's full name inside its file, for other processes.
    pub test: &'static str,
    /// The GPU is one in software, which is as slow as the machine is busy.
    software: bool,
    /// Groups of ranks share out a GPU's multiprocessors among themselves, and know nothing of other groups: one test at a time.
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Side {
    /// Ranks on CPUs.
    #[must_use]
    pub fn host(test: &'static str) -> Self {
        Self { backend: BackendKind::Host, test, software: false, _alone: None }
    }

    /// Ranks on GPUs, however few there are; without any the test is skipped visibly, or fails if `REQUIRE_GPU=1`.
    #[must_use]
    pub fn gpu(test: &'static str) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        // Kept until the process ends: making a context takes longer than most tests.
        static CONTEXTS: OnceLock<Vec<Context>> = OnceLock::new();
        let cuda = gpu::cuda(test, 1)?;
        let devices = cuda.devices().expect("devices");
        let software = devices[0].name().expect("a name") == "GPU in software";
        CONTEXTS.get_or_init(|| {
            devices.iter().map(|device| device.primary_context().expect("a context")).collect()
        });
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { backend: BackendKind::Cuda, test, software, _alone: Some(alone) })
    }

    /// Longest wait for a rank in a test in which nothing is to go wrong. On GPUs it is shorter: only kernels wait, and a
    /// machine that is busy otherwise is no test's.
    #[must_use]
    pub fn patience(&self) -> Duration {
        if self.is_gpu() && !self.software { Duration::from_secs(10) } else { LONG }
    }

    /// A time after which a rank counts as missing in a test that leaves one out: as long as the others surely need to come.
    #[must_use]
    pub fn scaled(&self, time: Duration) -> Duration {
        if self.software { 2 * time } else { time }
    }

    /// Whether ranks are on GPUs.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.backend == BackendKind::Cuda
    }
}

/// A number of rounds: the variable's, or else the default. Panics if the variable holds something else.
#[must_use]
pub fn rounds(variable: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(variable) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}"))
}

/// Makes two tests of one body, which takes a [`Side`]: `on_both_sides!(name, |side| { ... })`.
#[macro_export]
macro_rules! on_both_sides {
    ($(#[$meta:meta])* $name:ident, |$side:ident| $body:block) => {
        $(#[$meta])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            fn body($side: &$crate::sides::Side) $body

            #[test]
            fn host() {
                body(&$crate::sides::Side::host(concat!(stringify!($name), "::host")));
            }

            #[test]
            fn gpu() {
                if let Some(side) = $crate::sides::Side::gpu(concat!(stringify!($name), "::gpu")) {
                    body(&side);
                }
            }
        }
    };
}
