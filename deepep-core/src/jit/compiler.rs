//! From a program to machine code.

use std::borrow::Cow;
use std::ffi::CString;
use std::fmt;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::nvrtc::{Nvrtc, Output};
use super::{Cache, JitError, Program, Resources};

/// Architecture of a device, from its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arch {
    major: u32,
    minor: u32,
}

impl Arch {
    /// Architecture of a device with compute capability `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// As NVRTC's number: 90 for 9.0.
    fn number(self) -> i32 {
        (self.major * 10 + self.minor) as i32
    }
}

impl fmt::Display for Arch {
    /// With the suffix for exactly this architecture from Hopper on, where instructions exist that later ones lack.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if self.major >= 9 { "a" } else { "" })
    }
}

/// Machine code of one program for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    image: Cow<'static, [u8]>,
    assembly: String,
    resources: Vec<Resources>,
    origin: Origin,
}

/// Where machine code comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Embedded,
    Cache,
    Compiler,
}

impl Cubin {
    /// The ELF image, as `cuModuleLoadData` and `cuLibraryLoadData` take it.
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// The PTX it was made from, for who wants to see the instructions. Empty unless it was compiled now.
    #[doc(alias = "nvrtcGetPTX")]
    pub fn assembly(&self) -> &str {
        &self.assembly
    }

    /// Registers and local memory of its kernels. Empty unless it was compiled now.
    pub fn resources(&self) -> &[Resources] {
        &self.resources
    }

    /// Whether it was compiled now, rather than read from the cache or compiled into this build.
    pub fn compiled(&self) -> bool {
        self.origin == Origin::Compiler
    }

    /// Whether it is part of this build (see [`Embedded`](super::Embedded)).
    pub fn embedded(&self) -> bool {
        self.origin == Origin::Embedded
    }

    /// Machine code alone.
    fn without_report(image: impl Into<Cow<'static, [u8]>>, origin: Origin) -> Self {
        Self { image: image.into(), assembly: String::new(), resources: Vec::new(), origin }
    }

    pub(super) fn from_embedded(image: &'static [u8]) -> Self {
        Self::without_report(image, Origin::Embedded)
    }
}

/// Options of every compilation, beside the architecture.
const OPTIONS: [&str; 3] = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"];

/// A compiler: NVRTC, found and opened.
pub struct Compiler {
    nvrtc: Nvrtc,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.version();
        write!(f, "Compiler(NVRTC {major}.{minor}, {})", self.library().display())
    }
}

impl Compiler {
    /// Opens NVRTC: `path`, or the library that the environment variable [`NVRTC_ENV`](super::NVRTC_ENV) names, or one that is loaded
    /// already, or the first that is found on the linker's path, in a CUDA installation, or in a Python environment.
    ///
    /// # Errors
    /// [`JitError::NotFound`] with everything that was tried; [`JitError::Missing`] or [`JitError::TooOld`] for a library that can't be
    /// used.
    #[doc(alias = "nvrtcVersion")]
    pub fn find(path: Option<&Path>) -> Result<Self, JitError> {
        Ok(Self { nvrtc: Nvrtc::find(path)? })
    }

    /// NVRTC's version.
    pub fn version(&self) -> (i32, i32) {
        self.nvrtc.version()
    }

    /// The library.
    pub fn library(&self) -> &Path {
        self.nvrtc.library()
    }

    /// Whether this NVRTC knows packets' accesses: 16 bytes at system scope, which PTX 8.4 has.
    ///
    /// # Errors
    /// [`JitError::TooOld`].
    pub fn need_packets(&self) -> Result<(), JitError> {
        let (major, minor) = self.version();
        if (major, minor) >= (12, 4) {
            return Ok(());
        }
        let (library, what) = (self.library().into(), String::from("the 16-byte accesses of packets"));
        Err(JitError::TooOld { library, major, minor, need: "12.4", what })
    }

    /// Compiles a program, without looking at any cache.
    ///
    /// # Errors
    /// [`JitError::TooOld`] if this NVRTC doesn't know the architecture, [`JitError::Compile`] with the compiler's log if it refuses the
    /// source.
    #[doc(alias = "nvrtcCompileProgram")]
    #[doc(alias = "nvrtcGetCUBIN")]
    pub fn compile(&self, program: Program, arch: Arch) -> Result<Cubin, JitError> {
        if matches!(program, Program::PacketDispatch { .. } | Program::PacketCombine { .. }) {
            self.need_packets()?;
        }
        let Output { image, assembly, log, .. } =
            self.compile_text(program.entry(), program.source(), program.headers(), arch)?;
        let (image, resources) = (image.into(), Resources::parse(&log));
        Ok(Cubin { image, assembly, resources, origin: Origin::Compiler })
    }

