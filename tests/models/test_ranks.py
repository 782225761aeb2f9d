"""Several ranks: two processes over gloo."""

import csv
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
import yaml
from conftest import HANG_S, random_policy, until
from safetensors.torch import load_file
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import ProcessExitedException, spawn, start_processes

from agents import find
from agents.find import resolve
from commands import train
from commands.dryrun import made_up
from config import stops
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig, SFTConfig
from embedded import tiny
from engines.hf import TransformersEngine
from grpo import GRPO, training_rows
from memagent import Group
from models import ranks
from models.checkpoints import checkpoints
from models.load import inner, load_model, with_lora
from models.loads import new_tokens
from models.logprobs import logprobs
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

CONFIG = GRPOConfig(
    tasks_per_step=(4,), group_size=3, max_mismatch=99, grad_clip=1e9, kl=0.05, micro_tokens=300
)
TURN_MEAN = {"aggregation": "turn_mean"}
CASES = {
    "full": {}, "a vocabulary in chunks": {}, "tied": TURN_MEAN,
    "several updates": TURN_MEAN | {"updates_per_rollout": 3, "recompute": True},
    "lora": {"lora_rank": 4, "recompute": True}, "quantised": {"lora_rank": 4, "quantise": True},
    "turns left out": {"turns_per_trajectory": 1},
    "a rank without signal": TURN_MEAN | {"group_size": 12},
    "turns of an update": TURN_MEAN | {"rows_per_update": 12, "without_signal": "keep"},
    "rewards of turns": {"aggregation": "trajectory_mean", "alpha": 0.6},
}  # fmt: skip


def groups_of(policy, codec, config, signal):
    """Roll out groups of four tasks; those in `signal` have rewards that differ."""
    tasks = list(worlds.make_tasks(0, 4, 2, "one_fact"))
    groups = {task.id: Group(task, []) for task in tasks}
    jobs = [(task, g) for task in tasks for g in range(config.group_size)]
    for t in rollout(TransformersEngine(policy, codec), tiny.agent(), jobs, Sampling()):
        t.reward = made_up(t) if t.task.id[-1] in signal else 0.5
        if config.aggregation == "trajectory_mean":
            for turn in t.turns:
                turn.rewards = {"memory": float(sum(turn.response_ids) % 5)}
        groups[t.task.id].trajectories.append(t)
    for group in groups.values():
        group.trajectories.sort(key=lambda t: t.sample)
    return list(groups.values())


def policy_of(codec, config, folder, tied):
    policy = random_policy(codec, **tied)
    if config.quantise:
        policy.save_pretrained(folder)  # the library lets rank 0 alone write
        ranks.barrier()
        policy = load_model(folder, device="cpu", quantise=True)
    if config.lora_rank:
        policy = with_lora(policy, config)
        with torch.no_grad():
            for name, p in policy.named_parameters():
                if "lora_B" in name:
                    draw = torch.Generator().manual_seed(len(name))
                    p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return policy


