//! The kernels of the ceilings, run on CPUs: the sources as they are, with CPU versions of the wrappers of instructions. What they move arrives,
//! between any number of devices, and what does not is noticed.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use deepep_cli::bench::ceilings::{
    Boxes, Deal, EPOCH_BLOCKS, Meeting, Ring, Room, Rows, Transfer, Way, source,
};

const BASE: u64 = 0x1000_0000_0000;
const STRIDE: u64 = 1 << 32;
const BYTES: u64 = 64 << 10;
const WORDS: u64 = 2 * BYTES;
/// Counters of exchanges behind the other words, as many as there can be.
const EPOCHS: u64 = 1024;
const WORDS_BYTES: u64 = EPOCHS + 2 * 4 * EPOCH_BLOCKS as u64;
const BLOCKS: u32 = 3;
/// Deadlines of kernels, in nanoseconds: one that is never reached, and one that is.
const LONG: u64 = 60_000_000_000;
const SHORT: u64 = 200_000_000;

fn arch() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deepep-core/tests/on_cpu")
}

/// The program that runs kernels, or why there is none.
fn program() -> Result<tempfile::TempDir, String> {
    if !arch().is_dir() {
        return Err("deepep-core's tests are not beside this package".into());
    }
    if !Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success()) {
        return Err("there is no g++".into());
    }
    let folder = tempfile::tempdir().unwrap();
    // Shared memory belongs to a block.
    let text = source()
        .replace("extern __shared__ Vec16 stages[];", "Vec16* const stages = (Vec16*)shared->stages;")
        .replace("__shared__ u64 bars[32];", "u64* const bars = shared->bars;");
    assert_eq!(text.matches("shared->").count(), 2, "both kinds of shared memory were found");
    std::fs::write(folder.path().join("kernels.cu"), text).unwrap();
    let output = Command::new("g++")
        .args(["-std=c++20", "-O1", "-w", "-pthread", "-DKERNELS=\"kernels.cu\"", "-I"])
        .arg(folder.path())
        .arg("-I")
        .arg(arch())
        // What is not replaced.
        .arg("-I")
        .arg(arch().join("../../kernels"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/on_cpu/run.cpp"))
        .arg("-o")
        .arg(folder.path().join("run"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(folder)
}

/// Devices' memory, and what they do.
struct Script {
    boxes: Boxes,
    text: String,
}

impl Script {
    fn new(devices: usize, timeout_ns: u64) -> Self {
        let of = |offset: u64| (0..devices as u64).map(|d| BASE + d * STRIDE + offset).collect();
        let (wrong, late, epochs) = (of(WORDS), of(WORDS + 8), of(WORDS + EPOCHS));
        let boxes =
            Boxes { inboxes: of(0), outboxes: of(BYTES), bytes: BYTES, wrong, late, epochs, timeout_ns };
        let mut script = Self { boxes, text: String::new() };
        for base in script.boxes.inboxes.clone() {
            script.say(format_args!("map {base} {}", WORDS + WORDS_BYTES));
            script.say(format_args!("zero {} {WORDS_BYTES}", base + WORDS));
        }
        script
    }

    fn devices(&self) -> usize {
        self.boxes.devices()
    }

    fn say(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").unwrap();
    }

    fn launch(&mut self, kernel: &str, [blocks, threads]: [u32; 2], parameters: &[Vec<u8>]) {
        let size = parameters.first().map_or(0, Vec::len);
        self.say(format_args!("{kernel} {blocks} {threads} {} {size}", parameters.len()));
        self.say(format_args!("{}", Numbers(parameters)));
    }

    /// On all devices at once.
    fn on_all(&mut self, kernel: &str, transfer: impl Fn(&Boxes, usize) -> Transfer) {
        let transfers: Vec<_> = (0..self.devices()).map(|d| bytes_of(&transfer(&self.boxes, d))).collect();
        self.launch(kernel, [BLOCKS, 32], &transfers);
    }

    fn check_peers(&mut self, rows: Rows) {
        for device in 0..self.devices() {
            let transfers: Vec<_> = self.boxes.check_peers(device, rows).iter().map(bytes_of).collect();
            self.launch("ceiling_check", [2, 32], &transfers);
        }
    }

    /// Fills or compares the parts of an exchange.
    fn on_parts(&mut self, kernel: &str, room: &Room, parts: fn(&Boxes, usize, &Way, u32) -> Vec<Transfer>) {
        for (device, way) in (0..self.devices()).flat_map(|d| room.ways.iter().map(move |way| (d, way))) {
            let transfers: Vec<_> = parts(&self.boxes, device, way, 3).iter().map(bytes_of).collect();
            self.launch(kernel, [1, 32], &transfers);
        }
    }

    /// Kernels of these ways take turns on the first devices.
    fn exchange(&mut self, turns: u32, devices: usize, ways: &[(Way, Deal)]) {
        let all: Vec<Vec<_>> = ways
            .iter()
            .map(|(way, deal)| (0..devices).map(|d| bytes_of(&self.boxes.exchange(d, way, *deal))).collect())
            .collect();
        self.say(format_args!("turns {turns} {devices} {} {}", all.len(), all[0][0].len()));
        for ((_, deal), parameters) in ways.iter().zip(&all) {
            self.say(format_args!("{} {}", deal.blocks, deal.warps * 32));
            self.say(format_args!("{}", Numbers(parameters)));
        }
    }

    /// The counters, of vectors that differ and of waits that gave up, over all devices.
    fn run(mut self, program: &Path) -> [u64; 2] {
        for address in [self.boxes.wrong.clone(), self.boxes.late.clone()].concat() {
            self.say(format_args!("show {address}"));
        }
        let mut child =
            Command::new(program.join("run")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(self.text.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{out}");
        let counts: Vec<u64> = out.lines().map(|line| line.parse().unwrap()).collect();
        let (wrong, late) = counts.split_at(self.devices());
        [wrong.iter().sum(), late.iter().sum()]
    }
}

/// Bytes as a script has them.
struct Numbers<'a>(&'a [Vec<u8>]);

impl std::fmt::Display for Numbers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().flatten().try_for_each(|byte| write!(f, "{byte} "))
    }
}

/// Bytes of a parameter, which has no gaps.
fn bytes_of<T: Copy>(parameter: &T) -> Vec<u8> {
    // SAFETY: the structs of kernels are repr(C) of integers without padding (their sizes are those of their fields, which the kernels assert).
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(parameter).cast::<u8>(), size_of::<T>()) }.to_vec()
}

