//! Environment variables that decide what may be done.

use crate::error::{Error, Result};
use nccl_gin_sys::Version;

/// Keeps this family of crates away from multicast.
const OURS: &str = "CUDA_VMM_DISABLE_MULTICAST";
/// Keeps NCCL away from it.
const NCCLS: &str = "NCCL_NVLS_ENABLE";
/// Makes every communicator of the process a blocking one, whatever its configuration says.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// Whether windows may hold host memory.
const ELASTIC: &str = "NCCL_ELASTIC_BUFFER_REGISTER";
/// Bytes of addresses that each rank's windows get.
const STRIDE: &str = "NCCL_WIN_STRIDE";
/// Whether the host memory in a rank's window stands for that of every rank.
pub(crate) const REUSE: &str = "NCCL_SYM_REUSE_SYSMEM_HANDLES";
/// The first NCCL that knows [`REUSE`].
pub(crate) const REUSE_SINCE: Version = Version::from_code(23004);

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

fn process(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The setting that switches multicast off for this process, if any: `CUDA_VMM_DISABLE_MULTICAST=1` or `NCCL_NVLS_ENABLE=0`.
#[must_use]
pub fn multicast_disabled_by() -> Option<&'static str> {
    switched_off(&process)
}

fn switched_off(get: Lookup<'_>) -> Option<&'static str> {
    if get(OURS).is_some_and(|value| value.trim() == "1") {
        return Some("CUDA_VMM_DISABLE_MULTICAST=1");
    }
    get(NCCLS).is_some_and(|value| value.trim() == "0").then_some("NCCL_NVLS_ENABLE=0")
}

/// Whether a communicator may be created in this environment.
pub(crate) fn check() -> Result<()> {
    check_with(&process)
}

fn check_with(get: Lookup<'_>) -> Result<()> {
    if get(OURS).is_some_and(|value| value.trim() == "1")
        && get(NCCLS).is_none_or(|value| value.trim() != "0")
    {
        return Err(Error::Environment {
            setting: "CUDA_VMM_DISABLE_MULTICAST=1 without NCCL_NVLS_ENABLE=0",
            reason: "NCCL would create multicast objects of its own when it creates the communicator",
            advice: "set NCCL_NVLS_ENABLE=0 as well",
        });
    }
    if get(BLOCKING).is_some_and(|value| value.trim() == "1") {
        return Err(Error::Environment {
            setting: "NCCL_COMM_BLOCKING=1",
            reason: "with blocking communicators a wait for a peer that has died never ends",
            advice: "unset it",
        });
    }
    Ok(())
}

/// What the environment lets windows be. NCCL reads it once in a process, for all communicators, so that this crate changes none of it: it says
/// what to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowSettings {
    /// Whether they may hold host memory.
    pub(crate) host_memory: bool,
    /// Bytes of addresses that each rank's windows get, if that is set.
    pub(crate) stride: Option<usize>,
    /// Whether NCCL maps this rank's own host memory where it would map a peer's.
    pub(crate) reuses_host_memory: bool,
}

/// What the environment lets windows of a library of this version be.
pub(crate) fn windows(version: Version) -> WindowSettings {
    windows_with(&process, version)
}

fn windows_with(get: Lookup<'_>, version: Version) -> WindowSettings {
    let reuse = get(REUSE).and_then(|value| number(&value)).is_some_and(|value| value != 0);
    let stride = get(STRIDE).and_then(|value| number(&value)).and_then(|value| usize::try_from(value).ok());
    WindowSettings {
        host_memory: get(ELASTIC).and_then(|value| number(&value)) != Some(0),
        // Smaller values stand for the default.
        stride: stride.filter(|&bytes| bytes > 1),
        reuses_host_memory: reuse && version >= REUSE_SINCE,
    }
}

/// A whole number, as NCCL reads them: decimal, or hexadecimal behind `0x`.
fn number(text: &str) -> Option<i64> {
    let text = text.trim();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => i64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn either_switch_turns_multicast_off() {
        assert_eq!(switched_off(&with(&[])), None);
        assert_eq!(switched_off(&with(&[(NCCLS, "1"), (OURS, "0")])), None);
        assert_eq!(switched_off(&with(&[(NCCLS, "0")])), Some("NCCL_NVLS_ENABLE=0"));
        assert_eq!(switched_off(&with(&[(OURS, "1")])), Some("CUDA_VMM_DISABLE_MULTICAST=1"));
    }

    #[test]
    fn windows_are_what_nccl_reads() {
        let settings = |pairs| windows_with(&with(pairs), REUSE_SINCE);
        let default = WindowSettings { host_memory: true, stride: None, reuses_host_memory: false };
        assert_eq!(settings(&[]), default);
        assert_eq!(settings(&[(ELASTIC, "1"), (STRIDE, "-1")]), default);
        assert_eq!(settings(&[(ELASTIC, "yes"), (STRIDE, "much")]), default);
        assert_eq!(settings(&[(STRIDE, "1")]), default);
        assert!(!settings(&[(ELASTIC, "0")]).host_memory);
        assert_eq!(settings(&[(STRIDE, "0x300000000")]).stride, Some(12 << 30));
        assert_eq!(settings(&[(STRIDE, " 4294967296 ")]).stride, Some(4 << 30));
        assert_eq!(settings(&[(REUSE, "0")]), default);
        assert_eq!(settings(&[(REUSE, "on")]), default);
        assert!(settings(&[(REUSE, "1")]).reuses_host_memory);
        assert!(settings(&[(REUSE, "-1")]).reuses_host_memory, "anything but 0");
        let before = windows_with(&with(&[(REUSE, "1")]), Version::from_code(23003));
        assert_eq!(before, default, "2.30.3 does not read it");
    }

    #[test]
    fn an_environment_that_breaks_a_promise_is_refused() {
        assert!(check_with(&with(&[])).is_ok());
        assert!(check_with(&with(&[(OURS, "1"), (NCCLS, "0")])).is_ok());
        for (pairs, advice) in [
            (&[(OURS, "1")][..], "set NCCL_NVLS_ENABLE=0 as well"),
            (&[(OURS, "1"), (NCCLS, "2")], "set NCCL_NVLS_ENABLE=0 as well"),
            (&[(BLOCKING, "1")], "unset it"),
        ] {
            let error = check_with(&with(pairs)).unwrap_err();
            assert!(error.to_string().ends_with(advice), "{error}");
        }
    }
}
