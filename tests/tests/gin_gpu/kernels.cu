// Kernels of the GPU tests of nccl-gin-soft, over NCCL's device API. Every wait for another rank has a deadline: what did not come is counted in
// report[1], bytes that are wrong in report[0], nanoseconds are in report[2].
#include "nccl_gin.h"

typedef unsigned long long u64;

#if NCCL_VERSION_CODE >= 23000
#define FENCE_PUT ncclGinFenceLevel::Put
#else
#define FENCE_PUT ncclGinFenceLevel::Relaxed
#endif

static constexpr u64 kDeadline = 15000000000ull;

__device__ inline u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ inline unsigned char pattern(int rank, size_t i, int salt) {
  return (unsigned char)(i * 131 + (i >> 8) * 7 + rank * 29 + salt * 17 + 3);
}

__device__ inline void fill(ncclWindow_t w, size_t offset, size_t n, int rank, int salt) {
  unsigned char* p = (unsigned char*)ncclGetLocalPointer(w, offset);
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) p[i] = pattern(rank, i, salt);
}

__device__ inline void verify(ncclWindow_t w, size_t offset, size_t n, int rank, int salt, u64* report) {
  const unsigned char* p = (const unsigned char*)ncclGetLocalPointer(w, offset);
  u64 bad = 0;
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) bad += p[i] != pattern(rank, i, salt);
  if (bad) atomicAdd(&report[0], bad);
}

// Polls until `seen()` is at least `least`, by one thread; false when the deadline has passed. The clock is looked at once in many polls: a wait is as
// quick to see its signal as NCCL's own, which knows no clock.
template <typename Seen>
__device__ inline bool reached(Seen seen, u64 least, u64* report) {
  for (u64 start = now();;) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      if (seen() >= least) return true;
    if (now() - start > kDeadline) {
      atomicAdd(&report[1], 1ull);
      return false;
    }
  }
}

// The same for an indexed signal: where NCCL's own wait has a time limit, by that.
__device__ inline bool signalled(const ncclGin& gin, unsigned signal, u64 least, u64* report) {
#if NCCL_VERSION_CODE >= 23200
  constexpr u64 kCycles = 2 * kDeadline;
  if (gin.waitSignal(ncclCoopThread(), signal, least, 64, cuda::memory_order_acquire, kCycles) == ncclSuccess) return true;
  atomicAdd(&report[1], 1ull);
  return false;
#else
  return reached([&] { return gin.readSignal(signal); }, least, report);
#endif
}

// The same for a whole block.
template <typename Seen>
__device__ inline bool reached_by_all(Seen seen, u64 least, u64* report) {
  __shared__ bool ok;
  __syncthreads();
  if (threadIdx.x == 0) ok = reached(seen, least, report);
  __syncthreads();
  return ok;
}

extern "C" __global__ void fill_bytes(ncclWindow_t w, size_t offset, size_t n, int rank, int salt) {
  fill(w, offset, n, rank, salt);
}

extern "C" __global__ void verify_bytes(ncclWindow_t w, size_t offset, size_t n, int rank, int salt, u64* report) {
  verify(w, offset, n, rank, salt, report);
}

// Puts, and checks what comes from `from` as soon as its signal is here.
extern "C" __global__ void put(ncclDevComm dc, int context, ncclWindow_t w, size_t src, size_t dst, size_t n, int peer,
                               int from, unsigned signal, u64 expect, int salt, u64* report) {
  ncclGin gin(dc, context);
  fill(w, src, n, dc.rank, salt);
  __syncthreads();
  if (threadIdx.x == 0) gin.put(ncclTeamWorld(dc), peer, w, dst, w, src, n, ncclGin_SignalInc{signal});
  if (reached_by_all([&] { return gin.readSignal(signal); }, expect, report)) verify(w, dst, n, from, salt, report);
}

