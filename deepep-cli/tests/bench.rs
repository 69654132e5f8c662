//! `deepep bench` on the host backend: the whole harness, its report, and its refusal to time what is wrong.

mod fields;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use deepep_cli::bench::ceilings::Kind;
use deepep_cli::bench::plan::{Layout, Operation, Precision};
use deepep_cli::bench::report::{Outcome, Report, SCHEMA};
use serde_json::Value;

const SMALL: &[&str] =
    &["bench", "--backend", "host", "--shapes", "256,4,16", "--tokens", "5", "--iterations", "3"];

fn bench(more: &[&str]) -> Output {
    let arguments = [SMALL, more].concat();
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepep"));
    command.args(arguments).stdin(Stdio::null()).output().expect("starting deepep")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn json(more: &[&str]) -> (Option<i32>, Value, Report) {
    let output = bench(&[more, &["--json", "-"]].concat());
    let out = text(&output.stdout);
    let value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}\n{}", text(&output.stderr)));
    let report = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
    (output.status.code(), value, report)
}

#[test]
fn the_report_is_complete_and_consistent() {
    let (code, value, report) =
        json(&["--ranks", "4", "--shapes", "128,2,8", "--routings", "uniform,hot,idle:1"]);
    assert_eq!((code, report.schema), (Some(0), SCHEMA));
    assert_eq!(
        (report.method.backend.as_str(), report.method.ranks, report.method.iterations),
        ("host", 4, 3)
    );
    assert!(report.command.starts_with("deepep bench --backend host"), "{}", report.command);
    assert!(report.notes.iter().any(|note| note.contains("times of the host backend")), "{:?}", report.notes);
    assert!(report.ceilings.is_empty() && report.drift.is_empty());
    assert!(report.good());
    // Two shapes, three routings, two layouts; combine only with BF16.
    assert_eq!(report.results.len(), 2 * 3 * 2 * (4 + 5));
    for entry in &report.results {
        let times = match &entry.outcome {
            Outcome::Timed(times) => times,
            Outcome::Skipped(why) if entry.operation == Operation::Graph => {
                assert_eq!(why, "the host backend has no graphs");
                continue;
            }
            other => panic!("{:?}: {other:?}", entry.setting),
        };
        let t = times.end_to_end_us;
        assert!(t.p10 > 0.0 && t.p10 <= t.p50 && t.p50 <= t.p90, "{entry:?}");
        assert!((times.wire_gb_per_second - times.wire_bytes as f64 / t.p50 / 1e3).abs() < 1e-9);
        assert!(
            times.symmetric_bytes > 0
                && times.bound_us.is_none()
                && times.packet_exchange_us.is_none()
                && times.host_wall_us.is_none()
                && times.host_cpu_us.is_none()
        );
    }
    let known = fields::known();
    for field in fields::of(&value) {
        assert!(
            known.contains(&field.as_str()),
            "{field}: a changed form has a new SCHEMA, and bench-fields.txt"
        );
    }
}

/// The same harness where it is meant for.
#[test]
fn on_gpus() {
    let devices = cuda_vmm::Cuda::get().map_or(0, cuda_vmm::Cuda::device_count);
    if devices == 0 {
        assert!(std::env::var("REQUIRE_GPU").map_or(true, |v| v != "1"), "no CUDA device");
        std::io::stderr().write_all(b"\nskipped: bench on GPUs: no CUDA device\n").ok();
        return;
    }
    let arguments = ["bench", "--backend", "cuda", "--quick", "--tokens", "8,600", "--shapes", "1024,4,32"];
    let output = Command::new(env!("CARGO_BIN_EXE_deepep"))
        .args(arguments)
        .args(["--iterations", "3", "--json", "-"])
        .output()
        .unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    let report: Report = serde_json::from_str(&out).unwrap();
    assert_eq!(report.machine.devices.len(), devices as usize);
    let has = |kind: Kind| report.ceilings.iter().any(|c| c.kind == kind && c.value > 0.0);
    assert!(
        [Kind::LocalStores, Kind::LocalCopy, Kind::Launch, Kind::GraphLaunch].into_iter().all(has),
        "{out}"
    );
    assert_eq!(has(Kind::BulkStores), devices > 1);
    let exchanges = report.ceilings.iter().filter(|c| c.kind == Kind::PacketExchange && c.value > 0.0);
    let tokens: Vec<_> = exchanges.filter_map(|c| c.tokens).collect();
    assert_eq!(tokens, if devices > 1 { vec![1, 8, 32, 128] } else { vec![] });
    assert!(!report.drift.is_empty());
    assert_eq!(report.results.len(), 2 * 2 * (4 + 5));
    for entry in &report.results {
        let Outcome::Timed(times) = &entry.outcome else { panic!("{entry:?}") };
        let t = times.end_to_end_us;
        assert!(t.p10 > 1.0 && t.p90 < 1e6 && times.kernel_us.is_some(), "{entry:?}");
        let graph = entry.operation == Operation::Graph;
        assert_eq!((times.host_wall_us.is_some(), times.chained_us.is_some()), (!graph, !graph), "{entry:?}");
        assert_eq!(times.host_cpu_us.is_some(), !graph, "{entry:?}");
        let exchanged =
            graph && devices > 1 && entry.setting.dtype == Precision::Fp8 && entry.setting.tokens == 8;
        assert_eq!(times.times_packet_exchange.is_some(), exchanged, "{entry:?}");
    }
}

