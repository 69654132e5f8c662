"""Checks of compare.py and results.py that need no GPU. Argument: our program, to check with its real output, too."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile

import compare
import results
from results import Case, Times

DEEPEP_LINES = """\
noise
DEEPEP21 T=4096 fp8 plain dispatch sms=64: med 141.6 p10 139.0 p90 150.2 us  wire 213.0 GB/s  chained 138.0 us host 40.1 us
DEEPEP21 T=4096 bf16 expand combine sms=64: med 312.1 p10 300.0 p90 320.0 us  wire 187.0 GB/s  chained 305.5 us host 51.0 us
DEEPEP21 T=1 fp8 expand=True dispatch: RuntimeError out of memory
"""
ALL_TO_ALL_LINES = """\
ALLTOALL note: ncclAlltoAll was not timed: no NCCL is loaded
ALLTOALL torch T=4096 fp8 dispatch: med 120.0 us
ALLTOALL torch T=4096 bf16 combine: med 240.5 us
"""


def report(*entries):
    return json.dumps({"schema": 2, "results": list(entries), "notes": []})


def entry(outcome, operation="dispatch", tokens=4096, dtype="fp8", layout="plain"):
    setting = {"tokens": tokens, "dtype": dtype, "layout": layout}
    return {"setting": setting, "operation": operation, "outcome": outcome}


def timed(median, chained=None, host=None):
    quantiles = lambda value: value and {"p10": value, "p50": value, "p90": value}
    return {"timed": {"end_to_end_us": quantiles(median), "chained_us": chained, "host_wall_us": quantiles(host), "host_cpu_us": quantiles(1.0)}}


def raises(text, work):
    try:
        work()
    except results.Unreadable as error:
        assert text in str(error), error
        return
    raise AssertionError(f"nothing was raised, expected {text!r}")


def the_peers_lines_are_read():
    times, failures = results.deepep(DEEPEP_LINES)
    assert times == {
        Case(4096, "dispatch", "fp8", "plain"): Times(141.6, 138.0, 40.1),
        Case(4096, "combine", "bf16", "expanded"): Times(312.1, 305.5, 51.0),
    }, times
    assert failures == ["DEEPEP21 T=1 fp8 expand=True dispatch: RuntimeError out of memory"], failures
    found, notes = results.all_to_all(ALL_TO_ALL_LINES)
    assert found["torch"][Case(4096, "dispatch", "fp8", "expanded")] == Times(120.0)
    assert found["nccl"] == {} and notes == ["ncclAlltoAll was not timed: no NCCL is loaded"]


def our_report_is_read_and_wrong_results_are_refused():
    times = results.ours(report(entry(timed(99.5, 96.5, 4.0)), entry({"skipped": "no graphs"}, "graph"), entry(timed(1.0), "pair")))
    assert times == {Case(4096, "dispatch", "fp8", "plain"): Times(99.5, 96.5, 4.0)}, times
    raises("wrong: row 3", lambda: results.ours(report(entry(timed(1.0)), entry({"wrong": "row 3"}))))
    raises("failed: no memory", lambda: results.ours(report(entry({"failed": "no memory"}))))
    raises("schema 1", lambda: results.ours(json.dumps({"schema": 1, "results": []})))


def rounds_are_merged_by_their_medians():
    case, other = Case(1, "dispatch", "fp8", "plain"), Case(2, "dispatch", "fp8", "plain")
    merged = results.middle([{case: Times(1.0, None, 5.0)}, {case: Times(9.0, 4.0)}, {case: Times(2.0), other: Times(7.0)}])
    assert merged == {case: Times(2.0, 4.0, 5.0), other: Times(7.0)}, merged


def the_table_has_ratios():
    plain, combine = Case(4096, "dispatch", "fp8", "plain"), Case(4096, "combine", "bf16", "expanded")
    mine = {combine: Times(200.0), plain: Times(95.0, 90.0, 4.0)}
    peers = {"deepep": results.deepep(DEEPEP_LINES)[0], "torch": results.all_to_all(ALL_TO_ALL_LINES)[0]["torch"]}
    first, second = results.rows(mine, peers)
    assert (first["operation"], second["operation"]) == ("dispatch", "combine")
    assert abs(first["ratio_to_deepep"] - 95.0 / 141.6) < 1e-12
    assert abs(first["chained_ratio_to_deepep"] - 90.0 / 138.0) < 1e-12
    assert abs(second["ratio_to_torch"] - 200.0 / 240.5) < 1e-12
    assert second["chained_ratio_to_deepep"] is None
    text = results.table(mine, peers).splitlines()
    assert len(text) == 3 and "0.67" in text[1] and "0.64" in text[2], "\n".join(text)
    alone = results.table(mine, {}).splitlines()
    assert len(alone) == 3 and "95.0" in alone[1], alone
    lonely = results.rows({Case(7, "cached", "fp8", "plain"): Times(3.0)}, peers)
    assert lonely[0]["ratio_to_deepep"] is None, lonely


def the_whole_script_runs(deepep):
    """Our program on the host backend, and a peer that prints what it printed on a GPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "site").mkdir()
        lines = DEEPEP_LINES.replace("T=4096", "T=16")
        (folder / "bench_deepep.py").write_text(f"print({lines!r})\n")
        out = folder / "out.json"
        arguments = [
            "--deepep", deepep, "--kit", name, "--site", f"{name}/site", "--peers", "deepep", "--shape", "256", "4", "16",
            "--tokens", "16", "--iters", "3", "--json", str(out), "--deepep-options", "--backend", "host",
        ]  # fmt: skip
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            compare.main(arguments)
        text = text.getvalue()
        assert "141.6" in text and "host backend" in text and "out of memory" in text, text
        whole = json.loads(out.read_text())
        assert len(whole["ours"]) == 2 and whole["shape"] == [256, 4, 16], whole["shape"]
        row = next(r for r in whole["rows"] if (r["operation"], r["dtype"], r["layout"]) == ("dispatch", "fp8", "plain"))
        assert abs(row["ratio_to_deepep"] - row["us"] / 141.6) < 1e-9, row
        # Without a kit DeepEP is left out, and that is said; a wrong result of ours ends it all.
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            compare.main(["--deepep", deepep, "--kit", f"{name}/none", *arguments[6:9], *arguments[9:]])
        assert "DeepEP was not run: there are no wheels" in text.getvalue(), text.getvalue()
        try:
            compare.main([*arguments, "--plant-fault", "1"])
        except SystemExit as end:
            assert "wrong" in str(end.code), end.code
        else:
            raise AssertionError("a wrong result was compared")


def main():
    the_peers_lines_are_read()
    our_report_is_read_and_wrong_results_are_refused()
    rounds_are_merged_by_their_medians()
    the_table_has_ratios()
    if len(sys.argv) > 1:
        the_whole_script_runs(sys.argv[1])
    print("peers: all checks passed")


if __name__ == "__main__":
    main()
