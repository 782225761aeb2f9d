"""Ranks: the processes that train one policy together, their collectives, and how they are started.

Without a process group there is one rank and every collective returns its own input, so a caller
never asks how many ranks there are before it sums.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count, takewhile
from multiprocessing import active_children, parent_process
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, spawn

from config import stops
from config.errors import UserError
from models.load import inner

T = TypeVar("T")

# ---------------------------------------------------------------- ranks and collectives


def world() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; rank 0 writes files and prints to the user."""
    return dist.get_rank() if dist.is_initialized() else 0


def snake_order(rank: int, world: int) -> Iterator[int]:
    """Yield the indices of a list that belong to a rank, without end, dealt in snake order.

        index  0 1 2 3 4 5 6 7
        rank   0 1 1 0 0 1 1 0

    Kinds of question often alternate in a list: dealt in plain turns, each of two ranks would get
    one kind only.
    """
    for block in count():
        yield block * world + (world - 1 - rank if block % 2 else rank)


def share(items: Sequence[T]) -> list[T]:
    """Return this rank's items of a list, in `snake_order`."""
    return [items[i] for i in takewhile(lambda i: i < len(items), snake_order(rank(), world()))]


def _all_reduce(values: list[float], op) -> list[float]:
    if world() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def all_reduce_sum(values):
    """Sum a number over all ranks, or each value of a dict with the same keys on every rank."""
    if isinstance(values, dict):
        sums = _all_reduce(list(values.values()), dist.ReduceOp.SUM)
        return dict(zip(values, sums, strict=True))
    return _all_reduce([values], dist.ReduceOp.SUM)[0]


def all_reduce_max(value: float) -> float:
    """Return the largest value of all ranks."""
    return _all_reduce([value], dist.ReduceOp.MAX)[0]


def all_gather_object(value) -> list:
    """Return the picklable objects of all ranks, in the order of ranks, on every rank."""
    if world() == 1:
        return [value]
    out = [None] * world()
    dist.all_gather_object(out, value)
    return out


def barrier() -> None:
    """Block until every rank has arrived."""
    all_reduce_sum(0.0)


# ---------------------------------------------------------------- sharded weights


def shard(model, mesh, mixed: bool = False, **methods: Callable) -> None:
    """Shard a model's weights over the ranks in place (FSDP2): each layer is gathered for its pass.

    model: a causal LM or a peft model around one. Rank 0's weights count; those of other ranks
    need not be initialised. mixed: keep weights, gradients and optimizer in float32 and compute in
    bfloat16. methods: functions of the causal LM that become its methods, during which its own
    weights (embedding, lm_head) are gathered too; the model itself is never called as a whole.
    4-bit weights cannot be sharded: every rank holds all of them. So it does of frozen weights on
    CPUs, unless they are cast for each pass (mixed): gathering them again and again gains nothing
    where all ranks share one memory.
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
    keep_whole = mesh.device_type == "cpu" and not mixed
    whole = {
        p
        for p in lm.parameters()
        if hasattr(p, "quant_state") or (keep_whole and not p.requires_grad)
    }
    weights = {}
    if rank() == 0:
        weights = {name: p.detach() for name, p in lm.named_parameters() if p not in whole}
    for module in (*lm.model.layers, lm):
        # reshard after passes without gradient too: between passes the parameters are shards
        fully_shard(
            module, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=True
        )
    with torch.no_grad():
        for name, p in lm.named_parameters():  # one full weight at a time on a device
            if p not in whole:
                full = weights.pop(name) if rank() == 0 else torch.empty(p.shape, dtype=p.dtype)
                p.copy_(distribute_tensor(full.to(mesh.device_type), p.device_mesh, p.placements))
            elif not hasattr(p, "quant_state"):
                dist.broadcast(p, 0)
    for name, function in methods.items():
        setattr(lm, name, types.MethodType(function, lm))
        register_fsdp_forward_method(lm, name)


def full_tensor(p: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gather a weight from its shards, detached; a collective: every rank must call it.

    dtype: round to this type before gathering, which halves the traffic of 16-bit copies.
    """
    p = p.detach() if dtype is None else p.detach().to(dtype)
    return p.full_tensor() if hasattr(p, "full_tensor") else p


