//! The data path to another host: a ring on each side, kept alike over a socket.
//!
//! The sender's ring and staging memory are its own; its writer sends each command, with its payload, and the receiver's reader puts both in the same
//! places of the ring and staging memory over there, where the agent works on them as on any ring. Back come the `done` words. A command is
//! sent only where the ring has room, so that the reader never has to wait.

mod bridge;
mod frame;

pub(crate) use bridge::Bridge;

use crate::error::{Error, Result};
use rustix::net::sockopt;
use std::os::fd::AsFd;
use std::time::Duration;

/// After this much silence the other host is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(2);
/// Questions, a second apart, that may stay without an answer.
const KEEPALIVE_COUNT: u32 = 4;
/// Milliseconds that data may stay without acknowledgement.
const UNACKNOWLEDGED_MS: u32 = 10_000;

/// No delays, and a cut connection shows within seconds.
pub(crate) fn prepare(socket: impl AsFd) -> Result<()> {
    let socket = socket.as_fd();
    sockopt::set_tcp_nodelay(socket, true)
        .and_then(|()| sockopt::set_socket_keepalive(socket, true))
        .and_then(|()| sockopt::set_tcp_keepidle(socket, KEEPALIVE))
        .and_then(|()| sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1)))
        .and_then(|()| sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT))
        .and_then(|()| sockopt::set_tcp_user_timeout(socket, UNACKNOWLEDGED_MS))
        .map_err(Error::system("setting the options of a TCP socket"))
}
