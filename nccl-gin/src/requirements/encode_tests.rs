//! Each generation's bytes, and each reason to refuse.

use super::*;
use crate::properties::GinType;
use crate::testing::nccl_of;

const FREE: Limits<'static> = Limits { support: None, multicast_off: None };

fn support() -> Support {
    Support {
        nvml_device: 0,
        device_api: true,
        multimem: true,
        gin: Some(GinType::Proxy),
        railed_gin: Some(GinType::Proxy),
        lsa_teams: 1,
        host_rma: false,
        device_communicator_size: Some(248),
        gin_min_stride: Some(2),
    }
}

fn full() -> DevCommRequirements {
    DevCommRequirements::new()
        .barriers(1)
        .lsa_barriers(2)
        .rail_barriers(3)
        .all_to_all(4, 5)
        .lsa_multimem(true)
        .gin(GinConnection::Full)
        .gin_contexts(6)
        .gin_signals(7)
        .gin_counters(8)
}

/// `(offset, bytes)` of each field, on a background of zeroes.
fn expected(size: usize, fields: &[(usize, &[u8])]) -> [u8; 128] {
    let mut bytes = [0; 128];
    for (offset, field) in fields {
        assert!(offset + field.len() <= size.max(120));
        bytes[*offset..offset + field.len()].copy_from_slice(field);
    }
    bytes
}

fn int(value: i32) -> [u8; 4] {
    value.to_le_bytes()
}

#[test]
fn the_bytes_of_2_28_3() {
    let requirements = DevCommRequirements::new().lsa_barriers(2).lsa_multimem(true);
    let encoded = requirements.encode(&nccl_of(22803), &FREE).unwrap();
    assert_eq!(encoded.bytes.as_slice(), &expected(24, &[(16, &[1]), (20, &int(2))]));
    assert_eq!((encoded.version, encoded.dev_comm_size), (Version::from_code(22803), 88));
    let encoded = DevCommRequirements::new().encode(&nccl_of(22803), &FREE).unwrap();
    assert_eq!(encoded.bytes.as_slice(), &[0; 128]);
}

#[test]
fn the_bytes_of_2_28() {
    let encoded = full().encode(&nccl_of(22809), &FREE).unwrap();
    let want = expected(
        56,
        &[
            (16, &[1]),
            (20, &int(1)),
            (24, &int(2)),
            (28, &int(3)),
            (32, &int(4)),
            (36, &int(5)),
            (40, &[1]),
            (44, &int(6)),
            (48, &int(7)),
            (52, &int(8)),
        ],
    );
    assert_eq!(encoded.bytes.as_slice(), &want);
    assert_eq!((encoded.version, encoded.dev_comm_size), (Version::from_code(22809), 200));
    // The other releases of that generation are told apart by nothing in the struct.
    let encoded = full().encode(&nccl_of(22807), &FREE).unwrap();
    assert_eq!(encoded.bytes.as_slice(), &want);
    // Nothing asked for is all zeroes: no list, no GIN.
    let encoded = DevCommRequirements::new().encode(&nccl_of(22809), &FREE).unwrap();
    assert_eq!(encoded.bytes.as_slice(), &[0; 128]);
}

#[test]
fn the_bytes_of_2_29_and_later() {
    for (code, size, declared, dev_comm) in [
        (22907, 88_usize, 22907_u32, 224),
        (23003, 96, 23003, 240),
        (23007, 96, 23007, 240),
        (23102, 120, 23102, 248),
        (23203, 120, 23203, 248),
        (23305, 120, 23203, 248),
    ] {
        let encoded = full().encode(&nccl_of(code), &FREE).unwrap();
        let want = expected(
            size,
            &[
                (0, &size.to_le_bytes()),
                (8, &0xcafe_beef_u32.to_le_bytes()),
                (12, &declared.to_le_bytes()),
                (32, &[1]),
                (36, &int(1)),
                (40, &int(2)),
                (44, &int(3)),
                (48, &int(4)),
                (52, &int(5)),
                (60, &int(6)),
                (64, &int(7)),
                (68, &int(8)),
                (72, &int(1)),
                // In 2.29 these are padding, which a later library would take for the traffic class.
                (84, &int(i32::MIN)),
                (92, &[1, 1]),
                (96, &int(1)),
            ],
        );
        assert_eq!(encoded.bytes.as_slice(), &want, "NCCL {code}");
        assert_eq!((encoded.version.code(), encoded.dev_comm_size), (declared, dev_comm));
    }
}

#[test]
fn every_later_option_has_its_field() {
    let requirements = DevCommRequirements::new()
        .gin(GinConnection::Stride(4))
        .gin_exclusive_contexts(true)
        .gin_queue_depth(64)
        .gin_traffic_class(3)
        .world_barriers(2)
        .gin_strong_signals(false)
        .gin_va_signals(false)
        .gin_type(GinType::Gdaki)
        .runtime_version(true);
    let encoded = requirements.encode(&nccl_of(23203), &FREE).unwrap();
    let get = |offset| encoded.bytes.get::<i32>(offset);
    assert_eq!((get(60), get(72), get(80), get(84), get(88), get(96), get(100)), (4, 3, 64, 3, 2, 4, 3));
    assert_eq!(encoded.bytes.as_slice()[76], 1);
    assert_eq!(encoded.bytes.as_slice()[92..94], [0, 0]);
    assert_eq!(encoded.bytes.as_slice()[104], 1);
}

