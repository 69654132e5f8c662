//! `deepep run`: the main job, verified.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use deepep_cli::job::{Job, Source};
use serde_json::json;

use super::rank::{self, Outcome, Summary};
use super::settings::Settings;
use super::{Failure, paint, workers};

/// Arguments of `deepep run`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// Rounds; every one is verified
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Ranks are threads of one process instead of processes
    #[arg(long)]
    threads: bool,
    /// Machine-readable output
    #[arg(long)]
    json: bool,
    /// This process is the given rank of a run that another one has started.
    #[arg(long, hide = true)]
    as_rank: Option<usize>,
    /// Where that run's store listens.
    #[arg(long, hide = true, requires = "as_rank")]
    store_port: Option<u16>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (job, mut notes) = arguments.settings.job()?;
    let rounds = arguments.rounds as usize;
    if let Some(rank) = arguments.as_rank {
        let (ranks, port, timeout) = (job.group.ranks, arguments.store_port, job.timeout);
        let seat = workers::Seat { rank, ranks, port, timeout };
        let outcome =
            workers::child(&seat, |bootstrap, progress| rank::run(&job, bootstrap, rounds, progress))?;
        return Ok(if outcome.good() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    // Errors that every rank would report are reported once, here.
    notes.extend(rank::why_emulated(job.backend).map(|why| format!("ranks are emulated on CPUs: {why}")));
    let plan = job.config().plan(job.group.ranks)?;
    if !arguments.json {
        notes.iter().for_each(|note| println!("note: {note}"));
        println!("{}", describe(&job, plan.total));
    }
    let bar = paint::progress(arguments.json, rounds * job.group.ranks, "rank-rounds verified");
    let started = Instant::now();
    let outcomes = if arguments.threads {
        rank::threads(&job, rounds, &|_| bar.inc(1))?
    } else {
        rank::processes(&job, &|n| bar.inc(n as u64))?
    };
    bar.finish_and_clear();
    let good = if arguments.json {
        report_json(&job, &outcomes, started.elapsed(), &notes)
    } else {
        report(&job, &outcomes, rounds, started.elapsed())
    };
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn describe(job: &Job, heap: usize) -> String {
    let source = match &job.source {
        Source::Pattern(pattern, tokens) => format!("{tokens} tokens a rank, {pattern} routing"),
        Source::Uneven(pattern, _) => format!("{pattern} routing"),
        Source::Trace(trace) => {
            let model = trace.model.as_deref().map_or(String::new(), |model| format!(" of {model}"));
            format!("{} recorded tokens{model}", paint::thousands(trace.routing.tokens()))
        }
    };
    let layout = match job.expanded {
        None => "plain".into(),
        Some(alignment) => format!("expanded by {alignment}"),
    };
    format!(
        "{} ranks, {source}; top-{} of {} experts, hidden {}, {}, {layout}; {} of symmetric memory a rank",
        job.group.ranks,
        job.group.topk,
        job.group.experts,
        job.values.hidden,
        job.values.dtype,
        paint::bytes(heap),
    )
}

/// The numbers of each rank that has some.
fn verified(outcomes: &[Outcome]) -> Vec<(usize, &Summary)> {
    let numbered = outcomes.iter().enumerate();
    numbered
        .filter_map(|(rank, outcome)| match outcome {
            Outcome::Verified(summary) => Some((rank, summary)),
            _ => None,
        })
        .collect()
}

/// The first difference if there is one, else the first error that is not about another rank's.
fn first_problem(outcomes: &[Outcome]) -> Option<String> {
    let differing = outcomes.iter().enumerate().find_map(|(rank, outcome)| match outcome {
        Outcome::Mismatch(what) => Some(format!("rank {rank}: {what}")),
        _ => None,
    });
    differing.or_else(|| {
        let failures: Vec<_> = outcomes
            .iter()
            .enumerate()
            .filter_map(|(rank, outcome)| match outcome {
                Outcome::Failed(what) => Some(format!("rank {rank}: {what}")),
                _ => None,
            })
            .collect();
        (!failures.is_empty()).then(|| failures.join("\n"))
    })
}

fn report(job: &Job, outcomes: &[Outcome], rounds: usize, elapsed: Duration) -> bool {
    let summaries = verified(outcomes);
    let rows: Vec<Vec<String>> = summaries
        .iter()
        .map(|(rank, s)| {
            vec![
                rank.to_string(),
                s.device.clone().unwrap_or_else(|| "host".into()),
                paint::thousands(s.tokens),
                paint::thousands(s.received),
                paint::thousands(s.rows),
                paint::bytes(s.bytes_from_peers),
                format!("{:.3}", s.dispatch_seconds * 1e3),
                format!("{:.3}", s.combine_seconds * 1e3),
                format!("{:.2}", s.dispatch_gb_per_second),
                format!("{:.2}", s.combine_gb_per_second),
            ]
        })
        .collect();
    if !rows.is_empty() {
        let header = [
            "rank",
            "device",
            "tokens",
            "received",
            "rows",
            "from peers",
            "dispatch ms",
            "combine ms",
            "dispatch GB/s",
            "combine GB/s",
        ];
        println!("{}", paint::table(&header, &rows));
    }
    if let Some(problem) = first_problem(outcomes) {
        paint::verdict(false, "not verified:", &problem);
        return false;
    }
    let sum = |f: fn(&Summary) -> usize| summaries.iter().map(|(_, s)| f(s)).sum::<usize>();
    let backend = summaries.first().map_or("", |(_, s)| s.backend.as_str());
    let text = format!(
        "{rounds} rounds of dispatch and combine agree with the oracle in every bit: {} ranks on the {backend} backend, {} tokens, {} rows, {:.1} s",
        job.group.ranks,
        paint::thousands(sum(|s| s.tokens)),
        paint::thousands(sum(|s| s.rows)),
        elapsed.as_secs_f64(),
    );
    paint::verdict(true, "verified:", &text);
    true
}

fn report_json(job: &Job, outcomes: &[Outcome], elapsed: Duration, notes: &[String]) -> bool {
    let problem = first_problem(outcomes);
    let value = json!({
        "verified": problem.is_none(),
        "problem": problem,
        "ranks": outcomes,
        "experts": job.group.experts,
        "topk": job.group.topk,
        "hidden": job.values.hidden,
        "dtype": job.values.dtype.name(),
        "seconds": elapsed.as_secs_f64(),
        "notes": notes,
    });
    println!("{value}");
    problem.is_none()
}
