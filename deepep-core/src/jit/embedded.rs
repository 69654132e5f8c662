//! Machine code that is part of the program: the feature `aot`.

use super::{Arch, Cubin, Program};

/// A kernel's machine code for one architecture, compiled by nvcc when the crate was built.
///
/// There is none without the feature `aot`, and none on docs.rs. With it the build needs nvcc 12.8 or newer and a C++ compiler that it accepts, but no
/// GPU; the environment variable `NVCC` names nvcc, or else it is looked for on `PATH`, in `CUDA_HOME`, `CUDA_PATH` and `/usr/local/cuda`. Without
/// nvcc such a build fails with a message that says so. Two variables say at build time what is compiled:
///
/// | variable | default | meaning |
/// |---|---|---|
/// | `DEEPEP_AOT_ARCHS` | `sm_90a,sm_100a` | architectures; set but empty, nothing is embedded and no nvcc is needed |
/// | `DEEPEP_AOT_RANKS` | `1,2,3,4,5,6,7,8` | numbers of ranks |
///
/// [`Supply`](super::Supply) takes a kernel from here if it is here, and from NVRTC otherwise.
///
/// ```
/// use deepep_core::jit::Embedded;
///
/// for kernel in Embedded::all() {
///     println!("{} for {}: {} bytes", kernel.program(), kernel.arch(), kernel.image().len());
/// }
/// ```
#[derive(Debug)]
pub struct Embedded {
    arch: &'static str,
    program: &'static str,
    image: &'static [u8],
}

#[cfg(feature = "aot")]
mod table {
    use super::Embedded;

    /// The driver reads headers of the image in place.
    #[allow(dead_code)] // A build may be asked for no kernel.
    #[repr(C, align(16))]
    struct Aligned<const N: usize>([u8; N]);

    include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
}

#[cfg(not(feature = "aot"))]
mod table {
    pub(super) const NVCC: &str = "";
    pub(super) static ALL: &[super::Embedded] = &[];
}

impl Embedded {
    /// All kernels of this build.
    #[must_use]
    pub fn all() -> &'static [Self] {
        table::ALL
    }

    /// Version of the nvcc that compiled them, if there are any.
    #[must_use]
    pub fn compiler() -> Option<&'static str> {
        (!table::NVCC.is_empty()).then_some(table::NVCC)
    }

    /// The kernel for a program and an architecture.
    #[must_use]
    pub fn find(program: Program, arch: Arch) -> Option<&'static Self> {
        let (program, arch) = (format!("{program:?}"), arch.to_string());
        Self::all().iter().find(|kernel| kernel.program == program && kernel.arch == arch)
    }

    /// Architecture, as nvcc names it.
    #[must_use]
    pub fn arch(&self) -> &'static str {
        self.arch
    }

    /// The [`Program`], as its `Debug` prints it.
    #[must_use]
    pub fn program(&self) -> &'static str {
        self.program
    }

    /// The ELF image, as `cuModuleLoadData` and `cuLibraryLoadData` take it.
    #[must_use]
    pub fn image(&self) -> &'static [u8] {
        self.image
    }

    pub(super) fn cubin(&self) -> Cubin {
        Cubin::from_embedded(self.image)
    }

    /// What there is, for an error message.
    pub(super) fn summary() -> String {
        let Some(compiler) = Self::compiler() else { return String::from("it has none") };
        let mut archs: Vec<_> = Self::all().iter().map(|kernel| kernel.arch).collect();
        archs.sort_unstable();
        archs.dedup();
        format!("{}, from nvcc {compiler}, for {}", Self::all().len(), archs.join(", "))
    }
}
