// Rows in packets: a packet says itself when it is there, so that nothing is fenced and nothing but the data is waited for.
//
// Who writes: rank s, into its slots at every rank, in the set of the epoch's parity. A packet of a row is 14 bytes and a tag of 16 bits that
//   depends on the epoch; other packets are three words and the epoch.
// Who waits: whoever needs the bytes, for every packet of them.
// Why a set is not overwritten early: before it writes in epoch e a rank has acquired `begun` ≥ e − 1 of the receiver, whose kernel e − 2, the last
//   reader of the set, has therefore ended.
// Why no old tag passes: tags repeat after 65535 epochs, and every call zeroes one slot of each peer in the set that it has read, in turn: a slot that is
//   not used is zeroed within 2 · max_tokens epochs.
#pragma once
#include "arch/packet.cuh"
#include "comm/begun.cuh"
#include "common/warp.cuh"

// What a lane makes packets of: seven words of eight bytes of a row, GROUPS words apart.
constexpr u32 GROUP_WORDS = GROUP_BYTES / 8;
static_assert(GROUP_WORDS == 7 && GROUP_PACKETS == 4 && PACKET_BYTES == sizeof(Vec16), "packets are made of 56 bytes");

struct Group {
    u64 v[GROUP_WORDS];
};

DEVICE u32 packet_tag(u32 epoch) { return (1 + epoch % 65535u) << 16; }

struct Packets {
    const Domain& d;
    const PacketArea& area;
    u32 epoch, tag, me;

    DEVICE Packets(const Domain& domain, const PacketArea& packets, u32 now)
        : d(domain), area(packets), epoch(now), tag(packet_tag(now)), me(domain.rank) {}

    DEVICE u32 parity() const { return epoch & 1; }
    DEVICE Begun begun(u32 kind, u32 operation, u32 call) const {
        return {d, area.begun + (u64)kind * 2 * RANKS * CELL_LINE, operation, epoch, call};
    }
    // Slot of a token of rank `from` at rank r.
    DEVICE Vec16* slot(u64 part, u64 stride, u32 r, u32 from, u32 token) const {
        const u64 peer = from < r ? from : from - 1;
        return (Vec16*)(d.heap[r] + part + ((parity() * (RANKS - 1) + peer) * area.max_tokens + token) * stride);
    }
    DEVICE Vec16* row(u32 r, u32 from, u32 token) const { return slot(area.rows, area.row_stride, r, from, token); }
    DEVICE Vec16* back(u32 r, u32 from, u32 token) const { return slot(area.back, area.back_stride, r, from, token); }
    DEVICE Vec16* back_weights(u32 r, u32 from, u32 token) const {
        return slot(area.back_weights, area.back_weight_stride, r, from, token);
    }
    DEVICE Vec16* head(u32 r, u32 from) const { return (Vec16*)(d.heap[r] + area.heads + (u64)(parity() * RANKS + from) * CELL_LINE); }
    DEVICE Vec16* lanes(u32 r, u32 from, u32 token) const {
        return (Vec16*)(d.heap[r] + area.lanes + ((u64)(parity() * RANKS + from) * area.max_tokens + token) * area.lane_stride);
    }

    // By one warp: the peers' slots may be written.
    DEVICE bool may_write(const Begun& begun) const {
        const u32 r = threadIdx.x % 32;
        bool ok = true;
        u64 word;
        if (r < RANKS && r != me) ok = begun.wait(r, epoch - 1, word);
        ok = warp::all(ok);
        // Other lanes write, after what this one has acquired.
        warp::sync();
        return ok;
    }

    DEVICE void send(Vec16* to, u32 groups, u32 g, const Group& group) const {
        u32 w[2 * GROUP_WORDS];
#pragma unroll
        for (u32 i = 0; i < GROUP_WORDS; i++) {
            w[2 * i] = (u32)group.v[i];
            w[2 * i + 1] = (u32)(group.v[i] >> 32);
        }
#pragma unroll
        for (u32 k = 0; k < GROUP_PACKETS; k++) {
            const u32 half = k & 1 ? w[12 + k / 2] >> 16 : w[12 + k / 2] & 0xffffu;
            arch::st_packet(to + k * groups + g, {w[3 * k], w[3 * k + 1], w[3 * k + 2], half | tag});
        }
    }
    DEVICE void load(const Vec16* from, u32 groups, u32 g, Vec16 (&p)[GROUP_PACKETS]) const {
#pragma unroll
        for (u32 k = 0; k < GROUP_PACKETS; k++) p[k] = arch::ld_packet(from + k * groups + g);
    }
    // Waits for packets of which `p` is a first look.
    DEVICE bool receive(const Vec16* from, u32 groups, u32 g, Vec16 (&p)[GROUP_PACKETS], const Place& at, Group& group) const {
        const bool ok = wait_until(d, at, tag >> 16, [&](u64& seen) {
            bool all = true;
#pragma unroll
            for (u32 k = 0; k < GROUP_PACKETS; k++)
                if ((p[k].w & 0xffff0000u) != tag) {
                    all = false;
                    seen = p[k].w >> 16;
                }
            if (!all) load(from, groups, g, p);
            return all;
        });
        u32 w[2 * GROUP_WORDS];
#pragma unroll
        for (u32 k = 0; k < GROUP_PACKETS; k++) {
            w[3 * k] = p[k].x;
            w[3 * k + 1] = p[k].y;
            w[3 * k + 2] = p[k].z;
        }
        w[12] = (p[0].w & 0xffffu) | p[1].w << 16;
        w[13] = (p[2].w & 0xffffu) | p[3].w << 16;
#pragma unroll
        for (u32 i = 0; i < GROUP_WORDS; i++) group.v[i] = (u64)w[2 * i + 1] << 32 | w[2 * i];
        return ok;
    }
    // A packet of three words.
    DEVICE void send(Vec16* to, u32 x, u32 y, u32 z) const { arch::st_packet(to, {x, y, z, epoch}); }
    DEVICE bool receive(const Vec16* from, const Place& at, Vec16& v) const {
        return wait_until(d, at, epoch, [&](u64& seen) {
            v = arch::ld_packet(from);
            seen = v.w;
            return v.w == epoch;
        });
    }
    // The token whose slots this call zeroes.
    DEVICE u32 scrubbed() const { return (epoch >> 1) % area.max_tokens; }
    // By all threads of the block that has read them.
    DEVICE void scrub(Vec16* slot, u64 stride) const {
        for (u32 i = threadIdx.x; i < stride / 16; i += THREADS) arch::st_packet(slot + i, {0, 0, 0, 0});
    }
};
