//! `deepep bench`: how fast, compared with what the hardware can do at most.

mod arguments;
mod devices;
mod tables;

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use deepep_cli::bench::ceilings::{Board, Ceiling, Extent, drifts};
use deepep_cli::bench::machine::{Machine, now};
use deepep_cli::bench::plan::Setting;
use deepep_cli::bench::report::{Entry, Method, Outcome, Part, Report, SCHEMA};
use deepep_cli::bench::svg;
use indicatif::ProgressBar;

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
    let files = arguments.json.iter().filter(|path| *path != Path::new("-")).chain(&arguments.svg);
    files.map(PathBuf::as_path).try_for_each(writable)?;
    let date = now();
    let quiet = arguments.json.as_deref() == Some(Path::new("-"));
    let mut notes = plan.notes.clone();
    let board = match (&plan.ceilings, devices.cuda) {
        (Some(_), Some(cuda)) => Board::new(cuda, &devices.ordinals(), CEILING_BYTES).map(Some),
        _ => Ok(None),
    };
    let board = match board {
        Err(error) if arguments.ceilings_only => return Err(error.into()),
        Err(error) => {
            notes.push(format!("there are no ceilings to compare with: {error}"));
            None
        }
        Ok(board) => board,
    };
    let measure = |extent: &Option<Extent>, notes: &mut Vec<String>| match (&board, extent) {
        (Some(board), Some(extent)) => board.measure(extent, notes),
        _ => Ok(Vec::new()),
    };
    let ceilings = match measure(&plan.ceilings, &mut notes) {
        Err(error) if arguments.ceilings_only => return Err(error.into()),
        Err(error) => {
            notes.push(format!("there are no ceilings to compare with: {error}"));
            Vec::new()
        }
        Ok(ceilings) => ceilings,
    };
    // A part of them, to see whether they drift.
    let again = plan.ceilings.clone().map(|extent| Extent { sms: vec![32], samples: 5, ..extent });
    if !quiet {
        notes.iter().for_each(|note| println!("note: {note}"));
    }
    let steps: usize = plan.sections.iter().map(|s| operations(&plan, s) * plan.ranks).sum();
    let bar = paint::progress(quiet, steps, "rank-operations");
    let mut report = Report {
        schema: SCHEMA,
        date,
        command: std::iter::once("deepep".to_owned())
            .chain(std::env::args().skip(1))
            .collect::<Vec<_>>()
            .join(" "),
        machine: Machine::find(plan.cuda),
        method: method(&plan, devices.usable()),
        notes,
        ceilings,
        drift: Vec::new(),
        results: Vec::new(),
    };
    let mut later = Vec::new();
    for (number, section) in plan.sections.iter().enumerate() {
        let measured = measure_section(&plan, number, section, &report.ceilings, devices.usable(), &bar)?;
        report.results.extend(measured);
        match measure(&again, &mut report.notes) {
            Ok(ceilings) => later.push(ceilings),
            Err(error) => report.notes.push(format!("ceilings were not found again: {error}")),
        }
        report.drift = drifts(&report.ceilings, &later);
        report.machine = Machine::find(plan.cuda);
        // A run that is killed leaves what it has.
        save(arguments, &report, quiet)?;
        if bar.is_hidden() && !quiet {
            let (parts, seconds) = (plan.sections.len(), bar.elapsed().as_secs());
            eprintln!("part {} of {parts} measured, {seconds} s", number + 1);
        }
    }
    bar.finish_and_clear();
    save(arguments, &report, quiet)?;
    show(&report, quiet)?;
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
        let silence = workers::silence(timeout, plan.run.iterations);
        let progress = |n| bar.inc(n as u64);
        workers::processes(ranks, &more, timeout, silence, &progress, |_: &Vec<Part>| true)?
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
            let outcome = Outcome::of(setting, operation, &of_ranks, ceilings, shared);
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
        alignment: plan.run.alignment,
        early_launch: plan.run.early_launch,
        packets: plan.run.packets,
        seed: plan.run.seed,
    }
}

/// Says now if a file can't be written once there is something to write. What is in it stays.
fn writable(path: &Path) -> Result<(), String> {
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).map_err(|error| unwritable(path, &error))
}

fn unwritable(path: &Path, error: &std::io::Error) -> String {
    format!("writing {}: {error}", path.display())
}

/// Writes the files that were asked for.
fn save(arguments: &Arguments, report: &Report, quiet: bool) -> Result<(), Failure> {
    let write =
        |path: &Path, text: &str| std::fs::write(path, text).map_err(|error| unwritable(path, &error));
    if let Some(path) = arguments.json.as_deref().filter(|_| !quiet) {
        write(path, &(serde_json::to_string_pretty(report)? + "\n"))?;
    }
    if let Some(path) = arguments.svg.as_deref() {
        write(path, &svg::draw(report)?)?;
    }
    Ok(())
}

/// Prints tables, or everything as JSON.
fn show(report: &Report, quiet: bool) -> Result<(), Failure> {
    if quiet {
        println!("{}", serde_json::to_string_pretty(report)?);
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