/// Rows that lie in the heap are read there; in the plain layout, and once for both element types.
#[test]
fn pulled_combines_are_timed_where_there_are_some() {
    let (code, _, report) = json(&["--ranks", "4", "--operations", "combine,pulled"]);
    assert_eq!(code, Some(0));
    let found: Vec<_> =
        report.results.iter().map(|e| (e.setting.layout, e.setting.dtype, e.operation)).collect();
    assert_eq!(
        found,
        [
            (Layout::Plain, Precision::Bf16, Operation::Combine),
            (Layout::Plain, Precision::Bf16, Operation::Pulled),
            (Layout::Expanded, Precision::Bf16, Operation::Combine),
        ]
    );
    let bytes = |entry: usize| match &report.results[entry].outcome {
        Outcome::Timed(times) => (times.wire_bytes, times.symmetric_bytes),
        other => panic!("{other:?}"),
    };
    assert_eq!(bytes(0), bytes(1));
}

/// Settings in which nothing is timed have no buffers, and an operation that is named twice is timed once.
#[test]
fn each_operation_is_timed_once() {
    let (code, _, report) = json(&["--operations", "combine,combine", "--no-early-launch"]);
    assert_eq!(code, Some(0));
    // Both are for kernels.
    assert!(!report.method.packets && !report.method.early_launch);
    let found = report.notes.iter().filter(|note| note.starts_with("--no-early-launch changes nothing"));
    assert_eq!(found.count(), 1, "{:?}", report.notes);
    let found: Vec<_> = report.results.iter().map(|e| (e.setting.layout, e.setting.dtype)).collect();
    assert_eq!(found, [(Layout::Plain, Precision::Bf16), (Layout::Expanded, Precision::Bf16)]);
}

#[test]
fn bytes_on_the_wire_are_those_of_the_routing() {
    // All tokens choose four experts of rank 0: rank 1 sends it 5 rows and gets none.
    let (_, _, report) =
        json(&["--ranks", "2", "--routings", "hot", "--operations", "dispatch,combine,pair"]);
    for entry in &report.results {
        let Outcome::Timed(times) = &entry.outcome else { panic!("{entry:?}") };
        let row = match entry.setting.dtype {
            Precision::Fp8 => 256 + 2 * 4,
            Precision::Bf16 => 512,
        };
        let expected = match entry.operation {
            Operation::Dispatch => 5 * row,
            Operation::Combine => 5 * 512,
            // One way the rows, the other way the sums: the busier way counts.
            Operation::Pair => 5 * 512,
            other => panic!("{other} was not asked for"),
        };
        assert_eq!(times.wire_bytes, expected, "{entry:?}");
    }
}

#[test]
fn wrong_results_have_no_times() {
    let late = &["--plant-late"][..];
    for (operations, rank, late, threads) in [
        ("dispatch,combine,pulled,pair", "1", &[][..], &[][..]),
        ("dispatch,combine,pulled,pair", "1", &[], &["--threads"]),
        ("dispatch,combine,pulled,pair", "1", late, &[]),
        ("dispatch,combine,pulled,pair", "1", late, &["--threads"]),
        ("pulled", "0", late, &[]),
        ("pulled", "1", &[], &["--threads"]),
    ] {
        let fault =
            [&["--ranks", "2", "--plant-fault", rank, "--operations", operations], late, threads].concat();
        let (code, value, report) = json(&fault);
        assert_eq!(code, Some(1), "{value:#}");
        assert!(!report.good());
        assert!(!report.results.is_empty());
        for entry in &report.results {
            assert!(matches!(entry.outcome, Outcome::Wrong(_)), "{entry:?}");
        }
        assert!(!value["results"].to_string().contains("_us"), "a time got out: {value:#}");
        let output = bench(&fault);
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1));
        assert!(out.lines().last().unwrap().starts_with("not verified: "), "{out}");
        assert!(out.contains("WRONG") && !out.contains("GB/s  0"), "{out}");
    }
}

