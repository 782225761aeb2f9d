"""vLLM in the trainer's process on a GPU: the proof of every sleep level, then training steps.

Holds: mismatch of sampler and trainer after each of three steps and sleeps, GiB that sleep gives
back, seconds of each phase; tokens a second, utilisation and peak memory of a step.
Leaves out: the update alone (gpu.py), quality: the weights are random.
Exercise it: `python -m bench.colocated` on a machine with a GPU and vLLM, `python -m
bench.colocated --tiny` on a CPU, to see that it runs. Read next: parts.py.

The parts, alone with `--part`: full-2, lora-1, full-1, full-never and lora-never are a way of
training and a sleep level, of a small model; step-lora and step-full-4b are steps of Qwen3-4B,
step-full-1.7b of Qwen3-1.7B. A step that does not fit the card by the plan is refused. Steps write
neither checkpoint nor export: they take the disk of the base weights alone, 8 GB.

A sampler that keeps old weights, or wakes with garbage, is detected: between rounds the weights
move so far that the old ones are `stale` from the new ones. They move no further: with noise of .05
the third round of a right sampler in bfloat16 is .02 from the trainer.
"""

from __future__ import annotations

import csv
import gc
import json
import random
import tempfile
from functools import partial
from pathlib import Path

import torch

from bench.common import line, random_qwen3, table
from bench.parts import Benchmark
from config.errors import UserError
from models.plan import KNOWN, Geometry, dense, plan

SMALL = dense(4, 256, 8, 4, 32, 512, 512, True)
ENGINE = "vllm"  # of the steps
LEVELS = [("full", "2"), ("lora", "1"), ("full", "1"), ("full", "never"), ("lora", "never")]
# mean |log-prob of the sampler - of the trainer|: float32, bfloat16
BAR = {"cpu": 1e-5, "cuda": 0.02}
STEP = {
    "sections": 4, "chunk": 2048, "memory": 512, "final": 128, "tasks": 4, "group": 8, "steps": 3,
}  # fmt: skip
NOISE = 0.02  # standard deviation of what is added to every weight between rounds
TINY = {"sections": 2, "chunk": 64, "memory": 12, "final": 12, "tasks": 2, "group": 2, "steps": 2}
# the columns of metrics.csv that a step reports
COLUMNS = (
    "mismatch_mean", "read_tokens", "reused_tokens", "written_tokens", "computed_tokens",
    "share_saved", "rollout_s", "switch_s", "update_s", "step_s", "tokens_per_s", "mfu", "peak_gib",
)  # fmt: skip


def model_folder(folder: Path, sizes: Geometry, dtype: torch.dtype) -> Path:
    """Fill a folder with a Qwen3 of random weights and the embedded tokenizer.

    Nothing of it remains on the GPU.
    """
    from embedded import tiny as embedded_tiny

    on_gpu = torch.cuda.is_available()
    random_qwen3(sizes, dtype, "cuda" if on_gpu else "cpu", window=8192).save_pretrained(folder)
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    embedded_tiny.make_tokenizer().save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- sleep levels


def level(mode: str, sleep: str, dtype: str = "") -> dict:
    """Run three rounds of sampling, learning and sleeping.

    mode: full or lora. sleep: a level of `ColocatedEngine`. dtype: empty = bfloat16 on a GPU,
    float32 on a CPU.
    """
    from config.options import GRPOConfig
    from engines.vllm_colocated import ColocatedEngine
    from models.load import load_model, with_lora
    from models.logprobs import mask_head
    from tokens.codec import Codec

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", dtype or "bfloat16") if on_gpu else ("cpu", dtype or "float32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary), SMALL, torch.float32)
        codec, policy = Codec.load(folder), load_model(folder, dtype, device)
        mask_head(policy, codec)
        policy = with_lora(policy, GRPOConfig(lora_rank=8)) if mode == "lora" else policy
        engine = ColocatedEngine(
            folder,
            codec,
            512,
            64,
            0.5 if on_gpu else 0.05,
            dtype,
            8 if mode == "lora" else 0,
            sleep,
            gpu_memory_utilization=0.3,
        )
        rounds = []
        for number in range(3):
            rounds.append(one_round(engine, policy, number))
            print(f"round {number}", rounds[-1], flush=True)
        engine.close()
    return {"mode": mode, "sleep": sleep, "device": device, "rounds": rounds}


def one_round(engine, policy, number: int) -> dict:
    """Sample with the present weights, compare log-probs, then move the weights and compare again.

    The second comparison shows what a sampler with stale weights would look like.
    """
    from memagent import MemAgent, MemAgentConfig
    from rollout import Sampling, rollout
    from tasks import worlds

    agent = MemAgent(MemAgentConfig(chunk_tokens=24, memory_tokens=13, final_tokens=13))
    jobs = [(task, 0) for task in worlds.make_tasks(0, 8, 3, "one_fact")]
    before = dict(engine.seconds)
    asleep = free_gib()
    with engine.awake(policy):
        awake = free_gib()
        done = list(rollout(engine, agent, jobs, Sampling(), number))
    turns = [turn for t in done for turn in t.turns if turn.response_ids]
    seconds = {phase: round(s - before[phase], 4) for phase, s in engine.seconds.items()}
    mean = mean_difference(policy, turns)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(NOISE * torch.randn_like(p))
    return {
        "mean": mean,
        "stale": mean_difference(policy, turns),
        "gib_given_back": round(asleep - awake, 3),
        "seconds": seconds,
    }


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


