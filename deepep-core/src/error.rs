//! The crate's error: what was attempted with which values, what came back, what to do about it.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::time::Duration;

use crate::handle::Dispatched;
use crate::tensor::DType;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in this crate.
///
/// Errors about arguments are found before anything is sent: the buffer and the other ranks are unaffected as long as this rank
/// then makes a valid call. Expert ids are looked at later, and [`WrongIds`](Self::WrongIds) has a result. Errors about peers name the rank and the phase it was missing from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting of the configuration or a scalar argument has a value that can't work.
    #[error("{parameter} = {value}: {requirement}")]
    Invalid {
        /// Name of the setting or argument.
        parameter: &'static str,
        /// The value that was given.
        value: String,
        /// What the value must satisfy, and what to do.
        requirement: String,
    },

    /// A tensor has the wrong shape.
    #[error("{tensor} has shape {got}, expected {expected}")]
    Shape {
        /// Name of the argument.
        tensor: &'static str,
        /// Shape that was given.
        got: String,
        /// Shape that is needed.
        expected: String,
    },

    /// A tensor has the wrong element type.
    #[error("{tensor} has element type {got}, expected {expected}")]
    DType {
        /// Name of the argument.
        tensor: &'static str,
        /// Type that was given.
        got: DType,
        /// Types that are accepted.
        expected: &'static str,
    },

    /// A tensor's strides are not usable.
    #[error("{tensor} has strides {strides:?} (elements) for shape {shape:?}: {requirement}")]
    Stride {
        /// Name of the argument.
        tensor: &'static str,
        /// Shape that was given.
        shape: Vec<usize>,
        /// Strides that were given, in elements.
        strides: Vec<isize>,
        /// What they must satisfy.
        requirement: &'static str,
    },

    /// A tensor lies in the wrong kind of memory for this buffer's backend.
    #[error("{tensor} lies in {got} memory, but the {backend} backend reads {expected} memory")]
    Memory {
        /// Name of the argument.
        tensor: &'static str,
        /// Where the tensor lies.
        got: &'static str,
        /// What the backend can read.
        expected: &'static str,
        /// The buffer's backend.
        backend: &'static str,
    },

    /// A tensor lies on another device than the one that is to use it.
    #[error(
        "{tensor} lies on device {got}, but device {expected} is to use it; make it there, or copy it first"
    )]
    OtherDevice {
        /// Name of the argument.
        tensor: &'static str,
        /// Ordinal of the tensor's device.
        got: i32,
        /// Ordinal of the device of this rank's operations.
        expected: i32,
    },

    /// A view of a buffer's result, handle or [combine input](crate::CombineInput) was given to operations of somebody else, which nothing orders with that
    /// buffer's, and which its memory need not outlive.
    #[error(
        "{tensor} is a view of a result, handle or combine input of buffer #{owner}, and this is {}, whose operations nothing orders with it: \
         copy it first, or answer for both with TensorRef::from_raw",
        Whose(.buffer)
    )]
    ForeignView {
        /// Name of the argument.
        tensor: &'static str,
        /// Buffer whose memory it is.
        owner: u64,
        /// Buffer it was given to; `None` for collectives.
        buffer: Option<u64>,
    },

    /// A required tensor is missing, or one was given that this call can't take.
    #[error("{tensor}: {problem}")]
    Tensor {
        /// Name of the argument.
        tensor: &'static str,
        /// What is wrong and what to do.
        problem: String,
    },

    /// An expert id is neither −1 nor an expert of this buffer.
    #[error("topk_idx[{token}][{lane}] of rank {rank} = {expert}, expected -1 (none) or 0..{experts}")]
    ExpertOutOfRange {
        /// Rank whose tensor it is.
        rank: usize,
        /// Row of `topk_idx`.
        token: usize,
        /// Column of `topk_idx`.
        lane: usize,
        /// The id found there.
        expert: i64,
        /// Number of experts.
        experts: usize,
    },

    /// A token selects one expert twice.
    #[error(
        "topk_idx[{token}] of rank {rank} names expert {expert} {}; experts of a token are distinct",
        Lanes(.first, .second)
    )]
    DuplicateExpert {
        /// Rank whose tensor it is.
        rank: usize,
        /// Row of `topk_idx`.
        token: usize,
        /// First column with the expert, where that is known.
        first: Option<usize>,
        /// Second column with the expert.
        second: usize,
        /// The expert.
        expert: i64,
    },

    /// A dispatch has run on all ranks, with lanes of this rank's that counted as none.
    ///
    /// The other ranks have their results, and so has this one: whoever goes on with it, as if those lanes had been −1, is in step with them. Who does not,
    /// tells them, or they wait for this rank in their next call.
    ///
    /// Once a dispatch of the buffer was captured in a [CUDA graph](crate#cuda-graphs), the host can't tell replays from calls: the first exact dispatch, or
    /// [check](Dispatched::check), after a replay with wrong ids says so in this way, whatever its own ids are.
    #[error(
        "{problem}; the lane counted as none, and the dispatch has run on all ranks: this error has its result"
    )]
    WrongIds {
        /// What was wrong: [`ExpertOutOfRange`](Self::ExpertOutOfRange) or [`DuplicateExpert`](Self::DuplicateExpert), of one lane.
        problem: Box<Error>,
        /// What the dispatch delivered.
        dispatched: Box<Dispatched>,
    },

    /// More rows arrive than the caller's or the buffer's capacity holds.
    #[error(
        "{what}: {needed} needed on rank {rank}, capacity is {capacity}; no row was lost or overwritten, \
             raise the capacity or send fewer tokens"
    )]
    CapacityExceeded {
        /// Which capacity.
        what: &'static str,
        /// Rank whose capacity it is.
        rank: usize,
        /// Rows or bytes that are needed.
        needed: u64,
        /// Rows or bytes that there are.
        capacity: u64,
    },

    /// A handle was used with a buffer that did not make it.
    #[error("the handle belongs to buffer #{handle}, this is buffer #{buffer}")]
    ForeignHandle {
        /// Buffer that made the handle.
        handle: u64,
        /// Buffer it was given to.
        buffer: u64,
    },

    /// A call differs from the dispatch that made the handle.
    #[error("{field} = {call}, but the handle was made by a dispatch with {field} = {handle}")]
    HandleMismatch {
        /// What differs.
        field: &'static str,
        /// Value in the handle.
        handle: String,
        /// Value in this call.
        call: String,
    },

    /// Every slot that this call could use is still held.
    #[error(
        "{what}: all {slots} slots of the buffer are held; drop an earlier one, or build the buffer with more"
    )]
    SlotsHeld {
        /// What needs a slot.
        what: &'static str,
        /// Number of slots of the buffer.
        slots: usize,
    },

    /// Ranks were started with different settings.
    #[error("ranks disagree: {}", Listed(.differences))]
    RanksDisagree {
        /// One entry for each setting that differs.
        differences: Vec<Difference>,
    },

    /// A peer did not do its part in time.
    #[error("{phase}: rank {rank} waited {waited:?} for rank {}{}", Ranks(.missing), Seen(.expected, .seen))]
    PeerTimeout {
        /// What was being waited for.
        phase: Cow<'static, str>,
        /// The waiting rank.
        rank: usize,
        /// The ranks that are missing.
        missing: Vec<usize>,
        /// How long was waited.
        waited: Duration,
        /// Value that would have ended the wait, where there is one.
        expected: Option<u64>,
        /// Value that was there instead.
        seen: Option<u64>,
    },

    /// Work of this rank has not ended in time, and no kernel has given up: work before it on its stream may take longer.
    #[error("{what} of rank {rank} has not run after {waited:?}")]
    StillRunning {
        /// What was being waited for.
        what: &'static str,
        /// This rank.
        rank: usize,
        /// How long was waited.
        waited: Duration,
    },

    /// A copy of [`device`](crate::device) has not ended in time: the device hangs, or has very much to do.
    #[error("{what} has not ended after {waited:?}; what it uses stays until it has")]
    CopyUnfinished {
        /// The copy.
        what: String,
        /// How long was waited.
        waited: Duration,
    },

    /// A peer closed its connection or was dropped.
    #[error("{phase}: rank {rank} has left")]
    PeerLeft {
        /// What was being waited for.
        phase: Cow<'static, str>,
        /// The rank that left.
        rank: usize,
    },

    /// A local step failed on another rank, so that no rank goes on.
    #[error("{phase} failed on rank {rank}: {message}")]
    PeerFailed {
        /// The step.
        phase: Cow<'static, str>,
        /// The rank on which it failed.
        rank: usize,
        /// That rank's error.
        message: String,
    },

    /// An earlier operation of this buffer failed halfway, so that ranks no longer agree on its state.
    #[error("this buffer can't be used any more: {reason}; drop it on every rank and build a new one")]
    Broken {
        /// The first failure.
        reason: String,
    },

    /// Bytes from another process are not what they should be.
    #[error("{from}: {problem}")]
    Protocol {
        /// Where the bytes came from.
        from: String,
        /// What is wrong with them.
        problem: String,
    },

    /// The environment doesn't say which rank this process is, or contradicts itself.
    #[error("environment: {problem}")]
    Environment {
        /// What is missing or wrong, and which variables help.
        problem: String,
    },

    /// The driver refused something.
    #[error(transparent)]
    Vmm(#[from] cuda_vmm::Error),

    /// NCCL, or what goes with it, refused something.
    #[error(transparent)]
    Nccl(#[from] nccl_gin::Error),

    /// A kernel could not be compiled.
    #[error(transparent)]
    Jit(#[from] crate::jit::JitError),

    /// The operating system refused something.
    #[error("{attempted}: {cause}")]
    Io {
        /// What was attempted.
        attempted: String,
        /// What came back.
        cause: io::Error,
    },
}

impl Error {
    pub(crate) fn io(attempted: impl Into<String>, cause: impl Into<io::Error>) -> Self {
        Self::Io { attempted: attempted.into(), cause: cause.into() }
    }

    pub(crate) fn protocol(from: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Protocol { from: from.into(), problem: problem.into() }
    }

    pub(crate) fn invalid(
        parameter: &'static str,
        value: impl ToString,
        requirement: impl Into<String>,
    ) -> Self {
        Self::Invalid { parameter, value: value.to_string(), requirement: requirement.into() }
    }
}

/// One setting that is not the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the setting.
    pub field: String,
    /// Each value with the ranks that have it, in order of the lowest rank.
    pub values: Vec<(String, Vec<usize>)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is ", self.field)?;
        for (i, (value, ranks)) in self.values.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{value} on rank {}", Ranks(ranks))?;
        }
        Ok(())
    }
}

