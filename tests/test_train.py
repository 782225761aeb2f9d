import csv
import gzip
import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from conftest import random_policy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import base
import data
import settings
import train
from data import Task
from settings import GRPOConfig, RunConfig
from text import Codec, UserError

GRPO = GRPOConfig(steps=7, tasks_per_step=(2,), group_size=3, lr=1e-2, warmup=2, in_flight=4)
TIMES = {"rollout_s", "update_s", "step_s"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny random policy."""
    folder = tmp_path_factory.mktemp("model")
    codec = Codec(base.make_tokenizer())
    random_policy(codec).save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    settings.dump(folder / "agent.yaml", agent=base.AGENT)
    return folder


@pytest.fixture(autouse=True)
def varied_reward(monkeypatch):
    """A random policy never answers right: the reward is made of its tokens, so that there is something to learn."""
    monkeypatch.setattr(train, "reward", lambda form: lambda t: sum(i for turn in t.turns for i in turn.response_ids) % 97 / 97)


def run_config(model, runs, name, **kwargs):
    return RunConfig(**{"name": name, "runs": str(runs), "model": str(model), "lengths": (1, 2), "save_every": 2} | kwargs)


def outcome(folder):
    """What must be equal: weights, metrics without times, trajectories without times."""
    with (folder / "metrics.csv").open(newline="") as file:
        metrics = [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        trajectories = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in file]
    return load_file(folder / "model" / "model.safetensors"), metrics, trajectories


def assert_same(a, b):
    weights_a, weights_b = a[0], b[0]
    assert weights_a.keys() == weights_b.keys() and all(torch.equal(weights_a[k], weights_b[k]) for k in weights_a)
    assert a[1] == b[1]
    assert a[2] == b[2]


def in_child(function):
    """Run in a forked child; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    finally:
        os._exit(0)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_killed_at_random_moments_and_resumed_ends_as_if_never_killed(model, tmp_path, lora_rank):
    config, agent = replace(GRPO, lora_rank=lora_rank, kl=0.01 * bool(lora_rank)), base.AGENT
    expected = outcome(train.train(run_config(model, tmp_path, "whole"), config, agent))
    assert [int(row["step"]) for row in expected[1]] == list(range(7))
    assert any(float(row["trained_rows"]) for row in expected[1])
    rng = random.Random(lora_rank)
    run = run_config(model, tmp_path, "killed")
    kills = 0
    for steps in (0, 2, 3, 5):  # killed somewhere in the step after so many lines of metrics.csv
        pid = in_child(lambda: train.train(run, config, agent, resume=(tmp_path / "killed").exists()))
        metrics = tmp_path / "killed" / "metrics.csv"
        deadline = time.monotonic() + 60
        while (metrics.read_text().count("\n") - 1 if metrics.exists() else 0) < steps and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert kills == 4
    assert_same(outcome(train.train(run, config, agent, resume=(tmp_path / "killed").exists())), expected)


def test_killed_at_every_step_boundary(model, tmp_path):
    expected = outcome(train.train(run_config(model, tmp_path, "whole", save_every=3), GRPO, base.AGENT))

    class Stop(Exception):
        pass

    class StopAt(train.lightning.Callback):
        def __init__(self, step):
            self.step = step

        def on_train_batch_end(self, trainer, module, *_):
            if module.done_steps == self.step:
                raise Stop

    run = run_config(model, tmp_path, "killed", save_every=3)
    for step in (2, 3, 5, 7):
        with pytest.raises(Stop):
            train.train(run, GRPO, base.AGENT, resume=(tmp_path / "killed").exists(), callbacks=[StopAt(step)])
    assert_same(outcome(train.train(run, GRPO, base.AGENT, resume=True)), expected)
    assert_same(outcome(train.train(run, GRPO, base.AGENT, resume=True)), expected)  # a finished run stays as it is


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_export_loads_with_from_pretrained_and_is_the_policy(model, tmp_path, lora_rank):
    folder = train.train(run_config(model, tmp_path, "a"), replace(GRPO, steps=2, warmup=0, lora_rank=lora_rank), base.AGENT)
    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = torch.arange(10, 40)[None]
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    if lora_rank:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "adapter")
    else:
        policy = AutoModelForCausalLM.from_pretrained(model)
        policy.load_state_dict({k.removeprefix("model.").replace("base_model.model.", ""): v for k, v in state.items()})
    untrained = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert torch.allclose(exported(ids).logits, policy(ids).logits, atol=1e-4)
        assert not torch.allclose(exported(ids).logits, untrained(ids).logits, atol=1e-4)
    assert Codec.load(folder / "model").encode("Anna joined Boris.") == Codec(base.make_tokenizer()).encode("Anna joined Boris.")
    assert settings.of_model(folder / "model")["chunk_tokens"] == base.AGENT.chunk_tokens


def test_tasks_of_a_file_come_in_passes(tmp_path):
    tasks = train.FileTasks([Task(str(i), "q", ("a",), text="t") for i in range(10)], seed=0)
    steps = [[t.id for t in tasks.batch(s, 0, 3)] for s in range(6)]
    for one_pass in (steps[:3], steps[3:]):
        assert len({i for step in one_pass for i in step}) == 9
    assert steps[:3] != steps[3:]
    assert steps == [[t.id for t in tasks.batch(s, 0, 3)] for s in range(6)]
    with pytest.raises(UserError, match="wants 11 tasks"):
        tasks.batch(0, 0, 11)


def test_training_on_a_file_of_the_users(model, tmp_path):
    lines = [
        {"question": f"Where is {p}?", "answer": "Lima", "context": f"{p} reached Lima. " * 9} for p in ("Anna", "Boris", "Clara")
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = train.train(run_config(model, tmp_path, "own", data=str(tmp_path / "own.jsonl")), replace(GRPO, steps=2), base.AGENT)
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        assert {json.loads(line)["question"] for line in file} <= {line["question"] for line in lines}
    assert len(data.read(tmp_path / "own.jsonl")) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "./nowhere"}, "No model folder"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"agent": "memgent"}, "Unknown agent"),
        ({"lengths": (0,)}, "at least 1 section"),
        ({"kinds": ("one",)}, "Unknown kind"),
        ({"device": "cuda"}, "No CUDA device"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_leaves_no_folder(model, tmp_path, change, message):
    if change.get("device") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UserError, match=message):
        train.train(replace(run_config(model, tmp_path, "wrong"), **change), GRPO, base.AGENT)
    assert not (tmp_path / "wrong").exists()


def test_corrupt_weights_are_one_sentence(model, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="safetensors"):
        train.train(run_config(broken, tmp_path, "wrong"), GRPO, base.AGENT)
    (broken / "model.safetensors").unlink()
    torch.save({}, broken / "pytorch_model.bin")  # pickles are not loaded
    with pytest.raises(UserError, match="cannot be loaded"):
        train.train(run_config(broken, tmp_path, "wrong"), GRPO, base.AGENT)
    assert not (tmp_path / "wrong").exists()


def test_a_run_is_never_overwritten(model, tmp_path):
    train.train(run_config(model, tmp_path, "a"), replace(GRPO, steps=1), base.AGENT)
    with pytest.raises(UserError, match="there already"):
        train.train(run_config(model, tmp_path, "a"), GRPO, base.AGENT)
    with pytest.raises(UserError, match="no run"):
        train.train(run_config(model, tmp_path, "b"), GRPO, base.AGENT, resume=True)
