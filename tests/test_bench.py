"""The benchmarks' own arithmetic, and that the scripts which need no peer run: small, on a CPU."""

import json

import pytest

import bench.__main__ as everything
import bench.common as common
import bench.gpu as gpu
import bench.prefill as prefill


def test_a_ratio_is_that_of_the_medians_and_a_missed_bar_is_said():
    met = common.against([4.0, 9.0, 8.0], [1.0, 3.0, 2.0], bar=4)
    assert met == {"ratio": 4.0, "ratio_min": 3.0, "ratio_max": 4.0, "bar": 4, "met": True}
    assert common.verdict(met) == "at least 4x: met"
    assert common.verdict(common.against([1.0], [1.0], bar=2)) == "at least 2x: MISSED"


def test_sides_take_turns():
    calls = []
    seconds = common.paired({name: lambda name=name: calls.append(name) for name in "ab"}, repeats=2)
    assert "".join(calls) == "ababab" and {name: len(s) for name, s in seconds.items()} == {"a": 2, "b": 2}


def test_what_fails_and_what_is_missed_stands_in_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.finish("loop", {}, [common.line("a", 3, "at most 2", False), common.line("b", 1, "at most 2", True)])
    monkeypatch.setattr("sys.argv", ["bench", "nowhere"])
    monkeypatch.setattr(everything, "ORDER", ("nowhere", "loop"))
    with pytest.raises(SystemExit):
        everything.main()
    table = (tmp_path / "table.md").read_text()
    assert "| a | 3 | at most 2 | missed |" in table and "| b | 1 | at most 2 |  |" in table
    assert "failed" in table and json.loads((tmp_path / "nowhere.json").read_text())["lines"][0]["met"] is False
    where = json.loads((tmp_path / "loop.json").read_text())["machine"]
    assert {"cpu", "cores", "versions", "commit", "date"} <= where.keys()


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_gpu_script_runs(mode, monkeypatch):
    monkeypatch.setattr(gpu, "REPEATS", 1)
    result = gpu.cell(mode, tiny=True, device="cpu")
    assert result["mean_dlogp"] < 1e-5
    assert result["paper"]["turn_tokens"] == result["paper"]["computed_tokens"] == result["shared"]["turn_tokens"]
    assert result["shared"]["computed_tokens"] == 2 * (48 + 4 * 24)


def test_the_accounting_is_exact(monkeypatch):
    for name, value in dict(TASKS=2, GROUP=3, SECTIONS=3, SECTION_TOKENS=600, MEMORY=12, ANSWER=6, ROW_TOKENS=2000).items():
        monkeypatch.setattr(prefill, name, value)
    paper, shared = prefill.count("paper", 0.0), prefill.count("shared", 0.0)
    for c in (paper, shared):
        assert c["turns"] == 2 * 3 * 4 and c["written_tokens"] == 2 * 3 * (3 * 12 + 6)  # no response ends by itself
        assert c["prefilled_tokens"] + c["reused_tokens"] == c["prompt_tokens"] == c["turn_tokens"] - c["written_tokens"]
        assert c["prompt_tokens"] == paper["prompt_tokens"]
    assert shared["prefilled_tokens"] < 0.6 * paper["prefilled_tokens"]
    assert shared["trained_in_tokens"] < 0.7 * paper["trained_in_tokens"]
