//! The process-wide switch of multicast.

/// Environment variables that switch multicast off, and the value that does.
const SWITCHES: [(&str, &str); 2] = [("CUDA_VMM_DISABLE_MULTICAST", "1"), ("NCCL_NVLS_ENABLE", "0")];

/// The environment variable that switches multicast off for this process: `CUDA_VMM_DISABLE_MULTICAST=1` or `NCCL_NVLS_ENABLE=0`.
/// `None` if neither is set.
///
/// Multicast objects take resources of the whole NVLink fabric; where a fabric is shared, its operator may want none to be made.
#[must_use]
pub fn multicast_disabled_by() -> Option<&'static str> {
    disabled_by(|name| std::env::var(name).ok())
}

fn disabled_by(lookup: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    SWITCHES
        .iter()
        .find(|(name, off)| lookup(name).is_some_and(|value| value.trim() == *off))
        .map(|&(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_variable_switches_it_off() {
        let with = |name: &'static str, value: &'static str| {
            disabled_by(move |asked| (asked == name).then(|| value.to_owned()))
        };
        assert_eq!(with("CUDA_VMM_DISABLE_MULTICAST", "1"), Some("CUDA_VMM_DISABLE_MULTICAST"));
        assert_eq!(with("NCCL_NVLS_ENABLE", "0"), Some("NCCL_NVLS_ENABLE"));
        assert_eq!(with("CUDA_VMM_DISABLE_MULTICAST", "0"), None);
        assert_eq!(with("NCCL_NVLS_ENABLE", "1"), None);
        assert_eq!(disabled_by(|_| None), None);
    }
}
