//! Two processes share one range of device and host memory.
//!
//! `cargo run -p cuda-vmm --example share` on a GPU, or with `-- --emulator` on the software driver.
//!
//! The first process allocates and starts a second one, which gets both segments over a Unix socket, maps them, and writes across
//! their border; the first reads it.

use cuda_vmm::share::{receive, send};
use cuda_vmm::{Cuda, Grant, Properties, SegmentedRange};
use cuda_vmm_emu::{Config, Emulator};
use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, ExitCode};
use std::time::Duration;

const DEVICE: usize = 4 << 20;
const HOST: usize = 2 << 20;
/// Where the message lies: around the border of the two segments.
const AT: usize = DEVICE - 8;
const MESSAGE: &[u8; 16] = b"from the second!";
/// Nobody waits longer than this.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("share: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<_> = std::env::args().skip(1).collect();
    let second =
        arguments.iter().position(|argument| argument == "--second").map(|at| arguments.split_off(at));
    let emulator = arguments.iter().any(|argument| argument == "--emulator");
    let cuda = if emulator {
        Cuda::with_driver(Emulator::new(Config::h200x2())?.driver())?
    } else {
        Cuda::get()?.clone()
    };
    match second.as_deref() {
        None => first(&cuda, &arguments),
        Some([_, socket]) => import(&cuda, UnixStream::connect(socket)?),
        Some(_) => Err("--second is followed by the path of a socket".into()),
    }
}

fn first(cuda: &Cuda, arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let device = cuda.device(0)?;
    let node = device.host_numa_node()?.unwrap_or(0);
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(0).shareable(), DEVICE)
        .create(Properties::host_numa(node).shareable(), HOST)
        .grant(Grant::device(0))
        .build()?;
    println!("{}: {} bytes at {}", device.name()?, range.size(), range.address());

    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket)?;
    let mut child =
        Command::new(std::env::current_exe()?).args(arguments).arg("--second").arg(&socket).spawn()?;
    let shared = accept(&listener, &mut child).and_then(|mut stream| {
        for segment in range.segments() {
            send(&stream, segment.mapping.memory(), PATIENCE)?;
        }
        // One byte says that the message is written.
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0])?;
        Ok(())
    });
    if shared.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    shared?;

    let mut bytes = [0; MESSAGE.len()];
    device.primary_context()?.download(&range, AT, &mut bytes)?;
    println!("the second process ({status}) wrote {:?}", String::from_utf8_lossy(&bytes));
    if &bytes == MESSAGE { Ok(()) } else { Err("that is not what it should have written".into()) }
}

/// Waits for the second process, but not for one that has ended, and not for ever.
fn accept(listener: &UnixListener, child: &mut std::process::Child) -> Result<UnixStream, Box<dyn Error>> {
    listener.set_nonblocking(true)?;
    let end = std::time::Instant::now() + PATIENCE;
    while std::time::Instant::now() < end {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false)?;
            return Ok(stream);
        }
        if let Some(status) = child.try_wait()? {
            return Err(format!("the second process ended early: {status}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err("the second process did not connect".into())
}

fn import(cuda: &Cuda, mut stream: UnixStream) -> Result<(), Box<dyn Error>> {
    let range = SegmentedRange::builder(cuda)
        .existing(receive(cuda, &stream, PATIENCE)?)
        .existing(receive(cuda, &stream, PATIENCE)?)
        .grant(Grant::device(0))
        .build()?;
    cuda.device(0)?.primary_context()?.upload(&range, AT, MESSAGE)?;
    stream.write_all(&[1])?;
    Ok(())
}
