"""Share among the tests: a tiny random policy, the embedded tokenizer, one thread a process.

torch is imported where it is used: the process that hands out the tests to others needs none.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import typer.main
import typer.testing

if TYPE_CHECKING:
    from tokens.codec import Codec

# A command's flags are the same whenever it is called: without this every call in a test would
# make those of all commands anew, which takes longer than most of what is tested so.
typer.testing._get_command = functools.cache(typer.main.get_command)
# A client reads the certificates of all authorities when it is made, a tenth of a second each time.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# Imported modules are half a million objects that stay to the end, and each search for cycles
# looks through all of them: 7 of the 18 s that collecting the tests took.
# `pytest_collection_finish` takes them out of the search and lets it go on.
gc.disable()
# A suite that a script started in the background ignores Ctrl-C, and so would its child processes:
# tests that interrupt them would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test fails because the machine is slow or busy: an example may take as long as it likes.
hypothesis.settings.register_profile(
    "any machine",
    hypothesis.settings.default,
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("any machine")

HANG_S = 600.0
"""Seconds after which a wait is given up as one without end; pyproject.toml has a guard around
whole tests. Both end what hangs, and judge no speed."""


def until(condition: Callable[[], object], pause_s: float = 0.005) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "what is waited for does not happen"
        time.sleep(pause_s)


def steps_run(function: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs: work that no clock measures."""
    n = 0

    def trace(frame, event, arg):
        nonlocal n
        n += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return n


class Calls:
    """Counts the calls and returns, of Python and of C, of a thread: see `sys.setprofile`.

    killed_at: at this one the process is killed, as it may be from outside at any moment.
    """

    def __init__(self, killed_at: int | None = None):
        self.n, self.killed_at = 0, killed_at

    def __call__(self, frame, event, arg):
        self.n += 1
        if self.n == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def calls_of(function: Callable[[], object], killed_at: int | None = None) -> int:
    """Count the calls of a function."""
    calls = Calls(killed_at)
    sys.setprofile(calls)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls.n


def killed_in_child(function: Callable[[], object], at: int) -> bool:
    """Run a function in a forked child and kill it at the so-many-th call (`calls_of`).

    Returns whether it was killed: False if it had ended before.
    """
    if not (child := os.fork()):
        try:
            calls_of(function, at)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def asked_of(codec=None, **settings) -> tuple[str, list]:
    """Return the unit and the columns of an evaluation with these settings, its suite's too."""
    import suites
    from config.options import EvalConfig

    config, suite = suites.chosen(EvalConfig, settings)
    columns = suites.columns(suite, suites.scope_of(suite, config.data, config, codec))
    return suite.unit, columns


def streamed(agent: dict | None = None, **settings) -> Path:
    """Do a stream with these settings, its suite's too; return its folder."""
    import suites
    from commands.stream import run_stream
    from config.options import StreamConfig

    config, suite = suites.chosen(StreamConfig, settings)
    return run_stream(config, agent or {}, suite)


def opened(name: str, path: str = "", **settings):
    """Open the environment of a suite."""
    import suites

    scope = suites.Scope((path,) if path else ())
    return suites.make(name, settings).opened(scope)


def cell_of(summary: dict, agent: str, question: str, temperature: str, length: int) -> dict:
    """Return the record of one cell of a summary."""
    names = ("agent", "question", "temperature", "length")
    key = (agent, question, temperature, length)
    (cell,) = [cell for cell in summary["cells"] if tuple(map(cell.get, names)) == key]
    return cell


def parts_of(summary: dict, name: str, **fields) -> list:
    """Return the distinct values of a field, in order, of a summary's cells with these `fields`."""
    cells = [cell for cell in summary["cells"] if fields.items() <= cell.items()]
    return list(dict.fromkeys(cell[name] for cell in cells))


def random_policy(codec: Codec, window: int = 4096, **other):
    """Make a two-layer Llama with grouped heads and random weights, the same in every test."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = dict(
        vocab_size=len(codec.tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=window,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(LlamaConfig(**config | other))


def obvious_logits(model, turn):
    """Return the logits, in float32, after the prompt of a turn or a row and after each token of
    its response but the last: one pass over the whole text, without a cache."""
    import torch

    ids = torch.tensor([turn.prompt_ids + turn.response_ids])
    return model(input_ids=ids).logits[0, len(turn.prompt_ids) - 1 : -1].float()


def obvious_logprobs(model, turn, temperature=1.0, said=None):
    """Return the log-probs of a response's tokens, the oracle of every engine and of the trainer.

    said: (first, end) of the ids that may be said at all.
    """
    import torch

    logits = obvious_logits(model, turn) / temperature
    if said:
        ids = torch.arange(logits.shape[-1])
        logits = logits.masked_fill((ids < said[0]) | (ids >= said[1]), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(turn.response_ids)[:, None])[:, 0]


def worst_mismatch(model, turns, temperature=1.0):
    """Return the largest distance of the log-probs of turns from the obvious ones."""
    import torch

    with torch.no_grad():
        pairs = [(obvious_logprobs(model, t, temperature), torch.tensor(t.logprobs)) for t in turns]
    return max((a - b).abs().max().item() for a, b in pairs)


LATENT = dict(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16,
    q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
    hidden_size=32, intermediate_size=48, initializer_range=0.15, pad_token_id=0, eos_token_id=1,
)  # fmt: skip


def latent_policy(codec: Codec, window: int = 4096):
    """Make a random DeepSeek-V3: its keys are longer than its values."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    rows = len(codec.tokenizer)
    config = DeepseekV3Config(vocab_size=rows, max_position_embeddings=window, **LATENT)
    return DeepseekV3ForCausalLM(config)


