"""What the peers print, in one form, and the table of ratios. Needs nothing but Python."""

import dataclasses
import json
import re
import statistics

OPERATIONS = ("dispatch", "cached", "combine")


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One thing that everybody does: `dtype` is fp8 or bf16, `layout` plain or expanded."""

    tokens: int
    operation: str
    dtype: str
    layout: str


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds on the slowest rank: from event to event, the same in a chain of calls, and until a call of that returns."""

    median: float
    chained: float | None = None
    host: float | None = None


class Unreadable(Exception):
    """An output is not what was expected."""


def ours(text):
    """Times from the JSON of `deepep bench`. Wrong and failed results are an error, since a ratio to them says nothing."""
    report = json.loads(text)
    if report["schema"] != 3:
        raise Unreadable(f"schema {report['schema']} of deepep bench is not known here")
    found = {}
    for entry in report["results"]:
        setting, outcome = entry["setting"], entry["outcome"]
        for bad in ("wrong", "failed"):
            if bad in outcome:
                raise Unreadable(f"deepep bench, T = {setting['tokens']}, {entry['operation']}: {bad}: {outcome[bad]}")
        if "timed" in outcome and entry["operation"] in OPERATIONS:
            times = outcome["timed"]
            case = Case(setting["tokens"], entry["operation"], setting["dtype"], setting["layout"])
            host = times["host_wall_us"] and times["host_wall_us"]["p50"]
            found[case] = Times(times["end_to_end_us"]["p50"], times["chained_us"], host)
    return found


def deepep_line(case, times):
    """What deepep_v2.py prints of a case."""
    return (
        f"DEEPEP T={case.tokens} {case.dtype} {case.layout} {case.operation}: "
        f"med {times.median:.1f} chained {times.chained:.1f} host {times.host:.1f} us"
    )


def deepep_failure(case, error):
    """The same where there are no times."""
    what = " ".join(str(error).split())[:200]
    return f"DEEPEP T={case.tokens} {case.dtype} {case.layout} {case.operation}: {type(error).__name__}: {what}"


_DEEPEP = re.compile(
    r"DEEPEP T=(\d+) (fp8|bf16) (plain|expanded) (dispatch|cached|combine): "
    r"med ([\d.]+) chained ([\d.]+) host ([\d.]+) us"
)


def deepep(text):
    """Times from the lines of deepep_v2.py, and the lines that report a failure."""
    found, failures = {}, []
    for line in text.splitlines():
        if not line.startswith("DEEPEP "):
            continue
        match = _DEEPEP.fullmatch(line.strip())
        if match is None:
            failures.append(line.removeprefix("DEEPEP "))
            continue
        tokens, dtype, layout, operation, *times = match.groups()
        found[Case(int(tokens), operation, dtype, layout)] = Times(*map(float, times))
    return found, failures


def add_shape_options(parser):
    """The options of the scripts that run peers."""
    parser.add_argument("--world", type=int, default=2, help="ranks, one a GPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--iters", type=int, default=30)


_ALL_TO_ALL = re.compile(r"ALLTOALL (torch|nccl) T=(\d+) (fp8|bf16) (dispatch|combine): med ([\d.]+) us")


def all_to_all(text):
    """Times from the lines of all_to_all.py, by who, and its notes. Rows move, and nothing else: so each counts for both layouts."""
    found, notes = {"torch": {}, "nccl": {}}, []
    for line in text.splitlines():
        if line.startswith("ALLTOALL note: "):
            notes.append(line.removeprefix("ALLTOALL note: "))
        elif match := _ALL_TO_ALL.fullmatch(line.strip()):
            who, tokens, dtype, operation, median = match.groups()
            for layout in ("plain", "expanded"):
                found[who][Case(int(tokens), operation, dtype, layout)] = Times(float(median))
    return found, notes


def middle(rounds):
    """The median of each case over rounds; a case that a round lacks is taken from the others."""

    def of(values):
        values = [value for value in values if value is not None]
        return statistics.median(values) if values else None

    cases = {case for one in rounds for case in one}
    merged = {}
    for case in cases:
        times = [one[case] for one in rounds if case in one]
        merged[case] = Times(of([t.median for t in times]), of([t.chained for t in times]), of([t.host for t in times]))
    return merged


def rows(mine, peers):
    """One row a case that we have timed: the case, our times, and for each peer its time and our time over it."""
    table = []
    for case in sorted(mine, key=lambda c: (c.tokens, OPERATIONS.index(c.operation), c.dtype, c.layout)):
        row = {**dataclasses.asdict(case), "us": mine[case].median, "chained_us": mine[case].chained, "host_us": mine[case].host}
        for name, times in peers.items():
            other = times.get(case)
            row[f"{name}_us"] = other and other.median
            row[f"{name}_chained_us"] = other and other.chained
            row[f"{name}_host_us"] = other and other.host
            row[f"ratio_to_{name}"] = other and mine[case].median / other.median
            chained = other and other.chained and mine[case].chained
            row[f"chained_ratio_to_{name}"] = mine[case].chained / other.chained if chained else None
        table.append(row)
    return table


def table(mine, peers):
    """The rows as text."""

    def number(value, digits=1):
        return "–" if value is None else f"{value:.{digits}f}"

    header = ["T", "operation", "dtype", "layout", "ours µs"]
    for name in peers:
        header += [f"{name} µs", "ratio"]
    header += ["chained", *(f"{name}" for name in peers if name == "deepep"), "ratio", "host µs"]
    header += [f"{name}" for name in peers if name == "deepep"]
    lines = [header]
    for row in rows(mine, peers):
        line = [str(row["tokens"]), row["operation"], row["dtype"], row["layout"], number(row["us"])]
        for name in peers:
            line += [number(row[f"{name}_us"]), number(row[f"ratio_to_{name}"], 2)]
        line += [number(row["chained_us"])]
        if "deepep" in peers:
            line += [number(row["deepep_chained_us"]), number(row["chained_ratio_to_deepep"], 2)]
        else:
            line += ["–"]
        line += [number(row["host_us"])]
        if "deepep" in peers:
            line += [number(row["deepep_host_us"])]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    left = {1, 2, 3}
    pad = lambda i, text: text.ljust(widths[i]) if i in left else text.rjust(widths[i])
    return "\n".join("  ".join(pad(i, text) for i, text in enumerate(line)).rstrip() for line in lines)
