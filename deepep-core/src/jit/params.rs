//! Arguments of the kernels, declared once for both sides.
//!
//! Addresses are as the launching device sees them; offsets count from the start of a heap, or of a slot where the name says so.

use crate::layout::abi::device_struct;

device_struct! {
    /// The ranks, their heaps, and the cells of the workspace.
    pub(crate) struct Domain {
        /// Base of each rank's heap.
        heap: u64[8],
        /// The status block.
        status: u64,
        /// Longest wait in nanoseconds.
        timeout_ns: u64,
        totals: u64,
        ready: u64,
        done: u64,
        started: u64,
        arrived: u64,
        barrier: u64,
        abort: u64,
        epochs: u64,
        tickets: u64,
        counts: u64,
        chunks: u64,
        reported: u64,
        /// Cells of one rank in `totals`.
        cells: u32,
        /// Cells of one block in `counts`.
        count_cells: u32,
        /// Cells of one set in `arrived`.
        arrived_set: u32,
        /// This rank.
        rank: u32,
        /// Ranks of the domain; kernels are compiled for it, too.
        ranks: u32,
        /// Whether the kernel behind one in its stream may start as soon as all of this one's blocks have.
        early: u32,
    }
}

device_struct! {
    /// Arguments of a barrier.
    pub(crate) struct BarrierParams {
        domain: Domain,
    }
}

device_struct! {
    /// Arguments of a dispatch.
    pub(crate) struct DispatchParams {
        domain: Domain,
        /// Rows, scales, ids and weights of this rank's tokens; 0 where the call has none. `topk_idx` is 0 in a cached dispatch.
        x: u64,
        scales: u64,
        topk_idx: u64,
        weights: u64,
        /// The caller's cumulative `i32[local_experts]`, or 0.
        stats: u64,
        /// Strides of the given scales, in packs.
        scale_row_stride: i64,
        scale_pack_stride: i64,
        /// Strides of the received scales, in packs.
        out_scale_row_stride: i64,
        out_scale_pack_stride: i64,
        /// Slot arrays in every heap.
        outputs: u64,
        output_stride: u64,
        handles: u64,
        handle_stride: u64,
        /// Where rows land whose places are not known yet, in every heap.
        landing: u64,
        landing_stride: u64,
        /// Offsets in an output slot.
        rows: u64,
        out_scales: u64,
        lane_weight: u64,
        lane_expert: u64,
        row_weight: u64,
        /// Offsets in a handle slot.
        source: u64,
        lane_row: u64,
        topk: u64,
        sent_row: u64,
        sent_index: u64,
        own_row: u64,
        counts: u64,
        rank_psum: u64,
        expert_start: u64,
        expert_count: u64,
        lane_place: u64,
        /// Count cells of the status block.
        host_counts: u64,
        /// Value of this rank's place cell and call cell.
        place: u32,
        call: u32,
        tokens: u32,
        max_tokens: u32,
        lanes: u32,
        experts: u32,
        local_experts: u32,
        row_bytes: u32,
        scale_packs: u32,
        /// Scales travel by bulk copies: contiguous multiples of 16 bytes on both sides.
        scales_in_bulk: u32,
        alignment: u32,
        token_capacity: u32,
        row_capacity: u32,
        zero_padding: u32,
        /// Number of the call in the cells of exact counts; 0 if nobody asks.
        count_tag: u32,
        /// Blocks that send; the others move rows inside the rank.
        senders: u32,
        /// Row warps of a block, stages of a row warp, and how many of them may hold rows that are not on their way.
        row_warps: u32,
        stages: u32,
        ahead: u32,
        stage_bytes: u32,
        /// Eighths of a chunk that are drawn by ticket.
        drawn: u32,
        /// Chunks that movers walk side by side; whether the cache is to keep what they write.
        own_parts: u32,
        keep_own: u32,
        /// Offsets in the block's shared memory, behind the stages: control words; base and total of each count; starts of the local
        /// experts; counts of each worker; what is known of the first tokens.
        control: u32,
        base: u32,
        total: u32,
        start: u32,
        worker_counts: u32,
        first_tokens: u32,
        /// The first of as many blocks as send that count this rank's tokens: 0 if those that send do it themselves.
        counters: u32,
        /// Tokens of a chunk, and how many chunks have one more; of a worker, and of one that looks at a chunk's first tokens only. Divisions that the
        /// kernel would begin with.
        chunk_tokens: u32,
        chunk_rest: u32,
        worker_tokens: u32,
        first_share: u32,
        /// Landing slots of a rank, and how many first tokens of a chunk have one.
        landing_slots: u32,
        landed: u32,
        /// Tokens whose lanes fit into a warp, and what a lane is multiplied with for its token: 65536 / K, rounded up.
        step_tokens: u32,
        step_inverse: u32,
    }
}

