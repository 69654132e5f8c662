//! Where the functions come from: a shared object found by policy, or a caller's loader.

use crate::error::{LoadError, Tried};
use crate::mapped;
use crate::{Version, ncclResult_t};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::mem::{ManuallyDrop, transmute};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Environment variable that names the library, by path or file name, where none is loaded yet.
pub const LIBRARY_ENV: &str = "NCCL_GIN_LIBRARY";

/// Name of the library.
const LIBRARY: &str = "libnccl.so.2";
/// `dlopen` flag: only if it is loaded already. The same on every Linux architecture.
const RTLD_NOLOAD: c_int = 4;

/// Where the library was loaded from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// A file.
    File(PathBuf),
    /// The caller's own loader.
    Custom,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Custom => f.write_str("a custom loader"),
        }
    }
}

type Loader = Box<dyn FnMut(&CStr) -> *const c_void + Send>;

enum Symbols {
    /// Never unloaded: see [`crate::Nccl`].
    Library(ManuallyDrop<Library>),
    Custom(Mutex<Loader>),
}

/// Symbols of one library.
pub(crate) struct Source {
    symbols: Symbols,
    origin: Origin,
}

impl Source {
    /// Finds the library by the policy of [`crate::Nccl::get`].
    pub(crate) fn find() -> Result<Self, LoadError> {
        let mut loaded = mapped::libraries();
        if loaded.len() > 1 {
            return Err(LoadError::SeveralLibraries { loaded, requested: None });
        }
        if let Some(path) = loaded.pop() {
            let mut tried = Vec::new();
            // By its name too: a file that was replaced since it was loaded is found by that alone.
            for name in [path.as_os_str(), LIBRARY.as_ref()] {
                match dlopen(name, RTLD_NOLOAD) {
                    Ok(library) => return Ok(Self::library(library, &path)),
                    Err(attempt) => tried.push(attempt),
                }
            }
            return Err(LoadError::NotFound { tried });
        }
        let named = std::env::var_os(LIBRARY_ENV).filter(|path| !path.is_empty());
        Self::open(Path::new(named.as_deref().unwrap_or(LIBRARY.as_ref())))
    }

    /// Loads a file, unless another NCCL is loaded already.
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let others = |loaded: Vec<PathBuf>, requested: &Path| {
            let other = loaded.iter().any(|file| !mapped::same_file(file, requested));
            if other {
                Err(LoadError::SeveralLibraries { loaded, requested: Some(requested.into()) })
            } else {
                Ok(())
            }
        };
        if path.components().count() > 1 {
            // Ahead of loading: a second NCCL must not even run its initialisers.
            others(mapped::libraries(), path)?;
        }
        let library =
            dlopen(path.as_os_str(), 0).map_err(|attempt| LoadError::NotFound { tried: vec![attempt] })?;
        let source = Self::library(library, path);
        if let Origin::File(file) = &source.origin
            && let Err(error) = others(mapped::libraries(), file)
        {
            source.unload();
            return Err(error);
        }
        Ok(source)
    }

    /// Takes symbols from the caller.
    pub(crate) fn custom(loader: Loader) -> Self {
        Self { symbols: Symbols::Custom(Mutex::new(loader)), origin: Origin::Custom }
    }

    fn library(library: Library, name: &Path) -> Self {
        let symbols = Symbols::Library(ManuallyDrop::new(library));
        let mut source = Self { symbols, origin: Origin::File(name.into()) };
        if let Some(path) = mapped::file_at(source.symbol(c"ncclGetVersion") as usize) {
            source.origin = Origin::File(path);
        }
        source
    }

    /// Gives back a library of which no function has been called.
    fn unload(self) {
        if let Symbols::Library(library) = self.symbols {
            drop(ManuallyDrop::into_inner(library));
        }
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Asks the library for its version, ahead of everything else.
    pub(crate) fn version(&self) -> Result<Version, LoadError> {
        let address = self.symbol(c"ncclGetVersion");
        if address.is_null() {
            return Err(LoadError::NotNccl { origin: self.origin.clone(), symbol: "ncclGetVersion" });
        }
        let mut version = 0;
        // SAFETY: ncclGetVersion writes one int, needs no initialisation, and has had this signature in every version 2.
        let status = unsafe {
            transmute::<*const c_void, unsafe extern "C" fn(*mut c_int) -> ncclResult_t>(address)(
                &mut version,
            )
        };
        if status != ncclResult_t::ncclSuccess {
            return Err(LoadError::Version { origin: self.origin.clone(), status });
        }
        Ok(Version::from_code(version.unsigned_abs()))
    }

    /// Address of a function, or null.
    pub(crate) fn symbol(&self, name: &CStr) -> *const c_void {
        match &self.symbols {
            Symbols::Library(library) => {
                // SAFETY: the address is only stored here; it is called with the signature that nccl.h declares for it.
                let found = unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) };
                found.map_or(ptr::null(), |symbol| symbol.into_raw().cast_const())
            }
            Symbols::Custom(loader) => (loader.lock().unwrap_or_else(PoisonError::into_inner))(name),
        }
    }
}

fn dlopen(name: &OsStr, extra: c_int) -> Result<Library, Tried> {
    // SAFETY: loading runs the library's initialisers. The names are NCCL's, or a file that the caller named as such.
    unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_LOCAL | extra) }
        .map_err(|error| Tried::new(name, &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nccl;

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Nccl::open("/nonexistent/libnccl.so.2").unwrap_err();
        let LoadError::NotFound { tried } = &error else { panic!("{error}") };
        assert_eq!(tried[0].name, "/nonexistent/libnccl.so.2");
        assert!(tried[0].reason.contains("No such file"), "the dynamic linker's own words: {error}");
        assert!(error.to_string().contains("/nonexistent/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_library_that_is_no_nccl_is_refused() {
        // Every Linux process that runs this test has a C library.
        let error = Nccl::open("libc.so.6").unwrap_err();
        assert!(matches!(&error, LoadError::NotNccl { symbol: "ncclGetVersion", .. }), "{error}");
    }

    #[test]
    fn the_process_wide_library_may_be_asked_for_anywhere() {
        // With or without NCCL: a library, or a typed error; a failure is not remembered as a poisoned state.
        for _ in 0..2 {
            match Nccl::get() {
                Ok(nccl) => {
                    assert!(nccl.version() >= Version::OLDEST && matches!(nccl.origin(), Origin::File(_)))
                }
                Err(error) => {
                    eprintln!("no NCCL here: {error}");
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }
}