#[test]
fn the_runtime_version_takes_the_size_that_the_library_tells() {
    let requirements = DevCommRequirements::new().runtime_version(true);
    let mut support = support();
    support.device_communicator_size = Some(400);
    let encoded = requirements.encode(&nccl_of(23305), &Limits { support: Some(&support), ..FREE }).unwrap();
    assert_eq!((encoded.version.code(), encoded.dev_comm_size), (23305, 400));
    support.device_communicator_size = Some(513);
    let error =
        requirements.encode(&nccl_of(23305), &Limits { support: Some(&support), ..FREE }).err().unwrap();
    assert!(error.to_string().contains("513 bytes"), "{error}");
}

#[test]
fn what_the_version_lacks_is_refused() {
    let gin = DevCommRequirements::new().gin(GinConnection::Full);
    for (requirements, code, needle) in [
        (
            DevCommRequirements::new().gin(GinConnection::Full),
            22803,
            "GIN cannot be had: it needs NCCL 2.28.7 or newer, and 2.28.3 is loaded",
        ),
        (DevCommRequirements::new().barriers(1), 22803, "barriers over all ranks cannot be had"),
        (DevCommRequirements::new().all_to_all(1, 1), 22803, "needs NCCL 2.28.7"),
        (DevCommRequirements::new().gin(GinConnection::Rail), 22809, "needs NCCL 2.29.7"),
        (
            gin.gin_queue_depth(1),
            22809,
            "gin_queue_depth cannot be had: it needs NCCL 2.29.7 or newer, and 2.28.9 is loaded",
        ),
        (gin.gin_exclusive_contexts(true), 22809, "needs NCCL 2.29.7"),
        (gin.gin_traffic_class(1), 22907, "needs NCCL 2.30.0"),
        (gin.world_barriers(1), 22907, "needs NCCL 2.30.0"),
        (gin.gin_strong_signals(false), 23003, "needs NCCL 2.30.5"),
        (gin.gin_va_signals(false), 23003, "needs NCCL 2.30.5"),
        (DevCommRequirements::new().gin(GinConnection::Stride(2)), 23007, "needs NCCL 2.31.0"),
        (gin.gin_type(GinType::Proxy), 23007, "needs NCCL 2.31.0"),
        (DevCommRequirements::new().runtime_version(true), 23007, "needs NCCL 2.31.0"),
    ] {
        let error = requirements.encode(&nccl_of(code), &FREE).err().unwrap();
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(needle), "{error}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let new = DevCommRequirements::new();
    for requirements in [
        new.gin_signals(1),
        new.gin_counters(1),
        new.gin_contexts(1),
        new.gin_exclusive_contexts(true),
        new.gin_queue_depth(1),
        new.gin_traffic_class(1),
        new.gin_type(GinType::Proxy),
        new.rail_barriers(1),
        new.world_barriers(1),
    ] {
        let error = requirements.encode(&nccl_of(23203), &FREE).err().unwrap();
        assert!(error.to_string().contains("it needs GIN"), "{error}");
    }
    for requirements in [
        new.barriers(u32::MAX),
        new.all_to_all(1, 0),
        new.all_to_all(0, 1),
        new.gin(GinConnection::Stride(0)),
    ] {
        let error = requirements.encode(&nccl_of(23203), &FREE).err().unwrap();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    }
}

#[test]
fn what_the_communicator_lacks_is_refused() {
    let nccl = nccl_of(23203);
    let refused = |requirements: DevCommRequirements, support: &Support| {
        requirements
            .encode(&nccl, &Limits { support: Some(support), multicast_off: None })
            .err()
            .unwrap()
            .to_string()
    };
    let new = DevCommRequirements::new();
    let text = refused(new, &Support { device_api: false, ..support() });
    assert!(text.contains("NCCL_CUMEM_ENABLE"), "{text}");
    let text = refused(new.lsa_multimem(true), &Support { multimem: false, ..support() });
    assert!(text.contains("NVLink SHARP"), "{text}");
    let text = refused(new.gin(GinConnection::Full), &Support { gin: None, ..support() });
    assert!(text.contains("a full GIN connection") && text.contains("NCCL_GIN_PLUGIN"), "{text}");
    let text = refused(new.gin(GinConnection::Rail), &Support { railed_gin: None, ..support() });
    assert!(text.contains("a railed GIN connection"), "{text}");
    let text = refused(new.gin(GinConnection::Stride(1)), &support());
    assert!(text.contains("a strided GIN connection"), "{text}");
    // And what it has is given.
    let whole = support();
    let limits = Limits { support: Some(&whole), multicast_off: None };
    assert!(full().encode(&nccl, &limits).is_ok());
    assert!(new.gin(GinConnection::Stride(2)).encode(&nccl, &limits).is_ok());
}

#[test]
fn the_multicast_switch_wins() {
    let limits = Limits { support: Some(&support()), multicast_off: Some("NCCL_NVLS_ENABLE=0") };
    for code in [22803, 22809, 22907, 23007, 23102, 23203] {
        let error =
            DevCommRequirements::new().lsa_multimem(true).encode(&nccl_of(code), &limits).err().unwrap();
        assert_eq!(error, Error::MulticastOff { what: "lsa_multimem", setting: "NCCL_NVLS_ENABLE=0" });
        assert!(DevCommRequirements::new().lsa_barriers(1).encode(&nccl_of(code), &limits).is_ok());
    }
}
