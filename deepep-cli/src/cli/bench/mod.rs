//! `deepep bench`: how fast, compared with what the hardware can do at most.

mod arguments;
mod devices;
mod tables;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use deepep_cli::bench::ceilings::{Board, Ceiling, Extent, drifts};
use deepep_cli::bench::machine::{Machine, now};
use deepep_cli::bench::plan::Setting;
use deepep_cli::bench::report::{Entry, Method, Outcome, Part, Report, SCHEMA};
use deepep_cli::bench::svg;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub(super) use self::arguments::Arguments;
use self::arguments::Plan;
use self::devices::Devices;
use super::{Failure, paint, workers};

/// Bytes that ceilings move in and out of each device.
const CEILING_BYTES: usize = 512 << 20;

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let devices = Devices::find();
    let plan = arguments.plan(&devices)?;
    if let Some(rank) = arguments.as_rank {
        return child(arguments, &plan, rank);
    }
    let date = now();
    let quiet = arguments.json.as_deref() == Some(Path::new("-"));
    if !quiet {
        plan.notes.iter().for_each(|note| println!("note: {note}"));
    }
    let board = match (&plan.ceilings, devices.cuda) {
        (Some(_), Some(cuda)) => Some(Board::new(cuda, &devices.ordinals(), CEILING_BYTES)?),
        _ => None,
    };
    let measure = |extent: &Option<Extent>| -> Result<Vec<Ceiling>, Failure> {
        let (Some(board), Some(extent)) = (&board, extent) else { return Ok(Vec::new()) };
        Ok(board.measure(extent)?)
    };
    let ceilings = measure(&plan.ceilings)?;
    // A part of them, to see whether they drift.
    let again = plan.ceilings.as_ref().map(|_| Extent { sms: vec![32], samples: 5 });
    let steps: usize = plan.sections.iter().map(|s| operations(&plan, s) * plan.ranks).sum();
    let bar = progress_bar(quiet, steps);
    let (mut results, mut later) = (Vec::new(), Vec::new());
    for (number, section) in plan.sections.iter().enumerate() {
        results.extend(measure_section(&plan, number, section, &ceilings, devices.usable, &bar)?);
        later.push(measure(&again)?);
    }
    bar.finish_and_clear();
    let report = Report {
        schema: SCHEMA,
        date,
        command: std::iter::once("deepep".to_owned())
            .chain(std::env::args().skip(1))
            .collect::<Vec<_>>()
            .join(" "),
        machine: Machine::find(plan.cuda),
        method: method(&plan, devices.usable),
        notes: plan.notes.clone(),
        drift: drifts(&ceilings, &later),
        ceilings,
        results,
    };
    write(arguments, &report, quiet)?;
    Ok(if report.good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Plays a rank of one section.
fn child(arguments: &Arguments, plan: &Plan, rank: usize) -> Result<ExitCode, Failure> {
    let section = arguments.section.and_then(|number| plan.sections.get(number));
    let section = section.ok_or("--section: there is no such part of the plan")?;
    let (ranks, port, timeout) = (plan.ranks, arguments.store_port, plan.patience());
    let seat = workers::Seat { rank, ranks, port, timeout };
    workers::child(&seat, |bootstrap, progress| plan.run.rank(bootstrap, section, progress))?;
    Ok(ExitCode::SUCCESS)
}

/// Number of results of a section.
fn operations(plan: &Plan, section: &[Setting]) -> usize {
    section.iter().map(|setting| plan.run.operations_of(setting, section).len()).sum()
}

fn measure_section(
    plan: &Plan,
    number: usize,
    section: &[Setting],
    ceilings: &[Ceiling],
    devices: usize,
    bar: &ProgressBar,
) -> Result<Vec<Entry>, Failure> {
    let (ranks, timeout) = (plan.ranks, plan.patience());
    let parts: Vec<Result<Vec<Part>, String>> = if plan.threads {
        workers::threads(ranks, timeout, |bootstrap| plan.run.rank(bootstrap, section, |_| bar.inc(1)))?
    } else {
        let more = ["--section".to_owned(), number.to_string()];
        workers::processes(ranks, &more, timeout, &|n| bar.inc(n as u64), |_: &Vec<Part>| true)?
    };
    let shared = plan.cuda && ranks > devices;
    let mut entries = Vec::new();
    let mut at = 0;
    for setting in section {
        for operation in plan.run.operations_of(setting, section) {
            let of_rank = |parts: &Result<Vec<Part>, String>| match parts {
                Ok(parts) => parts.get(at).cloned().unwrap_or(Part::Failed("the rank ended early".into())),
                Err(why) => Part::Failed(why.clone()),
            };
            let of_ranks: Vec<Part> = parts.iter().map(of_rank).collect();
            let outcome = Outcome::of(&of_ranks, ceilings, shared);
            entries.push(Entry { setting: *setting, operation, outcome });
            at += 1;
        }
    }
    Ok(entries)
}

fn method(plan: &Plan, devices: usize) -> Method {
    Method {
        backend: plan.run.backend.name().into(),
        ranks: plan.ranks,
        ranks_per_device: if plan.cuda { plan.ranks.div_ceil(devices.max(1)) } else { plan.ranks },
        processes: !plan.threads,
        iterations: plan.run.iterations,
        flush_from_tokens: plan.run.flush_from_tokens,
        seed: plan.run.seed,
    }
}

fn write(arguments: &Arguments, report: &Report, quiet: bool) -> Result<(), Failure> {
    let save = |path: &Path, text: &str| {
        std::fs::write(path, text).map_err(|error| format!("writing {}: {error}", path.display()))
    };
    let json = serde_json::to_string_pretty(report)?;
    match arguments.json.as_deref() {
        Some(_) if quiet => println!("{json}"),
        Some(path) => save(path, &(json + "\n"))?,
        None => {}
    }
    if let Some(path) = arguments.svg.as_deref() {
        save(path, &svg::draw(report)?)?;
    }
    if quiet {
        return Ok(());
    }
    tables::print(report);
    for note in report.drifted() {
        println!("drift: {note}");
    }
    let wrong = report.results.iter().filter(|e| matches!(e.outcome, Outcome::Wrong(_))).count();
    let failed = report.results.iter().filter(|e| matches!(e.outcome, Outcome::Failed(_))).count();
    if wrong + failed > 0 {
        let text = format!("{wrong} results are wrong, {failed} operations failed; they have no times");
        paint::verdict(false, "not verified:", &text);
    } else if !report.results.is_empty() {
        let timed = report.results.iter().filter(|e| matches!(e.outcome, Outcome::Timed(_))).count();
        let text = format!(
            "{timed} operations agree with the oracle in every bit, before and after they were timed"
        );
        paint::verdict(true, "verified:", &text);
    }
    Ok(())
}

fn progress_bar(quiet: bool, steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    if quiet || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} rank-operations, {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
