//! The table of functions: one slot each, resolved on first use.

use crate::CUresult;
use crate::error::{CallError, LoadError, MissingFunction};
use crate::load::{Origin, Source};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Marks a slot whose function the driver lacks. Its address is the mark; it is never called.
static MISSING: u8 = 0;

fn missing_mark() -> *mut c_void {
    ptr::from_ref(&MISSING).cast_mut().cast()
}

/// A CUDA driver: one method a function, named as in `cuda.h`.
///
/// A handle of one pointer: clones share the table. Each function is looked up on its first call, through `cuGetProcAddress` with the
/// CUDA version that introduced the form that this crate declares, or else by its exported name; later calls cost a load and two
/// comparisons on top of the call itself. The library stays loaded until the process ends (drivers have threads of their
/// own, and do not survive being unloaded).
#[derive(Clone)]
pub struct Driver {
    inner: Arc<Inner>,
}

struct Inner {
    slots: [AtomicPtr<c_void>; Function::COUNT],
    source: Source,
    version: i32,
}

impl Driver {
    /// The driver of this process, loaded on the first call: the library named by the environment variable
    /// [`DRIVER_ENV`](crate::DRIVER_ENV), else one that is loaded already, else `libcuda.so.1`.
    ///
    /// # Errors
    /// A [`LoadError`] if no driver could be loaded. A later call tries again.
    pub fn get() -> Result<&'static Self, LoadError> {
        static DRIVER: once_cell::sync::OnceCell<Driver> = once_cell::sync::OnceCell::new();
        DRIVER.get_or_try_init(|| Self::from_source(Source::find()?))
    }

    /// Loads the driver from a file.
    ///
    /// # Errors
    /// A [`LoadError`] if the file cannot be opened or is no CUDA driver.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        Self::from_source(Source::open(path.as_ref())?)
    }

    /// A driver whose functions come from `loader`: it is given exported names (such as `cuMemAlloc_v2`) and returns the
    /// function, or null if there is none. It is called again for each function on first use. If it offers
    /// `cuGetProcAddress_v2`, that is asked first, as with a library.
    ///
    /// # Errors
    /// A [`LoadError`] if `cuDriverGetVersion` is missing or fails.
    ///
    /// # Safety
    /// Each address that `loader` returns must be a function with the C ABI and the signature that `cuda.h` declares for that
    /// name, callable from any thread for as long as this driver or a clone of it exists.
    pub unsafe fn from_loader<L>(loader: L) -> Result<Self, LoadError>
    where
        L: FnMut(&CStr) -> *const c_void + Send + 'static,
    {
        Self::from_source(Source::custom(Box::new(loader)))
    }

    fn from_source(source: Source) -> Result<Self, LoadError> {
        let version = source.version()?;
        let slots = [const { AtomicPtr::new(ptr::null_mut()) }; Function::COUNT];
        Ok(Self { inner: Arc::new(Inner { slots, source, version }) })
    }

    /// Newest CUDA version that the driver supports, as `1000 * major + 10 * minor` (`cuDriverGetVersion`).
    #[must_use]
    pub fn version(&self) -> i32 {
        self.inner.version
    }

    /// Where the driver was loaded from.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        self.inner.source.origin()
    }

    /// Whether both are the same table: clones of one driver are.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Whether the driver has `function`.
    #[must_use]
    pub fn has(&self, function: Function) -> bool {
        self.address(function).is_ok()
    }

    /// Address of `function`, resolving it if this is its first use.
    ///
    /// # Errors
    /// [`MissingFunction`] if the driver lacks it.
    #[inline]
    pub fn address(&self, function: Function) -> Result<*const c_void, Box<MissingFunction>> {
        // Acquire pairs with the release in `resolve`: whoever sees the address also sees the code that a loader may have made.
        let address = self.inner.slots[function as usize].load(Ordering::Acquire);
        if address.is_null() || address == missing_mark() {
            return self.resolve(function, address);
        }
        Ok(address)
    }

    #[cold]
    fn resolve(&self, function: Function, seen: *mut c_void) -> Result<*const c_void, Box<MissingFunction>> {
        if seen.is_null() {
            let found = self.inner.source.resolve(function);
            let value = if found.is_null() { missing_mark() } else { found.cast_mut() };
            // Two threads may both resolve: they find the same address.
            self.inner.slots[function as usize].store(value, Ordering::Release);
            if !found.is_null() {
                return Ok(found);
            }
        }
        Err(Box::new(MissingFunction { function, driver: self.version(), origin: self.origin().clone() }))
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version())
            .field("origin", self.origin())
            .finish_non_exhaustive()
    }
}