@torch.no_grad()
def mean_difference(policy, turns: list) -> float:
    """Return the mean |log-prob of the sampler - of the policy| of all response tokens."""
    from models.load import inner
    from models.logprobs import Row, logprobs, pack

    rows = [Row(turn.prompt_ids, turn.response_ids, turn.logprobs) for turn in turns]
    differences = []
    for batch in pack(rows, 4096):
        ours = logprobs(inner(policy), batch).tolist()
        sampler = [logp for i in batch.index for logp in rows[i].sampler]
        differences += [abs(a - b) for a, b in zip(sampler, ours, strict=True)]
    return sum(differences) / len(differences)


# ---------------------------------------------------------------- training steps


def step(mode: str, tiny: bool, model: str = "Qwen/Qwen3-4B") -> dict:
    """Measure real training steps: documents of random words, made-up rewards.

    Every step is reported: medians would need more of them.
    """
    from commands.dryrun import made_up
    from commands.train import train
    from config.options import GRPOConfig, RunConfig
    from memagent import MemAgent, MemAgentConfig

    shape = TINY if tiny else STEP
    config = GRPOConfig(
        steps=shape["steps"],
        tasks_per_step=(shape["tasks"],),
        group_size=shape["group"],
        lora_rank=16 if mode == "lora" else 0,
        lr=1e-6,
        recompute=True,
        # two bfloat16 passes of these random weights are .03 apart; the levels prove the weights
        max_mismatch=1.0,
    )
    settings = MemAgentConfig(
        chunk_tokens=shape["chunk"], memory_tokens=shape["memory"], final_tokens=shape["final"]
    )
    agent = MemAgent(settings)
    sizes = SMALL if tiny else KNOWN[model]
    check_fits(sizes, mode, config, agent)
    with tempfile.TemporaryDirectory() as temporary:
        dtype = torch.float32 if tiny else torch.bfloat16
        run = RunConfig(
            name="step",
            runs=temporary,
            model=str(model_folder(Path(temporary, "base"), sizes, dtype)),
            data=str(write_tasks(Path(temporary, "tasks.jsonl"), shape)),
            engine=ENGINE,
            keep_checkpoints=0,
            keep_trajectories=0,
            kv_gib=0.1 if tiny else 0.0,
        )
        train(run, config, agent, reward=made_up)
        with Path(temporary, "step", "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    return {
        "mode": mode,
        "model": "tiny" if tiny else model,
        "shape": shape,
        "steps": [{key: round(float(x[key]), 6) for key in COLUMNS if key in x} for x in rows],
    }


def check_fits(sizes: Geometry, mode: str, config, agent) -> None:
    """Raise UserError where a training does not fit this GPU; `train` does after writing 8 GB."""
    if not torch.cuda.is_available():
        return
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    if not plan(sizes, mode, gib, 1, config, agent).fits:
        raise UserError(
            f"By the plan {mode} training of {sizes.weights / 1e9:.3g} billion weights "
            f"does not fit {gib:.1f} GiB."
        )


def write_tasks(path: Path, shape: dict) -> Path:
    """Write the tasks of all steps, documents of random words; returns the path."""
    rng = random.Random(0)
    words = ["Anna", "Boris", "Clara", "Lima", "Oslo", "reached", "joined"]  # each a token
    n_words = shape["sections"] * shape["chunk"] - 8
    with path.open("w") as file:
        for i in range(shape["tasks"] * shape["steps"]):
            text = " ".join(rng.choice(words) for _ in range(n_words))
            task = {"question": f"Where is {i}?", "answer": "Lima", "context": text}
            file.write(json.dumps(task) + "\n")
    return path


# ---------------------------------------------------------------- tables


def show(part: str, result: dict) -> None:
    """Print a part's table."""
    if part.startswith("step"):
        names = list(result["steps"][0])
        rows = [(name, *(x[name] for x in result["steps"])) for name in names]
        table(f"Training steps, {part}", ("", *map(str, range(len(result["steps"])))), rows)
        return
    rows = [
        (f"{x['mean']:.2g}", f"{x['stale']:.2g}", x["gib_given_back"], *x["seconds"].values())
        for x in result["rounds"]
    ]
    columns = ("apart", "if it were stale", "GiB given back", "wake s", "sync s", "sleep s")
    rows = [(number, *row) for number, row in enumerate(rows)]
    table(f"Three rounds, {part}", ("", *columns), rows)


def lines(part: str, result: dict) -> list[dict]:
    """Compare the largest distance of sampler and trainer with its bar; steps have none."""
    if part.startswith("step"):
        return []
    bar = BAR[result["device"]]
    worst = max(x["mean"] for x in result["rounds"])
    stale = min(x["stale"] for x in result["rounds"])
    what = f"{result['mode']}, sleep {result['sleep']}: sampler from trainer"
    return [line(what, f"{worst:.2g}", f"at most {bar:g}", worst <= bar < stale)]


STEPS = {
    "step-lora": ("lora", "Qwen/Qwen3-4B"),
    "step-full-1.7b": ("full", "Qwen/Qwen3-1.7B"),
    "step-full-4b": ("full", "Qwen/Qwen3-4B"),
}
BENCHMARK = Benchmark(
    "colocated",
    {
        f"{mode}-{sleep}": lambda tiny, mode=mode, sleep=sleep: level(mode, sleep)
        for mode, sleep in LEVELS
    }
    | {name: partial(step, mode, model=model) for name, (mode, model) in STEPS.items()},
    show,
    lines,
)

if __name__ == "__main__":
    BENCHMARK.main()
