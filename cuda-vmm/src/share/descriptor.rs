//! What one process tells another about memory or a multicast object: 128 bytes, versioned and checked.
//!
//! | offset | bytes | field, little-endian |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 2 | version |
//! | 10 | 2 | length of the descriptor |
//! | 12 | 1 | kind of object: 1 memory, 2 multicast object |
//! | 13 | 1 | transport |
//! | 14 | 1 | memory: kind of location; multicast object: zero |
//! | 15 | 1 | zero |
//! | 16 | 4 | memory: device ordinal in the exporter, or NUMA node; multicast object: number of devices |
//! | 20 | 4 | handle types that the object was created with |
//! | 24 | 8 | size in bytes |
//! | 32 | 16 | memory: UUID of the device, or zero; multicast object: zero |
//! | 48 | 4 | process id of the exporter (transport pidfd, else zero) |
//! | 52 | 4 | file descriptor there (transport pidfd, else zero) |
//! | 56 | 64 | FABRIC handle (transport FABRIC, else zero) |
//! | 120 | 8 | zero |

use crate::device::Uuid;
use crate::error::Result;
use crate::location::Location;
use crate::physical::PhysicalMemory;
use crate::properties::HandleTypes;
use crate::share::FabricHandle;

const MAGIC: [u8; 8] = *b"CUDA-VMM";
const VERSION: u16 = 1;

/// What kind of object a descriptor stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Physical memory.
    Memory {
        /// Where it lies, with the exporter's device ordinals.
        location: Location,
        /// Identity of the device; zero for host memory.
        device_uuid: Uuid,
    },
    /// A multicast object.
    Multicast {
        /// Number of devices that it is for.
        devices: u32,
    },
}

impl Kind {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Multicast { .. } => "a multicast object",
        }
    }
}

/// How the importer gets at the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// A file descriptor travels beside these bytes.
    Socket,
    /// The file descriptor is taken out of the exporter's process.
    Pidfd {
        /// The exporter.
        pid: u32,
        /// The descriptor's number there.
        fd: i32,
    },
    /// A FABRIC handle.
    Fabric(FabricHandle),
}

/// What one process tells another about memory or a multicast object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Kind of object.
    pub kind: Kind,
    /// How to get at it.
    pub transport: Transport,
    /// What the object was created to be exported as.
    pub handle_types: HandleTypes,
    /// Size in bytes.
    pub size: u64,
}

/// Why bytes are no descriptor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// Not as many bytes as a descriptor has.
    #[error("{actual} bytes, and a descriptor has {expected}")]
    Length {
        /// Bytes given.
        actual: usize,
        /// Bytes of a descriptor.
        expected: usize,
    },
    /// Not a descriptor of this crate.
    #[error("it does not start like one (is the other end of the socket something else?)")]
    Magic,
    /// A version that this crate does not speak.
    #[error("version {found}, and this is version {spoken}: use the same cuda-vmm on both sides")]
    Version {
        /// The version given.
        found: u16,
        /// The version that is understood.
        spoken: u16,
    },
    /// A field has a value that it cannot have.
    #[error("field {field} has the impossible value {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: i128,
    },
    /// The descriptor is of another kind of object.
    #[error("it is of {found}, not of {expected}")]
    Kind {
        /// What it is of.
        found: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// The descriptor is meant for another way of importing.
    #[error("it is meant for {found}, not for {expected}")]
    Transport {
        /// What it is meant for.
        found: &'static str,
        /// What it was used for.
        expected: &'static str,
    },
}

impl Descriptor {
    /// Bytes of an encoded descriptor.
    pub const BYTES: usize = 128;

    /// The descriptor of memory of this process.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call) if the device does not tell its UUID.
    pub fn of(memory: &PhysicalMemory, transport: Transport) -> Result<Self> {
        let device_uuid = match memory.location() {
            Location::Device(ordinal) => memory.cuda().device(ordinal)?.uuid()?,
            Location::HostNuma(_) | Location::Host => Uuid::default(),
        };
        let kind = Kind::Memory { location: memory.location(), device_uuid };
        Ok(Self { kind, transport, handle_types: memory.handle_types(), size: memory.size() as u64 })
    }

