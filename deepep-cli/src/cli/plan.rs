//! `deepep plan`: what a buffer costs.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::settings::Settings;
use super::{Failure, paint};

/// Arguments of `deepep plan`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (job, notes) = arguments.settings.job()?;
    let plan = job.config().plan(job.group.ranks)?;
    if arguments.json {
        let items: Vec<_> = plan
            .items
            .iter()
            .map(|i| json!({ "feature": i.feature, "formula": i.formula, "bytes": i.bytes }))
            .collect();
        println!("{}", json!({ "items": items, "total": plan.total, "host": plan.host, "notes": notes }));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows: Vec<_> = plan
        .items
        .iter()
        .map(|i| vec![i.feature.into(), paint::thousands(i.bytes), paint::bytes(i.bytes), i.formula.clone()])
        .collect();
    let total =
        |name: &str, n, what: &str| vec![name.into(), paint::thousands(n), paint::bytes(n), what.into()];
    rows.push(total("total", plan.total, "symmetric memory on each rank"));
    rows.push(total("status block", plan.host, "host memory on each rank"));
    let mut table = paint::table(&["feature", "bytes", "", "how"], &rows);
    if let Some(column) = table.column_mut(3) {
        column.set_cell_alignment(comfy_table::CellAlignment::Left);
    }
    for note in notes {
        println!("note: {note}");
    }
    println!("{table}");
    Ok(ExitCode::SUCCESS)
}
