// The fibers of kernels, all in the thread that runs them: its state is that thread's own.
#include "runtime.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

// One operation of one rank, as the test gives it.
struct Launch {
    void (*kernel)(const void*);
    const void* params;
    uint32_t blocks, threads, shared_bytes;
};

namespace {

constexpr size_t STACK = 128 << 10;
constexpr uint8_t NOTHING = 0xcd;

struct Fiber;

struct Group {
    unsigned unread = 0, incomplete = 0;
};
struct Warp {
    uint64_t values[2][32] = {};
    unsigned arrived = 0, turn = 0, size = 0;
    std::vector<Fiber*> waiting;
};
struct Part {
    unsigned arrived = 0;
    std::vector<Fiber*> waiting;
};
struct BlockState {
    uint8_t* shared = nullptr;
    size_t bytes = 0;
    unsigned arrived = 0, votes = 0, result = 0, size = 0;
    std::vector<Fiber*> waiting;
    std::vector<Warp> warps;
    Part parts[16];
    ~BlockState() { free(shared); }
};
struct Fiber {
    jmp_buf state;
    bool started = false;
    uint8_t* stack = nullptr;
    const Launch* launch = nullptr;
    BlockState* block = nullptr;
    unsigned rank = 0, thread = 0, index = 0;
    unsigned sent = 0;  // packets that are not there yet
    std::shared_ptr<Group> open = std::make_shared<Group>();
    std::vector<std::shared_ptr<Group>> groups;
};
struct Copy {
    uint8_t* to;
    const uint8_t* from;
    unsigned bytes;
    uint64_t* bar;                // loads
    std::shared_ptr<Group> group; // stores
    std::vector<uint8_t> read;
    bool lazy;                    // takes its steps much later than others
};
// A packet that was sent and is not there yet. Of one thread and address there is one at most.
struct Late {
    FiberPacket* to;
    FiberPacket packet;
    Fiber* from;  // null once it has ended
    unsigned rank;
    bool lazy;  // comes much later than others
};
struct Rank {
    const Launch* launches = nullptr;
    size_t count = 0, next = 0, alive = 0;
    std::vector<std::unique_ptr<BlockState>> blocks;
};

// Stacks that no fiber uses. A thread leaves its own to the next one: their pages are the dearest part of a launch.
std::mutex left_mutex;
std::vector<uint8_t*> left;
struct Stacks : std::vector<uint8_t*> {
    ~Stacks() {
        std::lock_guard<std::mutex> lock(left_mutex);
        left.insert(left.end(), begin(), end());
    }
    void take_left() {
        std::lock_guard<std::mutex> lock(left_mutex);
        swap(left);
    }
};

thread_local std::mt19937_64 chance;
thread_local std::vector<Fiber*> ready;
thread_local std::vector<Copy> copies;
thread_local std::vector<Late> late;
thread_local Stacks stacks;
thread_local std::vector<Rank> ranks;
thread_local Fiber* current;
thread_local jmp_buf scheduler;
thread_local ucontext_t entry, back;
thread_local uint64_t steps;
thread_local bool alone;  // in a thread of its own: the clock is the machine's
thread_local uint64_t idle;  // accesses since somebody saw or did something new
thread_local char* message;
thread_local size_t message_bytes;
thread_local jmp_buf failed;

double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
unsigned draw(unsigned n) { return (unsigned)(chance() % n); }

void leave() {
    if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}
void wake(std::vector<Fiber*>& all) {
    for (Fiber* f : all) ready.push_back(f);
    all.clear();
}

uint8_t* new_stack() {
    if (stacks.empty()) stacks.take_left();
    if (!stacks.empty()) {
        uint8_t* s = stacks.back();
        stacks.pop_back();
        return s;
    }
    void* s = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s == MAP_FAILED) fiber_fail("no memory for a stack", STACK);
    return (uint8_t*)s;
}

void set_indices(const Fiber& f) {
    fiber_thread = {f.thread};
    fiber_block = {f.index};
    fiber_grid = {f.launch->blocks};
    fiber_threads = {f.launch->threads};
}

