"""The questions of one published file of MemoryAgentBench.

Exercise it: `python cli.py eval --suite memoryagentbench --data FILE.parquet`.
Read next: tasks/memoryagentbench.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from config.terminal import say
from data import Task
from suites import Column, Scope, Suite
from tasks import memoryagentbench


@dataclass(frozen=True)
class MemoryAgentBench(Suite):
    """A column of each source, as long as its longest context in tokens of the model."""

    source_split: str = ""
    """use only the questions of this source, such as factconsolidation_mh_6k"""

    unit = "tokens"

    def columns(self, scope: Scope) -> list[Column]:
        path = self.file_in(scope)
        tasks, sentences = memoryagentbench.choose(memoryagentbench.load(path), self.source_split)
        memoryagentbench.check_metric(tasks)
        for sentence in sentences:
            say(sentence, "yellow")

        def make(source: str) -> list[Task]:
            chosen = memoryagentbench.choose(memoryagentbench.load(path), source)[0]
            return memoryagentbench.some(chosen, scope.n)

        lengths: dict[str, int] = {}
        for source, text in dict.fromkeys((task.kind, task.text) for task in tasks):
            lengths[source] = max(lengths.get(source, 0), len(scope.codec().encode(text)))
        return [Column(name, n, partial(make, name)) for name, n in lengths.items()]

    def measured_by(self, questions: Sequence[str]) -> str:
        exact = any(name.startswith(memoryagentbench.EXACT) for name in questions)
        return "em" if exact else "sub_em"
