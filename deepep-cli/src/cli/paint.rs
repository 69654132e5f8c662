//! Colours and progress, on terminals only.

use std::io::IsTerminal;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use comfy_table::{Cell, CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const BAD: Style = AnsiColor::Red.on_default().bold();
const GOOD: Style = AnsiColor::Green.on_default().bold();

pub(super) fn error(message: &dyn std::fmt::Display) {
    anstream::eprintln!("{BAD}error:{BAD:#} {message}");
}

/// The last line of a run.
pub(super) fn verdict(good: bool, word: &str, rest: &str) {
    let style = if good { GOOD } else { BAD };
    anstream::println!("{style}{word}{style:#} {rest}");
}

/// What precedes a line of a report.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mark {
    Yes,
    No,
    Info,
}

/// A heading of a report.
pub(super) fn heading(text: &str) {
    let bold = Style::new().bold();
    anstream::println!("{bold}{text}{bold:#}");
}

/// A line of a report, and what to do about it.
pub(super) fn finding(mark: Mark, what: &str, detail: &str, remedy: Option<&str>) {
    let (style, word) = match mark {
        Mark::Yes => (AnsiColor::Green.on_default(), "yes"),
        Mark::No => (AnsiColor::Yellow.on_default(), "no "),
        Mark::Info => (Style::new(), "   "),
    };
    anstream::println!("  {style}{word}{style:#} {what}: {detail}");
    if let Some(remedy) = remedy {
        anstream::println!("        {remedy}");
    }
}

/// A bar over so many steps, with what they are.
pub(super) fn progress(quiet: bool, steps: usize, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    if quiet || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) =
        ProgressStyle::with_template(&format!("{{bar:30}} {{pos}}/{{len}} {what}, {{elapsed}}"))
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A table whose first column is text and whose others are numbers.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> Table {
    let mut table = text_table(header, rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A table of text.
pub(super) fn text_table(header: &[&str], rows: &[Vec<String>]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().map(Cell::new));
    for row in rows {
        table.add_row(row);
    }
    table
}

/// Bytes with a unit.
pub(super) fn bytes(n: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// 1234567 as 1,234,567.
pub(super) fn thousands(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(3 << 20), "3.0 MiB");
        assert_eq!(thousands(1), "1");
        assert_eq!(thousands(18818), "18,818");
        assert_eq!(thousands(1_000_000), "1,000,000");
    }
}