void body() {
    Fiber* self = current;
    self->launch->kernel(self->launch->params);
    for (auto& g : self->groups)
        if (g->incomplete) fiber_fail("a thread ends before its bulk stores are complete", self->thread);
    if (self->open->incomplete) fiber_fail("a thread ends with bulk stores that are in no group", self->thread);
    _longjmp(scheduler, 2);
}

// Starts the next operation of a rank.
void start(unsigned r) {
    Rank& rank = ranks[r];
    rank.blocks.clear();
    if (rank.next == rank.count) return;
    const Launch& l = rank.launches[rank.next++];
    for (unsigned b = 0; b < l.blocks; b++) {
        auto block = std::make_unique<BlockState>();
        block->size = l.threads;
        block->shared = (uint8_t*)aligned_alloc(1024, (l.shared_bytes + 2047) / 1024 * 1024);
        block->bytes = l.shared_bytes;
        memset(block->shared, NOTHING, l.shared_bytes);
        block->warps.resize((l.threads + 31) / 32);
        for (unsigned t = 0; t < l.threads; t++) {
            Fiber* f = new Fiber;
            f->launch = &l;
            f->block = block.get();
            f->rank = r;
            f->thread = t;
            f->index = b;
            f->stack = new_stack();
            block->warps[t / 32].size++;
            rank.alive++;
            ready.push_back(f);
        }
        rank.blocks.push_back(std::move(block));
    }
}

// A packet arrives.
void deliver(size_t i) {
    idle = 0;
    // At once: other threads of the machine may look.
    *(volatile FiberPacket*)late[i].to = late[i].packet;
    if (late[i].from) late[i].from->sent--;
    late[i] = late.back();
    late.pop_back();
}
// Packets for which `which` holds arrive. From behind, where `deliver` moves nothing that was not looked at.
template <class Which>
void deliver_all(Which which) {
    for (size_t i = late.size(); i-- > 0;)
        if (which(late[i])) deliver(i);
}
void step_late() {
    const size_t i = draw((unsigned)late.size());
    // Many that take long would take too long where the clock is the machine's.
    const bool few = !alone || late.size() < 300;
    if (!late[i].lazy || !few || ready.empty() || draw(200) == 0) deliver(i);
}

void end(Fiber* f) {
    idle = 0;
    stacks.push_back(f->stack);
    Rank& rank = ranks[f->rank];
    const unsigned r = f->rank;
    if (f->sent)
        for (Late& p : late)
            if (p.from == f) p.from = nullptr;
    delete f;
    if (--rank.alive != 0) return;
    deliver_all([&](const Late& p) { return p.rank == r; });
    for (const auto& block : rank.blocks)
        for (const Copy& c : copies)
            if (c.bar && (uint8_t*)c.bar >= block->shared && (uint8_t*)c.bar < block->shared + block->bytes)
                fiber_fail("a kernel ends while bulk loads are under way; rank", r);
    start(r);
}

// Takes one step of a copy that is under way.
void step_copy() {
    idle = 0;
    const unsigned i = draw((unsigned)copies.size());
    Copy& c = copies[i];
    if (c.lazy && !ready.empty() && draw(500) != 0) return;
    if (!c.bar && c.read.empty()) {
        c.read.assign(c.from, c.from + c.bytes);
        c.group->unread--;
        return;
    }
    if (c.bar) {
        memcpy(c.to, c.from, c.bytes);
        *c.bar -= (uint64_t)c.bytes << 2;
        if ((*c.bar & 2) && *c.bar >> 2 == 0) *c.bar = (*c.bar & 1) ^ 1;
    } else {
        memcpy(c.to, c.read.data(), c.bytes);
        c.group->incomplete--;
    }
    if (i + 1 != copies.size()) std::swap(copies[i], copies.back());
    copies.pop_back();
}

