//! How many emulators a process may have. In a test program of its own: it takes them all.

use cuda_vmm_emu::{Config, Emulator, EmulatorError};
use std::time::{Duration, Instant};

#[test]
fn a_process_that_has_too_many_emulators_is_told_so_and_waits_for_one_to_end() {
    let one = |deadline| Emulator::new(Config::new(1).slot_deadline(deadline));
    let mut all = Vec::new();
    let error = loop {
        match one(Duration::ZERO) {
            Ok(emulator) => all.push(emulator),
            Err(error) => break error,
        }
        assert!(all.len() < 1000);
    };
    let EmulatorError::NoSlot { slots, .. } = error else { panic!("{error}") };
    assert_eq!(slots, all.len());
    assert!(slots >= 16);

    // A driver keeps its emulator's place.
    let driver = all[0].driver();
    drop(all.remove(0));
    let start = Instant::now();
    assert!(one(Duration::from_millis(20)).is_err());
    assert!(start.elapsed() >= Duration::from_millis(20));
    drop(driver);
    let again = one(Duration::ZERO).unwrap();

    // One that ends in time is waited for.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            drop(again);
        });
        one(Duration::from_secs(20)).unwrap();
    });
}
