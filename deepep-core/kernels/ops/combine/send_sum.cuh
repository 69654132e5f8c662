// Rows of a token summed where they are, and the sum sent to the token's owner.
#pragma once
#include "ops/combine/gather.cuh"
#include "ops/combine/send.cuh"

// The received tokens that one warp sends back (see Gather). A piece of a sum leaves as soon as it is there.
//
// Piece slot s of the warp belongs to lane s, which issues its stores. A slot is written again when its store has read it. All lanes end a part of a token
// with equally many bulk groups, some of them empty, so that after it the pieces of the one before can be waited for; then its flag
// is handed in. Mailboxes take turns: each is free again only after a fence of the announcer.
struct SumSender {
    static constexpr bool PARTIAL = false, READS = false;
    struct Token : Returned {
        i32 row;  // of this lane, −1 for lanes that live elsewhere
    };

    const Block& b;
    Worklist list;
    u8* slots;
    u32 slot, count;           // next slot, and how many there are
    u32 turns, made;           // turns of the slots in the current part of a token, begun ones too, and this lane's bulk groups of it
    u32 flag, box;             // of the part before the current one; its mailbox
    bool some;                 // `ahead` is a token
    bool open;                 // the peers' sets may be written
    Token ahead, coming, now;  // being looked up, being loaded, being summed
    Weights weights;
    MARK_STATE(unmarked);

    DEVICE SumSender(const Block& block, const Received& received, u32 worker, u32 workers)
        : b(block), list(block, received, worker, workers), slots(block.stages + (u64)block.warp * block.p.stages * PIECE_BYTES), slot(0),
          count(block.p.stages), turns(0), made(0), flag(EMPTY), box(0), some(true), open(false), weights(block) {
        look_up();
    }
    DEVICE void look_up() {
        some = ahead.take(list);
        ahead.row = -1;
        if (some && ahead.lanes >> b.lane & 1) ahead.row = b.handle<i32>(b.p.lane_row)[(u64)ahead.index * b.p.lanes + b.lane];
    }
    // All pieces of the part before the current one have completed. Whole warp.
    DEVICE bool publish() {
        warp::sync();
        bool ok = true;
        if (b.lane == 0 && flag != EMPTY) ok = hand_in(b.d, b.control.mail, b.place(PHASE_ANNOUNCER, b.me, b.warp), flag, box);
        box = (box + 1) % 32;
        return warp::all(ok);
    }

    DEVICE bool take(Terms& terms) {
        if (!some) return false;
        coming = ahead;
        look_up();
        const u64 row = (u64)b.x_row(coming.row < 0 ? 0 : coming.row);
        terms.set(b.lane, row, 0, coming.lanes, 0);
        terms.begin = b.part_begin(coming.part);
        terms.end = b.part_begin(coming.part + 1);
        return true;
    }
    DEVICE bool ready(bool, Terms&) const { return true; }
    DEVICE void begin() {
        now = coming;
        slot = turns = made = 0;
        weights.take(now.peer, now.token, now.part ? 0 : now.lanes, now.row < 0 ? 0 : now.row);
    }
    DEVICE bool biased() const { return false; }
    DEVICE void biases(Sum (&)[VECTORS], u32, u32) const {}
    DEVICE u32 cell() const { return b.cell(b.p.by_lane ? highest(now.lanes) : rank_slot(b.me, now.peer), now.token); }
    DEVICE bool put(u32 from, u32 end, const Vec16 (&v)[VECTORS]) {
        // The first rows have been loaded and summed meanwhile. Weights leave behind the first token.
        if (!open && !wait_permitted(b)) return false;
        open = true;
        if (slot == 0) turns++;
        if (b.lane == slot) arch::bulk_wait_read();
        warp::sync();
        Vec16* to = (Vec16*)(slots + slot * PIECE_BYTES) + b.lane;
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) to[32 * j] = v[j];
        // What lanes wrote, before the copy engine reads it.
        arch::fence_proxy_shared();
        warp::sync();
        if (b.lane == slot) {
            arch::bulk_store((void*)(b.receive_row(now.peer, cell()) + from), slots + slot * PIECE_BYTES, end - from);
            arch::bulk_commit();
            made++;
        }
        if (++slot == count) slot = 0;
        return true;
    }
    DEVICE bool end() {
        for (; made < turns; made++) arch::bulk_commit();
        MARK_FIRST(unmarked, b.d, C_SENT_FIRST);
        MARK(b.d, C_SENT_LAST);
        arch::bulk_wait_but(turns);
        if (!publish()) return false;
        flag = now.peer << CODE_RANK_SHIFT | b.flag(cell(), now.part);
        return true;
    }

    // After the last part: everything has left.
    DEVICE void finish(bool ok) {
        if (ok) weights.flush();
        arch::bulk_wait();
        warp::sync();
        if (ok && b.lane == 0 && flag != EMPTY) announce_alone(flag, b.epoch, [&](u32 r) { return b.arrived(r); });
        warp::sync();
        if (b.lane == 0) hand_in_done(b.control.mail);
        MARK(b.d, C_SEND_END);
    }
};

DEVICE void send_sums(const Block& b, const Received& received, u32 worker, u32 workers) {
    const u32 bytes = b.p.sender_batch_bytes;
    Gather gather(b, b.warp * b.p.sender_batches * bytes, b.p.sender_batches, bytes);
    SumSender sender(b, received, worker, workers);
    const bool ok = gather.run(sender);
    sender.finish(ok);
    if (!ok) gather.drain();
}