void resume(Fiber* f) {
    current = f;
    set_indices(*f);
    const int why = _setjmp(scheduler);
    if (why == 2) return end(f);
    if (why == 1) return;
    if (f->started) _longjmp(f->state, 1);
    f->started = true;
    getcontext(&entry);
    entry.uc_stack.ss_sp = f->stack;
    entry.uc_stack.ss_size = STACK;
    entry.uc_link = &back;
    makecontext(&entry, body, 0);
    setcontext(&entry);
}

void run_all(double limit) {
    const double until = seconds() + limit;
    for (steps = 1;; steps++) {
        if (!copies.empty() && (ready.empty() || draw(4) == 0)) step_copy();
        if (!late.empty() && (ready.empty() || draw(2) == 0)) step_late();
        if (ready.empty()) {
            if (!copies.empty() || !late.empty()) continue;
            for (unsigned r = 0; r < ranks.size(); r++)
                if (ranks[r].alive) fiber_fail("threads wait for each other and nobody comes; threads of a rank that are left", ranks[r].alive);
            return;
        }
        const size_t i = draw((unsigned)ready.size());
        Fiber* f = ready[i];
        ready[i] = ready.back();
        ready.pop_back();
        resume(f);
        // Somebody in another thread has to come first.
        if (alone && idle > 2 * ready.size() + 64) {
            idle = 0;
            usleep(200);
        }
        if (steps % 65536 == 0 && seconds() > until) fiber_fail("kernels do not end; steps", steps);
    }
}

}  // namespace

