// What the parts of the combine kernel share.
#pragma once
#include "arch/bf16.cuh"
#include "arch/bulk.cuh"
#include "comm/announce.cuh"
#include "comm/begun.cuh"

constexpr u32 MAX_STAGES = 8;
static_assert(32 % MAX_STAGES == 0, "a stage's lane has every MAX_STAGES-th mailbox");
// Warps that sum do so through registers; with sums, or rows that are pulled, through rings in shared memory.
constexpr bool DIRECT = !EXPANDED && !PULL;
// Rows of a token are summed before they travel. Then a token goes in parts: each is summed, sent, announced and reduced for itself, by whoever comes next.
constexpr bool SUMS = EXPANDED && REDUCE_FIRST;

// Addresses of what a rank lets this one read.
struct Source {
    u64 x, weights;
};

struct Control {
    u64 bars[WARPS][MAX_STAGES];
    Source sources[PULL ? RANKS : 1];  // from `known` on
    u32 failed;
    u32 known;
    u32 permitted;  // rows may be sent
    u32 reading;    // warps that may still read from other ranks
    u32 lost;       // one of them has given up
    Mailboxes mail;
};
static_assert(sizeof(Control) <= COMBINE_CONTROL_BYTES, "the host reserves too little shared memory");

struct Block {
    const CombineParams& p;
    const Domain& d;
    u8* stages;
    Control& control;
    u32 epoch, me, lane, warp;

    DEVICE Block(const CombineParams& params, u8* shared)
        : p(params), d(params.domain), stages(shared), control(*(Control*)(shared + params.control)), epoch(0),
          me(params.domain.rank), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

    DEVICE Place place(u32 phase, u32 peer, u32 index) const { return {OPERATION_COMBINE, phase, epoch, peer, index}; }
    DEVICE Begun begun() const { return {d, d.started, OPERATION_COMBINE, epoch, p.call}; }
    DEVICE u32 set() const { return epoch % p.sets; }
    // Tickets of this call, or of the next one.
    DEVICE u32* ticket(u32 kind, u32 ahead = 0) const {
        return (u32*)((u8*)cell32(d, me, d.tickets) + (u64)(((epoch + ahead) & 1) * TICKET_KINDS + kind) * CELL_LINE);
    }
    // A table of this rank's handle slot.
    template <class T>
    DEVICE const T* handle(u64 offset) const { return (const T*)(p.handle + offset); }
    // The set of rank r's receive area that this call uses.
    DEVICE u64 receive(u32 r) const { return d.heap[r] + p.receive + (u64)set() * p.receive_stride; }
    DEVICE u64 receive_row(u32 r, u32 cell) const { return receive(r) + (u64)cell * p.row_bytes; }
    DEVICE float* receive_weights(u32 r) const { return (float*)(receive(r) + p.receive_weights); }
    DEVICE u32* arrived(u32 r) const { return cell32(d, r, d.arrived) + (u64)set() * d.arrived_set; }
    // Cell of a token's slot: also the row's number in the receive area.
    DEVICE u32 cell(u32 slot, u32 token) const { return slot * p.max_tokens + token; }
    // Of a part of it, which has a flag of its own.
    DEVICE u32 flag(u32 cell, u32 part) const { return SUMS ? cell * p.parts + part : cell; }
    // Where a part of a row begins: whole pieces, as equally many as can be.
    DEVICE u32 part_begin(u32 part) const {
        const u32 pieces = (p.row_bytes + PIECE_BYTES - 1) / PIECE_BYTES, at = part * pieces / p.parts * PIECE_BYTES;
        return at < p.row_bytes ? at : p.row_bytes;
    }
    DEVICE const u8* x_row(u32 row) const { return (const u8*)p.x + (u64)row * p.row_bytes; }
    // Of every 64 tokens the last `pulled` are read by their ranks where the experts left them, the others are sent.
    DEVICE bool pulled(u32 token) const { return PULL && token % PULL_PARTS >= PULL_PARTS - p.pulled; }
    // Where rank `from` says on rank r that it has read all.
    DEVICE u32* read_cell(u32 r, u32 from) const { return cell32(d, r, p.read + from * CELL_LINE); }
};

DEVICE u32 highest(u32 mask) { return 31 - __clz(mask); }
