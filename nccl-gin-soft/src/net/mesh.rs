//! Connecting all ranks to each other.

use super::control::{Control, Message, timespec};
use super::handle::Handle;
use super::listen::{Listener, unix_address, unix_socket};
use super::{Deadline, tcp};
use crate::error::{Error, Result};
use crate::log::{info, warning};
use crate::settings::Settings;
use bytemuck::{Pod, Zeroable};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// One address is tried for this long, and who knocks has this long to say hello.
const PATIENCE: Duration = Duration::from_secs(3);

/// Connection to another rank.
pub(crate) struct Link {
    pub(crate) control: Control,
    /// The socket of the data path, to a rank on another host; `None` inside a host, where that is shared memory.
    pub(crate) data: Option<TcpStream>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Purpose {
    Local = 1,
    Remote = 2,
    Data = 3,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Hello {
    token: [u8; 16],
    rank: u32,
    ranks: u32,
    purpose: u32,
    reserved: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Welcome {
    answer: [u8; 16],
    rank: u32,
    reserved: u32,
}

/// Connects to all lower ranks, and is connected to by all higher ones. The own rank's place stays empty.
pub(crate) fn connect(
    settings: &Settings,
    handles: &[Handle],
    rank: usize,
    listener: &Listener,
) -> Result<Vec<Option<Link>>> {
    let deadline = Deadline::after(settings.timeout);
    let mut links: Vec<Option<Link>> = handles.iter().map(|_| None).collect();
    for (peer, handle) in handles.iter().enumerate().take(rank) {
        links[peer] = Some(dial(settings, handle, peer, rank, handles.len(), &listener.handle, deadline)?);
    }
    let mut door = Door { listener, rank, ranks: handles.len(), controls: Vec::new(), data: Vec::new() };
    while links.iter().skip(rank + 1).any(Option::is_none) {
        door.accept(deadline)?;
        door.pair(&mut links);
    }
    Ok(links)
}

/// The ranks above knock in any order, and a rank on another host twice.
struct Door<'a> {
    listener: &'a Listener,
    rank: usize,
    ranks: usize,
    controls: Vec<(usize, bool, Control)>,
    data: Vec<(usize, TcpStream)>,
}

impl Door<'_> {
    /// Accepts who knocks next. A foreigner is turned away, and waiting goes on.
    fn accept(&mut self, deadline: Deadline) -> Result<()> {
        let left = deadline.left();
        if left.is_zero() {
            let attempt =
                format!("rank {} of {}: waiting for the ranks above to connect", self.rank, self.ranks);
            return Err(Error::Deadline { attempt, waited: deadline.whole() });
        }
        let mut doors = vec![PollFd::new(&self.listener.tcp, PollFlags::IN)];
        if let Some(unix) = &self.listener.unix {
            doors.push(PollFd::new(unix, PollFlags::IN));
        }
        match poll(&mut doors, Some(&timespec(left))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("waiting for ranks to connect")(errno)),
        }
        let tcp = doors[0].revents().contains(PollFlags::IN);
        let unix = doors.get(1).is_some_and(|door| door.revents().contains(PollFlags::IN));
        if unix && let Some(socket) = &self.listener.unix {
            match accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.greet(socket, true, deadline),
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
                Err(errno) => return Err(Error::system("accepting a connection")(errno)),
            }
        }
        if tcp {
            match self.listener.tcp.accept() {
                Ok((stream, _)) => self.greet(stream.into(), false, deadline),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
                    _ => return Err(Error::io("accepting a connection")(error)),
                },
            }
        }
        Ok(())
    }

    fn greet(&mut self, socket: OwnedFd, local: bool, deadline: Deadline) {
        if let Err(error) = self.try_greet(socket, local, deadline.within(PATIENCE)) {
            warning!("rank {}: a connection was turned away: {error}", self.rank);
        }
    }

    fn try_greet(&mut self, socket: OwnedFd, local: bool, deadline: Deadline) -> Result<()> {
        // Its rank is not known yet: errors name the number of ranks.
        let mut control = Control::new(socket, self.ranks);
        let (hello, _) = control.receive::<Hello>(Message::Hello, 0, deadline)?;
        let peer = hello.rank as usize;
        let refuse = |reason: String| Err(Error::Protocol { rank: peer, reason });
        if hello.token != self.listener.handle.token {
            return refuse("it does not know the token of the listen handle".into());
        }
        if peer <= self.rank || peer >= self.ranks || hello.ranks as usize != self.ranks {
            return refuse(format!(
                "it says to be rank {peer} of {}, and this is {} of {}",
                hello.ranks, self.rank, self.ranks
            ));
        }
        control.set_rank(peer);
        if local {
            same_user(control.fd(), peer)?;
        } else {
            tcp::prepare(control.fd())?;
        }
        let welcome = Welcome { answer: self.listener.handle.answer, rank: self.rank as u32, reserved: 0 };
        let known = |purpose| hello.purpose == purpose as u32;
        let twice = self.controls.iter().any(|(one, ..)| *one == peer);
        if known(if local { Purpose::Local } else { Purpose::Remote }) && !twice {
            control.send(Message::Welcome, &welcome, &[], deadline)?;
            self.controls.push((peer, local, control));
        } else if known(Purpose::Data) && !local && !self.data.iter().any(|(one, _)| *one == peer) {
            control.send(Message::Welcome, &welcome, &[], deadline)?;
            self.data.push((peer, TcpStream::from(control.into_socket())));
        } else {
            return refuse(format!("a second connection, or one for an unknown purpose ({})", hello.purpose));
        }
        Ok(())
    }

    /// Makes links of what is complete.
    fn pair(&mut self, links: &mut [Option<Link>]) {
        let mut waiting = Vec::new();
        for (peer, local, control) in self.controls.drain(..) {
            let data = self.data.iter().position(|(one, _)| *one == peer);
            match (local, data) {
                (true, _) => links[peer] = Some(Link { control, data: None }),
                (false, Some(at)) => {
                    links[peer] = Some(Link { control, data: Some(self.data.swap_remove(at).1) });
                }
                (false, None) => waiting.push((peer, local, control)),
            }
        }
        self.controls = waiting;
    }
}