#if NCCL_VERSION_CODE >= 23007
// The same in a window of several segments, device memory and host memory: NCCL must be told, and splits puts where segments end.
extern "C" __global__ void put_segments(ncclDevComm dc, ncclWindow_t w, size_t src, size_t dst, size_t n, int peer, int from,
                                        unsigned signal, u64 expect, int salt, u64* report) {
  ncclGin gin(dc, 0);
  fill(w, src, n, dc.rank, salt);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0)
    gin.put(ncclTeamWorld(dc), peer, w, dst, w, src, n, ncclGin_SignalInc{signal}, ncclGin_None{}, ncclCoopThread{},
            ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system, ncclGinOptFlagsDefault,
            ncclGin_SegmentMixed{});
  if (reached_by_all([&] { return gin.readSignal(signal); }, expect, report)) verify(w, dst, n, from, salt, report);
}
#endif

// The same along a rail, whose ranks are all that a RAIL connection reaches.
extern "C" __global__ void put_rail(ncclDevComm dc, int context, ncclWindow_t w, size_t src, size_t dst, size_t n, unsigned signal,
                                    u64 expect, int salt, u64* report) {
  ncclGin gin(dc, context);
  ncclTeam rail = ncclTeamRail(dc);
  int to = (rail.rank + 1) % rail.nRanks, from = (rail.rank + rail.nRanks - 1) % rail.nRanks;
  fill(w, src, n, dc.rank, salt);
  __syncthreads();
  if (threadIdx.x == 0) gin.put(rail, to, w, dst, w, src, n, ncclGin_SignalInc{signal});
  if (reached_by_all([&] { return gin.readSignal(signal); }, expect, report))
    verify(w, dst, n, ncclTeamRankToWorld(dc, rail, from), salt, report);
}

// Blocks are spread over the contexts: all puts first, then each is checked at its signal.
extern "C" __global__ void order(ncclDevComm dc, int contexts, ncclWindow_t w, size_t src, size_t dst, size_t n, int count,
                                 int peer, int from, unsigned first, u64 base, int salt, u64* report) {
  int block = blockIdx.x;
  ncclGin gin(dc, block % contexts);
  unsigned signal = first + block;
  src += (size_t)block * count * n;
  dst += (size_t)block * count * n;
  for (int i = 0; i < count; i++) fill(w, src + i * n, n, dc.rank, salt + i + 100 * block);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < count; i++)
      gin.put(ncclTeamWorld(dc), peer, w, dst + i * n, w, src + i * n, n, ncclGin_SignalInc{signal});
  for (int i = 0; i < count; i++) {
    if (!reached_by_all([&] { return gin.readSignal(signal); }, base + i + 1, report)) return;
    verify(w, dst + i * n, n, from, salt + i + 100 * block, report);
  }
}

// Many rounds in one kernel: a put with a signal to the neighbour, and the wait for the other neighbour's.
extern "C" __global__ void rounds(ncclDevComm dc, ncclWindow_t w, size_t src, size_t dst, size_t n, int count, int peer,
                                  int from, unsigned signal, u64 base, u64* report) {
  ncclGin gin(dc, 0);
  // Two places in turn: a neighbour is at most one round ahead, since it waits for its own.
  for (int i = 0; i < count; i++) {
    size_t shift = (size_t)(i % 4) * n;
    fill(w, src + shift, n, dc.rank, i);
    __syncthreads();
    if (threadIdx.x == 0)
      gin.put(ncclTeamWorld(dc), peer, w, dst + shift, w, src + shift, n, ncclGin_SignalInc{signal});
    if (!reached_by_all([&] { return gin.readSignal(signal); }, base + i + 1, report)) return;
    verify(w, dst + shift, n, from, i, report);
    __syncthreads();
    // The receiver has looked at it: its neighbour may go on.
    if (threadIdx.x == 0) gin.signal(ncclTeamWorld(dc), from, ncclGin_SignalInc{signal + 1});
    if (!reached_by_all([&] { return gin.readSignal(signal + 1); }, base + i + 1, report)) return;
  }
}

