//! Curves of a run, as SVG.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::plan::{Layout, Operation, Precision, Setting};
use super::report::{Outcome, Report};

const PANEL: (u32, u32) = (430, 320);

/// One curve: a label, and points of (x, median, bound).
struct Curve {
    label: String,
    colour: RGBColor,
    points: Vec<(f64, f64, Option<f64>)>,
}

/// The same for an element type and a layout everywhere; curves that differ in something else are lighter.
fn colour(setting: &Setting, lighter: usize) -> RGBColor {
    let [r, g, b] = match (setting.dtype, setting.layout) {
        (Precision::Fp8, Layout::Plain) => [0x1f, 0x5f, 0xb4],
        (Precision::Fp8, Layout::Expanded) => [0x1b, 0x8a, 0x5a],
        (Precision::Bf16, Layout::Plain) => [0xc4, 0x3c, 0x2c],
        (Precision::Bf16, Layout::Expanded) => [0x7d, 0x3c, 0x98],
    };
    let share = 1.0 - 1.0 / (1.0 + 0.35 * lighter as f64);
    let mix = |c: u8| (f64::from(c) + (255.0 - f64::from(c)) * share) as u8;
    RGBColor(mix(r), mix(g), mix(b))
}

/// Curves with the same axes.
struct Panel {
    title: String,
    axis: &'static str,
    curves: Vec<Curve>,
}

/// Draws a report: for each shape and routing a panel for each operation, time over tokens, and over multiprocessors where these vary. The
/// least possible time is dashed.
///
/// # Errors
/// Those of the drawing library.
pub fn draw(report: &Report) -> Result<String, Box<dyn Error + Send + Sync>> {
    let panels = panels(report);
    let columns = panels.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let rows = panels.len().max(1);
    let mut text = String::new();
    {
        let size = (PANEL.0 * columns as u32, PANEL.1 * rows as u32 + 30);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE).map_err(|e| e.to_string())?;
        let machine = match report.machine.devices.first() {
            Some(device) => format!("{} × {}", report.machine.devices.len(), device.name),
            None => format!("host backend, no GPU ({})", report.machine.host),
        };
        let title = format!("deepep bench, {}, {} ranks, {machine}", report.date, report.method.ranks);
        let area = area.titled(&title, ("sans-serif", 16)).map_err(|e| e.to_string())?;
        let places = area.split_evenly((rows, columns));
        for (row, places) in panels.iter().zip(places.chunks(columns)) {
            row.iter().zip(places).try_for_each(|(panel, place)| draw_panel(panel, place))?;
        }
        area.present().map_err(|e| e.to_string())?;
    }
    Ok(text)
}

/// A row for each shape and routing, and another where multiprocessors vary.
fn panels(report: &Report) -> Vec<Vec<Panel>> {
    let mut rows: Vec<Vec<Panel>> = Vec::new();
    let mut groups: Vec<Setting> = Vec::new();
    for entry in &report.results {
        let same = |s: &&Setting| (s.shape, s.routing) == (entry.setting.shape, entry.setting.routing);
        if groups.iter().find(same).is_none() {
            groups.push(entry.setting);
        }
    }
    for group in groups {
        let (mut over_tokens, mut over_sms) = (Vec::new(), Vec::new());
        for operation in Operation::ALL {
            let of_group = |s: &Setting| (s.shape, s.routing) == (group.shape, group.routing);
            let timed: Vec<(&Setting, f64, Option<f64>)> = report
                .results
                .iter()
                .filter(|e| of_group(&e.setting) && e.operation == operation)
                .filter_map(|e| match &e.outcome {
                    Outcome::Timed(times) => Some((&e.setting, times.end_to_end_us.p50, times.bound_us)),
                    _ => None,
                })
                .collect();
            let by_tokens =
                curves(&timed, |s| s.tokens as f64, |s| format!("{} {}{}", s.dtype, s.layout, sms(s)));
            let by_sms = curves(
                &timed,
                |s| s.sms.unwrap_or(0) as f64,
                |s| format!("{} {} T={}", s.dtype, s.layout, s.tokens),
            );
            let title = format!("{operation}: {}, {}", group.shape, group.routing);
            if !by_tokens.is_empty() {
                over_tokens.push(Panel { title: title.clone(), axis: "tokens of a rank", curves: by_tokens });
            }
            let by_sms: Vec<Curve> = by_sms
                .into_iter()
                .map(|c| Curve { points: c.points.into_iter().filter(|p| p.0 > 0.0).collect(), ..c })
                .filter(|c| c.points.len() > 1)
                .collect();
            if !by_sms.is_empty() {
                over_sms.push(Panel { title, axis: "multiprocessors", curves: by_sms });
            }
        }
        rows.extend([over_tokens, over_sms].into_iter().filter(|row| !row.is_empty()));
    }
    rows
}

fn sms(setting: &Setting) -> String {
    setting.sms.map_or(String::new(), |sms| format!(" {sms} SMs"))
}

