"""Trainings: resumed bitwise, one writer, refusals, what the export is. Each is a step or two of a
tiny random policy; what many tests compare with is trained once (`whole`)."""

import csv
import gzip
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import Calls, Stop, random_policy, stop_at
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
from embedded import tiny
from engines import hf
from models import checkpoints
from report import runlog
from suites import _training as sources
from tokens.codec import Codec

STEPS = 3
GRPO = GRPOConfig(
    steps=STEPS, tasks_per_step=(2,), group_size=2, lr=1e-2, warmup=2, in_flight=4,
    temperature=(1.5, 1.25), grow_at=0.0, grow_steps=2,
)  # fmt: skip
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
    """Make the reward of a trajectory's tokens: a random policy never answers right."""
    monkeypatch.setattr(memagent.Agent, "reward", by_tokens)


def by_tokens(agent, trajectory, outcome="exact"):
    return sum(i for turn in trajectory.turns for i in turn.response_ids) % 97 / 97


def run_config(model, runs, name="a", **fields):
    given = dict(name=name, runs=str(runs), model=str(model), lengths=(1, 2), save_every=2)
    return RunConfig(**given | fields)


def reader(**settings):
    """Return an agent that writes little."""
    return tiny.agent(**{"memory_tokens": 6, "final_tokens": 6} | settings)


def trained(model, runs, steps=1, resume=False, callbacks=(), run=(), **config):
    """Train so many steps; returns the run's folder."""
    settings = run_config(model, runs, **dict(run)), replace(GRPO, steps=steps, **config)
    return train.train(*settings, reader(), resume=resume, callbacks=callbacks)


def records_of(folder):
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def outcome(folder):
    """What must be equal: weights, metrics without times, trajectories without times."""
    trajectories = [{k: v for k, v in r.items() if k != "seconds"} for r in records_of(folder)]
    return load_file(folder / "model" / FILE), rows_of(folder), trajectories


def assert_same(a, b):
    assert a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert a[1:] == b[1:]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def policy_at(model, folder, step):
    """Return the policy of a checkpoint."""
    policy = weights(model)
    checkpoints.load_checkpoint(folder / "checkpoints" / f"step-{step}", policy)
    return policy


class Dies(train.lightning.Callback):
    """Kills the process at this one of its calls after so many steps; counts them where it has no
    number."""

    def __init__(self, steps, at=None):
        self.steps, self.calls = steps, Calls(at)

    def on_train_batch_end(self, trainer, module, *_):
        sys.setprofile(self.calls if module.done_steps == self.steps else None)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The folder of a training whose outcome is that of any that was disturbed, and the calls of
    its second step, at whose end a checkpoint is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memagent.Agent, "reward", by_tokens)
        counted = Dies(1)
        folder = trained(model, tmp_path_factory.mktemp("whole"), STEPS, callbacks=[counted])
        return folder, counted.calls.n


@pytest.fixture
def again(whole, tmp_path):
    """A copy of that folder, which is the run `a` here."""
    return shutil.copytree(whole[0], tmp_path / "a")


@pytest.fixture(scope="module")
def adapted(model, tmp_path_factory):
    """The folder of a training of adapters with KL, two steps, of which both checkpoints stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memagent.Agent, "reward", by_tokens)
        return trained(model, tmp_path_factory.mktemp("adapted"), 2, run=EVERY, **LORA)


EVERY = {"save_every": 1, "keep_checkpoints": 2}
LORA = {"lora_rank": 2, "kl": 0.01}


# ---------------------------------------------------------------- it goes on, bit by bit


def test_killed_within_a_step_and_resumed_ends_as_if_never_killed(model, tmp_path, whole):
    folder, calls = whole
    for share in (0.3, 0.9):  # of the step
        if not (pid := os.fork()):
            try:
                dies = [Dies(1, int(share * calls))]
                trained(model, tmp_path, STEPS, resume=(tmp_path / "a").exists(), callbacks=dies)
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert_same(outcome(trained(model, tmp_path, STEPS, resume=True)), outcome(folder))


def test_stopped_at_every_step_boundary_and_resumed_ends_as_if_never_stopped(
    model, tmp_path, whole, monkeypatch
):
    """Before the first checkpoint, at it, at the end; TensorBoard has every step once.

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
    shutil.copytree(places / "step-3", places / "step-9-copy")
    (places / ".step-9.tmp").mkdir()
    for _ in range(2):  # a finished run stays as it is
        folder = trained(model, tmp_path, STEPS, resume=True)
        assert_same(outcome(folder), outcome(whole[0]))
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [*range(STEPS)]
    assert set(checkpoints.checkpoints(folder)) == {3} and (places / "step-9-copy").exists()


