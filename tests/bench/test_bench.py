"""The benchmarks' own arithmetic, and small runs on a CPU of what needs no peer.

With vLLM: tests/engines/test_vllm_colocated.py.
"""

import json
import math
import signal
import subprocess

import pytest
import torch

import bench.__main__ as everything
import bench.common as common
import bench.gpu as gpu
import bench.length as length
import bench.pipeline as pipeline
import bench.real as real
from config.errors import UserError
from config.options import READER
from config.realmodels import named_folder
from dev import reader
from tests.embedded.test_reader import parse


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "machine", lambda: {"commit": "0", "date": "", "cpu": "",
                                                    "cores": 2, "versions": {}})  # fmt: skip
    return tmp_path


# ---------------------------------------------------------------- what they share


def test_a_ratio_is_taken_of_the_medians_and_sides_are_timed_in_turns():
    met = common.against([4.0, 9.0, 8.0], [1.0, 3.0, 2.0], bar=4)
    assert met == {"ratio": 4.0, "ratio_min": 3.0, "ratio_max": 4.0, "bar": 4, "met": True}
    assert not common.against([1.0], [1.0], bar=2)["met"]
    called = []
    seconds = common.paired({name: lambda name=name: called.append(name) for name in "ab"}, 2)
    assert "".join(called) == "ababab" and [len(x) for x in seconds.values()] == [2, 2]


def test_the_table_has_what_is_missed_and_a_failure_leaves_the_figures_of_before(
    results, monkeypatch
):
    lines = [common.line("a", 3, "at most 2", False), common.line("b", 1, "at most 2", True)]
    common.finish("length", {}, lines)
    monkeypatch.setattr("sys.argv", ["bench", "nowhere"])
    assert everything.main() == 1
    table = (results / "table.md").read_text()
    assert "| a | 3 | at most 2 | missed |" in table and "| b | 1 | at most 2 |  |" in table


@pytest.mark.parametrize("layout", ["shared", "paper"])
def test_a_group_has_its_tokens_in_common_and_advantages_that_sum_to_0(layout):
    rows = common.turns(layout, 100, 4, 9, 3, (2, 5), groups=2)
    prompts = [row.prompt_ids for row in rows[:4]]
    at = slice(0, 9) if layout == "shared" else slice(3, 12)
    assert len(rows) == 8 and all(prompt[at] == prompts[0][at] for prompt in prompts)
    assert {len(row.prompt_ids) for row in rows} == {12}
    assert all(2 <= len(row.response_ids) <= 5 for row in rows)
    assert sum(row.advantage for row in rows) == pytest.approx(0)


def test_lengths_are_compared_with_the_median_of_all():
    found = {"mib_before": 1.0, "mib_peak": 3.0}
    runs = {10: [{"tokens_per_s": [90.0, 110.0]} | found], 20: [{"tokens_per_s": [50.0]} | found]}
    cells = length.cells_of(runs)
    assert [c["against_median"] for c in cells] == [pytest.approx(1 / 3, abs=1e-4), -0.3333]
    assert cells[0]["mib_grown_while_reading"] == 2 and cells[0]["min"] == 90


# ---------------------------------------------------------------- a real model


def test_a_missing_peer_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "VLLM", tmp_path / "none")
    with pytest.raises(UserError), real.vllm_rounds(True, "float32", False):
        pass


# ---------------------------------------------------------------- parts of bench.gpu


