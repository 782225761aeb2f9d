"""How many threads compute, and what they do while they wait."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_policy

from models.load import settle_threads

ROOT = Path(__file__).parent.parent


def test_threads_of_a_command_sleep_while_they_wait_unless_the_user_says_otherwise():
    script = (
        "import importlib, os, sys, cli, eval; from report import page\n"
        "assert not {'torch', 'matplotlib'} & {*sys.modules}\n"
        "print(os.environ[sys.argv[1]]); os.environ[sys.argv[1]] = 'ACTIVE'\n"
        "importlib.reload(cli); print(os.environ[sys.argv[1]])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    command = [sys.executable, "-c", script, "OMP_WAIT_POLICY"]
    printed = subprocess.check_output(command, env=env, cwd=ROOT, text=True)
    assert printed.split() == ["PASSIVE", "ACTIVE"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_size(n: int, device: str = "cpu"):
    weights = [torch.empty(n, device="meta")]
    return SimpleNamespace(parameters=lambda: weights, device=torch.device(device))


def test_a_small_model_computes_with_one_thread_unless_asked_otherwise(
    codec, monkeypatch, two_threads
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    settle_threads(random_policy(codec))
    assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    # side by side: a share of the cores
    for processes, threads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        settle_threads(of_size(60_000_000), processes)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(2)
    settle_threads(of_size(9, "cuda"))
    assert torch.get_num_threads() == 2
    settle_threads(random_policy(codec))
    assert torch.get_num_threads() == 1
