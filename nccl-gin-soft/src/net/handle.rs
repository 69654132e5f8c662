//! The listen handle: what a rank tells the others over NCCL's bootstrap.

use crate::abi::HANDLE_SIZE;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// "ginsoft" and a zero.
const MAGIC: u64 = u64::from_le_bytes(*b"ginsoft\0");
/// Raised with every change of what ranks tell each other: handles, messages, commands, frames.
pub(crate) const VERSION: u32 = 2;
/// Addresses that a handle has room for.
pub(crate) const ADDRESSES: usize = 3;

/// All integers are little-endian, as on every machine with a GPU that NCCL runs on.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Handle {
    magic: u64,
    version: u32,
    port: u16,
    count: u16,
    /// Whoever connects must know this.
    pub(crate) token: [u8; 16],
    /// Whoever answers must know this.
    pub(crate) answer: [u8; 16],
    /// Of the running kernel: the same on one host.
    pub(crate) boot: [u8; 16],
    /// Name of the Unix socket.
    pub(crate) name: u64,
    addresses: [[u8; 16]; ADDRESSES],
    reserved: u64,
}

const _: () = assert!(size_of::<Handle>() <= HANDLE_SIZE);

impl Handle {
    pub(crate) fn new(
        token: [u8; 16],
        answer: [u8; 16],
        boot: [u8; 16],
        name: u64,
        port: u16,
        ips: &[IpAddr],
    ) -> Self {
        let mut addresses = [[0; 16]; ADDRESSES];
        let count = ips.len().min(ADDRESSES);
        for (slot, ip) in addresses.iter_mut().zip(ips) {
            *slot = match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
        }
        Self {
            magic: MAGIC,
            version: VERSION,
            port,
            count: count as u16,
            token,
            answer,
            boot,
            name,
            addresses,
            reserved: 0,
        }
    }

    pub(crate) fn encode(&self) -> [u8; HANDLE_SIZE] {
        let mut bytes = [0; HANDLE_SIZE];
        bytes[..size_of::<Self>()].copy_from_slice(bytemuck::bytes_of(self));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HANDLE_SIZE], rank: usize) -> Result<Self> {
        let handle: Self = bytemuck::pod_read_unaligned(&bytes[..size_of::<Self>()]);
        let reason = if handle.magic != MAGIC {
            "its listen handle is not of this plugin".to_owned()
        } else if handle.version != VERSION {
            format!("its protocol has version {}, and ours {VERSION}", handle.version)
        } else if usize::from(handle.count) > ADDRESSES {
            format!("its listen handle has {} addresses", handle.count)
        } else {
            return Ok(handle);
        };
        Err(Error::Protocol { rank, reason })
    }

    /// Where the rank listens. Loopback addresses lead to it only from its own host.
    pub(crate) fn addresses(&self, same_host: bool) -> Vec<SocketAddr> {
        self.addresses[..usize::from(self.count).min(ADDRESSES)]
            .iter()
            .map(|octets| SocketAddr::new(IpAddr::V6(Ipv6Addr::from(*octets)).to_canonical(), self.port))
            .filter(|address| same_host || !address.ip().is_loopback())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> Handle {
        let ips = ["10.1.2.3".parse().unwrap(), "fd00::7".parse().unwrap(), "127.0.0.1".parse().unwrap()];
        Handle::new([1; 16], [2; 16], [3; 16], 4, 5000, &ips)
    }

    #[test]
    fn a_handle_survives_the_bootstrap() {
        let decoded = Handle::decode(&handle().encode(), 0).unwrap();
        assert_eq!(
            (decoded.token, decoded.answer, decoded.boot, decoded.name),
            ([1; 16], [2; 16], [3; 16], 4)
        );
        let far: Vec<String> = decoded.addresses(false).iter().map(ToString::to_string).collect();
        assert_eq!(far, ["10.1.2.3:5000", "[fd00::7]:5000"]);
        assert_eq!(decoded.addresses(true).len(), 3);
    }

    #[test]
    fn a_foreign_handle_is_refused_with_the_reason() {
        let error = Handle::decode(&[7; HANDLE_SIZE], 3).err().unwrap().to_string();
        assert!(error.contains("rank 3") && error.contains("not of this plugin"), "{error}");
        let mut bytes = handle().encode();
        bytes[8] = 99;
        let error = Handle::decode(&bytes, 1).err().unwrap().to_string();
        assert!(error.contains("version 99"), "{error}");
        let mut bytes = handle().encode();
        bytes[14] = 200;
        assert!(Handle::decode(&bytes, 1).is_err());
    }
}
