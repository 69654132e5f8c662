//! One rank's part: for each setting a buffer, and for each operation first the comparison with the oracle, then times, then the comparison
//! again.
//!
//! Ranks tell each other how every step went before the next one begins, so that a failure on one of them is never a hang on the others.

use std::sync::Arc;
use std::time::Duration;

use deepep_core::layout::MAX_PACKET_TOKENS;
use deepep_core::{BackendKind, Bootstrap, ElasticBuffer, Error};

use super::calls::{Calls, Scratch};
use super::clock::Clock;
use super::plan::{Layout, Operation, Precision, Routes, Setting};
use super::report::{Part, Samples};
use crate::gpu::GpuError;
use crate::inputs::Values;
use crate::job::{Job, JobError, Source};
use crate::routing::Group;
use crate::trace::Trace;

/// How all settings are run. Equal on all ranks.
#[derive(Clone, Debug)]
pub struct Run {
    /// Operations, where a setting has them.
    pub operations: Vec<Operation>,
    /// Timed calls.
    pub iterations: usize,
    /// Tokens from which on L2 is emptied before each call.
    pub flush_from_tokens: usize,
    /// Alignment of experts' first rows in the expanded layout.
    pub alignment: usize,
    /// Seed of all generated data.
    pub seed: u64,
    /// The longest wait for a rank.
    pub timeout: Duration,
    /// Which processors.
    pub backend: BackendKind,
    /// Kernels may be launched while the one before them still runs.
    pub early_launch: bool,
    /// Rows of small batches travel in packets.
    pub packets: bool,
    /// What [`Routes::Trace`] replays.
    pub trace: Option<Arc<Trace>>,
    /// For tests of this very program: what one rank does wrong.
    pub fault: Option<Fault>,
}

/// A fault to be found: a rank sends other rows than it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: usize,
    /// Only from the timed calls on, so that the first comparison finds nothing.
    pub late: bool,
}

/// Why a step ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// The library, or a difference.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// There is nothing to call with: the first dispatches have not left what an operation needs.
    #[error("{0}: the first dispatch has left nothing to call it with")]
    Unprepared(Operation),
}

impl From<Error> for RankError {
    fn from(error: Error) -> Self {
        Self::Job(error.into())
    }
}

impl From<cuda_vmm::Error> for RankError {
    fn from(error: cuda_vmm::Error) -> Self {
        Self::Gpu(error.into())
    }
}

impl RankError {
    fn part(self) -> Part {
        match self {
            Self::Job(JobError::Mismatch(what)) => Part::Wrong(what.to_string()),
            other => Part::Failed(other.to_string()),
        }
    }
}

impl Run {
    /// The operations that are timed in a setting. Combine always moves BF16, and is timed once; rows are pulled in the plain layout only.
    pub fn operations_of(&self, setting: &Setting, settings: &[Setting]) -> Vec<Operation> {
        let bf16 = settings.contains(&Setting { dtype: Precision::Bf16, ..*setting });
        let elsewhere = bf16 && setting.dtype != Precision::Bf16;
        let possible = |o: Operation| match o {
            Operation::Combine => !elsewhere,
            Operation::Pulled => !elsewhere && !self.in_packets(setting) && setting.layout == Layout::Plain,
            _ => true,
        };
        self.operations.iter().copied().filter(|&o| possible(o)).collect()
    }

    /// Whether rows travel in packets, if there is room for the maps of so many experts.
    fn in_packets(&self, setting: &Setting) -> bool {
        self.packets && setting.tokens <= MAX_PACKET_TOKENS
    }

    /// Sections without the settings that have nothing to time.
    pub fn with_operations(&self, sections: Vec<Vec<Setting>>) -> Vec<Vec<Setting>> {
        let timed = |section: Vec<Setting>| {
            let some = |setting: &&Setting| !self.operations_of(setting, &section).is_empty();
            section.iter().filter(some).copied().collect()
        };
        sections.into_iter().map(timed).filter(|section: &Vec<Setting>| !section.is_empty()).collect()
    }

    /// A setting as a job for this many ranks.
    ///
    /// # Errors
    /// What is wrong with the setting, in words.
    pub fn job(&self, setting: &Setting, ranks: usize) -> Result<Job, String> {
        let shape = setting.shape;
        if !shape.experts.is_multiple_of(ranks) {
            return Err(format!("{} experts are no multiple of {ranks} ranks", shape.experts));
        }
        let source = match (setting.routing, &self.trace) {
            (Routes::Pattern(pattern), _) => Source::Pattern(pattern, setting.tokens),
            (Routes::Trace, Some(trace)) => Source::Trace(trace.clone()),
            (Routes::Trace, None) => return Err("there is no trace".into()),
        };
        let dtype = match setting.dtype {
            Precision::Fp8 => deepep_core::tensor::DType::F8E4M3,
            Precision::Bf16 => deepep_core::tensor::DType::Bf16,
        };
        let values = Values { seed: self.seed, dtype, hidden: shape.hidden };
        let group = Group { ranks, experts: shape.experts, topk: shape.topk };
        let mut job = Job::new(group, source, setting.tokens.max(1), values);
        job.expanded = (setting.layout == Layout::Expanded).then_some(self.alignment);
        (job.exact, job.biases, job.timeout, job.backend) = (false, 0, self.timeout, self.backend);
        job.multiprocessors = setting.sms;
        job.early_launch = (!self.early_launch).then_some(false);
        job.packets = self.in_packets(setting);
        Ok(job)
    }

