//! The program `deepep`: runs the main job, plans memory, and says what this machine can do.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Streams of ranks that are threads share the queues of their GPU. With too few of them a kernel can stand behind one that waits for it.
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: this is the only thread so far.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
    cli::main()
}
