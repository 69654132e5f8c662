//! The program as its users see it: output, exit codes, broken input.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn deepep(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_deepep"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("starting deepep")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// The last line of the output of a run that must succeed.
fn verdict(arguments: &[&str]) -> String {
    let output = deepep(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
    assert!(!out.contains('\u{1b}'), "no colours into a pipe: {out:?}");
    out.lines().last().unwrap_or_default().to_owned()
}

const SMALL: &[&str] =
    &["run", "--backend", "host", "--tokens", "40", "--hidden", "128", "--experts", "16", "--topk", "4"];

fn small<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [SMALL, more].concat()
}

#[test]
fn run_ends_with_verified() {
    for more in [
        &["--ranks", "3", "--experts", "12"][..],
        &["--ranks", "1"],
        &["--ranks", "8", "--routing", "zipf:2"],
        &["--threads", "--routing", "masked:0.5", "--expanded", "16", "--zero-padding"],
        &["--dtype", "fp8", "--packed-scales", "--column-scales", "--cached"],
        &["--dtype", "fp16", "--without-counts", "--narrow-ids", "--no-weights", "--biases", "2"],
        &["--expanded", "--reduction", "at-source", "--routing", "idle:1", "--rounds", "1"],
        &["--pull", "--routing", "masked:0.5", "--cached"],
        &["--pull", "--dtype", "fp8", "--without-counts", "--routing", "hot"],
    ] {
        // A later value of an option wins over an earlier one only if it is given once: leave out what is repeated.
        let mut arguments = small(more);
        if more.contains(&"--experts") {
            arguments = arguments
                .into_iter()
                .enumerate()
                .filter(|(i, _)| !(7..9).contains(i))
                .map(|(_, a)| a)
                .collect();
        }
        let last = verdict(&arguments);
        assert!(last.starts_with("verified: "), "{arguments:?}: {last}");
    }
}

#[test]
fn run_as_json() {
    let last = verdict(&small(&["--ranks", "2", "--json"]));
    let value: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(value["verified"], true);
    assert_eq!(value["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(value["ranks"][1]["verified"]["tokens"], 40);
    assert_eq!(value["ranks"][0]["verified"]["backend"], "host");
}

fn trace(name: &str, lines: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, lines.join("\n")).unwrap();
    (folder, path)
}

const META: &str = r#"{"type":"meta","top_k":2,"num_experts":6,"hidden":64}"#;

#[test]
fn traces_are_replayed() {
    let lines = [
        META,
        r#"{"type":"route","layer":0,"topk_ids":[0,5],"topk_weights":[0.5,0.25]}"#,
        r#"{"type":"route","layer":0,"topk_ids":[3,-1],"topk_weights":[0.5,0.0]}"#,
        r#"{"type":"route","layer":0,"topk_ids":[4,1],"topk_weights":[0.125,0.25]}"#,
    ];
    let (_folder, path) = trace("t.jsonl", &lines);
    // Six experts on four ranks are padded to eight.
    let output = deepep(&["run", "--backend", "host", "--ranks", "4", "--trace", path.to_str().unwrap()]);
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}");
    assert!(out.contains("6 experts are padded to 8"), "{out}");
    assert!(out.lines().last().unwrap().contains("3 tokens, 5 rows"), "{out}");
}

