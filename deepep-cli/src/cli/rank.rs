//! One rank of `deepep run`, in a process or a thread.

use std::time::Duration;

use deepep_cli::bench::stats::median;
use deepep_cli::job::{Job, JobError, Rank, Report};
use deepep_core::{BackendKind, Bootstrap, ElasticBuffer};
use serde::{Deserialize, Serialize};

use super::{Failure, workers};

/// Why ranks are emulated on CPUs where GPUs would have been taken.
pub(super) fn why_emulated(backend: BackendKind) -> Option<String> {
    let why = || BackendKind::Cuda.resolve().err().map(|why| why.to_string());
    if backend == BackendKind::Auto { why() } else { None }
}

/// How a rank's part ended.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    /// Everything agrees with the oracle.
    Verified(Summary),
    /// Something differs.
    Mismatch(String),
    /// The library returned an error.
    Failed(String),
}

impl Outcome {
    /// Whether everything agreed.
    pub(super) fn good(&self) -> bool {
        matches!(self, Self::Verified(_))
    }
}

/// A rank's numbers, over all rounds.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) tokens: usize,
    pub(super) received: usize,
    pub(super) rows: usize,
    pub(super) bytes_from_peers: usize,
    pub(super) heap_bytes: usize,
    pub(super) backend: String,
    /// Name and ordinal of the GPU; the host's processors have none.
    pub(super) device: Option<String>,
    /// Medians.
    pub(super) dispatch_seconds: f64,
    pub(super) combine_seconds: f64,
    pub(super) dispatch_gb_per_second: f64,
    pub(super) combine_gb_per_second: f64,
}

/// Runs all ranks as threads of this process; `progress` is called after each round of each rank.
pub(super) fn threads(
    job: &Job,
    rounds: usize,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Outcome>, Failure> {
    let work = |bootstrap| run(job, bootstrap, rounds, progress);
    let outcomes = workers::threads(job.group.ranks, job.timeout, work)?;
    Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(Outcome::Failed)).collect())
}

/// Runs all ranks as processes of their own.
pub(super) fn processes(job: &Job, progress: &dyn Fn(usize)) -> Result<Vec<Outcome>, Failure> {
    // A round is a dispatch and a combine, perhaps twice.
    let silence = workers::silence(job.timeout, 4);
    let outcomes = workers::processes(job.group.ranks, &[], job.timeout, silence, progress, Outcome::good)?;
    Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(Outcome::Failed)).collect())
}

/// Runs one rank; `progress` is called after each round.
pub(super) fn run(
    job: &Job,
    bootstrap: impl Bootstrap + 'static,
    rounds: usize,
    progress: impl Fn(usize),
) -> Outcome {
    match rounds_of(job, bootstrap, rounds, progress) {
        Ok(summary) => Outcome::Verified(summary),
        Err(JobError::Mismatch(difference)) => Outcome::Mismatch(difference.to_string()),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn rounds_of(
    job: &Job,
    bootstrap: impl Bootstrap + 'static,
    rounds: usize,
    progress: impl Fn(usize),
) -> Result<Summary, JobError> {
    let rank = bootstrap.rank();
    let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap)?;
    let routings = job.routings();
    let part = Rank::new(job, &routings, rank);
    let mut reports = Vec::new();
    for round in 0..rounds {
        reports.push(part.run(&mut buffer)?);
        progress(round + 1);
    }
    let summary = summarise(&reports, &buffer)?;
    buffer.close()?;
    Ok(summary)
}

fn summarise(reports: &[Report], buffer: &ElasticBuffer) -> Result<Summary, JobError> {
    let device = buffer.device();
    let name = match buffer.backend() {
        BackendKind::Cuda => {
            let name = device.name().map_err(deepep_core::Error::from)?;
            Some(format!("{name} ({})", device.ordinal()))
        }
        _ => None,
    };
    let last = reports.last().cloned().unwrap_or_default();
    let seconds = |time: fn(&Report) -> Duration| -> Vec<f64> {
        reports.iter().map(|report| time(report).as_secs_f64()).collect()
    };
    let dispatch = median(&seconds(|report| report.dispatch));
    let combine = median(&seconds(|report| report.combine));
    let rate = |bytes: usize, seconds: f64| if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
    Ok(Summary {
        tokens: last.tokens,
        received: last.received,
        rows: last.rows,
        bytes_from_peers: last.bytes_from_peers,
        heap_bytes: buffer.heap().bytes(),
        backend: buffer.backend().name().into(),
        device: name,
        dispatch_seconds: dispatch,
        combine_seconds: combine,
        dispatch_gb_per_second: rate(last.dispatch_bytes, dispatch),
        combine_gb_per_second: rate(last.combine_bytes, combine),
    })
}
