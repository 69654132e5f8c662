"""Checks of compare.py and results.py that need no GPU. Argument: our program, to check with its real output, too."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import types
from unittest import mock

import compare
import deepep_v2
import results
from results import Case, Times

DEEPEP_LINES = """\
noise
DEEPEP T=4096 fp8 plain dispatch: med 141.6 chained 138.0 host 40.1 us
DEEPEP T=4096 bf16 expanded combine: med 312.1 chained 305.5 host 51.0 us
DEEPEP T=1 fp8 expanded dispatch: RuntimeError: out of memory
"""
ALL_TO_ALL_LINES = """\
ALLTOALL note: ncclAlltoAll was not timed: no NCCL is loaded
ALLTOALL torch T=4096 fp8 dispatch: med 120.0 us
ALLTOALL torch T=4096 bf16 combine: med 240.5 us
"""


def report(*entries):
    return json.dumps({"schema": 3, "results": list(entries), "notes": []})


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
    assert failures == ["T=1 fp8 expanded dispatch: RuntimeError: out of memory"], failures
    found, notes = results.all_to_all(ALL_TO_ALL_LINES)
    assert found["torch"][Case(4096, "dispatch", "fp8", "expanded")] == Times(120.0)
    assert found["nccl"] == {} and notes == ["ncclAlltoAll was not timed: no NCCL is loaded"]


def the_script_of_deepep_prints_what_is_read():
    """Without a GPU: every call goes to a stand-in, and takes 141.6 µs."""
    torch, dist, package = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    torch.tensor = lambda samples, device: types.SimpleNamespace(tolist=lambda: list(samples))
    torch.cuda.Event.return_value.elapsed_time.return_value = 0.1416
    buffer = package.ElasticBuffer.return_value
    buffer.dispatch.return_value = ((mock.MagicMock(), mock.MagicMock()), None, None, "handle", None)
    args = types.SimpleNamespace(hidden=256, topk=4, experts=16, num_sms=0, iters=3)

    def told(rank, tokens):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            deepep_v2.measure(torch, dist, package, "group", args, rank, tokens)
        return results.deepep(text.getvalue())

    times, failures = told(0, 512)
    layouts = ("plain", "expanded")
    expected = {Case(512, o, d, l) for l in layouts for o, d in [(o, d) for o in ("dispatch", "cached") for d in ("fp8", "bf16")]}
    expected |= {Case(512, "combine", "bf16", l) for l in layouts}
    assert set(times) == expected and failures == [], (times, failures)
    # 20 calls a chain.
    assert all((t.median, t.chained) == (141.6, 7.1) and t.host >= 0 for t in times.values()), times
    new, cached = ([c.kwargs for c in buffer.dispatch.mock_calls if bool(c.kwargs["handle"]) == cached] for cached in (False, True))
    assert all("topk_weights" in c and not c["do_cpu_sync"] for c in new) and all("topk_idx" not in c for c in cached)
    # 8 calls that don't count, 3 that do, 5 chains of 20; and one dispatch for each handle.
    assert (len(new), len(cached), len(buffer.combine.mock_calls)) == (4 * 111 + 4, 4 * 111, 2 * 111), (len(new), len(cached))
    assert told(1, 128) == ({}, []), "rank 0 prints"
    buffer.combine.side_effect = ValueError("no\nroom")
    times, failures = told(0, 512)
    assert len(times) == 8 and failures == [f"T=512 bf16 {l} combine: ValueError: no room" for l in layouts], failures


def our_report_is_read_and_wrong_results_are_refused():
    times = results.ours(report(entry(timed(99.5, 96.5, 4.0)), entry({"skipped": "no graphs"}, "graph"), entry(timed(1.0), "pair")))
    assert times == {Case(4096, "dispatch", "fp8", "plain"): Times(99.5, 96.5, 4.0)}, times
    raises("wrong: row 3", lambda: results.ours(report(entry(timed(1.0)), entry({"wrong": "row 3"}))))
    raises("failed: no memory", lambda: results.ours(report(entry({"failed": "no memory"}))))
    raises("schema 2", lambda: results.ours(json.dumps({"schema": 2, "results": []})))


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
        (folder / "deepep_v2.py").write_text(f"print({lines!r})\n")
        compare.HERE = folder
        out = folder / "out.json"
        arguments = [
            "--deepep", deepep, "--site", f"{name}/site", "--peers", "deepep", "--shape", "256", "4", "16",
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
        # Without wheels DeepEP is left out, and that is said; a wrong result of ours ends it all.
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            compare.main(["--deepep", deepep, "--wheels", f"{name}/none", *arguments[4:]])
        assert "DeepEP was not run: there are no wheels" in text.getvalue(), text.getvalue()
        # What is stopped leaves what it has.
        out.unlink()
        with mock.patch.object(results, "deepep", side_effect=KeyboardInterrupt):
            try:
                compare.main(arguments)
            except KeyboardInterrupt:
                pass
        whole = json.loads(out.read_text())
        assert len(whole["ours"]) == whole["rounds"] == 1 and whole["rows"], whole
        assert all("deepep_us" not in row for row in whole["rows"]), whole["rows"]
        try:
            compare.main([*arguments, "--plant-fault", "1"])
        except SystemExit as end:
            assert "wrong" in str(end.code), end.code
        else:
            raise AssertionError("a wrong result was compared")
        try:
            compare.main([*arguments[:-3], "--json", f"{name}/none/out.json"])
        except SystemExit as end:
            assert "none/out.json" in str(end.code), end.code
        else:
            raise AssertionError("a file that can't be written was found too late")


def main():
    the_peers_lines_are_read()
    the_script_of_deepep_prints_what_is_read()
    our_report_is_read_and_wrong_results_are_refused()
    rounds_are_merged_by_their_medians()
    the_table_has_ratios()
    if len(sys.argv) > 1:
        the_whole_script_runs(sys.argv[1])
    print("peers: all checks passed")


if __name__ == "__main__":
    main()