#[test]
fn broken_traces_are_named_by_line() {
    let lines = [META, r#"{"type":"route","topk_ids":[0,5]}"#, r#"{"type":"route","topk_ids":[0,6]}"#];
    let (_folder, path) = trace("broken.jsonl", &lines);
    let output = deepep(&["run", "--trace", path.to_str().unwrap()]);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("broken.jsonl, line 3: expert 6 is not in -1..6"), "{err}");
    let output = deepep(&["run", "--trace", "/there/is/no/such.jsonl"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("reading /there/is/no/such.jsonl"));
}

/// The largest number.
const MOST: &str = "18446744073709551615";

#[test]
fn settings_that_can_not_work_are_errors() {
    for (arguments, expected) in [
        (vec!["run", "--experts", "10", "--ranks", "4"], "--experts 10: must be a multiple of the 4 ranks"),
        (vec!["run", "--topk", "9", "--experts", "8"], "--topk 9: there are 8 experts"),
        (vec!["run", "--topk", "40"], "topk = 40: must be 1 to 32"),
        (vec!["run", "--hidden", "30"], "row_bytes = 60: must be a multiple of 16"),
        (vec!["run", "--routing", "wild"], "expected uniform, zipf"),
        (vec!["run", "--routing", "idle:7"], "--routing idle:7: there are 4 ranks"),
        (vec!["run", "--ranks", "9"], "9 is not in 1..=8"),
        (vec!["run", "--pull", "--expanded"], "'--pull' cannot be used with '--expanded"),
        (vec!["run", "--timeout=-1"], "'-1' for '--timeout <SECONDS>': must be more than 0"),
        (vec!["run", "--timeout", "0"], "'0' for '--timeout <SECONDS>': must be more than 0"),
        (vec!["run", "--timeout", "1e19"], "at most 86400 seconds"),
        (vec!["run", "--rounds", "0"], "'0' for '--rounds <ROUNDS>'"),
        (vec!["run", "--rounds", MOST], "for '--rounds <ROUNDS>'"),
        (vec!["run", "--experts", MOST], "experts = 18446744073709551615: must be"),
        (vec!["run", "--experts", "18446744073709551608"], "experts = 18446744073709551608: must be"),
        (vec!["run", "--packed-scales"], "--packed-scales: BF16 rows have no scales"),
        (vec!["run", "--column-scales", "--dtype", "fp16"], "--column-scales: F16 rows have no scales"),
        (vec!["run", "--reduction", "at-source"], "--expanded"),
        (vec!["run", "--reduction", "at-source", "--pull"], "cannot be used with '--pull'"),
        (vec!["run", "--zero-padding", "--pull"], "cannot be used with"),
        (vec!["plan", "--expanded", "0"], "expert_alignment = 0"),
    ] {
        let output = deepep(&arguments);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}

#[test]
fn traces_with_numbers_out_of_range_are_errors() {
    let meta = META.replace("\"num_experts\":6", &format!("\"num_experts\":{MOST}"));
    let id = i64::MAX.to_string();
    for (lines, expected) in [
        ([&meta[..], r#"{"type":"route","topk_ids":[0,5]}"#], "is not in -1..18446744073709551615"),
        (
            [r#"{"type":"meta","top_k":2}"#, &format!(r#"{{"type":"route","topk_ids":[0,{id}]}}"#)],
            "experts = 9223372036854775808: must be",
        ),
    ] {
        let (_folder, path) = trace("t.jsonl", &lines);
        for command in [&["run", "--ranks", "4"][..], &["bench", "--backend", "host"]] {
            let output = deepep(&[command, &["--trace", path.to_str().unwrap()]].concat());
            let err = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{command:?}: {err}");
            assert!(err.contains(expected), "{command:?}: {err}");
        }
    }
}

#[test]
fn small_batches_have_room_for_packets() {
    let packets = |arguments: &[&str]| {
        let output = deepep(&[&["plan", "--json"], arguments].concat());
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let items = plan["items"].as_array().unwrap();
        items.iter().find(|item| item["feature"] == "packets").unwrap()["bytes"].as_u64().unwrap()
    };
    for with in [&["--tokens", "256"][..], &["--tokens", "256", "--expanded"]] {
        assert!(packets(with) > 256 * 4096, "{with:?}");
    }
    // The last: what travels in packets can't be pulled.
    for without in
        [&["--tokens", "257"][..], &["--tokens", "8", "--no-packets"], &["--tokens", "8", "--pull"]]
    {
        assert_eq!(packets(without), 0, "{without:?}");
    }
}

#[test]
fn plan_adds_up() {
    let output = deepep(&["plan", "--json", "--ranks", "8", "--tokens", "4096", "--expanded"]);
    let value: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let items = value["items"].as_array().unwrap();
    let sum: u64 = items.iter().map(|item| item["bytes"].as_u64().unwrap()).sum();
    assert_eq!(Some(sum), value["total"].as_u64());
    let out = text(&deepep(&["plan"]).stdout);
    assert!(out.contains("dispatch results") && out.contains("combine receive area"), "{out}");
}

#[test]
fn doctor_finds_the_main_job_ready() {
    let output = deepep(&["doctor", "--json"]);
    let value: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    assert!(output.status.success(), "{value:#}");
    assert_eq!(value["ready"], true);
    for finding in value["findings"].as_array().unwrap() {
        let no = finding["state"] == "no";
        let remedy = finding["remedy"].as_str().is_some_and(|text| !text.is_empty());
        assert_eq!(no, remedy, "each \"no\" has a remedy: {finding}");
    }
    let out = text(&deepep(&["doctor"]).stdout);
    assert!(out.contains("main job\n  yes dispatch and combine on 2 ranks"), "{out}");
}

/// Nobody measures CPUs for GPUs without being told.
#[test]
fn who_falls_back_to_cpus_says_why() {
    let run: Vec<&str> = small(&["--ranks", "1", "--rounds", "1", "--json"]);
    // Without `--backend host`, which asks for CPUs.
    let chosen: Vec<&str> =
        run.iter().copied().filter(|word| !["--backend", "host"].contains(word)).collect();
    let notes = |arguments: &[&str]| {
        let value: Value = serde_json::from_str(&verdict(arguments)).unwrap();
        let notes = value["notes"].as_array().unwrap().clone();
        notes.iter().filter_map(|note| note.as_str()).collect::<Vec<_>>().join("\n")
    };
    assert!(!notes(&run).contains("emulated"), "it was asked for");
    let doctor = text(&deepep(&["doctor"]).stdout);
    match deepep_core::BackendKind::Cuda.resolve() {
        Err(why) => {
            assert!(notes(&chosen).contains(&format!("ranks are emulated on CPUs: {why}")));
            assert!(
                doctor.contains("host backend, ") && doctor.contains(&format!("since {why}")),
                "{doctor}"
            );
        }
        Ok(_) => assert!(!notes(&chosen).contains("emulated") && doctor.contains("cuda backend, ")),
    }
}

/// A rank that dies takes the run down with an error that names it, in time, and no process stays behind.
#[test]
fn a_rank_that_dies_is_reported() {
    let out = run_with_signal(rustix::process::Signal::KILL);
    assert!(out.contains("rank 2: the rank ended with signal: 9"), "{out}");
}

/// So does one that hangs, which is killed.
#[test]
fn a_rank_that_hangs_is_killed() {
    let out = run_with_signal(rustix::process::Signal::STOP);
    assert!(out.contains("rank 2: the rank did not end in time and was killed"), "{out}");
}

/// What a run says whose rank 2 gets a signal. All its processes are gone.
fn run_with_signal(signal: rustix::process::Signal) -> String {
    let mut run = Command::new(env!("CARGO_BIN_EXE_deepep"))
        .args(small(&["--ranks", "4", "--rounds", "1000000", "--timeout", "1.5"]))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let children = |parent: u32| -> Vec<i32> {
        let path = format!("/proc/{parent}/task/{parent}/children");
        let list = std::fs::read_to_string(path).unwrap_or_default();
        list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    };
    let end = Instant::now() + Duration::from_secs(30);
    while children(run.id()).len() < 4 {
        assert!(Instant::now() < end, "the ranks did not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(500));
    let ranks = children(run.id());
    let victim = rustix::process::Pid::from_raw(ranks[2]).unwrap();
    rustix::process::kill_process(victim, signal).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while run.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "the run did not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = run.wait_with_output().unwrap();
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{out}");
    assert!(out.contains("not verified: "), "{out}");
    assert!(out.contains("for rank 2"), "the others name it: {out}");
    for rank in ranks {
        let gone = !PathBuf::from(format!("/proc/{rank}")).exists();
        assert!(gone, "process {rank} is still there");
    }
    out
}
