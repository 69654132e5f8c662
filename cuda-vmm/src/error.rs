//! The crate's error: what was attempted with which values, what came back, and what to do about it.

use crate::properties::HandleTypes;
use crate::share::DescriptorError;
use cuda_vmm_sys::{CUresult, CallError, Function, LoadError};
use std::fmt;
use std::io;
use std::time::Duration;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something failed.
///
/// The text of each holds all there is to say: none of them has a [source](std::error::Error::source) whose text would come twice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No CUDA driver could be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The driver refused a call, or lacks the function.
    #[error("{attempt}: {cause}{}", Hint::of(cause))]
    Call {
        /// What was attempted, with its values.
        attempt: String,
        /// The function and the code that it returned.
        cause: CallError,
    },
    /// A size or count is zero.
    #[error("{what} is zero")]
    Zero {
        /// Which value.
        what: &'static str,
    },
    /// A size or offset is not a multiple of what it must be a multiple of.
    #[error("{what} is {value} bytes, which is not a multiple of {granularity}: round it up to {}", value.next_multiple_of((*granularity).max(1)))]
    Misaligned {
        /// Which value.
        what: &'static str,
        /// The value, in bytes.
        value: usize,
        /// What it must be a multiple of, in bytes.
        granularity: usize,
    },
    /// A sum of sizes does not fit into the address space.
    #[error("{what} overflows the address space")]
    Overflow {
        /// Which sum.
        what: &'static str,
    },
    /// A part lies outside the whole.
    #[error("{what} of {length} bytes at offset {offset} ends outside of {limit} bytes")]
    OutOfBounds {
        /// Which part.
        what: &'static str,
        /// Where it starts, in bytes.
        offset: usize,
        /// How long it is, in bytes.
        length: usize,
        /// Length of the whole, in bytes.
        limit: usize,
    },
    /// A range that is to be mapped is mapped already.
    #[error(
        "mapping {length} bytes at offset {offset} would overlap the mapping of {mapped_length} bytes at offset {mapped_offset}"
    )]
    Overlap {
        /// Where the new mapping would start, in bytes.
        offset: usize,
        /// How long it would be, in bytes.
        length: usize,
        /// Where the existing one starts, in bytes.
        mapped_offset: usize,
        /// How long it is, in bytes.
        mapped_length: usize,
    },
    /// There is no such device.
    #[error("device {ordinal} does not exist: the driver has {count} (is CUDA_VISIBLE_DEVICES set?)")]
    UnknownDevice {
        /// The ordinal that was asked for.
        ordinal: i32,
        /// Number of devices.
        count: i32,
    },
    /// Two objects come from different drivers.
    #[error("{what} belongs to another driver than the object that it is used with")]
    ForeignDriver {
        /// Which object.
        what: &'static str,
    },
    /// An object cannot be exported as asked: it was not created for that, or not by this process.
    #[error("{}", not_exportable(what, *wanted, *available, *imported))]
    NotExportable {
        /// What was to be exported.
        what: &'static str,
        /// The handle type that was asked for.
        wanted: HandleTypes,
        /// The handle types that the memory was created with; none for imported memory.
        available: HandleTypes,
        /// Whether it was imported.
        imported: bool,
    },
    /// A mapping cannot be undone: others still hold it.
    #[error("{what} is still held by {holders} other owner(s): drop them first")]
    StillShared {
        /// What is held.
        what: &'static str,
        /// How many hold it besides the caller.
        holders: usize,
    },
    /// A location may not be granted access to this memory.
    #[error("{location} cannot be granted access to memory on {memory}: the CPU reaches host memory only")]
    AccessNotPossible {
        /// Who was to get access.
        location: crate::Location,
        /// Where the memory is.
        memory: crate::Location,
    },
    /// Bytes from another process are no valid descriptor.
    #[error("descriptor from another process: {0}")]
    Descriptor(DescriptorError),
    /// What was imported is not what its descriptor says.
    #[error("imported memory is on {found}, but its descriptor says {described}")]
    ImportMismatch {
        /// Location kind that the descriptor names.
        described: crate::Location,
        /// Location that the driver reports.
        found: crate::Location,
    },
    /// A system call of a transport failed.
    #[error("{step}: {cause}{}", io_hint(cause))]
    Transport {
        /// What was attempted.
        step: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// The other process did not answer in time.
    #[error("{step}: no answer within {} ms", after.as_millis())]
    TimedOut {
        /// What was waited for.
        step: &'static str,
        /// How long.
        after: Duration,
    },
    /// The other process ended the connection.
    #[error("{step}: the other process closed the connection after {received} of {expected} bytes")]
    PeerClosed {
        /// What was waited for.
        step: &'static str,
        /// Bytes that had arrived.
        received: usize,
        /// Bytes that were to arrive.
        expected: usize,
    },
    /// A message carried another number of file descriptors than it should.
    #[error("a message with {received} file descriptor(s) arrived, and {expected} expected{}", if *truncated { "; the system dropped some (is the limit of open files reached?)" } else { "" })]
    DescriptorCount {
        /// Number that arrived.
        received: usize,
        /// Number that should have.
        expected: usize,
        /// Whether the kernel says that it dropped some.
        truncated: bool,
    },
    /// Multicast is switched off for this process.
    #[error(
        "multicast objects are switched off in this process by the environment variable {variable}: unset it to use them"
    )]
    MulticastDisabled {
        /// The variable.
        variable: &'static str,
    },
    /// A device is in a multicast object already.
    #[error("device {ordinal} was added to the multicast object already: each device is added once")]
    DeviceTwice {
        /// The device.
        ordinal: i32,
    },
    /// A multicast object has all its devices.
    #[error("device {ordinal} cannot be added to the multicast object: all its {devices} devices are there")]
    TeamFull {
        /// The device.
        ordinal: i32,
        /// Number of devices that the object is for.
        devices: u32,
    },
    /// A multicast object lacks devices. Binding or mapping it would block until they are there.
    #[error("{added} of {devices} devices were added to the multicast object: {what_to_do}")]
    MissingDevices {
        /// Number of devices that were added.
        added: u32,
        /// Number of devices that the object is for.
        devices: u32,
        /// Where the others are to come from.
        what_to_do: &'static str,
    },
    /// Memory, or a location that is to get access, is not on a device that this process added to the multicast object.
    #[error("{what} is on {location}, which was not added to the multicast object here")]
    NotInTeam {
        /// What it is.
        what: &'static str,
        /// Where it is.
        location: crate::Location,
    },
    /// A part of a multicast object is bound on a device already.
    #[error(
        "binding {length} bytes at offset {offset} would overlap the binding of {bound_length} bytes at offset {bound_offset} on device {ordinal}"
    )]
    BindingOverlap {
        /// The device.
        ordinal: i32,
        /// Where the new binding would start, in bytes.
        offset: usize,
        /// How long it would be, in bytes.
        length: usize,
        /// Where the existing one starts, in bytes.
        bound_offset: usize,
        /// How long it is, in bytes.
        bound_length: usize,
    },
    /// A part of a multicast object is not bound on a device.
    #[error(
        "no memory of device {ordinal} is bound at offset {offset} of the multicast object: bind every byte first"
    )]
    NotBound {
        /// The device.
        ordinal: i32,
        /// The first byte without memory.
        offset: usize,
    },
    /// A binding belongs to another multicast object.
    #[error("a binding belongs to another multicast object than the mapping")]
    ForeignBinding,
    /// Another member of a team failed, or did not take part.
    #[error("rank {rank}, {step}: {reason}")]
    Member {
        /// The member.
        rank: usize,
        /// What it was to do.
        step: &'static str,
        /// The code that its driver returned, if it was that.
        status: Option<CUresult>,
        /// What it says, or what was seen of it.
        reason: String,
    },
    /// The members of a team do not want the same.
    #[error("{what} is {mine} here and {theirs} on rank {rank}: it must be the same on all ranks")]
    Disagreement {
        /// What differs.
        what: &'static str,
        /// The other member.
        rank: usize,
        /// This member's value.
        mine: u64,
        /// The other member's value.
        theirs: u64,
    },
    /// A member of a team sent what no member sends.
    #[error("rank {rank} sent no message of this team: {why}")]
    BadMessage {
        /// The member.
        rank: usize,
        /// What is wrong.
        why: &'static str,
    },
    /// The device or driver cannot do this.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why it cannot be had.
        why: String,
    },
}

