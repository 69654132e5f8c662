//! What NVRTC needs to compile kernels that use NCCL's device API.
//!
//! NCCL's device headers are written for nvcc: NVRTC has no host compiler's headers, and reads some of their constructs otherwise, one of
//! them silently. [`sources`] gives the headers and options that make up for it, for the headers of every release from 2.28 to 2.32, without
//! changing a file. Compile against the headers of the library that is loaded ([`Nccl::include_dir`](crate::sys::Nccl::include_dir)):
//! a device communicator has the layout of one release.
//!
//! A kernel starts with one include in place of NCCL's own:
//!
//! ```cuda
//! #include "nccl_gin.h"
//!
//! extern "C" __global__ void signal(ncclDevComm comm, int peer) {
//!   ncclGin gin(comm, 0);
//!   gin.signal(ncclTeamWorld(comm), peer, ncclGin_SignalInc{0});
//! }
//! ```
//!
//! ```no_run
//! use nccl_gin::{device_code, sys::Nccl};
//! # fn compile(_source: &str, _headers: &[(String, String)], _options: &[String]) {}
//!
//! let nccl = Nccl::get()?;
//! let sources = device_code::sources(nccl.version(), nccl.include_dir()?)?;
//! let mut options = sources.options("/usr/local/cuda/include");
//! options.push("--gpu-architecture=sm_90".into());
//! // To nvrtcCreateProgram go the headers, to nvrtcCompileProgram the options.
//! compile("…", sources.headers(), &options);
//! # Ok::<(), nccl_gin::Error>(())
//! ```

use crate::error::{Error, Result};
use nccl_gin_sys::Version;
use std::path::{Path, PathBuf};

/// The header that kernels include.
pub const HEADER: &str = "nccl_gin.h";

/// Headers by name, and options.
#[derive(Clone, Debug)]
pub struct Sources {
    headers: Vec<(String, String)>,
    include: PathBuf,
}

/// Headers of a host's compiler that NCCL includes, as far as device code uses them.
const SHIMS: [(&str, &str); 20] = [
    ("stdint.h", "#pragma once\n#include <cuda/std/cstdint>\n"),
    ("stddef.h", "#pragma once\n#include <cuda/std/cstddef>\n"),
    ("limits.h", "#pragma once\n#include <cuda/std/climits>\n"),
    ("cstddef", "#pragma once\n#include <cuda/std/cstddef>\n"),
    (
        "cstdint",
        "#pragma once\n#include \"stdint.h\"\nnamespace std {\n\
         using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t; using ::intptr_t;\n\
         using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::uintptr_t;\n}\n",
    ),
    (
        "type_traits",
        "#pragma once\n#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }\n",
    ),
    ("algorithm", "#pragma once\n#include <cuda/std/utility>\n"),
    (
        "errno.h",
        "#pragma once\n#define EIO 5\n#define EAGAIN 11\n#define ENOMEM 12\n#define EBUSY 16\n#define EINVAL 22\n",
    ),
    (
        "linux/types.h",
        "#pragma once\n#include \"stdint.h\"\n\
         typedef uint8_t __u8; typedef uint16_t __u16; typedef uint32_t __u32; typedef uint64_t __u64;\n\
         typedef uint16_t __be16; typedef uint32_t __be32; typedef uint64_t __be64;\n",
    ),
    ("assert.h", EMPTY),
    ("cassert", EMPTY),
    ("cstring", EMPTY),
    ("math.h", EMPTY),
    ("new", EMPTY),
    ("stdbool.h", EMPTY),
    ("stdio.h", EMPTY),
    ("stdlib.h", EMPTY),
    ("string.h", EMPTY),
    ("unistd.h", EMPTY),
    ("time.h", EMPTY),
];
const EMPTY: &str = "#pragma once\n";

/// What must be there before NCCL's headers, which include some of it inside of `extern "C"`.
const BEFORE: &str = r#"#pragma once
#include <cuda/std/cstdint>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/type_traits>
#include <cuda/atomic>
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
// Declarations for the host are of no use here, and have types that are the host's alone.
#undef __host__
#define __host__
#include "nccl.h"
"#;

/// The requests that kernels hand to NCCL's threads are packed bit fields. Their attribute stands where NVRTC does not see it, so that they are
/// packed by a pragma. From 2.32 on a struct that is not packed stands among them: it gets its natural layout afterwards.
const PACKED: &str = r#"#if NCCL_VERSION_CODE >= 23200
#define ncclGinProxyGpuCtx_t nccl_gin_packed_context_unused
#endif
#pragma pack(push, 1)
#include "nccl_device/gin/proxy/gin_proxy_device_host_common.h"
#pragma pack(pop)
#if NCCL_VERSION_CODE >= 23200
#undef ncclGinProxyGpuCtx_t
typedef struct {
  int nranks;
  uint32_t queueSize;
  ncclGinProxyGfd_t* queues;
  uint32_t* pis;
  uint32_t* cis;
  uint64_t* counters;
  uint64_t* signals;
  uint64_t* signalOffsets;
  uint32_t* lastIssuedGet;
  uint32_t* lastVisibleGet;
  bool flushesAllPutsOnAnySignal;
} ncclGinProxyGpuCtx_t;
static_assert(sizeof(ncclGinProxyGpuCtx_t) == 80, "a layout of NCCL that is not known");
#endif
"#;

