"""The benchmarks' own arithmetic, and small runs on a CPU of the scripts that need no peer."""

import json
import sys
from functools import partial

import pytest
import torch

import bench.__main__ as everything
import bench.common as common
import bench.parts as parts
from config.errors import UserError


def test_a_ratio_is_that_of_the_medians_and_a_missed_bar_is_said():
    met = common.against([4.0, 9.0, 8.0], [1.0, 3.0, 2.0], bar=4)
    assert met == {"ratio": 4.0, "ratio_min": 3.0, "ratio_max": 4.0, "bar": 4, "met": True}
    assert common.verdict(met) == "at least 4x: met"
    assert common.verdict(common.against([1.0], [1.0], bar=2)) == "at least 2x: MISSED"


def test_what_fails_and_what_is_missed_stands_in_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    bar = "at most 2"
    lines = [common.line("a", 3, bar, False), common.line("b", 1, bar, True)]
    common.finish("length", {}, lines)
    monkeypatch.setattr("sys.argv", ["bench", "nowhere"])
    monkeypatch.setattr(everything, "ORDER", ("nowhere", "length"))
    with pytest.raises(SystemExit):
        everything.main()
    table = (tmp_path / "table.md").read_text()
    assert "| a | 3 | at most 2 | missed |" in table and "| b | 1 | at most 2 |  |" in table
    assert "failed" in table
    assert json.loads((tmp_path / "nowhere.json").read_text())["lines"][0]["met"] is False
    where = json.loads((tmp_path / "length.json").read_text())["machine"]
    assert {"cpu", "cores", "versions", "commit", "date"} <= where.keys()


# ---------------------------------------------------------------- parts


def test_the_output_of_a_part_is_shown_as_it_comes_and_its_last_json_is_the_result(
    monkeypatch, tmp_path
):
    """It waits for a file that appears once its first line has been passed on.

    Were its output kept until it ends, it would not end.
    """
    heard, lines = tmp_path / "heard", []

    class Out:
        def write(self, text):
            lines.append(text)
            if "first" in text:
                heard.touch()

        def flush(self): ...

    script = f"""
import pathlib, sys, time
print("first")
while not pathlib.Path({str(heard)!r}).exists():
    time.sleep(0.02)
print('{{"a": 1}}'); print('{{"a": 2}}'); print("[rank0] destroyed")
print("a warning", file=sys.stderr)
"""
    monkeypatch.setattr(sys, "stdout", Out())
    assert parts.streamed([sys.executable, "-c", script]) == ({"a": 2}, "a warning")
    assert "[rank0] destroyed\n" in lines


@pytest.fixture
def benchmark_of(tmp_path, monkeypatch):
    """Make a benchmark of parts a, b, c, whose processes are calls.

    Gives it, the list of parts that have run, {part: exception to raise}, and a reader of its file.
    """
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "machine", lambda: {"commit": "0"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran, fate = [], {}

    def measure(part, tiny):
        ran.append(part)
        if part in fate:
            raise fate[part]
        return {"value": len(ran)}

    def lines(part, result):
        return [common.line(part, result["value"], "at most 3", result["value"] <= 3)]

    measures = {part: partial(measure, part) for part in "abc"}
    made = parts.Benchmark("made", measures, lambda part, result: None, lines)

    def streamed(command):
        assert command[1:3] == ["-m", "bench.made"]
        try:
            return made.here(command[3], "--tiny" in command), ""
        except (ValueError, SystemExit) as error:
            return None, f"Traceback\n{error}"

    monkeypatch.setattr(parts, "streamed", streamed)
    return made, ran, fate, lambda: json.loads((tmp_path / "made.json").read_text())


def test_a_kill_loses_only_the_part_that_was_running_and_the_next_call_does_the_rest(benchmark_of):
    made, ran, fate, saved = benchmark_of
    fate["b"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        made.main([])
    assert list(saved()["parts"]) == ["a"] and saved()["parts"]["a"]["value"] == 1
    assert saved()["lines"][0]["what"] == "a"
    fate.clear()
    made.main([])
    assert ran == ["a", "b", "b", "c"] and list(saved()["parts"]) == ["a", "b", "c"]
    assert [x["met"] for x in saved()["lines"]] == [True, True, False]
    assert saved()["parts"]["c"]["machine"] == {"commit": "0"}
    made.main([])
    assert len(ran) == 4  # nothing is missing
    made.main(["a"])
    assert ran[4:] == ["a"]
    assert saved()["parts"]["a"]["value"] == 5 and saved()["parts"]["b"]["value"] == 3
    made.main(["--again"])
    assert ran[5:] == ["a", "b", "c"]


def test_a_part_that_fails_is_said_and_tried_again_but_never_replaces_numbers(benchmark_of):
    made, ran, fate, saved = benchmark_of
    fate["b"] = ValueError("out of memory")
    with pytest.raises(SystemExit):
        made.main([])
    assert ran == ["a", "b", "c"] and saved()["lines"][1]["measured"] == "failed: out of memory"
    fate["b"] = UserError("It does not fit.")
    with pytest.raises(SystemExit):
        made.main([])
    assert ran[3:] == ["b"] and saved()["lines"][1]["measured"] == "failed: It does not fit."
    fate["a"] = fate["b"]
    with pytest.raises(SystemExit):
        made.main(["--again"])
    assert saved()["parts"]["a"]["value"] == 1


def test_a_result_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    common.write(path, {"a": 1})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        common.write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
