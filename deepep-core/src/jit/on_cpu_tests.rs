//! The collectives' kernels, run on CPUs against an oracle: the sources as they are, with the files of `arch/` replaced by CPU versions of the
//! same functions. It is the only way in which this crate's tests run the kernels that use multicast: no test creates a multicast object
//! on a GPU.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{Collective, CollectiveKind, Element, Program};
use crate::layout::{CollectiveConfig, CollectiveLayout};

/// Threads of a block: enough to share out the work, few enough for a CPU.
const THREADS: usize = 8;
const SEEDS: u64 = 3;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/on_cpu")
}

fn compiler(test: &str) -> Option<&'static str> {
    let found = Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        // Past the test runner's capture of what passing tests print.
        writeln!(std::io::stderr(), "skipped: {test}: there is no g++").ok();
    }
    found.then_some("g++")
}

fn show(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr))
}

/// Compiles a program with g++ into a folder.
fn build(
    compiler: &str,
    program: Program,
    defines: &[String],
    change: &dyn Fn(&str, String) -> String,
) -> tempfile::TempDir {
    let build = tempfile::tempdir().unwrap();
    let put = |name: &str, text: String| {
        let path = build.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    for (name, text) in program.headers() {
        if !name.starts_with("arch/") {
            put(name, change(name, text));
        }
    }
    put("kernel.cu", program.source().to_owned());
    let output = Command::new(compiler)
        .args(["-std=c++20", "-O0", "-w", "-pthread", "-I"])
        .arg(build.path())
        .arg("-I")
        .arg(folder())
        .args(["-DKERNEL=\"kernel.cu\"", &format!("-DENTRY={}", program.entry())])
        .args(defines)
        .arg(folder().join("run.cpp"))
        .arg("-o")
        .arg(build.path().join("run"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{program:?}: {}", show(&output));
    build
}

fn run(build: &Path, layout: &CollectiveLayout, seed: u64) -> Output {
    let l = layout;
    let offsets = [
        l.bytes,
        l.workspace.abort,
        l.workspace.reported,
        l.flags,
        l.steps,
        l.epochs,
        l.calls,
        l.call_count,
        l.words,
        l.count,
        l.cells,
        l.stages,
        l.cell_count(),
        l.config.slice,
    ];
    let arguments = offsets.iter().map(usize::to_string);
    Command::new(build.join("run")).arg(seed.to_string()).args(arguments).output().unwrap()
}

fn layout(ranks: usize) -> CollectiveLayout {
    CollectiveLayout::new(CollectiveConfig { cell_bytes: 512, slice: 1024, ..CollectiveConfig::new(ranks) })
        .unwrap()
}

fn fewer_threads(name: &str, text: String) -> String {
    if name != "generated.cuh" {
        return text;
    }
    let (from, to) = (format!("THREADS = {};", super::THREADS), format!("THREADS = {THREADS};"));
    assert_eq!(text.matches(&from).count(), 1);
    text.replace(&from, &to)
}

fn defines(collective: &Collective) -> Vec<String> {
    let kind = match collective.kind {
        CollectiveKind::AllGather => "ALL_GATHER",
        CollectiveKind::ReduceScatter => "REDUCE_SCATTER",
        CollectiveKind::AllReduce => "ALL_REDUCE",
    };
    vec![format!("-DKIND={kind}")]
}

/// Every kind and way, with and without multicast; of the element types one, since they differ in their arithmetic only.
#[test]
fn kernels_of_collectives_give_the_oracles_bits_on_cpus() {
    let Some(compiler) = compiler("kernels_of_collectives_give_the_oracles_bits_on_cpus") else { return };
    let (ranks, element) = (3, Element::Bf16);
    let mut count = 0;
    for collective in Collective::all(ranks) {
        if collective.element != element && collective.kind != CollectiveKind::AllGather {
            continue;
        }
        let program = Program::Collective(collective);
        let build = build(compiler, program, &defines(&collective), &fewer_threads);
        for seed in 0..SEEDS {
            let output = run(build.path(), &layout(ranks), seed);
            assert!(output.status.success(), "{collective:?}, seed {seed}: {}", show(&output));
        }
        count += 1;
    }
    assert_eq!(count, 4 + 3 + 6);
}

/// A rank that calls something else is found out in every way, on every rank, and nobody waits for what won't come.
#[test]
fn different_calls_are_noticed_on_cpus() {
    let Some(compiler) = compiler("different_calls_are_noticed_on_cpus") else { return };
    let wanted = |c: &&Collective| c.element == Element::F32 && !c.multicast;
    let mut count = 0;
    for collective in Collective::all(3).iter().filter(wanted) {
        let mut defines = defines(collective);
        defines.push("-DDIFFER".into());
        let build = build(compiler, Program::Collective(*collective), &defines, &fewer_threads);
        let output = run(build.path(), &layout(3), 1);
        assert!(output.status.success(), "{collective:?}: {}", show(&output));
        count += 1;
    }
    assert_eq!(count, 7);
}

#[test]
fn the_multimem_barrier_holds_every_rank_on_cpus() {
    let Some(compiler) = compiler("the_multimem_barrier_holds_every_rank_on_cpus") else { return };
    let program = Program::MultimemBarrier { ranks: 3 };
    let build = build(compiler, program, &["-DBARRIER".to_owned()], &|_, text| text);
    let output = run(build.path(), &layout(3), 0);
    assert!(output.status.success(), "{}", show(&output));
}

#[test]
fn a_meeting_holds_every_rank_on_cpus() {
    let Some(compiler) = compiler("a_meeting_holds_every_rank_on_cpus") else { return };
    let build = build(compiler, Program::Meet { ranks: 3 }, &["-DMEET".to_owned()], &|_, text| text);
    let output = run(build.path(), &layout(3), 0);
    assert!(output.status.success(), "{}", show(&output));
}

/// The test sees what it is for: with two buffers, where four are needed, ranks overwrite what others still read.
#[test]
fn too_few_buffers_are_noticed() {
    let Some(compiler) = compiler("too_few_buffers_are_noticed") else { return };
    let all = Collective::all(3);
    let wanted = |c: &&Collective| {
        c.kind == CollectiveKind::AllReduce && c.way == super::Way::OneShot && c.element == Element::F32
    };
    let collective = all.iter().find(wanted).unwrap();
    let change = |name: &str, text: String| fewer_threads(name, text).replace("BUFFERS = 4;", "BUFFERS = 2;");
    let build = build(compiler, Program::Collective(*collective), &defines(collective), &change);
    let failures = (0..20).filter(|&seed| !run(build.path(), &layout(3), seed).status.success()).count();
    assert!(failures > 0);
}
