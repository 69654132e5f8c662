//! The table of functions: one slot each, resolved on first use.

use crate::error::{HeadersError, LoadError, MissingFunction};
use crate::load::{Origin, Source};
use crate::{Generation, Version, for_each_function, headers};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Marks a slot whose function the library lacks. Its address is the mark; it is never called.
static MISSING: u8 = 0;

fn missing_mark() -> *mut c_void {
    ptr::from_ref(&MISSING).cast_mut().cast()
}

/// An NCCL library: one method a function, named as in `nccl.h`.
///
/// A handle of one pointer: clones share the table. Each function is looked up on its first call; later calls cost a load and two
/// comparisons on top of the call itself. The library stays loaded until the process ends (it has threads of its own, and does not
/// survive being unloaded).
#[derive(Clone)]
pub struct Nccl {
    inner: Arc<Inner>,
}

struct Inner {
    slots: [AtomicPtr<c_void>; Function::COUNT],
    source: Source,
    version: Version,
    generation: Generation,
}

impl Nccl {
    /// The library of this process, found on the first call: one that is loaded already (by PyTorch, for example), else the one
    /// named by the environment variable [`LIBRARY_ENV`](crate::LIBRARY_ENV), else `libnccl.so.2`.
    ///
    /// What is loaded is told by its file name, `libnccl.so` with or without a version. An NCCL that is linked statically into
    /// another library cannot be seen.
    ///
    /// # Errors
    /// A [`LoadError`] if several NCCLs are loaded, none could be loaded, or it is of a version that this crate does not talk to. A
    /// later call tries again.
    pub fn get() -> Result<&'static Self, LoadError> {
        static NCCL: once_cell::sync::OnceCell<Nccl> = once_cell::sync::OnceCell::new();
        NCCL.get_or_try_init(|| Self::from_source(Source::find()?))
    }

    /// Loads the library from a file.
    ///
    /// # Errors
    /// A [`LoadError`] if another NCCL is loaded already (the file is then not even opened), the file cannot be opened, or it is no
    /// NCCL of a version that this crate talks to.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        Self::from_source(Source::open(path.as_ref())?)
    }

    /// A library whose functions come from `loader`: it is given exported names (such as `ncclGetVersion`) and returns the
    /// function, or null if there is none. It is called again for each function on first use.
    ///
    /// # Errors
    /// A [`LoadError`] if `ncclGetVersion` is missing, fails, or tells a version that this crate does not talk to.
    ///
    /// # Safety
    /// Each address that `loader` returns must be a function with the C ABI and the signature that `nccl.h` declares for that
    /// name, callable from any thread for as long as this table or a clone of it exists.
    pub unsafe fn from_loader<L>(loader: L) -> Result<Self, LoadError>
    where
        L: FnMut(&CStr) -> *const c_void + Send + 'static,
    {
        Self::from_source(Source::custom(Box::new(loader)))
    }

    fn from_source(source: Source) -> Result<Self, LoadError> {
        // Ahead of any other symbol, so that an old library is reported as old and not as one that lacks this or that.
        let version = source.version()?;
        let Some(generation) = Generation::of(version) else {
            return Err(LoadError::Unsupported { found: version, origin: source.origin().clone() });
        };
        let slots = [const { AtomicPtr::new(ptr::null_mut()) }; Function::COUNT];
        Ok(Self { inner: Arc::new(Inner { slots, source, version, generation }) })
    }

    /// Version of the library (`ncclGetVersion`).
    #[must_use]
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// The struct layouts that the library takes.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// Version to write into structs of [`Nccl::generation`] for this library.
    #[must_use]
    pub fn declared_version(&self) -> Version {
        self.inner.generation.declared(self.inner.version)
    }

    /// Where the library was loaded from.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        self.inner.source.origin()
    }

    /// Folder with the headers (`nccl.h`, `nccl_device.h`) of exactly this library's version, in the layouts of PyPI's wheels, NVIDIA's
    /// archives and Linux distributions.
    ///
    /// # Errors
    /// A [`HeadersError`] with each folder that was looked into and what was wrong with it.
    pub fn include_dir(&self) -> Result<PathBuf, HeadersError> {
        headers::find(self.origin(), self.version())
    }

    /// Whether the library has `function`.
    #[must_use]
    pub fn has(&self, function: Function) -> bool {
        self.address(function).is_ok()
    }

    /// Address of `function`, resolving it if this is its first use.
    ///
    /// # Errors
    /// [`MissingFunction`] if the library lacks it.
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
            let found = self.inner.source.symbol(function.c_name());
            let value = if found.is_null() { missing_mark() } else { found.cast_mut() };
            // Two threads may both resolve: they find the same address.
            self.inner.slots[function as usize].store(value, Ordering::Release);
            if !found.is_null() {
                return Ok(found);
            }
        }
        Err(Box::new(MissingFunction { function, version: self.version(), origin: self.origin().clone() }))
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl")
            .field("version", &self.version())
            .field("origin", self.origin())
            .finish_non_exhaustive()
    }
}

