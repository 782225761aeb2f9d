"""How many threads compute, and what they do while they wait."""

import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_policy

from commands import doctor
from models.load import keep_freed_memory, settle_threads

ROOT = Path(__file__).parent.parent


def waiting(**env) -> str:
    """Return how torch's OpenMP says that its threads wait, once a command's modules are loaded."""
    env |= {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    script = "import sys, cli; assert 'torch' not in sys.modules; import torch"
    command = [sys.executable, "-c", script]
    env["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return re.search(r"OMP_WAIT_POLICY *= *'(\w+)'", done.stderr)[1]


def test_threads_of_a_command_sleep_while_they_wait():
    assert waiting() == "PASSIVE"
    assert waiting(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"  # the user's setting wins


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_model_computes_with_one_thread_unless_asked_otherwise(
    codec, monkeypatch, two_threads
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    settle_threads(random_policy(codec))
    assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    large = SimpleNamespace(
        parameters=lambda: [torch.empty(60_000_000, device="meta")], device=torch.device("cpu")
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for processes, threads in (
        (1, 4),
        (2, 2),
        (4, 1),
        (8, 1),
    ):  # side by side: a share of the cores
        settle_threads(large, processes)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(2)
    settle_threads(
        SimpleNamespace(parameters=lambda: [torch.empty(9)], device=torch.device("cuda"))
    )
    assert torch.get_num_threads() == 2
    settle_threads(random_policy(codec))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("env", "value", "state"),
    [
        ({}, "one thread for small models, else one a core; those that wait sleep", "ok"),
        ({"OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS=3; those that wait sleep", "ok"),
        ({"OMP_WAIT_POLICY": "active"}, "those that wait spin", "limit"),
    ],
)
def test_doctor_says_how_many_threads_compute(monkeypatch, env, value, state):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, setting in env.items():
        monkeypatch.setenv(name, setting)
    (cores,) = (f for f in doctor.machine() if f.item == "cores")
    assert value in cores.value and cores.state == state


def new_pages(out):
    """Count the pages that are new to this process when blocks of 64 MiB come and go: as the C
    library is told at first, and as `keep_freed_memory` tells it."""

    def so_far():
        for _ in range(20):
            np.ones(1 << 23)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = -so_far() + so_far()
    keep_freed_memory(SimpleNamespace(device=torch.device("cpu")))
    out.put((before, -so_far() + so_far()))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library can be told")
def test_what_a_step_frees_is_kept_for_the_next():
    fresh = multiprocessing.get_context("spawn")  # a forked one has what other tests have freed
    out = fresh.SimpleQueue()
    process = fresh.Process(target=new_pages, args=(out,))
    process.start()
    process.join()
    before, after = out.get()
    assert before > 500 and after < 0.1 * before