/// `0, 1, 4–7`.
struct Ranks<'a>(&'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        let mut comma = "";
        while let Some(&first) = rest.first() {
            let run = rest.iter().enumerate().take_while(|&(i, &r)| r == first + i).count();
            match run {
                1 => write!(f, "{comma}{first}")?,
                2 => write!(f, "{comma}{first}, {}", first + 1)?,
                _ => write!(f, "{comma}{first}–{}", first + run - 1)?,
            }
            rest = &rest[run..];
            comma = ", ";
        }
        Ok(())
    }
}

/// Where a token names an expert twice.
struct Lanes<'a>(&'a Option<usize>, &'a usize);

impl fmt::Display for Lanes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self(Some(first), second) => write!(f, "in lanes {first} and {second}"),
            Self(None, second) => write!(f, "in lane {second} and in one before it"),
        }
    }
}

struct Whose<'a>(&'a Option<u64>);

impl fmt::Display for Whose<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(buffer) => write!(f, "buffer #{buffer}"),
            None => f.write_str("a group of collectives"),
        }
    }
}

struct Listed<'a>(&'a [Difference]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, difference) in self.0.iter().enumerate() {
            write!(f, "{}{difference}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

struct Seen<'a>(&'a Option<u64>, &'a Option<u64>);

impl fmt::Display for Seen<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0, self.1) {
            (Some(expected), Some(seen)) => write!(f, " (expected {expected}, saw {seen})"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_ranks_and_values() {
        let e = Error::PeerTimeout {
            phase: "dispatch counts".into(),
            rank: 1,
            missing: vec![0, 2, 3, 4, 6, 7],
            waited: Duration::from_secs(3),
            expected: Some(9),
            seen: Some(8),
        };
        assert_eq!(
            e.to_string(),
            "dispatch counts: rank 1 waited 3s for rank 0, 2–4, 6, 7 (expected 9, saw 8)"
        );
        let e = Error::RanksDisagree {
            differences: vec![Difference {
                field: "hidden".into(),
                values: vec![("7168".into(), vec![0, 1, 3]), ("4096".into(), vec![2])],
            }],
        };
        assert_eq!(e.to_string(), "ranks disagree: hidden is 7168 on rank 0, 1, 3, 4096 on rank 2");
    }
}