def test_the_update_is_measured_in_both_layouts(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "REPEATS", 1)
    result = gpu.main(["update", "--tiny"])
    paper, shared = result["paper"], result["shared"]
    assert paper["turn_tokens"] == paper["computed_tokens"] == shared["turn_tokens"]
    assert shared["computed_tokens"] == 2 * (48 + 4 * 24)
    assert paper["first_s"] > 0 and len(paper["seconds"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert len(gpu.lines("update", result)) == 3
    del result["shared"], result["shared_over_paper"]  # it was cut
    gpu.show("update", result)
    assert gpu.lines("update", result) == []


def test_a_limit_interrupts_the_part_and_keeps_what_was_measured(results, monkeypatch):
    def measure(tiny, keep):
        assert pipeline.left() <= 77
        for most in values:
            keep({"value": most})
            assert saved()["value"] == most
        signal.raise_signal(signal.SIGALRM)

    def saved():
        return json.loads((results / "gpu.json").read_text())["parts"]["update"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "show", lambda *_: None)
    monkeypatch.setitem(gpu.PARTS, "update", (measure, 10))
    before, values = signal.getsignal(signal.SIGALRM), [1, 2]
    gpu.main(["update", "--limit", "77"])
    assert saved()["value"] == 2 and saved()["cut_s"] == 77 and saved()["machine"]
    assert pipeline.left() == math.inf and signal.getsignal(signal.SIGALRM) is before
    values = []
    with pytest.raises(SystemExit):
        gpu.main(["update", "--limit", "77"])
    assert saved()["value"] == 2
    assert sum(limit for _, limit in gpu.PARTS.values()) <= 15 * 60


# ---------------------------------------------------------------- the pipeline


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The sources and sets, as empty files."""
    monkeypatch.setattr(pipeline, "FOLDER", tmp_path)
    monkeypatch.setattr(pipeline, "find_spec", lambda name: name == "vllm")
    (tmp_path / "sources").mkdir()
    for file in reader.LOCAL.values():
        (tmp_path / "sources" / file).touch()
    for path in reader.sets(reader.found(tmp_path / "sources"), tmp_path):
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path


def run(folder, monkeypatch, **fate):
    """Run it with commands that only write files: (stages, name -> words).

    fate: stage -> fails, or cut: it leaves a checkpoint and no export. An export makes both.
    """
    given = {}

    def command(self, name, words, kind=""):
        given[name] = words
        ended = fate.get(name.replace("-", "_"), "done")
        self.note(name, ended=ended)
        run = folder / "runs" / name.removeprefix("export-")
        if name in pipeline.EVALUATIONS or name == "model" or ended == "fails":
            return
        run.mkdir(exist_ok=True)
        (run / "metrics.csv").write_text("step,reward,mismatch_kl\n0,0.25,0.001\n1,0.75,0.002\n")
        for made in ["checkpoints/step-1"] if ended == "cut" else ["adapter", "model"]:
            (run / made).mkdir(parents=True)
        if ended != "cut":
            (run / "adapter" / "agent.yaml").touch()

    shipped = []
    monkeypatch.setattr(pipeline.Pipeline, "command", command)
    monkeypatch.setattr(reader, "ship", lambda adapter, to: shipped.append(adapter.parent.name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = gpu.main(["pipeline"])
    return result["stages"], given, shipped


def option(words, name):
    return words[len(words) - 1 - words[::-1].index(name) + 1]


def test_the_pipeline_goes_on_from_one_stage_to_the_next(folder, monkeypatch):
    stages, given, shipped = run(folder, monkeypatch)
    assert [x for x in given if x in pipeline.TRAININGS] == ["short", "hops", "grpo"]
    assert shipped == ["grpo"] and stages["grpo"]["n"] == 2
    for name, words in given.items():
        if name == "model":
            continue
        at = 2 if words[1] == "cli.py" else 4
        command, values = parse(words[at:])  # its flags are there
        assert values["runs"] == str(folder / "runs") and values["name"] == name
        if command == "eval":
            assert values["engine"] == "vllm" and values["temperatures"] == (0.0,)
            trained = str(folder / "runs" / "grpo" / "model")
            assert values["model"] == ("smollm2" if "untrained" in name else trained)
    assert "--adapter" not in given["short"] and option(given["grpo"], "--engine") == "vllm"
    assert option(given["hops"], "--adapter") == str(folder / "runs/short/adapter")
    assert option(given["grpo"], "--adapter") == str(folder / "runs/hops/adapter")
    assert json.loads(given["grpo"][3]) == json.loads(given["long"][3]) == pipeline.GRAPHS
    assert stages["grpo"]["steps"]["mismatch_kl"] == [0.001, 0.002]


@pytest.mark.parametrize(
    "fate, began_from, told",
    [
        ({"hops": "fails"}, "short", pipeline.GRAPHS),
        ({"short": "fails", "hops": "fails"}, "", pipeline.GRAPHS),
        ({"grpo": "fails"}, "hops", pipeline.EAGER),
        ({"grpo": "cut"}, "hops", pipeline.GRAPHS),
    ],
)
def test_what_fails_is_said_and_the_next_best_is_taken(fate, began_from, told, folder, monkeypatch):
    stages, given, _ = run(folder, monkeypatch, **fate)
    assert all(stages[name]["ended"] == ended for name, ended in fate.items())
    last = "grpo-eager" if fate.get("grpo") == "fails" else "grpo"
    assert ("grpo-eager" in given) == (last == "grpo-eager")
    assert ("export-grpo" in given) == (fate.get("grpo") == "cut")
    before = folder / "runs" / began_from / "adapter" if began_from else named_folder(READER)
    assert option(given[last], "--adapter") == str(before)
    assert json.loads(given["long"][3]) == told


def test_nothing_is_evaluated_that_was_not_trained_and_what_is_missing_is_named(
    folder, monkeypatch
):
    fate = dict.fromkeys(("short", "hops", "grpo", "grpo_eager"), "fails")
    stages, given, shipped = run(folder, monkeypatch, **fate)
    assert "passages" not in given and "not begun" in stages["passages"]["ended"]
    assert not shipped and "untrained-passages" in given
    (folder / "data" / "passages" / "passages_16.jsonl.gz").unlink()
    with pytest.raises(SystemExit, match=r"passages_16"):
        gpu.main(["pipeline", "--tiny"])


@pytest.mark.parametrize("obeys, told", [(True, ["SIGINT"]), (False, ["SIGINT", "kill"])])
def test_a_command_ends_at_the_latest_with_its_limit(obeys, told, folder, monkeypatch):
    class Endless:
        """Ends when it is killed, or at its first interrupt."""

        def __init__(self, *_, **__):
            self.told, self.returncode = [], 3
            self.send_signal = lambda number: self.told.append(number.name)
            self.kill = lambda: self.told.append("kill")

        def wait(self, timeout=None):
            if not (self.told if obeys else "kill" in self.told):
                raise subprocess.TimeoutExpired("x", timeout)
            return self.returncode

    monkeypatch.setattr(pipeline.subprocess, "Popen", Endless)
    here = pipeline.Pipeline(True, lambda so_far: None, {})
    here.command("x", ["x"])
    (process,) = here.processes
    assert here.out["stages"]["x"]["ended"] == "at its limit" and process.told == told


def test_a_command_that_fails_says_its_last_words(folder):
    here = pipeline.Pipeline(True, lambda so_far: None, {})
    here.command("x", ["sh", "-c", "echo no room; exit 3"])
    here.command("y", ["true"])
    stages = here.out["stages"]
    assert stages["x"]["ended"] == "exit code 3: no room" and stages["y"]["ended"] == "done"


def test_the_time_of_a_command_follows_from_what_is_left(folder, monkeypatch):
    monkeypatch.setattr(pipeline, "left", lambda: now[0])
    now = [400.0]
    here = pipeline.Pipeline(False, lambda so_far: None, {})
    assert here.seconds("grpo") == 0.35 * 400 and here.seconds("hqa") == 400 - pipeline.GRACE_S
    now[0] = 105.0  # the evaluations have their part
    here.command("grpo", ["false"])
    assert "not begun" in here.out["stages"]["grpo"]["ended"]
    assert sum(pipeline.SHARES[x] for x in ("model", *pipeline.TRAININGS)) < 0.75