/// Name of the corrected copy of `nccl_device/utility.h`, whose include guard then keeps the original out.
const UTILITY: &str = "nccl_gin_utility.h";

/// Headers and options for the headers of `version` in `include`.
///
/// # Errors
/// [`Error::Unsupported`] if a header of that release cannot be read there.
pub fn sources(version: Version, include: impl AsRef<Path>) -> Result<Sources> {
    let include = include.as_ref().to_owned();
    let mut headers: Vec<(String, String)> =
        SHIMS.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect();
    let mut main = BEFORE.to_owned();
    if version.code() < 23_100 {
        let path = include.join("nccl_device/utility.h");
        let text = std::fs::read_to_string(&path).map_err(|error| Error::Unsupported {
            what: "compiling kernels for NCCL's device API",
            reason: format!("{}: {error}", path.display()),
        })?;
        headers.push((UTILITY.to_owned(), without_empty_arrays(&text)));
        main += &format!("#include \"{UTILITY}\"\n");
    }
    if include.join("nccl_device/gin/proxy/gin_proxy_device_host_common.h").is_file() {
        main += PACKED;
    }
    main += "#include \"nccl_device.h\"\n";
    headers.push((HEADER.to_owned(), main));
    Ok(Sources { headers, include })
}

/// Arrays of `sizeof(T) / 16` elements have none for a small type, which NVRTC refuses, used or not: it gets one more byte's worth.
fn without_empty_arrays(text: &str) -> String {
    let mut out = text.to_owned();
    for divisor in ["2", "4", "8", "16"] {
        for form in [format!("part[sizeof(T)/{divisor}]"), format!("part[sizeof(T) / {divisor}]")] {
            let rounded = format!("part[(sizeof(T) + {divisor} - 1) / {divisor}]");
            out = out.replace(&form, &rounded);
        }
    }
    out
}

impl Sources {
    /// Names and texts of headers, for `nvrtcCreateProgram`.
    #[must_use]
    #[doc(alias = "nvrtcCreateProgram")]
    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    /// Options for `nvrtcCompileProgram`, without the architecture, which the caller adds. `cuda_include` is the folder of CUDA's headers, with
    /// CCCL's in it or in its folder `cccl`.
    ///
    /// Of GIN's kinds only PROXY is compiled in: the others need headers of their network cards.
    #[must_use]
    #[doc(alias = "nvrtcCompileProgram")]
    pub fn options(&self, cuda_include: impl AsRef<Path>) -> Vec<String> {
        let cuda = cuda_include.as_ref();
        let folders = [self.include.clone(), cuda.to_owned(), cuda.join("cccl")];
        let folders = folders.iter().map(|folder| format!("--include-path={}", folder.display()));
        let kinds = ["GPI", "EFA_GDA", "GDAKI"].iter().map(|kind| format!("-DNCCL_GIN_{kind}_ENABLE=0"));
        ["--std=c++17", "--device-as-default-execution-space"]
            .into_iter()
            .map(str::to_owned)
            .chain(folders)
            .chain(kinds)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_get_room_for_small_types() {
        let text =
            "union { ulonglong2 part[sizeof(T)/16]; uint64_t part[sizeof(T) / 8]; uint8_t part[sizeof(T)]; }";
        let expected = "union { ulonglong2 part[(sizeof(T) + 16 - 1) / 16]; uint64_t part[(sizeof(T) + 8 - 1) / 8]; \
                        uint8_t part[sizeof(T)]; }";
        assert_eq!(without_empty_arrays(text), expected);
    }

    #[test]
    fn headers_that_are_missing_are_named() {
        let error = sources(Version::from_code(23007), "/nonexistent/include").unwrap_err().to_string();
        assert!(error.contains("/nonexistent/include/nccl_device/utility.h"), "{error}");
        // Later releases need no correction.
        let sources = sources(Version::from_code(23203), "/nonexistent/include").unwrap();
        let options = sources.options("/cuda/include");
        assert!(options.contains(&"--include-path=/cuda/include/cccl".to_owned()), "{options:?}");
        let names: Vec<&str> = sources.headers().iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&HEADER) && names.contains(&"stdint.h"));
    }
}
