"""Ranks: the processes that train one policy together, what they tell each other, and how they are started.

Holds: `world`, `rank`, `share`, `all_reduce_sum`, `all_reduce_max`, `all_gather_object`, `barrier`; `shard` and `full_tensor` (FSDP2); `launch`, `is_launched`, `launched_world`, `is_first`, `process_group`.
Leaves out: what is trained (grpo.py), Lightning's part in it (commands/train.py).
Exercise it: `python cli.py train --devices 2 --device cpu --steps 3 --name two`. Read next: grpo.py.

Without a process group there is one rank, and everything here says so: no caller asks how many there are before it sums.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, takewhile
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from config.errors import UserError
from config.files import replacing
from models.load import inner

T = TypeVar("T")

# ---------------------------------------------------------------- who, and sums over all


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if _grouped() else 1


def rank() -> int:
    """Which of them this process is: 0 writes files and speaks to the user."""
    return dist.get_rank() if _grouped() else 0


def _all_reduce(values: list[float], op) -> list[float]:
    if world() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def snake_order(rank: int, world: int) -> Iterator[int]:
    """Number the items of a list that are a rank's, without end: they are dealt to and fro (ranks 0 1 1 0 0 1 1 0 ..), so that of things
    that take turns, such as two kinds of question, no rank gets all of one kind."""
    for block in count():
        yield block * world + (world - 1 - rank if block % 2 else rank)


def share(items: Sequence[T]) -> list[T]:
    """This rank's items of a list, by `snake_order`."""
    return [items[i] for i in takewhile(lambda i: i < len(items), snake_order(rank(), world()))]


def all_reduce_sum(values):
    """Sum over all ranks: a number, or each value of a dict (the same keys in the same order on every rank)."""
    if isinstance(values, dict):
        sums = _all_reduce(list(values.values()), dist.ReduceOp.SUM)
        return dict(zip(values, sums, strict=True))
    return _all_reduce([values], dist.ReduceOp.SUM)[0]


def all_reduce_max(value: float) -> float:
    """Return the largest of all ranks' values."""
    return _all_reduce([value], dist.ReduceOp.MAX)[0]


def all_gather_object(value) -> list:
    """What each rank gives, in the order of the ranks, on all of them. Any picklable object."""
    if world() == 1:
        return [value]
    out = [None] * world()
    dist.all_gather_object(out, value)
    return out


def barrier() -> None:
    """Nobody goes on before everybody is here."""
    all_reduce_sum(0.0)


# ---------------------------------------------------------------- weights in shards


def shard(model, mesh, mixed: bool = False, **methods: Callable) -> None:
    """Each rank keeps its part of every weight and has a layer's in full only while it computes with it (FSDP2), in place.

    model: a causal LM or a peft model around one; rank 0's weights count, the others' need not be set. mixed: weights, gradients and
    optimizer in float32, what is computed with in bfloat16. methods: functions of the causal LM, made methods of it, during which its own
    weights (embedding, lm_head) are there too; it is never called as a whole. 4-bit weights have no shards: every rank has them all.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )
    from torch.distributed.tensor import distribute_tensor

    lm = inner(model)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    whole_everywhere = {p for p in lm.parameters() if hasattr(p, "quant_state")}
    weights = (
        {}
        if rank()
        else {name: p.detach() for name, p in lm.named_parameters() if p not in whole_everywhere}
    )
    for module in (*lm.model.layers, lm):
        # after a pass without gradient, too: whoever looks at the parameters between two passes finds the shards
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            ignored_params=whole_everywhere,
            reshard_after_forward=True,
        )
    with torch.no_grad():
        for name, p in lm.named_parameters():  # one at a time is whole on a device
            if p not in whole_everywhere:
                full = weights.pop(name) if rank() == 0 else torch.empty(p.shape, dtype=p.dtype)
                p.copy_(distribute_tensor(full.to(mesh.device_type), p.device_mesh, p.placements))
    for name, function in methods.items():
        setattr(lm, name, types.MethodType(function, lm))
        register_fsdp_forward_method(lm, name)


def full_tensor(p: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A weight without its gradient, from the shards of all ranks: every rank must ask for it. dtype: its type; rounded before it
    is gathered, which halves what travels."""
    p = p.detach() if dtype is None else p.detach().to(dtype)
    return p.full_tensor() if hasattr(p, "full_tensor") else p


# ---------------------------------------------------------------- processes


def is_launched() -> bool:
    """Whether this process was started as one of several, by `launch` or by torchrun."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_world() -> int:
    """How many were started with it."""
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this process is, or will be, rank 0."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def launch(function: Callable, n: int, *args):
    """function(*args) in n new processes of this machine; returns what rank 0 does. Function and arguments are pickled.

    If one fails all are ended. A UserError of any of them is raised here, once.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in (
        logging.root.manager.loggerDict
    ):  # each has a level of its own, and their report of a failure is a page
        if name.startswith(
            ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.launcher")
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        config = LaunchConfig(
            run_id="memagent",
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        before, tempfile.tempdir = (
            tempfile.tempdir,
            folder,
        )  # where torch leaves files of processes that have failed
        caught = (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGQUIT,
        )  # torch takes them over
        handlers = {s: signal.getsignal(s) for s in caught}
        try:
            return elastic_launch(config, _body)(folder, n, function, *args)[0]
        except SignalException as error:  # all have ended
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        except ChildFailedError as error:
            if said := sorted(path for path in Path(folder).iterdir() if path.name.isdigit()):
                raise UserError(said[0].read_text(encoding="utf-8")) from None
            number, failure = error.get_first_failure()
            told = failure.message
            if isinstance(told, dict):
                told = told.get("extraInfo", {}).get("py_callstack", "")
            raise RuntimeError(
                f"Rank {number} of {n} ended with exit code {failure.exitcode}: {told}"
            ) from None
        finally:
            tempfile.tempdir = before
            for s, handler in handlers.items():
                if signal.getsignal(s) is not handler:
                    signal.signal(s, handler)


def _body(folder: str, n: int, function: Callable, *args):
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // n))
    try:
        return function(*args)
    except UserError as error:
        with replacing(Path(folder, os.environ["RANK"])) as path:
            path.write_text(str(error), encoding="utf-8")
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit):
        # what was open has been closed; the signal comes twice, from the terminal and from `launch`, and may hit Python's own end
        os._exit(130)


@contextmanager
def process_group(on_gpu: bool) -> Iterator[None]:
    """Be the rank that the environment says, or the only one where it says nothing."""
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}  # Lightning sets what is missing
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    alone = {} if is_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # A rank may sample, or export, for long while the others wait; one that has ended is noticed without a timeout. No device_id:
    # with one, every group that vLLM makes is split off from this one, and a rank outside it waits (pytorch issue 134314).
    dist.init_process_group(backend, timeout=timedelta(hours=6), **alone)
    try:
        yield
    finally:
        if _grouped():  # vLLM may have ended it
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