    #[cfg(test)]
    pub(super) fn compile_altered(
        &self,
        program: Program,
        arch: Arch,
        alter: super::Alter,
        cache: &Cache,
    ) -> Result<Cubin, JitError> {
        let headers: Vec<_> =
            program.headers().into_iter().map(|(name, text)| (name, alter(name, text))).collect();
        let source = alter("kernel.cu", program.source().into());
        let key = self.key(program.entry(), &source, &headers, arch);
        if let Some(image) = cache.get(&key) {
            return Ok(Cubin::without_report(image, Origin::Cache));
        }
        let output = self.compile_text(program.entry(), &source, headers, arch)?;
        cache.put(&key, &output.image);
        let resources = Resources::parse(&output.log);
        let (image, assembly) = (output.image.into(), output.assembly);
        Ok(Cubin { image, assembly, resources, origin: Origin::Compiler })
    }

    /// Compiles a source with headers.
    pub(super) fn compile_text(
        &self,
        program: &'static str,
        source: &str,
        headers: Vec<(&'static str, String)>,
        arch: Arch,
    ) -> Result<Output, JitError> {
        let (major, minor) = self.version();
        if !self.nvrtc.supported()?.contains(&arch.number()) {
            let library = self.library().into();
            let what = format!("architecture {arch}");
            return Err(JitError::TooOld { library, major, minor, need: "a newer", what });
        }
        let headers: Vec<_> = headers.into_iter().map(|(n, t)| (c_string(n), c_string(&t))).collect();
        let options: Vec<_> = options(arch).iter().map(|o| c_string(o)).collect();
        let name = c_string(&format!("{program}.cu"));
        let output = self.nvrtc.compile(&name, &c_string(source), &headers, &options)?;
        if output.status == 0 {
            return Ok(output);
        }
        Err(JitError::Compile {
            program,
            arch: arch.to_string(),
            major,
            minor,
            code: output.status,
            name: self.nvrtc.error_name(output.status),
            log: output.log,
        })
    }

    /// Takes a program from the cache, or compiles it and puts it there. A cache that can't be read or written costs only time.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    pub fn compile_cached(&self, program: Program, arch: Arch, cache: &Cache) -> Result<Cubin, JitError> {
        let key = self.key(program.entry(), program.source(), &program.headers(), arch);
        if let Some(image) = cache.get(&key) {
            return Ok(Cubin::without_report(image, Origin::Cache));
        }
        let cubin = self.compile(program, arch)?;
        cache.put(&key, &cubin.image);
        Ok(cubin)
    }

    /// Takes a kernel of the caller's own from the cache, or compiles it and puts it there. `name` is the program's name in messages and
    /// in the cache; `source` may include this crate's wrappers of instructions (`#include "arch/ld_st.cuh"` …) and packets
    /// (`#include "comm/pieces.cuh"`), which change from version to version.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    pub fn compile_source(
        &self,
        name: &'static str,
        source: &str,
        arch: Arch,
        cache: &Cache,
    ) -> Result<Cubin, JitError> {
        let headers = super::source::pure_headers();
        let key = self.key(name, source, &headers, arch);
        if let Some(image) = cache.get(&key) {
            return Ok(Cubin::without_report(image, Origin::Cache));
        }
        let Output { image, assembly, log, .. } = self.compile_text(name, source, headers, arch)?;
        cache.put(&key, &image);
        Ok(Cubin {
            image: image.into(),
            assembly,
            resources: Resources::parse(&log),
            origin: Origin::Compiler,
        })
    }

    /// Everything the machine code depends on, as a file name.
    fn key(&self, name: &str, source: &str, headers: &[(&str, String)], arch: Arch) -> String {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        let (major, minor) = self.version();
        part(format!("nvrtc {major}.{minor}").as_bytes());
        options(arch).iter().for_each(|o| part(o.as_bytes()));
        part(source.as_bytes());
        for (name, text) in headers {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        let digest = hash.finalize();
        let mut key = format!("{name}-{arch}-");
        digest.iter().for_each(|byte| key.push_str(&format!("{byte:02x}")));
        key
    }
}

fn options(arch: Arch) -> Vec<String> {
    let mut all = vec![format!("--gpu-architecture={arch}")];
    all.extend(OPTIONS.iter().map(|o| (*o).to_owned()));
    all
}

/// Embedded sources and names have no NUL; one that had would end there and fail to compile.
fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_exact() {
        assert_eq!(Arch::new(9, 0).to_string(), "sm_90a");
        assert_eq!(Arch::new(10, 0).to_string(), "sm_100a");
        assert_eq!(Arch::new(8, 0).to_string(), "sm_80");
    }
}
