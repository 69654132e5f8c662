//! The functions of NVRTC that `deepep-core` uses, with g++ as the compiler.

use cuda_vmm_emu::sys::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const COMPILATION: c_int = 6;

/// Files in place of a device's instructions, and the runtime.
const FILES: &[(&str, &str)] = &[
    ("runtime.h", include_str!("../../../deepep-core/tests/on_cpu/fibers/runtime.h")),
    ("runtime.cpp", include_str!("../../../deepep-core/tests/on_cpu/fibers/runtime.cpp")),
    ("arch/bf16.cuh", include_str!("../../../deepep-core/tests/on_cpu/arch/bf16.cuh")),
    ("arch/bulk.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/bulk.cuh")),
    ("arch/elements.cuh", include_str!("../../../deepep-core/tests/on_cpu/arch/elements.cuh")),
    ("arch/f16.cuh", include_str!("../../../deepep-core/tests/on_cpu/arch/f16.cuh")),
    ("arch/fence.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/fence.cuh")),
    ("arch/launch.cuh", include_str!("../../../deepep-core/tests/on_cpu/arch/launch.cuh")),
    ("arch/ld_st.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/ld_st.cuh")),
    ("arch/mbarrier.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/mbarrier.cuh")),
    ("arch/multimem.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/multimem.cuh")),
    ("arch/packet.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/packet.cuh")),
    ("arch/scalars.cuh", include_str!("../../../deepep-core/tests/on_cpu/arch/scalars.cuh")),
    ("arch/time.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/time.cuh")),
    ("arch/types.cuh", include_str!("../../../deepep-core/tests/on_cpu/fibers/arch/types.cuh")),
];

/// A number that changes with the files, and with what is made of a source here.
fn digest() -> c_int {
    let mut hasher = DefaultHasher::new();
    (FILES, include_str!("nvrtc.rs")).hash(&mut hasher);
    (hasher.finish() >> 33) as c_int
}

/// A program, as `nvrtcProgram` refers to it.
pub struct Program {
    source: String,
    headers: Vec<(String, String)>,
    image: Vec<u8>,
    log: Vec<u8>,
}

/// A kernel's name, and the declarations of its parameters without their names.
#[derive(Debug, PartialEq)]
struct Signature {
    name: String,
    types: Vec<String>,
}

/// The kernels that a source defines: `extern "C" __global__ void [attributes] name(type name, …)`.
fn kernels(source: &str) -> Vec<Signature> {
    const START: &str = "extern \"C\" __global__ void";
    let mut all = Vec::new();
    for part in source.split(START).skip(1) {
        let part = part.trim_start();
        let part = match part.strip_prefix("__launch_bounds__") {
            Some(rest) => rest.split_once(')').map_or("", |(_, rest)| rest),
            None => part,
        };
        let Some((name, rest)) = part.split_once('(') else { continue };
        let Some((parameters, _)) = rest.split_once(')') else { continue };
        let kind = |parameter: &str| {
            let end = parameter.trim_end().trim_end_matches(|c: char| c.is_alphanumeric() || c == '_').len();
            parameter[..end].replace("__restrict__", "").trim().to_owned()
        };
        let types = parameters.split(',').filter(|p| !p.trim().is_empty()).map(kind).collect();
        all.push(Signature { name: name.trim().to_owned(), types });
    }
    all
}

