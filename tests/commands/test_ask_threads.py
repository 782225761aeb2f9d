"""`ask` as a function in a program of others: threads, an event loop, loads that wait for each
other, and nothing of the process that is changed."""

import asyncio
import logging
import os
import random
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import HANG_S, random_policy
from test_ask import alone  # noqa: F401
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from commands.ask import Reader
from config import errors
from config.options import EMBEDDED
from config.plugins import load_file
from config.terminal import console
from data import Task
from embedded import tiny
from engines.open import open_engine
from memagent import ask
from models.load import load_model
from models.policy import Policy
from rollout import Sampling, follow

TOURS = {"Anna": "Oslo", "Boris": "Paris", "Clara": "Rome", "David": "Lima"}
N = len(TOURS)


@pytest.fixture(autouse=True)
def documents(alone):  # noqa: F811
    for name, town in TOURS.items():
        Path(f"{name}.txt").write_text(f"{name} toured {town}. " * 3)


def answer(name: str):
    return ask(f"{name}.txt", f"Where is {name}?", model="tiny", agent="memagent")


def state_of_process() -> dict[str, object]:
    """What is one for all threads of a process, and a library is tempted to set."""
    return {
        "console": (console.quiet, console.stderr, console.file),
        "environment": dict(os.environ),
        "working directory": Path.cwd(),
        "warnings": [*warnings.filters],
        "levels": (logging.root.level, hf_logging.get_verbosity()),
        "progress": hf_logging.is_progress_bar_enabled(),
        "tie_weights": PreTrainedModel.tie_weights,
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
    }


async def in_running_loop() -> list:  # as in a notebook: the main thread has an event loop
    return [answer(name) for name in TOURS]


def by_threads() -> list:
    with ThreadPoolExecutor(N) as pool:
        return [*pool.map(answer, TOURS)]


WAYS = {
    "threads": (by_threads, N),
    "a running loop": (lambda: asyncio.run(in_running_loop()), 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_call_alone_and_nothing_of_the_process_changes(way, monkeypatch):
    """All calls of a way read at the same time: none begins before all have opened their model."""
    call, at_once = WAYS[way]
    expected = [answer(name) for name in TOURS]
    together, loads, during = threading.Barrier(at_once, timeout=HANG_S), [], []
    read, load = Reader.ask, AutoModelForCausalLM.from_pretrained

    def reading(*args):
        together.wait()
        during.append(state_of_process())
        together.wait()
        return read(*args)

    def loaded(*args, **how):
        loads.append(args)
        return load(*args, **how)

    monkeypatch.setattr(Reader, "ask", reading)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    try:
        before = state_of_process()
        found = call()
        assert during == [before] * N and state_of_process() == before
    finally:
        torch.set_num_threads(1)
    assert [f.answer for f in found] == [*TOURS.values()]
    same = ("answer", "quote", "memory", "prompt_tokens", "written_tokens", "remarks")
    assert [[getattr(f, n) for n in same] for f in found] == [
        [getattr(f, n) for n in same] for f in expected
    ]
    assert len(loads) <= N // at_once  # whoever asks at the same time gets what is loaded


class Queue:
    """The lock of loads, which says when all who are expected have come to it."""

    def __init__(self, expected: int):
        self.lock, self.came, self.expected = threading.RLock(), set(), expected
        self.all_came = threading.Event()

    def __enter__(self):
        self.came.add(threading.get_ident())
        if len(self.came) == self.expected:
            self.all_came.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_loads_of_policies_wait_for_each_other(monkeypatch, codec, tmp_path):
    """The first one ends when all others have come to the door."""
    random_policy(codec).save_pretrained("policy")
    codec.tokenizer.save_pretrained("policy")
    jobs = [
        lambda: load_model("policy"),
        lambda: load_model("policy", "bfloat16"),
        lambda: open_engine(Policy(EMBEDDED)),
    ]
    queue, inside, most = Queue(len(jobs)), [], []
    for kind in (AutoModel, AutoModelForCausalLM):

        def load(*args, real=kind.from_pretrained, **how):
            inside.append(args)
            queue.all_came.wait(HANG_S)
            most.append(len(inside))
            try:
                return real(*args, **how)
            finally:
                inside.pop()

        monkeypatch.setattr(kind, "from_pretrained", load)
    monkeypatch.setattr(errors, "_LOADS", queue)
    tie, dtype = PreTrainedModel.tie_weights, torch.get_default_dtype()
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(lambda job: job(), jobs))
    assert most == [1] * len(jobs)
    assert PreTrainedModel.tie_weights is tie and torch.get_default_dtype() is dtype


def test_an_agent_of_a_file_is_whole_for_the_second_who_asks_for_it(monkeypatch, tmp_path):
    queue = Queue(2)
    monkeypatch.setattr(errors, "_LOADS", queue)
    monkeypatch.setattr(threading, "all_came", queue.all_came, raising=False)
    path = tmp_path / "mine.py"
    path.write_text(f"import threading\nthreading.all_came.wait({HANG_S})\nVALUE = 7\n")
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: load_file(path).VALUE, range(2))] == [7, 7]


# ---------------------------------------------------------------- one model, several engines


def ids_of(engine, name: str) -> list[list[int]]:
    """Return what an engine samples for a question, warm."""
    task = Task("a", f"Where is {name}?", (), Path(f"{name}.txt").read_text(), kind="asked")
    agent = tiny.agent().on(engine.codec, engine.window)
    return [turn.response_ids for turn in follow(engine, agent, task, Sampling(1.0))]


def test_engines_of_one_model_share_its_weights_and_not_its_passes():
    """In the midst of each pass of the one the other does one of its own, while the type is another
    one, as it is while a third model is loaded."""
    policy = Policy(EMBEDDED)
    expected = {name: ids_of(open_engine(policy), name) for name in TOURS}
    one, other = open_engine(policy), open_engine(policy)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert a is b
    found, left = {}, iter([*TOURS][1:])

    def between(*_):
        if name := next(left, ""):
            torch.set_default_dtype(torch.bfloat16)
            found[name] = ids_of(other, name)
            torch.set_default_dtype(torch.float32)

    one.model.model.layers[0].register_forward_pre_hook(between)
    first = next(iter(TOURS))
    assert {first: ids_of(one, first)} | found == expected


def test_a_model_that_was_trained_meanwhile_is_loaded_anew():
    shutil.copytree(EMBEDDED, "model")
    policy = Policy("model")
    old = open_engine(policy)
    assert next(old.model.parameters()) is next(open_engine(policy).model.parameters())
    model = load_model("model")
    model.model.norm.weight.data += 1
    model.save_pretrained("model")
    new = open_engine(policy)
    assert torch.equal(new.model.model.norm.weight, model.model.norm.weight)
    assert not torch.equal(old.model.model.norm.weight, model.model.norm.weight)
