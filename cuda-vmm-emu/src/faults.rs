//! Faults on demand: calls that fail, are late, or whose function is missing; and counts of calls.

use crate::status::{Outcome, lock};
use cuda_vmm_sys::{CUresult, Function};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Controls the faults of an [`Emulator`](crate::Emulator) and counts its calls.
///
/// A call that is made to fail does nothing: it returns the code before any of its arguments is looked at.
///
/// ```
/// use cuda_vmm_emu::sys::{CUresult, Function};
/// use cuda_vmm_emu::{Config, Emulator};
///
/// let emulator = Emulator::new(Config::default())?;
/// let driver = emulator.driver();
/// emulator.faults().fail_nth(Function::cuInit, 2, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
/// // SAFETY: cuInit takes no pointer.
/// unsafe {
///     assert!(driver.cuInit(0).is_ok());
///     assert!(driver.cuInit(0).is_err());
///     assert!(driver.cuInit(0).is_ok());
/// }
/// assert_eq!(emulator.faults().calls(Function::cuInit), 3);
/// # Ok::<(), cuda_vmm_emu::EmulatorError>(())
/// ```
#[derive(Debug, Default)]
pub struct Faults {
    counts: Vec<AtomicU64>,
    /// Whether there is any rule: the one thing that a call without faults reads.
    any: AtomicBool,
    rules: Mutex<Vec<Rule>>,
    removed: Mutex<BTreeSet<Function>>,
}

#[derive(Clone, Debug)]
struct Rule {
    function: Function,
    effect: Effect,
}

#[derive(Clone, Debug)]
enum Effect {
    /// Fails the call with this number (as counted since the emulator was made), and is then spent.
    FailCall {
        number: u64,
        code: CUresult,
    },
    /// Fails this call and every later one.
    FailFrom {
        number: u64,
        code: CUresult,
    },
    Delay(Duration),
}

impl Faults {
    pub(crate) fn new() -> Self {
        Self { counts: Function::ALL.iter().map(|_| AtomicU64::new(0)).collect(), ..Self::default() }
    }

    /// Fails the next call of `function` with `code`; later ones work again.
    pub fn fail_once(&self, function: Function, code: CUresult) {
        self.fail_nth(function, 1, code);
    }

    /// Fails the `nth` call of `function` from now (the next one is number 1) with `code`. `CUDA_SUCCESS` makes the call succeed
    /// without doing anything. Zero is taken as 1.
    pub fn fail_nth(&self, function: Function, nth: u64, code: CUresult) {
        let number = self.calls(function) + nth.max(1);
        self.push(function, Effect::FailCall { number, code });
    }

    /// Fails every call of `function` from now on with `code`, until [`clear`](Self::clear).
    pub fn fail_always(&self, function: Function, code: CUresult) {
        let number = self.calls(function) + 1;
        self.push(function, Effect::FailFrom { number, code });
    }

    /// Makes every call of `function` take `delay` longer, until [`clear`](Self::clear).
    pub fn delay(&self, function: Function, delay: Duration) {
        self.push(function, Effect::Delay(delay));
    }

    /// Removes `function` from the driver: a table that has not used it yet finds it missing, until [`clear`](Self::clear). A table keeps
    /// what it has looked up; [`Emulator::fresh_driver`](crate::Emulator::fresh_driver) makes one that has looked up nothing.
    pub fn remove(&self, function: Function) {
        lock(&self.removed).insert(function);
    }

    /// Takes all faults back. Counts stay.
    pub fn clear(&self) {
        lock(&self.rules).clear();
        self.any.store(false, Ordering::Release);
        lock(&self.removed).clear();
    }

    /// Calls of `function` so far, with those that were made to fail.
    #[must_use]
    pub fn calls(&self, function: Function) -> u64 {
        self.counts.get(function as usize).map_or(0, |count| count.load(Ordering::Acquire))
    }

    fn push(&self, function: Function, effect: Effect) {
        lock(&self.rules).push(Rule { function, effect });
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn is_removed(&self, function: Function) -> bool {
        lock(&self.removed).contains(&function)
    }

    /// Counts a call. `Some` is the result that it was made to have.
    pub(crate) fn on_call(&self, function: Function) -> Option<Outcome> {
        let number = self.counts.get(function as usize)?.fetch_add(1, Ordering::AcqRel) + 1;
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let (mut delay, mut failure) = (Duration::ZERO, None);
        lock(&self.rules).retain(|rule| {
            if rule.function != function {
                return true;
            }
            match rule.effect {
                Effect::Delay(more) => delay += more,
                Effect::FailFrom { number: from, code } if number >= from => {
                    failure.get_or_insert(code);
                }
                Effect::FailCall { number: of, code } if number == of => {
                    failure.get_or_insert(code);
                    return false;
                }
                Effect::FailFrom { .. } | Effect::FailCall { .. } => {}
            }
            true
        });
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        failure.map(|code| if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::code;

    #[test]
    fn rules_hit_the_calls_that_they_name() {
        let faults = Faults::new();
        let call = || faults.on_call(Function::cuMemCreate);
        assert_eq!(call(), None);
        faults.fail_nth(Function::cuMemCreate, 2, code::OUT_OF_MEMORY);
        assert_eq!(call(), None);
        assert_eq!(faults.on_call(Function::cuMemMap), None);
        assert_eq!(call(), Some(Err(code::OUT_OF_MEMORY)));
        assert_eq!(call(), None);
        faults.fail_always(Function::cuMemCreate, code::UNKNOWN);
        assert_eq!((call(), call()), (Some(Err(code::UNKNOWN)), Some(Err(code::UNKNOWN))));
        faults.clear();
        assert_eq!(call(), None);
        assert_eq!(faults.calls(Function::cuMemCreate), 7);
        assert_eq!(faults.calls(Function::cuMemMap), 1);
    }

    #[test]
    fn a_delay_is_at_least_as_long_as_asked() {
        let faults = Faults::new();
        faults.delay(Function::cuInit, Duration::from_millis(20));
        let start = std::time::Instant::now();
        assert_eq!(faults.on_call(Function::cuInit), None);
        assert!(start.elapsed() >= Duration::from_millis(20));
    }
}