device_struct! {
    /// Arguments of a combine.
    pub(crate) struct CombineParams {
        domain: Domain,
        /// Rows that come in: one per received token, or per expanded row.
        x: u64,
        /// Weights that go back, or 0.
        weights: u64,
        /// Biases `[tokens]` rows each, or 0. The first is set if the second is.
        bias0: u64,
        bias1: u64,
        /// Results: `[tokens]` rows, and `f32[tokens][lanes]` or 0.
        out: u64,
        out_weights: u64,
        /// This rank's handle slot, an address.
        handle: u64,
        /// Offsets in the handle slot.
        source: u64,
        lane_row: u64,
        topk: u64,
        sent_row: u64,
        own_row: u64,
        rank_psum: u64,
        lane_place: u64,
        /// Receive area of every heap.
        receive: u64,
        receive_stride: u64,
        /// Offset of the weights in a set; rows are at its start.
        receive_weights: u64,
        /// The cells in which ranks say that they have read what they pull.
        read: u64,
        tokens: u32,
        max_tokens: u32,
        lanes: u32,
        local_experts: u32,
        row_bytes: u32,
        sets: u32,
        /// Each lane has its own slot, rather than each peer.
        by_lane: u32,
        /// Sender warps of a block, and stages of a sender warp: of a row, or of a piece if sums are sent.
        row_warps: u32,
        stages: u32,
        stage_bytes: u32,
        /// Warps of a block that reduce.
        reducers: u32,
        /// Batches in the ring of a warp that reduces, and bytes of one; the same of a warp that sums what it sends.
        batches: u32,
        batch_bytes: u32,
        sender_batches: u32,
        sender_batch_bytes: u32,
        /// Bytes of a row that a warp reduces through registers at a time.
        share_bytes: u32,
        /// Offsets in the block's shared memory, behind the stages: rings, control words.
        rings: u32,
        control: u32,
        /// Digest of the call.
        call: u32,
        /// How many of 64 tokens are pulled, and whether tokens that are pulled, all of them, or sums are drawn by ticket.
        pulled: u32,
        drawn: u32,
        /// Parts of a token that is summed before it travels, each with a flag of its own; otherwise 1.
        parts: u32,
        /// Rows and weights that peers may read: offsets in this rank's heap, in units of `READABLE_UNIT`.
        readable_x: u32,
        readable_weights: u32,
    }
}

device_struct! {
    /// Where packets lie in every heap. See `PacketLayout`.
    pub(crate) struct PacketArea {
        begun: u64,
        heads: u64,
        ids: u64,
        weights: u64,
        rows: u64,
        back: u64,
        back_weights: u64,
        id_stride: u64,
        weight_stride: u64,
        row_stride: u64,
        back_stride: u64,
        back_weight_stride: u64,
        max_tokens: u32,
        /// 0, which compilers of kernels don't know.
        zero: u32,
    }
}

device_struct! {
    /// Arguments of a dispatch in packets.
    pub(crate) struct PacketDispatchParams {
        call: DispatchParams,
        area: PacketArea,
        /// Pieces of a row with its scales.
        groups: u32,
        /// Words of a bit map.
        words: u32,
        /// Blocks that send rows, and the first of those that place units.
        senders: u32,
        first: u32,
        /// ⌊2³² / n⌋ + 1, to divide by the number of blocks that place; 0 for one block.
        per_block: u32,
        /// There are maps for the experts of all ranks.
        all_experts: u32,
        /// Some rank's capacity may be exceeded.
        limited: u32,
        /// Offsets in the block's shared memory.
        of_expert: u32,
        start: u32,
        counts: u32,
        ids: u32,
        reserved: u32,
    }
}

device_struct! {
    /// Arguments of a combine in packets.
    pub(crate) struct PacketCombineParams {
        call: CombineParams,
        area: PacketArea,
        /// Pieces of a row.
        groups: u32,
        /// Blocks that send, the first ones; 0 if all blocks do everything.
        senders: u32,
    }
}

device_struct! {
    /// Arguments of an all-gather, a reduce-scatter or an all-reduce.
    pub(crate) struct CollectiveParams {
        domain: Domain,
        /// The caller's tensors.
        input: u64,
        output: u64,
        /// All-gather: bytes that a rank gives. Reduce-scatter: bytes that a rank gets. All-reduce: bytes of either.
        bytes: u64,
        /// Address behind which the heaps of all ranks lie, or 0.
        multicast: u64,
        /// Offsets of the area's parts.
        flags: u64,
        steps: u64,
        epochs: u64,
        calls: u64,
        call_count: u64,
        cells: u64,
        stages: u64,
        /// Cells of one rank in one parity.
        cell_count: u32,
        /// Bytes of a slot.
        slice: u32,
        /// Bytes that a block moves at a time, at most a slot; a multiple of 16.
        chunk: u32,
        /// Of everything that must be equal on all ranks.
        digest: u32,
    }
}

device_struct! {
    /// Arguments of a barrier over multicast.
    pub(crate) struct MultimemBarrierParams {
        domain: Domain,
        /// Address behind which the heaps of all ranks lie.
        multicast: u64,
        /// Offsets of the two words and of the own counter.
        words: u64,
        count: u64,
    }
}
