//! Versions of NCCL, and the generations of struct layouts that they fall into.

use crate::layouts::{v2_28, v2_28_3, v2_29, v2_30, v2_31, v2_32};
use std::fmt;

/// A version of NCCL, as `ncclGetVersion` counts: 22809 is 2.28.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u32);

impl Version {
    /// The oldest version that this crate talks to.
    pub const OLDEST: Self = Self(22803);
    /// The newest version whose headers it has been checked against.
    pub const NEWEST_CHECKED: Self = Self(23203);

    /// The version with this code (`NCCL_VERSION_CODE`, from 2.9 on `10000 * major + 100 * minor + patch`).
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        Self(code)
    }

    /// The code, as `ncclGetVersion` counts.
    #[must_use]
    pub const fn code(self) -> u32 {
        self.0
    }

    /// `(major, minor, patch)`.
    #[must_use]
    pub const fn parts(self) -> (u32, u32, u32) {
        if self.0 < 10_000 {
            return (self.0 / 1000, self.0 % 1000 / 100, self.0 % 100);
        }
        (self.0 / 10_000, self.0 % 10_000 / 100, self.0 % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// A set of struct layouts that a library takes.
///
/// A library newer than all of them is spoken to in the newest: from 2.29 on NCCL accepts structs of older versions, which they name in
/// their `version` field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Generation {
    /// 2.28.3: requirements without size, magic or version, and no GIN. A struct of a later generation makes the library crash.
    V2_28_3,
    /// 2.28.7 to 2.28.9: as before, with GIN. A struct of a later generation makes the library crash.
    V2_28,
    /// 2.29.5 to 2.29.7.
    V2_29,
    /// 2.30: GIN device code compiled for it keeps working with later libraries.
    V2_30,
    /// 2.31.
    V2_31,
    /// 2.32 and later.
    V2_32,
}

impl Generation {
    /// The generation that a library of `version` takes, or `None` if this crate does not talk to that version: those before
    /// 2.28.3, those between 2.28.3 and 2.28.7, whose layouts are not known, and 2.29.0 to 2.29.4, whose layouts are their own.
    #[must_use]
    pub const fn of(version: Version) -> Option<Self> {
        match version.code() {
            22803 => Some(Self::V2_28_3),
            22807..=22899 => Some(Self::V2_28),
            22905..=22999 => Some(Self::V2_29),
            23000..=23099 => Some(Self::V2_30),
            23100..=23199 => Some(Self::V2_31),
            23200.. => Some(Self::V2_32),
            _ => None,
        }
    }

    /// The newest version of this generation that this crate knows, the most that it may declare.
    #[must_use]
    pub const fn newest(self) -> Version {
        Version(match self {
            Self::V2_28_3 => 22803,
            Self::V2_28 => 22809,
            Self::V2_29 => 22907,
            Self::V2_30 => 23007,
            Self::V2_31 => 23102,
            Self::V2_32 => 23203,
        })
    }

    /// Version to write into the structs for a library of `version`, which must be of this generation or later: a library refuses
    /// a version that is newer than its own or that it does not know.
    #[must_use]
    pub const fn declared(self, version: Version) -> Version {
        if version.code() < self.newest().code() { version } else { self.newest() }
    }

    /// Bytes of `ncclDevCommRequirements`.
    #[must_use]
    pub const fn requirements_size(self) -> usize {
        match self {
            Self::V2_28_3 => size_of::<v2_28_3::ncclDevCommRequirements>(),
            Self::V2_28 => size_of::<v2_28::ncclDevCommRequirements>(),
            Self::V2_29 => size_of::<v2_29::ncclDevCommRequirements>(),
            Self::V2_30 => size_of::<v2_30::ncclDevCommRequirements>(),
            Self::V2_31 => size_of::<v2_31::ncclDevCommRequirements>(),
            Self::V2_32 => size_of::<v2_32::ncclDevCommRequirements>(),
        }
    }

    /// Bytes of the `ncclDevComm` that a library writes for requirements of this generation.
    #[must_use]
    pub const fn dev_comm_size(self) -> usize {
        match self {
            Self::V2_28_3 => size_of::<v2_28_3::ncclDevComm>(),
            Self::V2_28 => size_of::<v2_28::ncclDevComm>(),
            Self::V2_29 => size_of::<v2_29::ncclDevComm>(),
            Self::V2_30 => size_of::<v2_30::ncclDevComm>(),
            Self::V2_31 => size_of::<v2_31::ncclDevComm>(),
            Self::V2_32 => size_of::<v2_32::ncclDevComm>(),
        }
    }

    /// Bytes of `ncclCommProperties`; `None` for 2.28, which has no such struct.
    #[must_use]
    pub const fn properties_size(self) -> Option<usize> {
        match self {
            Self::V2_28_3 | Self::V2_28 => None,
            Self::V2_29 => Some(size_of::<v2_29::ncclCommProperties>()),
            Self::V2_30 => Some(size_of::<v2_30::ncclCommProperties>()),
            Self::V2_31 => Some(size_of::<v2_31::ncclCommProperties>()),
            Self::V2_32 => Some(size_of::<v2_32::ncclCommProperties>()),
        }
    }

    /// Bytes of `ncclConfig_t`.
    #[must_use]
    pub const fn config_size(self) -> usize {
        match self {
            Self::V2_28_3 => size_of::<v2_28_3::ncclConfig_t>(),
            Self::V2_28 => size_of::<v2_28::ncclConfig_t>(),
            Self::V2_29 => size_of::<v2_29::ncclConfig_t>(),
            Self::V2_30 => size_of::<v2_30::ncclConfig_t>(),
            Self::V2_31 => size_of::<v2_31::ncclConfig_t>(),
            Self::V2_32 => size_of::<v2_32::ncclConfig_t>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!(Version::from_code(22809).to_string(), "2.28.9");
        assert_eq!(Version::from_code(23203).to_string(), "2.32.3");
        // Before 2.9 the code had fewer digits.
        assert_eq!(Version::from_code(2804).to_string(), "2.8.4");
    }

    #[test]
    fn each_version_falls_into_one_generation() {
        let of = |code| Generation::of(Version::from_code(code));
        assert_eq!(of(2708), None);
        assert_eq!(of(22703), None);
        assert_eq!(of(22803), Some(Generation::V2_28_3));
        for code in [22800, 22802, 22804, 22806] {
            assert_eq!(of(code), None, "{code}");
        }
        assert_eq!(of(22807), Some(Generation::V2_28));
        assert_eq!(of(22809), Some(Generation::V2_28));
        for code in 22900..22905 {
            assert_eq!(of(code), None, "{code}");
        }
        assert_eq!(of(22905), Some(Generation::V2_29));
        assert_eq!(of(23003), Some(Generation::V2_30));
        assert_eq!(of(23102), Some(Generation::V2_31));
        assert_eq!(of(23206), Some(Generation::V2_32));
        assert_eq!(of(30000), Some(Generation::V2_32));
    }

    #[test]
    fn never_more_is_declared_than_is_known_or_loaded() {
        let declared = |code| {
            let version = Version::from_code(code);
            Generation::of(version).unwrap().declared(version).code()
        };
        assert_eq!(declared(22803), 22803);
        assert_eq!(declared(22905), 22905);
        assert_eq!(declared(23003), 23003);
        assert_eq!(declared(23009), 23007);
        assert_eq!(declared(23102), 23102);
        assert_eq!(declared(23206), 23203);
        assert_eq!(declared(24000), 23203);
    }

    #[test]
    fn sizes_are_those_of_the_wheels() {
        use Generation::{V2_28, V2_28_3, V2_29, V2_30, V2_31, V2_32};
        let all = [V2_28_3, V2_28, V2_29, V2_30, V2_31, V2_32];
        assert_eq!(all.map(Generation::requirements_size), [24, 56, 88, 96, 120, 120]);
        assert_eq!(all.map(Generation::dev_comm_size), [88, 200, 224, 240, 248, 248]);
        let properties = [None, None, Some(56), Some(56), Some(144), Some(152)];
        assert_eq!(all.map(Generation::properties_size), properties);
        assert_eq!(all.map(Generation::config_size), [80, 80, 88, 96, 112, 120]);
    }
}