impl From<DescriptorError> for Error {
    fn from(error: DescriptorError) -> Self {
        Self::Descriptor(error)
    }
}

/// What is wrong with an export, and what to do.
fn not_exportable(what: &str, wanted: HandleTypes, available: HandleTypes, imported: bool) -> String {
    if imported {
        return format!(
            "{what} that was imported can be exported as {available}, not as {wanted}: only the process that created it can export it, to \
             everybody who needs it"
        );
    }
    format!(
        "{what} was created for export as {available}, not as {wanted}: ask for it in handle_types of its properties"
    )
}

impl Error {
    /// The code that the driver returned, here or on another member of a team, if this is the failure of a driver call.
    #[must_use]
    pub fn status(&self) -> Option<CUresult> {
        match self {
            Self::Call { cause, .. } => cause.status(),
            Self::Member { status, .. } => *status,
            _ => None,
        }
    }
}

/// Adds what was attempted to the failure of a call.
pub(crate) trait Attempt<T> {
    fn attempt(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Attempt<T> for std::result::Result<T, CallError> {
    #[inline]
    fn attempt(self, what: impl FnOnce() -> String) -> Result<T> {
        match self {
            Ok(value) => Ok(value),
            Err(cause) => Err(failed(cause, what)),
        }
    }
}

/// Out of line: after a call that took long the caches are cold, and code that does not run is not to be fetched.
#[cold]
#[inline(never)]
fn failed(cause: CallError, what: impl FnOnce() -> String) -> Error {
    Error::Call { attempt: what(), cause }
}

/// What to do about a failed call, where more can be said than the code's name.
struct Hint(Option<&'static str>);

impl Hint {
    fn of(error: &CallError) -> Self {
        use Function as F;
        let Some(status) = error.status() else { return Self(None) };
        Self(match (error.function(), status) {
            (
                F::cuMemCreate | F::cuMemExportToShareableHandle | F::cuMemImportFromShareableHandle,
                CUresult::CUDA_ERROR_NOT_PERMITTED,
            ) => Some(
                "FABRIC handles need an IMEX channel (/dev/nvidia-caps-imex-channels); use POSIX file descriptors within a host",
            ),
            (F::cuMemCreate, CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                Some("the device, or the NUMA node, has too little free memory")
            }
            (F::cuMemCreate, CUresult::CUDA_ERROR_INVALID_DEVICE) => {
                Some("is there such a device or NUMA node?")
            }
            (F::cuMemAddressReserve, CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                Some("the address space is limited (ulimit -v) or full")
            }
            (
                F::cuMemImportFromShareableHandle,
                CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_HANDLE,
            ) => Some("the file descriptor is closed, or not an export of cuMemExportToShareableHandle"),
            (F::cuMemExportToShareableHandle, CUresult::CUDA_ERROR_OPERATING_SYSTEM) => {
                Some("is the limit of open files (ulimit -n) reached?")
            }
            (F::cuIpcGetMemHandle, CUresult::CUDA_ERROR_INVALID_VALUE) => Some(
                "IPC handles exist for memory of cuMemAlloc only; export physical memory as a file descriptor",
            ),
            (F::cuMulticastCreate | F::cuMulticastAddDevice, CUresult::CUDA_ERROR_NOT_PERMITTED) => Some(
                "FABRIC handles need an IMEX channel; in a container, are the capability devices (/dev/nvidia-caps) there?",
            ),
            (
                F::cuMulticastAddDevice,
                CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_HANDLE,
            ) => Some("is the handle one of a multicast object, and the device not yet in its team?"),
            (function, CUresult::CUDA_ERROR_ILLEGAL_STATE) if is_multicast(function) => Some(
                "the NVLink fabric is not in order: is the fabric manager running (nvidia-smi -q, Fabric)?",
            ),
            (function, CUresult::CUDA_ERROR_SYSTEM_NOT_READY) if is_multicast(function) => Some(
                "the fabric manager was not ready in time: all members may release everything and try again together",
            ),
            (function, CUresult::CUDA_ERROR_OUT_OF_MEMORY) if is_multicast(function) => Some(
                "the NVLink fabric has a limited number of multicast objects, which all its processes share: drop some",
            ),
            (F::cuInit, CUresult::CUDA_ERROR_NO_DEVICE) => {
                Some("no CUDA device is visible (CUDA_VISIBLE_DEVICES?)")
            }
            _ => None,
        })
    }
}

fn is_multicast(function: Function) -> bool {
    function.name().starts_with("cuMulticast")
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |hint| write!(f, " - {hint}"))
    }
}

fn io_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::MFILE.raw_os_error() => {
            " - raise the limit of open files (ulimit -n)"
        }
        Some(code) if code == rustix::io::Errno::PERM.raw_os_error() => {
            " - pidfd_getfd needs ptrace rights: see kernel.yama.ptrace_scope, or send handles over a Unix socket"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_comes_twice() {
        use std::error::Error as _;
        let function = Function::cuMemMap;
        let call = CallError::Status { function, status: CUresult::CUDA_ERROR_INVALID_VALUE };
        let io = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let errors = [
            Error::Call { attempt: "mapping".into(), cause: call },
            Error::Transport { step: "receiving", cause: io },
            Error::from(DescriptorError::Magic),
        ];
        for error in errors {
            assert!(error.source().is_none(), "{error}");
            let rejected = crate::Rejected { object: (), error };
            assert!(rejected.source().is_none(), "{rejected}");
        }
    }

    #[test]
    fn errors_say_what_to_do() {
        let call = |function, status| Error::Call {
            attempt: "creating 2097152 bytes".into(),
            cause: CallError::Status { function, status },
        };
        let text = call(Function::cuMemCreate, CUresult::CUDA_ERROR_NOT_PERMITTED).to_string();
        assert!(
            text.starts_with("creating 2097152 bytes: cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800) - "),
            "{text}"
        );
        assert!(text.contains("IMEX"), "{text}");
        let text = call(Function::cuMemMap, CUresult::CUDA_ERROR_INVALID_VALUE).to_string();
        assert!(text.ends_with("CUDA_ERROR_INVALID_VALUE (1)"), "{text}");

        for (status, hint) in [
            (CUresult::CUDA_ERROR_ILLEGAL_STATE, "fabric manager"),
            (CUresult::CUDA_ERROR_SYSTEM_NOT_READY, "try again together"),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, "limited number of multicast objects"),
        ] {
            for function in [Function::cuMulticastCreate, Function::cuMulticastBindMem] {
                let text = call(function, status).to_string();
                assert!(text.contains(hint), "{text}");
            }
        }
        let text = call(Function::cuMulticastCreate, CUresult::CUDA_ERROR_NOT_PERMITTED).to_string();
        assert!(text.contains("IMEX") && text.contains("/dev/nvidia-caps"), "{text}");

        let text = Error::Misaligned { what: "size", value: 5, granularity: 4096 }.to_string();
        assert_eq!(text, "size is 5 bytes, which is not a multiple of 4096: round it up to 4096");
        let cause = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let text = Error::Transport { step: "receiving", cause }.to_string();
        assert!(text.contains("ulimit -n"), "{text}");
    }
}
