//! The negative control: without the fence in front of a row's flag rows arrive late, and these tests see it.
//!
//! A bulk store that has completed for its issuer is not ordered before a later relaxed store to another device (docs/protocol.md, section 5). About one
//! vector in 10⁵ is affected, and only data that change from round to round show it.

use std::io::Write as _;

use super::input::Case;
use super::{Bench, machine};
use crate::layout::Placement;

const ROUNDS: u64 = 40;

/// Without the announcer's fence, and with last flags that release nothing.
fn without_fence(name: &str, text: String) -> String {
    let (fence, release) = ("arch::fence_sys();", "arch::st_release_sys(flags");
    if name != "comm/announce.cuh" {
        return text;
    }
    for order in [fence, release] {
        assert_eq!(text.matches(order).count(), 1, "{order} is not where this test looks for it");
    }
    text.replace(fence, "").replace(release, "arch::st_relaxed_sys(flags")
}

#[test]
fn the_control_removes_the_fence() {
    let header = include_str!("../../../../kernels/comm/announce.cuh");
    let text = without_fence("comm/announce.cuh", header.into());
    assert!(!text.contains("fence_sys") && !text.contains("release_sys"), "{text}");
}

#[test]
fn rows_arrive_late_without_the_fence() {
    let Some(machine) = machine() else { return };
    if machine.devices() < 2 {
        // Past the test runner's capture of what passing tests print.
        writeln!(std::io::stderr(), "skipped: inside one GPU no row arrives late; needs two").ok();
        return;
    }
    let mut case = Case::new(2, 2048, Placement::Expanded);
    (case.hidden, case.row_bytes) = (7168, 7168);
    case.alter = Some(without_fence);
    let bench = Bench::new(&machine, &case).unwrap();
    let failed =
        (0..ROUNDS).find_map(|seed| bench.round(5000 + seed, false).err().map(|e| (seed, e.to_string())));
    let Some((round, error)) = failed else {
        panic!("{ROUNDS} rounds without the fence were right: the test that looks for late rows sees none")
    };
    writeln!(std::io::stderr(), "without the fence: round {round}: {error}").ok();
    assert!(error.contains("row"), "{error}");
}