/// A source for the host: the kernels, each as a function of its parameters' addresses, and a table of them.
fn host_source(source: &str) -> String {
    let mut text = String::from("#include \"arch/types.cuh\"\nnamespace space {\n#include \"kernel.cu\"\n");
    let all = kernels(source);
    for (k, kernel) in all.iter().enumerate() {
        for (i, kind) in kernel.types.iter().enumerate() {
            let _ = writeln!(text, "using T{k}_{i} = {kind};");
        }
    }
    text += "}\n";
    for (k, Signature { name, types }) in all.iter().enumerate() {
        let parameter = |(i, _): (usize, &String)| format!("*(space::T{k}_{i}*)p[{i}]");
        let parameters: Vec<_> = types.iter().enumerate().map(parameter).collect();
        let sizes: Vec<_> = (0..types.len()).map(|i| format!("sizeof(space::T{k}_{i})")).collect();
        let _ = writeln!(
            text,
            "static void call{k}(const void* all) {{ auto p = (void* const*)all; space::{name}({}); }}",
            parameters.join(", ")
        );
        let _ = writeln!(
            text,
            "static const size_t sizes{k}[] = {{{}}};",
            [&sizes[..], &["0".into()]].concat().join(", ")
        );
    }
    text +=
        "struct Entry { const char* name; void (*call)(const void*); const size_t* sizes; size_t count; };\n";
    text += "extern \"C\" { extern const Entry software_kernels[]; }\nconst Entry software_kernels[] = {\n";
    for (k, Signature { name, types }) in all.iter().enumerate() {
        let _ = writeln!(text, "{{\"{name}\", call{k}, sizes{k}, {}}},", types.len());
    }
    text + "{}};\n"
}

impl Program {
    /// Compiles. What the compiler said is the log; false if it refused.
    fn compile(&mut self) -> std::io::Result<bool> {
        let runtime = runtime()?;
        let folder = tempfile::tempdir()?;
        write(folder.path(), self.headers.iter().filter(|(name, _)| !name.starts_with("arch/")))?;
        write(folder.path(), FILES)?;
        let shared = "extern __shared__ __align__(128) u8 shared[];";
        let source = self.source.replace(shared, "u8* shared = fiber_shared();");
        let source = source.replace("extern \"C\" __global__", "__global__");
        let host = host_source(&self.source);
        write(folder.path(), &[("kernel.cu", source), ("host.cpp", host)])?;
        let output = gcc(folder.path())
            .args(["-O1", "-shared", "host.cpp", "-o", "kernel.so"])
            .arg(runtime)
            .output()?;
        self.log = output.stderr;
        if !output.status.success() {
            return Ok(false);
        }
        self.image = std::fs::read(folder.path().join("kernel.so"))?;
        Ok(true)
    }
}

/// The runtime, compiled once in a process.
fn runtime() -> std::io::Result<&'static Path> {
    static OBJECT: Mutex<Option<&'static Path>> = Mutex::new(None);
    let mut object = OBJECT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(object) = *object {
        return Ok(object);
    }
    let folder = tempfile::tempdir()?;
    write(folder.path(), FILES)?;
    let output = gcc(folder.path()).args(["-O2", "-c", "runtime.cpp"]).output()?;
    if !output.status.success() {
        return Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr)));
    }
    let bytes = std::fs::read(folder.path().join("runtime.o"))?;
    // In memory, so that nothing is left when the process ends in whatever way.
    let file = rustix::fs::memfd_create("runtime.o", rustix::fs::MemfdFlags::empty())?;
    let mut file = std::fs::File::from(file);
    file.write_all(&bytes)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), std::mem::ManuallyDrop::new(file).as_raw_fd());
    let path: &'static Path = Box::leak(PathBuf::from(path).into_boxed_path());
    Ok(object.insert(path))
}

fn gcc(folder: &Path) -> Command {
    let mut command = Command::new("g++");
    command.args(["-std=c++20", "-w", "-fPIC", "-U_FORTIFY_SOURCE", "-I."]).current_dir(folder);
    command
}

fn write<'a, N: AsRef<str> + 'a, T: AsRef<str> + 'a>(
    folder: &Path,
    files: impl IntoIterator<Item = &'a (N, T)>,
) -> std::io::Result<()> {
    for (name, text) in files {
        let path = folder.join(name.as_ref());
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        std::fs::write(path, text.as_ref())?;
    }
    Ok(())
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the caller's contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// # Safety
/// `program` came from `nvrtcCreateProgram`, and nobody else uses it.
unsafe fn program<'a>(program: *mut c_void) -> Option<&'a mut Program> {
    // SAFETY: the caller's contract.
    unsafe { program.cast::<Program>().as_mut() }
}

/// The minor version stands for all that goes into an image apart from the kernel's source, so that a cache of images keeps none that is stale.
///
/// # Safety
/// Pointers are valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        *major = 99;
        *minor = digest();
    }
    SUCCESS
}

