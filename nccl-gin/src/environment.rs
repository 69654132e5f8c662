//! Environment variables that decide what may be done.

use crate::error::{Error, Result};

/// Keeps this family of crates away from multicast.
const OURS: &str = "CUDA_VMM_DISABLE_MULTICAST";
/// Keeps NCCL away from it.
const NCCLS: &str = "NCCL_NVLS_ENABLE";
/// Makes every communicator of the process a blocking one, whatever its configuration says.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

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
