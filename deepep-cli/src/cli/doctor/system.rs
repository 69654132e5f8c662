//! The operating system: NUMA, descriptors between processes, limits, network cards.

use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;

use rustix::process::{PidfdFlags, PidfdGetfdFlags, Resource, getpid, getrlimit, pidfd_getfd, pidfd_open};

use super::Finding;
use crate::cli::paint;

const SYSTEM: &str = "system";
const SHARING: &str = "sharing memory between processes";
const LIMITS: &str = "limits";

pub(super) fn check(findings: &mut Vec<Finding>) {
    numa(findings);
    cards(findings);
    sharing(findings);
    limits(findings);
}

/// Names in a directory, sorted; none if it isn't there.
fn names(directory: &str) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn text(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn numa(findings: &mut Vec<Finding>) {
    let is_node = |name: &String| {
        name.strip_prefix("node").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let nodes: Vec<_> = names("/sys/devices/system/node").into_iter().filter(is_node).collect();
    let described: Vec<String> = nodes
        .iter()
        .map(|node| {
            let cpus = text(&format!("/sys/devices/system/node/{node}/cpulist")).unwrap_or_default();
            format!("{node}: CPUs {cpus}")
        })
        .collect();
    let text = if described.is_empty() {
        "not told by this kernel: taken as one".into()
    } else {
        described.join(", ")
    };
    findings.push(Finding::info(SYSTEM, "NUMA nodes", text));
}

fn cards(findings: &mut Vec<Finding>) {
    let cards = names("/sys/class/infiniband");
    findings.push(if cards.is_empty() {
        let remedy = "needed between hosts only";
        Finding::no(SYSTEM, "RDMA network cards", "none", remedy)
    } else {
        Finding::yes(SYSTEM, "RDMA network cards", cards.join(", "))
    });
}

fn sharing(findings: &mut Vec<Finding>) {
    findings.push(match socket_carries_descriptors() {
        Ok(()) => Finding::yes(SHARING, "file descriptors over Unix sockets", "works"),
        Err(error) => {
            let remedy = "symmetric memory needs it: does a seccomp profile forbid Unix sockets?";
            Finding::no(SHARING, "file descriptors over Unix sockets", error, remedy)
        }
    });
    let yama = text("/proc/sys/kernel/yama/ptrace_scope");
    let scope = yama.as_deref().map_or("no Yama".into(), |scope| format!("Yama ptrace_scope {scope}"));
    findings.push(match own_descriptor_by_pidfd() {
        Ok(()) if matches!(yama.as_deref(), None | Some("0")) => {
            Finding::yes(SHARING, "pidfd_getfd", format!("works; {scope}"))
        }
        Ok(()) => {
            let remedy = "not needed: descriptors go over Unix sockets. To use it between processes: sysctl kernel.yama.ptrace_scope=0";
            Finding::no(SHARING, "pidfd_getfd", format!("within a process only; {scope}"), remedy)
        }
        Err(error) => {
            let remedy = "not needed: descriptors go over Unix sockets. It takes Linux 5.6 and a seccomp profile that allows it";
            Finding::no(SHARING, "pidfd_getfd", format!("{error}; {scope}"), remedy)
        }
    });
    let channels = names("/dev/nvidia-caps-imex-channels");
    findings.push(if channels.is_empty() {
        let remedy =
            "needed for memory shared between hosts of one NVLink fabric only: start the IMEX service";
        Finding::no(SHARING, "IMEX channels", "none", remedy)
    } else {
        Finding::yes(SHARING, "IMEX channels", channels.join(", "))
    });
}

/// Passes a descriptor through a pair of sockets, as ranks do.
fn socket_carries_descriptors() -> std::io::Result<()> {
    use rustix::net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    };
    use std::io::{IoSlice, IoSliceMut};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    let (one, two) = std::os::unix::net::UnixStream::pair()?;
    let file = fs::File::open("/proc/self/stat")?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [file.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&one, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&two, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let received = received.ok_or_else(|| std::io::Error::other("no descriptor arrived"))?;
    fs::File::from(received).read_exact(&mut [0; 1])
}

fn own_descriptor_by_pidfd() -> std::io::Result<()> {
    let file = fs::File::open("/proc/self/stat")?;
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    pidfd_getfd(own, file.as_raw_fd(), PidfdGetfdFlags::empty())?;
    Ok(())
}

fn limits(findings: &mut Vec<Finding>) {
    let files = getrlimit(Resource::Nofile).current;
    let shown = files.map_or("unlimited".into(), |n| n.to_string());
    findings.push(if files.is_none_or(|n| n >= 1024) {
        Finding::yes(LIMITS, "open files", shown)
    } else {
        Finding::no(LIMITS, "open files", shown, "raise it: ulimit -n 65536")
    });
    let locked = getrlimit(Resource::Memlock).current;
    let shown = locked.map_or("unlimited".into(), |n| paint::bytes(n as usize));
    findings.push(if locked.is_none_or(|n| n >= 64 << 20) {
        Finding::yes(LIMITS, "locked memory", shown)
    } else {
        let remedy =
            "network cards register memory under this limit; needed between hosts only: ulimit -l unlimited";
        Finding::no(LIMITS, "locked memory", shown, remedy)
    });
    let space = getrlimit(Resource::As).current;
    findings.push(match space {
        None => Finding::yes(LIMITS, "address space", "unlimited"),
        Some(n) => {
            let remedy = "every rank maps the memory of all: ulimit -v unlimited";
            Finding::no(LIMITS, "address space", paint::bytes(n as usize), remedy)
        }
    });
    let available = text("/proc/meminfo").and_then(|info| {
        let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:").map(str::to_owned))?;
        line.trim().trim_end_matches("kB").trim().parse::<usize>().ok()
    });
    if let Some(kibibytes) = available {
        let shown = paint::bytes(kibibytes << 10);
        findings.push(if kibibytes >= 2 << 20 {
            Finding::yes(LIMITS, "available memory", shown)
        } else {
            let remedy =
                "emulated ranks keep their rows there: run with fewer --tokens or a smaller --hidden";
            Finding::no(LIMITS, "available memory", shown, remedy)
        });
    }
}
