//! The door of a rank: a Unix socket for its own host, a TCP port for others.

use super::handle::{ADDRESSES, Handle};
use crate::error::{Error, Result};
use crate::settings::{Settings, interface_matches};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// A listening rank.
pub(crate) struct Listener {
    pub(crate) unix: Option<OwnedFd>,
    pub(crate) tcp: TcpListener,
    pub(crate) handle: Handle,
    path: Option<PathBuf>,
}

impl Listener {
    pub(crate) fn open(settings: &Settings) -> Result<Self> {
        let (token, answer) = (random()?, random()?);
        let name = u64::from_ne_bytes(random()?);
        let tcp = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
            .map_err(Error::io("listening on a TCP port"))?;
        tcp.set_nonblocking(true).map_err(Error::io("listening on a TCP port"))?;
        let port = tcp.local_addr().map_err(Error::io("listening on a TCP port"))?.port();
        let mut path = None;
        let unix = if settings.tcp {
            None
        } else {
            let socket = unix_socket()?;
            let address = unix_address(settings.folder.as_deref(), name)?;
            bind(&socket, &address).map_err(Error::system("binding a Unix socket"))?;
            path = settings.folder.as_deref().map(|folder| unix_path(folder, name));
            listen(&socket, BACKLOG).map_err(Error::system("listening on a Unix socket"))?;
            Some(socket)
        };
        let handle = Handle::new(token, answer, boot_id(), name, port, &addresses(settings));
        Ok(Self { unix, tcp, handle, path })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

pub(crate) fn unix_socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Error::system("making a Unix socket"))
}

fn unix_path(folder: &Path, name: u64) -> PathBuf {
    folder.join(format!("gin-soft-{name:016x}"))
}

/// Address of the Unix socket of this name: in a folder, or abstract.
pub(crate) fn unix_address(folder: Option<&Path>, name: u64) -> Result<SocketAddrUnix> {
    match folder {
        Some(folder) => SocketAddrUnix::new(unix_path(folder, name)),
        None => SocketAddrUnix::new_abstract_name(format!("nccl-gin-soft-{name:016x}").as_bytes()),
    }
    .map_err(Error::system("naming a Unix socket"))
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let count =
        getrandom(&mut bytes, GetRandomFlags::empty()).map_err(Error::system("drawing random bytes"))?;
    if count == N { Ok(bytes) } else { Err(Error::system("drawing random bytes")(Errno::IO)) }
}

/// The kernel's number of this boot; random where it is hidden, so that nobody is taken for a neighbour.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map_or_else(|_| random().unwrap_or_default(), u128::to_le_bytes)
}

/// Addresses for other hosts first, loopback last.
fn addresses(settings: &Settings) -> Vec<IpAddr> {
    if !settings.addresses.is_empty() {
        return settings.addresses.iter().copied().take(ADDRESSES).collect();
    }
    let mut found: Vec<IpAddr> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .filter(|one| settings.interfaces.as_deref().is_none_or(|list| interface_matches(list, &one.name)))
        .map(|one| one.ip())
        .filter(|ip| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        .collect();
    found.sort_by_key(|ip| (ip.is_loopback(), ip.is_ipv6()));
    let far = found.iter().filter(|ip| !ip.is_loopback()).count();
    // The last place is loopback's: it leads here from other network settings of the same host.
    found.drain(far.min(ADDRESSES - 1)..far);
    found.truncate(ADDRESSES);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_describes_itself() {
        let settings = Settings::from_env();
        let one = Listener::open(&settings).unwrap();
        let other = Listener::open(&settings).unwrap();
        assert_ne!(one.handle.token, other.handle.token);
        assert_ne!(one.handle.name, other.handle.name);
        assert_eq!(one.handle.boot, other.handle.boot);
        assert!(!one.handle.addresses(true).is_empty());
    }

    #[test]
    fn a_socket_in_a_folder_goes_with_its_listener() {
        let folder = std::env::temp_dir().join(format!("gin-soft-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let settings = Settings { folder: Some(folder.clone()), ..Settings::from_env() };
        let listener = Listener::open(&settings).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        drop(listener);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(&folder).unwrap();
    }
}