def test_adapters_go_on_with_more_steps_and_end_as_if_never_ended(model, tmp_path, adapted):
    folder = trained(model, tmp_path, 1, run=EVERY, **LORA)
    for wrong in ({"steps": 2}, {"resume": True, "steps": 2, "lora_rank": 4}):  # there; another
        with pytest.raises(UserError):
            trained(model, tmp_path, run=EVERY, **LORA | wrong)
    trained(model, tmp_path, 2, resume=True, run=EVERY, **LORA)
    assert_same(outcome(folder), outcome(adapted))
    name = "adapter/adapter_model.safetensors"
    ours, theirs = load_file(folder / name), load_file(adapted / name)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    with pytest.raises(UserError):  # past its end
        trained(model, tmp_path, 1, resume=True, run=EVERY, **LORA)
    # how much is computed at once may change
    trained(model, tmp_path, 2, resume=True, run=EVERY, micro_tokens=64, in_flight=3, **LORA)
    assert find.begun(folder)["grpo"]["micro_tokens"] == 64


def test_a_run_is_resumed_with_its_own_settings_or_not_at_all(model, tmp_path, whole, again):
    stored = (again / "config.yaml").read_bytes()
    for name, other in {
        "lr": {"lr": 0.5}, "lora_rank": {"lora_rank": 2}, "seed": {"seed": 9},
        "lengths": {"run": {"lengths": (1, 3)}},
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=name):
            trained(model, tmp_path, 4, resume=True, **other)
    assert_same(outcome(again), outcome(whole[0]))
    assert (again / "config.yaml").read_bytes() == stored


OWN_AGENT = 'from memagent import MemAgent\n\n\nclass Own(MemAgent):\n    """Own."""\n'
OWN_REWARD = "def reward(t):\n    return sum(i for x in t.turns for i in x.response_ids) % 7 / 7\n"
OWN_TASKS = "from data import Task\n\n\ndef made():\n    return [Task('x', 'q', ('a',), 't')]\n"


def test_a_run_goes_on_with_the_content_of_what_it_read_wherever_that_lies(model, tmp_path):
    """Each of its files is changed and put back; then all of them move, the mixture's too."""

    def begin(here, resume=True, steps=1, first="a.jsonl=3"):
        sources = f"{here / first},{here / 'b.jsonl'},{here / 'own_tasks.py'}:made"
        run = run_config(
            model, tmp_path, data=sources, validation=str(here / "v.jsonl"),
            agent=str(here / "own_agent.py"), reward=f"{here / 'own_reward.py'}:reward",
        )  # fmt: skip
        settings = {"memory_tokens": 6, "final_tokens": 6, "templates": str(here / "templates")}
        agent = find.make(run.agent, tiny.READING | settings)
        return train.train(run, replace(GRPO, steps=steps), agent, resume)

    here, there = tmp_path / "here", tmp_path / "there"
    (here / "templates").mkdir(parents=True)
    task = {"question": "Who?", "answer": "Ada", "context": "Ada. " * 9}
    for name in "abv":
        lines = (json.dumps(task | {"id": f"{name}{k}"}) + "\n" for k in range(4))
        (here / f"{name}.jsonl").write_text("".join(lines))
    for name, text in (("agent", OWN_AGENT), ("reward", OWN_REWARD), ("tasks", OWN_TASKS)):
        (here / f"own_{name}.py").write_text(text)
    (here / "templates" / "final.txt").write_text("{problem} {memory}")
    folder = begin(here, resume=False)
    shutil.copytree(here, there)
    for path in (*here.glob("*.*"), here / "templates" / "final.txt"):
        before = path.read_text()
        path.write_text(before.replace("Ada", "Bob") + "\n")
        with pytest.raises(UserError, match=re.escape(str(path))):
            begin(here)
        path.write_text(before)
    shutil.rmtree(here)
    (there / "a.jsonl").rename(there / "c.jsonl")
    with pytest.raises(UserError, match=r"run\.data"):  # another weight
        begin(there, first="c.jsonl=2")
    begin(there, steps=2, first="c.jsonl=3")
    assert len(rows_of(folder)) == 2