// Puts without signals, and one signal that vouches for all of them.
extern "C" __global__ void strong(ncclDevComm dc, ncclWindow_t w, size_t src, size_t dst, size_t n, int count, int peer,
                                  int from, unsigned signal, u64 expect, u64* report) {
  ncclGin gin(dc, 0);
  for (int i = 0; i < count; i++) fill(w, src + i * n, n, dc.rank, i + 7);
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i++) gin.put(ncclTeamWorld(dc), peer, w, dst + i * n, w, src + i * n, n);
    gin.signal(ncclTeamWorld(dc), peer, ncclGin_SignalAdd{signal, 1000});
  }
  if (!reached_by_all([&] { return gin.readSignal(signal); }, expect, report)) return;
  for (int i = 0; i < count; i++) verify(w, dst + i * n, n, from, i + 7, report);
}

// Values of 8, 4, 2 and 1 bytes.
extern "C" __global__ void values(ncclDevComm dc, ncclWindow_t w, size_t dst, int peer, int from, unsigned signal, u64 expect,
                                  u64* report) {
  ncclGin gin(dc, 1);
  if (threadIdx.x == 0) {
    ncclTeam team = ncclTeamWorld(dc);
    gin.putValue(team, peer, w, dst, (uint64_t)(0x1122334455667700ull + dc.rank));
    gin.putValue(team, peer, w, dst + 8, (uint32_t)(0xaabbcc00u + dc.rank));
    gin.putValue(team, peer, w, dst + 14, (uint16_t)(0x5500 + dc.rank));
    gin.putValue(team, peer, w, dst + 17, (uint8_t)(0x60 + dc.rank), ncclGin_SignalAdd{signal, 3});
  }
  if (!reached_by_all([&] { return gin.readSignal(signal); }, expect, report) || threadIdx.x != 0) return;
  char* p = (char*)ncclGetLocalPointer(w, dst);
  if (*(uint64_t*)p != 0x1122334455667700ull + from) atomicAdd(&report[0], 1ull);
  if (*(uint32_t*)(p + 8) != 0xaabbcc00u + from) atomicAdd(&report[0], 1ull);
  if (*(uint16_t*)(p + 14) != 0x5500 + from) atomicAdd(&report[0], 1ull);
  if (*(uint8_t*)(p + 17) != 0x60 + from) atomicAdd(&report[0], 1ull);
}

// Signals at an address: add, put with inc. `expect` is the word's value before.
extern "C" __global__ void va_signals(ncclDevComm dc, ncclWindow_t w, ncclWindow_t strict, size_t src, size_t dst, size_t word,
                                      size_t n, int peer, int from, u64 before, u64* report) {
  ncclGin gin(dc, 0);
  ncclTeam team = ncclTeamWorld(dc);
  fill(w, src, n, dc.rank, 40);
  __syncthreads();
  if (threadIdx.x == 0) {
    gin.signal(team, peer, ncclGin_VASignalAdd{strict, word, 5});
    gin.put(team, peer, w, dst, w, src, n, ncclGin_VASignalInc{strict, word});
  }
  if (!reached_by_all([&] { return gin.readSignal(strict, word); }, before + 6, report)) return;
  verify(w, dst, n, from, 40, report);
  if (threadIdx.x == 0 && gin.readSignal(strict, word) != before + 6) atomicAdd(&report[0], 1ull);
}

extern "C" __global__ void reset_va(ncclDevComm dc, ncclWindow_t strict, size_t word) {
  ncclGin gin(dc, 0);
  gin.resetSignal(strict, word);
}

// One signal up to a value, then reset. The ranks meet between calls.
extern "C" __global__ void reset_indexed(ncclDevComm dc, int peer, unsigned signal, u64* report) {
  ncclGin gin(dc, 0);
  gin.signal(ncclTeamWorld(dc), peer, ncclGin_SignalAdd{signal, 4});
  if (!reached([&] { return gin.readSignal(signal); }, 4, report)) return;
  if (gin.readSignal(signal) != 4) atomicAdd(&report[0], 1ull);
  gin.resetSignal(signal);
  if (gin.readSignal(signal) != 0) atomicAdd(&report[0], 1ull);
}

