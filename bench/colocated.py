"""vLLM in the trainer's process on a GPU: the proof of every sleep level, then real training steps with Qwen3-4B's geometry.

Holds: mismatch of sampler and trainer after each of three steps and sleeps, GiB that sleep gives back, seconds of each phase; tokens a
second, utilisation and peak memory of a step. Leaves out: the update alone (gpu.py), quality: the weights are random.
Exercise it: `python -m bench.colocated` on a machine with a GPU and vLLM, `python -m bench.colocated --tiny` on a CPU (does it run?).

Each part has a process of its own, because there is one engine a process. A sampler that keeps old weights, or wakes with garbage, is seen:
the weights move between the rounds so far that the old ones are `stale` from the new ones.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.common import finish, line, table

LEVELS = [("full", "2"), ("lora", "1"), ("full", "1"), ("full", "never"), ("lora", "never")]
BAR = {"cpu": 1e-5, "cuda": 0.02}  # mean |log-prob of the sampler - of the trainer|: float32, bfloat16
STEP = {"sections": 4, "chunk": 2048, "memory": 512, "final": 128, "tasks": 4, "group": 8, "steps": 3}
TINY = {"sections": 2, "chunk": 64, "memory": 12, "final": 12, "tasks": 2, "group": 2, "steps": 2}


def model_folder(folder: Path, real: bool) -> Path:
    """Qwen3 with random weights and the embedded tokenizer; `real`: of 4 billion weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import base

    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
                 vocab_size=512)  # fmt: skip
    if real:
        sizes = dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                     head_dim=128, vocab_size=151_936)  # fmt: skip
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3Config(**sizes, max_position_embeddings=8192, tie_word_embeddings=True, dtype="bfloat16" if real else "float32")
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if real else torch.float32)
    model.save_pretrained(folder)
    base.make_tokenizer().save_pretrained(folder)
    return folder


def level(mode: str, sleep: str) -> dict:
    """One way of training and one sleep level, three rounds of sampling, learning and sleeping."""
    import worlds
    from colocated import ColocatedEngine
    from grpo import Row, differences, logprobs, pack
    from memagent import AgentConfig, memagent
    from models import inner, load_model, with_lora
    from rollout import Sampling, rollout
    from settings import GRPOConfig
    from text import Codec

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    free = lambda: torch.cuda.mem_get_info()[0] / 2**30 if on_gpu else 0.0  # noqa: E731
    agent = AgentConfig(chunk_tokens=24, memory_tokens=13, final_tokens=13)
    tasks = list(worlds.make_tasks(0, 8, 3, "one_fact"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary), False)
        codec, policy = Codec.load(folder), load_model(folder, dtype, device)
        policy = with_lora(policy, GRPOConfig(lora_rank=8)) if mode == "lora" else policy
        engine = ColocatedEngine(folder, codec, 512, 64, 0.5 if on_gpu else 0.05, 0.3, dtype, 8 if mode == "lora" else 0, sleep)

        def apart(turns) -> float:
            rows = [Row(turn.prompt_ids, turn.response_ids, turn.logprobs) for turn in turns]
            found = []
            with torch.no_grad():
                for batch in pack(rows, 4096):
                    flat, some = logprobs(inner(policy), batch).tolist(), [rows[i] for i in batch.index]
                    for row in some:
                        mine, flat = flat[: len(row.response_ids)], flat[len(row.response_ids) :]
                        found += differences([row], [mine])
            return sum(found) / len(found)

        rounds = []
        for step in range(3):
            before = dict(engine.seconds)
            asleep = free()
            with engine.awake(policy):
                awake = free()
                done = list(rollout(engine, memagent, [(task, 0) for task in tasks], agent, Sampling(), step))
            turns = [turn for t in done for turn in t.turns if turn.response_ids]
            seconds = {phase: round(s - before[phase], 4) for phase, s in engine.seconds.items()}
            mean = apart(turns)
            with torch.no_grad():
                for name, p in policy.named_parameters():
                    if p.requires_grad and "lora_A" not in name:
                        p.add_(0.05 * torch.randn_like(p))
            rounds.append({"mean": mean, "stale": apart(turns), "gib_given_back": round(asleep - awake, 3), "seconds": seconds})
        engine.close()
    return {"mode": mode, "sleep": sleep, "rounds": rounds}


