//! Stand-ins for the unit tests.

use nccl_gin_sys::{Nccl, ncclResult_t};
use std::ffi::{c_int, c_void};
use std::ptr;

/// A library of one version that can do nothing but tell it.
pub(crate) fn nccl_of(code: u32) -> Nccl {
    macro_rules! versions {
        ($($code:literal)*) => {
            match code {
                $($code => {
                    unsafe extern "C" fn version(out: *mut c_int) -> ncclResult_t {
                        // SAFETY: the table passes a valid pointer.
                        unsafe { *out = $code };
                        ncclResult_t::ncclSuccess
                    }
                    version as *const c_void
                })*
                other => panic!("no stand-in for {other}"),
            }
        };
    }
    let version = versions!(22803 22807 22809 22907 23003 23007 23102 23203 23305) as usize;
    // SAFETY: the one function that is returned has the signature of ncclGetVersion.
    unsafe {
        Nccl::from_loader(
            move |name| if name == c"ncclGetVersion" { version as *const c_void } else { ptr::null() },
        )
    }
    .expect("a version that is supported")
}
