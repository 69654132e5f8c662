//! Values of options that several commands take.

use std::time::Duration;

/// The longest wait that can be asked for.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Reads a number of seconds: more than nothing, at most a day.
pub(super) fn timeout(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) if !timeout.is_zero() && timeout <= LONGEST => Ok(timeout),
        _ => Err(format!("must be more than 0 and at most {} seconds", LONGEST.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts() {
        assert_eq!(timeout("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(timeout("86400"), Ok(LONGEST));
        for bad in ["0", "-0", "-1", "1e-300", "86401", "1e19", "1e400", "inf", "NaN"] {
            assert!(timeout(bad).is_err_and(|e| e.contains("at most 86400 seconds")), "{bad}");
        }
        for bad in ["", "1 s", "long"] {
            assert_eq!(timeout(bad), Err("expected a number of seconds".into()), "{bad}");
        }
    }
}
