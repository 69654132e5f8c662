//! The command line.

mod bench;
mod doctor;
mod paint;
mod plan;
mod rank;
mod run;
mod settings;
mod values;
mod workers;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Mixture-of-experts communication between GPUs, or between emulated ranks where there is none.
#[derive(Debug, Parser)]
#[command(name = "deepep", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Dispatch tokens to experts, combine their outputs, and verify every bit
    Run(run::Arguments),
    /// Time dispatch and combine, verified, beside what the hardware can do at most
    Bench(bench::Arguments),
    /// Print the bytes that each feature of a buffer takes
    Plan(plan::Arguments),
    /// Say what this machine can do, and what to do about what it can't
    Doctor(doctor::Arguments),
}

/// Parses the command line and runs it.
pub(crate) fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
    };
    outcome.unwrap_or_else(|error| {
        paint::error(&error);
        ExitCode::from(2)
    })
}

/// An error as the user sees it.
type Failure = Box<dyn std::error::Error + Send + Sync>;
