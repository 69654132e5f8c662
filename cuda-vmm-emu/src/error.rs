//! What can go wrong in the emulator's own interface. The emulated functions return `CUresult` codes as a driver does.

use cuda_vmm_sys::{CUdeviceptr, LoadError};
use std::time::Duration;
use thiserror::Error;

/// Why an emulator could not be made, or a helper of it could not do its work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EmulatorError {
    /// A configuration that no machine could have.
    #[error("invalid configuration: {field} {problem}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What is wrong with it, with the value.
        problem: String,
    },
    /// Every slot of the process is taken by another emulator.
    #[error(
        "all {slots} emulators that one process may have at a time are in use, and none ended within {waited:?}; \
         drop an emulator together with its drivers first"
    )]
    NoSlot {
        /// Emulators that one process may have at a time.
        slots: usize,
        /// How long this one waited.
        waited: Duration,
    },
    /// The table of functions could not be made, because the configuration removes a function that every driver has.
    #[error("no driver table: {0}")]
    Load(LoadError),
    /// An address range that is not mapped, or not all of it.
    #[error("{length} bytes at {address:#x} are not mapped memory of this emulator; map them first")]
    NotMapped {
        /// First address.
        address: CUdeviceptr,
        /// Bytes.
        length: usize,
    },
    /// An address range that is mapped, but not with the access that was needed.
    #[error(
        "{length} bytes at {address:#x} are mapped without {needed} access for {who}; cuMemSetAccess gives it"
    )]
    NoAccess {
        /// First address.
        address: CUdeviceptr,
        /// Bytes.
        length: usize,
        /// `read` or `read and write`.
        needed: &'static str,
        /// The device, or any location at all.
        who: String,
    },
    /// An address that belongs to no multicast object.
    #[error(
        "{address:#x} is no mapped address of a multicast object; plain memory takes plain loads and stores"
    )]
    NotMulticast {
        /// The address.
        address: CUdeviceptr,
    },
    /// A multicast access to a part of the object to which some device has bound no memory. On hardware this is a fault.
    #[error(
        "bytes {offset:#x}..{end:#x} of the multicast object have memory bound on {bound} of {devices} devices; \
         bind memory on every device first"
    )]
    NotBound {
        /// First byte, from the object's start.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// Devices that have memory bound there.
        bound: usize,
        /// Devices of the object.
        devices: usize,
    },
    /// A multicast access whose address or length is not a multiple of the element.
    #[error("{length} bytes at {address:#x} are not a whole number of aligned elements of {element} bytes")]
    Misaligned {
        /// First address.
        address: CUdeviceptr,
        /// Bytes.
        length: usize,
        /// Bytes of one element.
        element: usize,
    },
    /// A system call failed.
    #[error("{what} failed: {reason}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The system's answer.
        reason: String,
    },
}

impl From<LoadError> for EmulatorError {
    fn from(error: LoadError) -> Self {
        Self::Load(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_which_values_and_what_to_do() {
        let text = EmulatorError::NoSlot { slots: 64, waited: Duration::from_secs(1) }.to_string();
        assert!(text.contains("all 64 emulators") && text.contains("drop an emulator"), "{text}");
        let text = EmulatorError::NotBound { offset: 0, end: 0x200000, bound: 1, devices: 2 }.to_string();
        assert!(text.contains("0x0..0x200000") && text.contains("1 of 2 devices"), "{text}");
        let text = EmulatorError::Config { field: "granularity", problem: "is 3, not a power of two".into() };
        assert_eq!(text.to_string(), "invalid configuration: granularity is 3, not a power of two");
    }
}
