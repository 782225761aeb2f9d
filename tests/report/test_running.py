"""A training and an evaluation hold their folder as long as they go on."""

from dataclasses import replace

import pytest
from conftest import random_policy

import eval
import suites
from commands import train
from config.options import EvalConfig, GRPOConfig, RunConfig
from embedded import tiny
from report.status import is_running

GRPO = GRPOConfig(steps=2, tasks_per_step=(2,), group_size=2)


class Look(train.lightning.Callback):
    def __init__(self, folder, fail=False):
        self.folder, self.fail, self.seen = folder, fail, []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(is_running(self.folder))
        if self.fail:
            raise KeyError("stop")


@pytest.fixture(scope="module")
def model(tmp_path_factory, codec):
    folder = tmp_path_factory.mktemp("model")
    random_policy(codec).save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_training_holds_its_folder_until_it_ends_or_fails(tmp_path, model):
    run = RunConfig(
        name="a", runs=str(tmp_path), model=model, lengths=(1,), keep_checkpoints=0, validation_n=1
    )
    agent = tiny.agent(memory_tokens=4, final_tokens=4)
    look = Look(tmp_path / "a")
    train.train(run, GRPO, agent, callbacks=[look])
    assert look.seen == [True, True] and not is_running(tmp_path / "a")
    look = Look(tmp_path / "b", fail=True)
    with pytest.raises(KeyError):
        train.train(replace(run, name="b"), GRPO, agent, callbacks=[look])
    assert look.seen == [True] and not is_running(tmp_path / "b")


def test_an_evaluation_holds_its_folder_until_its_page_is_written(tmp_path, model, monkeypatch):
    seen, rollout = [], eval.rollout

    def looking(*args):
        seen.append(is_running(tmp_path / "e"))
        return rollout(*args)

    monkeypatch.setattr(eval, "rollout", looking)
    config = EvalConfig(
        name="e", runs=str(tmp_path), model=model, agents=("memagent",), lengths=(1,), n=1,
        temperatures=(0.0,),
    )  # fmt: skip
    agents = {"memagent": tiny.agent(memory_tokens=4, final_tokens=4)}
    eval.run_suite(config, agents, suites.make("world", {"kinds": ("one_fact",)}))
    assert seen == [True] and not is_running(tmp_path / "e")
