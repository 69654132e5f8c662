//! What to do about an error of NCCL.

use nccl_gin_sys::{Function, Generation, ncclResult_t};

/// Where windows are not supported.
pub(crate) const NO_SYMMETRIC_MEMORY: &str = "the communicator has no symmetric memory: all GPUs of a host must reach each other by \
    peer access, NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE must not be 0, and ranks that do not share one LSA team need a GIN backend \
    (an RDMA NIC, or a plugin named in NCCL_GIN_PLUGIN and NCCL_RMA_PLUGIN)";

/// Where windows are not supported because of the version: seen with 2.28.3 on a GPU, where the same works with two ranks, and with 2.28.9.
pub(crate) const NO_WINDOW_ALONE: &str = "NCCL 2.28.3 makes no windows, nor device communicators, on a communicator of one rank: use two \
    ranks, or NCCL 2.28.9 or newer";

/// What a communicator without windows lacks.
pub(crate) fn no_window(generation: Generation, ranks: u32) -> &'static str {
    if generation == Generation::V2_28_3 && ranks == 1 { NO_WINDOW_ALONE } else { NO_SYMMETRIC_MEMORY }
}

/// Where GIN is not supported.
pub(crate) const NO_GIN: &str = "no GIN backend is usable on all ranks: it needs an RDMA NIC with GPUDirect, or a plugin named in \
    NCCL_GIN_PLUGIN and NCCL_RMA_PLUGIN, and NCCL_GIN_ENABLE must not be 0";

/// The advice for a failed call, from what NCCL said.
pub(crate) fn for_result(function: Function, result: ncclResult_t, text: &str) -> Option<&'static str> {
    if text.contains("Duplicate GPU") {
        return Some(
            "several ranks share a GPU: that needs NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment of every \
             rank",
        );
    }
    if text.contains("ELASTIC_BUFFER_REGISTER") {
        return Some("memory with host segments needs NCCL_ELASTIC_BUFFER_REGISTER=1");
    }
    if text.contains("multicast") || text.contains("NVLS") {
        return Some("set NCCL_NVLS_ENABLE=0 to do without multicast");
    }
    if text.contains("symmetric memory")
        || (function == Function::ncclDevCommCreate && result == ncclResult_t::ncclInvalidUsage)
    {
        return Some(NO_SYMMETRIC_MEMORY);
    }
    if text.contains("GIN") {
        return Some(NO_GIN);
    }
    Some(match result {
        ncclResult_t::ncclUnhandledCudaError => {
            "a CUDA call failed inside NCCL: see that the process has a GPU and a driver that is new enough for this NCCL; \
             NCCL_DEBUG=WARN names the call"
        }
        ncclResult_t::ncclSystemError => {
            "a system call failed inside NCCL: see NCCL_SOCKET_IFNAME, /dev/shm and the limits on files; NCCL_DEBUG=WARN names the \
             call"
        }
        ncclResult_t::ncclInternalError => "NCCL_DEBUG=WARN says more",
        ncclResult_t::ncclRemoteError | ncclResult_t::ncclTimeout => {
            "another rank has failed or left: abort this communicator, then make a new one or shrink it"
        }
        ncclResult_t::ncclInvalidArgument | ncclResult_t::ncclInvalidUsage => {
            "NCCL_DEBUG=WARN says which argument and why"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_texts_have_an_answer() {
        let hint = |function, result, text| for_result(function, result, text).unwrap_or_default();
        let usage = ncclResult_t::ncclInvalidUsage;
        let init = Function::ncclCommInitRankConfig;
        assert!(
            hint(init, usage, "Duplicate GPU detected : rank 0 and rank 1")
                .contains("NCCL_MULTI_RANK_GPU_ENABLE=1")
        );
        assert!(hint(Function::ncclDevCommCreate, usage, "").contains("NCCL_CUMEM_ENABLE"));
        assert!(
            hint(init, usage, "Communicator does not support symmetric memory!")
                .contains("NCCL_CUMEM_ENABLE")
        );
        assert!(hint(init, usage, "no GIN support").contains("NCCL_GIN_PLUGIN"));
        assert!(hint(init, ncclResult_t::ncclSystemError, "").contains("NCCL_SOCKET_IFNAME"));
        assert!(hint(init, ncclResult_t::ncclRemoteError, "").contains("abort"));
        assert_eq!(for_result(init, ncclResult_t(99), ""), None);
    }
}
