import csv
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import Calls, Stop, killed_in_child, random_policy, stop_at
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import grpo
import memagent
from agents import find
from cli import app
from commands import contents, export, train
from config import files
from config.errors import UserError
from config.options import GRPOConfig, RunConfig, SFTConfig
from data import Task
from embedded import tiny
from engines import hf
from memagent import Finish, Prompt, Trajectory, Turn
from models import checkpoints
from models.load import import_bitsandbytes
from report import runlog
from suites import _training as sources
from tokens.codec import Codec, Text

GRPO = GRPOConfig(steps=7, tasks_per_step=(2,), group_size=3, lr=1e-2, warmup=2, in_flight=4)
REWARD = memagent.Agent.reward  # the real one
FILE = "model.safetensors"
TIMES = {"rollout_s", "switch_s", "update_s", "step_s", "tokens_per_s"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny random policy."""
    folder = tmp_path_factory.mktemp("model")
    codec = Codec(tiny.make_tokenizer())
    random_policy(codec).save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    files.dump(folder / "agent.yaml", agent=tiny.READING)
    return folder


@pytest.fixture(autouse=True)
def varied_reward(monkeypatch):
    """Make the reward of a trajectory's tokens.

    A random policy never answers right, and there would be nothing to learn.
    """
    monkeypatch.setattr(memagent.Agent, "reward", by_tokens)


def by_tokens(agent, trajectory, outcome="exact"):
    return sum(i for turn in trajectory.turns for i in turn.response_ids) % 97 / 97


def run_config(model, runs, name, **kwargs):
    return RunConfig(
        **{
            "name": name,
            "runs": str(runs),
            "model": str(model),
            "lengths": (1, 2),
            "save_every": 2,
        }
        | kwargs
    )


def reader():
    """Return an agent that writes little: most tests here are of what stays the same then."""
    return tiny.agent(memory_tokens=6, final_tokens=6)


def trained(model, runs, steps=1, name="a", resume=False, callbacks=(), run=(), **config):
    """Train so many steps; returns the run's folder."""
    settings = run_config(model, runs, name, **dict(run)), replace(GRPO, steps=steps, **config)
    return train.train(*settings, reader(), resume=resume, callbacks=callbacks)


def records_of(folder):
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def outcome(folder):
    """What must be equal: weights, metrics without times, trajectories without times."""
    metrics = [{k: v for k, v in row.items() if k not in TIMES} for row in rows_of(folder)]
    trajectories = [{k: v for k, v in r.items() if k != "seconds"} for r in records_of(folder)]
    return load_file(folder / "model" / "model.safetensors"), metrics, trajectories


def assert_same(a, b):
    assert a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert a[1:] == b[1:]


def in_child(function):
    """Run in a forked child; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    finally:
        os._exit(0)


STEPS = 4


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The folder of a training of four steps, whose outcome is that of any that was disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memagent.Agent, "reward", by_tokens)
        return trained(model, tmp_path_factory.mktemp("whole"), STEPS)


@pytest.mark.parametrize("lora_rank, kills", [(0, (0, 1, 3)), (2, (3,))])
def test_killed_within_any_step_and_resumed_ends_as_if_never_killed(
    model, tmp_path, lora_rank, kills
):
    config, agent = (
        replace(GRPO, steps=STEPS, lora_rank=lora_rank, kl=0.01 * bool(lora_rank)),
        reader(),
    )
    calls = Calls()

    class Profiled(train.lightning.Callback):
        """Count the calls of the second step, at whose end a checkpoint is written."""

        def on_train_batch_end(self, trainer, module, *_):
            sys.setprofile(calls if module.done_steps == 1 else None)

    class Dies(train.lightning.Callback):
        def __init__(self, steps, at):
            self.steps, self.at = steps, at

        def on_train_batch_end(self, trainer, module, *_):
            if module.done_steps == self.steps:
                sys.setprofile(Calls(self.at))

    whole = train.train(run_config(model, tmp_path, "whole"), config, agent, callbacks=[Profiled()])
    expected = outcome(whole)
    assert [int(row["step"]) for row in expected[1]] == [*range(STEPS)]
    assert any(float(row["trained_rows"]) for row in expected[1])
    rng = random.Random(lora_rank)
    run = run_config(model, tmp_path, "killed")
    for steps in kills:  # killed somewhere in the step after so many
        at = int(rng.uniform(0.1, 0.9) * calls.n)
        resumed = partial(train.train, run, config, agent, resume=(tmp_path / "killed").exists())
        if steps:
            pid = in_child(partial(resumed, callbacks=[Dies(steps, at)]))
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        else:
            assert killed_in_child(resumed, at)
    assert_same(outcome(train.train(run, config, agent, resume=True)), expected)


def test_stopped_at_every_step_boundary_and_resumed_ends_as_if_never_stopped(
    model, tmp_path, whole, monkeypatch
):
    """Before the first checkpoint, at it, beyond it, at the end; TensorBoard has every step once.

    What others have put beside the checkpoints does no harm.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    seconds = count(10**9)  # names of its files count seconds
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))
    for step in range(1, STEPS + 1):
        with pytest.raises(Stop):
            trained(model, tmp_path, STEPS, resume=step > 1, callbacks=[stop_at(step)])
    places = tmp_path / "a" / "checkpoints"
    shutil.copytree(places / "step-4", places / "step-9-copy")
    (places / ".step-9.tmp").mkdir()
    for _ in range(2):  # a finished run stays as it is
        folder = trained(model, tmp_path, STEPS, resume=True)
        assert_same(outcome(folder), outcome(whole))
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    groups = {tag.partition("/")[0] for tag in events.Tags()["scalars"]}
    assert groups == {"train", "time", "tokens", "memory"}
    assert [event.step for event in events.Scalars("train/reward")] == [*range(STEPS)]
    assert set(checkpoints.checkpoints(folder)) == {4} and (places / "step-9-copy").exists()


