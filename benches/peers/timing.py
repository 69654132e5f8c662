"""How calls of the peers are timed: as `deepep bench` times its own (deepep-cli/src/bench/calls.rs and clock.rs).

A sample begins with a barrier of all ranks on the stream; before it L2 is emptied from T = 512. `single` is one call, from an event before it
to an event after it, the slowest rank of each iteration. `chains` are several calls one right after the other: from event to event, and on the
wall's clock until the last one has returned, both divided by their number, again of the slowest rank. All are medians.
"""

import statistics
import time

FLUSH_BYTES = 256 << 20
FLUSH_FROM = 512
WARM_UP = 8
CHAINS = 5


class Clock:
    """Times calls on the current stream; all ranks make the same calls. `barrier` enqueues a barrier of all ranks."""

    def __init__(self, torch, dist, barrier=None):
        token = torch.zeros(1, device="cuda")
        self.torch, self.dist = torch, dist
        self.barrier = barrier or (lambda: dist.all_reduce(token))
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def _sample(self, call, tokens, calls):
        """Microseconds of `calls` calls from event to event, and until the last one has returned."""
        if tokens >= FLUSH_FROM:
            self.flush.zero_()
        self.barrier()
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - begin
        stop.record()
        self.torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3, host * 1e6

    def _median(self, samples):
        """Of the slowest rank of each sample."""
        slowest = self.torch.tensor(samples, device="cuda")
        self.dist.all_reduce(slowest, op=self.dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def single(self, call, tokens, iterations):
        samples = [self._sample(call, tokens, 1)[0] for _ in range(WARM_UP + iterations)]
        return self._median(samples[WARM_UP:])

    def chains(self, call, tokens):
        """A call in a chain: from event to event, and of the host."""
        calls = 20 if tokens >= FLUSH_FROM else 50
        samples = [self._sample(call, tokens, calls) for _ in range(CHAINS)]
        return [self._median([sample[i] / calls for sample in samples]) for i in range(2)]