# ---------------------------------------------------------------- processes

GRACE_S = 5.0
"""That the other ranks have to end, and to say why, once one has failed."""


def is_launched() -> bool:
    """Return whether this process is one of several started by `launch` or torchrun."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_world() -> int:
    """Return how many processes `launch` or torchrun started."""
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Return whether this process is, or will be, rank 0."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def launch(function: Callable, n: int, *args):
    """Run function(*args) in n new processes of this machine; returns the result of rank 0.

    Function, arguments and result are pickled. If one process fails, all are ended. A UserError of
    any of them is raised here, once; one that a signal has ended is a ChildProcessError, another
    failure torch's own.
    """
    # by it the ranks find one another, as those do that torchrun starts
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        with stops.waiting(_tell_ranks):
            work = n, store.port, stops.is_stoppable(), folder, function, args
            context = spawn(_run_rank, work, n, join=False)
            try:
                while not context.join(grace_period=GRACE_S):
                    pass
            except ProcessException as failure:
                raise _find_cause(failure, context, folder) from None
            finally:
                _end(context)
        return pickle.loads(Path(folder, RESULT).read_bytes())


def _end(context: ProcessContext) -> None:
    for process in context.processes:
        process.terminate()
    for process, trace in zip(context.processes, context.error_files, strict=True):
        process.join(GRACE_S)
        process.kill()
        Path(trace).unlink(missing_ok=True)


RESULT, REFUSAL = "result", "refusal-"
"""Files by which ranks tell their launcher what came of them."""


def _find_cause(failure: ProcessException, context: ProcessContext, folder: str) -> BaseException:
    """Return why ranks have failed: the first to fail often fails because of another."""
    for path in Path(folder).glob(f"{REFUSAL}*"):
        return pickle.loads(path.read_bytes())
    if stops.requested():
        return stops.Stopped(stops.requested())
    codes = [process.exitcode for process in context.processes]
    killed = -signal.SIGKILL
    rank = codes.index(killed) if killed in codes else failure.error_index
    if codes[rank] >= 0:
        return failure
    like = " (an out-of-memory kill looks like this)" * (codes[rank] == killed)
    name = signal.Signals(-codes[rank]).name
    return ChildProcessError(f"Rank {rank} of {len(codes)} was ended by {name}{like}")


def _tell_ranks() -> None:
    for process in active_children():
        os.kill(process.pid, stops.TOLD)


def _run_rank(
    rank: int, n: int, port: int, stoppable: bool, folder: str, function: Callable, args: tuple
) -> None:
    """Run one rank's share of `launch`."""
    # as torchrun says them, which torch and Lightning know
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(n) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "memagent", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    # the system ends this process when the one that called `launch` has ended, in whatever way
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)
    if os.getppid() != parent_process().pid:  # it ended before the line above
        os._exit(1)
    try:
        with stops.stoppable(rank=True) if stoppable else nullcontext():
            result = function(*args)
    except stops.Stopped:
        return  # so does every rank, and `launch` knows why
    except UserError as error:
        Path(folder, f"{REFUSAL}{rank}").write_bytes(pickle.dumps(error))
        sys.exit(1)
    if rank == 0:
        Path(folder, RESULT).write_bytes(pickle.dumps(result))


@contextmanager
def process_group(on_gpu: bool) -> Iterator[None]:
    """Join the process group of the environment, or a group of one where there is none."""
    # Lightning sets those of these variables that are missing
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    alone = {} if is_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # The timeout is long because one rank may sample, or export, for hours while the others wait; a
    # rank that has died is noticed without it. No device_id: with one, every group that vLLM makes
    # is split off from this one, and a rank outside it waits (pytorch issue 134314).
    dist.init_process_group(backend, timeout=timedelta(hours=6), **alone)
    try:
        yield
    finally:
        if dist.is_initialized():  # vLLM may have destroyed it
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
