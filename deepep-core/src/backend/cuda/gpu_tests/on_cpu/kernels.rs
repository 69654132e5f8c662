//! Kernels compiled for CPUs, in one library with the runtime that runs them.

use std::ffi::c_void;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::super::machine::Outcome;
use crate::jit::Program;

/// Longest run of one round, in seconds.
const LIMIT: f64 = 120.0;
/// One operation of one rank, as the runtime knows it.
#[repr(C)]
pub(super) struct Launch {
    pub(super) kernel: *const c_void,
    pub(super) params: *const c_void,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// Kernels in one library with the runtime.
pub(super) struct Kernels {
    library: libloading::Library,
    programs: Vec<Program>,
    _build: tempfile::TempDir,
}

pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/on_cpu/fibers")
}

pub(super) fn compiler(test: &str) -> bool {
    let found = Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        // Past the test runner's capture of what passing tests print.
        writeln!(std::io::stderr(), "skipped: {test}: there is no g++").ok();
    }
    found
}

pub(super) fn run(command: &mut Command) -> Outcome {
    let output = command.output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned().into()),
    }
}

pub(super) fn params(program: &Program) -> &'static str {
    match program {
        Program::Dispatch { .. } => "DispatchParams",
        Program::Combine { .. } | Program::PullCombine { .. } => "CombineParams",
        Program::PacketDispatch { .. } => "PacketDispatchParams",
        Program::PacketCombine { .. } => "PacketCombineParams",
        _ => unreachable!("no kernel of dispatch or combine"),
    }
}

/// A change of the sources: the one place in a file where this stands.
pub(super) fn replaced(file: &str, from: &str, to: &str) -> impl Fn(&str, String) -> String + Sync {
    move |name, text| {
        assert!(name != file || text.matches(from).count() == 1, "{file} has no longer {from:?}");
        if name == file { text.replace(from, to) } else { text }
    }
}

impl Kernels {
    /// Compiles programs, with a change of their sources.
    pub(super) fn build(
        programs: &[Program],
        change: &(dyn Fn(&str, String) -> String + Sync),
    ) -> Outcome<Self> {
        let build = tempfile::tempdir()?;
        let compile = |number: usize, program: &Program| -> Outcome<PathBuf> {
            let root = build.path().join(format!("kernel{number}"));
            for (name, text) in program.headers().into_iter().filter(|(name, _)| !name.starts_with("arch/")) {
                let path = root.join(name);
                std::fs::create_dir_all(path.parent().unwrap_or(&root))?;
                std::fs::write(path, change(name, text))?;
            }
            let shared = "extern __shared__ __align__(128) u8 shared[];";
            let source = program.source().replace(shared, "u8* shared = fiber_shared();");
            let source = source.replace("extern \"C\" __global__", "__global__");
            std::fs::write(root.join("kernel.cu"), change("kernel.cu", source))?;
            let object = root.join("kernel.o");
            let define = |name: &str, value: String| format!("-D{name}={value}");
            run(Command::new("g++")
                .args(["-std=c++20", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE", "-c", "-I"])
                .arg(&root)
                .arg("-I")
                .arg(folder())
                .arg("-I")
                .arg(folder().join(".."))
                .arg(define("KERNEL", "\"kernel.cu\"".into()))
                .arg(define("ENTRY", program.entry().into()))
                .arg(define("PARAMS", params(program).into()))
                .arg(define("SPACE", format!("space{number}")))
                .arg(define("NAME", format!("launch{number}")))
                .arg(folder().join("kernel.cpp"))
                .arg("-o")
                .arg(&object))
            .map_err(|e| format!("{program:?}: {e}"))?;
            Ok(object)
        };
        let objects: Outcome<Vec<PathBuf>> =
            programs.iter().enumerate().map(|(n, program)| compile(n, program)).collect();
        let library = build.path().join("kernels.so");
        run(Command::new("g++")
            .args(["-std=c++20", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-I"])
            .arg(folder())
            .arg(folder().join("runtime.cpp"))
            .args(objects?)
            .arg("-o")
            .arg(&library))?;
        // SAFETY: the library is the one that was just made; its initialisers construct empty containers.
        let library = unsafe { libloading::Library::new(&library) }?;
        Ok(Self { library, programs: programs.to_vec(), _build: build })
    }

    pub(super) fn kernel(&self, program: Program) -> Outcome<*const c_void> {
        let number =
            self.programs.iter().position(|p| *p == program).ok_or(format!("{program:?} was not built"))?;
        // SAFETY: kernel.cpp gives the function this name and type.
        let function: libloading::Symbol<'_, unsafe extern "C" fn(*const c_void)> =
            unsafe { self.library.get(format!("launch{number}").as_bytes()) }?;
        Ok(*function as *const c_void)
    }

    /// Runs the ranks' operations side by side.
    pub(super) fn run(&self, seed: u64, launches: &[Vec<Launch>]) -> Outcome {
        type Run =
            unsafe extern "C" fn(u64, *const *const Launch, *const usize, usize, f64, *mut u8, usize) -> i32;
        // SAFETY: runtime.cpp gives the function this name and type.
        let function: libloading::Symbol<'_, Run> = unsafe { self.library.get(b"fiber_run") }?;
        let lists: Vec<*const Launch> = launches.iter().map(Vec::as_ptr).collect();
        let counts: Vec<usize> = launches.iter().map(Vec::len).collect();
        let mut text = [0u8; 512];
        // SAFETY: the lists have these lengths; kernels and what their arguments name outlive the call. Only this thread uses the library.
        let failed = unsafe {
            function(
                seed,
                lists.as_ptr(),
                counts.as_ptr(),
                counts.len(),
                LIMIT,
                text.as_mut_ptr(),
                text.len(),
            )
        };
        let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
        match failed {
            0 => Ok(()),
            _ => Err(String::from_utf8_lossy(&text[..end]).into_owned().into()),
        }
    }
}