macro_rules! table {
    ($(
        $(#[$doc:meta])*
        $method:ident = $name:literal, $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// A function of the table.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Function {
            $($(#[$doc])* $method,)*
        }

        impl Function {
            /// Every function, in the table's order.
            pub const ALL: &[Self] = &[$(Self::$method),*];
            pub(crate) const COUNT: usize = Self::ALL.len();

            /// Name that `cuGetProcAddress` knows.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$method => $name),* }
            }

            /// Name that the shared object exports.
            #[must_use]
            pub const fn symbol(self) -> &'static str {
                match self { $(Self::$method => $symbol),* }
            }

            /// CUDA version that introduced this form, as `1000 * major + 10 * minor`.
            #[must_use]
            pub const fn since(self) -> u32 {
                match self { $(Self::$method => $since),* }
            }

            pub(crate) const fn c_names(self) -> (&'static CStr, &'static CStr) {
                // A literal with its NUL cannot fail to be a C string; the check runs at compile time.
                const fn c(bytes: &[u8]) -> &CStr {
                    match CStr::from_bytes_with_nul(bytes) {
                        Ok(name) => name,
                        Err(_) => panic!("a NUL inside a name"),
                    }
                }
                match self {
                    $(Self::$method => const {
                        (c(concat!($name, "\0").as_bytes()), c(concat!($symbol, "\0").as_bytes()))
                    }),*
                }
            }
        }

        /// The driver's functions. Each returns `Ok` for `CUDA_SUCCESS` and a [`CallError`] for every other code, or if the
        /// driver lacks the function.
        ///
        /// # Safety
        /// All are unsafe for the reasons that NVIDIA's reference gives: pointers must be valid for what the call reads and writes,
        /// handles must be alive, and device memory must not be in use by work that was launched earlier.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Driver {
            $(
                $(#[$doc])*
                #[doc = concat!("\n\n`", $symbol, "`, in drivers of CUDA version ", $since, " and later (as `cuDriverGetVersion` counts).")]
                ///
                /// # Errors
                /// A [`CallError`] if the driver lacks the function or it returned another code than `CUDA_SUCCESS`.
                ///
                /// # Safety
                /// As for the C function: valid pointers, handles that are alive, memory that nothing else uses.
                #[inline]
                pub unsafe fn $method(&self, $($argument: $type),*) -> Result<(), CallError> {
                    let address = self.address(Function::$method).map_err(CallError::Missing)?;
                    // SAFETY: the address was resolved for this name and version, and xtask compares the signature with
                    // several versions of cuda.h; for a custom loader its caller has promised the same.
                    let function = unsafe {
                        std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address)
                    };
                    // SAFETY: the caller keeps the C function's contract.
                    let status = unsafe { function($($argument),*) };
                    if status == CUresult::CUDA_SUCCESS {
                        Ok(())
                    } else {
                        Err(CallError::Status { function: Function::$method, status })
                    }
                }
            )*
        }
    };
}

for_each_function!(table);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    unsafe extern "C" fn version(out: *mut std::ffi::c_int) -> CUresult {
        // SAFETY: the table passes a valid pointer.
        unsafe { *out = 12_000 };
        CUresult::CUDA_SUCCESS
    }

    unsafe extern "C" fn init(flags: std::ffi::c_uint) -> CUresult {
        if flags == 0 { CUresult::CUDA_SUCCESS } else { CUresult::CUDA_ERROR_INVALID_VALUE }
    }

    static ASKED: AtomicUsize = AtomicUsize::new(0);

    fn fake() -> Driver {
        // SAFETY: both functions have the signatures that cuda.h declares for their names.
        unsafe {
            Driver::from_loader(|name| match name.to_bytes() {
                b"cuDriverGetVersion" => version as *const c_void,
                b"cuInit" => {
                    ASKED.fetch_add(1, Ordering::Relaxed);
                    init as *const c_void
                }
                _ => ptr::null(),
            })
        }
        .expect("the fake driver tells its version")
    }

    #[test]
    fn a_loader_fills_the_table_lazily_and_once() {
        let driver = fake();
        assert_eq!(driver.version(), 12_000);
        assert_eq!(driver.origin(), &Origin::Custom);
        assert_eq!(ASKED.load(Ordering::Relaxed), 0);
        // SAFETY: the fake takes no pointer.
        unsafe {
            driver.cuInit(0).unwrap();
            driver.clone().cuInit(0).unwrap();
            assert!(driver.is_same(&driver.clone()) && !driver.is_same(&fake()));
            let error = driver.cuInit(7).unwrap_err();
            assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
        }
        assert_eq!(ASKED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_missing_function_is_a_typed_error_each_time() {
        let driver = fake();
        assert!(!driver.has(Function::cuMulticastCreate));
        for _ in 0..2 {
            // SAFETY: the function is missing, so that nothing is called.
            let error = unsafe { driver.cuMulticastCreate(ptr::null_mut(), ptr::null()) }.unwrap_err();
            assert!(
                matches!(&error, CallError::Missing(m) if m.function == Function::cuMulticastCreate),
                "{error}"
            );
        }
    }

    #[test]
    fn a_loader_without_a_version_is_no_driver() {
        // SAFETY: no address is returned.
        let error = unsafe { Driver::from_loader(|_| ptr::null()) }.unwrap_err();
        assert_eq!(error, LoadError::NotADriver { origin: Origin::Custom, symbol: "cuDriverGetVersion" });
    }

    #[test]
    fn names_and_versions_are_consistent() {
        for &function in Function::ALL {
            assert!(function.symbol().starts_with(function.name()), "{function:?}");
            assert!((2000..14_000).contains(&function.since()), "{function:?}");
            assert_eq!(function.c_names().0.to_str(), Ok(function.name()));
            assert_eq!(function.c_names().1.to_str(), Ok(function.symbol()));
        }
        fn assert_send_sync<T: Send + Sync>() {}
        assert_send_sync::<Driver>();
    }
}
