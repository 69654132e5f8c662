//! The few functions of NVRTC that are needed, resolved when the library is opened.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use super::JitError;
use super::search;

/// Environment variable that names NVRTC's library, by path or file name, ahead of every other place.
pub const NVRTC_ENV: &str = "DEEPEP_NVRTC";

/// `dlopen` flag: only if it is loaded already. The same on every Linux architecture.
const RTLD_NOLOAD: c_int = 4;

type ProgramHandle = *mut c_void;

/// `NVRTC_SUCCESS`.
const SUCCESS: c_int = 0;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// Addresses of NVRTC's functions, with the signatures of `nvrtc.h`.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            fn resolve(library: &Library, path: &Path) -> Result<Self, JitError> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the symbol is called with the signature that nvrtc.h has declared for it since CUDA 11.1; the
                        // library is never unloaded.
                        let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| JitError::Missing { library: path.into(), symbol: $symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> c_int;
    error_string = "nvrtcGetErrorString": fn(c_int) -> *const c_char;
    supported_count = "nvrtcGetNumSupportedArchs": fn(*mut c_int) -> c_int;
    supported = "nvrtcGetSupportedArchs": fn(*mut c_int) -> c_int;
    create = "nvrtcCreateProgram": fn(*mut ProgramHandle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    destroy = "nvrtcDestroyProgram": fn(*mut ProgramHandle) -> c_int;
    compile = "nvrtcCompileProgram": fn(ProgramHandle, c_int, *const *const c_char) -> c_int;
    cubin_size = "nvrtcGetCUBINSize": fn(ProgramHandle, *mut usize) -> c_int;
    cubin = "nvrtcGetCUBIN": fn(ProgramHandle, *mut c_char) -> c_int;
    ptx_size = "nvrtcGetPTXSize": fn(ProgramHandle, *mut usize) -> c_int;
    ptx = "nvrtcGetPTX": fn(ProgramHandle, *mut c_char) -> c_int;
    log_size = "nvrtcGetProgramLogSize": fn(ProgramHandle, *mut usize) -> c_int;
    log = "nvrtcGetProgramLog": fn(ProgramHandle, *mut c_char) -> c_int;
}

/// An opened NVRTC.
pub(super) struct Nvrtc {
    functions: Functions,
    library: PathBuf,
    version: (i32, i32),
    /// Its helper library, which it opens by bare name on the first compilation: kept so that it stays loaded.
    _builtins: Option<ManuallyDrop<Library>>,
}

/// What a compilation gave.
pub(super) struct Output {
    pub(super) status: c_int,
    pub(super) image: Vec<u8>,
    pub(super) assembly: String,
    pub(super) log: String,
}

impl Nvrtc {
    /// Opens the caller's library, or the one named by [`NVRTC_ENV`], or else the first that is found: loaded already, on the
    /// dynamic linker's path, in a CUDA installation, in a Python environment.
    pub(super) fn find(path: Option<&Path>) -> Result<Self, JitError> {
        // Two threads must not probe at the same time: the linker's error texts would be mixed up on some C libraries.
        static PROBING: Mutex<()> = Mutex::new(());
        let _probing = PROBING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let from_environment = std::env::var_os(NVRTC_ENV).filter(|v| !v.is_empty()).map(PathBuf::from);
        if let Some(path) = path.map(Path::to_path_buf).or(from_environment) {
            return match open(&path, 0) {
                Ok(library) => Self::from_library(library, &path),
                Err(reason) => {
                    Err(JitError::NotFound { tried: vec![format!("{}: {reason}", path.display())] })
                }
            };
        }
        for name in search::NAMES {
            if let Ok(library) = open(Path::new(name), RTLD_NOLOAD) {
                return Self::from_library(library, Path::new(name));
            }
        }
        let mut tried = Vec::new();
        for candidate in search::candidates() {
            match open(&candidate, 0) {
                Ok(library) => return Self::from_library(library, &candidate),
                Err(reason) => tried.push(reason),
            }
        }
        Err(JitError::NotFound { tried })
    }

    fn from_library(library: Library, path: &Path) -> Result<Self, JitError> {
        // NVRTC and the code it has started stay until the process ends.
        let library = ManuallyDrop::new(library);
        let functions = Functions::resolve(&library, path)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: nvrtcVersion writes two ints.
        let status = unsafe { (functions.version)(&mut major, &mut minor) };
        let nvrtc = Self {
            functions,
            library: path.into(),
            version: (major, minor),
            _builtins: search::builtins(path, major, minor)
                .and_then(|path| open(&path, RTLD_GLOBAL).ok())
                .map(ManuallyDrop::new),
        };
        nvrtc.check("nvrtcVersion", status)?;
        if major < 12 {
            let what = String::from("the kernels' language level");
            return Err(JitError::TooOld { library: nvrtc.library, major, minor, need: "12.0", what });
        }
        Ok(nvrtc)
    }

    pub(super) fn version(&self) -> (i32, i32) {
        self.version
    }

    pub(super) fn library(&self) -> &Path {
        &self.library
    }

    /// Compute capabilities, as 10 · major + minor, that this NVRTC can compile for.
    pub(super) fn supported(&self) -> Result<Vec<i32>, JitError> {
        let mut count = 0;
        // SAFETY: writes one int.
        let status = unsafe { (self.functions.supported_count)(&mut count) };
        self.check("nvrtcGetNumSupportedArchs", status)?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        if !archs.is_empty() {
            // SAFETY: writes as many ints as the call before said.
            let status = unsafe { (self.functions.supported)(archs.as_mut_ptr()) };
            self.check("nvrtcGetSupportedArchs", status)?;
        }
        Ok(archs)
    }

    /// Compiles one source with in-memory headers. A source that the compiler refuses is an [`Output`] with a status and a log.
    pub(super) fn compile(
        &self,
        name: &CStr,
        source: &CStr,
        headers: &[(CString, CString)],
        options: &[CString],
    ) -> Result<Output, JitError> {
        let texts: Vec<_> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let options: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let mut handle: ProgramHandle = ptr::null_mut();
        // SAFETY: all strings are NUL-terminated and outlive the call, both arrays have `headers.len()` entries; NVRTC copies them.
        let status = unsafe {
            (self.functions.create)(
                &mut handle,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        let program = Program { nvrtc: self, handle };
        // SAFETY: the program is alive; the array has `options.len()` NUL-terminated strings.
        let status =
            unsafe { (self.functions.compile)(program.handle, options.len() as c_int, options.as_ptr()) };
        let log = program.text("nvrtcGetProgramLog", self.functions.log_size, self.functions.log)?;
        let (mut image, mut assembly) = (Vec::new(), Vec::new());
        if status == SUCCESS {
            image = program.text("nvrtcGetCUBIN", self.functions.cubin_size, self.functions.cubin)?;
            assembly = program.text("nvrtcGetPTX", self.functions.ptx_size, self.functions.ptx)?;
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').trim().to_owned();
        Ok(Output { status, image, assembly: text(&assembly), log: text(&log) })
    }

    pub(super) fn error_name(&self, code: c_int) -> String {
        // SAFETY: returns a static string for every code.
        let name = unsafe { (self.functions.error_string)(code) };
        if name.is_null() {
            return String::from("unknown");
        }
        // SAFETY: not null, a static NUL-terminated string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), JitError> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(JitError::Call { library: self.library.clone(), call, code, name: self.error_name(code) })
    }
}

/// A program object of NVRTC.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: ProgramHandle,
}

type SizeFn = unsafe extern "C" fn(ProgramHandle, *mut usize) -> c_int;
type GetFn = unsafe extern "C" fn(ProgramHandle, *mut c_char) -> c_int;

impl Program<'_> {
    fn text(&self, call: &'static str, size: SizeFn, get: GetFn) -> Result<Vec<u8>, JitError> {
        let mut bytes = 0usize;
        // SAFETY: the program is alive; writes one size.
        self.nvrtc.check(call, unsafe { size(self.handle, &mut bytes) })?;
        let mut buffer = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: the program is alive; writes as many bytes as the size function said.
            self.nvrtc.check(call, unsafe { get(self.handle, buffer.as_mut_ptr().cast()) })?;
        }
        Ok(buffer)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created by nvrtcCreateProgram and destroyed once. A failure leaves nothing to do.
        let _ = unsafe { (self.nvrtc.functions.destroy)(&mut self.handle) };
    }
}

fn open(path: &Path, flags: c_int) -> Result<Library, String> {
    let flags = if flags & RTLD_GLOBAL != 0 { RTLD_NOW | RTLD_GLOBAL } else { RTLD_NOW | RTLD_LOCAL | flags };
    // SAFETY: loading runs the library's initialisers; the names are NVRTC's, or a file the caller named as such.
    unsafe { Library::open(Some(path), flags) }.map_err(|error| {
        let text = error.to_string();
        if text.contains(&*path.to_string_lossy()) { text } else { format!("{}: {text}", path.display()) }
    })
}
