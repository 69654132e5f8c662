//! Where the functions come from: a shared object found by policy, or a caller's loader.

use crate::error::{LoadError, Tried};
use crate::{CUresult, Function};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::{ManuallyDrop, transmute};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Environment variable that names the driver's library, by path or file name, ahead of every other place.
pub const DRIVER_ENV: &str = "CUDA_VMM_DRIVER";

/// Name of the driver's library. The unversioned name is the toolkit's stub and is never tried.
const LIBRARY: &str = "libcuda.so.1";
/// Where Windows keeps it for its Linux guests, outside the linker's path in some distributions.
const WSL_LIBRARY: &str = "/usr/lib/wsl/lib/libcuda.so.1";
/// `dlopen` flag: only if it is loaded already. The same on every Linux architecture.
const RTLD_NOLOAD: c_int = 4;

/// Where a driver was loaded from.
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
type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CUresult;

enum Symbols {
    /// Never unloaded: see [`crate::Driver`].
    Library(ManuallyDrop<Library>),
    Custom(Mutex<Loader>),
}

/// Symbols of one driver, and what is needed to resolve them.
pub(crate) struct Source {
    symbols: Symbols,
    get_proc_address: Option<GetProcAddress>,
    origin: Origin,
}

impl Source {
    /// Finds the driver by the policy of [`crate::Driver::get`].
    pub(crate) fn find() -> Result<Self, LoadError> {
        if let Some(path) = std::env::var_os(DRIVER_ENV).filter(|path| !path.is_empty()) {
            return Self::open(Path::new(&path));
        }
        let mut tried = Vec::new();
        for (name, flags) in [
            (LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD),
            (LIBRARY, RTLD_NOW | RTLD_LOCAL),
            (WSL_LIBRARY, RTLD_NOW | RTLD_LOCAL),
        ] {
            match dlopen(name.as_ref(), flags) {
                Ok(library) => return Ok(Self::library(library, Path::new(name))),
                Err(_) if flags & RTLD_NOLOAD != 0 => {}
                Err(attempt) => tried.push(attempt),
            }
        }
        Err(LoadError::NotFound { tried })
    }

    /// Loads a file.
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let library = dlopen(path.as_os_str(), RTLD_NOW | RTLD_LOCAL)
            .map_err(|attempt| LoadError::NotFound { tried: vec![attempt] })?;
        Ok(Self::library(library, path))
    }

    /// Takes symbols from the caller.
    pub(crate) fn custom(loader: Loader) -> Self {
        Self { symbols: Symbols::Custom(Mutex::new(loader)), get_proc_address: None, origin: Origin::Custom }
            .with_get_proc_address()
    }

    fn library(library: Library, name: &Path) -> Self {
        let symbols = Symbols::Library(ManuallyDrop::new(library));
        let mut source = Self { symbols, get_proc_address: None, origin: Origin::File(name.into()) };
        let address = source.symbol(c"cuDriverGetVersion");
        if let Some(path) = mapped_file(address as usize) {
            source.origin = Origin::File(path);
        }
        source.with_get_proc_address()
    }

    fn with_get_proc_address(mut self) -> Self {
        let address = self.symbol(c"cuGetProcAddress_v2");
        if !address.is_null() {
            // SAFETY: this is the signature of cuGetProcAddress_v2 in cuda.h since 12.0 (symbol, address, version, 64-bit
            // flags, pointer to a C enum for the reason); a custom loader's caller has promised the same.
            self.get_proc_address = Some(unsafe { transmute::<*const c_void, GetProcAddress>(address) });
        }
        self
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Asks the driver for the CUDA version that it supports, ahead of everything else.
    pub(crate) fn version(&self) -> Result<i32, LoadError> {
        let address = self.symbol(c"cuDriverGetVersion");
        if address.is_null() {
            return Err(LoadError::NotADriver { origin: self.origin.clone(), symbol: "cuDriverGetVersion" });
        }
        let mut version = 0;
        // SAFETY: cuDriverGetVersion writes one int, may be called before cuInit, and has had this signature since CUDA 2.2.
        let status = unsafe {
            transmute::<*const c_void, unsafe extern "C" fn(*mut c_int) -> CUresult>(address)(&mut version)
        };
        match status {
            CUresult::CUDA_SUCCESS => Ok(version),
            CUresult::CUDA_ERROR_STUB_LIBRARY => Err(LoadError::Stub { origin: self.origin.clone() }),
            status => Err(LoadError::Version { origin: self.origin.clone(), status }),
        }
    }

    /// Address of a function, or null.
    pub(crate) fn resolve(&self, function: Function) -> *const c_void {
        let (name, symbol) = function.c_names();
        if let Some(get_proc_address) = self.get_proc_address {
            let mut address = ptr::null_mut();
            let mut reason = 0;
            let since = function.since() as c_int;
            // SAFETY: `name` is a C string, and `address` and `reason` are valid for one write each; flags 0 asks for the forms
            // that use the legacy default stream.
            let status = unsafe { get_proc_address(name.as_ptr(), &mut address, since, 0, &mut reason) };
            if status == CUresult::CUDA_SUCCESS && !address.is_null() {
                return address;
            }
        }
        self.symbol(symbol)
    }

    fn symbol(&self, name: &CStr) -> *const c_void {
        match &self.symbols {
            Symbols::Library(library) => {
                // SAFETY: the address is only stored here; it is called with the signature that cuda.h declares for it.
                let found = unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) };
                found.map_or(ptr::null(), |symbol| symbol.into_raw().cast_const())
            }
            Symbols::Custom(loader) => (loader.lock().unwrap_or_else(PoisonError::into_inner))(name),
        }
    }
}