fn rows(boxes: &Boxes, row_bytes: u32, round: u32, slots: u32) -> Rows {
    Rows { rows: boxes.part_bytes() / u64::from(row_bytes), row_bytes, round, slots }
}

#[test]
fn what_is_moved_arrives_and_what_is_not_is_noticed() {
    let program = match program() {
        Ok(program) => program,
        Err(why) => {
            std::io::stderr().write_all(format!("\nskipped: ceilings on CPUs: {why}\n").as_bytes()).ok();
            return;
        }
    };
    for devices in [2, 3, 4] {
        let vectors = |rows: Rows| rows.rows * u64::from(rows.row_bytes) / 16;
        // Each way to move, once as it is and once with a bit turned on the way.
        for flip in [false, true] {
            let outcome = |moves: &dyn Fn(&mut Script)| {
                let mut script = Script::new(devices, LONG);
                moves(&mut script);
                script.run(program.path())
            };
            let damage = |script: &mut Script| {
                let last = script.boxes.inboxes[devices - 1] + script.boxes.part_bytes() - 4000;
                if flip {
                    script.say(format_args!("flip {last}"));
                }
            };
            let expected = [u64::from(flip), 0];
            let stores = outcome(&|script| {
                let rows = rows(&script.boxes, 2048, 1, 0);
                script.on_all("ceiling_store", |boxes, d| boxes.to_peers(d, rows));
                damage(script);
                script.check_peers(rows);
            });
            assert_eq!(stores, expected, "stores between {devices}");
            let bulk = outcome(&|script| {
                let rows = rows(&script.boxes, 1040, 2, BLOCKS);
                script.on_all("ceiling_bulk_store", |boxes, d| boxes.to_peers(d, rows));
                damage(script);
                script.check_peers(rows);
            });
            assert_eq!(bulk, expected, "bulk stores between {devices}");
            let copies = outcome(&|script| {
                let rows = rows(&script.boxes, 2048, 3, 0);
                script.on_all("ceiling_fill", |boxes, d| boxes.fill(d, rows));
                for device in 0..devices {
                    let transfer = script.boxes.to_peers(device, rows);
                    for to in &transfer.target[..transfer.targets as usize] {
                        let bytes = rows.rows * 2048;
                        script.say(format_args!("copy {to} {} {bytes}", transfer.source));
                    }
                }
                damage(script);
                script.check_peers(rows);
            });
            assert_eq!(copies, expected, "copies between {devices}");
            let own = outcome(&|script| {
                let stored = rows(&script.boxes, 2064, 4, BLOCKS);
                script.on_all("ceiling_bulk_store", |boxes, d| boxes.to_own(d, stored));
                script.on_all("ceiling_check", |boxes, d| boxes.check_own(d, stored));
                let copied = rows(&script.boxes, 1024, 5, 0);
                script.on_all("ceiling_fill", |boxes, d| boxes.fill(d, copied));
                script.on_all("ceiling_bulk_copy", |boxes, d| boxes.to_own(d, copied));
                damage(script);
                script.on_all("ceiling_check", |boxes, d| boxes.check_own(d, copied));
            });
            assert_eq!(own, expected, "own memory of {devices}");
            for compare in [0, 1] {
                let reads = outcome(&|script| {
                    let rows = rows(&script.boxes, 1024, 6, 0);
                    script.on_all("ceiling_fill", |boxes, d| boxes.fill(d, rows));
                    if flip {
                        let address = script.boxes.outboxes[0] + 3;
                        script.say(format_args!("flip {address}"));
                    }
                    script.on_all("ceiling_bulk_read", |boxes, d| Transfer {
                        compare,
                        ..boxes.from_peers(d, rows)
                    });
                });
                // All others read the first row, which is no warp's last.
                let noticed = if flip && compare == 1 { devices as u64 - 1 } else { 0 };
                assert_eq!(reads, [noticed, 0], "reads between {devices}");
            }
        }
        // Rows of another round are all different.
        let mut script = Script::new(devices, LONG);
        let sent = rows(&script.boxes, 1040, 7, BLOCKS);
        script.on_all("ceiling_bulk_store", |boxes, d| boxes.to_peers(d, sent));
        script.check_peers(Rows { round: 8, ..sent });
        let all = vectors(sent) * (devices * (devices - 1)) as u64;
        assert_eq!(script.run(program.path()), [all, 0]);
    }
}

