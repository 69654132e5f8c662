"""Times of all-to-all among the GPUs of one host: torch's `all_to_all_single`, and NCCL's `ncclAlltoAll`.

They move the rows of a uniform routing to the ranks of their experts (dispatch), or back (combine), and nothing else: no counts, no
permutation before or after, no scales beside the rows. What is built on them takes longer.

Timed as `timing.py` says. Prints the slowest rank's median.
"""

import argparse
import ctypes
import os
import sys

import results
from timing import Clock


def rows_by_rank(torch, tokens, topk, experts, world, seed):
    """How many tokens a rank sends to each rank: each token once to every rank that has one of its experts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(topk, dim=1).indices // (experts // world)
    return [int((chosen == rank).any(dim=1).sum()) for rank in range(world)]


def nccl_all_to_all(torch, dist):
    """The function, bound to torch's communicator; raises if there is none."""
    path = next((line.split()[-1] for line in open("/proc/self/maps") if "libnccl.so" in line), None)
    if path is None:
        raise RuntimeError("no NCCL is loaded")
    library = ctypes.CDLL(path)
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    communicator = ctypes.c_void_p(backend._comm_ptr())
    if not communicator.value:
        raise RuntimeError("torch has no communicator yet")
    function = library.ncclAlltoAll
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

    def call(out, into, count):
        # 1 is ncclUint8.
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = function(into.data_ptr(), out.data_ptr(), count, 1, communicator, stream)
        if status != 0:
            raise RuntimeError(f"ncclAlltoAll returned {status}")

    return call


def worker(rank, args):
    import torch
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(args.port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=args.world, device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.zeros(1, device="cuda"))
    clock = Clock(torch, dist)
    try:
        nccl = nccl_all_to_all(torch, dist)
    except (RuntimeError, AttributeError, OSError) as error:
        nccl = None
        if rank == 0:
            print(f"ALLTOALL note: ncclAlltoAll was not timed: {error}", flush=True)

    for tokens in args.tokens:
        sent = [rows_by_rank(torch, tokens, args.topk, args.experts, args.world, 1000 + r) for r in range(args.world)]
        out_rows, in_rows = sent[rank], [row[rank] for row in sent]
        cases = [
            ("fp8", "dispatch", args.hidden + args.hidden // 128 * 4, out_rows, in_rows),
            ("bf16", "dispatch", 2 * args.hidden, out_rows, in_rows),
            ("bf16", "combine", 2 * args.hidden, in_rows, out_rows),
        ]
        for dtype, operation, row_bytes, give, take in cases:
            given = torch.randint(0, 255, (sum(give), row_bytes), dtype=torch.uint8, device="cuda")
            taken = torch.empty((sum(take), row_bytes), dtype=torch.uint8, device="cuda")
            median = clock.single(lambda: dist.all_to_all_single(taken, given, take, give), tokens, args.iters)
            if rank == 0:
                print(f"ALLTOALL torch T={tokens} {dtype} {operation}: med {median:.1f} us", flush=True)
            if nccl is None:
                continue
            # The same number of rows for every pair: the mean.
            each = round(sum(map(sum, sent)) / args.world**2) or 1
            given = torch.randint(0, 255, (each * args.world, row_bytes), dtype=torch.uint8, device="cuda")
            taken = torch.empty_like(given)
            median = clock.single(lambda: nccl(taken, given, each * row_bytes), tokens, args.iters)
            if rank == 0:
                print(f"ALLTOALL nccl T={tokens} {dtype} {operation}: med {median:.1f} us", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results.add_shape_options(parser)
    parser.add_argument("--port", type=int, default=8398)
    args = parser.parse_args()
    try:
        import torch.multiprocessing as mp
    except ImportError as error:
        sys.exit(f"all_to_all.py needs PyTorch: {error}")
    mp.spawn(worker, args=(args,), nprocs=args.world)


if __name__ == "__main__":
    main()