@pytest.mark.parametrize("source, where", [
    ("world", None), ("ledger", None), ("hf:org/name@0123:train", None), ("D/x.jsonl", "D/x.jsonl"),
    ("locomo:D/x.jsonl#random/train", "D/x.jsonl"), ("D/x.py:made", "D/x.py"),
])  # fmt: skip
def test_which_file_a_source_is_and_that_generated_ones_have_none(tmp_path, source, where):
    for name in ("x.jsonl", "x.py", "own_other.py"):
        (tmp_path / name).write_text(OWN_AGENT)
    mine, place = str(tmp_path / "own_other.py"), where and where.replace("D", str(tmp_path))
    run, config = RunConfig(data=source.replace("D", str(tmp_path))), SFTConfig(also=(mine,))
    read = contents.of_training(run, config, tiny.agent())
    assert [path for path, _ in read["sft.also"]] == [mine]
    assert [path for path, _ in read.get("run.data", ())] == ([place] if where else [])
    if place:
        Path(place).write_text("b")
        assert contents.of_training(run, config, tiny.agent())["run.data"] != read["run.data"]


def test_a_base_that_has_changed_a_little_is_refused_where_it_counts(model, tmp_path):
    """Adapters hang on it, whole weights do not."""
    base, name = shutil.copytree(model, tmp_path / "base"), {"name": "adapters"}
    whole, part = trained(base, tmp_path), trained(base, tmp_path, run=name, lora_rank=2)
    changed = load_file(base / FILE)
    changed["model.norm.weight"] *= 1.0001
    save_file(changed, base / FILE, {"format": "pt"})
    trained(base, tmp_path, 2, resume=True)
    export.export(whole, out=tmp_path / "out")
    for act in (
        lambda: trained(base, tmp_path, 2, resume=True, run=name, lora_rank=2),
        lambda: export.export(part, out=tmp_path / "other"),
    ):
        with pytest.raises(UserError, match=str(base)):
            act()


# ---------------------------------------------------------------- damage


