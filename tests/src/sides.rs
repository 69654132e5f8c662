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
    /// Groups of ranks share out a GPU's multiprocessors among themselves, and know nothing of other groups: one test at a time.
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Side {
    /// Ranks on CPUs.
    #[must_use]
    pub fn host(test: &'static str) -> Self {
        Self { backend: BackendKind::Host, test, _alone: None }
    }

    /// Ranks on GPUs, however few there are; without any the test is skipped visibly, or fails if `REQUIRE_GPU=1`.
    #[must_use]
    pub fn gpu(test: &'static str) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        // Kept until the process ends: making a context takes longer than most tests.
        static CONTEXTS: OnceLock<Vec<Context>> = OnceLock::new();
        let cuda = gpu::cuda(test, 1)?;
        CONTEXTS.get_or_init(|| {
            let devices = cuda.devices().expect("devices").into_iter();
            devices.map(|device| device.primary_context().expect("a context")).collect()
        });
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { backend: BackendKind::Cuda, test, _alone: Some(alone) })
    }

    /// Longest wait for a rank in a test in which nothing is to go wrong. On GPUs it is shorter: only kernels wait, and a
    /// machine that is busy otherwise is no test's.
    #[must_use]
    pub fn patience(&self) -> Duration {
        if self.is_gpu() { Duration::from_secs(10) } else { LONG }
    }

    /// Whether ranks are on GPUs.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.backend == BackendKind::Cuda
    }
}

/// A number of rounds: the variable's, or else the default.
#[must_use]
pub fn rounds(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
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
