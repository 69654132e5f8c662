//! What the hardware of this run can do at most: rates of the links and of memory, times of a flag and of an empty kernel.
//!
//! All devices work at once, both directions of the links are busy, the slowest device counts, and everything that was moved is compared
//! with what was sent. See [`Board::measure`].

mod board;
mod boxes;
mod exchange;
mod kernels;
mod measure;

pub use board::Board;
pub use boxes::{Boxes, Rows};
pub use exchange::{Batch, Deal, EPOCH_BLOCKS, Room, Way};
pub use kernels::{ENTRIES, Exchange, Meeting, Ring, Transfer, compile, source};
pub use measure::Extent;

use std::fmt;

use deepep_core::jit::JitError;
use serde::{Deserialize, Serialize};

use crate::gpu::GpuError;

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Copy engines write to all peers. GB/s into each device.
    CopyEngine,
    /// 16-byte stores to all peers. GB/s into each device.
    Stores,
    /// Bulk stores to all peers. GB/s into each device.
    BulkStores,
    /// Bulk reads from all peers. GB/s into each device.
    BulkReads,
    /// Bulk stores to the device's own memory. GB/s.
    LocalStores,
    /// Bulk loads and stores in the device's own memory. GB/s, bytes counted once.
    LocalCopy,
    /// A flag, from one device to the next. µs.
    Flag,
    /// A flag between two kernels on one device. µs.
    LocalFlag,
    /// A pair of kernels in a graph of pairs, that exchange packets of as many bytes as an FP8 dispatch of a few tokens to one other rank has, and a BF16
    /// combine, and do nothing else. µs.
    PacketExchange,
    /// An empty kernel, from event to event. µs.
    Launch,
    /// An empty kernel in a chain of them. µs.
    ChainedLaunch,
    /// An empty kernel in a graph of them. µs.
    GraphLaunch,
    /// Host time of launching an empty kernel. µs.
    HostLaunch,
}

impl Kind {
    /// `GB/s` or `µs`.
    pub const fn unit(self) -> &'static str {
        match self {
            Self::CopyEngine
            | Self::Stores
            | Self::BulkStores
            | Self::BulkReads
            | Self::LocalStores
            | Self::LocalCopy => "GB/s",
            _ => "µs",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CopyEngine => "copy engine to peers",
            Self::Stores => "16-byte stores to peers",
            Self::BulkStores => "bulk stores to peers",
            Self::BulkReads => "bulk reads from peers",
            Self::LocalStores => "bulk stores, own memory",
            Self::LocalCopy => "bulk copy, own memory",
            Self::Flag => "flag to a peer",
            Self::LocalFlag => "flag on one device",
            Self::PacketExchange => "packet exchange, there and back",
            Self::Launch => "empty kernel, event to event",
            Self::ChainedLaunch => "empty kernel in a chain",
            Self::GraphLaunch => "empty kernel in a graph",
            Self::HostLaunch => "host time of a launch",
        })
    }
}

/// One ceiling: a median.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceiling {
    /// What.
    pub kind: Kind,
    /// Multiprocessors at work, if that matters.
    pub sms: Option<u32>,
    /// Bytes of a row, if that matters; of dispatched ones with their scales.
    pub row_bytes: Option<u32>,
    /// Tokens of each device, if that matters.
    pub tokens: Option<u32>,
    /// In the kind's unit.
    pub value: f64,
}

impl Ceiling {
    /// A value of something that has but one.
    pub fn of(kind: Kind, value: f64) -> Self {
        Self { kind, sms: None, row_bytes: None, tokens: None, value }
    }

    /// What it is of, in words, without multiprocessors and bytes of a row.
    pub fn name(&self) -> String {
        self.tokens.map_or(self.kind.to_string(), |tokens| format!("{}, T = {tokens}", self.kind))
    }

    /// Whether two values are of the same thing.
    pub fn same_as(&self, other: &Self) -> bool {
        self.key() == other.key()
    }