    /// The descriptor as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(10, &(Self::BYTES as u16).to_le_bytes());
        match self.kind {
            Kind::Memory { location, device_uuid } => {
                let (kind, id) = match location {
                    Location::Device(ordinal) => (1, ordinal),
                    Location::HostNuma(node) => (2, node),
                    Location::Host => (3, 0),
                };
                put(12, &[1]);
                put(14, &[kind]);
                put(16, &id.to_le_bytes());
                put(32, &device_uuid.0);
            }
            Kind::Multicast { devices } => {
                put(12, &[2]);
                put(16, &devices.to_le_bytes());
            }
        }
        match &self.transport {
            Transport::Socket => put(13, &[1]),
            Transport::Pidfd { pid, fd } => {
                put(13, &[2]);
                put(48, &pid.to_le_bytes());
                put(52, &fd.to_le_bytes());
            }
            Transport::Fabric(handle) => {
                put(13, &[3]);
                put(56, handle.as_bytes());
            }
        }
        put(20, &self.handle_types.bits().to_le_bytes());
        put(24, &self.size.to_le_bytes());
        out
    }

    /// Reads a descriptor. Any bytes may be given: nothing is done with them but checking.
    ///
    /// # Errors
    /// A [`DescriptorError`] that says what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let expected = Self::BYTES;
        let bytes: &[u8; Self::BYTES] =
            bytes.try_into().map_err(|_| DescriptorError::Length { actual: bytes.len(), expected })?;
        if bytes[..8] != MAGIC {
            return Err(DescriptorError::Magic);
        }
        let version = u16::from_le_bytes(field(bytes, 8));
        if version != VERSION {
            return Err(DescriptorError::Version { found: version, spoken: VERSION });
        }
        let wrong = |field, value: i128| Err(DescriptorError::Field { field, value });
        let length = u16::from_le_bytes(field(bytes, 10));
        if usize::from(length) != Self::BYTES {
            return wrong("length", length.into());
        }
        let (pid, fd) = (u32::from_le_bytes(field(bytes, 48)), i32::from_le_bytes(field(bytes, 52)));
        let handle = FabricHandle::from_bytes(field(bytes, 56));
        let transport = match bytes[13] {
            1 => Transport::Socket,
            2 if pid == 0 || i32::try_from(pid).is_err() => return wrong("process id", pid.into()),
            2 if fd < 0 => return wrong("file descriptor", fd.into()),
            2 => Transport::Pidfd { pid, fd },
            3 => Transport::Fabric(handle),
            other => return wrong("transport", other.into()),
        };
        let is_pidfd = matches!(transport, Transport::Pidfd { .. });
        if !is_pidfd && pid != 0 {
            return wrong("process id", pid.into());
        }
        if !is_pidfd && fd != 0 {
            return wrong("file descriptor", fd.into());
        }
        if !matches!(transport, Transport::Fabric(_)) && handle.as_bytes() != &[0; 64] {
            return wrong("FABRIC handle without FABRIC transport", 1);
        }
        let kind = match bytes[12] {
            1 => memory_kind(bytes)?,
            2 => multicast_kind(bytes)?,
            other => return wrong("kind", other.into()),
        };
        let size = u64::from_le_bytes(field(bytes, 24));
        if size == 0 || i64::try_from(size).is_err() || usize::try_from(size).is_err() {
            return wrong("size", size.into());
        }
        if bytes[15] != 0 || bytes[120..] != [0; 8] {
            return wrong("reserved bytes", 1);
        }
        let handle_types = HandleTypes::from_bits_retain(u32::from_le_bytes(field(bytes, 20)));
        Ok(Self { kind, transport, handle_types, size })
    }

    pub(crate) fn size(&self) -> usize {
        // Checked by `decode`, and true of memory of this process.
        self.size as usize
    }
}

impl Transport {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Socket => "a Unix socket",
            Self::Pidfd { .. } => "pidfd_getfd",
            Self::Fabric(_) => "FABRIC",
        }
    }
}

/// The fields that are memory's.
fn memory_kind(bytes: &[u8; Descriptor::BYTES]) -> Result<Kind, DescriptorError> {
    let wrong = |field, value: i128| Err(DescriptorError::Field { field, value });
    let id = i32::from_le_bytes(field(bytes, 16));
    let location = match bytes[14] {
        1 | 2 if id < 0 => return wrong("location", id.into()),
        1 => Location::Device(id),
        2 => Location::HostNuma(id),
        3 if id == 0 => Location::Host,
        3 => return wrong("location", id.into()),
        other => return wrong("kind of location", other.into()),
    };
    let device_uuid = Uuid(field(bytes, 32));
    if location.is_host() && device_uuid != Uuid::default() {
        return wrong("device of host memory", 1);
    }
    Ok(Kind::Memory { location, device_uuid })
}

/// The fields that are a multicast object's.
fn multicast_kind(bytes: &[u8; Descriptor::BYTES]) -> Result<Kind, DescriptorError> {
    let wrong = |field, value: i128| Err(DescriptorError::Field { field, value });
    let devices = u32::from_le_bytes(field(bytes, 16));
    if devices == 0 {
        return wrong("number of devices", 0);
    }
    if bytes[14] != 0 {
        return wrong("location of a multicast object", bytes[14].into());
    }
    if bytes[32..48] != [0; 16] {
        return wrong("device of a multicast object", 1);
    }
    Ok(Kind::Multicast { devices })
}