def updated(name, folder):
    """Make an update with plain steps on this rank's share of four groups.

    Returns trained weights, the gradients of each optimizer step, metrics.
    """
    config, tied = replace(CONFIG, **CASES[name]), {"tie_word_embeddings": name == "tied"}
    codec = Codec(tiny.make_tokenizer())
    policy = policy_of(codec, config, f"{folder}/{name}", tied)
    none_on_the_second = name == "a rank without signal"
    groups = groups_of(inner(policy), codec, config, "03" if none_on_the_second else "012")
    reference = None if config.lora_rank else random_policy(codec, **tied).requires_grad_(False)
    if reference:
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(1.1)
    if name == "a vocabulary in chunks":  # it is taken for a large one
        policy.config.vocab_size = reference.config.vocab_size = 1 << 24
    if ranks.world() > 1:
        for model in filter(None, (policy, reference)):
            ranks.shard(model, init_device_mesh("cpu", (ranks.world(),)), logprobs=logprobs)
    engine = SimpleNamespace(codec=codec, window=None)  # it is asked nothing
    agent = train.rewarded(tiny.agent(), made_up)
    grpo = GRPO(policy, engine, agent, None, config, reference)
    grpo.manual_backward = lambda loss: loss.backward()
    trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    grpo.optimizers, grpo.learning_rate = lambda: optimizer, lambda step: 0.05
    gradients = []
    step = optimizer.step

    def take():
        gradients.append({n: ranks.full_tensor(p.grad).clone() for n, p in trained.items()})
        step()

    optimizer.step = take
    rows = training_rows(ranks.share(groups), config, 0, ranks.rank(), ranks.world())
    assert bool(rows) == (ranks.rank() == 0 or not none_on_the_second)
    if none_on_the_second:  # whoever sampled them, both have as much to compute
        (part,) = grpo.parts_of(rows)
        loads = ranks.all_gather_object(sum(new_tokens(part)[1]))
        assert max(loads) * len(loads) < 1.1 * sum(loads), loads
    grpo.update(rows)
    return {n: ranks.full_tensor(p).clone() for n, p in trained.items()}, gradients, grpo.metrics


def warm_up(runs, devices):
    agent = tiny.agent("memagent", chunk_tokens=64)
    config = SFTConfig(steps=2, tasks_per_step=(4,), mistakes=0.5, also=("full=0.2",), others=1,
                       lora_rank=4, micro_tokens=300)  # fmt: skip
    usual = dict(validation="", lengths=(4,), keep_trajectories=6)
    return train.train(run_config(runs, "warm", devices=devices, **usual), config, agent)


def run_all(folder, port):
    """Be one of two ranks: warm a policy up, make every case's update, end by a refusal."""
    warm_up(folder, devices=2)
    os.environ["MASTER_PORT"] = str(port)  # a group that has ended leaves its names in its store
    with ranks.process_group(False):
        results = {name: updated(name, folder) for name in CASES}
        metrics = {name: result[2] for name, result in results.items()}
        first, second = ranks.all_gather_object(metrics)
        assert first == second
        if ranks.rank() == 1:
            raise UserError("The disk of rank 1 is full.")
        torch.save(results, folder / "results.pt")
        ranks.barrier()


