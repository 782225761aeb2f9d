"""The questions of town.csv about town.pdf, as `ask` puts them; ten of thirty it does not answer.

    python cli.py eval --name town --suite examples/town_suite.py --n 30 --model smollm2-reader \\
        --agents memagent,bm25 --temperatures 0 --not-found say
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from data import NOT_FOUND, Task
from suites import Column, Scope, Suite
from tasks import documents

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Town(Suite):
    """All questions about one report, an invented town's; it has no settings."""

    unit, lengths, metric = "pages", (14,), "sub_em"

    def columns(self, scope: Scope) -> list[Column]:
        with (HERE / "town.csv").open(newline="", encoding="utf-8") as file:
            asked = [(row["question"], row["answer"]) for row in csv.DictReader(file)]
        text = documents.read([HERE / "town.pdf"]).text
        tasks = [
            Task(f"town-{k}", question, tuple((right or NOT_FOUND).split(" | ")), text, kind=kind)
            for k, (question, right) in enumerate(asked)
            for kind in ["town" if right else "absent"]
        ]
        return [Column("", self.lengths[0], lambda: tasks[: scope.n])]