def test_an_agent_that_looks_back_is_resumed_to_the_same_numbers_and_logged(model, tmp_path):
    run = run_config(
        model, tmp_path, "a", agent="rememr1", kinds=("two_hop_reverse",), save_every=1
    )
    config = replace(GRPO, steps=2, alpha=0.5)
    agent = tiny.agent("rememr1", callback="question")
    expected, other = outcome(train.train(run, config, agent)), replace(run, name="b")
    with pytest.raises(Stop):
        train.train(other, config, agent, callbacks=[stop_at(1)])
    assert_same(outcome(train.train(other, config, agent, resume=True)), expected)
    (_, metrics, records) = expected
    assert float(metrics[-1]["recall_queries"]) == 1 and float(metrics[-1]["answer_covered"]) == 1
    first, *_, final = records[-1]["turns"]
    assert {*first["rewards"]} == {*final["rewards"]} == {"memory", "callback", "format"}
    assert first["notes"]["covered"] == 1 and first["notes"]["step"]["errors"][0] == "no_update"
    assert {"text", "query", "steps"} <= final["notes"]["recalled"].keys()
    assert find.of_model(tmp_path / "a" / "model")["callback"] == "question"  # as it has learnt to


def tasks_file(path, name):
    rows = ({"id": f"{name}{k}", "question": "Who?", "answer": "Ada", "context": "Ada. " * 9}
            for k in range(4))  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


OWN_AGENT = 'from memagent import MemAgent\n\n\nclass Own(MemAgent):\n    """Own."""\n'
OWN_REWARD = "def reward(t):\n    return sum(i for x in t.turns for i in x.response_ids) % 7 / 7\n"
OWN_TASKS = "from data import Task\n\n\ndef made():\n    return [Task('x', 'q', ('a',), 't')]\n"


def test_a_run_goes_on_with_the_content_of_what_it_read_wherever_that_lies(model, tmp_path):
    """Each of its files is changed and put back; then all of them move, the mixture's too."""

    def run_in(here):
        sources = f"{here / 'a.jsonl'}=3,{here / 'b.jsonl'},{here / 'own_tasks.py'}:made"
        return replace(
            run_config(model, tmp_path, "a", data=sources, validation=str(here / "v.jsonl")),
            agent=str(here / "own_agent.py"), reward=f"{here / 'own_reward.py'}:reward",
        )  # fmt: skip

    def begin(here, resume=True, steps=1, **other):
        run = replace(run_in(here), **other)
        settings = {"memory_tokens": 6, "final_tokens": 6, "templates": str(here / "templates")}
        agent = find.make(run.agent, tiny.READING | settings)
        return train.train(run, replace(GRPO, steps=steps), agent, resume)

    here, there = tmp_path / "here", tmp_path / "there"
    (here / "templates").mkdir(parents=True)
    for name in "abv":
        tasks_file(here / f"{name}.jsonl", name)
    for name, text in (("agent", OWN_AGENT), ("reward", OWN_REWARD), ("tasks", OWN_TASKS)):
        (here / f"own_{name}.py").write_text(text)
    (here / "templates" / "final.txt").write_text("{problem} {memory}")
    folder = begin(here, resume=False)
    shutil.copytree(here, there)
    files_of = [*here.glob("*.*"), here / "templates" / "final.txt"]
    assert len(files_of) == 7
    for path in files_of:
        before = path.read_text()
        path.write_text(before.replace("Ada", "Bob") + "\n")
        with pytest.raises(UserError, match=f"another content of {path}: .*--model {folder}/model"):
            begin(here)
        path.write_text(before)
    (here / "templates" / "update.txt").write_text("{problem} {memory} {section}")
    (here / "a.jsonl").write_text("")
    with pytest.raises(UserError, match=r"a\.jsonl and .*update\.txt: .*another --name"):
        begin(here)
    shutil.rmtree(here)
    swapped = run_in(there).data.replace("a.jsonl=3", "c.jsonl=3")
    (there / "a.jsonl").rename(there / "c.jsonl")
    with pytest.raises(UserError, match=r"other settings \(run.data"):  # another weight
        begin(there, data=swapped.replace("=3", "=2"))
    begin(there, steps=2, data=swapped)
    assert len(rows_of(folder)) == 2
    stored = files.read_yaml(folder / "config.yaml")
    assert {*stored["contents"]} == {"run.data", "run.validation", "run.reward", "run.agent",
                                     "agent.templates"}  # fmt: skip
    (there / "c.jsonl").write_text("")
    shutil.rmtree(folder / "model")
    with pytest.raises(UserError, match=r"which `export .*` writes"):
        begin(there, steps=2, data=swapped)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="put that back, or give another --name"):
        begin(there, steps=2, data=swapped)
    files.dump(folder / "config.yaml", **{k: v for k, v in stored.items() if k != "contents"})
    with pytest.raises(UserError, match="holds no"):  # of an earlier version: nothing is known
        begin(there, steps=2, data=swapped)