macro_rules! table {
    ($(
        $(#[$doc:meta])*
        $method:ident = $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?) -> $result:ty;
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

            /// Name that the shared object exports.
            #[must_use]
            pub const fn symbol(self) -> &'static str {
                match self { $(Self::$method => $symbol),* }
            }

            /// The oldest checked release that has the function: one of 2.28.3, 2.28.9, 2.29.7, 2.30.7, 2.31.2 and
            /// 2.32.3.
            #[must_use]
            pub const fn since(self) -> Version {
                match self { $(Self::$method => Version::from_code($since)),* }
            }

            pub(crate) const fn c_name(self) -> &'static CStr {
                // A literal with its NUL cannot fail to be a C string; the check runs at compile time.
                const fn c(bytes: &[u8]) -> &CStr {
                    match CStr::from_bytes_with_nul(bytes) {
                        Ok(name) => name,
                        Err(_) => panic!("a NUL inside a name"),
                    }
                }
                match self { $(Self::$method => const { c(concat!($symbol, "\0").as_bytes()) }),* }
            }
        }

        /// The library's functions. Each returns what the C function returns, result codes included.
        ///
        /// # Safety
        /// All are unsafe for the reasons that NVIDIA's documentation gives: pointers must be valid for what the call reads and
        /// writes, structs must be of the library's [`Generation`], handles must be alive, and memory must not be in use by work
        /// that was launched earlier.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Nccl {
            $(
                $(#[$doc])*
                #[doc = concat!("\n\n`", $symbol, "`, checked in releases from ", $since, " on (as `ncclGetVersion` counts).")]
                ///
                /// # Errors
                /// [`MissingFunction`] if the library lacks the function.
                ///
                /// # Safety
                /// As for the C function: valid pointers, structs of the library's generation, handles that are alive.
                #[inline]
                pub unsafe fn $method(&self, $($argument: $type),*) -> Result<$result, Box<MissingFunction>> {
                    let address = self.address(Function::$method)?;
                    // SAFETY: the address was resolved for this name, and xtask compares the signature with the headers of six
                    // releases; for a custom loader its caller has promised the same.
                    let function = unsafe {
                        std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> $result>(address)
                    };
                    // SAFETY: the caller keeps the C function's contract.
                    Ok(unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

for_each_function!(table);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ncclResult_t, ncclTeam, ncclUniqueId};
    use std::ffi::c_int;
    use std::sync::atomic::AtomicUsize;

    unsafe extern "C" fn version(out: *mut c_int) -> ncclResult_t {
        // SAFETY: the table passes a valid pointer.
        unsafe { *out = 22_809 };
        ncclResult_t::ncclSuccess
    }

    unsafe extern "C" fn old_version(out: *mut c_int) -> ncclResult_t {
        // SAFETY: the table passes a valid pointer.
        unsafe { *out = 22_703 };
        ncclResult_t::ncclSuccess
    }

    unsafe extern "C" fn no_version(_: *mut c_int) -> ncclResult_t {
        ncclResult_t::ncclInternalError
    }

    unsafe extern "C" fn slots(elements: c_int, size: c_int) -> c_int {
        elements * size / 8
    }

    static ASKED: AtomicUsize = AtomicUsize::new(0);

    fn fake() -> Nccl {
        // SAFETY: both functions have the signatures that NCCL's headers declare for their names.
        unsafe {
            Nccl::from_loader(|name| match name.to_bytes() {
                b"ncclGetVersion" => version as *const c_void,
                b"ncclLLA2ACalcSlots" => {
                    ASKED.fetch_add(1, Ordering::Relaxed);
                    slots as *const c_void
                }
                _ => ptr::null(),
            })
        }
        .expect("the fake library tells its version")
    }

    #[test]
    fn a_loader_fills_the_table_lazily_and_once() {
        let nccl = fake();
        assert_eq!(nccl.version().to_string(), "2.28.9");
        assert_eq!(nccl.generation(), Generation::V2_28);
        assert_eq!(nccl.origin(), &Origin::Custom);
        assert_eq!(ASKED.load(Ordering::Relaxed), 0);
        // SAFETY: the fake takes no pointer.
        unsafe {
            assert_eq!(nccl.ncclLLA2ACalcSlots(4, 16), Ok(8));
            assert_eq!(nccl.clone().ncclLLA2ACalcSlots(1, 8), Ok(1));
        }
        assert_eq!(ASKED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_missing_function_is_a_typed_error_each_time() {
        let nccl = fake();
        assert!(!nccl.has(Function::ncclCommQueryProperties));
        for _ in 0..2 {
            // SAFETY: the function is missing, so that nothing is called.
            let error =
                unsafe { nccl.ncclCommQueryProperties(ptr::null_mut(), ptr::null_mut()) }.unwrap_err();
            assert_eq!(error.function, Function::ncclCommQueryProperties);
            assert_eq!(error.version, Version::from_code(22809));
        }
    }

    #[test]
    fn a_library_of_another_kind_or_age_is_refused() {
        // SAFETY: no address is returned.
        let error = unsafe { Nccl::from_loader(|_| ptr::null()) }.unwrap_err();
        assert_eq!(error, LoadError::NotNccl { origin: Origin::Custom, symbol: "ncclGetVersion" });
        // SAFETY: the only function that is returned has the right signature, and the table asks for no other.
        let error = unsafe {
            Nccl::from_loader(|name| {
                assert_eq!(name, c"ncclGetVersion", "the version is read ahead of any other symbol");
                old_version as *const c_void
            })
        }
        .unwrap_err();
        assert_eq!(
            error,
            LoadError::Unsupported { found: Version::from_code(22703), origin: Origin::Custom }
        );
        // SAFETY: as above.
        let error = unsafe { Nccl::from_loader(|_| no_version as *const c_void) }.unwrap_err();
        assert_eq!(
            error,
            LoadError::Version { origin: Origin::Custom, status: ncclResult_t::ncclInternalError }
        );
    }

    #[test]
    fn names_and_versions_are_consistent() {
        for &function in Function::ALL {
            assert!(function.symbol().starts_with("nccl"), "{function:?}");
            assert_eq!(function.c_name().to_str(), Ok(function.symbol()));
            assert_eq!(format!("{function:?}"), function.symbol());
            assert!(Generation::of(function.since()).is_some(), "{function:?}");
        }
        fn assert_send_sync<T: Send + Sync>() {}
        assert_send_sync::<Nccl>();
    }

    #[test]
    fn structs_that_are_passed_by_value_have_their_c_sizes() {
        assert_eq!(size_of::<ncclTeam>(), 12);
        assert_eq!(size_of::<ncclUniqueId>(), 128);
    }
}