// Local completion, by a counter or by flush: the source may be written again.
extern "C" __global__ void local(ncclDevComm dc, ncclWindow_t w, size_t src, size_t dst, size_t n, int peer, int from,
                                 unsigned signal, u64 expect, unsigned counter, u64 counted, int by_counter, u64* report) {
  ncclGin gin(dc, 0);
  ncclTeam team = ncclTeamWorld(dc);
  fill(w, src, n, dc.rank, 50);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (by_counter)
      gin.put(team, peer, w, dst, w, src, n, ncclGin_None{}, ncclGin_CounterInc{counter});
    else
      gin.put(team, peer, w, dst, w, src, n);
  }
  if (by_counter) {
    if (!reached_by_all([&] { return gin.readCounter(counter); }, counted, report)) return;
  } else {
    gin.flush(ncclCoopCta());
  }
  __syncthreads();
  fill(w, src, n, dc.rank, 51);
  __syncthreads();
  if (threadIdx.x == 0) gin.signal(team, peer, ncclGin_SignalInc{signal});
  if (reached_by_all([&] { return gin.readSignal(signal); }, expect, report)) verify(w, dst, n, from, 50, report);
}

#if NCCL_VERSION_CODE >= 23007
extern "C" __global__ void get(ncclDevComm dc, ncclWindow_t w, size_t remote, size_t here, size_t n, int peer, int salt,
                               u64* report) {
  ncclGin gin(dc, 1);
  if (threadIdx.x == 0) {
    u64 start = now();
    gin.get(ncclTeamWorld(dc), peer, w, remote, w, here, n);
    gin.flush(ncclCoopThread());
    report[2] = now() - start;
  }
  __syncthreads();
  verify(w, here, n, peer, salt, report);
}
#endif

#if NCCL_VERSION_CODE >= 23000
extern "C" __global__ void barriers(ncclDevComm dc, int rail, int count, u64* report) {
  ncclGin gin(dc, 0);
  u64 start = now();
  auto loop = [&](auto tag) {
    ncclGinBarrierSession<ncclCoopCta> session(ncclCoopCta(), gin, tag, 0);
    for (int i = 0; i < count + 5; i++) {
      if (i == 5) start = now();
      session.sync(ncclCoopCta(), cuda::memory_order_acq_rel, FENCE_PUT);
    }
  };
  if (rail) loop(ncclTeamTagRail());
  else loop(ncclTeamTagWorld());
  if (threadIdx.x == 0) report[2] = now() - start;
}
#endif

// Stores to the neighbour in the LSA team, a put to the one on the rail, and the barrier of all.
extern "C" __global__ void hybrid(ncclDevComm dc, ncclWindow_t w, size_t src, size_t lsa_dst, size_t gin_dst, size_t n,
                                  u64* report) {
  ncclGin gin(dc, 0);
  ncclTeam lsa = ncclTeamLsa(dc), rail = ncclTeamRail(dc);
  int lsa_to = (lsa.rank + 1) % lsa.nRanks, lsa_from = (lsa.rank + lsa.nRanks - 1) % lsa.nRanks;
  int rail_to = (rail.rank + 1) % rail.nRanks, rail_from = (rail.rank + rail.nRanks - 1) % rail.nRanks;
  ncclBarrierSession<ncclCoopCta> session(ncclCoopCta(), ncclTeamTagWorld(), gin, 0);
  fill(w, src, n, dc.rank, 60);
  unsigned char* p = (unsigned char*)ncclGetLsaPointer(w, lsa_dst, lsa_to);
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) p[i] = pattern(dc.rank, i, 61);
  __syncthreads();
#if NCCL_VERSION_CODE >= 23000
  if (threadIdx.x == 0) gin.put(rail, rail_to, w, gin_dst, w, src, n);
#else
  if (threadIdx.x == 0) gin.put(rail, rail_to, w, gin_dst, w, src, n, ncclGin_SignalInc{63});
#endif
  session.sync(ncclCoopCta(), cuda::memory_order_acq_rel, FENCE_PUT);
#if NCCL_VERSION_CODE < 23000
  reached_by_all([&] { return gin.readSignal(63); }, 1, report);
#endif
  verify(w, lsa_dst, n, ncclTeamRankToWorld(dc, lsa, lsa_from), 61, report);
  verify(w, gin_dst, n, ncclTeamRankToWorld(dc, rail, rail_from), 60, report);
  session.sync(ncclCoopCta(), cuda::memory_order_acq_rel, FENCE_PUT);
}