#[test]
fn flags_go_round_and_whoever_is_missing_is_not_waited_for() {
    let Ok(program) = program() else { return };
    let ring = |boxes: &Boxes, place: usize, base: u32| Ring {
        own: boxes.inboxes[place] + WORDS + 64,
        next: boxes.inboxes[(place + 1) % boxes.devices()] + WORDS + 64,
        late: boxes.late[place],
        timeout_ns: boxes.timeout_ns,
        rounds: 50,
        base,
        leader: u32::from(place == 0),
        pad: 0,
    };
    let meeting = |boxes: &Boxes, place: usize, round: u32| {
        let mut words = [0; 8];
        for (word, base) in words.iter_mut().zip(&boxes.inboxes) {
            *word = base + WORDS + 128;
        }
        let (late, timeout_ns, places) = (boxes.late[place], boxes.timeout_ns, boxes.devices() as u32);
        Meeting { words, go: 0, late, timeout_ns, places, place: place as u32, round, pad: 0 }
    };
    for (devices, here) in [(2, 2), (3, 3), (3, 2)] {
        let mut script = Script::new(devices, if here < devices { SHORT } else { LONG });
        for round in 0..2 {
            let rings: Vec<_> =
                (0..here).map(|place| bytes_of(&ring(&script.boxes, place, round * 50))).collect();
            let meetings: Vec<_> =
                (0..here).map(|place| bytes_of(&meeting(&script.boxes, place, round + 1))).collect();
            script.launch("ceiling_meet", [1, 32], &meetings);
            script.launch("ceiling_ring", [1, 1], &rings);
        }
        let [wrong, late] = script.run(program.path());
        assert_eq!(wrong, 0);
        assert_eq!(late > 0, here < devices, "{here} of {devices}: {late} gave up");
    }
}

