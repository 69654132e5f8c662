//! The kernels' sources: embedded files, and one generated header with everything that Rust knows first.

use std::fmt::Write as _;

use super::collective::Collective;
use super::params::{
    BarrierParams, CollectiveParams, CombineParams, DispatchParams, Domain, MultimemBarrierParams,
    PacketArea, PacketCombineParams, PacketDispatchParams,
};
use super::sizes::PacketSizes;
use crate::layout::{
    COLLECTIVE_BLOCKS, CountsLayout, GROUP_BYTES, GROUP_PACKETS, IndexWidth, MAX_BLOCKS, MAX_PACKET_TOKENS,
    MAX_RANKS, MAX_SENDERS, MAX_TOPK, Operation, PACKET_BYTES, Phase, Placement, REGION_ALIGNMENT,
    RecordKind, STATUS_RECORD_BYTES, StatusRecord, Ticket, WorkspaceLayout,
};

/// A kernel, in one of the variants that are compiled separately. Sizes are arguments; what is fixed here changes the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// Barrier of all ranks.
    Barrier {
        /// Ranks of the domain.
        ranks: usize,
    },
    /// Dispatch.
    Dispatch {
        /// Ranks of the domain.
        ranks: usize,
        /// Arrangement of received rows.
        placement: Placement,
        /// Width of expert ids.
        index: IndexWidth,
    },
    /// Combine.
    Combine {
        /// Ranks of the domain.
        ranks: usize,
        /// Arrangement of the rows that come in.
        placement: Placement,
        /// Rows of a token are summed where they are before they travel.
        reduce_first: bool,
    },
    /// Combine of the plain layout whose rows are read where they are, by several ranks.
    PullCombine {
        /// Ranks of the domain, at least 2.
        ranks: usize,
    },
    /// Dispatch of a small batch, in packets.
    PacketDispatch {
        /// Ranks of the domain.
        ranks: usize,
        /// Arrangement of received rows.
        placement: Placement,
        /// Width of expert ids.
        index: IndexWidth,
        /// Sizes that are constants; without them all are arguments.
        sizes: Option<PacketSizes>,
    },
    /// Combine of a small batch, in packets. Rows of a token are summed where they are.
    PacketCombine {
        /// Ranks of the domain.
        ranks: usize,
        /// Arrangement of the rows that come in.
        placement: Placement,
        /// Sizes that are constants; without them all are arguments.
        sizes: Option<PacketSizes>,
    },
    /// All-gather, reduce-scatter or all-reduce.
    Collective(Collective),
    /// Meeting of all ranks before and after copies by copy engines.
    Meet {
        /// Ranks of the domain.
        ranks: usize,
    },
    /// Barrier of all ranks over multicast.
    MultimemBarrier {
        /// Ranks of the domain.
        ranks: usize,
    },
}

/// Threads of a block of dispatch, combine and the collectives.
pub(crate) const THREADS: usize = 512;
/// Threads of a block of a combine that sums before it sends: three warps on each quarter of a multiprocessor, for more registers.
pub(crate) const SUM_THREADS: usize = 384;
/// Threads of a block of a dispatch in packets: two blocks fit on a multiprocessor.
pub(crate) const PACKET_DISPATCH_THREADS: usize = 384;
/// Threads of a block of a combine in packets: 128 tokens of 14 KB are a piece for each warp that sends, and one for each that sums.
pub(crate) const PACKET_COMBINE_THREADS: usize = 512;
/// With as many tokens of peers a combine in packets, if it is made for its sizes, deals out halves of pieces: then a warp has all rows of a token on their way.
pub(crate) const PACKET_FEW_TOKENS: usize = 32;
/// Shared memory of the control words of a block of a dispatch in packets.
pub(crate) const PACKET_CONTROL_BYTES: usize = 320;
/// Threads of a barrier kernel's block.
pub(crate) const BARRIER_THREADS: usize = 32;
/// Shared memory of a dispatch block's control words.
pub(crate) const DISPATCH_CONTROL_BYTES: usize = 4096;
/// Bytes of a row that a warp of combine loads and sums at a time.
pub(crate) const PIECE_BYTES: usize = 2048;
/// Parts that the tokens of a combine are divided into: some are pulled, the others sent.
pub(crate) const PULL_PARTS: usize = 64;
/// Shared memory of a combine block's control words.
pub(crate) const COMBINE_CONTROL_BYTES: usize = 3584;

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../kernels/", $name)))),*]
    };
}

