//! `deepep doctor`: what this machine can do, and what to do about what it can't.

mod gin;
mod gpu;
mod libraries;
mod system;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use deepep_cli::inputs::Values;
use deepep_cli::job::{Job, Source};
use deepep_cli::routing::{Group, Pattern};
use deepep_core::BackendKind;
use deepep_core::tensor::DType;
use serde::Serialize;

use super::rank::{self, Outcome};
use super::{Failure, paint};

/// Arguments of `deepep doctor`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// It is there and works.
    Yes,
    /// It is not there.
    No,
    /// Good to know.
    Info,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    area: &'static str,
    what: String,
    state: State,
    detail: String,
    /// What to do about a "no".
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn yes(area: &'static str, what: impl Into<String>, detail: impl ToString) -> Self {
        Self { area, what: what.into(), state: State::Yes, detail: detail.to_string(), remedy: None }
    }

    fn info(area: &'static str, what: impl Into<String>, detail: impl ToString) -> Self {
        Self { area, what: what.into(), state: State::Info, detail: detail.to_string(), remedy: None }
    }

    fn no(
        area: &'static str,
        what: impl Into<String>,
        detail: impl ToString,
        remedy: impl Into<String>,
    ) -> Self {
        let (what, detail, remedy) = (what.into(), detail.to_string(), Some(remedy.into()));
        Self { area, what, state: State::No, detail, remedy }
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut findings = Vec::new();
    gpu::check(&mut findings);
    libraries::check(&mut findings);
    system::check(&mut findings);
    let main_job = main_job();
    let good = main_job.state == State::Yes;
    findings.push(main_job);
    if arguments.json {
        println!("{}", serde_json::to_string(&serde_json::json!({ "ready": good, "findings": findings }))?);
    } else {
        print(&findings);
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a small version of the main job, the way `deepep run` would by default, on threads.
fn main_job() -> Finding {
    let (area, what) = ("main job", "dispatch and combine on 2 ranks, verified");
    let values = Values { seed: 1, dtype: DType::Bf16, hidden: 512 };
    let group = Group { ranks: 2, experts: 8, topk: 2 };
    let mut job = Job::new(group, Source::Pattern(Pattern::Uniform, 64), 64, values);
    (job.timeout, job.backend) = (Duration::from_secs(20), BackendKind::Auto);
    let started = Instant::now();
    let remedy = "see the lines above that say no; please report it if there are none";
    match rank::threads(&job, 2, &|_| {}) {
        Ok(outcomes) => match &outcomes[..] {
            [Outcome::Verified(one), Outcome::Verified(_)] => {
                let milliseconds = started.elapsed().as_millis();
                let why =
                    rank::why_emulated(job.backend).map_or(String::new(), |why| format!(", since {why}"));
                Finding::yes(area, what, format!("{} backend, {milliseconds} ms{why}", one.backend))
            }
            _ => {
                let problem = outcomes.iter().find_map(|outcome| match outcome {
                    Outcome::Failed(text) | Outcome::Mismatch(text) => Some(text.clone()),
                    Outcome::Verified(_) => None,
                });
                Finding::no(area, what, problem.unwrap_or_default(), remedy)
            }
        },
        Err(error) => Finding::no(area, what, error, remedy),
    }
}

fn print(findings: &[Finding]) {
    let mut area = "";
    for finding in findings {
        if finding.area != area {
            area = finding.area;
            paint::heading(area);
        }
        paint::finding(
            match finding.state {
                State::Yes => paint::Mark::Yes,
                State::No => paint::Mark::No,
                State::Info => paint::Mark::Info,
            },
            &finding.what,
            &finding.detail,
            finding.remedy.as_deref(),
        );
    }
}
