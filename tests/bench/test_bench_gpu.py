"""The parts of bench/gpu.py at tiny sizes on a CPU, what a limit leaves, and what a failure does.

With vLLM: tests/engines/test_vllm_colocated.py.
"""

import json
import math
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import bench.colocated as colocated
import bench.common as common
import bench.gpu as gpu
import bench.parts as parts
import bench.pipeline as pipeline
from config.options import READER
from config.realmodels import named_folder
from dev import reader
from engines.vllm_colocated import ColocatedEngine
from tests.embedded.test_reader import parse


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "machine", dict)


def saved(folder):
    return json.loads((folder / "gpu.json").read_text())["parts"]


# ---------------------------------------------------------------- limits


def test_a_limit_interrupts_what_goes_on_and_nothing_afterwards():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(parts.OutOfTime), parts.limited(1000):
        assert parts.left() <= 1000
        signal.raise_signal(signal.SIGALRM)
    assert parts.left() == math.inf and signal.getsignal(signal.SIGALRM) is before


def test_of_a_part_at_its_limit_stays_what_was_measured_and_the_rest_is_missing(
    monkeypatch, tmp_path, capsys
):
    def repeated(*_):
        if measured:  # what came before it is safe
            assert saved(tmp_path)["update"]["paper"] == measured[0]
        if len(measured) == most:
            raise parts.OutOfTime
        measured.append({"tokens_per_s": 14_000, "conversations_per_s": 1.0})
        return measured[-1]

    measured, most = [], 1
    monkeypatch.setattr(gpu, "repeated", repeated)
    monkeypatch.setattr(gpu, "setting", lambda tiny, model, make=gpu.setting: make(True, model))
    gpu.BENCHMARK.here("update", tiny=False, limit=77)
    found = saved(tmp_path)["update"]
    assert "paper" in found and "shared" not in found and found["cut_s"] == 77
    assert "the limit of 77 s" in capsys.readouterr().out
    measured, most = [], 0
    with pytest.raises(SystemExit, match="Nothing was measured within 150 s"):
        gpu.BENCHMARK.here("update", tiny=True)


def test_every_part_has_a_limit():
    assert gpu.BENCHMARK.limits.keys() == gpu.BENCHMARK.parts.keys()
    quarter = sum(gpu.BENCHMARK.limits[part] for part in ("update", "step", "pipeline"))
    assert quarter <= 15 * 60


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_update_is_measured_in_both_layouts(mode, monkeypatch, capsys):
    trained, make, kept = [], gpu.optimizer_of, []

    def optimizer_of(weights, config):
        trained.extend(weights)
        return make(weights, config)

    monkeypatch.setattr(gpu, "optimizer_of", optimizer_of)
    result = gpu.cell(mode, True, lambda so_far: kept.append([*so_far]))
    assert [keys[-1] for keys in kept] == ["paper", "shared"]
    paper, shared = result["paper"], result["shared"]
    assert paper["turn_tokens"] == paper["computed_tokens"] == shared["turn_tokens"]
    assert shared["computed_tokens"] == 2 * (48 + 4 * 24)
    assert paper["first_s"] > 0 and len(paper["seconds"]) == 1
    # in full training FSDP2's shards, as in train
    assert trained and all(hasattr(p, "full_tensor") == (mode == "full") for p in trained)
    assert not torch.distributed.is_initialized()
    gpu.show(mode, result)
    assert len(gpu.lines(mode, result)) == 3
    del result["shared"], result["shared_over_paper"]  # it was cut
    gpu.show(mode, result)
    assert gpu.lines(mode, result) == []


# ---------------------------------------------------------------- sleep levels


def test_a_sleep_level_that_fails_is_a_missed_line(monkeypatch):
    rounds = [{"mean": 1e-6, "stale": 0.5, "gib_given_back": 0.0}]

    def streamed(command):
        mode, depth = command[-2:]
        if (mode, depth) == ("lora", "1"):
            return None, "Traceback\nout of memory"
        return {"mode": mode, "sleep": depth, "device": "cpu", "rounds": rounds}, ""

    monkeypatch.setattr(colocated, "streamed", streamed)
    found = gpu.BENCHMARK.here("sleep", tiny=True)
    lines = gpu.lines("sleep", found)
    assert len(lines) == len(colocated.LEVELS) == 5
    assert [x["what"] for x in lines if not x["met"]] == ["sleep lora-1"]
    rounds[0]["stale"] = 1e-7  # it could not be told from the weights of before
    assert not any(x["met"] for x in gpu.lines("sleep", found))