/// The text of a code.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR unknown",
    }
    .as_ptr()
}

/// # Safety
/// `count` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { *count = 1 };
    SUCCESS
}

/// # Safety
/// `archs` is valid for one write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetSupportedArchs(archs: *mut c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { *archs = 99 };
    SUCCESS
}

/// # Safety
/// As in `nvrtc.h`: strings are C strings, the arrays have `count` of them, `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    out: *mut *mut c_void,
    source: *const c_char,
    _name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        let header = |i| (text(*names.add(i)), text(*headers.add(i)));
        let headers = (0..usize::try_from(count).unwrap_or(0)).map(header).collect();
        let program = Program { source: text(source), headers, image: Vec::new(), log: Vec::new() };
        *out = Box::into_raw(Box::new(program)).cast();
    }
    SUCCESS
}

/// # Safety
/// `handle` points to a program that is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(handle: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        if handle.is_null() || (*handle).is_null() {
            return INVALID_INPUT;
        }
        drop(Box::from_raw((*handle).cast::<Program>()));
        *handle = std::ptr::null_mut();
    }
    SUCCESS
}

/// # Safety
/// `handle` is a program. The options say nothing here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    handle: *mut c_void,
    _count: c_int,
    _options: *const *const c_char,
) -> c_int {
    // SAFETY: the caller's contract.
    let Some(program) = (unsafe { program(handle) }) else { return INVALID_INPUT };
    match program.compile() {
        Ok(true) => SUCCESS,
        Ok(false) => COMPILATION,
        Err(error) => {
            program.log = format!("g++ could not be run: {error}").into_bytes();
            COMPILATION
        }
    }
}

macro_rules! results {
    ($($size:ident, $get:ident: |$program:ident| $bytes:expr;)*) => {$(
        /// # Safety
        /// `handle` is a program, `size` is valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $size(handle: *mut c_void, size: *mut usize) -> c_int {
            // SAFETY: the caller's contract.
            let Some($program) = (unsafe { program(handle) }) else { return INVALID_INPUT };
            let bytes: &[u8] = $bytes;
            // SAFETY: the caller's contract.
            unsafe { *size = bytes.len() };
            SUCCESS
        }

        /// # Safety
        /// `handle` is a program, `out` is valid for as many bytes as the size function said.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(handle: *mut c_void, out: *mut c_char) -> c_int {
            // SAFETY: the caller's contract.
            let Some($program) = (unsafe { program(handle) }) else { return INVALID_INPUT };
            let bytes: &[u8] = $bytes;
            // SAFETY: the caller's contract.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), bytes.len()) };
            SUCCESS
        }
    )*};
}

results! {
    nvrtcGetCUBINSize, nvrtcGetCUBIN: |program| &program.image;
    nvrtcGetPTXSize, nvrtcGetPTX: |_program| b"\0";
    nvrtcGetProgramLogSize, nvrtcGetProgramLog: |program| &program.log;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_found() {
        let source = "extern \"C\" __global__ void __launch_bounds__(THREADS, 1) one(const __grid_constant__ Params p) {}\n\
                      extern \"C\" __global__ void two(u64* __restrict__ out, u32 n) { f(1); }";
        let kernel = |name: &str, types: &[&str]| Signature {
            name: name.into(),
            types: types.iter().map(|&t| t.into()).collect(),
        };
        assert_eq!(
            kernels(source),
            [kernel("one", &["const __grid_constant__ Params"]), kernel("two", &["u64*", "u32"])]
        );
        assert!(kernels("void nothing() {}").is_empty());
    }
}
