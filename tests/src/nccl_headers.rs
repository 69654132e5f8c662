//! NCCL's device headers for NVRTC, which lacks the C and C++ library headers that they include.
//!
//! A copy of the loaded library's headers in a folder of its own, with stand-ins for what is missing beside it, and two places changed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Headers of the C and C++ libraries as device code needs them: from CUDA's own library, or empty.
const STAND_INS: &[(&str, &str)] = &[
    ("assert.h", ""),
    ("cassert", ""),
    ("cstring", ""),
    ("math.h", ""),
    ("new", ""),
    ("stdbool.h", ""),
    ("stdio.h", ""),
    ("stdlib.h", ""),
    ("string.h", ""),
    ("algorithm", "#include <cuda/std/utility>"),
    ("limits.h", "#include <cuda/std/climits>"),
    ("stddef.h", "#include <cuda/std/cstddef>"),
    ("cstddef", "#include <cuda/std/cstddef>"),
    ("stdint.h", "#include <cuda/std/cstdint>"),
    ("type_traits", "#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }"),
    (
        "cstdint",
        "#include <cuda/std/cstdint>\nnamespace std {\nusing ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;\n\
         using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::intptr_t; using ::uintptr_t;\n}",
    ),
    ("errno.h", "#define EIO 5\n#define EAGAIN 11\n#define ENOMEM 12\n#define EBUSY 16\n#define EINVAL 22"),
    (
        "linux/types.h",
        "#include <stdint.h>\ntypedef uint8_t __u8;\ntypedef uint16_t __u16;\ntypedef uint32_t __u32;\ntypedef uint64_t __u64;\n\
         typedef uint16_t __be16;\ntypedef uint32_t __be32;\ntypedef uint64_t __be64;",
    ),
    // What nccl.h includes inside `extern "C"` comes first, outside of it; prototypes of host functions have types that are not there.
    (
        "prelude.h",
        "#include <cuda/std/cstdint>\n#include <cuda/std/climits>\n#include <cuda/std/cstddef>\n#include <cuda/std/type_traits>\n\
         #include <cuda/atomic>\n#include <cooperative_groups.h>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n\
         #include <cuda_fp8.h>\n#undef __host__\n#define __host__\n#include <nccl.h>",
    ),
];

/// Options for device code with NCCL's headers: only the GIN backend that compiles without vendor headers.
const OPTIONS: [&str; 4] = [
    "--device-as-default-execution-space",
    "-DNCCL_GIN_GPI_ENABLE=0",
    "-DNCCL_GIN_EFA_GDA_ENABLE=0",
    "-DNCCL_GIN_GDAKI_ENABLE=0",
];

/// NCCL's headers in a form that NVRTC takes.
#[derive(Debug)]
pub struct NcclHeaders {
    folder: tempfile::TempDir,
}

impl NcclHeaders {
    /// Copies the headers in `include`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn new(include: &Path) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        for (name, text) in STAND_INS {
            let file = folder.path().join("stand-ins").join(name);
            fs::create_dir_all(file.parent().expect("a file lies in a folder"))?;
            fs::write(file, format!("#pragma once\n{text}\n"))?;
        }
        let copy = folder.path().join("nccl");
        for name in ["nccl.h", "nccl_device.h", "nccl_device"] {
            copy_tree(&include.join(name), &copy.join(name))?;
        }
        Ok(Self { folder })
    }

    /// Options for NVRTC: the folders of these headers and of CUDA's, in their order, and what NCCL's headers need defined.
    #[must_use]
    pub fn options(&self, cuda: &[PathBuf]) -> Vec<String> {
        let own = ["stand-ins", "nccl"].map(|name| self.folder.path().join(name));
        let folders = own.iter().chain(cuda).map(|folder| format!("-I{}", folder.display()));
        folders.chain(OPTIONS.map(str::to_owned)).collect()
    }
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    if from.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy_tree(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
    let mut text = fs::read_to_string(from)?;
    // Up to 2.30 the length of an array is rounded down, to zero for small types, which NVRTC refuses.
    for unit in [2, 4, 8, 16] {
        for written in [format!("part[sizeof(T)/{unit}]"), format!("part[sizeof(T) / {unit}]")] {
            text = text.replace(&written, &format!("part[(sizeof(T) + {unit} - 1) / {unit}]"));
        }
    }
    // NVRTC passes over `packed` where it follows a struct. What it is for, requests to the proxy, reaches up to the last struct.
    if from.ends_with("gin_proxy_device_host_common.h")
        && let (Some(first), Some(last)) = (text.find("typedef union {"), text.rfind("typedef struct {"))
    {
        text.insert_str(last, "#pragma pack(pop)\n");
        text.insert_str(first, "#pragma pack(push, 1)\n");
    }
    fs::write(to, text)
}
