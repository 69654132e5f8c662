//! Frames: a header of 32 bytes, and for a command its words and payload.

use crate::net::handle_version;
use crate::ring::{Command, CommandError, INLINE, Kind, STREAMS};
use bytemuck::{Pod, Zeroable};
use std::io::{self, Read};

const MAGIC: u32 = u32::from_le_bytes(*b"gsfr");
/// Bytes of a header.
pub(crate) const HEADER: usize = size_of::<Raw>();
/// Bytes of a command's words.
pub(crate) const WORDS: usize = Command::WORDS * 8;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Raw {
    magic: u32,
    version: u16,
    kind: u16,
    /// Bytes that follow the header.
    length: u32,
    reserved: u32,
    value: u64,
    stream: u64,
}

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A command with this sequence number; its words and payload follow.
    Command { sequence: u64, length: u32 },
    /// All commands of the stream below this sequence number have been carried out.
    Done { stream: usize, below: u64 },
    /// The other side closes in order, and will send no more commands.
    Closed,
    /// An answer to `Closed`.
    Goodbye,
    /// The other side can work no more.
    Failed,
}

/// Why the bytes are no frame.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("bytes of another protocol")]
    Foreign,
    #[error("a frame of kind {kind} with {length} bytes")]
    Shape { kind: u16, length: u32 },
    #[error("the completion of stream {0} of {STREAMS}")]
    Stream(u64),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("{found} bytes of payload, and the command has {expected}")]
    Payload { found: u64, expected: u64 },
    #[error("command {found}, and {expected} is the next one")]
    Sequence { found: u64, expected: u64 },
    #[error("more commands than the ring has room for")]
    Overrun,
    #[error("staged payload before there is staging memory")]
    NoStaging,
}

/// Where a reader puts what comes.
pub(crate) trait Sink {
    /// The place of a staged payload, or why it cannot have one.
    fn place(&mut self, sequence: u64, command: &Command) -> Result<&mut [u8], FrameError>;
    /// A whole command, with its payload in place.
    fn command(&mut self, sequence: u64, command: &Command) -> Result<(), FrameError>;
    /// Any other frame.
    fn other(&mut self, frame: Frame) -> Result<(), FrameError>;
}

impl Frame {
    pub(crate) fn encode(self) -> [u8; HEADER] {
        let (kind, length, value, stream) = match self {
            Self::Command { sequence, length } => (1, length, sequence, 0),
            Self::Done { stream, below } => (2, 0, below, stream as u64),
            Self::Closed => (3, 0, 0, 0),
            Self::Goodbye => (4, 0, 0, 0),
            Self::Failed => (5, 0, 0, 0),
        };
        bytemuck::cast(Raw {
            magic: MAGIC,
            version: handle_version(),
            kind,
            length,
            reserved: 0,
            value,
            stream,
        })
    }

    pub(crate) fn decode(bytes: [u8; HEADER]) -> Result<Self, FrameError> {
        let Raw { magic, version, kind, length, reserved, value, stream } = bytemuck::cast(bytes);
        if magic != MAGIC || version != handle_version() || reserved != 0 {
            return Err(FrameError::Foreign);
        }
        Ok(match (kind, length) {
            (1, length) if length as usize >= WORDS => Self::Command { sequence: value, length },
            (2, 0) if stream < STREAMS as u64 => Self::Done { stream: stream as usize, below: value },
            (2, 0) => return Err(FrameError::Stream(stream)),
            (3, 0) => Self::Closed,
            (4, 0) => Self::Goodbye,
            (5, 0) => Self::Failed,
            _ => return Err(FrameError::Shape { kind, length }),
        })
    }
}

/// Bytes of payload that travel with a command.
pub(crate) fn payload(command: &Command) -> u64 {
    match command.kind {
        Kind::Inline | Kind::Staged => command.size,
        _ => 0,
    }
}

