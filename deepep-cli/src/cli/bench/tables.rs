//! A report as tables.

use comfy_table::CellAlignment;
use deepep_cli::bench::ceilings::Ceiling;
use deepep_cli::bench::report::{Entry, Outcome, Report};

use super::super::paint;

pub(super) fn print(report: &Report) {
    ceilings(&report.ceilings);
    for group in report
        .results
        .chunk_by(|a, b| (a.setting.shape, a.setting.routing) == (b.setting.shape, b.setting.routing))
    {
        results(group);
    }
}

/// Kinds, tokens and rows of bytes down, multiprocessors across.
pub(super) fn ceilings(all: &[Ceiling]) {
    if all.is_empty() {
        return;
    }
    paint::heading("ceilings of this run");
    let mut sms: Vec<u32> = all.iter().filter_map(|c| c.sms).collect();
    sms.sort_unstable();
    sms.dedup();
    let mut header = vec!["what".to_owned(), "row".into(), String::new(), "".into()];
    header.extend(sms.iter().map(|sms| format!("{sms} SMs")));
    let rows: Vec<Vec<String>> = all
        .chunk_by(|a, b| (a.kind, a.row_bytes, a.tokens) == (b.kind, b.row_bytes, b.tokens))
        .map(|group| {
            let first = group[0];
            let value = |c: &Ceiling| {
                if c.value < 100.0 { format!("{:.2}", c.value) } else { format!("{:.1}", c.value) }
            };
            let row = first.row_bytes.map_or(String::new(), |bytes| format!("{bytes} B"));
            let alone = group.iter().find(|c| c.sms.is_none()).map(value).unwrap_or_default();
            let mut cells = vec![first.name(), row, first.kind.unit().into(), alone];
            for &n in &sms {
                cells.push(group.iter().find(|c| c.sms == Some(n)).map(value).unwrap_or_default());
            }
            cells
        })
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    println!("{}\n", paint::table(&header, &rows));
}

fn results(group: &[Entry]) {
    let Some(first) = group.first() else { return };
    paint::heading(&format!("{}; routing: {}", first.setting.shape, first.setting.routing));
    let header = [
        "operation",
        "T",
        "dtype",
        "layout",
        "SMs",
        "µs",
        "p10–p90",
        "kernel",
        "host",
        "CPU",
        "chained",
        "GB/s",
        "of link",
        "of copies",
        "bound",
        "× bound",
        "× packets",
        "heap",
    ];
    let optional = |x: Option<f64>| x.map_or("–".to_owned(), |x| format!("{x:.1}"));
    let ratio = |x: Option<f64>| x.map_or("–".to_owned(), |x| format!("{x:.2}"));
    let mut notes: Vec<String> = Vec::new();
    // A number to look the reason up by.
    let mut note = |word: &str, what: &String| {
        let at = notes.iter().position(|known| known == what).unwrap_or_else(|| {
            notes.push(what.clone());
            notes.len() - 1
        });
        format!("{word} [{}]", at + 1)
    };
    let rows: Vec<Vec<String>> = group
        .iter()
        .map(|entry| {
            let setting = entry.setting;
            let mut cells = vec![
                entry.operation.to_string(),
                setting.tokens.to_string(),
                setting.dtype.to_string(),
                setting.layout.to_string(),
                setting.sms.map_or("–".into(), |sms| sms.to_string()),
            ];
            match &entry.outcome {
                Outcome::Timed(t) => cells.extend([
                    format!("{:.1}", t.end_to_end_us.p50),
                    format!("{:.1}–{:.1}", t.end_to_end_us.p10, t.end_to_end_us.p90),
                    optional(t.kernel_us),
                    optional(t.host_wall_us.map(|host| host.p50)),
                    optional(t.host_cpu_us.map(|host| host.p50)),
                    optional(t.chained_us),
                    format!("{:.2}", t.wire_gb_per_second),
                    ratio(t.of_link),
                    ratio(t.of_copy_engine),
                    optional(t.bound_us),
                    ratio(t.times_bound),
                    ratio(t.times_packet_exchange),
                    paint::bytes(t.symmetric_bytes as usize),
                ]),
                Outcome::Wrong(what) => cells.push(note("WRONG", what)),
                Outcome::Failed(what) => cells.push(note("failed", what)),
                Outcome::Skipped(what) => cells.push(note("skipped", what)),
            }
            cells
        })
        .collect();
    let mut table = paint::table(&header, &rows);
    for text in [2, 3] {
        if let Some(column) = table.column_mut(text) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
    println!("{table}");
    for (number, note) in notes.iter().enumerate() {
        println!("[{}] {note}", number + 1);
    }
    println!();
}