@pytest.mark.parametrize("source, where", [
    ("world", None), ("ledger", None), ("hf:org/name@0123:train", None), ("D/x.jsonl", "D/x.jsonl"),
    ("locomo:D/x.jsonl#random/train", "D/x.jsonl"),
    ("D/x.py:made", "D/x.py"),
])  # fmt: skip
def test_which_file_a_source_is_and_that_generated_ones_have_none(tmp_path, source, where):
    (tmp_path / "set").mkdir()
    for path in ("x.jsonl", "x.py", "set/train.jsonl"):
        (tmp_path / path).write_text("a")
    run = RunConfig(data=source.replace("D", str(tmp_path)))
    read = contents.of_training(run, GRPO, tiny.agent())
    place = where and where.replace("D", str(tmp_path))
    assert [path for path, _ in read.get("run.data", ())] == ([place] if where else [])
    if where and (path := Path(place)):
        path = path / "train.jsonl" if path.is_dir() else path
        path.write_text("b")
        assert contents.of_training(run, GRPO, tiny.agent()) != read


def test_a_file_of_an_agent_that_is_learnt_beside_is_one_too(tmp_path):
    (mine := tmp_path / "own_other.py").write_text(OWN_AGENT)
    config = SFTConfig(also=("full=0.1", f"{mine}=0.2"))
    read = contents.of_training(RunConfig(), config, tiny.agent())
    assert [path for path, _ in read["sft.also"]] == ["", str(mine)] and len(read) == 1


@pytest.mark.parametrize("decay_from, jump", [
    (0.0, r"which are 4 now and were 2: step 3 has 0\.0055, step 2 had 0\.0055\."), (1.0, None),
])  # fmt: skip
def test_a_rate_that_jumps_since_there_are_more_steps_is_said(
    model, tmp_path, capsys, decay_from, jump
):
    trained(model, tmp_path, 2, warmup=0, decay_from=decay_from)
    folder = trained(model, tmp_path, 4, resume=True, warmup=0, decay_from=decay_from)
    out = " ".join(capsys.readouterr().out.split())
    rates = [float(row["lr"]) for row in rows_of(folder)]
    assert ("learning rate falls" in out) is bool(jump)
    assert not jump or re.search(jump, out), rates
    if jump:
        assert rates[1:3] == pytest.approx([0.0055, 0.0055])
    trained(model, tmp_path, 4, resume=True, warmup=0, decay_from=decay_from)
    assert "learning rate falls" not in capsys.readouterr().out


@pytest.mark.parametrize("shuffle", [True, False])
def test_tasks_of_a_file_come_as_they_stand_there_if_they_are_not_shuffled(tmp_path, shuffle):
    (tmp_path / "tasks.jsonl").write_text("".join(
        json.dumps({"id": str(i), "question": "q", "answer": "a", "context": "t"}) + "\n"
        for i in range(9)
    ))  # fmt: skip
    run = RunConfig(data=str(tmp_path / "tasks.jsonl"), shuffle=shuffle)
    tasks = sources.training_tasks(run, GRPOConfig())
    drawn = [task.id for step in range(3) for task in tasks.batch(step, 0, 3)]
    assert sorted(drawn) == [*"012345678"] and (drawn == sorted(drawn)) is not shuffle


def test_a_run_that_keeps_no_checkpoint_leaves_nothing_as_large_as_the_weights(model, tmp_path):
    """Its numbers are those of a run that does, and its validations are made."""
    validated = dict(validation="world", validation_n=2)
    kept = trained(model, tmp_path, 3, "kept", run=validated)
    none = trained(model, tmp_path, 3, "none", run=validated | {"keep_checkpoints": 0})
    metrics = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in rows_of(folder)]
        for folder in (kept, none)
    ]
    assert metrics[0] == metrics[1] and len(metrics[1]) == 3
    assert [row["step"] for row in checkpoints.validations(none)] == [2, 3]
    assert (kept / "model").is_dir() and not {"checkpoints", "model", "adapter"} & {
        path.name for path in none.iterdir()
    }


def test_the_engine_is_closed_however_a_training_ends(model, tmp_path, monkeypatch):
    """Otherwise vLLM's next engine in the process would be refused.

    And its adapters would stay in a temporary folder.
    """
    closed = []
    monkeypatch.setattr(hf.TransformersEngine, "close", lambda self: closed.append(self))

    class Fail(train.lightning.Callback):
        def on_train_batch_end(self, *_):
            raise KeyError

    with pytest.raises(KeyError):
        trained(model, tmp_path, 2, callbacks=[Fail()])
    trained(model, tmp_path, 2, "b")
    with pytest.raises(UserError, match="has done 2 steps"):
        trained(model, tmp_path, 1, "b", resume=True)
    assert len(closed) == 3


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_export_loads_with_from_pretrained_and_is_the_policy(model, tmp_path, lora_rank):
    folder = trained(model, tmp_path, 2, warmup=0, lora_rank=lora_rank)
    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = torch.arange(10, 40)[None]
    if lora_rank:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model), folder / "adapter"
        )
    else:
        policy = AutoModelForCausalLM.from_pretrained(model)
        checkpoints.load_checkpoint(folder / "checkpoints" / "step-2", policy)
    untrained = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert torch.allclose(exported(ids).logits, policy(ids).logits, atol=1e-4)
        assert not torch.allclose(exported(ids).logits, untrained(ids).logits, atol=1e-4)
    assert Codec.load(folder / "model").encode("Anna joined Boris.") == Codec(
        tiny.make_tokenizer()
    ).encode("Anna joined Boris.")
    assert find.of_model(folder / "model")["chunk_tokens"] == tiny.agent().config.chunk_tokens


