// Rows in packets: a packet says itself when it is there, so that nothing is fenced and nothing but the data is waited for.
//
// Who writes: rank s, into its slots at every rank, in the set of the epoch's parity. A packet of a row is 14 bytes and a tag of 16 bits that
//   depends on the epoch; other packets are three words and the epoch.
// Who waits: whoever needs the bytes, for every packet of them.
// Why a set is not overwritten early: before its kernel e − 1 ended a rank has acquired `begun` ≥ e − 1 of the receiver, whose kernel e − 2, the last
//   reader of the set, has therefore ended. So kernel e writes without asking.
// Why no old tag passes: tags repeat after 65535 epochs, and calls zero the slots of the set that they have read, one token of each rank a call,
//   in turn: a slot that is not used is zeroed within 2 · MAX_PACKET_TOKENS epochs.
#pragma once
#include "comm/begun.cuh"
#include "comm/pieces.cuh"
#include "common/warp.cuh"

// What every warp learns first, all of it on the way at once: the kernel's epoch, and whether some rank gave up.
struct First {
    u32 count;
    u64 abort;

    DEVICE First(const Domain& d, u32 kind)
        : count(arch::ld_received(packet_counter(d, kind, blockIdx.x))), abort(arch::ld_relaxed_sys(cell64(d, d.rank, d.abort))) {}
    DEVICE u32 epoch() const { return count + 1; }
    DEVICE bool broken() const { return abort != 0; }
};

struct Packets {
    const Domain& d;
    const PacketArea& area;
    u32 epoch, tag, me;

    DEVICE Packets(const Domain& domain, const PacketArea& packets) : d(domain), area(packets), epoch(0), tag(0), me(domain.rank) {}
    DEVICE void open(u32 now) {
        epoch = now;
        tag = packet_tag(now);
    }

    DEVICE u32 parity() const { return epoch & 1; }
    DEVICE Begun begun(u32 kind, u32 operation, u32 call) const {
        return {d, area.begun + (u64)kind * 2 * RANKS * CELL_LINE, operation, epoch, call};
    }
    // Place of a token of one of `slots` senders at rank r.
    DEVICE u8* slot(u64 part, u64 stride, u32 r, u32 slots, u32 number, u32 token) const {
        return (u8*)(d.heap[r] + part + ((parity() * slots + number) * area.max_tokens + token) * stride);
    }
    // Own rows go the same way as others.
    DEVICE Vec16* row(u32 r, u32 from, u32 token) const { return (Vec16*)slot(area.rows, area.row_stride, r, RANKS, from, token); }
    // The first packet of a token's ids; the next ones are `max_tokens` packets apart, so that a warp looks at those of 32 tokens at once.
    DEVICE Vec16* ids(u32 r, u32 from, u32 token) const {
        return (Vec16*)(d.heap[r] + area.ids + (parity() * RANKS + from) * area.id_stride) + token;
    }
    DEVICE Vec16* weights(u32 r, u32 from, u32 token) const { return (Vec16*)slot(area.weights, area.weight_stride, r, RANKS, from, token); }
    DEVICE Vec16* back(u32 r, u32 from, u32 token) const {
        return (Vec16*)slot(area.back, area.back_stride, r, RANKS - 1, rank_slot(from, r), token);
    }
    DEVICE Vec16* back_weights(u32 r, u32 from, u32 token) const {
        return (Vec16*)slot(area.back_weights, area.back_weight_stride, r, RANKS - 1, rank_slot(from, r), token);
    }
    DEVICE Vec16* head(u32 r, u32 from) const { return (Vec16*)(d.heap[r] + area.heads + (u64)(parity() * RANKS + from) * CELL_LINE); }

    template <u32 N>
    DEVICE void send(Vec16* to, u32 groups, u32 g, const Pieces<N>& pieces) const { pieces.send(to, groups, g, tag); }
    template <u32 N>
    DEVICE void load(const Vec16* from, u32 groups, u32 g, Vec16 (&p)[N]) const { load_packets(from, groups, g, area.zero, p); }
    template <u32 N>
    DEVICE bool there(const Vec16 (&p)[N]) const { return have_tag(p, tag); }
    // Waits for packets of which `p` is a first look.
    template <u32 N>
    DEVICE bool receive(const Vec16* from, u32 groups, u32 g, Vec16 (&p)[N], const Place& at) const {
        return wait_until(d, at, tag >> 16, [&](u64& seen) {
            if (there(p)) return true;
            seen = p[0].w >> 16;
            load(from, groups, g, p);
            return false;
        });
    }
    DEVICE Vec16 load(const Vec16* from) const { return load_packet(from, area.zero); }
    // A packet of three words.
    DEVICE void send(Vec16* to, u32 x, u32 y, u32 z) const { arch::st_packet(to, {x, y, z, epoch}); }
    DEVICE bool receive(const Vec16* from, const Place& at, Vec16& v) const {
        return wait_until(d, at, epoch, [&](u64& seen) {
            v = load(from);
            seen = v.w;
            return v.w == epoch;
        });
    }
    // The token whose slots this call zeroes, if there is one of this number.
    DEVICE u32 scrubbed() const { return (epoch >> 1) % MAX_PACKET_TOKENS; }
    // By the warp that has read `count` packets from `first` on of piece g of each lane, share `part` of `parts` of a row: what it has read, and its share of
    // what rows of this size leave.
    DEVICE void scrub(Vec16* slot, u64 stride, u32 first, u32 count, u32 groups, u32 g, u32 part, u32 parts) const {
        for (u32 k = first; k < first + count && g < groups; k++) arch::st_packet(slot + k * groups + g, {0, 0, 0, 0});
        for (u32 i = GROUP_PACKETS * groups + part * 32 + threadIdx.x % 32; i < stride / 16; i += parts * 32) arch::st_packet(slot + i, {0, 0, 0, 0});
    }
};
