//! What a slot says. Another process wrote it: it is checked before anything is done.

use super::{CHUNK, INLINE, STAGING, STREAMS};

/// No registration.
pub(crate) const NONE: u64 = u64::MAX;

/// Where the payload comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// No payload.
    Signal = 0,
    /// In the slot.
    Inline = 1,
    /// From the sender's memory, which the receiver has mapped; from its own for a put to oneself.
    Pull = 2,
    /// In the staging memory, once the slot is ready.
    Staged = 3,
    /// From the memory of another rank, which this one, sender and receiver in one, has mapped.
    Get = 4,
    /// Nowhere yet: the receiver is asked to put it into the sender's memory.
    Fetch = 5,
}

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) kind: Kind,
    /// Stream that carries it out: the same for all commands of a context.
    pub(crate) stream: u8,
    /// Rank whose memory the source is, for a get.
    pub(crate) source_rank: u16,
    /// The last part of the answer to a fetch: `ticket` is that of the fetch.
    pub(crate) answers: bool,
    /// Bytes of payload.
    pub(crate) size: u64,
    /// Registration and offset that the payload goes to. For a fetch: in the memory of the one who asks.
    pub(crate) to: (u64, u64),
    /// Registration and offset that it comes from; for staged payload, the offset in the staging memory.
    pub(crate) from: (u64, u64),
    /// Registration and offset of the word to add to; [`NONE`] for no signal.
    pub(crate) signal: (u64, u64),
    /// What to add.
    pub(crate) add: u64,
    /// Names a fetch to the one who asked.
    pub(crate) ticket: u64,
    /// Payload of [`Kind::Inline`].
    pub(crate) inline: [u8; INLINE as usize],
}

/// Why a command was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("a command of kind {0}")]
    Kind(u8),
    #[error("a command for stream {0} of {STREAMS}")]
    Stream(u8),
    #[error("a command with unknown flags {0:#x}")]
    Flags(u32),
    #[error("{size} bytes in a slot")]
    Inline { size: u64 },
    #[error("{size} staged bytes at {offset} of {STAGING}")]
    Staged { offset: u64, size: u64 },
    #[error("a signal at offset {0}, which is no multiple of 8")]
    Signal(u64),
    #[error("a copy of no bytes")]
    Empty,
}

impl Command {
    /// Words of an encoded command, without payload.
    pub(crate) const WORDS: usize = 10;
    const ANSWERS: u32 = 1;

    /// A command that does nothing yet.
    pub(crate) const fn new(kind: Kind, stream: usize) -> Self {
        Self {
            kind,
            stream: (stream % STREAMS) as u8,
            source_rank: 0,
            answers: false,
            size: 0,
            to: (NONE, 0),
            from: (NONE, 0),
            signal: (NONE, 0),
            add: 0,
            ticket: 0,
            inline: [0; INLINE as usize],
        }
    }

    pub(crate) fn has_signal(&self) -> bool {
        self.signal.0 != NONE
    }

    /// For errors.
    pub(crate) fn describe(&self) -> String {
        let Self { kind, size, to, from, signal, .. } = self;
        format!(
            "{kind:?} of {size} bytes to {to:?} from {from:?} with signal {signal:?} (registration, offset)"
        )
    }

    pub(crate) fn encode(&self) -> [u64; Self::WORDS] {
        let flags = if self.answers { Self::ANSWERS } else { 0 };
        let first = u64::from(self.kind as u8)
            | u64::from(self.stream) << 8
            | u64::from(self.source_rank) << 16
            | u64::from(flags) << 32;
        let Self { size, to, from, signal, add, ticket, .. } = *self;
        [first, size, to.0, to.1, from.0, from.1, signal.0, signal.1, add, ticket]
    }

    /// Checks all that can be checked without knowing the registrations. The payload is filled in by the caller.
    pub(crate) fn decode(words: &[u64; Self::WORDS]) -> Result<Self, CommandError> {
        let [first, size, to, to_offset, from, from_offset, signal, signal_offset, add, ticket] = *words;
        let kind = match first as u8 {
            0 => Kind::Signal,
            1 => Kind::Inline,
            2 => Kind::Pull,
            3 => Kind::Staged,
            4 => Kind::Get,
            5 => Kind::Fetch,
            other => return Err(CommandError::Kind(other)),
        };
        let stream = (first >> 8) as u8;
        if usize::from(stream) >= STREAMS {
            return Err(CommandError::Stream(stream));
        }
        let flags = (first >> 32) as u32;
        if flags & !Self::ANSWERS != 0 {
            return Err(CommandError::Flags(flags));
        }
        match kind {
            Kind::Inline if size > INLINE => return Err(CommandError::Inline { size }),
            Kind::Staged if size > CHUNK || from_offset > STAGING - size.min(STAGING) => {
                return Err(CommandError::Staged { offset: from_offset, size });
            }
            Kind::Signal => {}
            _ if size == 0 => return Err(CommandError::Empty),
            _ => {}
        }
        if signal != NONE && signal_offset % 8 != 0 {
            return Err(CommandError::Signal(signal_offset));
        }
        Ok(Self {
            kind,
            stream,
            source_rank: (first >> 16) as u16,
            answers: flags & Self::ANSWERS != 0,
            size,
            to: (to, to_offset),
            from: (from, from_offset),
            signal: (signal, signal_offset),
            add,
            ticket,
            inline: [0; INLINE as usize],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_words_decode_to_something_in_bounds_or_are_refused(words in any::<[u64; Command::WORDS]>(), kind in 0u8..8, stream in 0u8..6) {
            let mut words = words;
            words[0] = words[0] & 0x1_ffff_0000 | u64::from(kind) | u64::from(stream) << 8;
            words[1] %= 2 * CHUNK;
            if let Ok(command) = Command::decode(&words) {
                prop_assert!(usize::from(command.stream) < STREAMS);
                match command.kind {
                    Kind::Inline => prop_assert!(command.size <= INLINE),
                    Kind::Staged => prop_assert!(command.from.1 + command.size <= STAGING),
                    _ => {}
                }
                prop_assert_eq!(Command::decode(&command.encode()), Ok(command));
            }
        }
    }

    #[test]
    fn what_no_sender_writes_is_refused() {
        let good = Command { size: 8, ..Command::new(Kind::Pull, 1) };
        assert_eq!(Command::decode(&good.encode()), Ok(good));
        let mut words = good.encode();
        words[0] |= 0xff;
        assert_eq!(Command::decode(&words), Err(CommandError::Kind(0xff)));
        let staged = Command { size: 16, from: (NONE, STAGING - 8), ..Command::new(Kind::Staged, 0) };
        assert_eq!(
            Command::decode(&staged.encode()),
            Err(CommandError::Staged { offset: STAGING - 8, size: 16 })
        );
        let odd = Command { signal: (0, 4), ..Command::new(Kind::Signal, 0) };
        assert_eq!(Command::decode(&odd.encode()), Err(CommandError::Signal(4)));
        let empty = Command::new(Kind::Pull, 0);
        assert_eq!(Command::decode(&empty.encode()), Err(CommandError::Empty));
    }
}
