//! The kernels that find ceilings, and their parameters.

use std::ffi::CStr;

use deepep_core::device_struct;
use deepep_core::jit::{Arch, Cache, Compiler, Cubin, JitError};
use deepep_core::layout::{GROUP_BYTES, GROUP_PACKETS};

device_struct! {
    /// What a moving kernel moves.
    pub struct Transfer {
        /// Where each target's rows lie.
        target: u64[8],
        /// Rows of a local copy, before.
        source: u64,
        /// Rows for each target.
        rows: u64,
        /// Counter of vectors that differ.
        wrong: u64,
        /// Counter of waits that ended at their deadline.
        late: u64,
        /// The deadline.
        timeout_ns: u64,
        /// Number of targets.
        targets: u32,
        /// Bytes of a row, a multiple of 16.
        row_bytes: u32,
        /// Changes the contents.
        round: u32,
        /// Compare every row that is read.
        compare: u32,
        /// When checking: number of warps that have stored, or 0.
        slots: u32,
        /// When checking: which of their targets this is.
        which: u32,
    }
}

device_struct! {
    /// A place in a ring that a word goes round.
    pub struct Ring {
        /// This place's word.
        own: u64,
        /// The next place's word.
        next: u64,
        /// Counter of waits that ended at their deadline.
        late: u64,
        /// The deadline.
        timeout_ns: u64,
        /// How often it goes round.
        rounds: u32,
        /// What the words hold before.
        base: u32,
        /// Whether this place begins.
        leader: u32,
        /// Not used.
        pad: u32,
    }
}

device_struct! {
    /// Places that meet.
    pub struct Meeting {
        /// Each place's words, one for every place.
        words: u64[8],
        /// Word that the host sets to the round when everything is enqueued.
        go: u64,
        /// Counter of waits that ended at their deadline.
        late: u64,
        /// The deadline.
        timeout_ns: u64,
        /// Number of places.
        places: u32,
        /// This one.
        place: u32,
        /// Number of the meeting.
        round: u32,
        /// Not used.
        pad: u32,
    }
}

device_struct! {
    /// What a kernel that exchanges packets sends and receives.
    pub struct Exchange {
        /// Where each peer looks for packets of this device, in order of distance.
        target: u64[8],
        /// What is sent: each peer's pieces, in the same order.
        source: u64,
        /// Where this device looks for packets of each peer.
        slots: u64,
        /// Where what has come is stored, as in the peers' sources.
        out: u64,
        /// Of each block, how many kernels of this kind it has run.
        epochs: u64,
        /// Counter of waits that ended at their deadline.
        late: u64,
        /// The deadline.
        timeout_ns: u64,
        /// Number of peers.
        targets: u32,
        /// Pieces for each peer, an even number.
        pieces: u32,
        /// The same in shares of a warp.
        items: u32,
        /// Blocks that send, the first ones; 0 if all blocks do both.
        senders: u32,
        /// For the assembler.
        zero: u32,
        /// Not used.
        pad: u32,
    }
}

/// Names of all kernels.
pub const ENTRIES: [&CStr; 10] = [
    c"ceiling_fill",
    c"ceiling_check",
    c"ceiling_empty",
    c"ceiling_store",
    c"ceiling_bulk_store",
    c"ceiling_bulk_read",
    c"ceiling_bulk_copy",
    c"ceiling_ring",
    c"ceiling_meet",
    c"ceiling_exchange",
];

/// The program's source.
pub fn source() -> String {
    let mut text = String::new();
    for header in ["types", "ld_st", "mbarrier", "bulk", "fence", "time", "launch"] {
        text += &format!("#include \"arch/{header}.cuh\"\n");
    }
    text += "#include \"comm/pieces.cuh\"\n";
    for (declaration, name, bytes) in [
        (Transfer::CUDA, "Transfer", size_of::<Transfer>()),
        (Ring::CUDA, "Ring", size_of::<Ring>()),
        (Meeting::CUDA, "Meeting", size_of::<Meeting>()),
        (Exchange::CUDA, "Exchange", size_of::<Exchange>()),
    ] {
        text += &format!("{declaration}static_assert(sizeof({name}) == {bytes}, \"{name}\");\n");
    }
    let (packets, words) = (GROUP_PACKETS, GROUP_BYTES / size_of::<u64>());
    text += &format!("constexpr u32 PIECE_PACKETS = {packets}, PIECE_WORDS = {words};\n");
    text += include_str!("../../../kernels/pattern.cu");
    text += include_str!("../../../kernels/move.cu");
    text += include_str!("../../../kernels/signal.cu");
    text += include_str!("../../../kernels/exchange.cu");
    text
}

/// Compiles the program, or takes it from the cache.
///
/// # Errors
/// As [`Compiler::need_packets`] and [`Compiler::compile_source`].
pub fn compile(compiler: &Compiler, arch: Arch, cache: &Cache) -> Result<Cubin, JitError> {
    compiler.need_packets()?;
    compiler.compile_source("ceilings", &source(), arch, cache)
}
