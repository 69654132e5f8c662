//! The environment that makes NCCL use the plugin.

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// File name of the plugin, as cargo builds it.
pub const LIBRARY: &str = "libnccl_gin_soft.so";

/// Environment variables that a process must have before its first NCCL call, for NCCL to take this plugin and to take the process for one of `node`.
///
/// `library` is the plugin's path. `node` is any name: processes with the same one are one node (an LSA team), those with different ones
/// talk over GIN, even if they share a host, or a GPU. NCCL reads the name once in a process. Threads of one process that are
/// to be nodes of their own need `NCCL_LSA_TEAM_SIZE=1` instead, and a GPU each.
///
/// `NCCL_RMA_PLUGIN` is for 2.30.5 and later, `NCCL_GIN_PLUGIN` for 2.29.7 to 2.30.4 (later ones log that they skip it).
/// Add `NCCL_NUM_RMA_CTX=0` where `ncclPutSignal` and its kin are not needed: each window is then mapped once less.
///
/// ```
/// let variables = nccl_gin_soft::env("/opt/lib/libnccl_gin_soft.so", "node-0");
/// let mut rank = std::process::Command::new("./rank");
/// rank.envs(variables);
/// ```
#[must_use]
pub fn env(library: impl AsRef<Path>, node: impl AsRef<OsStr>) -> Vec<(&'static str, OsString)> {
    let library = library.as_ref().as_os_str().to_owned();
    vec![
        ("NCCL_RMA_PLUGIN", library.clone()),
        ("NCCL_GIN_PLUGIN", library),
        ("NCCL_HOSTID", node.as_ref().to_owned()),
    ]
}