fn dlopen(name: &OsStr, flags: c_int) -> Result<Library, Tried> {
    // SAFETY: loading runs the library's initialisers. The names are the CUDA driver's, or a file that the caller named as such.
    unsafe { Library::open(Some(name), flags) }.map_err(|error| Tried::new(name, &error))
}

/// The file that is mapped at an address of this process.
fn mapped_file(address: usize) -> Option<PathBuf> {
    if address == 0 {
        return None;
    }
    find_mapping(&std::fs::read_to_string("/proc/self/maps").ok()?, address)
}

/// Finds the file in a table such as `/proc/self/maps`.
fn find_mapping(maps: &str, address: usize) -> Option<PathBuf> {
    maps.lines().find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let path = line.get(line.find('/')?..)?;
        range.contains(&address).then(|| path.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Driver;

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Driver::open("/nonexistent/libcuda.so.1").unwrap_err();
        let LoadError::NotFound { tried } = &error else { panic!("{error}") };
        assert_eq!(tried[0].name, "/nonexistent/libcuda.so.1");
        assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
    }

    #[test]
    fn a_library_that_is_no_driver_is_named_by_its_real_path() {
        // Every Linux process that runs this test has a C library.
        let error = Driver::open("libc.so.6").unwrap_err();
        assert!(matches!(&error, LoadError::NotADriver { symbol: "cuDriverGetVersion", .. }), "{error}");
    }

    #[test]
    fn a_mapping_is_found_by_address() {
        let maps = "7f00-7f80 r--p 00000000 00:00 0\n7f80-8000 r-xp 00001000 08:01 42   /lib/a b.so\n";
        assert_eq!(find_mapping(maps, 0x7f90), Some(PathBuf::from("/lib/a b.so")));
        assert_eq!(find_mapping(maps, 0x7f10), None);
        assert_eq!(find_mapping(maps, 0x9000), None);
        let here =
            mapped_file(mapped_file as *const () as usize).expect("the test's own executable is mapped");
        assert_eq!(here, std::env::current_exe().unwrap());
    }

    #[test]
    fn the_process_wide_driver_may_be_asked_for_anywhere() {
        // With or without a GPU: a driver, or a typed error; a failure is not remembered as a poisoned state.
        for _ in 0..2 {
            match Driver::get() {
                Ok(driver) => {
                    assert!(driver.version() >= 10_000 && matches!(driver.origin(), Origin::File(_)))
                }
                Err(error) => {
                    eprintln!("no driver here: {error}");
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }
}
