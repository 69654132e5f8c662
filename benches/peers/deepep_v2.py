"""Times of DeepEP V2.1's ElasticBuffer among the GPUs of one host, for dispatch, cached dispatch and combine.

Timed as `timing.py` says. Counts are not waited for, experts' first rows are not aligned, weights go along with a new dispatch. Results are not
compared with anything. Prints one line a case, in the form of `results.deepep_line`.
"""

import argparse
import os
import sys

import results
from timing import Clock


def to_fp8(torch, x):
    """E4M3 rows, and a scale for each 128 columns."""
    blocks = x.float().unflatten(1, (-1, 128))
    scales = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448.0
    rows = (blocks / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return rows, scales.contiguous()


def measure(torch, dist, deep_ep, group, args, rank, tokens):
    """Times all cases with this number of tokens; rank 0 prints."""
    buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=tokens, hidden=args.hidden, num_topk=args.topk, allow_hybrid_mode=False,
        prefer_overlap_with_compute=False, explicitly_destroy=True,
    )  # fmt: skip
    clock = Clock(torch, dist, lambda: buffer.barrier(use_comm_stream=False))
    generator = torch.Generator(device="cuda").manual_seed(1000 + rank)
    scores = torch.rand(tokens, args.experts, device="cuda", generator=generator)
    chosen = scores.topk(args.topk, dim=1).indices.to(deep_ep.topk_idx_t)
    weights = torch.rand(tokens, args.topk, device="cuda", generator=generator)
    bf16 = torch.randn(tokens, args.hidden, device="cuda", generator=generator).bfloat16()
    sms = args.num_sms or buffer.get_theoretical_num_sms(args.experts, args.topk)
    for dtype, x in (("fp8", to_fp8(torch, bf16)), ("bf16", bf16)):
        for layout in ("plain", "expanded"):

            def dispatch(handle=None):
                new = {} if handle else {"topk_idx": chosen, "topk_weights": weights}
                return buffer.dispatch(
                    x, **new, handle=handle, num_experts=args.experts, num_sms=sms, do_cpu_sync=False,
                    do_expand=layout == "expanded", expert_alignment=1,
                )  # fmt: skip

            received, _, _, handle, *_ = dispatch()
            rows = received[0] if isinstance(received, tuple) else received
            y = torch.randn(rows.shape, device="cuda").bfloat16()
            calls = {"dispatch": dispatch, "cached": lambda: dispatch(handle), "combine": lambda: buffer.combine(y, handle, num_sms=sms)}
            for operation, call in calls.items():
                if (dtype, operation) == ("fp8", "combine"):
                    continue
                case = results.Case(tokens, operation, dtype, layout)
                try:
                    times = results.Times(clock.single(call, tokens, args.iters), *clock.chains(call, tokens))
                    line = results.deepep_line(case, times)
                except Exception as error:  # Whatever DeepEP raises: the other cases are still worth timing.
                    line = results.deepep_failure(case, error)
                if rank == 0:
                    print(line, flush=True)
    buffer.destroy()


def worker(rank, args):
    import deep_ep
    import torch
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(args.port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=args.world, device_id=torch.device("cuda", rank))
    group = dist.new_group(list(range(args.world)))
    for tokens in args.tokens:
        measure(torch, dist, deep_ep, group, args, rank, tokens)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results.add_shape_options(parser)
    parser.add_argument("--num-sms", type=int, default=0, help="0: DeepEP's own choice")
    parser.add_argument("--port", type=int, default=8399)
    args = parser.parse_args()
    try:
        import torch.multiprocessing as mp
    except ImportError as error:
        sys.exit(f"deepep_v2.py needs PyTorch: {error}")
    mp.spawn(worker, args=(args,), nprocs=args.world)


if __name__ == "__main__":
    main()
