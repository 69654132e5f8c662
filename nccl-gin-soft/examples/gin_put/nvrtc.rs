//! As much of NVRTC as it takes to compile one source.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

/// Environment variable that names NVRTC's library.
pub const LIBRARY_ENV: &str = "NVRTC_LIBRARY";
/// Environment variable that names the folder of CUDA's headers.
pub const INCLUDE_ENV: &str = "CUDA_INCLUDE";

const NAMES: [&str; 4] = [
    "libnvrtc.so.13",
    "libnvrtc.so.12",
    "/usr/local/cuda/lib64/libnvrtc.so.13",
    "/usr/local/cuda/lib64/libnvrtc.so.12",
];

/// Folder of CUDA's headers.
pub fn cuda_include() -> PathBuf {
    std::env::var_os(INCLUDE_ENV).map_or_else(|| "/usr/local/cuda/include".into(), PathBuf::from)
}

fn open(name: &Path) -> Result<Library, String> {
    // SAFETY: NVRTC's initialisers set up the compiler and nothing else.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| format!("{}: {error}", name.display()))
}

/// Opens NVRTC for good: the compiler keeps threads and tables of its own.
fn library() -> Result<ManuallyDrop<Library>, String> {
    let mut tried = Vec::new();
    let named = std::env::var_os(LIBRARY_ENV).map(PathBuf::from);
    let names: Vec<PathBuf> =
        named.map_or_else(|| NAMES.iter().map(PathBuf::from).collect(), |one| vec![one]);
    for name in names {
        // It looks for its helper by name alone; one that is open already is found.
        for minor in 0..=9 {
            for major in [12, 13] {
                let helper = format!("libnvrtc-builtins.so.{major}.{minor}");
                let beside = name.parent().map(|folder| folder.join(helper)).filter(|path| path.is_file());
                if let Some(library) = beside.and_then(|path| open(&path).ok()) {
                    std::mem::forget(library);
                }
            }
        }
        match open(&name) {
            Ok(library) => return Ok(ManuallyDrop::new(library)),
            Err(error) => tried.push(error),
        }
    }
    Err(format!("no NVRTC ({}); name it in {LIBRARY_ENV}", tried.join("; ")))
}

/// Machine code of a source, or what went wrong, with the compiler's log.
pub fn compile(source: &str, headers: &[(String, String)], options: &[String]) -> Result<Vec<u8>, String> {
    type Create = unsafe extern "C" fn(
        *mut *mut c_void,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int;
    type Compile = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> c_int;
    type Size = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
    type Copy = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;
    type Destroy = unsafe extern "C" fn(*mut *mut c_void) -> c_int;

    let library = library()?;
    let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
    let (source, name) = (text(source)?, c"kernels.cu");
    let names: Vec<CString> = headers.iter().map(|(name, _)| text(name)).collect::<Result<_, _>>()?;
    let texts: Vec<CString> = headers.iter().map(|(_, one)| text(one)).collect::<Result<_, _>>()?;
    let options: Vec<CString> = options.iter().map(|one| text(one)).collect::<Result<_, _>>()?;
    let pointers = |list: &[CString]| list.iter().map(|one| one.as_ptr()).collect::<Vec<*const c_char>>();
    let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));

    // SAFETY: the symbols have the signatures that nvrtc.h has declared for them since CUDA 11.1; strings and lists outlive the calls that read them, and
    // each buffer has the size that NVRTC has just told.
    unsafe {
        let symbol = |name: &[u8]| {
            library.get::<*const c_void>(name).map(|found| *found).map_err(|error| error.to_string())
        };
        let create: Create = std::mem::transmute(symbol(b"nvrtcCreateProgram\0")?);
        let compile: Compile = std::mem::transmute(symbol(b"nvrtcCompileProgram\0")?);
        let log_size: Size = std::mem::transmute(symbol(b"nvrtcGetProgramLogSize\0")?);
        let log: Copy = std::mem::transmute(symbol(b"nvrtcGetProgramLog\0")?);
        let code_size: Size = std::mem::transmute(symbol(b"nvrtcGetCUBINSize\0")?);
        let code: Copy = std::mem::transmute(symbol(b"nvrtcGetCUBIN\0")?);
        let destroy: Destroy = std::mem::transmute(symbol(b"nvrtcDestroyProgram\0")?);

        let mut program = null_mut();
        let count = names.len() as c_int;
        let lists = if count == 0 { (null(), null()) } else { (texts.as_ptr(), names.as_ptr()) };
        let created = create(&mut program, source.as_ptr(), name.as_ptr(), count, lists.0, lists.1);
        if created != 0 {
            return Err(format!("nvrtcCreateProgram returned {created}"));
        }
        let compiled = compile(program, options.len() as c_int, options.as_ptr());
        let read = |size: Size, copy: Copy| {
            let mut length = 0;
            size(program, &mut length);
            let mut bytes = vec![0u8; length];
            if length > 0 {
                copy(program, bytes.as_mut_ptr().cast());
            }
            bytes
        };
        let outcome = if compiled == 0 {
            Ok(read(code_size, code))
        } else {
            let log = read(log_size, log);
            Err(format!("nvrtcCompileProgram returned {compiled}:\n{}", String::from_utf8_lossy(&log)))
        };
        destroy(&mut program);
        outcome
    }
}
