//! Requests. What NCCL holds is a number that says by itself what to look at: nothing is allocated for it, and none can dangle.

use crate::ring::STREAMS;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ticket {
    /// Done from the start.
    Done,
    /// Done once all commands below `end` of a stream to a rank are.
    Post { rank: usize, stream: usize, end: u64 },
    /// Done once the answer to a fetch from a rank is here.
    Fetch { rank: usize, stream: usize, index: u32 },
}

const SEQUENCE_BITS: u32 = 44;
const RANK_BITS: u32 = 12;
const STREAM_BITS: u32 = 4;

/// Ranks that a ticket can name.
pub(crate) const MAX_RANKS: usize = 1 << RANK_BITS;

const _: () = assert!(STREAMS <= 1 << STREAM_BITS);

impl Ticket {
    /// Never zero: NCCL takes that for "nothing to do".
    pub(crate) fn encode(self) -> usize {
        let pack = |kind: u64, rank: usize, stream: usize, value: u64| {
            value & ((1 << SEQUENCE_BITS) - 1)
                | (rank as u64) << SEQUENCE_BITS
                | (stream as u64) << (SEQUENCE_BITS + RANK_BITS)
                | kind << (SEQUENCE_BITS + RANK_BITS + STREAM_BITS)
        };
        let bits = match self {
            Self::Done => pack(1, 0, 0, 0),
            Self::Post { rank, stream, end } => pack(2, rank, stream, end),
            Self::Fetch { rank, stream, index } => pack(3, rank, stream, index.into()),
        };
        bits as usize
    }

    pub(crate) fn decode(bits: usize) -> Option<Self> {
        let bits = bits as u64;
        let value = bits & ((1 << SEQUENCE_BITS) - 1);
        let rank = (bits >> SEQUENCE_BITS) as usize & (MAX_RANKS - 1);
        let stream = (bits >> (SEQUENCE_BITS + RANK_BITS)) as usize & ((1 << STREAM_BITS) - 1);
        if stream >= STREAMS {
            return None;
        }
        match bits >> (SEQUENCE_BITS + RANK_BITS + STREAM_BITS) {
            1 => Some(Self::Done),
            2 => Some(Self::Post { rank, stream, end: value }),
            3 => Some(Self::Fetch { rank, stream, index: u32::try_from(value).ok()? }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_survive_as_pointers() {
        for ticket in [
            Ticket::Done,
            Ticket::Post { rank: 0, stream: 0, end: 0 },
            Ticket::Post { rank: MAX_RANKS - 1, stream: STREAMS - 1, end: (1 << SEQUENCE_BITS) - 1 },
            Ticket::Fetch { rank: 15, stream: 2, index: u32::MAX },
        ] {
            assert_ne!(ticket.encode(), 0);
            assert_eq!(Ticket::decode(ticket.encode()), Some(ticket));
        }
        assert_eq!(Ticket::decode(0), None);
        assert_eq!(Ticket::decode(usize::MAX), None);
    }
}