# ---------------------------------------------------------------- the pipeline


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The sources and sets, as empty files."""
    monkeypatch.setattr(pipeline, "FOLDER", tmp_path)
    monkeypatch.setattr(pipeline, "ROOT", tmp_path)
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda name: name == "vllm")
    (tmp_path / "sources").mkdir()
    for file in reader.LOCAL.values():
        (tmp_path / "sources" / file).touch()
    sources = reader.found(str(tmp_path / "sources"))
    for path in (path for stage in reader.stages(sources, tmp_path) for path in stage.makes):
        if path.name.endswith(".gz"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return tmp_path


def run(folder, monkeypatch, **fate):
    """Run it with commands that only write files: (its result, name -> words).

    fate: stage -> fails, or cut: it leaves a checkpoint and no export. An export makes both.
    """
    given = {}

    def command(self, name, words, kind=""):
        given[name] = words
        ended = fate.get(name.replace("-", "_"), "done")
        self.note(name, ended="exit code 1: broken" if ended == "fails" else ended)
        run = folder / "runs" / name.removeprefix("export-")
        if name in pipeline.EVALUATIONS or name == "model" or ended == "fails":
            return
        run.mkdir(exist_ok=True)
        (run / "metrics.csv").write_text("step,reward,mismatch_kl\n0,0.25,0.001\n1,0.75,0.002\n")
        for made in ["checkpoints/step-1"] if ended == "cut" else ["adapter", "model"]:
            (run / made).mkdir(parents=True)

    shipped = []
    monkeypatch.setattr(pipeline.Pipeline, "command", command)
    monkeypatch.setattr(reader, "ship", lambda adapter, to: shipped.append(adapter))
    result = gpu.BENCHMARK.here("pipeline", tiny=False)
    assert saved(folder)["pipeline"]["stages"] == result["stages"]
    assert [adapter.parent.parent for adapter in shipped] in ([], [folder / "runs"])
    return result["stages"], given


def option(words, name):
    return words[len(words) - 1 - words[::-1].index(name) + 1]


def test_the_pipeline_goes_on_from_one_stage_to_the_next(folder, monkeypatch, capsys):
    stages, given = run(folder, monkeypatch)
    assert [x for x in given if x in pipeline.TRAININGS] == ["short", "hops", "grpo"]
    for name, words in given.items():
        if name == "model":
            continue
        at = 2 if words[1] == "cli.py" else 4
        command, values = parse(words[at:])  # its flags are there
        assert values["runs"] == str(folder / "runs") and values["name"] == name
        if command == "eval":
            assert values["engine"] == "vllm" and values["temperatures"] == ["0"]
            trained = str(folder / "runs" / "grpo" / "model")
            assert values["model"] == ("smollm2" if "untrained" in name else trained)
    assert "--adapter" not in given["short"]
    assert option(given["hops"], "--adapter") == str(folder / "runs" / "short" / "adapter")
    assert option(given["grpo"], "--adapter") == str(folder / "runs" / "hops" / "adapter")
    assert option(given["grpo"], "--engine") == "vllm"
    assert json.loads(given["grpo"][3]) == json.loads(given["long"][3]) == pipeline.GRAPHS
    assert stages["grpo"]["steps"]["mismatch_kl"] == [0.001, 0.002] and stages["grpo"]["n"] == 2
    asked = {option(words, "--data"): name for name, words in given.items()
             if name in pipeline.EVALUATIONS}  # fmt: skip
    assert {Path(data).name for data in asked} == {"xquad_en.json.gz", "hotpotqa_dev.jsonl.gz"}
    assert "grpo: reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fate, began_from, told",
    [
        ({}, "hops", pipeline.GRAPHS),
        ({"hops": "fails"}, "short", pipeline.GRAPHS),
        ({"short": "fails", "hops": "fails"}, "", pipeline.GRAPHS),
        ({"grpo": "fails"}, "hops", pipeline.EAGER),
        ({"grpo": "cut"}, "hops", pipeline.GRAPHS),
    ],
)
def test_what_fails_is_said_and_the_next_best_is_taken(fate, began_from, told, folder, monkeypatch):
    stages, given = run(folder, monkeypatch, **fate)
    for name in fate:
        assert stages[name]["ended"] in ("exit code 1: broken", "cut")
    last = "grpo-eager" if fate.get("grpo") == "fails" else "grpo"
    assert ("grpo-eager" in given) == (last == "grpo-eager")
    assert ("export-grpo" in given) == (fate.get("grpo") == "cut")
    before = folder / "runs" / began_from / "adapter" if began_from else named_folder(READER)
    assert option(given[last], "--adapter") == str(before)
    assert option(given["passages"], "--model") == str(folder / "runs" / last / "model")
    assert json.loads(given["passages"][3]) == told


def test_where_nothing_could_be_trained_nothing_is_evaluated(folder, monkeypatch):
    every = dict.fromkeys(("short", "hops", "grpo", "grpo_eager"), "fails")
    stages, given = run(folder, monkeypatch, **every)
    assert stages["passages"] == {"ended": "not begun: nothing was trained"}
    assert "untrained-hqa" in given and "passages" not in given


def test_without_the_sets_it_says_how_they_are_made(folder):
    (folder / "data" / "passages" / "passages_4.jsonl.gz").unlink()
    with pytest.raises(SystemExit, match=r"lacks passages: `python -m bench\.pipeline DIR`"):
        gpu.BENCHMARK.here("pipeline", tiny=True)


@pytest.mark.parametrize(
    "words, ended",
    [
        (["true"], "done"),
        (["sh", "-c", "echo '│ no room │'; echo ╰──╯; exit 3"], "exit code 3: no room"),
        (["sleep", "600"], "at its limit"),
        (["sh", "-c", "trap '' INT; exec sleep 600"], "at its limit"),  # then it is killed
    ],
)
def test_a_command_ends_at_the_latest_with_its_limit(words, ended, folder, monkeypatch):
    endless = "sleep" in words[-1] or words[0] == "sleep"
    monkeypatch.setattr(pipeline, "GRACE_S", 0.05)
    monkeypatch.setattr(pipeline, "LEAST_S", 0)
    limit = 0.05 if endless else math.inf
    monkeypatch.setattr(pipeline.Pipeline, "seconds", lambda *_: limit)
    here = pipeline.Pipeline(True, lambda so_far: None, {})
    here.command("x", words)
    assert here.out["stages"]["x"]["ended"] == ended
    (process,) = here.processes
    assert isinstance(process, subprocess.Popen) and process.returncode is not None


def test_the_time_of_a_command_follows_from_what_is_left(folder, monkeypatch):
    monkeypatch.setattr(pipeline, "left", lambda: now[0])
    now = [400.0]
    here = pipeline.Pipeline(False, lambda so_far: None, {})
    assert here.seconds("grpo") == 0.35 * 400 and here.seconds("hqa") == 400 - pipeline.GRACE_S
    now[0] = 150.0
    assert here.seconds("grpo") == 150 - 0.25 * 400  # the evaluations have their part
    now[0] = 105.0
    here.command("grpo", ["false"])
    assert here.out["stages"]["grpo"] == {"ended": "not begun: no time left"}
    assert sum(pipeline.SHARES[x] for x in ("model", *pipeline.TRAININGS)) < 0.75


def test_vllm_is_told_more_through_the_command(monkeypatch):
    monkeypatch.setattr(ColocatedEngine, "_fixed_settings", lambda self: {"a": 1, "b": 2})
    monkeypatch.setattr("sys.argv", ["-c", '{"b": 3}', "train", "--name", "x"])
    monkeypatch.setattr(pipeline.runpy, "run_path", lambda path, run_name: None)
    pipeline.with_vllm()
    assert ColocatedEngine._fixed_settings(None) == {"a": 1, "b": 3}
    assert pipeline.sys.argv[1:] == ["train", "--name", "x"]
