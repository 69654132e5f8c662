//! The C functions: one copy of each for every emulator that a process may have.
//!
//! A copy knows nothing but its emulator's number. It hands its arguments to [`enter`], which finds the emulator, counts the call, applies
//! the faults that were asked for, and runs the implementation: an inherent method of [`Core`] with the C function's name. A function
//! without such a method falls back to [`Absent`], a trait that has them all: `CUDA_ERROR_NOT_SUPPORTED`.

use crate::core::Core;
use crate::slots::{self, SLOTS};
use crate::status::{Outcome, code};
use cuda_vmm_sys::{CUresult, Function, for_each_function};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Runs one call of a function on the emulator with a number. Nothing unwinds out of here: a defect of ours is
/// `CUDA_ERROR_UNKNOWN` and stands in the ledger.
fn enter(slot: usize, function: Function, body: &mut dyn FnMut(&Arc<Core>) -> Outcome) -> CUresult {
    let Some(core) = slots::current(slot) else { return code::DEINITIALIZED };
    let run = AssertUnwindSafe(|| {
        core.admit(function)?;
        body(&core)
    });
    match catch_unwind(run) {
        Ok(Ok(())) => code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            core.note(crate::ledger::Incident::Panic { function });
            code::UNKNOWN
        }
    }
}

macro_rules! shims {
    ($(
        $(#[$doc:meta])*
        $method:ident = $name:literal, $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// What functions do that the emulator does not have. Most of its methods stay unused: they are the fallbacks of functions that it has.
        #[allow(dead_code)]
        trait Absent {
            $(
                unsafe fn $method(&self, $($argument: $type),*) -> Outcome {
                    let _ = ($($argument,)*);
                    Err(code::NOT_SUPPORTED)
                }
            )*
        }

        impl Absent for Core {}

        /// The functions, with the number as an argument.
        mod numbered {
            use super::*;
            $(
                pub(super) fn $method(slot: usize, $($argument: $type),*) -> CUresult {
                    enter(slot, Function::$method, &mut |core| {
                        // SAFETY: the arguments are those of a call of the C function, whose caller keeps its contract.
                        unsafe { core.$method($($argument),*) }
                    })
                }
            )*
        }

        /// The functions as C sees them.
        mod exported {
            use super::*;
            $(
                pub(super) extern "C" fn $method<const SLOT: usize>($($argument: $type),*) -> CUresult {
                    numbered::$method(SLOT, $($argument),*)
                }
            )*
        }

        fn address_in<const SLOT: usize>(function: Function) -> *const c_void {
            match function {
                $(Function::$method => exported::$method::<SLOT> as extern "C" fn($($type),*) -> CUresult as *const c_void,)*
                // The table and this list are made from one list of functions.
                _ => std::ptr::null(),
            }
        }
    };
}

for_each_function!(shims);

/// One copy of [`address_in`] for each number.
static COPIES: [fn(Function) -> *const c_void; SLOTS] = {
    macro_rules! copies {
        ($($tens:literal)*) => { [$(
            address_in::<{ $tens * 8 }>, address_in::<{ $tens * 8 + 1 }>, address_in::<{ $tens * 8 + 2 }>,
            address_in::<{ $tens * 8 + 3 }>, address_in::<{ $tens * 8 + 4 }>, address_in::<{ $tens * 8 + 5 }>,
            address_in::<{ $tens * 8 + 6 }>, address_in::<{ $tens * 8 + 7 }>,
        )*] };
    }
    copies!(0 1 2 3 4 5 6 7)
};

/// Address of a function's copy for the emulator with a number, or null.
pub(crate) fn address(slot: usize, function: Function) -> *const c_void {
    COPIES.get(slot).map_or(std::ptr::null(), |copy| copy(function))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_function_has_a_copy_for_every_number() {
        let mut seen = HashSet::new();
        for slot in [0, 1, SLOTS - 1] {
            for &function in Function::ALL {
                let address = address(slot, function);
                assert!(!address.is_null(), "{function:?}");
                seen.insert((slot, address as usize));
            }
        }
        // Equal code may be folded, but never across numbers that are in use at once with different meaning: each number's
        // `cuInit` is a function of its own.
        assert_ne!(address(0, Function::cuInit), address(1, Function::cuInit));
        assert!(seen.len() > 3);
        assert!(address(SLOTS, Function::cuInit).is_null());
    }

    #[test]
    fn a_number_without_an_emulator_is_a_driver_that_has_shut_down() {
        assert_eq!(enter(SLOTS, Function::cuInit, &mut |_| Ok(())), code::DEINITIALIZED);
    }
}
