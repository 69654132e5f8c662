//! The program `deepep`.

use clap::Parser;

/// Run and diagnose mixture-of-experts communication.
#[derive(Parser)]
#[command(version)]
struct Cli {}

fn main() {
    Cli::parse();
}
