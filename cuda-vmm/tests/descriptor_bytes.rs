//! Bytes that come from another process: whatever they are, they are refused or mean exactly what they say.
//!
//! The bytes are made here from the table in the documentation, not by the crate's own encoder.

use cuda_vmm::share::{Descriptor, DescriptorError, fetch, receive};
use cuda_vmm::{Cuda, Error};
use cuda_vmm_emu::{Config, Emulator, Fabric};
use proptest::prelude::*;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

type Bytes = [u8; Descriptor::BYTES];

const SOON: Duration = Duration::from_secs(10);

/// Descriptors of memory that are right, by the table.
fn right() -> impl Strategy<Value = Bytes> {
    let transport = prop_oneof![
        Just((1_u8, 0_u32, 0_i32, [0; 64])),
        (1..=i32::MAX as u32, 0..=i32::MAX).prop_map(|(pid, fd)| (2, pid, fd, [0; 64])),
        proptest::array::uniform32(any::<u8>()).prop_map(|half| {
            let mut handle = [0; 64];
            handle[..32].copy_from_slice(&half);
            (3, 0, 0, handle)
        }),
    ];
    let location = prop_oneof![
        (0..=i32::MAX, any::<[u8; 16]>()).prop_map(|(ordinal, uuid)| (1_u8, ordinal, uuid)),
        (0..=i32::MAX).prop_map(|node| (2, node, [0; 16])),
        Just((3, 0, [0; 16])),
    ];
    (transport, location, any::<u32>(), 1..=i64::MAX as u64).prop_map(
        |((transport, pid, fd, handle), (kind, id, uuid), types, size)| {
            let mut bytes = [0; Descriptor::BYTES];
            bytes[..8].copy_from_slice(b"CUDA-VMM");
            bytes[8] = 1;
            bytes[10] = 128;
            bytes[12] = 1;
            bytes[13] = transport;
            bytes[14] = kind;
            bytes[16..20].copy_from_slice(&id.to_le_bytes());
            bytes[20..24].copy_from_slice(&types.to_le_bytes());
            bytes[24..32].copy_from_slice(&size.to_le_bytes());
            bytes[32..48].copy_from_slice(&uuid);
            bytes[48..52].copy_from_slice(&pid.to_le_bytes());
            bytes[52..56].copy_from_slice(&fd.to_le_bytes());
            bytes[56..120].copy_from_slice(&handle);
            bytes
        },
    )
}

/// A few bytes changed.
fn nearly_right() -> impl Strategy<Value = Bytes> {
    let change = (0..Descriptor::BYTES, any::<u8>());
    (right(), proptest::collection::vec(change, 1..4)).prop_map(|(mut bytes, changes)| {
        changes.into_iter().for_each(|(at, value)| bytes[at] = value);
        bytes
    })
}

fn any_message() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..300),
        nearly_right().prop_map(Vec::from),
        right().prop_map(Vec::from),
        (right(), 0..Descriptor::BYTES).prop_map(|(bytes, length)| bytes[..length].to_vec()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn right_bytes_are_read_and_written_alike(bytes in right()) {
        let descriptor = Descriptor::decode(&bytes).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(descriptor.encode(), bytes);
    }

    #[test]
    fn other_bytes_are_refused_or_mean_themselves(bytes in nearly_right()) {
        if let Ok(descriptor) = Descriptor::decode(&bytes) {
            prop_assert_eq!(descriptor.encode(), bytes);
        }
    }

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        match Descriptor::decode(&bytes) {
            Ok(descriptor) => prop_assert_eq!(&descriptor.encode()[..], &bytes[..]),
            Err(DescriptorError::Length { actual, expected }) => {
                prop_assert!(actual == bytes.len() && actual != expected);
            }
            Err(error) => prop_assert!(bytes.len() == Descriptor::BYTES, "{}", error),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// The whole way in: no message without memory behind it gives any, and none leaves something behind.
    #[test]
    fn messages_without_memory_give_none(message in any_message()) {
        let emulator = Emulator::new(Config::h200x2().fabric(Fabric::Working)).unwrap();
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(&message).unwrap();
        drop(there);
        let error = receive(&cuda, &here, SOON).unwrap_err();
        let right_error = match &error {
            Error::PeerClosed { received, .. } => message.len() < Descriptor::BYTES && *received == message.len(),
            Error::Descriptor(_) | Error::DescriptorCount { .. } | Error::Call { .. } => {
                message.len() >= Descriptor::BYTES
            }
            _ => false,
        };
        prop_assert!(right_error, "{} bytes: {}", message.len(), error);
        prop_assert!(emulator.ledger().is_empty());
    }

    /// Of a process that does not exist nothing is taken; bytes for another way in are refused as such.
    #[test]
    fn nothing_is_fetched_from_nowhere(mut bytes in nearly_right()) {
        // Beyond the kernel's largest process id.
        bytes[48..52].copy_from_slice(&0x7fff_fff0_u32.to_le_bytes());
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        let error = fetch(&cuda, &bytes).unwrap_err();
        prop_assert!(matches!(error, Error::Descriptor(_) | Error::Transport { .. }), "{}", error);
        prop_assert!(emulator.ledger().is_empty());
    }
}