/// Reads one frame and hands it to the sink.
pub(crate) fn read(from: &mut impl Read, sink: &mut impl Sink) -> Result<(), FrameError> {
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let (sequence, length) = match Frame::decode(header)? {
        Frame::Command { sequence, length } => (sequence, length),
        other => return sink.other(other),
    };
    let mut words = [0u64; Command::WORDS];
    from.read_exact(bytemuck::bytes_of_mut(&mut words))?;
    let mut command = Command::decode(&words)?;
    let expected = payload(&command);
    let found = u64::from(length) - WORDS as u64;
    if found != expected {
        return Err(FrameError::Payload { found, expected });
    }
    match command.kind {
        Kind::Inline => {
            // Decoding has checked that it fits.
            from.read_exact(&mut command.inline[..expected.min(INLINE) as usize])?;
        }
        Kind::Staged => from.read_exact(sink.place(sequence, &command)?)?,
        _ => {}
    }
    sink.command(sequence, &command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::{CHUNK, STAGING};
    use proptest::prelude::*;

    /// Keeps what comes, as a ring would.
    struct Keep {
        staging: Vec<u8>,
        commands: Vec<(u64, Command, Vec<u8>)>,
        others: Vec<Frame>,
    }

    impl Keep {
        fn new() -> Self {
            Self { staging: vec![0; STAGING as usize], commands: Vec::new(), others: Vec::new() }
        }
    }

    fn range(command: &Command) -> std::ops::Range<usize> {
        command.from.1 as usize..(command.from.1 + command.size) as usize
    }

    impl Sink for Keep {
        fn place(&mut self, _: u64, command: &Command) -> Result<&mut [u8], FrameError> {
            // Out of bounds panics here, and so fails the test.
            Ok(&mut self.staging[range(command)])
        }
        fn command(&mut self, sequence: u64, command: &Command) -> Result<(), FrameError> {
            let bytes = match command.kind {
                Kind::Inline => command.inline[..command.size as usize].to_vec(),
                Kind::Staged => self.staging[range(command)].to_vec(),
                _ => Vec::new(),
            };
            self.commands.push((sequence, *command, bytes));
            Ok(())
        }
        fn other(&mut self, frame: Frame) -> Result<(), FrameError> {
            self.others.push(frame);
            Ok(())
        }
    }

    fn encode(sequence: u64, command: &Command, bytes: &[u8]) -> Vec<u8> {
        let length = (WORDS + bytes.len()) as u32;
        let mut out = Frame::Command { sequence, length }.encode().to_vec();
        out.extend_from_slice(bytemuck::cast_slice(&command.encode()));
        out.extend_from_slice(bytes);
        out
    }

    fn staged(offset: u64, size: u64) -> Command {
        Command { size, from: (crate::ring::NONE, offset), ..Command::new(Kind::Staged, 2) }
    }

    #[test]
    fn frames_survive_the_wire() {
        let value = Command { size: 5, inline: [9; 64], ..Command::new(Kind::Inline, 1) };
        let mut bytes = encode(7, &value, &value.inline[..5]);
        bytes.extend(encode(8, &staged(1000, 3), b"abc"));
        bytes.extend(Frame::Done { stream: 3, below: 8 }.encode());
        bytes.extend(Frame::Closed.encode());
        let mut keep = Keep::new();
        let mut from = bytes.as_slice();
        for _ in 0..4 {
            read(&mut from, &mut keep).unwrap();
        }
        assert_eq!(keep.commands[0].2, [9; 5]);
        assert_eq!((keep.commands[1].0, keep.commands[1].2.as_slice()), (8, b"abc".as_slice()));
        assert_eq!(keep.others, [Frame::Done { stream: 3, below: 8 }, Frame::Closed]);
        assert!(matches!(read(&mut from, &mut keep), Err(FrameError::Io(_))));
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let mut keep = Keep::new();
        let bytes = encode(0, &staged(0, 4), b"abcdefgh");
        assert!(matches!(
            read(&mut bytes.as_slice(), &mut keep),
            Err(FrameError::Payload { found: 8, expected: 4 })
        ));
        let bytes = encode(0, &staged(STAGING - 2, 4), b"abcd");
        assert!(matches!(read(&mut bytes.as_slice(), &mut keep), Err(FrameError::Command(_))));
        let bytes = encode(0, &staged(0, CHUNK + 1), b"");
        assert!(matches!(read(&mut bytes.as_slice(), &mut keep), Err(FrameError::Command(_))));
        let bytes = Frame::Command { sequence: 0, length: 8 }.encode();
        assert!(matches!(
            read(&mut bytes.as_slice(), &mut keep),
            Err(FrameError::Shape { kind: 1, length: 8 })
        ));
        assert!(keep.commands.is_empty());
    }

    /// Streams of frames with some of their bytes changed: whatever the reader accepts is in bounds (the sink panics otherwise).
    #[test]
    fn damaged_streams_never_leave_their_bounds() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut keep = Keep::new();
        let (mut refused, mut accepted) = (0, 0);
        for round in 0..200_000u64 {
            let command = if random() % 2 == 0 {
                staged(random() % STAGING, random() % 512)
            } else {
                Command { size: random() % 65, ..Command::new(Kind::Inline, (random() % 4) as usize) }
            };
            let mut bytes = encode(round, &command, &vec![0x5a; payload(&command) as usize]);
            for _ in 0..random() % 4 {
                let at = random() as usize % bytes.len().min(HEADER + WORDS);
                bytes[at] ^= 1 << (random() % 8);
            }
            match read(&mut bytes.as_slice(), &mut keep) {
                Ok(()) => accepted += 1,
                Err(_) => refused += 1,
            }
            keep.commands.clear();
            keep.others.clear();
        }
        assert!(accepted > 10_000 && refused > 10_000, "{accepted} accepted, {refused} refused");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512), good in any::<bool>()) {
            let mut bytes = bytes;
            if good && bytes.len() >= HEADER {
                // Past the first check, so that the rest is tried as well.
                bytes[..8].copy_from_slice(&Frame::Closed.encode()[..8]);
                bytes[6] = bytes[8] % 7;
                bytes[12..16].fill(0);
            }
            let mut keep = Keep::new();
            let mut from = bytes.as_slice();
            while read(&mut from, &mut keep).is_ok() {}
        }
    }
}