#[test]
fn tables_say_what_they_are() {
    let output = bench(&["--dtypes", "bf16", "--layouts", "plain"]);
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{out}{}", text(&output.stderr));
    assert!(out.starts_with("note: these are times of the host backend"), "{out}");
    assert!(out.contains("nothing about GPUs"), "{out}");
    for text in [
        "hidden 256, top-4 of 16 experts; routing: uniform",
        "dispatch, cached",
        "combine",
        "skipped [1]",
        "× packets",
    ] {
        assert!(out.contains(text), "{text}: {out}");
    }
    assert!(!out.contains("packet exchange"), "ceilings are those of GPUs: {out}");
    assert!(out.lines().last().unwrap().starts_with("verified: 4 operations"), "{out}");
}

#[test]
fn files_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, svg) = (path("run.json"), path("run.svg"));
    let output = bench(&["--tokens", "2", "--json", &json, "--svg", &svg, "--threads"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Report = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert!(!report.method.processes);
    assert_eq!(report.results[0].setting.layout, Layout::Plain);
    let drawn = std::fs::read_to_string(&svg).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.contains("FP8 expanded"), "{drawn}");
    for option in ["--json", "--svg"] {
        let output = bench(&[option, "/no/such/folder/run"]);
        assert_eq!(output.status.code(), Some(2));
        let err = text(&output.stderr);
        assert!(err.contains("writing /no/such/folder/run: "), "{err}");
        assert!(output.stdout.is_empty(), "nothing has started: {}", text(&output.stdout));
    }
    // A run that can't start leaves what is in a file.
    let before = std::fs::read(&json).unwrap();
    let output = bench(&["--json", &json, "--svg", "/no/such/folder/run"]);
    assert_eq!((output.status.code(), std::fs::read(&json).unwrap()), (Some(2), before));
}

#[test]
fn a_trace_is_a_section_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.jsonl");
    let mut lines = vec![r#"{"type":"meta","top_k":2,"num_experts":6,"hidden":64}"#.to_owned()];
    lines.extend(
        (0..7).map(|i| format!(r#"{{"type":"route","layer":0,"topk_ids":[{},{}]}}"#, i % 6, (i + 3) % 6)),
    );
    std::fs::write(&path, lines.join("\n")).unwrap();
    let trace = ["--trace", path.to_str().unwrap(), "--ranks", "4", "--operations", "pair"];
    let (code, _, report) = json(&trace);
    assert_eq!(code, Some(0), "{report:?}");
    let last = report.results.last().unwrap();
    assert_eq!((last.setting.shape.hidden, last.setting.shape.experts, last.setting.tokens), (64, 8, 2));
    assert_eq!(last.setting.routing.to_string(), "trace");
    assert!(report.notes.iter().any(|note| note.contains("padded to 8")), "{:?}", report.notes);
}

#[test]
fn what_can_not_work_is_said_before_anything_starts() {
    for (more, expected) in [
        (&["--ranks", "3"][..], "16 experts are no multiple of 3 ranks"),
        (&["--shapes", "30,4,16"], "must be a multiple of 16"),
        (&["--shapes", "256,4"], "expected hidden,topk,experts"),
        (&["--routings", "idle:2"], "--routings idle:2: there are 2 ranks"),
        (&["--trace", "/no/such.jsonl"], "reading /no/such.jsonl"),
        (&["--timeout=-1"], "'-1' for '--timeout <SECONDS>': must be more than 0"),
        (&["--timeout", "1.8e19"], "at most 86400 seconds"),
        (&["--iterations", "0"], "'0' for '--iterations <ITERATIONS>'"),
        (&["--iterations", "18446744073709551615"], "for '--iterations <ITERATIONS>'"),
        (&["--alignment", "16", "--layouts", "plain"], "--alignment 16: only the expanded layout"),
        (&["--operations", "pulled", "--layouts", "expanded"], "nothing to time: rows are pulled in"),
        (&["--quick", "--full"], "cannot be used with"),
        (&["--operations", "sing"], "invalid value"),
    ] {
        // A later value of an option can't replace an earlier one: leave out what is repeated.
        let mut arguments: Vec<&str> = SMALL.to_vec();
        while let Some(at) = arguments.iter().position(|a| more.contains(a) && a.starts_with("--")) {
            arguments.drain(at..at + 2);
        }
        arguments.extend(more);
        let output = Command::new(env!("CARGO_BIN_EXE_deepep")).args(&arguments).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
    let driver = Command::new(env!("CARGO_BIN_EXE_deepep"))
        .args(["bench", "--backend", "cuda"])
        .env("CUDA_VMM_DRIVER", "/no/such/driver.so")
        .output()
        .unwrap();
    assert_eq!(driver.status.code(), Some(2));
    let err = text(&driver.stderr);
    assert!(err.contains("/no/such/driver.so"), "the cause: {err}");
    if !Path::new("/dev/nvidiactl").exists() {
        let output =
            Command::new(env!("CARGO_BIN_EXE_deepep")).args(["bench", "--backend", "cuda"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("--backend cuda: no CUDA driver"), "{}", text(&output.stderr));
    }
}