/// Files that kernels include, by the name they include them by.
const HEADERS: &[(&str, &str)] = embedded![
    "arch/types.cuh",
    "arch/packet.cuh",
    "arch/ld_st.cuh",
    "arch/fence.cuh",
    "arch/mbarrier.cuh",
    "arch/bulk.cuh",
    "arch/time.cuh",
    "arch/launch.cuh",
    "arch/bf16.cuh",
    "arch/f16.cuh",
    "arch/multimem.cuh",
    "common/warp.cuh",
    "common/timeline.cuh",
    "common/element.cuh",
    "comm/heap.cuh",
    "comm/wait.cuh",
    "comm/announce.cuh",
    "comm/begun.cuh",
    "comm/pieces.cuh",
    "comm/packets.cuh",
    "comm/call.cuh",
    "comm/user.cuh",
    "comm/cells.cuh",
    "comm/stages.cuh",
    "ops/dispatch/block.cuh",
    "ops/dispatch/output.cuh",
    "ops/dispatch/report.cuh",
    "ops/dispatch/tokens.cuh",
    "ops/dispatch/count.cuh",
    "ops/dispatch/exchange.cuh",
    "ops/dispatch/tables.cuh",
    "ops/dispatch/send.cuh",
    "ops/dispatch/move.cuh",
    "ops/combine/block.cuh",
    "ops/combine/sum.cuh",
    "ops/combine/direct.cuh",
    "ops/combine/gather.cuh",
    "ops/combine/pull.cuh",
    "ops/combine/send.cuh",
    "ops/combine/send_sum.cuh",
    "ops/combine/reduce.cuh",
    "ops/packets/block.cuh",
    "ops/packets/send.cuh",
    "ops/packets/incoming.cuh",
    "ops/packets/count.cuh",
    "ops/packets/place.cuh",
    "ops/packets/back.cuh",
];

/// Headers that need nothing generated: wrappers of instructions, and packets.
pub(super) fn pure_headers() -> Vec<(&'static str, String)> {
    let pure = HEADERS.iter().filter(|(name, _)| name.starts_with("arch/") || *name == "comm/pieces.cuh");
    pure.map(|&(name, text)| (name, text.to_owned())).collect()
}

