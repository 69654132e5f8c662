#include "nccl_gin.h"

// One thread a rank. Rank 0 puts eight bytes into rank 1's window and signals; rank 1 waits for the signal, for a second at most, and says
// what it found: the number, or all ones if nothing came.
extern "C" __global__ void put_and_signal(ncclDevComm comm, ncclWindow_t window, unsigned long long* found) {
  ncclGin gin(comm, 0);
  unsigned long long* words = (unsigned long long*)ncclGetLocalPointer(window, 0);
  if (comm.rank == 0) {
    words[0] = 42;
    __threadfence_system();
    gin.put(ncclTeamWorld(comm), 1, window, 8, window, 0, 8, ncclGin_SignalInc{0});
    gin.flush(ncclCoopThread());
    *found = words[0];
  } else {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    *found = ~0ull;
    do {
      if (gin.readSignal(0) >= 1) {
        *found = words[1];
        return;
      }
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < 1000000000ull);
  }
}
