//! A closed team has no address.

use cuda_vmm::DeviceAddress;
use cuda_vmm::multicast::{Agreement, Team};
use std::time::Duration;

fn too_late(team: Team, agreement: &mut dyn Agreement) -> DeviceAddress {
    let _ = team.close(agreement, Duration::from_secs(1));
    team.address()
}

fn main() {}
