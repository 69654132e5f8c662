//! What stands in front of a driver: functions with the signatures of the table, which a type decides about.

use cuda_vmm::sys::ffi::c_void;
use cuda_vmm::sys::{CUresult, Driver};
use std::ptr;

/// What becomes of calls.
pub(crate) trait Front {
    /// Lists of exported names whose calls are treated apart.
    const APART: &'static [&'static [&'static str]] = &[];

    /// A call of a function, with the number of the first list that it is in: a constant, so that telling functions apart takes no time.
    /// `forward` makes the same call of another driver.
    fn call(list: Option<usize>, forward: impl FnOnce(&Driver) -> CUresult) -> CUresult;
}

/// The number of the first list with this name.
const fn list_of(lists: &[&[&str]], name: &str) -> Option<usize> {
    let mut list = 0;
    while list < lists.len() {
        let mut i = 0;
        while i < lists[list].len() {
            if is_same(lists[list][i].as_bytes(), name.as_bytes()) {
                return Some(list);
            }
            i += 1;
        }
        list += 1;
    }
    None
}

const fn is_same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// One function for each of the table, with its signature.
macro_rules! functions {
    ($(
        $(#[$doc:meta])*
        $method:ident = $name:literal, $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// The function of an exported name that `F` decides about, or null.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) fn function<F: Front>(symbol: &[u8]) -> *const c_void {
            $(
                extern "C" fn $method<F: Front>($($argument: $type),*) -> CUresult {
                    F::call(const { list_of(F::APART, $symbol) }, |target| {
                        // SAFETY: the same function with the same arguments.
                        match unsafe { target.$method($($argument),*) } {
                            Ok(()) => CUresult::CUDA_SUCCESS,
                            Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
                        }
                    })
                }
                if symbol == $symbol.as_bytes() {
                    return $method::<F> as *const c_void;
                }
            )*
            ptr::null()
        }
    };
}

cuda_vmm::sys::for_each_function!(functions);

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_vmm::Cuda;
    use cuda_vmm_emu::{Config, Emulator};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static TARGET: OnceLock<Driver> = OnceLock::new();
    static CALLS: AtomicUsize = AtomicUsize::new(0);

    /// Counts calls of one function, and refuses another.
    struct Counting;

    impl Front for Counting {
        const APART: &'static [&'static [&'static str]] =
            &[&["cuDeviceGetName", "cuDeviceTotalMem_v2"], &["cuDeviceGetCount"]];

        fn call(list: Option<usize>, forward: impl FnOnce(&Driver) -> CUresult) -> CUresult {
            match list {
                Some(0) => return CUresult::CUDA_ERROR_NOT_SUPPORTED,
                Some(_) => drop(CALLS.fetch_add(1, Ordering::Relaxed)),
                None => {}
            }
            forward(TARGET.get().expect("set before the first call"))
        }
    }

    #[test]
    fn calls_get_through_with_their_results() {
        let emulator = Emulator::new(Config::h200x2()).expect("an emulator");
        assert!(TARGET.set(emulator.driver()).is_ok());
        // SAFETY: each function has the signature that cuda.h declares for its name.
        let driver = unsafe { Driver::from_loader(|name| function::<Counting>(name.to_bytes())) };
        let cuda = Cuda::with_driver(driver.expect("the emulator tells its version")).expect("it starts");
        let before = CALLS.load(Ordering::Relaxed);
        let mut count = 0;
        // SAFETY: `count` is valid for one write.
        unsafe { cuda.driver().cuDeviceGetCount(&mut count) }.expect("a number");
        assert_eq!((count, CALLS.load(Ordering::Relaxed) - before), (2, 1));
        let error = cuda.device(0).expect("a device").total_memory().expect_err("it is refused");
        assert!(error.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"), "{error}");
        assert!(function::<Counting>(b"cuNoSuchFunction").is_null());
    }
}
