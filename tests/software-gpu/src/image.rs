//! Images: shared objects for the host, as `nvrtc` makes them.

use cuda_vmm_emu::sys::CUresult;
use cuda_vmm_emu::sys::ffi::{CStr, c_char, c_int, c_void};
use cuda_vmm_emu::{Kernel, Kernels, Launch, Module};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Seconds that a launch may take.
const LIMIT: f64 = 300.0;

/// A kernel in the image's table, `software_kernels`, which ends with one without a name.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    name: *const c_char,
    call: *const c_void,
    sizes: *const usize,
    parameters: usize,
}

/// `fiber_launch` of the runtime.
type Run =
    unsafe extern "C" fn(*const c_void, *const *const u8, u32, u32, u32, f64, *mut c_char, usize) -> c_int;

/// Loads images and runs what is in them.
pub struct HostCode;

struct Loaded {
    /// Never unloaded: threads may have run its code, and have left destructors in it.
    _library: ManuallyDrop<Library>,
    entries: Vec<Entry>,
    run: Run,
}

// SAFETY: the entries are constants of a library that is never unloaded; the runtime keeps its state for each thread apart.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

struct Code {
    module: Arc<Loaded>,
    entry: usize,
    sizes: Vec<usize>,
}

/// Bytes of an ELF image: its section headers come last.
///
/// # Safety
/// `image` is the start of a whole 64-bit ELF file, or of at least 64 bytes that are not.
unsafe fn length(image: *const u8) -> Option<usize> {
    // SAFETY: the caller's contract.
    let header = unsafe { std::slice::from_raw_parts(image, 64) };
    let at = |from: usize, bytes: usize| {
        header[from..from + bytes].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
    };
    let end = at(40, 8) + at(58, 2) * at(60, 2);
    (header[..5] == *b"\x7fELF\x02").then_some(end as usize)
}

impl Kernels for HostCode {
    unsafe fn load(&self, image: *const c_void) -> Result<Box<dyn Module>, CUresult> {
        let bad = CUresult::CUDA_ERROR_INVALID_IMAGE;
        // SAFETY: the contract of `cuModuleLoadData`; images are files of our `nvrtc`.
        let bytes = unsafe {
            let length = length(image.cast()).ok_or(bad)?;
            std::slice::from_raw_parts(image.cast::<u8>(), length)
        };
        let file = rustix::fs::memfd_create("kernel", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let mut file = std::fs::File::from(file);
        file.write_all(bytes).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // SAFETY: the image's initialisers construct empty containers.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|_| bad)?;
        let library = ManuallyDrop::new(library);
        // The name of a file that is open can come again, and the linker takes a library of the same name for the same one.
        std::mem::forget(file);
        // SAFETY: our `nvrtc` gives the symbols these types; the table ends with an entry without a name.
        let (entries, run) = unsafe {
            let table = *library.get::<*const Entry>(b"software_kernels\0").map_err(|_| bad)?;
            let named = |n: &usize| !(*table.add(*n)).name.is_null();
            let entries = (0..).take_while(named).map(|n| *table.add(n)).collect();
            (entries, *library.get::<Run>(b"fiber_launch\0").map_err(|_| bad)?)
        };
        Ok(Box::new(Image(Arc::new(Loaded { _library: library, entries, run }))))
    }
}

struct Image(Arc<Loaded>);

impl Module for Image {
    fn function(&self, name: &CStr) -> Option<Arc<dyn Kernel>> {
        // SAFETY: names in the table are constants of the library, which stays.
        let entry = self.0.entries.iter().position(|entry| unsafe { CStr::from_ptr(entry.name) } == name)?;
        let Entry { sizes, parameters, .. } = self.0.entries[entry];
        // SAFETY: as above: an array of this length.
        let sizes = unsafe { std::slice::from_raw_parts(sizes, parameters) }.to_vec();
        Some(Arc::new(Code { module: Arc::clone(&self.0), entry, sizes }))
    }
}

impl Kernel for Code {
    fn parameters(&self) -> &[usize] {
        &self.sizes
    }

    fn run(&self, launch: &Launch) -> Result<(), CUresult> {
        if launch.grid[1..] != [1, 1] || launch.block[1..] != [1, 1] {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        // Parameters are as aligned as the largest type needs.
        let aligned: Vec<Vec<u128>> = launch.parameters.iter().map(|bytes| copy(bytes)).collect();
        let addresses: Vec<*const u8> = aligned.iter().map(|words| words.as_ptr().cast()).collect();
        let call = self.module.entries[self.entry].call;
        let mut text = [0; 256];
        // SAFETY: the kernel takes parameters of these sizes, as its table says; what they point to is the launch's business, as on a
        // device. The text is as long as the runtime is told.
        let failed = unsafe {
            (self.module.run)(
                call,
                addresses.as_ptr(),
                launch.grid[0],
                launch.block[0],
                launch.shared_bytes,
                LIMIT,
                text.as_mut_ptr(),
                text.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        // SAFETY: the runtime ends its text with a NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        // A device would say nothing; whoever looks for the reason wants it.
        let _ =
            writeln!(std::io::stderr(), "software-gpu: device {}: {}", launch.device, text.to_string_lossy());
        Err(CUresult::CUDA_ERROR_LAUNCH_FAILED)
    }
}

fn copy(bytes: &[u8]) -> Vec<u128> {
    let word = |part: &[u8]| {
        let mut word = [0; 16];
        word[..part.len()].copy_from_slice(part);
        u128::from_ne_bytes(word)
    };
    bytes.chunks(16).map(word).collect()
}