/// `N` bytes at a constant offset of the descriptor.
fn field<const N: usize>(bytes: &[u8; Descriptor::BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Descriptor> {
        let memory = |location, uuid| Kind::Memory { location, device_uuid: Uuid([uuid; 16]) };
        let base = Descriptor {
            kind: memory(Location::Device(3), 7),
            transport: Transport::Socket,
            handle_types: HandleTypes::POSIX_FD,
            size: 2 << 20,
        };
        let fabric = Transport::Fabric(FabricHandle::from_bytes([9; 64]));
        vec![
            base,
            Descriptor { transport: Transport::Pidfd { pid: 42, fd: 7 }, ..base },
            Descriptor { transport: fabric, handle_types: HandleTypes::all(), ..base },
            Descriptor { kind: memory(Location::HostNuma(1), 0), ..base },
            Descriptor { kind: memory(Location::Host, 0), ..base },
            Descriptor { kind: Kind::Multicast { devices: 8 }, ..base },
            Descriptor { kind: Kind::Multicast { devices: 2 }, transport: fabric, ..base },
        ]
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for sample in samples() {
            assert_eq!(Descriptor::decode(&sample.encode()), Ok(sample));
        }
    }

    #[test]
    fn any_other_length_is_refused() {
        let bytes = samples()[0].encode();
        for length in 0..Descriptor::BYTES {
            let expected = Err(DescriptorError::Length { actual: length, expected: 128 });
            assert_eq!(Descriptor::decode(&bytes[..length]), expected);
        }
        let mut longer = bytes.to_vec();
        longer.push(0);
        assert!(matches!(Descriptor::decode(&longer), Err(DescriptorError::Length { actual: 129, .. })));
    }

    #[test]
    fn each_wrong_field_is_named() {
        type Change<'a> = &'a dyn Fn(&mut [u8; Descriptor::BYTES]);
        let broken_of = |sample: usize, change: Change<'_>| {
            let mut bytes = samples()[sample].encode();
            change(&mut bytes);
            Descriptor::decode(&bytes).unwrap_err()
        };
        let broken = |change: Change<'_>| broken_of(0, change);
        let field_of = |error| match error {
            DescriptorError::Field { field, .. } => field,
            other => panic!("{other}"),
        };
        assert_eq!(broken(&|b| b[0] ^= 1), DescriptorError::Magic);
        assert_eq!(broken(&|b| b[8] = 2), DescriptorError::Version { found: 2, spoken: 1 });
        assert_eq!(field_of(broken(&|b| b[10] = 127)), "length");
        assert_eq!(field_of(broken(&|b| b[12] = 0)), "kind");
        assert_eq!(field_of(broken(&|b| b[13] = 4)), "transport");
        assert_eq!(field_of(broken(&|b| b[13] = 2)), "process id");
        assert_eq!(field_of(broken(&|b| b[14] = 9)), "kind of location");
        assert_eq!(field_of(broken(&|b| b[19] = 0x80)), "location");
        assert_eq!(field_of(broken(&|b| b[24..32].fill(0))), "size");
        assert_eq!(field_of(broken(&|b| b[24..32].fill(0xff))), "size");
        assert_eq!(field_of(broken(&|b| b[14] = 2)), "device of host memory");
        assert_eq!(field_of(broken(&|b| b[52] = 1)), "file descriptor");
        assert_eq!(field_of(broken(&|b| b[60] = 1)), "FABRIC handle without FABRIC transport");
        assert_eq!(field_of(broken(&|b| b[15] = 1)), "reserved bytes");
        assert_eq!(field_of(broken(&|b| b[127] = 1)), "reserved bytes");
        assert_eq!(field_of(broken(&|b| b[12] = 3)), "kind");

        let multicast = |change: Change<'_>| field_of(broken_of(5, change));
        assert_eq!(multicast(&|b| b[16..20].fill(0)), "number of devices");
        assert_eq!(multicast(&|b| b[14] = 1), "location of a multicast object");
        assert_eq!(multicast(&|b| b[47] = 1), "device of a multicast object");
        assert_eq!(multicast(&|b| b[12] = 1), "kind of location");
        assert_eq!(multicast(&|b| b[24..32].fill(0)), "size");
    }

    /// Whatever bytes come, they are refused or mean exactly what they say.
    #[test]
    fn hostile_bytes_are_refused_or_mean_themselves() {
        // Fixed pseudo-random bytes (xorshift), so that a failure can be repeated.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        let (mut refused, mut taken) = (0, 0);
        for round in 0..20_000 {
            let samples = samples();
            let mut bytes = samples[round % samples.len()].encode();
            for _ in 0..=next() % 3 {
                bytes[next() % Descriptor::BYTES] = (next() >> 8) as u8;
            }
            match Descriptor::decode(&bytes) {
                Ok(descriptor) => {
                    assert_eq!(descriptor.encode(), bytes);
                    taken += 1;
                }
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 1000 && taken > 1000, "{refused} refused, {taken} taken");
    }

    #[test]
    fn a_fabric_handle_is_not_printed_in_full() {
        let text = format!("{:?}", samples()[2]);
        assert!(text.contains("FabricHandle(0909..)") && !text.contains("090909"), "{text}");
    }
}