fn curves(
    timed: &[(&Setting, f64, Option<f64>)],
    x: impl Fn(&Setting) -> f64,
    label: impl Fn(&Setting) -> String,
) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for (setting, median, bound) in timed {
        let label = label(setting);
        let point = (x(setting), *median, *bound);
        match curves.iter_mut().find(|curve| curve.label == label) {
            Some(curve) => curve.points.push(point),
            None => {
                let taken = |n: &usize| curves.iter().any(|c| c.colour == colour(setting, *n));
                let colour = colour(setting, (0..).take_while(taken).count());
                curves.push(Curve { label, colour, points: vec![point] });
            }
        }
    }
    for curve in &mut curves {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

fn draw_panel(
    panel: &Panel,
    place: &DrawingArea<SVGBackend<'_>, Shift>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let span = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values.fold((f64::MAX, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
        (low.max(1e-3) / 1.3)..(high.max(1e-3) * 1.6)
    };
    let xs = span(&mut points().map(|p| p.0));
    let ys = span(&mut points().flat_map(|p| [Some(p.1), p.2]).flatten());
    let mut chart = ChartBuilder::on(place)
        .caption(&panel.title, ("sans-serif", 11))
        .margin(8)
        .x_label_area_size(32)
        .y_label_area_size(48)
        .build_cartesian_2d(xs.log_scale(), ys.log_scale())
        .map_err(|e| e.to_string())?;
    chart
        .configure_mesh()
        .x_desc(panel.axis)
        .y_desc("µs")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| if *y < 10.0 { format!("{y:.1}") } else { format!("{y:.0}") })
        .label_style(("sans-serif", 10))
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(|e| e.to_string())?;
    for curve in &panel.curves {
        let colour = curve.colour;
        let line: Vec<(f64, f64)> = curve.points.iter().map(|p| (p.0, p.1)).collect();
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)).point_size(2))
            .map_err(|e| e.to_string())?
            .label(&curve.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        let bound: Vec<(f64, f64)> = curve.points.iter().filter_map(|p| Some((p.0, p.2?))).collect();
        chart
            .draw_series(DashedLineSeries::new(bound, 4, 4, colour.stroke_width(1)))
            .map_err(|e| e.to_string())?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 9))
        .background_style(WHITE.mix(0.7))
        .draw()
        .map_err(|e| e.to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::machine::Machine;
    use crate::bench::plan::{Layout, Precision, Routes, Shape};
    use crate::bench::report::{Entry, Method, SCHEMA, Times};
    use crate::bench::stats::Quantiles;
    use crate::routing::Pattern;

    fn entry(tokens: usize, sms: Option<usize>, outcome: Outcome) -> Entry {
        let shape = Shape { hidden: 7168, topk: 8, experts: 256 };
        let routing = Routes::Pattern(Pattern::Uniform);
        let (dtype, layout) = (Precision::Fp8, Layout::Plain);
        let setting = Setting { shape, routing, tokens, dtype, layout, sms };
        Entry { setting, operation: Operation::Dispatch, outcome }
    }

    fn timed(median: f64) -> Outcome {
        Outcome::Timed(Box::new(Times {
            end_to_end_us: Quantiles { p10: median, p50: median, p90: median },
            kernel_us: None,
            host_wall_us: None,
            host_cpu_us: None,
            chained_us: None,
            wire_bytes: 1,
            wire_gb_per_second: 1.0,
            of_link: None,
            of_copy_engine: None,
            bound_us: Some(median / 2.0),
            times_bound: Some(2.0),
            packet_exchange_us: None,
            times_packet_exchange: None,
            symmetric_bytes: 1,
        }))
    }

    fn report(results: Vec<Entry>) -> Report {
        Report {
            schema: SCHEMA,
            date: "2026-11-30T00:00:00Z".into(),
            command: "deepep bench".into(),
            machine: Machine::default(),
            method: Method {
                backend: "host".into(),
                ranks: 2,
                ranks_per_device: 1,
                processes: true,
                iterations: 1,
                flush_from_tokens: 512,
                alignment: 1,
                early_launch: false,
                packets: false,
                seed: 1,
            },
            notes: vec![],
            ceilings: vec![],
            drift: vec![],
            results,
        }
    }

    #[test]
    fn curves_that_were_timed_are_drawn_and_others_are_not() {
        let drawn = draw(&report(vec![
            entry(1, None, timed(10.0)),
            entry(128, None, timed(20.0)),
            entry(4096, None, Outcome::Wrong("row 1".into())),
            entry(128, Some(8), timed(30.0)),
            entry(128, Some(16), timed(25.0)),
        ]))
        .unwrap();
        assert!(drawn.starts_with("<svg ") && drawn.trim_end().ends_with("</svg>"), "{drawn}");
        for text in ["FP8 plain", "FP8 plain 8 SMs", "FP8 plain T=128", "multiprocessors", "tokens of a rank"]
        {
            assert!(drawn.contains(text), "{text}");
        }
        assert!(!drawn.contains("combine"), "nothing was measured there");
        let without_wrong = draw(&report(vec![
            entry(1, None, timed(10.0)),
            entry(128, None, timed(20.0)),
            entry(128, Some(8), timed(30.0)),
            entry(128, Some(16), timed(25.0)),
        ]))
        .unwrap();
        assert_eq!(drawn, without_wrong, "a wrong result leaves no trace");
    }

    #[test]
    fn a_report_without_times_is_an_empty_picture() {
        let drawn = draw(&report(vec![entry(1, None, Outcome::Failed("x".into()))])).unwrap();
        assert!(drawn.starts_with("<svg ") && drawn.contains("deepep bench"));
    }
}
