//! Real GPUs, where there are some.

use cuda_vmm::sys::LoadError;
use cuda_vmm::{Cuda, Error};

/// The real driver if it shows at least `devices` devices. Otherwise prints why the test is skipped, so that it is seen and
/// counted, and returns `None`.
///
/// With `REQUIRE_GPU=1` in the environment a missing device fails the test instead: for machines that must have them.
#[must_use]
pub fn cuda(test: &str, devices: i32) -> Option<&'static Cuda> {
    let reason = match Cuda::get() {
        Ok(cuda) if cuda.device_count() >= devices => return Some(cuda),
        Ok(cuda) => format!("{} CUDA device(s), and {devices} needed", cuda.device_count()),
        Err(Error::Load(LoadError::NotFound { .. })) => "no CUDA driver on this machine".to_owned(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1");
    assert!(!required, "{test}: {reason}");
    skipped(test, &reason);
    None
}

/// Says that a test is skipped, past the test runner's capture of what passing tests print: `xtask test` counts these lines.
pub fn skipped(test: &str, reason: &str) {
    use std::io::Write;
    // One write, so that lines of tests beside each other stay whole; on a line of its own whatever the runner has begun.
    std::io::stderr().write_all(format!("\nskipped: {test}: {reason}\n").as_bytes()).ok();
}