@pytest.fixture(scope="module", autouse=True)
def forked_ranks():
    """Fork ranks from this process, which has loaded all that they need; a command spawns them, as
    `interrupted` does."""
    how = "spawn" if torch.cuda.is_available() else "fork"  # which CUDA does not survive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "spawn", partial(start_processes, start_method=how))
        yield


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """Return the folder of `run_all`; the refusal of one rank ends both and is told once."""
    get_temp_dir()  # Python's own, of this process, is not in the folder that is looked at
    folder, left = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("left")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(left))
        with pytest.raises(UserError, match=r"^The disk of rank 1 is full\.$"):
            ranks.launch(run_all, 2, folder, store.port)
    assert not list(left.iterdir()) and signal.getsignal(signal.SIGINT) is handler
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one(name, by_two, tmp_path):
    weights, gradients, metrics = updated(name, tmp_path)
    results = torch.load(by_two / "results.pt", weights_only=False)
    weights_of_two, gradients_of_two, metrics_of_two = results[name]
    config = replace(CONFIG, **CASES[name])
    # 12 trajectories of 3 turns in updates of 12 turns
    updates = 3 if config.rows_per_update else config.updates_per_rollout
    assert len(gradients) == len(gradients_of_two) == updates
    pairs = [*zip(gradients, gradients_of_two, strict=True), (weights, weights_of_two)]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        size = sum(g.norm() ** 2 for g in ours.values()) ** 0.5
        assert size > 1e-3 and max((ours[n] - theirs[n]).norm() for n in ours) < 1e-5 * size
    for key in set(metrics) - {"computed_tokens", "share_saved"}:  # two smaller tries share less
        assert metrics_of_two[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


# ---------------------------------------------------------------- a training

STEPS = {"tasks_per_step": (2,), "group_size": 4, "decay_from": 1.0}
DEMO, AGENT = resolve("demo", EMBEDDED, STEPS, {}, "rememr1")  # which rewards turns
USUAL = dict(save_every=1, validation="world", validation_n=3, device="cpu")


def run_config(runs, name, **kwargs):
    return RunConfig(**dict(name=name, runs=str(runs)) | USUAL | kwargs)


def outcome(folder):
    """Return weights, metrics but of time, sorted trajectories and scores of a run."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    metrics = [{k: float(v) for k, v in row.items() if not k.endswith("_s")} for row in rows]
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        lines = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in file]
    lines.sort(key=lambda x: (x["step"], x["id"], x["sample"]))
    scores = folder / "validation.csv"
    weights = load_file(folder / "model" / "model.safetensors")
    return weights, metrics, lines, scores.read_text() if scores.exists() else ""


class Kill(lightning.Callback):
    """Kill a process in the middle of a step of rank 0, as from outside."""

    def __init__(self, done_steps, launcher):
        self.done_steps, self.launcher = done_steps, launcher

    def on_train_batch_start(self, trainer, module, *_):
        if module.done_steps == self.done_steps:
            os.kill(os.getppid() if self.launcher else os.getpid(), signal.SIGKILL)
            time.sleep(HANG_S)  # this rank ends with its launcher


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Begin a training on two ranks and interrupt it as a terminal does; return its folder, the
    process and what it has printed."""
    runs = tmp_path_factory.mktemp("runs")
    settings = runs / "settings.yaml"
    grpo = STEPS | {"steps": 500, "tasks_per_step": [2]}
    settings.write_text(yaml.safe_dump({"run": USUAL | {"devices": 2}, "grpo": grpo}))
    words = f"train --preset demo --agent rememr1 --config {settings} --name two --runs {runs}"
    process = subprocess.Popen(
        [sys.executable, "cli.py", *words.split()],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = runs / "two" / "metrics.csv"
    until(lambda: process.poll() or (metrics.exists() and metrics.read_text().count("\n") > 1))
    os.killpg(process.pid, signal.SIGINT)
    return runs / "two", process, process.communicate()[1]


def test_ctrl_c_ends_all_ranks_without_a_page_of_trace(interrupted):
    folder, process, stderr = interrupted
    assert process.returncode == 130 and "Traceback" not in stderr
    ((step, path),) = checkpoints(folder).items()  # of the last whole step
    assert f"Step {step} of 500 is whole in {path}; go on with: " in stderr
    assert stderr.endswith(f"train --resume --name two --runs {folder.parent}\n")
    assert (folder / "metrics.csv").read_text().count("\n") == step + 1
    assert_none_is_left(process.pid)


def assert_killed(launcher):
    """Run a launcher in a forked child, and wait until it has been killed and its ranks ended."""
    if not (child := os.fork()):
        os.setsid()
        try:
            with stops.stoppable():  # as in the command: Lightning would heed no SIGTERM at once
                launcher()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert_none_is_left(child)


def assert_none_is_left(group):
    """Wait until no process of this process group runs."""
    try:  # python's helper processes notice the end a moment later
        until(lambda: not is_running(group), 0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def is_running(group):
    """Return whether a process of this group runs; one that has ended may wait to be collected."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group, *_ = path.read_text().rpartition(")")[2].split()
            states += [state] * (int(of_group) == group)
    return bool({*states} - {"Z"})


@pytest.fixture(scope="module")
def whole(interrupted):
    """Resume what was interrupted: its launcher is killed, then a rank, then it comes to its end.

    Returns its folder and the number of its steps.
    """
    folder, step = interrupted[0], max(checkpoints(interrupted[0]))
    run, config = run_config(folder.parent, "two", devices=2), replace(DEMO, steps=step + 2)

    def resume(*callbacks):
        return train.train(run, config, AGENT, resume=True, callbacks=callbacks)

    assert_killed(lambda: resume(Kill(step, launcher=True)))
    assert {*checkpoints(folder)} == {step}
    said = rf"^Rank 0 of 2 .* SIGKILL .* Step {step + 1} of {step + 2} is whole.* --resume"
    with pytest.raises(UserError, match=said):
        resume(Kill(step + 1, launcher=False))
    assert {*checkpoints(folder)} == {step + 1}
    return resume(), step + 2


def test_ranks_end_when_their_launcher_is_killed_while_they_begin(monkeypatch):
    killed = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr(ranks, "spawn", spawn)
    monkeypatch.setattr(ranks.ProcessContext, "join", killed)
    assert_killed(lambda: ranks.launch(time.sleep, 2, HANG_S))


# columns of metrics.csv that are the same whoever computes them
EQUAL = {"reward", "turns", "read_tokens", "written_tokens", "trained_rows",
         "groups_without_signal"}  # fmt: skip
OF_TURNS = ("turn_reward_", "turn_groups_", "answer_", "recall_", "format_", "memory_")


def test_a_run_of_two_ranks_that_is_killed_and_resumed_equals_one_of_one_rank(whole, tmp_path):
    folder, steps = whole
    one = outcome(train.train(run_config(tmp_path, "one"), replace(DEMO, steps=steps), AGENT))
    weights, metrics, lines, validation = outcome(folder)
    for a, b in zip(one[1], metrics, strict=True):
        assert {k: a[k] for k in EQUAL} == {k: b[k] for k in EQUAL}
        of_turns = [k for k in a if k.startswith(OF_TURNS)]
        assert len(of_turns) > 20
        assert all(a[key] == pytest.approx(b[key], abs=1e-9) for key in of_turns)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert b["mismatch_mean"] < 1e-5
    written = (
        [turn["response_ids"] for x in some for turn in x["turns"]] for some in (one[2], lines)
    )
    assert next(written) == next(written)
    assert one[3] == validation and validation.count("\n") == steps + 1
    assert all((one[0][n] - weights[n]).abs().max() < 1e-4 for n in weights)
    assert max(row["grad_norm"] for row in metrics) > 1e-2
    names = {path.name for path in (folder / "checkpoints" / f"step-{steps}").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"}


def test_one_rank_resumes_from_a_checkpoint_of_two(whole, tmp_path):
    two, steps = whole
    shutil.copytree(two, tmp_path / "two")
    before = load_file(two / "model" / "model.safetensors")
    run = run_config(tmp_path, "two", devices=1)
    folder = train.train(run, replace(DEMO, steps=steps + 1), AGENT, resume=True)
    assert find.begun(folder)["run"]["devices"] == 1
    after, metrics, *_ = outcome(folder)
    assert [row["step"] for row in metrics] == [*range(steps + 1)]
    assert all(row["mismatch_mean"] < 1e-5 for row in metrics)
    assert 0 < max((after[n] - before[n]).abs().max() for n in after) < 1e-2


def changing(trajectory):
    """Give a signal in the second step alone."""
    return made_up(trajectory) if ".1." in trajectory.task.id else 0.5


def test_a_warm_start_does_not_depend_on_the_number_of_ranks(by_two, tmp_path):
    """Mistakes, turns and metrics included; the sums of gradients are rounded in another order."""
    one, two = outcome(warm_up(tmp_path, devices=1)), outcome(by_two / "warm")
    # AdamW turns the rounding of a gradient near 0 into a step, so single weights may differ more
    assert max((two[0][name] - weight).abs().mean() for name, weight in one[0].items()) < 1e-7
    shared = {"computed_tokens", "share_saved", "tokens_per_s"}  # a section may be in both parts
    for a, b in zip(one[1], two[1], strict=True):
        a, b = ({k: x[k] for k in x.keys() - shared} for x in (a, b))
        assert a == pytest.approx(b, rel=2e-3, nan_ok=True)
    assert one[2] == two[2]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_in_float32_are_computed_with_in_bfloat16(tmp_path, lora_rank):
    """In shards of one rank, adapters beside 4 bits; a step without signal can be saved and gone on
    from."""
    few = dict(lora_rank=lora_rank, quantise=bool(lora_rank))
    environment = dict(os.environ)

    def trained(dtype, steps, resume=False):
        run = run_config(tmp_path, dtype, dtype=dtype, validation="")
        config = replace(DEMO, steps=steps, **few)
        return train.train(run, config, tiny.agent(), resume, reward=changing)

    trained("mixed", 1)
    mixed, exact = outcome(trained("mixed", 3, resume=True)), outcome(trained("float32", 2))
    assert os.environ == environment
    assert [row["trained_rows"] > 0 for row in mixed[1]] == [False, True, False]
    assert all(row["mismatch_mean"] < 0.02 for row in mixed[1])
    norm, exact_norm = (metrics[1]["grad_norm"] for _, metrics, *_ in (mixed, exact))
    assert norm == pytest.approx(exact_norm, rel=0.5)
    assert norm != pytest.approx(exact_norm, rel=1e-5)
    # steps of 1e-4 would be lost in weights of eight bits
    assert {w.dtype for w in mixed[0].values()} == {torch.float32}
    assert any((w.bfloat16().float() != w).float().mean() > 0.9 for w in mixed[0].values())


@pytest.mark.parametrize(("grpo", "run"), [
    ({}, dict(devices=5)), ({}, dict(num_nodes=2)), ({}, dict(model="./nowhere")),
    (dict(optimizer="adamw8bit"), dict(devices=2)),
])  # fmt: skip
def test_settings_that_do_not_go_together(tmp_path, grpo, run):
    with pytest.raises(UserError):
        train.train(run_config(tmp_path, "a", **run), replace(DEMO, **grpo), AGENT)
    assert not (tmp_path / "a").exists()


def test_items_that_alternate_are_dealt_to_every_rank():
    for world in (1, 2, 3, 4):
        shares = [list(islice(ranks.snake_order(rank, world), 6)) for rank in range(world)]
        assert sorted(i for share in shares for i in share) == list(range(6 * world))
        if not world % 2:
            assert all(sum(i % 2 for i in share) == 3 for share in shares)
    assert ranks.share("abc") == ["a", "b", "c"]  # alone


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(("codes", "first", "kind", "said"), [
    ((-9, 1), 1, ChildProcessError, "Rank 0 of 2 was ended by SIGKILL (an out-of-memory kill"),
    ((-15, -9), 0, ChildProcessError, "Rank 1 of 2 was ended by SIGKILL (an out-of-memory kill"),
    ((0, -15), 1, ChildProcessError, "Rank 1 of 2 was ended by SIGTERM"),
    ((-15, -11), 1, ChildProcessError, "Rank 1 of 2 was ended by SIGSEGV"),
    ((-15, 3), 1, ProcessExitedException, "as torch says it"),
])  # fmt: skip
def test_the_first_to_fail_is_not_always_why(tmp_path, codes, first, kind, said):
    context = SimpleNamespace(processes=[SimpleNamespace(exitcode=code) for code in codes])
    failure = ProcessExitedException("as torch says it", first, 0, codes[first])
    error = ranks._find_cause(failure, context, str(tmp_path))
    assert type(error) is kind and str(error).startswith(said)
    (tmp_path / f"{ranks.REFUSAL}1").write_bytes(pickle.dumps(UserError("No room.")))
    assert str(ranks._find_cause(failure, context, str(tmp_path))) == "No room."
