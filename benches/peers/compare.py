#!/usr/bin/env python3
"""Ours and the peers in turn, on the same shapes and the same GPUs, and one table of ratios.

    benches/peers/compare.py --deepep target/release/deepep --wheels wheels --tokens 128 4096 8192 --json out.json

In each round `deepep bench`, DeepEP V2.1 (deepep_v2.py) and the all-to-all of torch and NCCL (all_to_all.py) run one after the other in processes
of their own; the table has the medians over the rounds. The peers are timed as `deepep bench` times its own calls (timing.py): from event to
event on the caller's stream, after a barrier, L2 emptied from T = 512, the slowest rank's median; chains of calls; and the wall time until a call
of a chain returns. Ours is compared with an oracle before and after it is timed; the peers' results are not checked here. Ratios are ours over
the peer's: below 1 we are faster.

PyTorch for CUDA 13 has to be there. DeepEP's wheels come from PyPI: `pip download --no-deps -d wheels tokenspeed-deepep==2.1.0.post20260801
nvidia-nccl-cu13==2.30.7` (the NCCL that it insists on), for the Python of the machine with the GPUs.

Multicast is switched off for everybody.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import results

HERE = pathlib.Path(__file__).resolve().parent

QUIET = {
    "CUDA_VMM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, environment, seconds):
    """Runs a command for a limited time; returns its output, and why it is incomplete, if so."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        return (out.decode() if isinstance(out, bytes) else out), f"did not end within {seconds} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, None
    words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
    return done.stdout, f"ended with {done.returncode}: " + " / ".join(words)


def ours(args, folder):
    path = folder / "ours.json"
    command = [
        str(args.deepep), "bench", "--shapes", ",".join(map(str, args.shape)),
        "--tokens", ",".join(map(str, args.tokens)), "--operations", "dispatch,cached,combine",
        "--iterations", str(args.iters), "--ranks", str(args.world), "--json", str(path),
    ]  # fmt: skip
    command += ["--sms", str(args.sms)] if args.sms else []
    command += args.deepep_options
    path.unlink(missing_ok=True)
    _, problem = run(command, os.environ | QUIET, args.seconds)
    if not path.exists():
        raise results.Unreadable(f"deepep bench {problem}")
    text = path.read_text()
    return results.ours(text), json.loads(text)


def install(folder_of_wheels, folder):
    """Unpacks DeepEP and its NCCL; returns where they are."""
    wheels = sorted(map(str, folder_of_wheels.glob("*.whl")))
    if not wheels:
        raise results.Unreadable(f"there are no wheels in {folder_of_wheels}; --help says where they come from")
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
    _, problem = run(pip + wheels, os.environ, 300)
    if problem:
        raise results.Unreadable(f"pip {problem}")
    return site


def deepep_environment(site, folder):
    nccl = site / "nvidia/nccl"
    torch = subprocess.run(
        [sys.executable, "-c", "import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"],
        capture_output=True, text=True, timeout=120,
    ).stdout.strip()  # fmt: skip
    environment = os.environ | QUIET
    environment |= {
        "EP_DISABLE_GIN": "1",
        "EP_NCCL_ROOT_DIR": str(nccl),
        "LD_PRELOAD": str(nccl / "lib/libnccl.so.2"),
        "LD_LIBRARY_PATH": f"{torch}/nvidia/nvshmem/lib:" + os.environ.get("LD_LIBRARY_PATH", ""),
        "PYTHONPATH": f"{site}:" + os.environ.get("PYTHONPATH", ""),
    }
    environment.setdefault("CUDA_HOME", "/usr/local/cuda")
    environment.setdefault("EP_JIT_CACHE_DIR", str(folder / "jit"))
    return environment


def shape_options(args):
    hidden, topk, experts = args.shape
    options = ["--world", args.world, "--hidden", hidden, "--topk", topk, "--experts", experts, "--iters", args.iters]
    return [str(option) for option in [*options, "--tokens", *args.tokens]]


def compare(args, folder, save):
    notes, mine, reports = [], [], []
    peers = {name: [] for name in args.peers}
    environment = None

    def so_far():
        merged = {name: results.middle(rounds) for name, rounds in peers.items() if any(rounds)}
        return results.middle(mine), merged, list(dict.fromkeys(notes)), reports

    if "deepep" in peers:
        try:
            site = args.site or install(args.wheels, folder)
            environment = deepep_environment(site, folder)
        except (results.Unreadable, OSError, subprocess.SubprocessError) as error:
            notes.append(f"DeepEP was not run: {error}")
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}: ours")
        times, report = ours(args, folder)
        mine.append(times)
        reports.append(report)
        save(*so_far())
        if environment:
            say(f"round {number + 1} of {args.rounds}: DeepEP")
            command = [sys.executable, str(HERE / "deepep_v2.py"), *shape_options(args)]
            command += ["--num-sms", str(args.sms)] if args.sms else []
            out, problem = run(command, environment, args.seconds)
            times, failures = results.deepep(out)
            peers["deepep"].append(times)
            notes += [f"DeepEP: {line}" for line in failures] + ([f"DeepEP {problem}"] if problem else [])
            save(*so_far())
        if {"torch", "nccl"} & set(peers):
            say(f"round {number + 1} of {args.rounds}: all-to-all")
            command = [sys.executable, str(HERE / "all_to_all.py"), *shape_options(args)]
            out, problem = run(command, os.environ | QUIET, args.seconds)
            found, told = results.all_to_all(out)
            for name in {"torch", "nccl"} & set(peers):
                peers[name].append(found[name])
            notes += told + ([f"all-to-all {problem}"] if problem else [])
            save(*so_far())
    return so_far()


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepep", type=pathlib.Path, required=True, help="our program")
    parser.add_argument("--wheels", type=pathlib.Path, default=pathlib.Path("wheels"), help="folder with the wheels of DeepEP and its NCCL")
    parser.add_argument("--site", type=pathlib.Path, help="where these are installed already")
    parser.add_argument("--peers", nargs="*", choices=("deepep", "torch", "nccl"), default=["deepep", "torch", "nccl"])
    parser.add_argument("--world", type=int, default=2, help="ranks, one a GPU")
    parser.add_argument("--shape", type=int, nargs=3, default=[7168, 8, 256], metavar=("HIDDEN", "TOPK", "EXPERTS"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 512, 2048, 4096, 8192])
    parser.add_argument("--sms", type=int, default=0, help="multiprocessors, ours and DeepEP's; 0: each one's own choice")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="longest time of one program")
    parser.add_argument("--json", type=pathlib.Path, help="where to write everything")
    parser.add_argument("--deepep-options", nargs=argparse.REMAINDER, default=[], help="more arguments for deepep bench")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    if args.json:
        # What can't be written is said before anything runs; what is in it stays until then.
        try:
            args.json.open("a").close()
        except OSError as error:
            sys.exit(f"error: {error}")

    def save(mine, peers, notes, reports):
        """A comparison that is stopped leaves what it has."""
        if not args.json:
            return
        whole = {
            "shape": args.shape,
            "ranks": args.world,
            "sms": args.sms or None,
            "rounds": len(reports),
            "rows": results.rows(mine, peers),
            "notes": notes,
            "ours": reports,
        }
        args.json.write_text(json.dumps(whole, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        try:
            mine, peers, notes, reports = compare(args, pathlib.Path(folder), save)
        except results.Unreadable as error:
            sys.exit(f"error: {error}")
    print(results.table(mine, peers))
    for note in notes + reports[0]["notes"]:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
