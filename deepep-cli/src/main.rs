//! The program `deepep`: runs the main job, plans memory, and says what this machine can do.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