@pytest.fixture(scope="session")
def codec() -> Codec:
    from embedded import tiny
    from tokens.codec import Codec

    return Codec(tiny.make_tokenizer())


@pytest.fixture
def policy(codec):
    """A policy as a training has it: it says nothing that has no text."""
    from models.logprobs import mask_head

    policy = random_policy(codec)
    mask_head(policy, codec)
    return policy


@pytest.fixture(scope="session", autouse=True)
def quick_plots():
    """Tell matplotlib what to draw, and no more, but in tests that are `rendered`.

    Nobody looks at the other plots, and laying one out and writing it takes 70 ms.
    """
    from report import plots

    with pytest.MonkeyPatch.context() as patch:
        render = plots.svg_of
        patch.setattr(plots, "svg_of", unrendered)
        yield render


@pytest.fixture
def rendered(quick_plots, monkeypatch):
    """Render the plots of a test, as a user's are."""
    monkeypatch.setattr("report.plots.svg_of", quick_plots)


def unrendered(draw, label):
    from markupsafe import Markup
    from matplotlib.figure import Figure

    from config.errors import clean

    draw(Figure().add_subplot())
    return Markup('<svg role="img" aria-label="{}"></svg>').format(clean(label))


@pytest.fixture(scope="session", autouse=True)
def tried_here():
    """Try templates and tokenizers in this process, and with short texts, but in tests/hostile/: to
    fork one of this size takes a twentieth of a second. Gives what they are tried with there."""
    from tokens import chat_templates

    quick = {"_by_child": lambda function: function(), "RUN": 10, "LENGTH": 1 << 12}
    with pytest.MonkeyPatch.context() as patch:
        real = {name: getattr(chat_templates, name) for name in quick}
        for name, value in quick.items():
            patch.setattr(chat_templates, name, value)
        yield real


@pytest.fixture(scope="session", autouse=True)
def no_clock_chooses_a_dtype():
    """Take products in bfloat16 for twice as fast as in float32. Gives what times them."""
    from models import dtypes

    with pytest.MonkeyPatch.context() as patch:
        real = dtypes.product_seconds
        patch.setattr(dtypes, "product_seconds", lambda hidden, between: (2.0, 1.0))
        yield real


@pytest.fixture
def read_here(monkeypatch):
    """Read documents in this process: tests/tasks/test_limited.py and tests/hostile/ have the
    child, which takes half a second to begin."""
    from tasks.limited import Readers

    def start(readers, function, *arguments, content=None, name=""):
        given = arguments if content is None else (content, *arguments)
        return SimpleNamespace(result=lambda: function(*given), cancel=lambda: None)

    monkeypatch.setattr(Readers, "start", start)


class Stop(Exception):
    """Ends a training from a callback."""


def stop_at(step: int):
    """Make a callback of Lightning that raises `Stop` when so many steps are done."""
    import lightning

    class StopAt(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if module.done_steps == step:
                raise Stop

    return StopAt()


class Inline:
    """A worker that does its work when it is given: the demo's own are processes of their own."""

    def __init__(self, *_, **__):
        self._processes = {}

    def submit(self, function):
        future = Future()
        future.set_result(function())
        return future

    def shutdown(self, *_, **__): ...


def forked(words, out=os.devnull, cwd=None, killed_at=None):
    """Start a command in a forked child; returns the process. Its messages go to the file `out`.

    killed_at: at this one of its `Calls` it is killed.

    It saves the six seconds that a fresh interpreter takes to load what this one has loaded.
    """
    import cli

    def run():
        os.chdir(cwd or Path.cwd())
        forkserver._forkserver._forkserver_pid = None  # this process's is no child of that one
        sys.stdout = sys.stderr = Path(out).open("w", buffering=1)
        faulthandler.enable(sys.stderr)  # what ends in C is said where it is looked for
        gc.freeze()  # what the parent has left is not this process's to destroy
        if killed_at:
            sys.setprofile(Calls(killed_at))
        cli.app([str(word) for word in words])

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


# ---------------------------------------------------------------- the suite


# What is handed out as one. What ranks are forked from takes five seconds to start, and stays as
# long as the process. The others are few and long: files of few tests are handed out last, and one
# process would be at them when the other has ended.
UNITS = {
    "ranks": (
        "tests/models/test_ranks.py",
        "tests/test_recipes.py",
    ),
    "few and long": ("tests/bench/", "tests/test_threads.py", "tests/embedded/test_reader.py"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Do as --dist loadfile does, but for `UNITS`."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            units = (unit for unit, starts in UNITS.items() if nodeid.startswith(starts))
            return next(units, super()._split_scope(nodeid))

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def own_lock_for_bars() -> None:
    """Give tqdm a lock of this process alone, and each forked child one of its own.

    tqdm's own is one for a process and all of its children: a child that is killed while it holds
    the lock would leave it held for ever.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def pytest_collection_finish():
    import torch

    own_lock_for_bars()
    os.register_at_fork(after_in_child=own_lock_for_bars)
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tests make many objects and few cycles
    gc.enable()