    /// What it is of, in the order of tables.
    fn key(&self) -> (Kind, Option<u32>, Option<u32>, Option<u32>) {
        (self.kind, self.row_bytes, self.tokens, self.sms)
    }
}

/// The best of a kind: the highest rate.
pub fn best(ceilings: &[Ceiling], kind: Kind) -> Option<f64> {
    ceilings.iter().filter(|c| c.kind == kind).map(|c| c.value).max_by(f64::total_cmp)
}

/// The time of a [packet exchange](Kind::PacketExchange) of batches of this size.
pub fn packet_exchange(ceilings: &[Ceiling], batch: Batch) -> Option<f64> {
    let wanted = batch.ceiling(0.0);
    ceilings.iter().find(|c| c.same_as(&wanted)).map(|c| c.value)
}

/// A ceiling that was measured several times in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drift {
    /// What, with its first value.
    pub first: Ceiling,
    /// The later values.
    pub later: Vec<f64>,
    /// Largest difference from the first one, in percent of it.
    pub percent: f64,
}

/// How ceilings changed over a run; those that were measured once are left out.
pub fn drifts(first: &[Ceiling], later: &[Vec<Ceiling>]) -> Vec<Drift> {
    let of = |first: &Ceiling| {
        let again = later.iter().flatten().filter(|c| c.same_as(first));
        let later: Vec<f64> = again.map(|c| c.value).collect();
        let percent =
            later.iter().map(|value| (value / first.value - 1.0).abs() * 100.0).max_by(f64::total_cmp)?;
        Some(Drift { first: *first, later, percent })
    };
    first.iter().filter_map(of).collect()
}

/// Why no ceiling was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CeilingError {
    /// The driver or the device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The kernels can't be compiled.
    #[error(transparent)]
    Jit(#[from] JitError),
    /// What arrived is not what was sent.
    #[error(
        "{kind}: {wrong} 16-byte pieces on device {device} are not what was sent there; its rate is not shown"
    )]
    Wrong {
        /// What was measured.
        kind: Kind,
        /// The receiver.
        device: i32,
        /// How many.
        wrong: u64,
    },
    /// A kernel gave up waiting.
    #[error("{kind}: a kernel on device {device} gave up waiting")]
    GaveUp {
        /// What was measured.
        kind: Kind,
        /// Where.
        device: i32,
    },
    /// The devices can't be used together.
    #[error("device {from} can't reach the memory of device {to}")]
    Unreachable {
        /// The one.
        from: i32,
        /// The other.
        to: i32,
    },
}

impl From<cuda_vmm::Error> for CeilingError {
    fn from(error: cuda_vmm::Error) -> Self {
        Self::Gpu(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ceiling(kind: Kind, sms: u32, value: f64) -> Ceiling {
        Ceiling { sms: Some(sms), ..Ceiling::of(kind, value) }
    }

    #[test]
    fn the_best_and_the_drift() {
        let first = [
            ceiling(Kind::Stores, 8, 350.0),
            ceiling(Kind::Stores, 32, 360.0),
            ceiling(Kind::BulkReads, 8, 400.0),
        ];
        assert_eq!(best(&first, Kind::Stores), Some(360.0));
        assert_eq!(best(&first, Kind::CopyEngine), None);
        let batch = |tokens| Batch { tokens, hidden: 7168 };
        let exchanges = [batch(1).ceiling(6.0), batch(8).ceiling(7.0)];
        assert_eq!(packet_exchange(&exchanges, batch(8)), Some(7.0));
        assert_eq!(packet_exchange(&exchanges, Batch { hidden: 4096, ..batch(8) }), None);
        let later = [vec![ceiling(Kind::Stores, 8, 357.0)], vec![ceiling(Kind::Stores, 8, 343.0)]];
        let drifts = drifts(&first, &later);
        assert_eq!(drifts.len(), 1);
        assert_eq!(drifts[0].later, [357.0, 343.0]);
        assert!((drifts[0].percent - 2.0).abs() < 1e-9, "{drifts:?}");
    }
}
