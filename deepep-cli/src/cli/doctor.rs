//! `deepep doctor`: placeholder.
use super::Failure;
use std::process::ExitCode;
#[derive(clap::Args, Debug)]
pub(super) struct Arguments {}
pub(super) fn run(_: &Arguments) -> Result<ExitCode, Failure> {
    Ok(ExitCode::SUCCESS)
}