/// Only processes of the same user, or of root, share memory.
fn same_user(socket: impl AsFd, rank: usize) -> Result<()> {
    let other = sockopt::socket_peercred(socket).map_err(Error::system("asking who connects"))?.uid;
    let own = rustix::process::geteuid();
    if other == own || other.is_root() || own.is_root() {
        return Ok(());
    }
    let reason = format!("it is a process of user {}, and this one of {}", other.as_raw(), own.as_raw());
    Err(Error::Protocol { rank, reason })
}

fn dial(
    settings: &Settings,
    handle: &Handle,
    peer: usize,
    rank: usize,
    ranks: usize,
    own: &Handle,
    deadline: Deadline,
) -> Result<Link> {
    let same_host = handle.boot == own.boot;
    let hello = |purpose| Hello {
        token: handle.token,
        rank: rank as u32,
        ranks: ranks as u32,
        purpose: purpose as u32,
        reserved: 0,
    };
    let introduce = |socket: OwnedFd, purpose| -> Result<Control> {
        let control = Control::new(socket, peer);
        control.send(Message::Hello, &hello(purpose), &[], deadline)?;
        let (welcome, _) = control.receive::<Welcome>(Message::Welcome, 0, deadline)?;
        if welcome.answer != handle.answer || welcome.rank as usize != peer {
            let reason = "who answers does not know the listen handle".into();
            return Err(Error::Protocol { rank: peer, reason });
        }
        Ok(control)
    };

    if same_host && !settings.tcp {
        let socket = unix_socket()?;
        let address = unix_address(settings.folder.as_deref(), handle.name)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                same_user(&socket, peer)?;
                return Ok(Link { control: introduce(socket, Purpose::Local)?, data: None });
            }
            // A namespace of its own, or told to use TCP.
            Err(errno) => {
                info!("rank {peer} is on this host, but cannot be reached inside it ({errno}); TCP instead")
            }
        }
    }
    let mut tried = Vec::new();
    for address in handle.addresses(same_host) {
        let attempt = || -> Result<Link> {
            let open = || {
                let left = deadline.left().min(PATIENCE).max(Duration::from_millis(1));
                TcpStream::connect_timeout(&address, left)
                    .map_err(Error::io(format!("connecting to {address}")))
            };
            let control = open()?;
            tcp::prepare(&control)?;
            let control = introduce(control.into(), Purpose::Remote)?;
            let data = open()?;
            tcp::prepare(&data)?;
            let data = introduce(data.into(), Purpose::Data)?;
            Ok(Link { control, data: Some(TcpStream::from(data.into_socket())) })
        };
        match attempt() {
            Ok(link) => return Ok(link),
            Err(error) => tried.push(error.to_string()),
        }
    }
    let tried = if tried.is_empty() { "it gave no address".into() } else { tried.join("; ") };
    Err(Error::PeerGone { rank: peer, reason: format!("it cannot be reached: {tried}") })
}