def test_trajectories_say_at_which_temperature_and_for_which_form_they_were_sampled(
    model, tmp_path
):
    """The temperature of their own step, not of the one that the tasks have grown to since."""
    grows = dict(temperature=(1.5, 1.25), grow_at=0.0, grow_steps=2)
    records = records_of(trained(model, tmp_path, 4, **grows))
    found = {(r["step"], r["temperature"], r["form"]) for r in records}
    assert found == {(0, 1.5, "boxed"), (1, 1.5, "boxed"), (2, 1.25, "boxed"), (3, 1.25, "boxed")}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "./nowhere"},
        {"model": "BROKEN"},
        {"model": "PICKLED"},
        {"data": "nowhere.jsonl"},
        {"validation": "nowhere.jsonl"},
        {"agent": "memgent"},
        {"lengths": (0,)},
        {"kinds": ("one",)},
        {"reward": "REWARDS:fails"},
        {"reward": "REWARDS:nan"},
        pytest.param(
            {"device": "cuda"},
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        {"name": ".."},
        {"name": "."},
        {"name": "../x"},
        {"name": "a" * 300},
        {"runs": "FILE"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_sentence_and_leaves_no_folder(model, tmp_path, change):
    (tmp_path / "rewards.py").write_text(REWARDS)
    broken, pickled = (shutil.copytree(model, tmp_path / name) for name in ("broken", "pickled"))
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")  # pickles are not loaded
    places = {"REWARDS": str(tmp_path / "rewards.py"), "FILE": str(tmp_path / "rewards.py"),
              "BROKEN": str(broken), "PICKLED": str(pickled)}  # fmt: skip
    for name, value in change.items():
        for word, path in places.items():
            change = {name: value.replace(word, path)} if word in str(value) else change
    run = {"name": "wrong", "runs": str(tmp_path / "runs")} | change
    for resume in (False, True):
        with pytest.raises(UserError) as error:
            train.train(run_config(**{"model": model} | run), GRPO, reader(), resume)
        assert "\n" not in str(error.value)
    assert not [*tmp_path.glob("runs/*")]


def test_a_finished_run_goes_on_with_more_steps_to_the_same_numbers(model, tmp_path, whole, capsys):
    expected = outcome(whole)
    folder = trained(model, tmp_path, 2)
    assert "a larger --steps" not in capsys.readouterr().out
    assert_same(outcome(trained(model, tmp_path, 2, resume=True)), outcome(folder))
    assert "Step 2 of 2 is done: a larger --steps goes on." in capsys.readouterr().out
    assert_same(outcome(trained(model, tmp_path, STEPS, resume=True)), expected)
    assert find.begun(folder)["grpo"]["steps"] == STEPS
    for wrong in ({"steps": 2, "resume": True}, {"steps": 9}):  # past its end; there already
        with pytest.raises(UserError):
            trained(model, tmp_path, **wrong)
    assert_same(outcome(folder), expected)
    totals, rows = runlog.summary(folder), expected[1]
    assert totals["steps"] == STEPS
    assert totals["reward"] == pytest.approx(sum(float(row["reward"]) for row in rows) / STEPS)
    assert totals["tokens"] == sum(
        float(row["read_tokens"]) + float(row["written_tokens"]) for row in rows
    )


def test_a_run_is_resumed_with_its_own_settings_or_not_at_all(model, tmp_path):
    run, config = run_config(model, tmp_path, "a"), replace(GRPO, steps=2)
    folder = train.train(run, config, reader())
    before = outcome(folder), (folder / "config.yaml").read_bytes()
    for other in (
        (run, replace(config, steps=4, lr=0.5, seed=9), reader()),
        (run, replace(config, steps=4, lora_rank=2), reader()),
        (run, replace(config, steps=4), tiny.agent(memory_tokens=9)),
        (replace(run, lengths=(1, 3)), replace(config, steps=4), reader()),
    ):
        with pytest.raises(UserError, match="began with other settings"):
            train.train(*other, resume=True)
    assert_same(outcome(folder), before[0])
    assert (folder / "config.yaml").read_bytes() == before[1]


def test_a_run_out_of_memory_goes_on_with_smaller_batches(model, tmp_path):
    trained(model, tmp_path)
    folder = trained(model, tmp_path, 2, resume=True, micro_tokens=64, in_flight=3)
    assert find.begun(folder)["grpo"]["micro_tokens"] == 64 and len(outcome(folder)[1]) == 2


def test_a_damaged_or_foreign_checkpoint_is_named(model, codec, tmp_path):
    run, config = run_config(model, tmp_path, "a"), replace(GRPO, steps=1)
    folder = train.train(run, config, reader())
    path, stored = folder / "checkpoints" / "step-1", (folder / "config.yaml").read_bytes()
    names, built = {".metadata", "__0_0.distcp", "state.json"}, train.build(run, config, reader())
    assert {file.name for file in path.iterdir()} == names
    for name in names:
        good = (path / name).read_bytes()
        for damage in (b"", b"junk", b"[1]", good[: len(good) // 2]):
            (path / name).write_bytes(damage)
            with pytest.raises(UserError, match="step-1 is damaged"):
                checkpoints.load_checkpoint(path, built.model, built.configure_optimizers())
        (path / name).unlink()
        with pytest.raises(UserError, match="step-1 is damaged"):
            train.train(run, replace(config, steps=2), reader(), resume=True)
        (path / name).write_bytes(good)
    other = train.build(run_config(model, tmp_path, "b"), replace(config, lora_rank=2), reader())
    checkpoints.save_checkpoint(path, other.model, other.configure_optimizers(), {})
    with pytest.raises(UserError):  # another model's
        train.train(run, replace(config, steps=2), reader(), resume=True)
    assert (folder / "config.yaml").read_bytes() == stored
    (folder / "config.yaml").unlink()
    with pytest.raises(UserError):
        train.train(run, replace(config, steps=2), reader(), resume=True)


REWARDS = """
def half(t):
    return None if t.sample == 1 else float(t.sample)
def nan(t):
    return float("nan")
def fails(t):
    return 1 / 0
"""


@pytest.mark.parametrize(("dtype", "config", "refused"), [
    ("bfloat16", {}, "own updates"), ("bfloat16", {"optimizer": "adamw8bit"}, "own updates"),
    ("bfloat16", {"lora_rank": 2}, ""), ("auto", {}, ""), ("float32", {}, ""),
    ("mixed", {"optimizer": "adamw8bit"}, "--dtype float32."),
])  # fmt: skip
@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_all_weights_are_not_trained_in_bfloat16(model, tmp_path, dtype, config, refused, kind):
    """One that moves by less than half of the distance to its neighbour stays where it is."""
    run = run_config(model, tmp_path, "a", dtype=dtype, device="cpu")
    if refused:
        with pytest.raises(UserError, match=refused):
            train.train(run, kind(**config), reader())
        assert not (tmp_path / "a").exists()
    else:
        assert train.resolved(run, kind(**config), reader())


SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
MADE = {
    "Bert": ("BertLMHeadModel", SHAPE | {"is_decoder": True}),  # without an .lm_head
    "OPT": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32} | SHAPE),
    "Mamba": ("MambaForCausalLM", SHAPE),  # without attention
    "XLNet": ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("command", ["eval", "train", "sft", "train --dry-run", "plan"])
def test_a_model_of_another_kind_is_refused_in_one_sentence(model, tmp_path, kind, command):
    """By whatever command, before anything is written."""
    name, settings = MADE[kind]
    other, runs = tmp_path / "other", f"--runs {tmp_path / 'runs'} --name a"
    codec = Codec.load(model)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(codec.tokenizer), **settings, pad_token_id=0, bos_token_id=1, eos_token_id=1
    )
    getattr(transformers, name)(config).save_pretrained(other)
    codec.tokenizer.save_pretrained(other)
    runs = "" if command == "plan" else runs
    done = CliRunner().invoke(app, f"{command} --model {other} {runs}".split())
    assert done.exit_code == 2, (done.output, done.exception)
    assert not [*tmp_path.glob("runs/*")]


REAL = {"real": "--model {real}", "smollm2": "--model smollm2", "hub": "--model org/real-7B"}
RATES = [
    ("train", "real", "", "--lr"), ("train", "hub", "--lora-rank 4", "--lr"),
    ("train", "smollm2", "--preset demo", "--lr"), ("sft", "real", "", "--lr"),
    ("train", "real", "--preset {own} --agent {own}.py", "--lr"),
    ("train", "real", "--lr 7e-4", ""), ("train", "hub", "--preset paper", ""),
    ("train", "hub", "--preset rememr1", ""), ("sft", "real", "--lora-rank 4", ""),
    ("train", "tiny", "", ""), ("train", "tiny", "--preset demo", ""), ("sft", "tiny", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("command", "which", "words", "refused"), RATES)
def test_a_real_model_never_gets_the_embedded_policys_learning_rate(
    model, tmp_path, monkeypatch, command, which, words, refused
):
    """Neither by default nor by a preset, at the door, before anything is fetched or loaded."""
    real = tmp_path / "real"
    shutil.copytree(model, real)
    os.truncate(real / FILE, 10**9)  # its size is all that is looked at
    own = tmp_path / "own"
    own.with_suffix(".py").write_text(
        "from memagent import MemAgent\n\nclass Own(MemAgent):\n"
        f"    presets = {{{str(own)!r}: {{'grpo': {{'group_size': 4}}}}}}\n"
    )
    monkeypatch.setattr(train, "run_and_report", lambda *settings: None)
    monkeypatch.setattr("config.machine.check_here", lambda run: None)
    places = {"real": real, "own": own}
    asked = f"{command} --runs {tmp_path} --data world {REAL.get(which, '--model {tiny}')} {words}"
    done = CliRunner().invoke(app, asked.format(tiny=model, **places).split())
    assert done.exit_code == (2 if refused else 0), done.output
    assert ("embedded policy's: give" in done.output) == bool(refused)


@pytest.mark.parametrize(("small", "lr", "warned"), [(1, 7e-4, True), (1, 1e-3, False),
                                                     (10**9, 7e-4, False)])  # fmt: skip
def test_a_real_model_with_the_embedded_policys_learning_rate_is_warned_of(
    model, tmp_path, monkeypatch, capsys, small, lr, warned
):
    monkeypatch.setattr(train, "SMALL", small)
    trained(model, tmp_path, 1, run={"keep_checkpoints": 0}, lr=lr)
    assert ("is for the embedded policy; recipes have 1e-06" in capsys.readouterr().out) == warned


def test_what_a_function_leaves_out_is_said_in_lines_files_and_page(model, tmp_path, capsys):
    """To the end of the run, with strict JSON in its summary and `None` in its records."""
    path = tmp_path / "mine.py"
    path.write_text(REWARDS)
    run = run_config(model, tmp_path, "a", reward=f"{path}:half")
    said = []
    train.run_and_report(run, replace(GRPO, steps=2), reader(), False, said.append)
    folder, out = tmp_path / "a", capsys.readouterr().out
    assert out.count("2 readings left out, without a reward  reward 1.000") == 2
    assert [row["unrewarded"] for row in rows_of(folder)] == ["2", "2"]
    assert [float(row["reward"]) for row in rows_of(folder)] == [1.0, 1.0]  # of 0 and 2
    assert json.loads((folder / "summary.json").read_text())["unrewarded"] == 4
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        rewards = [json.loads(line)["reward"] for line in file]
    assert rewards == [0.0, None, 2.0] * 4
    page = (folder / "report.html").read_text()
    assert "4 readings left out" in page[: page.index("<h2")]
    done = CliRunner().invoke(app, ["show", str(folder), "--n", "12"])
    assert done.exit_code == 0 and "none: left out of its group" in done.output


def test_without_a_damaged_checkpoint_a_run_goes_on_from_the_one_before(model, tmp_path, whole):
    kept = {"save_every": 1, "keep_checkpoints": 2}
    folder = trained(model, tmp_path, 2, run=kept)
    newest = folder / "checkpoints" / "step-2"
    os.truncate(newest / "__0_0.distcp", 999)
    with pytest.raises(UserError, match=r"step-2 is damaged.*: remove it to go on from step 1\."):
        trained(model, tmp_path, STEPS, resume=True, run=kept)
    shutil.rmtree(newest)
    trained(model, tmp_path, STEPS, resume=True, run=kept)
    assert_same(outcome(folder), outcome(whole))


def test_the_older_checkpoint_goes_once_the_newer_is_whole(model, tmp_path, monkeypatch, whole):
    """By default one is kept: it is whole at any time."""
    save = dcp.save

    def torn(*rest, checkpoint_id, **more):
        save(*rest, checkpoint_id=checkpoint_id, **more)
        if checkpoint_id.name == ".step-2.tmp":
            assert set(checkpoints.checkpoints(tmp_path / "a")) == {1}
            raise OSError("No space left on device")

    every = {"save_every": 1}
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"step-2 cannot be .*--r"):
        patch.setattr(dcp, "save", torn)
        trained(model, tmp_path, 2, run=every)
    assert {path.name for path in (tmp_path / "a" / "checkpoints").iterdir()} == {"step-1"}
    assert_same(outcome(trained(model, tmp_path, STEPS, resume=True, run=every)), outcome(whole))


@pytest.mark.parametrize(
    ("config", "resumed", "exported"),
    [({"lora_rank": 2}, False, False), ({"kl": 0.1}, False, True), ({}, True, True)],
    ids=str,
)
def test_a_base_that_has_changed_a_little_is_refused_where_it_counts(
    model, tmp_path, config, resumed, exported
):
    base = shutil.copytree(model, tmp_path / "base")
    folder = trained(base, tmp_path, **config)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 1.0001
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    for works, act in (
        (resumed, lambda: trained(base, tmp_path, 2, resume=True, **config)),
        (exported, lambda: export.export(folder, out=tmp_path / "out")),
    ):
        if works:
            act()
            continue
        with pytest.raises(UserError, match=f"^The weights of {base} are not those that {folder}"):
            act()


def test_torn_files_are_cut_and_named_when_a_run_goes_on(model, tmp_path, capsys):
    folder = trained(model, tmp_path, 2)
    for name in ("metrics.csv", "trajectories.jsonl.gz"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-50])
    trained(model, tmp_path, 4, resume=True)
    said = capsys.readouterr().out
    assert re.search(r"last line of .*metrics\.csv was torn", said)
    assert re.search(r"trajectories\.jsonl\.gz is torn: its last [\d,]+ bytes are cut off", said)
    assert [row["step"] for row in rows_of(folder)] == ["0", "2", "3"]
    assert all(None not in row.values() and "" not in row.values() for row in rows_of(folder))
    assert [record["step"] for record in records_of(folder)] == [0] * 6 + [2] * 6 + [3] * 6
    assert runlog.summary(folder)["steps"] == 3
    lines = (folder / "metrics.csv").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:20] + b"\r\n"
    (folder / "metrics.csv").write_bytes(b"".join(lines))
    stored = (folder / "metrics.csv").read_bytes()
    with pytest.raises(UserError, match=r"metrics\.csv is damaged.*line of step 2 is torn"):
        trained(model, tmp_path, 5, resume=True)
    assert (folder / "metrics.csv").read_bytes() == stored


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(model, tmp_path, monkeypatch):
    """Files, folder, and then the new name; first the files of the run that it relies on."""
    order, rename = [], Path.rename

    def renamed(path, target):
        order.append(f"rename {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(checkpoints, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(runlog, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(Path, "rename", renamed)
    trained(model, tmp_path)
    at = order.index("rename step-1")
    assert {".metadata", "__0_0.distcp", "state.json", ".step-1.tmp"} <= {*order[:at]}
    assert {"metrics.csv", "trajectories.jsonl.gz"} <= {*order[: order.index("state.json")]}
    assert order[at - 1] == ".step-1.tmp" and order[at + 1] == "checkpoints"


def test_a_first_step_in_which_everything_fails_leaves_nothing(model, tmp_path):
    too_long = tiny.agent(memory_tokens=5000)  # than the model's window
    shown, run = [train.TrainingProgress(7)], run_config(model, tmp_path, "a")
    shown[0].on_exception(None, None, Stop())  # before a step there is no bar to stop
    with pytest.raises(UserError, match="Every trajectory of step 0 failed"):
        train.train(run, GRPO, too_long, callbacks=shown)
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    with pytest.raises(UserError, match="Every trajectory"):
        train.train(run_config(model, tmp_path, "b"), GRPO, too_long, resume=True)
    assert (tmp_path / "b" / "mine").exists()  # a folder that was there stays


def test_lora_fetches_no_compiled_code_and_loads_no_compiler(tmp_path):
    """bitsandbytes, which peft imports, fetches kernels from the hub where `kernels` is installed.

    Here both packages are stand-ins.
    """
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "bitsandbytes.py").write_text(
        "try:\n    import kernels\n    fetched = True\nexcept ImportError:\n    fetched = False\n"
    )

    def look():
        for name in ("kernels", "bitsandbytes"):
            sys.modules.pop(name, None)
        sys.path.insert(0, str(tmp_path))
        import_bitsandbytes()
        import bitsandbytes
        import kernels

        assert {Path(m.__file__).parent for m in (bitsandbytes, kernels)} == {tmp_path}
        (tmp_path / "fetched").write_text(str(bitsandbytes.fetched))

    os.waitpid(in_child(look), 0)
    assert (tmp_path / "fetched").read_text() == "False"
    code = (
        "from models.load import load_model, with_lora\n"
        "from config.options import EMBEDDED, GRPOConfig\n"
        "with_lora(load_model(EMBEDDED, device='cpu'), GRPOConfig(lora_rank=2))\n"
        "import sys; print(*(m in sys.modules for m in ('bitsandbytes', 'torch._inductor.ir')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True False\n" and "gemm_4bit" not in done.stderr


@pytest.mark.parametrize(
    ("outcome", "boxed", "plain"),
    [
        ("exact", (0, 1, 0), (1, 0, 0)),
        ("em", (1, 1, 0), (1, 1, 0)),
        ("f1", (1, 1, 2 / 3), (1, 1, 1 / 3)),
        ("sub_em", (1, 1, 0), (1, 1, 1)),
    ],
)
def test_what_each_outcome_setting_pays_for_a_nearly_literal_answer(outcome, boxed, plain):
    """One that differs from an accepted one in an article or a full stop, or within a sentence.

    As published it is worth nothing, and 1 by `--outcome em`.
    """
    forms = {
        "Old Town": (reader(), ("\\boxed{The Old Town.}", "\\boxed{old town}", "\\boxed{town}")),
        "Lima": (tiny.agent(form="plain"), ("**Lima**.", "The Lima", "Lima or Oslo, or so")),
    }
    for (answer, (agent, responses)), worth in zip(forms.items(), (boxed, plain), strict=True):
        for response, expected in zip(responses, worth, strict=True):
            turn = Turn(Prompt((), 9, final=True), [], [], [], Finish.STOP, Text(response, ()))
            trajectory = Trajectory(Task("1", "q", (answer,), text="t"), [turn])
            assert REWARD(agent, trajectory, outcome) == pytest.approx(expected)


def test_the_best_and_the_last_checkpoints_are_kept_and_exported(model, tmp_path, monkeypatch):
    made = [0.5, 0.75, 0.75, 0.25, 0.125]
    scores = iter([*made, 0.125])
    monkeypatch.setattr(grpo.GRPO, "validate", lambda self: {"score": next(scores), "n": 4})
    kept = dict(save_every=1, keep_checkpoints=2, validation="world", validation_n=4)
    folder = trained(model, tmp_path, 5, run=kept)
    assert set(checkpoints.checkpoints(folder)) == {3, 4, 5}  # of equals the later one
    assert [row["score"] for row in checkpoints.validations(folder)] == made
    exports, ways = {}, {"best": {"best": True}, "third": {"step": 3}, "last": {}}
    for name, which in (ways | {"half": {"dtype": "bfloat16"}}).items():
        path = export.export(folder, out=tmp_path / name, **which)
        exports[name] = AutoModelForCausalLM.from_pretrained(path).state_dict()
        policy, step = (
            AutoModelForCausalLM.from_pretrained(model),
            3 if name in ("best", "third") else 5,
        )
        checkpoints.load_checkpoint(folder / "checkpoints" / f"step-{step}", policy)
        for key, value in policy.state_dict().items():
            assert torch.equal(exports[name][key], value.to(exports[name][key].dtype)), (name, key)
    assert {value.dtype for value in exports["half"].values()} == {torch.bfloat16}
    norm = "model.norm.weight"
    assert not torch.equal(exports["best"][norm], exports["last"][norm])
    with pytest.raises(UserError, match="no checkpoint of step 2, only of 3, 4, 5 "):
        export.export(folder, step=2)
    with pytest.raises(UserError, match="is no run with a checkpoint"):
        export.export(tmp_path)
    for step in (3, 5):
        shutil.rmtree(folder / "checkpoints" / f"step-{step}")
    trained(model, tmp_path, 5, run=kept, resume=True)
    # 5 once, measured anew
    assert [row["step"] for row in checkpoints.validations(folder)] == [*range(1, 6)]


@pytest.mark.parametrize(("lr", "lora_rank", "trained_in", "asked", "written", "said"), [
    (1e-6, 0, "float32", "auto", "float32", "Written in float32: in bfloat16"),
    (1e-6, 0, "float32", "bfloat16", "bfloat16", "`export --dtype float32` writes all"),
    (3e-4, 0, "float32", "auto", "bfloat16", "`export --dtype float32` writes all"),
    (1e-2, 0, "float32", "auto", "bfloat16", ""),
    (1e-6, 0, "mixed", "auto", "bfloat16", ""),  # the sampler had them rounded, too
    (1e-6, 2, "float32", "auto", "float32", "Written in float32: in bfloat16"),
    (1e-1, 2, "bfloat16", "auto", "bfloat16", ""),
])  # fmt: skip
def test_what_an_export_would_round_away_is_kept_or_said(
    model, tmp_path, capsys, lr, lora_rank, trained_in, asked, written, said
):
    """The base's weights are numbers of bfloat16: a small change of theirs is none."""
    base = tmp_path / "base"
    shutil.copytree(model, base)
    half = AutoModelForCausalLM.from_pretrained(model).bfloat16()
    half.save_pretrained(base)
    run = {"dtype": trained_in, "device": "cpu"}
    folder = trained(base, tmp_path, 1, run=run, lr=lr, warmup=0, lora_rank=lora_rank)
    out = capsys.readouterr().out
    if asked != "auto":
        export.export(folder, out=tmp_path / "out", dtype=asked)
        out = capsys.readouterr().out
    weights = load_file((tmp_path / "out" if asked != "auto" else folder / "model") / FILE)
    assert {w.dtype for w in weights.values()} == {getattr(torch, written)}
    assert said in out and ("bfloat16" in out) == bool(said)
    if found := re.search(r"it has (\d+)% of", out):  # by hand, over all weights
        export.export(folder, out=tmp_path / "whole", dtype="float32")
        after, start = load_file(tmp_path / "whole" / FILE), half.state_dict()
        moved, kept = (
            torch.cat([(w.to(kind) - start[name]).double().flatten() for name, w in after.items()])
            for kind in (torch.float32, torch.bfloat16)
        )
        assert int(found[1]) == pytest.approx(100 * (moved @ kept / (moved @ moved)).item(), abs=1)


def test_a_validation_is_of_other_facts_and_the_same_whenever_it_is_asked(model, tmp_path):
    run = run_config(model, tmp_path, "a", validation="world", validation_n=5)
    tasks = sources.validation_tasks(run)
    assert len(tasks) == 5 and {task.kind for task in tasks} == {"one_fact", "two_hop"}
    assert all("-dev-2-" in task.id for task in tasks)
    module = train.build(run, GRPO, reader())
    first, second = module.validate(), module.validate()
    assert first == second and first["n"] == 5 and 0 < first["score"] < 1
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "Where?", "answer": "Lima", "context": "Lima."}\n')
    (task,) = sources.validation_tasks(replace(run, validation=str(own)))
    assert task.question == "Where?"


def test_an_export_that_cannot_be_written_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = trained(model, tmp_path)
    Path("a.txt").write_text("mine")
    for given in (
        {"out": Path()},
        {"out": Path("a.txt")},
        {"out": Path("a.txt/x")},
        {"step": 1, "best": True},
    ):
        with pytest.raises(UserError):
            export.export(folder, **given)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "a.txt"}
    assert Path("a.txt").read_text() == "mine"


def test_the_reward_of_a_task_that_asks_for_all_answers_is_their_share():
    turn = Turn(Prompt((), 9, final=True), [], [], [], Finish.STOP, Text("\\boxed{Lima, Oslo}", ()))
    share = {"ruler": 2 / 3, "own": 0.0}
    for dataset, expected in share.items():
        task = Task("1", "q", ("Lima", "Oslo", "Nice"), text="t", dataset=dataset)
        assert REWARD(reader(), Trajectory(task, [turn])) == pytest.approx(expected)
