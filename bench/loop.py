"""The loop: what `rollout()` itself costs in Python, with an engine that answers at once.

Holds: one measurement. Leaves out: models. Exercise it: `python -m bench.loop`. Read next: rollout.py of the project.

8 documents of 16 sections of 2,048 tokens, each read by a group of 16, as in training: documents are cut, prompts put together,
trajectories kept; nothing is computed. The documents come as token ids: how long the tokenizer takes for them is told beside.
"""

from __future__ import annotations

import time
from dataclasses import replace

from bench.common import finish, line, show, spread, table
from config.options import EMBEDDED
from engines.scripted import ScriptedEngine
from memagent import AgentConfig, memagent
from rollout import rollout
from tasks import worlds
from tokens.codec import Codec

BAR_MS = 0.5
TASKS, GROUP, SECTIONS, SECTION_TOKENS, REPEATS = 8, 16, 16, 2048, 7


def main() -> None:
    codec = Codec.load(EMBEDDED)
    tasks = [
        worlds.make_task(str(i), SECTIONS * SECTION_TOKENS // 24, "one_fact") for i in range(TASKS)
    ]  # 24: six sentences of 4 tokens
    start = time.perf_counter()
    tasks = [replace(task, text=codec.text(task.document)) for task in tasks]
    tokenizer_s = time.perf_counter() - start
    config = AgentConfig(chunk_tokens=SECTION_TOKENS, memory_tokens=512)
    per_turn, turns = [], 0
    for _ in range(REPEATS):
        codec = Codec.load(EMBEDDED)  # one that remembers nothing
        engine = ScriptedEngine(
            codec,
            lambda prompt: "\\boxed{ Lima}" if prompt.final else "Anna joined Boris.",
            per_step=64,
        )
        start = time.perf_counter()
        done = list(
            rollout(engine, memagent, ((task, g) for task in tasks for g in range(GROUP)), config)
        )
        turns = sum(len(t.turns) for t in done)
        per_turn.append(1000 * (time.perf_counter() - start) / turns)
    result = {
        "turns": turns,
        "tokenizer_ms_per_turn": round(1000 * tokenizer_s / turns, 3),
        "ms_per_turn": spread(per_turn),
        "bar": BAR_MS,
        "met": spread(per_turn)["median"] <= BAR_MS,
    }
    said = f"at most {BAR_MS} ms: {'met' if result['met'] else 'MISSED'}"
    table(
        "rollout() with the scripted engine",
        ("turns", "ms a turn: median (min-max)", "bar"),
        [(turns, show(per_turn), said)],
    )
    lines = [
        line(
            "Python of rollout(), ms a turn",
            result["ms_per_turn"]["median"],
            f"at most {BAR_MS}",
            result["met"],
        )
    ]
    finish("loop", result, lines)


if __name__ == "__main__":
    main()