def step(mode: str, tiny: bool) -> dict:
    """Real training steps: documents of random words, made-up rewards. Medians would need more steps: every one is kept."""
    from dryrun import made_up
    from memagent import AgentConfig
    from settings import GRPOConfig, RunConfig
    from train import train

    shape, rng = TINY if tiny else STEP, random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary, "base"), not tiny)
        tasks = Path(temporary, "tasks.jsonl")
        words = ["Anna", "Boris", "Clara", "Lima", "Oslo", "reached", "joined"]  # each a token
        with tasks.open("w") as file:
            for i in range(shape["tasks"] * shape["steps"]):
                text = " ".join(rng.choice(words) for _ in range(shape["sections"] * shape["chunk"] - 8))
                file.write(json.dumps({"question": f"Where is {i}?", "answer": "Lima", "context": text}) + "\n")
        run = RunConfig(
            name="step", runs=temporary, model=str(folder), data=str(tasks), engine="vllm", save_every=999, keep_trajectories=0,
            kv_gib=0.1 if tiny else 0.0,
        )  # fmt: skip
        config = GRPOConfig(
            steps=shape["steps"], tasks_per_step=(shape["tasks"],), group_size=shape["group"], lora_rank=16 if mode == "lora" else 0,
            lr=1e-6, recompute=True,
        )  # fmt: skip
        agent = AgentConfig(chunk_tokens=shape["chunk"], memory_tokens=shape["memory"], final_tokens=shape["final"])
        train(run, config, agent, rewards=made_up)
        with Path(temporary, "step", "metrics.csv").open() as file:
            rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    keys = ("mismatch_mean", "read_tokens", "reused_tokens", "written_tokens", "computed_tokens", "share_saved", "rollout_s", "switch_s",
            "update_s", "step_s", "tokens_per_s", "mfu", "peak_gib")  # fmt: skip
    return {"mode": mode, "shape": shape, "steps": [{key: round(row[key], 6) for key in keys if key in row} for row in rows]}


def alone(*words: str) -> dict:
    """A part in a process of its own: what it prints last."""
    done = subprocess.run([sys.executable, "-m", "bench.colocated", *words], capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip()[-800:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> dict | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="small, on whatever device there is; writes no result")
    parser.add_argument("--part", nargs=2, help="one part alone, here: level full:2, or step lora")
    args = parser.parse_args(arguments)
    if args.part:
        what, which = args.part
        print(json.dumps(level(*which.split(":")) if what == "level" else step(which, args.tiny)))
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        raise SystemExit("bench.colocated needs a GPU; --tiny shows on a CPU that it runs.")
    tiny = ["--tiny"] * args.tiny
    result: dict = {"levels": [], "steps": []}
    lines, shown = [], []
    for mode, sleep in LEVELS[:2] if args.tiny else LEVELS:
        found = alone(*tiny, "--part", "level", f"{mode}:{sleep}")
        result["levels"].append(found | {"mode": mode, "sleep": sleep})
        rounds = found.get("rounds", [])
        worst, stale = max((r["mean"] for r in rounds), default=9.0), min((r["stale"] for r in rounds), default=0.0)
        met = worst <= BAR[device] < stale
        lines.append(line(f"{mode}, sleep {sleep}: sampler from trainer", f"{worst:.2g}", f"at most {BAR[device]:g}", met))
        last = rounds[-1] if rounds else {"gib_given_back": "failed", "seconds": {}}
        shown.append((f"{mode}, sleep {sleep}", f"{worst:.2g}", f"{stale:.2g}", last["gib_given_back"], *last["seconds"].values()))
    table("Three rounds each", ("", "apart", "if it were stale", "GiB given back", "wake s", "sync s", "sleep s"), shown)
    for mode in ("lora",) if args.tiny else ("lora", "full"):
        found = alone(*tiny, "--part", "step", mode)
        result["steps"].append(found | {"mode": mode})
        if "failed" in found:
            print(mode, "failed:", found["failed"])
            continue
        names = list(found["steps"][0])
        table(
            f"Training steps, {mode}",
            ("", *map(str, range(len(found["steps"])))),
            [(n, *(s[n] for s in found["steps"])) for n in names],
        )
    if not args.tiny:
        finish("colocated", {"device": torch.cuda.get_device_name(), **result}, lines)
    return result | {"lines": lines}


if __name__ == "__main__":
    main()
