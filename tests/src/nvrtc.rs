//! CUDA C++ compiled at run time, for kernels of the tests. NVRTC is found as `deepep-core` finds it.

use deepep_core::jit::Compiler;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;

type Handle = *mut c_void;

/// Calls a function of NVRTC: all return a status.
macro_rules! call {
    ($nvrtc:expr, $name:expr, ($($argument:expr),*): ($($ty:ty),*)) => {{
        // SAFETY: the symbol is called with the signature that nvrtc.h has declared for it since CUDA 11.1.
        let function = unsafe { $nvrtc.library.get::<unsafe extern "C" fn($($ty),*) -> c_int>($name.as_bytes()) };
        // SAFETY: strings end with NUL, outputs are valid for what is written, and the program is alive.
        function.map(|function| unsafe { function($($argument),*) }).map_err(|error| format!("{}: {error}", $name))
    }};
}

/// An NVRTC.
#[derive(Debug)]
pub struct Nvrtc {
    library: ManuallyDrop<Library>,
    path: PathBuf,
}

impl Nvrtc {
    /// The NVRTC of this machine, or of the wheel that `cargo xtask test` fetches.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub fn find() -> Result<Self, String> {
        let wheel = wheels().join("nvidia-cuda-nvrtc-13.0.88/nvidia/cu13/lib/libnvrtc.so.13");
        let compiler = Compiler::find(None)
            .or_else(|error| if wheel.is_file() { Compiler::find(Some(&wheel)) } else { Err(error) })
            .map_err(|error| error.to_string())?;
        // SAFETY: the file is an NVRTC, which has just been opened as such; it is never unloaded.
        let library = unsafe { Library::open(Some(compiler.library()), RTLD_NOW | RTLD_LOCAL) };
        let library = ManuallyDrop::new(library.map_err(|error| error.to_string())?);
        Ok(Self { library, path: compiler.library().into() })
    }

    /// Folders with CUDA's headers for device code, those of the compiler's own installation first.
    #[must_use]
    pub fn cuda_headers(&self) -> Vec<PathBuf> {
        let beside = self.path.parent().and_then(Path::parent).map(|root| root.join("include"));
        let toolkit =
            self.path.canonicalize().ok().and_then(|path| Some(path.ancestors().nth(4)?.join("include")));
        let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("include"));
        let usual = Some(PathBuf::from("/usr/local/cuda/include"));
        let wheel = |name: &str| Some(wheels().join(name).join("nvidia/cu13/include"));
        let mut found = Vec::new();
        for folder in [
            beside,
            toolkit,
            home,
            usual,
            wheel("nvidia-cuda-runtime-13.0.96"),
            wheel("nvidia-cuda-crt-13.0.88"),
            wheel("nvidia-cuda-cccl-13.0.85"),
        ] {
            found.extend(
                folder.into_iter().flat_map(|folder| [folder.join("cccl"), folder]).filter(|f| f.is_dir()),
            );
        }
        found
    }

    /// Compiles to a cubin for `arch` (such as `sm_90`).
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(&self, source: &str, arch: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let source = CString::new(source).map_err(|error| error.to_string())?;
        let mut options: Vec<CString> =
            options.iter().map(|o| CString::new(o.as_str()).expect("no NUL")).collect();
        options.push(CString::new(format!("--gpu-architecture={arch}")).expect("no NUL"));
        options.push(c"--std=c++17".into());
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Handle = ptr::null_mut();
        let status = call!(self, "nvrtcCreateProgram", (&mut program, source.as_ptr(), c"kernel.cu".as_ptr(), 0, ptr::null(), ptr::null()):
            (*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char))?;
        if status != 0 {
            return Err(format!("nvrtcCreateProgram: {status}"));
        }
        let status = call!(self, "nvrtcCompileProgram", (program, pointers.len() as c_int, pointers.as_ptr()):
            (Handle, c_int, *const *const c_char))?;
        let bytes = |size: &str, get: &str| -> Result<Vec<u8>, String> {
            let mut length = 0_usize;
            call!(self, size, (program, &mut length): (Handle, *mut usize))?;
            let mut bytes = vec![0_u8; length];
            call!(self, get, (program, bytes.as_mut_ptr().cast()): (Handle, *mut c_char))?;
            Ok(bytes)
        };
        let result = if status == 0 {
            bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        } else {
            bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                .and_then(|log| Err(String::from_utf8_lossy(&log).into_owned()))
        };
        call!(self, "nvrtcDestroyProgram", (&mut program): (*mut Handle))?;
        result
    }
}

/// Where `cargo xtask` unpacks wheels.
#[must_use]
pub fn wheels() -> PathBuf {
    std::env::var_os("WHEELS_DIR").map_or_else(
        || {
            let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
            target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")).join("wheels")
        },
        PathBuf::from,
    )
}
