"""vLLM in the trainer's process on a GPU: training steps, and the proof of every sleep level.

Holds: `step` and `sleep`, parts of gpu.py: GiB and seconds of vLLM's start and of every step's
phases beside the plan's; mismatch of sampler and trainer after each of three steps and sleeps.
Leaves out: the update alone (gpu.py), quality: the weights are random.
Exercise it: `python -m bench.gpu step --tiny`, with vLLM. Read next: pipeline.py.

Steps write neither checkpoint nor export: they take the disk of the base weights alone, 8 GB, or
memory (TMPDIR=/dev/shm).

A sampler that keeps old weights, or wakes with garbage, is detected: between rounds the weights
move so far that the old ones are `stale` from the new ones. They move no further: with noise of .05
the third round of a right sampler in bfloat16 is .02 from the trainer.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

from bench.common import line, random_qwen3, table
from bench.parts import Keep, streamed
from models.plan import CARDS, GIB, GRAPHS_GIB, KNOWN, Geometry, dense, plan, step_seconds

SMALL = dense(4, 256, 8, 4, 32, 512, 512, True)
LEVELS = [("full", "2"), ("lora", "1"), ("full", "1"), ("full", "never"), ("lora", "never")]
# mean |log-prob of the sampler - of the trainer|: float32, bfloat16
BAR = {"cpu": 1e-5, "cuda": 0.02}
# but for the number of sections as recipes/qwen3-4b-80gb-lora.yaml
STEP = {
    "sections": 2, "chunk": 2048, "memory": 512, "final": 128, "tasks": 4, "group": 8, "steps": 3,
}  # fmt: skip
NOISE = 0.02  # standard deviation of what is added to every weight between rounds
TINY = {"sections": 2, "chunk": 64, "memory": 12, "final": 12, "tasks": 2, "group": 2, "steps": 2}
COLUMNS = (
    "mismatch_mean", "mismatch_kl", "read_tokens", "reused_tokens", "written_tokens",
    "trained_tokens", "computed_tokens", "share_saved", "rollout_s", "switch_s", "update_s",
    "step_s", "tokens_per_s", "mfu", "peak_gib",
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


def sleep(tiny: bool, keep: Keep) -> dict:
    """Prove all sleep levels, each in a process of its own; it is as small without `tiny`."""
    levels = {}
    for mode, depth in LEVELS:
        result, errors = streamed([sys.executable, "-m", "bench.colocated", mode, depth])
        levels[f"{mode}-{depth}"] = result or {"failed": errors[-800:]}
        keep({"levels": levels})
    return {}


def level(mode: str, sleep: str) -> dict:
    """Run three rounds of sampling, learning and sleeping.

    mode: full or lora. sleep: a level of `ColocatedEngine`. In bfloat16 on a GPU, float32 on a CPU.
    """
    from config.options import GRPOConfig
    from engines.vllm_colocated import ColocatedEngine
    from models.load import load_model, with_lora
    from models.logprobs import mask_head
    from tokens.codec import Codec

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
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
    asleep = free_gib()
    with engine.awake(policy):
        awake = free_gib()
        done = list(rollout(engine, agent, jobs, Sampling(), number))
    turns = [turn for t in done for turn in t.turns if turn.response_ids]
    mean = mean_difference(policy, turns)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(NOISE * torch.randn_like(p))
    return {
        "mean": mean,
        "stale": mean_difference(policy, turns),
        "gib_given_back": round(asleep - awake, 3),
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


def step(mode: str, tiny: bool, keep: Keep, model: str = "Qwen/Qwen3-4B") -> dict:
    """Measure real training steps: documents of random words, made-up rewards.

    Every step is reported as it ends: medians would need more of them. Beside a row of theirs
    stands what the plan expects, and of memory the larger of its two peaks.
    """
    import lightning

    from commands.dryrun import made_up
    from commands.train import train
    from config.options import GRPOConfig, RunConfig
    from engines.vllm_colocated import ColocatedEngine
    from memagent import MemAgent, MemAgentConfig

    shape, sizes = (TINY, SMALL) if tiny else (STEP, KNOWN[model])
    config = GRPOConfig(
        steps=shape["steps"],
        tasks_per_step=(shape["tasks"],),
        group_size=shape["group"],
        lora_rank=32 if mode == "lora" else 0,
        lr=2e-5 if mode == "lora" else 1e-6,
        normalisation="std",
        in_flight=shape["tasks"] * shape["group"],  # few CUDA graphs are captured then
        recompute=True,
        # two bfloat16 passes of these random weights are .03 apart; the levels prove the weights
        max_mismatch=1.0,
    )
    settings = MemAgentConfig(
        chunk_tokens=shape["chunk"], memory_tokens=shape["memory"], final_tokens=shape["final"]
    )
    agent, (card, gib) = MemAgent(settings), card_and_gib()
    p = plan(sizes, mode, gib, 1, config, agent)
    rollout_s, update_s = step_seconds(sizes, p, 1, config, agent, shape["sections"], card)
    peak_gib, start_gib = max(p.rollout, p.update), p.sampler + p.cache + GRAPHS_GIB
    planned = dict(rollout_s=rollout_s, update_s=update_s, peak_gib=peak_gib, start_gib=start_gib)
    planned = {name: round(x, 2) for name, x in planned.items()}
    planned |= dict(card=card, sleep=p.sleep, turns=p.turns, micro_tokens=p.micro_tokens)
    out = {"mode": mode, "model": "tiny" if tiny else model, "shape": shape, "plan": planned}
    out["steps"] = []
    begin = ColocatedEngine.__init__

    def timed(self, *arguments, **options) -> None:
        free, start = free_gib(), time.perf_counter()
        begin(self, *arguments, **options)
        out["start_s"] = round(time.perf_counter() - start, 2)
        out["start_gib"] = round(free - free_gib(), 2)
        keep(out)

    class Steps(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_) -> None:
            found = {k: round(float(module.metrics[k]), 6) for k in COLUMNS if k in module.metrics}
            out["steps"].append(found)
            print(f"step {len(out['steps'])}", found, flush=True)
            keep(out)

    watched = patch.object(ColocatedEngine, "__init__", timed)
    with tempfile.TemporaryDirectory() as temporary, watched:
        dtype = torch.float32 if tiny else torch.bfloat16
        run = RunConfig(
            name="step",
            runs=temporary,
            model=str(model_folder(Path(temporary, "base"), sizes, dtype)),
            data=str(write_tasks(Path(temporary, "tasks.jsonl"), shape)),
            engine="vllm",
            keep_checkpoints=0,
            keep_trajectories=0,
            kv_gib=0.1 if tiny else 0.0,
        )
        train(run, config, agent, callbacks=[Steps()], reward=made_up)
    return out


def card_and_gib() -> tuple[str, float]:
    """Return the card by its name in the plan, and its GiB; without one those of an H100."""
    if not torch.cuda.is_available():
        return "H100", 80.0
    name = torch.cuda.get_device_name()
    card = next((card for card in CARDS if card in name), "H100")
    return card, torch.cuda.get_device_properties(0).total_memory / GIB


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
    if part == "sleep":
        for name, found in result["levels"].items():
            show_level(name, found)
        return
    planned, steps = result["plan"], result["steps"]
    start = f"{result['start_gib']} GiB (planned {planned['start_gib']}), {result['start_s']} s"
    print(f"vLLM's start: {start}")
    rows = [(k, planned.get(k, ""), *(x[k] for x in steps)) for k in (steps or [{}])[0]]
    table(f"Training steps, {part}", ("", "planned", *map(str, range(len(steps)))), rows)


def show_level(name: str, result: dict) -> None:
    if "failed" in result:
        print(f"{name} failed: {result['failed']}")
        return
    rows = [
        (k, f"{x['mean']:.2g}", f"{x['stale']:.2g}", x["gib_given_back"])
        for k, x in enumerate(result["rounds"])
    ]
    columns = ("apart", "if it were stale", "GiB given back")
    table(f"Three rounds, {name}", ("", *columns), rows)


def lines(result: dict) -> list[dict]:
    """Compare the largest distance of sampler and trainer at each sleep level with its bar."""
    found = []
    for name, level in result["levels"].items():
        if "failed" in level:
            reason = level["failed"].splitlines()[-1]
            found.append(line(f"sleep {name}", f"failed: {reason}", "", False))
            continue
        bar = BAR[level["device"]]
        worst = max(x["mean"] for x in level["rounds"])
        stale = min(x["stale"] for x in level["rounds"])
        what = f"{level['mode']}, sleep {level['sleep']}: sampler from trainer"
        found.append(line(what, f"{worst:.2g}", f"at most {bar:g}", worst <= bar < stale))
    return found


if __name__ == "__main__":  # of `sleep`
    print(json.dumps(level(*sys.argv[1:])))
