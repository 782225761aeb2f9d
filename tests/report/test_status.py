"""Whether a run goes on is told by locks, which end with their process; who holds one, and when."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import random_policy

import eval
import suites
from commands import train
from config.options import EvalConfig, GRPOConfig, RunConfig
from embedded import tiny
from report.status import MARK, hold, is_running, release

ROOT = Path(__file__).parents[2]
HELD = """
import sys
from pathlib import Path
from report.status import hold, is_running
print(is_running(Path(sys.argv[1])), flush=True)
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def another(tmp_path):
    """Return a process that holds the folder until it is killed."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", HELD, tmp_path], cwd=ROOT, **pipes) as process:
        yield process
        process.kill()


def test_a_folder_is_held_until_its_processes_are_killed_or_release_it(tmp_path, another):
    assert not is_running(tmp_path / "missing")
    assert [another.stdout.readline() for _ in range(2)] == [b"False\n", b"held\n"]
    assert is_running(tmp_path) and is_running(tmp_path)  # looking takes nothing away
    hold(tmp_path)  # a second process may hold it too
    hold(tmp_path)
    release(tmp_path)
    assert is_running(tmp_path)
    another.kill()
    another.wait()
    assert not is_running(tmp_path) and (tmp_path / MARK).exists()
    hold(tmp_path)
    assert is_running(tmp_path)
    release(tmp_path)
    assert not is_running(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory, codec):
    folder = tmp_path_factory.mktemp("model")
    random_policy(codec).save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("fail", [False, True])
def test_a_training_holds_its_folder_until_it_ends_or_fails(tmp_path, model, fail):
    seen = []

    class Look(train.lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(is_running(tmp_path / "a"))
            if fail:
                raise KeyError("stop")

    run = RunConfig(
        name="a", runs=str(tmp_path), model=model, lengths=(1,), keep_checkpoints=0, validation_n=1
    )
    agent = tiny.agent(memory_tokens=4, final_tokens=4)
    config = GRPOConfig(steps=1, tasks_per_step=(1,), group_size=2)
    try:
        train.train(run, config, agent, callbacks=[Look()])
    except KeyError:
        assert fail
    assert seen == [True] and not is_running(tmp_path / "a")


def test_an_evaluation_holds_its_folder_until_it_ends(tmp_path, model, monkeypatch):
    seen, rollout = [], eval.rollout
    looking = lambda *args: seen.append(is_running(tmp_path / "e")) or rollout(*args)  # noqa: E731
    monkeypatch.setattr(eval, "rollout", looking)
    config = EvalConfig(
        name="e", runs=str(tmp_path), model=model, agents=("memagent",), lengths=(1,), n=1,
        temperatures=(0.0,),
    )  # fmt: skip
    agents = {"memagent": tiny.agent(memory_tokens=4, final_tokens=4)}
    eval.run_suite(config, agents, suites.make("world", {"kinds": ("one_fact",)}))
    assert seen == [True] and not is_running(tmp_path / "e")