    /// Runs one rank's part of settings; `progress` is called after each operation. The result has an entry for each operation of each
    /// setting, in order.
    pub fn rank(
        &self,
        bootstrap: impl Bootstrap + 'static,
        settings: &[Setting],
        progress: impl Fn(usize),
    ) -> Vec<Part> {
        let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
        let scratch = Scratch::default();
        let mut parts = Vec::new();
        for setting in settings {
            let operations = self.operations_of(setting, settings);
            let before = parts.len();
            self.setting(&bootstrap, setting, &operations, &scratch, &mut |part| {
                parts.push(part);
                progress(parts.len());
            });
            debug_assert_eq!(parts.len(), before + operations.len());
        }
        parts
    }

    /// Says `part` for each operation.
    fn setting(
        &self,
        bootstrap: &Arc<dyn Bootstrap>,
        setting: &Setting,
        operations: &[Operation],
        scratch: &Scratch,
        say: &mut dyn FnMut(Part),
    ) {
        let all = |part: Part, say: &mut dyn FnMut(Part)| operations.iter().for_each(|_| say(part.clone()));
        let job = match self.job(setting, bootstrap.world_size()) {
            Ok(job) => job,
            // The same on all ranks.
            Err(problem) => return all(Part::Failed(problem), say),
        };
        let mut config = job.config();
        if operations.contains(&Operation::Pulled) {
            config.combine_inputs = Calls::ROUNDS;
        }
        let built = ElasticBuffer::with_config(config).build(bootstrap.clone());
        let mut buffer = match built {
            Ok(buffer) => buffer,
            // An error of one rank is an error of all.
            Err(error) => return all(Part::Failed(error.to_string()), say),
        };
        let fault = self.fault.filter(|fault| fault.rank == bootstrap.rank());
        let (mut calls, clock) = match self.agree(bootstrap, self.ready(&job, &mut buffer, scratch, fault)) {
            Ok(ready) => ready,
            Err(part) => return all(part, say),
        };
        let flush = setting.tokens >= self.flush_from_tokens;
        let mut lost: Option<Part> = None;
        for &operation in operations {
            if let Some(part) = &lost {
                say(part.clone());
                continue;
            }
            let checked = calls.check(&mut buffer, &clock, operation);
            let part = match self.agree(bootstrap, checked) {
                Ok(false) => Part::Skipped("the host backend has no graphs".into()),
                Ok(true) => {
                    let timed = calls
                        .plant(&buffer, &clock, fault.is_some())
                        .and_then(|()| calls.time(&mut buffer, &clock, operation, self.iterations, flush));
                    match self.agree(bootstrap, timed) {
                        Ok(samples) => Part::Timed(samples),
                        Err(part) => part,
                    }
                }
                Err(part) => part,
            };
            // After an error the ranks no longer agree on what comes next; after a difference they do.
            if matches!(part, Part::Failed(_)) {
                lost = Some(part.clone());
            }
            say(part);
        }
        calls.give_back(&clock);
        if lost.is_none() {
            // The times are right whatever comes of it; the next setting finds out whether all ranks still are there.
            let _ = buffer.close();
        }
    }

    /// Tensors, compared results of the first calls, and a clock.
    fn ready<'a>(
        &self,
        job: &'a Job,
        buffer: &mut ElasticBuffer,
        scratch: &'a Scratch,
        fault: Option<Fault>,
    ) -> Result<(Calls<'a>, Clock), RankError> {
        let clock = Clock::new(buffer, self.timeout)?;
        let mut calls = Calls::new(job, buffer, scratch)?;
        let prepared = calls
            .plant(buffer, &clock, fault.is_some_and(|fault| !fault.late))
            .and_then(|()| calls.prepare(buffer, &clock));
        match prepared {
            Ok(()) => Ok((calls, clock)),
            Err(error) => {
                calls.give_back(&clock);
                Err(error)
            }
        }
    }

    /// Tells all ranks how a step went here. Without an error on any of them, its result; else the part that this rank has to say.
    fn agree<T>(&self, bootstrap: &Arc<dyn Bootstrap>, outcome: Result<T, RankError>) -> Result<T, Part> {
        const FINE: u8 = 0;
        const WRONG: u8 = 1;
        const FAILED: u8 = 2;
        let outcome = outcome.map_err(RankError::part);
        let mine = match &outcome {
            Ok(_) => FINE,
            Err(Part::Wrong(_)) => WRONG,
            Err(_) => FAILED,
        };
        let told = bootstrap.all_gather(&[mine]).map_err(|error| Part::Failed(error.to_string()))?;
        let worst = told.iter().flatten().copied().max().unwrap_or(FAILED);
        match (outcome, worst) {
            (Ok(result), FINE) => Ok(result),
            // One that failed elsewhere ends the setting here, too.
            (Err(part @ Part::Wrong(_)), WRONG) | (Err(part @ Part::Failed(_)), _) => Err(part),
            (Ok(_), WRONG) => Err(Part::Skipped("the result of another rank is wrong".into())),
            (Err(Part::Wrong(what)), _) => Err(Part::Failed(format!("{what}; another rank failed"))),
            _ => Err(Part::Failed("another rank failed".into())),
        }
    }
}

impl Samples {
    /// With the bytes that cross links.
    pub(super) fn with_bytes(mut self, bytes_in: u64, bytes_out: u64, symmetric_bytes: u64) -> Self {
        (self.bytes_in, self.bytes_out, self.symmetric_bytes) = (bytes_in, bytes_out, symmetric_bytes);
        self
    }
}
