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
    Flags(u8),
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
    /// Words of an encoded command, without payload: with the sequence number before them one cache line, all that travels between the two
    /// cores for a command.
    pub(crate) const WORDS: usize = 7;
    /// Which of them is the offset of the source.
    pub(crate) const FROM_OFFSET: usize = 4;
    const ANSWERS: u8 = 1;
    /// Registrations that can be named, besides [`NONE`].
    pub(crate) const REGISTRATIONS: u64 = u32::MAX as u64;

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

    /// Of the value to add and the ticket only one is there: who fetches, or answers, signals nothing.
    pub(crate) fn encode(&self) -> [u64; Self::WORDS] {
        // NONE becomes the largest number of 32 bits; registrations have smaller ones (`Comm::register` sees to that).
        let short = |registration: u64| u64::from(registration as u32);
        let flags = if self.answers { Self::ANSWERS } else { 0 };
        let Self { size, to, from, signal, .. } = *self;
        let first = u64::from(self.kind as u8 | flags << 4)
            | u64::from(self.stream) << 8
            | u64::from(self.source_rank) << 16
            | short(signal.0) << 32;
        let value = if self.has_signal() { self.add } else { self.ticket };
        [first, size, short(to.0) | short(from.0) << 32, to.1, from.1, signal.1, value]
    }

    /// Checks all that can be checked without knowing the registrations. The payload is filled in by the caller.
    pub(crate) fn decode(words: &[u64; Self::WORDS]) -> Result<Self, CommandError> {
        let [first, size, places, to_offset, from_offset, signal_offset, value] = *words;
        let long = |short: u32| if short == u32::MAX { NONE } else { u64::from(short) };
        let (to, from, signal) =
            (long(places as u32), long((places >> 32) as u32), long((first >> 32) as u32));
        let kind = match first as u8 & 15 {
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
        let flags = first as u8 >> 4;
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
            add: if signal == NONE { 0 } else { value },
            ticket: if signal == NONE { value } else { 0 },
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
            words[0] = words[0] & 0xffff_ffff_ffff_0010 | u64::from(kind) | u64::from(stream) << 8;
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
    fn the_offset_of_the_source_is_where_it_is_said_to_be() {
        let command = Command { size: 8, from: (3, 0x1234), ..Command::new(Kind::Pull, 1) };
        assert_eq!(command.encode()[Command::FROM_OFFSET], 0x1234);
    }

    #[test]
    fn what_no_sender_writes_is_refused() {
        let good = Command { size: 8, ..Command::new(Kind::Pull, 1) };
        assert_eq!(Command::decode(&good.encode()), Ok(good));
        let mut words = good.encode();
        words[0] |= 0xff;
        assert_eq!(Command::decode(&words), Err(CommandError::Kind(15)));
        let mut words = good.encode();
        words[0] |= 0x20;
        assert_eq!(Command::decode(&words), Err(CommandError::Flags(2)));
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
