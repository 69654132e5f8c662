//! What the environment says. Read once for each connection.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Seconds that a rank waits for the others in `connect` and in registrations.
pub(crate) const TIMEOUT_ENV: &str = "NCCL_GIN_SOFT_TIMEOUT";
/// `1`: payload always goes through host memory, even where the receiver could fetch it from the sender's.
pub(crate) const STAGE_ENV: &str = "NCCL_GIN_SOFT_STAGE";
/// `1`: TCP even inside a host.
pub(crate) const TCP_ENV: &str = "NCCL_GIN_SOFT_TCP";
/// Addresses that this rank listens on for other hosts, separated by commas, in place of those of its interfaces.
pub(crate) const ADDRESS_ENV: &str = "NCCL_GIN_SOFT_ADDR";
/// Folder for the Unix sockets, in place of abstract names: for containers that share a folder but not a network namespace.
pub(crate) const FOLDER_ENV: &str = "NCCL_GIN_SOFT_DIR";
/// Microseconds that a thread looks for work before it sleeps.
pub(crate) const SPIN_ENV: &str = "NCCL_GIN_SOFT_SPIN_US";
/// `0`: no claim to take dma-bufs. Windows of several segments are then refused by NCCL.
pub(crate) const DMA_BUF_ENV: &str = "NCCL_GIN_SOFT_DMABUF";
/// Interfaces, in NCCL's own words: a list of prefixes, `^` to exclude, `=` for whole names.
pub(crate) const INTERFACE_ENV: &str = "NCCL_SOCKET_IFNAME";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) stage: bool,
    pub(crate) tcp: bool,
    pub(crate) spin: Duration,
    pub(crate) folder: Option<PathBuf>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) interfaces: Option<String>,
}

impl Settings {
    pub(crate) fn from_env() -> Self {
        Self::read(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(get: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name, default| get(name).and_then(|v| v.trim().parse().ok()).unwrap_or(default);
        let flag = |name| get(name).is_some_and(|value| value.trim() != "0");
        Self {
            timeout: Duration::from_secs(number(TIMEOUT_ENV, 60).clamp(1, 3600)),
            stage: flag(STAGE_ENV),
            tcp: flag(TCP_ENV),
            spin: Duration::from_micros(number(SPIN_ENV, 5000).min(10_000_000)),
            folder: get(FOLDER_ENV).map(PathBuf::from),
            addresses: get(ADDRESS_ENV)
                .map(|list| list.split(',').filter_map(|one| one.trim().parse().ok()).collect())
                .unwrap_or_default(),
            interfaces: get(INTERFACE_ENV),
        }
    }
}

/// Whether windows of several segments may be registered.
pub(crate) fn dma_buf() -> bool {
    std::env::var(DMA_BUF_ENV).map_or(true, |value| value.trim() != "0")
}

/// Whether an interface is in a list as `NCCL_SOCKET_IFNAME` has it.
pub(crate) fn interface_matches(list: &str, name: &str) -> bool {
    let (exclude, list) = list.strip_prefix('^').map_or((false, list), |rest| (true, rest));
    let (whole, list) = list.strip_prefix('=').map_or((false, list), |rest| (true, rest));
    let found = list
        .split(',')
        .filter(|one| !one.is_empty())
        .any(|one| if whole { name == one } else { name.starts_with(one) });
    found != exclude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_read_with_defaults() {
        let settings = Settings::read(|_| None);
        assert_eq!((settings.timeout, settings.stage, settings.tcp), (Duration::from_secs(60), false, false));
        let settings = Settings::read(|name| {
            Some(
                match name {
                    TIMEOUT_ENV => "7",
                    STAGE_ENV => "1",
                    TCP_ENV => "0",
                    ADDRESS_ENV => "10.0.0.1, ::1,nonsense",
                    _ => return None,
                }
                .to_owned(),
            )
        });
        assert_eq!((settings.timeout, settings.stage, settings.tcp), (Duration::from_secs(7), true, false));
        assert_eq!(settings.addresses.len(), 2);
    }

    #[test]
    fn interfaces_are_chosen_as_nccl_does() {
        assert!(interface_matches("eth", "eth0") && !interface_matches("eth", "lo"));
        assert!(interface_matches("=eth0", "eth0") && !interface_matches("=eth", "eth0"));
        assert!(interface_matches("^docker,lo", "eth0") && !interface_matches("^docker,lo", "docker0"));
        assert!(!interface_matches("^=lo", "lo") && interface_matches("^=l", "lo"));
    }
}