impl Program {
    /// Name of the kernel's function.
    pub const fn entry(&self) -> &'static str {
        match self {
            Self::Barrier { .. } => "deepep_barrier",
            Self::Dispatch { .. } => "deepep_dispatch",
            Self::Combine { .. } | Self::PullCombine { .. } => "deepep_combine",
            Self::PacketDispatch { .. } => "deepep_packet_dispatch",
            Self::PacketCombine { .. } => "deepep_packet_combine",
            Self::Collective(collective) => collective.entry(),
            Self::Meet { .. } => "deepep_meet",
            Self::MultimemBarrier { .. } => "deepep_multimem_barrier",
        }
    }

    /// Ranks that the kernel is compiled for.
    pub const fn ranks(&self) -> usize {
        match *self {
            Self::Barrier { ranks }
            | Self::Dispatch { ranks, .. }
            | Self::Combine { ranks, .. }
            | Self::PullCombine { ranks }
            | Self::PacketDispatch { ranks, .. }
            | Self::PacketCombine { ranks, .. }
            | Self::Meet { ranks }
            | Self::MultimemBarrier { ranks }
            | Self::Collective(Collective { ranks, .. }) => ranks,
        }
    }

    /// Every kernel for a number of ranks, without those for certain sizes.
    pub fn all(ranks: usize) -> Vec<Self> {
        let mut all = vec![Self::Barrier { ranks }];
        for placement in [Placement::Plain, Placement::Expanded] {
            for index in [IndexWidth::Bits32, IndexWidth::Bits64] {
                all.push(Self::Dispatch { ranks, placement, index });
                all.push(Self::PacketDispatch { ranks, placement, index, sizes: None });
            }
            all.push(Self::PacketCombine { ranks, placement, sizes: None });
        }
        all.push(Self::Combine { ranks, placement: Placement::Plain, reduce_first: true });
        for reduce_first in [true, false] {
            all.push(Self::Combine { ranks, placement: Placement::Expanded, reduce_first });
        }
        // One rank has nobody to collect from.
        if ranks > 1 {
            all.push(Self::PullCombine { ranks });
            all.push(Self::Meet { ranks });
            all.push(Self::MultimemBarrier { ranks });
            all.extend(Collective::all(ranks).into_iter().map(Self::Collective));
        }
        all
    }

    /// Headers, by name.
    pub(crate) fn headers(&self) -> Vec<(&'static str, String)> {
        let mut all: Vec<_> = HEADERS.iter().map(|&(name, text)| (name, text.to_owned())).collect();
        all.push(("generated.cuh", self.generated()));
        all
    }

    /// The source itself.
    pub(crate) const fn source(&self) -> &'static str {
        match self {
            Self::Barrier { .. } => include_str!("../../kernels/ops/barrier.cu"),
            Self::Dispatch { .. } => include_str!("../../kernels/ops/dispatch.cu"),
            Self::Combine { .. } | Self::PullCombine { .. } => {
                include_str!("../../kernels/ops/combine.cu")
            }
            Self::PacketDispatch { .. } => include_str!("../../kernels/ops/packet_dispatch.cu"),
            Self::PacketCombine { .. } => include_str!("../../kernels/ops/packet_combine.cu"),
            Self::Collective(collective) => collective.source(),
            Self::Meet { .. } => include_str!("../../kernels/ops/meet.cu"),
            Self::MultimemBarrier { .. } => include_str!("../../kernels/ops/multimem_barrier.cu"),
        }
    }

    /// Constants and structs that exist once, in Rust.
    fn generated(&self) -> String {
        let (expanded, reduce_first, index_bits, threads) = match *self {
            Self::Barrier { .. } | Self::Meet { .. } | Self::MultimemBarrier { .. } => {
                (false, true, 32, BARRIER_THREADS)
            }
            Self::Collective(_) | Self::PullCombine { .. } => (false, true, 32, THREADS),
            Self::PacketCombine { placement, .. } => {
                (placement == Placement::Expanded, true, 32, PACKET_COMBINE_THREADS)
            }
            Self::Dispatch { placement, index, .. } => {
                (placement == Placement::Expanded, true, index.bytes() * 8, THREADS)
            }
            Self::PacketDispatch { placement, index, .. } => {
                (placement == Placement::Expanded, true, index.bytes() * 8, PACKET_DISPATCH_THREADS)
            }
            Self::Combine { placement, reduce_first, .. } => {
                let expanded = placement == Placement::Expanded;
                let threads = if expanded && reduce_first { SUM_THREADS } else { THREADS };
                (expanded, reduce_first || !expanded, 32, threads)
            }
        };
        let mut text = String::from("#pragma once\n#include \"arch/types.cuh\"\n");
        let mut line = |what: std::fmt::Arguments<'_>| {
            // Writing to a String can't fail.
            let _ = writeln!(text, "{what}");
        };
        line(format_args!("#define INDEX_BITS {index_bits}"));
        let pull = matches!(self, Self::PullCombine { .. });
        line(format_args!(
            "constexpr bool EXPANDED = {expanded}, REDUCE_FIRST = {reduce_first}, PULL = {pull};"
        ));
        if let Self::Collective(collective) = self {
            line(format_args!("{}", collective.constants()));
        }
        if let Self::PacketDispatch { sizes, .. } | Self::PacketCombine { sizes, .. } = *self {
            line(format_args!("{}", PacketSizes::constants(sizes)));
        }
        let numbers = [
            ("RANKS", self.ranks()),
            ("THREADS", threads),
            ("MAX_RANKS", MAX_RANKS),
            ("MAX_TOPK", MAX_TOPK),
            ("MAX_BLOCKS", MAX_BLOCKS),
            ("MAX_SENDERS", MAX_SENDERS),
            ("COLLECTIVE_BLOCKS", COLLECTIVE_BLOCKS),
            ("CELL_LINE", WorkspaceLayout::LINE),
            ("CELL_CALL", WorkspaceLayout::CELL_CALL),
            ("CELL_PLACE", WorkspaceLayout::CELL_PLACE),
            ("COUNT_PAIRS", WorkspaceLayout::count_pairs(self.ranks())),
            ("TICKET_SEND", Ticket::Send as usize),
            ("TICKET_OWN", Ticket::Own as usize),
            ("TICKET_INCOMING", Ticket::Incoming as usize),
            ("TICKET_RETURN", Ticket::Return as usize),
            ("TICKET_SUM", Ticket::Sum as usize),
            ("TICKET_READ", Ticket::Read as usize),
            ("TICKET_KINDS", Ticket::COUNT),
            ("STATUS_RECORD_BYTES", STATUS_RECORD_BYTES),
            ("RECORD_ABORT", RecordKind::Abort as usize),
            ("RECORD_BAD_EXPERT", RecordKind::BadExpert as usize),
            ("RECORD_DUPLICATE_EXPERT", RecordKind::DuplicateExpert as usize),
            ("RECORD_CAPACITY", RecordKind::Capacity as usize),
            ("HOST_RANK_PSUM", CountsLayout::RANK_PSUM),
            ("HOST_EXPERT_COUNT", CountsLayout::EXPERT_COUNT),
            ("DISPATCH_CONTROL_BYTES", DISPATCH_CONTROL_BYTES),
            ("COMBINE_CONTROL_BYTES", COMBINE_CONTROL_BYTES),
            ("PIECE_BYTES", PIECE_BYTES),
            ("PULL_PARTS", PULL_PARTS),
            ("READABLE_UNIT", REGION_ALIGNMENT),
            ("PACKET_CONTROL_BYTES", PACKET_CONTROL_BYTES),
            ("FEW_TOKENS", PACKET_FEW_TOKENS),
            ("PACKET_BYTES", PACKET_BYTES),
            ("MAX_PACKET_TOKENS", MAX_PACKET_TOKENS),
            ("GROUP_PACKETS", GROUP_PACKETS),
            ("GROUP_BYTES", GROUP_BYTES),
        ];
        for (name, value) in numbers {
            line(format_args!("constexpr u32 {name} = {value};"));
        }
        for (name, value) in Operation::NAMED.iter().chain(Phase::NAMED) {
            line(format_args!("constexpr u32 {name} = {value};"));
        }
        let structs = [
            ("StatusRecord", StatusRecord::CUDA, size_of::<StatusRecord>()),
            ("Domain", Domain::CUDA, size_of::<Domain>()),
            ("BarrierParams", BarrierParams::CUDA, size_of::<BarrierParams>()),
            ("DispatchParams", DispatchParams::CUDA, size_of::<DispatchParams>()),
            ("CombineParams", CombineParams::CUDA, size_of::<CombineParams>()),
            ("PacketArea", PacketArea::CUDA, size_of::<PacketArea>()),
            ("PacketDispatchParams", PacketDispatchParams::CUDA, size_of::<PacketDispatchParams>()),
            ("PacketCombineParams", PacketCombineParams::CUDA, size_of::<PacketCombineParams>()),
            ("CollectiveParams", CollectiveParams::CUDA, size_of::<CollectiveParams>()),
            ("MultimemBarrierParams", MultimemBarrierParams::CUDA, size_of::<MultimemBarrierParams>()),
        ];
        for (name, declaration, bytes) in structs {
            line(format_args!("{declaration}static_assert(sizeof({name}) == {bytes}, \"{name}\");"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `#include` names an embedded file, and every file is used: a forgotten one would only show on a machine with NVRTC.
    #[test]
    fn includes_are_complete() {
        let program = Program::Barrier { ranks: 2 };
        let headers = program.headers();
        let mut used = std::collections::HashSet::new();
        let sources = Program::all(2).into_iter().map(|p| (p.entry(), p.source().to_owned()));
        for (name, text) in sources.chain(headers.iter().cloned()) {
            for include in text.lines().filter_map(|l| l.strip_prefix("#include \"")) {
                let include = include.trim_end_matches('"');
                assert!(headers.iter().any(|(n, _)| *n == include), "{name} includes {include}");
                used.insert(include.to_owned());
            }
        }
        for (name, _) in &headers {
            assert!(used.contains(*name), "{name} is not used");
        }
    }

    #[test]
    fn variants_differ_in_the_generated_header_only() {
        let texts: std::collections::HashSet<_> =
            Program::all(4).into_iter().map(|p| (p.entry(), p.generated())).collect();
        assert_eq!(texts.len(), Program::all(4).len());
        let text = Program::Dispatch { ranks: 3, placement: Placement::Expanded, index: IndexWidth::Bits64 }
            .generated();
        assert!(
            text.contains("constexpr u32 RANKS = 3;") && text.contains("#define INDEX_BITS 64"),
            "{text}"
        );
        assert!(text.contains("constexpr bool EXPANDED = true"), "{text}");
        assert!(text.contains("    u64 heap[8];\n"), "{text}");
    }
}