def test_a_damaged_or_foreign_checkpoint_is_named(model, tmp_path, again):
    path, stored = again / "checkpoints" / "step-3", (again / "config.yaml").read_bytes()
    good = (path / "state.json").read_bytes()
    (path / "state.json").write_bytes(good[: len(good) // 2])
    with pytest.raises(UserError, match="step-3"):
        trained(model, tmp_path, 4, resume=True)
    other = train.build(run_config(model, tmp_path, "b"), replace(GRPO, lora_rank=2), reader())
    checkpoints.save_checkpoint(path, other.model, other.configure_optimizers(), {})
    with pytest.raises(UserError):  # another model's
        trained(model, tmp_path, 4, resume=True)
    assert (again / "config.yaml").read_bytes() == stored
    (again / "config.yaml").unlink()
    with pytest.raises(UserError):
        trained(model, tmp_path, 4, resume=True)


def test_the_older_checkpoint_goes_once_the_newer_is_whole(model, tmp_path, monkeypatch, whole):
    """By default one is kept: it is whole at any time."""
    save = dcp.save

    def torn(*rest, checkpoint_id, **more):
        save(*rest, checkpoint_id=checkpoint_id, **more)
        if checkpoint_id.name == ".step-2.tmp":
            assert set(checkpoints.checkpoints(tmp_path / "a")) == {1}
            raise OSError("No space left on device")

    every = {"save_every": 1}
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"step-2.* --resume"):
        patch.setattr(dcp, "save", torn)
        trained(model, tmp_path, 2, run=every)
    assert {path.name for path in (tmp_path / "a" / "checkpoints").iterdir()} == {"step-1"}
    assert_same(outcome(trained(model, tmp_path, STEPS, resume=True, run=every)), outcome(whole[0]))


def test_a_torn_line_is_cut_and_named_and_other_damage_is_refused(tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    path.write_text("step,reward\n0,0.5\n1,0.25\n2,0.")
    logger = runlog.StepCSV(path, resumed_at=2)
    assert "torn" in " ".join(capsys.readouterr().out.split())
    logger.log_metrics({"step": 2, "reward": 0.125})
    assert path.read_text() == "step,reward\n0,0.5\n1,0.25\n2,0.125\n"
    path.write_text("step,reward\n0,0.5\n1\n2,0.125\n")
    with pytest.raises(UserError, match=r"metrics\.csv"):
        runlog.StepCSV(path, resumed_at=3)
    (readings := tmp_path / "trajectories.jsonl.gz").write_bytes(b"12345678")
    with pytest.raises(UserError, match=r"trajectories\.jsonl\.gz"):
        runlog.TrajectoryWriter(readings, position=9)
    runlog.TrajectoryWriter(readings, position=5)
    assert readings.read_bytes() == b"12345"


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


# ---------------------------------------------------------------- refused before anything is there

REWARDS = """
def half(t):
    return None if t.sample == 1 else float(t.sample)
def nan(t):
    return float("nan")
def fails(t):
    return 1 / 0
"""
WRONG = [
    {"model": "./nowhere"}, {"model": "HERE/broken"}, {"model": "HERE/pickled"},
    {"data": "nowhere.jsonl"}, {"validation": "nowhere.jsonl"}, {"agent": "memgent"},
    {"lengths": (0,)}, {"kinds": ("one",)}, {"reward": "HERE/rewards.py:fails"},
    {"reward": "HERE/rewards.py:nan"}, {"name": ".."}, {"name": "../x"}, {"name": "a" * 300},
    {"runs": "HERE/rewards.py"}, {"num_nodes": 2}, {"devices": 4}, {"logger": ("os.path",)},
    {"agent": "full", "engine": "vllm", "sleep": "2"},
]  # fmt: skip


def test_a_wrong_setting_is_one_sentence_and_leaves_no_folder(model, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    broken, pickled = (shutil.copytree(model, tmp_path / name) for name in ("broken", "pickled"))
    (broken / FILE).write_bytes(b"not safetensors")
    (pickled / FILE).unlink()
    torch.save({}, pickled / "pytorch_model.bin")  # pickles are not loaded
    for change in WRONG:
        run = {"model": model, "name": "wrong", "runs": tmp_path / "runs"} | {
            name: value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
            for name, value in change.items()
        }
        for resume in (False, True):
            with pytest.raises(UserError) as error:
                train.train(run_config(**run), GRPO, reader(), resume)
            assert "\n" not in str(error.value), change
        assert not [*tmp_path.glob("runs/*")], change


@pytest.mark.parametrize(("dtype", "config", "refused"), [
    ("bfloat16", {}, True), ("bfloat16", {"lora_rank": 2}, False), ("auto", {}, False),
    ("mixed", {"optimizer": "adamw8bit"}, True),
])  # fmt: skip
@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_all_weights_are_not_trained_in_bfloat16(model, tmp_path, dtype, config, refused, kind):
    """One that moves by less than half of the distance to its neighbour stays where it is."""
    run = run_config(model, tmp_path, dtype=dtype, device="cpu")
    if refused:
        with pytest.raises(UserError):
            train.resolved(run, kind(**config), reader())
    else:
        assert train.resolved(run, kind(**config), reader())


SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
MADE = [
    ("train", "BertLMHeadModel", SHAPE | {"is_decoder": True}),  # without an .lm_head
    ("eval", "MambaForCausalLM", SHAPE),  # without attention
    ("plan", "XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
]


@pytest.mark.parametrize(("command", "kind", "settings"), MADE)
def test_a_model_of_another_kind_is_refused_in_one_sentence(
    model, tmp_path, command, kind, settings
):
    """By whatever command, before anything is written."""
    made, codec = getattr(transformers, kind), Codec.load(model)
    ids = dict(vocab_size=len(codec.tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=1)
    made(made.config_class(**settings, **ids)).save_pretrained(tmp_path / "other")
    codec.tokenizer.save_pretrained(tmp_path / "other")
    runs = "" if command == "plan" else f"--runs {tmp_path / 'runs'} --name a"
    done = CliRunner().invoke(app, f"{command} --model {tmp_path / 'other'} {runs}".split())
    assert done.exit_code == 2, (done.output, done.exception)
    assert not [*tmp_path.glob("runs/*")]


REAL = {"real": "--model {real}", "smollm2": "--model smollm2", "hub": "--model org/real-7B"}
RATES = [
    ("train", "real", "", True), ("train", "hub", "--lora-rank 4", True),
    ("train", "smollm2", "--preset demo", True), ("sft", "real", "", True),
    ("train", "real", "--preset {own} --agent {own}.py", True),
    ("train", "real", "--lr 7e-4", False), ("train", "hub", "--preset paper", False),
    ("train", "hub", "--preset rememr1", False), ("sft", "real", "--lora-rank 4", False),
    ("train", "tiny", "", False), ("sft", "tiny", "", False),
]  # fmt: skip


@pytest.mark.parametrize(("command", "which", "words", "refused"), RATES)
def test_a_real_model_never_gets_the_embedded_policys_learning_rate(
    model, tmp_path, monkeypatch, command, which, words, refused
):
    """Neither by default nor by a preset, at the door, before anything is fetched or loaded."""
    real, own = shutil.copytree(model, tmp_path / "real"), tmp_path / "own"
    os.truncate(real / FILE, 10**9)  # its size is all that is looked at
    own.with_suffix(".py").write_text(
        "from memagent import MemAgent\n\nclass Own(MemAgent):\n"
        f"    presets = {{{str(own)!r}: {{'grpo': {{'group_size': 4}}}}}}\n"
    )
    monkeypatch.setattr(train, "run_and_report", lambda *settings: None)
    monkeypatch.setattr("config.machine.check_here", lambda run: None)
    asked = f"{command} --runs {tmp_path} --data world {REAL.get(which, '--model {tiny}')} {words}"
    done = CliRunner().invoke(app, asked.format(tiny=model, real=real, own=own).split())
    assert done.exit_code == (2 if refused else 0), done.output
    assert ("--lr" in done.output) == refused


def test_a_first_step_in_which_everything_fails_leaves_nothing(model, tmp_path):
    too_long = reader(memory_tokens=5000)  # than the model's window
    shown = [train.TrainingProgress(7)]
    shown[0].on_exception(None, None, Stop())  # before a step there is no bar to stop
    with pytest.raises(UserError):
        train.train(run_config(model, tmp_path), GRPO, too_long, callbacks=shown)
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    with pytest.raises(UserError):
        train.train(run_config(model, tmp_path, "b"), GRPO, too_long, resume=True)
    assert (tmp_path / "b" / "mine").exists()  # a folder that was there stays


# ---------------------------------------------------------------- what is said and kept


def test_what_a_function_leaves_out_is_said_in_lines_files_and_page(model, tmp_path, capsys):
    """To the end of the run, with strict JSON in its summary and `None` in its records."""
    (path := tmp_path / "mine.py").write_text(REWARDS)
    run, config = run_config(model, tmp_path, reward=f"{path}:half"), replace(GRPO, group_size=3)
    train.run_and_report(run, replace(config, steps=1), reader(), False, lambda line: None)
    folder, out = tmp_path / "a", capsys.readouterr().out
    assert out.count("2 readings left out, without a reward") == 1
    assert [(row["unrewarded"], float(row["reward"])) for row in rows_of(folder)] == [("2", 1.0)]
    assert json.loads((folder / "summary.json").read_text())["unrewarded"] == 2
    assert [record["reward"] for record in records_of(folder)] == [0.0, None, 2.0] * 2
    assert "2 readings left out" in (folder / "report.html").read_text()


def test_a_run_that_keeps_no_checkpoint_leaves_nothing_as_large_as_the_weights(
    model, tmp_path, whole
):
    """Its numbers are those of a run that does, its validations are made, and records say the
    temperature of their own step, not of the one that the tasks have grown to since."""
    none = {"validation": "world", "validation_n": 2, "keep_checkpoints": 0}
    folder = trained(model, tmp_path, STEPS, run=none)
    rewards = [[row["reward"] for row in rows_of(run)] for run in (folder, whole[0])]
    assert rewards[0] == rewards[1]
    assert [row["step"] for row in checkpoints.validations(folder)] == [2, 3]
    found = {(record["step"], record["temperature"]) for record in records_of(folder)}
    assert found == {(0, 1.5), (1, 1.5), (2, 1.25)}
    assert not {"checkpoints", "model", "adapter"} & {path.name for path in folder.iterdir()}


def test_the_engine_is_closed_however_a_training_ends(model, tmp_path, monkeypatch):
    """Otherwise vLLM's next engine in the process would be refused."""
    closed = []
    monkeypatch.setattr(hf.TransformersEngine, "close", lambda self: closed.append(self))
    with pytest.raises(Stop):
        trained(model, tmp_path, 2, callbacks=[stop_at(1)])
    assert len(closed) == 1
    trained(model, tmp_path, 2, resume=True)
    assert len(closed) == 2


def test_a_validation_is_of_other_facts_and_the_same_whenever_it_is_asked(model, tmp_path):
    run = run_config(model, tmp_path, validation="world", validation_n=5)
    tasks = sources.validation_tasks(run)
    assert len(tasks) == 5 and {task.kind for task in tasks} == {"one_fact", "two_hop"}
    assert all("-dev-2-" in task.id for task in tasks)
    module = train.build(run, GRPO, reader())
    first, second = module.validate(), module.validate()
    assert first == second and first["n"] == 5 and 0 < first["score"] < 1


# ---------------------------------------------------------------- the export


def test_the_export_loads_with_from_pretrained_and_is_the_policy(model, whole, adapted):
    from peft import PeftModel

    beside = PeftModel.from_pretrained(weights(model), adapted / "adapter")
    for folder, policy in ((whole[0], policy_at(model, whole[0], 3)), (adapted, beside)):
        exported, ids = weights(folder / "model"), torch.arange(10, 40)[None]
        with torch.no_grad():
            logits = [each(ids).logits for each in (exported, policy, weights(model))]
        assert torch.allclose(*logits[:2], atol=1e-4)
        assert not torch.allclose(logits[0], logits[2], atol=1e-4)
    ours, theirs = Codec.load(folder / "model"), Codec(tiny.make_tokenizer())
    assert ours.encode("Anna joined Boris.") == theirs.encode("Anna joined Boris.")
    assert find.of_model(folder / "model")["chunk_tokens"] == tiny.agent().config.chunk_tokens


def test_the_best_and_the_last_checkpoints_are_kept_and_exported(model, tmp_path, monkeypatch):
    made = [0.5, 0.75, 0.75, 0.25]
    scores = iter(made)
    monkeypatch.setattr(grpo.GRPO, "validate", lambda self: {"score": next(scores), "n": 4})
    kept = dict(save_every=1, validation="world", validation_n=4)
    folder = trained(model, tmp_path, 4, run=kept)
    assert set(checkpoints.checkpoints(folder)) == {3, 4}  # of equals the later one
    assert [row["score"] for row in checkpoints.validations(folder)] == made
    for step, which in ((3, {"best": True}), (3, {"step": 3}), (4, {"dtype": "bfloat16"})):
        found = weights(export.export(folder, out=tmp_path / "-".join(which), **which))
        dtype, policy = (
            getattr(torch, which.get("dtype", "float32")),
            policy_at(model, folder, step),
        )
        for key, value in policy.state_dict().items():
            assert found.state_dict()[key].dtype == dtype
            assert torch.equal(found.state_dict()[key], value.to(dtype)), (step, key)
    for wrong in ({"step": 2}, {"step": 3, "best": True}):
        with pytest.raises(UserError):
            export.export(folder, **wrong)


@pytest.mark.parametrize(("lr", "more", "dtypes"), [
    (1e-6, {}, {"auto": "float32", "bfloat16": "bfloat16"}),
    (1e-6, {"lora_rank": 2}, {"auto": "float32"}),
    (1e-2, {}, {"auto": "bfloat16"}),
    (1e-6, {"run": {"dtype": "mixed"}}, {"auto": "bfloat16"}),  # the sampler had them rounded, too
])  # fmt: skip
def test_what_an_export_would_round_away_is_kept_or_said(model, tmp_path, capsys, lr, more, dtypes):
    """The base's weights are numbers of bfloat16: a small change of theirs is none."""
    base = shutil.copytree(model, tmp_path / "base")
    weights(model).bfloat16().save_pretrained(base)
    run = {"device": "cpu"} | more.get("run", {})
    folder = trained(base, tmp_path, lr=lr, warmup=0, **more | {"run": run})
    for asked, written in dtypes.items():
        place, out = folder / "model", capsys.readouterr().out
        if asked != "auto":
            place = export.export(folder, out=tmp_path / "out", dtype=asked)
            out = capsys.readouterr().out
        assert {w.dtype for w in load_file(place / FILE).values()} == {getattr(torch, written)}
        assert ("what was learnt" in out) is (lr < 1e-2 and "run" not in more)


def test_an_export_writes_over_nothing(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "a").symlink_to(whole[0])
    Path("a.txt").write_text("mine")
    Path("full").mkdir()
    Path("full/x").touch()
    for given in (
        {"out": Path()}, {"out": Path("a.txt")}, {"out": Path("a.txt/x")}, {"out": Path("full")},
        {"best": True},
    ):  # fmt: skip
        with pytest.raises(UserError):
            export.export(folder, **given)
    with pytest.raises(UserError):
        export.export(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "a.txt", "full"}
    assert Path("a.txt").read_text() == "mine"
