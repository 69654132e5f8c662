//! Memory shared by real processes, on the software driver and on GPUs.
//!
//! The parent allocates a range of device and host-NUMA memory and hands both segments to a child. Both map them, and each sees
//! what the other writes. Then one of the two is killed, and the other goes on and cleans up.

use cuda_vmm::share::{PidExport, fetch, receive, send};
use cuda_vmm::{
    Context, Cuda, Error, Grant, HandleTypes, IpcHandle, IpcMemory, PhysicalMemory, PlainMemory, Properties,
    SegmentedRange,
};
use integration_tests::both;
use integration_tests::process::{PATIENCE, Peer, role, scratch};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

const MIB: usize = 1 << 20;
const DEVICE: usize = 4 * MIB;
const HOST: usize = 2 * MIB;
/// Where each side writes: a few bytes around the border of the segments, so that both are touched.
const HERE: usize = DEVICE - 4;
const THERE: usize = DEVICE - 64;

fn connect(path: &Path) -> UnixStream {
    let mut stream = None;
    integration_tests::process::eventually("connecting to the parent", || {
        stream = UnixStream::connect(path).ok();
        stream.is_some()
    });
    bounded(stream.unwrap())
}

/// Nothing waits forever for a process that died.
fn bounded(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn accept(listener: &UnixListener, who: &str) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    let mut stream = None;
    integration_tests::process::eventually(&format!("{who} connecting"), || {
        stream = listener.accept().ok().map(|(stream, _)| stream);
        stream.is_some()
    });
    let stream = stream.unwrap();
    stream.set_nonblocking(false).unwrap();
    bounded(stream)
}

fn say(stream: &mut UnixStream, word: u8) {
    stream.write_all(&[word]).unwrap();
}

fn hear(stream: &mut UnixStream, word: u8) {
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    assert_eq!(byte[0] as char, word as char);
}

fn range(cuda: &Cuda, segments: impl IntoIterator<Item = PhysicalMemory>) -> SegmentedRange {
    let builder = SegmentedRange::builder(cuda).grant(Grant::device(0));
    segments.into_iter().fold(builder, |builder, memory| builder.existing(memory)).build().unwrap()
}

fn allocate(cuda: &Cuda) -> SegmentedRange {
    let node = cuda.device(0).unwrap().host_numa_node().unwrap().unwrap();
    SegmentedRange::builder(cuda)
        .create(Properties::device(0).shareable(), DEVICE)
        .create(Properties::host_numa(node).shareable(), HOST)
        .grant(Grant::device(0))
        .build()
        .unwrap()
}

fn context(cuda: &Cuda) -> Context {
    cuda.device(0).unwrap().primary_context().unwrap()
}