extern "C" {
__thread FiberIndex fiber_thread, fiber_block, fiber_grid, fiber_threads;

void fiber_yield() {
    ready.push_back(current);
    leave();
}
void fiber_saw(const void* at, uint64_t value) {
    struct Seen {
        uint64_t key, value;
    };
    thread_local std::vector<Seen> table(1 << 14);
    const uint64_t key = (uint64_t)at * 0x9e3779b97f4a7c15 ^ (uint64_t)current * 0xff51afd7ed558ccd;
    Seen& entry = table[key >> 50];
    if (entry.key == key && entry.value == value) idle++;
    else idle = 0;
    entry = {key, value};
}
unsigned fiber_meet_block(unsigned vote) {
    idle = 0;
    BlockState& b = *current->block;
    b.votes += vote;
    if (++b.arrived == b.size) {
        b.result = b.votes;
        b.arrived = b.votes = 0;
        wake(b.waiting);
        ready.push_back(current);
    } else {
        b.waiting.push_back(current);
    }
    leave();
    return b.result;
}
void fiber_meet_part(unsigned id, unsigned threads) {
    idle = 0;
    Part& part = current->block->parts[id];
    if (++part.arrived == threads) {
        part.arrived = 0;
        wake(part.waiting);
        ready.push_back(current);
    } else {
        part.waiting.push_back(current);
    }
    leave();
}
void fiber_meet_warp(uint64_t value, uint64_t* all) {
    Warp& w = current->block->warps[current->thread / 32];
    const unsigned turn = w.turn;
    w.values[turn][current->thread % 32] = value;
    if (++w.arrived == w.size) {
        w.arrived = 0;
        w.turn ^= 1;
        wake(w.waiting);
    } else {
        w.waiting.push_back(current);
        leave();
    }
    memcpy(all, w.values[turn], sizeof(w.values[turn]));
}
uint8_t* fiber_shared() { return current->block->shared; }
uint64_t fiber_now() { return alone ? (uint64_t)(seconds() * 1e9) : steps; }

// A word: bit 0 the phase, bit 1 that the bytes of this phase are known, above them the bytes that are still to come.
void fiber_barrier_init(uint64_t* bar) { *bar = 0; }
void fiber_barrier_expect(uint64_t* bar, unsigned bytes) {
    if (*bar & 2) fiber_fail("a barrier is used again before its phase has ended", *bar);
    *bar += ((uint64_t)bytes << 2) | 2;
    if (*bar >> 2 == 0) *bar = (*bar & 1) ^ 1;
}
bool fiber_barrier_try_wait(uint64_t* bar, unsigned parity) {
    if ((*bar & 1) != parity) return true;
    fiber_yield();
    return (*bar & 1) != parity;
}
void fiber_bulk_load(void* to, const void* from, unsigned bytes, uint64_t* bar) {
    if ((uint64_t)to % 16 || (uint64_t)from % 16 || bytes % 16 || bytes == 0) fiber_fail("a bulk load that is not aligned", bytes);
    if (!(*bar & 2)) fiber_fail("a bulk load that nobody expects", bytes);
    memset(to, 0xee, bytes);
    copies.push_back({(uint8_t*)to, (const uint8_t*)from, bytes, bar, nullptr, {}, draw(4) == 0});
}
void fiber_bulk_store(void* to, const void* from, unsigned bytes) {
    if ((uint64_t)to % 16 || (uint64_t)from % 16 || bytes % 16 || bytes == 0) fiber_fail("a bulk store that is not aligned", bytes);
    current->open->unread++;
    current->open->incomplete++;
    copies.push_back({(uint8_t*)to, (const uint8_t*)from, bytes, nullptr, current->open, {}, draw(4) == 0});
}
void fiber_bulk_commit() {
    current->groups.push_back(current->open);
    current->open = std::make_shared<Group>();
}
void fiber_bulk_wait(unsigned but, bool only_read) {
    Fiber* self = current;
    for (;;) {
        auto& g = self->groups;
        bool done = true;
        for (size_t i = 0; i + but < g.size(); i++) done &= only_read ? g[i]->unread == 0 : g[i]->incomplete == 0;
        if (done) break;
        fiber_yield();
    }
    auto& g = self->groups;
    size_t old = 0;
    while (old < g.size() && g[old]->incomplete == 0) old++;
    g.erase(g.begin(), g.begin() + (long)old);
}

void fiber_send(FiberPacket* to, FiberPacket packet) {
    if (current->sent) fiber_arrive(to);
    current->sent++;
    late.push_back({to, packet, current, current->rank, draw(8) == 0});
}
void fiber_arrive(const void* at) {
    if (current->sent) deliver_all([&](const Late& p) { return p.from == current && (!at || p.to == at); });
}

void fiber_fail(const char* what, uint64_t value) {
    if (current)
        snprintf(message, message_bytes, "rank %u, operation %zu, block %u, thread %u: %s: %#llx", current->rank,
                 ranks[current->rank].next - 1, current->index, current->thread, what, (unsigned long long)value);
    else
        snprintf(message, message_bytes, "%s: %#llx", what, (unsigned long long)value);
    _longjmp(failed, 1);
}

// Runs the operations of all ranks: `launches[r]` one after the other for each rank, ranks side by side. Returns 0, or 1 with a text in `text`; then
// the threads that were left are forgotten.
int fiber_run(uint64_t seed, const Launch* const* launches, const size_t* counts, size_t rank_count, double limit, char* text, size_t text_bytes) {
    message = text;
    message_bytes = text_bytes;
    chance.seed(seed);
    ready.clear();
    copies.clear();
    late.clear();
    current = nullptr;
    ranks.clear();
    ranks.resize(rank_count);
    if (_setjmp(failed)) return 1;
    for (unsigned r = 0; r < rank_count; r++) {
        ranks[r].launches = launches[r];
        ranks[r].count = counts[r];
        start(r);
    }
    current = nullptr;
    run_all(limit);
    return 0;
}

// Runs one kernel. As above.
int fiber_launch(void (*kernel)(const void*), const void* params, unsigned blocks, unsigned threads, unsigned shared_bytes, double limit, char* text,
                 size_t text_bytes) {
    static std::atomic<uint64_t> seed;
    const Launch launch{kernel, params, blocks, threads, shared_bytes};
    const Launch* list = &launch;
    const size_t count = 1;
    alone = true;
    return fiber_run(seed++, &list, &count, 1, limit, text, text_bytes);
}
}
