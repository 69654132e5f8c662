//! A second process: the test's own executable, started again for one test, with a socket to talk and pass descriptors.

use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "CUDA_VMM_EMU_TEST_ROLE";
/// How long anybody waits for the other process.
const DEADLINE: Duration = Duration::from_secs(30);

/// One end of the conversation.
pub struct Channel(OwnedFd);

impl Channel {
    fn new(fd: OwnedFd) -> Self {
        let deadline = Some(DEADLINE);
        rustix::net::sockopt::set_socket_timeout(&fd, rustix::net::sockopt::Timeout::Recv, deadline).unwrap();
        Self(fd)
    }

    /// Sends a message of up to 256 bytes with any descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let parts = [IoSlice::new(bytes)];
        let sent = retry_on_intr(|| sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Receives one message, with a deadline.
    pub fn receive(&self) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut bytes = vec![0; 256];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let got = retry_on_intr(|| recvmsg(&self.0, parts, &mut control, RecvFlags::CMSG_CLOEXEC))
            .expect("the other process answers in time");
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        bytes.truncate(got.bytes);
        (bytes, fds)
    }

    /// Waits for a message that is nothing but this word.
    pub fn expect(&self, word: &str) {
        assert_eq!(String::from_utf8_lossy(&self.receive().0), word);
    }
}

/// The child, killed when dropped.
pub struct Peer {
    child: Child,
    pub channel: Channel,
}

impl Peer {
    /// Starts this executable again to run the test with this name, in a role.
    pub fn start(test: &str, role: &str) -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env(ROLE, role)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, channel: Channel::new(ours) }
    }

    /// Waits for the child to end well.
    pub fn finish(mut self) {
        let end = Instant::now() + DEADLINE;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break assert!(status.success(), "the other process failed: {status}"),
                None => assert!(Instant::now() < end, "the other process does not end"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends the child as `kill -9` does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of this process, and its channel, if it was started by [`Peer::start`].
pub fn role() -> Option<(String, Channel)> {
    let role = std::env::var(ROLE).ok()?;
    // SAFETY: the parent gave the socket as descriptor 0, which nothing else in this process owns.
    let fd = unsafe { OwnedFd::from_raw_fd(0) };
    Some((role, Channel::new(fd)))
}

/// A descriptor number that the driver gave out, owned.
pub fn owned(fd: i32) -> OwnedFd {
    assert!(fd >= 0);
    // SAFETY: the driver opened the descriptor for its caller, who owns it from here on.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