// Round trips between two ranks. mode 0: 8-byte put with signal, 1: value with signal, 2: signal alone, 3: 8-byte put with a signal at an address.
__device__ inline void ping_pong_of(const ncclDevComm& dc, int context, ncclWindow_t w, ncclWindow_t strict, size_t src, size_t dst,
                                    size_t word, unsigned signal, u64 base, int count, int mode, u64* report) {
  ncclGin gin(dc, context);
  ncclTeam team = ncclTeamWorld(dc);
  int peer = dc.rank ^ 1;
  u64 start = now();
  const int warm = count / 10 + 1;
  for (int i = 0; i < count + warm; i++) {
    if (i == warm) start = now();
    for (int half = 0; half < 2; half++) {
      if (half == (dc.rank & 1)) {
        if (mode == 0) gin.put(team, peer, w, dst, w, src, 8, ncclGin_SignalInc{signal});
        else if (mode == 1) gin.putValue(team, peer, w, dst, (uint64_t)i, ncclGin_SignalInc{signal});
        else if (mode == 2) gin.signal(team, peer, ncclGin_SignalInc{signal});
        else gin.put(team, peer, w, dst, w, src, 8, ncclGin_VASignalInc{strict, word});
      } else if (mode == 3) {
        if (!reached([&] { return gin.readSignal(strict, word); }, base + i + 1, report)) return;
      } else {
        if (!signalled(gin, signal, base + i + 1, report)) return;
      }
    }
  }
  report[2] = now() - start;
}

extern "C" __global__ void ping_pong(ncclDevComm dc, int context, ncclWindow_t w, ncclWindow_t strict, size_t src, size_t dst,
                                     size_t word, unsigned signal, u64 base, int count, int mode, u64* report) {
  ping_pong_of(dc, context, w, strict, src, dst, word, signal, base, count, mode, report);
}

// The same, while all other blocks fill the GPU and spin.
extern "C" __global__ void crowded(ncclDevComm dc, ncclWindow_t w, size_t src, size_t dst, unsigned signal, u64 base, int count,
                                   u64* report, volatile int* stop, int* started) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      reached([&] { return (u64)*(volatile int*)started; }, gridDim.x - 1, report);
      ping_pong_of(dc, 0, w, w, src, dst, 0, signal, base, count, 0, report);
      *stop = 1;
      __threadfence();
    }
  } else {
    if (threadIdx.x == 0) atomicAdd(started, 1);
    for (u64 start = now(); !*stop && now() - start < 2 * kDeadline;) {}
  }
}

// Puts one behind the other, each with a signal; the receiver answers once for all.
extern "C" __global__ void stream_of_puts(ncclDevComm dc, ncclWindow_t w, size_t src, size_t dst, size_t n, int slots, int count,
                                          int sends, int receives, unsigned signal, u64 base, unsigned back, u64 back_base,
                                          u64* report) {
  ncclGin gin(dc, 0);
  ncclTeam team = ncclTeamWorld(dc);
  int peer = dc.rank ^ 1;
  u64 start = now();
  if (sends)
    for (int i = 0; i < count; i++)
      gin.put(team, peer, w, dst + (i % slots) * n, w, src + (i % slots) * n, n, ncclGin_SignalInc{signal});
  if (receives) {
    if (!reached([&] { return gin.readSignal(signal); }, base + count, report)) return;
    gin.signal(team, peer, ncclGin_SignalInc{back});
  }
  if (sends && !reached([&] { return gin.readSignal(back); }, back_base + 1, report)) return;
  report[2] = now() - start;
}

// Waits for a signal that does not come: until the deadline given.
extern "C" __global__ void wait_in_vain(ncclDevComm dc, unsigned signal, u64 least, u64 nanoseconds, u64* report) {
  ncclGin gin(dc, 0);
  for (u64 start = now(); gin.readSignal(signal) < least;)
    if (now() - start > nanoseconds) {
      report[1] = 1;
      return;
    }
}
