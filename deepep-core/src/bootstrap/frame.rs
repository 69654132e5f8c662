//! Bytes that cross processes: frames with magic, version and a checked length, and a reader that never trusts what it reads.

use std::io::{self, Read, Write};

use crate::error::{Error, Result};

const MAGIC: u32 = u32::from_le_bytes(*b"DpEp");
/// Raised whenever the meaning of any frame changes.
pub(super) const VERSION: u16 = 1;
const HEADER: usize = 12;

/// Longest payload: the largest contribution of each of 1024 ranks would be more, but no configuration comes near it.
pub(super) const MAX_PAYLOAD: usize = 64 << 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    /// A rank introduces itself: rank, world size.
    Hello = 1,
    /// The store accepts it.
    Welcome = 2,
    /// A rank's contribution.
    Contribution = 3,
    /// Everybody's contributions.
    Gathered = 4,
    /// The round can't complete.
    Failed = 5,
    /// A rank of the same host introduces itself: token, rank.
    Neighbour = 6,
}

impl Kind {
    fn from_raw(raw: u16) -> Option<Self> {
        [Self::Hello, Self::Welcome, Self::Contribution, Self::Gathered, Self::Failed, Self::Neighbour]
            .into_iter()
            .find(|&kind| kind as u16 == raw)
    }
}

pub(super) fn write(to: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    if payload.len() > MAX_PAYLOAD {
        return Err(io::Error::other(format!("{} bytes are too many for one frame", payload.len())));
    }
    to.write_all(&encode(kind, payload))
}

/// Header and payload in one piece.
pub(super) fn encode(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend(MAGIC.to_le_bytes());
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((kind as u16).to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

/// Checks a header and returns kind and payload length.
fn parse_header(header: &[u8; HEADER], max: usize) -> Result<(Kind, usize), String> {
    let mut reader = Reader::new(header);
    let (magic, version, kind, length) =
        (|| Some((reader.u32()?, reader.u16()?, reader.u16()?, reader.u32()? as usize)))()
            .ok_or("header is cut short")?;
    if magic != MAGIC {
        return Err(format!("not a frame of this library (magic {magic:#010x})"));
    }
    if version != VERSION {
        return Err(format!("speaks protocol version {version}, this library speaks {VERSION}"));
    }
    let kind = Kind::from_raw(kind).ok_or_else(|| format!("unknown kind of frame {kind}"))?;
    if length > max {
        return Err(format!("announces {length} bytes, at most {max} are allowed here"));
    }
    Ok((kind, length))
}

/// Reads one frame whose payload has at most `max` bytes. `from` names the peer in errors.
pub(super) fn read(stream: &mut impl Read, max: usize, from: &str) -> Result<(Kind, Vec<u8>)> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).map_err(|e| Error::io(format!("reading a frame from {from}"), e))?;
    let (kind, length) = parse_header(&header, max).map_err(|problem| Error::protocol(from, problem))?;
    // Grows with what really arrives, so that an announced length alone costs nothing.
    let mut payload = Vec::new();
    let got = stream
        .take(length as u64)
        .read_to_end(&mut payload)
        .map_err(|e| Error::io(format!("reading {length} bytes from {from}"), e))?;
    if got != length {
        return Err(Error::protocol(from, format!("frame of {length} bytes ends after {got}")));
    }
    Ok((kind, payload))
}

/// Takes little-endian values off the front of untrusted bytes.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Bytes preceded by their number as `u32`.
    pub(crate) fn block(&mut self) -> Option<&'a [u8]> {
        let n = self.u32()? as usize;
        self.bytes(n)
    }

    /// UTF-8 preceded by its length in bytes as `u32`.
    pub(crate) fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.block()?).ok()
    }

    /// What is left must be nothing.
    pub(crate) fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// Appends a block that [`Reader::block`] reads.
pub(crate) fn put_block(to: &mut Vec<u8>, block: &[u8]) {
    to.extend((block.len() as u32).to_le_bytes());
    to.extend(block);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn round_trip() {
        let bytes = encode(Kind::Contribution, b"abc");
        let (kind, payload) = read(&mut &bytes[..], 3, "x").unwrap();
        assert_eq!((kind, payload.as_slice()), (Kind::Contribution, &b"abc"[..]));
    }

    #[test]
    fn refuses_each_broken_field() {
        let good = encode(Kind::Hello, &[7; 8]);
        let broken = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            read(&mut &bytes[..], 8, "peer").unwrap_err().to_string()
        };
        assert!(broken(0, 0).contains("magic"));
        assert!(broken(4, 9).contains("version 9"));
        assert!(broken(6, 99).contains("kind of frame 99"));
        assert!(broken(8, 9).contains("announces 9 bytes"));
        assert!(broken(11, 0xff).contains("at most 8"));
        let cut = read(&mut &good[..15], 8, "peer").unwrap_err().to_string();
        assert!(cut.contains("ends after 3"), "{cut}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            // Nothing to compare: reading must return, not panic, and not accept bytes without the magic.
            let accepted = read(&mut &bytes[..], 64, "fuzz").is_ok();
            prop_assert!(!accepted || bytes.starts_with(b"DpEp"));
            let mut reader = Reader::new(&bytes);
            while reader.block().is_some() {}
            let mut reader = Reader::new(&bytes);
            while reader.text().is_some() {}
        }
    }
}