fn text(context: &Context, range: &SegmentedRange, offset: usize) -> String {
    let mut bytes = [0; 8];
    context.download(range, offset, &mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Socket,
    Pidfd,
}

/// The child: imports, maps, writes; then does what the parent says.
fn child(cuda: &Cuda, way: Way, path: &Path) {
    let mut stream = connect(path);
    let context = context(cuda);
    let segments: Vec<_> = (0..2)
        .map(|_| match way {
            Way::Socket => receive(cuda, &stream, PATIENCE).unwrap(),
            Way::Pidfd => {
                let mut bytes = [0; cuda_vmm::share::Descriptor::BYTES];
                stream.read_exact(&mut bytes).unwrap();
                fetch(cuda, &bytes).unwrap()
            }
        })
        .collect();
    let range = range(cuda, segments);
    assert_eq!(text(&context, &range, HERE), "the-host");
    context.upload(&range, THERE, b"a-child!").unwrap();
    say(&mut stream, b'w');
    hear(&mut stream, b'q');
}

fn share(range: &SegmentedRange, way: Way, stream: &mut UnixStream) -> Vec<PidExport> {
    let mut exports = Vec::new();
    for segment in range.segments() {
        let memory = segment.mapping.memory();
        match way {
            Way::Socket => send(&stream, memory, PATIENCE).unwrap(),
            Way::Pidfd => {
                let export = PidExport::new(memory).unwrap();
                stream.write_all(export.descriptor()).unwrap();
                exports.push(export);
            }
        }
    }
    exports
}

fn two_processes(
    test: &str,
    way: Way,
    backend: &integration_tests::backend::Backend,
    cuda: &Cuda,
    kill: bool,
) {
    if role(test).is_some() {
        let path = std::env::var("SOCKET").unwrap();
        return child(cuda, way, Path::new(&path));
    }
    let (_folder, path) = scratch("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let peer = Peer::spawn(test, backend.name(), &[("SOCKET", path.to_str().unwrap())]);
    let mut stream = accept(&listener, "the child");
    let context = context(cuda);
    let range = allocate(cuda);
    context.upload(&range, HERE, b"the-host").unwrap();
    let exports = share(&range, way, &mut stream);
    hear(&mut stream, b'w');
    assert_eq!(text(&context, &range, THERE), "a-child!");
    if kill {
        // The child dies in the middle; nothing of ours does.
        peer.kill();
        assert_eq!(text(&context, &range, THERE), "a-child!");
        context.upload(&range, HERE, b"stillhere").unwrap();
        assert_eq!(text(&context, &range, HERE), "stillher");
    } else {
        say(&mut stream, b'q');
        peer.finish();
    }
    drop(exports);
}

both!(over_a_socket, 1, |backend, cuda| {
    let test = format!("over_a_socket::{}", backend.name());
    two_processes(&test, Way::Socket, backend, cuda, false);
});

both!(by_pidfd, 1, |backend, cuda| {
    let test = format!("by_pidfd::{}", backend.name());
    two_processes(&test, Way::Pidfd, backend, cuda, false);
});

both!(a_killed_importer, 1, |backend, cuda| {
    let test = format!("a_killed_importer::{}", backend.name());
    two_processes(&test, Way::Socket, backend, cuda, true);
});

// Three processes: the middle one exports to the last and is killed; the last goes on.
both!(a_killed_exporter, 1, |backend, cuda| {
    let test = format!("a_killed_exporter::{}", backend.name());
    match role(&test).as_deref() {
        Some("exporter") => {
            let mut stream = connect(Path::new(&std::env::var("SOCKET").unwrap()));
            let range = allocate(cuda);
            context(cuda).upload(&range, HERE, b"the-host").unwrap();
            let _exports = share(&range, Way::Socket, &mut stream);
            hear(&mut stream, b'w');
            std::fs::write(std::env::var("REPORT").unwrap(), "shared").unwrap();
            // Until SIGKILL; bounded all the same.
            std::thread::sleep(PATIENCE);
        }
        Some(_) => {
            let path = std::env::var("SOCKET").unwrap();
            let mut stream = accept(&UnixListener::bind(&path).unwrap(), "the exporter");
            import_and_outlive(cuda, &mut stream);
        }
        None => {
            let (folder, path) = scratch("socket");
            let report = folder.path().join("shared");
            let survived = folder.path().join("survived");
            let importer = Peer::spawn(
                &test,
                "importer",
                &[("SOCKET", path.to_str().unwrap()), ("REPORT", survived.to_str().unwrap())],
            );
            let exporter = Peer::spawn(
                &test,
                "exporter",
                &[("SOCKET", path.to_str().unwrap()), ("REPORT", report.to_str().unwrap())],
            );
            integration_tests::process::eventually("sharing", || report.exists());
            exporter.kill();
            importer.finish();
            assert_eq!(std::fs::read_to_string(survived).unwrap(), "survived");
        }
    }
});

fn import_and_outlive(cuda: &Cuda, stream: &mut UnixStream) {
    let context = context(cuda);
    let segments = [(); 2].map(|()| receive(cuda, &stream, PATIENCE).unwrap());
    let range = range(cuda, segments);
    assert_eq!(text(&context, &range, HERE), "the-host");
    say(stream, b'w');
    // Ends when the exporter dies.
    let mut byte = [0];
    assert_eq!(stream.read(&mut byte).unwrap(), 0);
    assert_eq!(text(&context, &range, HERE), "the-host");
    context.upload(&range, HERE, b"orphaned").unwrap();
    assert_eq!(text(&context, &range, HERE), "orphaned");
    drop(range);
    std::fs::write(std::env::var("REPORT").unwrap(), "survived").unwrap();
}

both!(plain_memory_by_ipc_handle, 1, |backend, cuda| {
    let test = format!("plain_memory_by_ipc_handle::{}", backend.name());
    if role(&test).is_some() {
        let mut stream = connect(Path::new(&std::env::var("SOCKET").unwrap()));
        let mut bytes = [0; 64];
        stream.read_exact(&mut bytes).unwrap();
        let context = context(cuda);
        // SAFETY: the parent sent the handle of an allocation of this size and keeps it until this process says so.
        let memory = unsafe { IpcMemory::open(&context, &IpcHandle::from_bytes(bytes), MIB) }.unwrap();
        let mut back = [0; 6];
        context.download(&memory, 100, &mut back).unwrap();
        assert_eq!(&back, b"parent");
        context.upload(&memory, 100, b"child!").unwrap();
        drop(memory);
        return say(&mut stream, b'd');
    }
    let (_folder, path) = scratch("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let peer = Peer::spawn(&test, backend.name(), &[("SOCKET", path.to_str().unwrap())]);
    let mut stream = accept(&listener, "the child");
    let context = context(cuda);
    let memory = PlainMemory::new(&context, MIB).unwrap();
    context.upload(&memory, 100, b"parent").unwrap();
    stream.write_all(memory.ipc_handle().unwrap().as_bytes()).unwrap();
    hear(&mut stream, b'd');
    let mut back = [0; 6];
    context.download(&memory, 100, &mut back).unwrap();
    assert_eq!(&back, b"child!");
    peer.finish();
});

both!(a_dead_exporter_is_a_typed_error, 1, |_, cuda| {
    let memory =
        PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0).handle_types(HandleTypes::POSIX_FD))
            .unwrap();
    let export = PidExport::new(&memory).unwrap();
    let mut bytes = *export.descriptor();
    // The number of a process that cannot be.
    bytes[48..52].copy_from_slice(&(i32::MAX as u32 - 1).to_le_bytes());
    let error = fetch(cuda, &bytes).unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error}");
    // Our own descriptor table has no such number.
    let mut bytes = *export.descriptor();
    bytes[52..56].copy_from_slice(&1_000_000_i32.to_le_bytes());
    let error = fetch(cuda, &bytes).unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error}");
    fetch(cuda, export.descriptor()).unwrap();
});
