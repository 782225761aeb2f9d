"""The loop: what `rollout()` itself costs in Python, with an engine that answers at once.

Holds: one measurement. Leaves out: models.
Exercise it: `python -m bench.loop`. Read next: rollout.py of the project.

8 documents of 16 sections of 2,048 tokens, each read by a group of 16, as in training: documents
are cut, prompts assembled, trajectories recorded; nothing is computed. The documents come as token
ids; what the tokenizer takes for them is reported beside.
"""

from __future__ import annotations

import time
from dataclasses import replace

from bench.common import finish, line, show, spread, table
from config.options import EMBEDDED
from data import Task
from engines.scripted import ScriptedEngine
from memagent import MemAgent, MemAgentConfig
from rollout import rollout
from tasks import worlds
from tokens.codec import Codec

BAR_MS = 0.5
TASKS, GROUP, SECTIONS, SECTION_TOKENS, REPEATS = 8, 16, 16, 2048, 7


def main() -> None:
    codec = Codec.load(EMBEDDED)
    sentences = SECTIONS * SECTION_TOKENS // 24  # six of 4 tokens make 24
    tasks = [worlds.make_task(str(i), sentences, "one_fact") for i in range(TASKS)]
    start = time.perf_counter()
    tasks = [replace(task, text=codec.text(task.document)) for task in tasks]
    tokenizer_s = time.perf_counter() - start
    per_turn, turns = measure(tasks)
    result = {
        "turns": turns,
        "tokenizer_ms_per_turn": round(1000 * tokenizer_s / turns, 3),
        "ms_per_turn": spread(per_turn),
        "bar": BAR_MS,
        "met": spread(per_turn)["median"] <= BAR_MS,
    }
    verdict = f"at most {BAR_MS} ms: {'met' if result['met'] else 'MISSED'}"
    header = ("turns", "ms a turn: median (min-max)", "bar")
    table("rollout() with the scripted engine", header, [(turns, show(per_turn), verdict)])
    what, ms = "Python of rollout(), ms a turn", result["ms_per_turn"]["median"]
    finish("loop", result, [line(what, ms, f"at most {BAR_MS}", result["met"])])


def measure(tasks: list[Task]) -> tuple[list[float], int]:
    """Return the milliseconds a turn of each of REPEATS rollouts, and the turns of one."""
    agent = MemAgent(MemAgentConfig(chunk_tokens=SECTION_TOKENS, memory_tokens=512))

    def answer(prompt) -> str:
        return "\\boxed{ Lima}" if prompt.final else "Anna joined Boris."

    per_turn, turns = [], 0
    for _ in range(REPEATS):
        codec = Codec.load(EMBEDDED)  # with empty caches
        engine = ScriptedEngine(codec, answer, per_step=64)
        jobs = ((task, g) for task in tasks for g in range(GROUP))
        start = time.perf_counter()
        done = list(rollout(engine, agent, jobs))
        turns = sum(len(t.turns) for t in done)
        per_turn.append(1000 * (time.perf_counter() - start) / turns)
    return per_turn, turns


if __name__ == "__main__":
    main()