/// A script in which sources are filled, and no slot holds a packet.
fn exchanging(devices: usize, timeout_ns: u64, bytes: [usize; 2]) -> (Script, Room) {
    let mut script = Script::new(devices, timeout_ns);
    let room = script.boxes.room(bytes).expect("boxes are large enough");
    for inbox in script.boxes.inboxes.clone() {
        script.say(format_args!("zero {inbox} {}", room.end));
    }
    script.on_parts("ceiling_fill", &room, Boxes::fill_exchange);
    (script, room)
}

/// Both kinds of kernels, dealt out over some blocks.
fn kinds(room: &Room, blocks: u32, apart: bool) -> [(Way, Deal); 2] {
    room.ways.map(|way| (way, Deal::of(&way, blocks, apart)))
}

#[test]
fn packets_are_exchanged_again_and_again_and_nothing_is_overwritten_early() {
    let Ok(program) = program() else { return };
    // Less than a warp's share, some shares, and more than all warps have at once.
    for (devices, blocks, apart, bytes) in [
        (2, 2, true, [900, 4000]),
        (2, 2, false, [4000, 900]),
        (2, 3, true, [100, 9000]),
        (3, 2, false, [3000, 9000]),
        (4, 2, true, [2000, 3000]),
    ] {
        for flip in [false, true] {
            let (mut script, room) = exchanging(devices, LONG, bytes);
            script.exchange(12, devices, &kinds(&room, blocks, apart));
            if flip {
                let last = script.boxes.inboxes[devices - 1] + room.out + 5;
                script.say(format_args!("flip {last}"));
            }
            script.on_parts("ceiling_check", &room, Boxes::check_exchange);
            assert_eq!(
                script.run(program.path()),
                [u64::from(flip), 0],
                "{devices} {blocks} {apart} {bytes:?}"
            );
        }
    }
}

/// The test sees what it is for: kernels of one kind alone overwrite packets that a peer has not read, and it never sees them.
#[test]
fn kernels_of_one_kind_overwrite_packets_and_end_all_the_same() {
    let Ok(program) = program() else { return };
    let (mut script, room) = exchanging(2, SHORT, [4000, 4000]);
    script.exchange(150, 2, &kinds(&room, 2, true)[..1]);
    let [wrong, late] = script.run(program.path());
    assert!(wrong == 0 && late > 0, "{wrong} {late}");
}

#[test]
fn who_is_missing_is_not_waited_for_in_later_kernels() {
    let Ok(program) = program() else { return };
    let (mut script, room) = exchanging(3, SHORT, [900, 900]);
    let start = std::time::Instant::now();
    // Each of these would take the whole deadline.
    script.exchange(150, 2, &kinds(&room, 2, false));
    let [wrong, late] = script.run(program.path());
    assert!(wrong == 0 && late > 0, "{wrong} {late}");
    assert!(start.elapsed().as_secs() < 40, "{:?}", start.elapsed());
}
