"""Evaluation: an agent over tasks, one row a trajectory, and what the rows say together.

Holds: `evaluate` (rows written as they finish, resume), `summarise`, `wilson`, `compare`, the terminal table, the published rows.
Leaves out: which agents are asked what (the commands), graders (graders.py), plots and transcripts (report.py).
Exercise it: `python cli.py eval --n 8`. Read next: report.py.

Failures and empty answers are rows like the others: they score 0 and stay in every denominator.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from data import Task
from graders import score, strip_thinking
from memagent import Agent, AgentConfig, Finish, Trajectory
from text import UserError

if TYPE_CHECKING:  # torch comes with it
    from rich.table import Table

    from rollout import Engine, Sampling


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an evaluation: who was asked what, how it was sampled, how long the documents were."""

    agent: str  # the name it is shown by, e.g. trained, untrained, full_context
    question: str  # kind of question, e.g. one_fact
    temperature: str  # e.g. "1.0"; "0.0" is greedy
    length: int  # sections of a generated document, documents of a RULER-HQA task, tokens of a RULER task


METRICS = ("em", "f1", "sub_em", "sub_em_upstream", "failed", "empty", "tokens_read", "tokens_written", "seconds", "memory_cut",
           "memory_empty", "cut")  # fmt: skip


# ---------------------------------------------------------------- rows


class Lines:
    """A file of JSON lines that grows by whole lines, held by one process at a time.

    A line is one `write` to the end of the file: a killed process leaves whole lines and at most one torn last one, which is cut
    off when the file is opened again. Lines are forced to the disk (fsync) every 64 lines and with the first line after a second: a
    power cut costs no more than those. A file that another process holds, or that cannot be opened, is a `UserError`.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however that ends
        except BlockingIOError:
            os.close(self._fd)
            raise UserError(f"Another evaluation is writing {path}: wait for it, or give this one another name.") from None
        self._content = path.read_bytes()
        if torn := len(self._content) - (whole := self._content.rfind(b"\n") + 1):
            os.ftruncate(self._fd, whole)
            self._content = self._content[:-torn]
        self._unsynced, self._synced_at = 0, time.monotonic()

    def having(self, text: str) -> Iterator[dict]:
        """The lines of the file as it was opened that hold `text`, parsed. One that is no JSON is a `UserError` with its number."""
        for number, line in enumerate(self._content.split(b"\n"), 1):
            if text.encode() in line:
                try:
                    yield json.loads(line)
                except ValueError:
                    raise UserError(f"{self.path}, line {number} is damaged: delete it, its question is asked again.") from None

    def append(self, line: dict) -> None:
        # half a surrogate pair becomes \udc80, which is how JSON spells it
        raw = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
        try:
            written = os.write(self._fd, raw)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}.") from error
        if written < len(raw):
            raise UserError(f"{self.path}: the disk is full; make room and call again, the rows so far are kept.")
        self._unsynced += 1
        if self._unsynced >= 64 or time.monotonic() - self._synced_at > 1:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_) -> None:
        self._sync()
        os.close(self._fd)


def _hash(*parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def row_of(trajectory: Trajectory, cell: Cell, form: str) -> dict:
    """What an evaluation keeps of a trajectory. A failed one is graded as no answer at all. form: boxed or sentence."""
    task, turns = trajectory.task, trajectory.turns
    updates = [turn for turn in turns if not turn.prompt.final]
    scores = score("" if trajectory.error else trajectory.answer, task.answers, form, task.asks_for_all)
    return asdict(cell) | {
        "id": task.id,
        "sample": trajectory.sample,
        "prediction": scores.pred,  # None: no answer of the form asked for
        "answers": list(task.answers),
        "finish": str(turns[-1].finish) if turns else "",
        "error": trajectory.error,
        "reward": scores.reward,
        "em": scores.em,
        "f1": scores.f1,
        "sub_em": scores.sub_em,
        "sub_em_upstream": scores.sub_em_upstream,
        "sections": len(updates),
        "tokens_read": sum(len(turn.prompt_ids) for turn in turns),
        "tokens_written": sum(len(turn.response_ids) for turn in turns),
        "memory_cut": sum(turn.finish is Finish.LENGTH for turn in updates),
        "memory_empty": sum(not strip_thinking(turn.response).strip() for turn in updates),
        "cut": max((turn.prompt.cut for turn in turns), default=0),  # tokens of the document that were never read
        "seconds": round(trajectory.seconds, 4),  # from first prompt to answer, beside the others in flight
        "gold": list(task.gold),
    }


def evaluate(
    engine: Engine,
    agent: Agent,
    tasks: Iterable[Task],
    agent_config: AgentConfig,
    sampling: Sampling,
    *,
    name: str,
    question: str = "",
    length: int,
    rows: Path,
    model: str = "",
    seed: int = 0,
    samples: int = 1,
    in_flight: int = 256,
    record_to: Path | None = None,
    n_records: int = 1,
    progress: Callable[[dict], None] = lambda row: None,
) -> list[dict]:
    """Fill one cell: every task `samples` times, one row each (`row_of`), returned in the order of tasks and samples.

    Without `question` it is several cells, one for each kind of the tasks, side by side in the engine.

    A row is appended to the file `rows` the moment its trajectory finishes. A row that the file has already is not made again if
    all it depends on is the same: cell, agent, its settings and templates, sampling, seed, `model` (the caller's fingerprint of the
    weights) and the task itself. Rows of other settings stay in the file and play no part.

    tasks: with ids of their own, taken one by one as the engine gets to them. The engine has the weights already.
    record_to: sample 0 of the first `n_records` tasks is kept there whole (`runs.record`, with `cell` and `settings`).
    progress: called with every row, found or new. A `UserError` of an agent's first step becomes a failed row.
    """
    from rollout import rollout

    cell = Cell(name, question, str(float(sampling.temperature)), length)
    templates = [agent_config.template(turn) for turn in ("update", "final", "full")]
    agent_name = getattr(agent, "__qualname__", "")
    settings = _hash(asdict(cell), agent_name, asdict(agent_config), templates, asdict(sampling), seed, model)
    found: dict[tuple[str, int], dict | None] = {}
    contents: dict[str, str] = {}  # id -> hash of the task

    with Lines(rows) as file:
        have = {(row["id"], row["sample"], row["task"]): row for row in file.having(settings) if row.get("settings") == settings}

        def jobs() -> Iterator[tuple[Task, int]]:
            for task in tasks:
                if task.id in contents:
                    raise UserError(f"Two tasks of one evaluation have the id {task.id!r}; ids must be unique.")
                contents[task.id] = _hash(task.question, task.answers, task.document)
                for sample in range(samples):
                    row = found[task.id, sample] = have.get((task.id, sample, contents[task.id]))
                    if row:
                        progress(row)
                    else:
                        yield task, sample

        with engine.awake():
            for trajectory in rollout(engine, agent, jobs(), agent_config, sampling, seed, in_flight):
                task, sample = trajectory.task, trajectory.sample
                of_kind = replace(cell, question=question or task.kind)
                row = row_of(trajectory, of_kind, agent_config.form) | {"settings": settings, "task": contents[task.id]}
                trajectory.reward = row["reward"]
                # the transcript goes first: killed between the two, there is one too many, which the report drops
                if record_to is not None and sample == 0 and task.id in islice(contents, n_records):
                    from runs import record

                    with Lines(record_to) as records:
                        records.append(record(trajectory) | {"cell": asdict(of_kind), "settings": settings})
                file.append(row)
                found[task.id, sample] = row
                progress(row)
    return [row for row in found.values() if row is not None]


# ---------------------------------------------------------------- what the rows say


def wilson(mean: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share of n right answers (Wilson 1927).

    >>> [round(x, 3) for x in wilson(0.5, 10)], [round(x, 3) for x in wilson(0.0, 20)]
    ([0.237, 0.763], [0.0, 0.161])
    """
    centre, spread = mean + z * z / (2 * n), z * ((mean * (1 - mean) + z * z / (4 * n)) / n) ** 0.5
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def summarise(rows: Iterable[dict], unit: str = "sections") -> dict:
    """All that is reported, from the rows that `evaluate` returned. unit: what lengths count, sections, documents or tokens.

    accuracy[agent][question][temperature][length] = {mean, n, low, high}: the mean reward of n questions, the samples of a question
    averaged first, with Wilson's 95 % interval on n questions. That is right for one 0/1 sample a question; averaged samples vary
    less than 0/1 does, so that there it is wider than it need be, never narrower.
    metrics[metric][agent][question][temperature][length] = the mean over the same questions. failed = the trajectory has an error;
    empty = it ended well without an answer of the form asked for; memory_cut and memory_empty count turns; tokens and seconds are
    those of one trajectory; cut = tokens of the document that a cap or a window kept the agent from.
    """
    groups: dict[Cell, dict[str, list[dict]]] = {}
    settings: set[str] = set()
    for row in rows:
        row = row | {"failed": float(bool(row["error"])), "empty": float(not row["error"] and not row["prediction"])}
        cell = Cell(row["agent"], row["question"], row["temperature"], row["length"])
        groups.setdefault(cell, {}).setdefault(row["id"], []).append(row)
        settings.add(row["settings"])
    accuracy: dict = {}
    metrics: dict = {metric: {} for metric in METRICS}
    for cell in sorted(groups, key=lambda cell: cell.length):  # all else keeps the order in which it came
        questions = groups[cell].values()
        mean = {field: fmean(fmean(row[field] for row in rows) for rows in questions) for field in ("reward", *METRICS)}
        low, high = wilson(mean["reward"], len(questions))
        _put(accuracy, cell, {"mean": mean["reward"], "n": len(questions), "low": low, "high": high})
        for metric in METRICS:
            _put(metrics[metric], cell, mean[metric])
    return {"unit": unit, "accuracy": accuracy, "metrics": metrics, "settings": sorted(settings)}


def _put(tree: dict, cell: Cell, value: object) -> None:
    for key in (cell.agent, cell.question, cell.temperature):
        tree = tree.setdefault(key, {})
    tree[str(cell.length)] = value


def cells(tree: dict) -> Iterator[tuple[Cell, object]]:
    """The leaves of one tree of a summary, each with its cell."""
    for agent, questions in tree.items():
        for question, temperatures in questions.items():
            for temperature, lengths in temperatures.items():
                for length, leaf in lengths.items():
                    yield Cell(agent, question, temperature, int(length)), leaf


def write_text(path: Path, text: str) -> None:
    """Write beside the file and rename: at no moment is there half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_summary(path: Path, summary: dict) -> None:
    write_text(path, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def compare(a: Iterable[dict], b: Iterable[dict], resamples: int = 2000, seed: int = 0) -> dict:
    """Mean reward of `a` minus that of `b` on the questions both were asked: {mean, n, low, high}.

    Paired: the difference is taken question by question (kind, length, id), samples averaged first. low and high hold the middle
    95 % of the means of `resamples` bootstrap draws of the questions. Give rows of one agent and one temperature on either side.
    """
    import numpy as np

    def by_question(rows: Iterable[dict]) -> dict[tuple, list[float]]:
        rewards: dict[tuple, list[float]] = {}
        for row in rows:
            rewards.setdefault((row["question"], row["length"], row["id"], row["task"]), []).append(row["reward"])
        return rewards

    left, right = by_question(a), by_question(b)
    if not (both := [key for key in left if key in right]):
        raise UserError("The two sides have no question in common, there is nothing to compare.")
    differences = np.array([fmean(left[key]) - fmean(right[key]) for key in both])
    rng = np.random.default_rng(seed)
    means = [differences[rng.integers(0, len(both), len(both))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return {"mean": float(differences.mean()), "n": len(both), "low": low, "high": high}


def _short(share: float) -> str:
    """Two decimals without the leading 0, all of one width: .97, 1.0"""
    return "1.0" if share >= 0.995 else f"{share:.2f}"[1:]


def table(summary: dict) -> Table:
    """Accuracy by length for the terminal: a line per question, agent and temperature; five lengths fit into 80 columns."""
    from rich.table import Table
    from rich.text import Text

    leaves = dict(cells(summary["accuracy"]))
    lengths = sorted({cell.length for cell in leaves})
    sizes = sorted({leaf["n"] for leaf in leaves.values()}) or [0]
    n = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    lost = sum(leaf > 0 for _, leaf in cells(summary["metrics"]["failed"]))
    failed = f"; failures, counted as wrong, in {lost} of {len(leaves)} cells" if lost else ""
    cut = sum(leaf > 0 for _, leaf in cells(summary["metrics"]["cut"]))
    failed += f"; documents not read whole, by a cap or a window, in {cut} of {len(leaves)} cells" if cut else ""
    shown = Table(title=f"Accuracy by {summary['unit']}", box=None, padding=(0, 1, 0, 0),
                  caption=f"mean and 95 % interval, n = {n} questions a cell{failed}")  # fmt: skip
    shown.add_column("", no_wrap=True)
    shown.add_column("T", no_wrap=True)
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right", no_wrap=True)
    for question in dict.fromkeys(cell.question for cell in leaves):
        shown.add_row(Text(question, "bold"))
        for agent, temperature in dict.fromkeys((cell.agent, cell.temperature) for cell in leaves if cell.question == question):
            values = [leaves.get(Cell(agent, question, temperature, length)) for length in lengths]
            texts = [
                Text.assemble(_short(v["mean"]), (f" {_short(v['low'])}-{_short(v['high'])}", "dim")) if v else "" for v in values
            ]
            shown.add_row(Text(f" {agent}"), Text(temperature), *texts)
    return shown


# ---------------------------------------------------------------- published

# MemAgent's RULER-HotpotQA (arXiv 2507.02259v1, Table 2): sub_em as `sub_em_upstream` counts it, in percent of 128 questions. Other
# models, and other questions than any set of ours: a mark to look at, not a line of the same experiment.
DOCUMENTS = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600)
_PERCENT: dict[str, Sequence[float]] = {
    "RL-MemAgent-14B": (83.59, 82.03, 84.38, 80.47, 76.56, 81.25, 75.00, 77.34, 76.56, 78.12),
    "RL-MemAgent-7B": (82.03, 79.69, 78.91, 77.34, 79.69, 72.66, 74.22, 76.56, 75.78, 71.09),
    "QwenLong-L1-32B": (72.66, 75.00, 72.66, 60.94, 31.25, 17.19, 13.28, 11.72),
    "Qwen2.5-14B-1M": (60.16, 60.94, 50.00, 57.03, 50.00, 37.50, 8.59, 0.00),
    "Qwen2.5-7B-1M": (61.72, 56.25, 53.91, 55.47, 51.56, 33.59, 12.50, 0.00),
    "DS-Distill-32B": (70.31, 66.41, 65.62, 46.88, 23.44, 13.28, 7.81, 7.03),
    "DS-Distill-14B": (64.06, 64.84, 57.03, 40.62, 14.84, 8.59, 3.12, 6.25),
    "DS-Distill-7B": (30.47, 12.50, 3.12, 0.00, 0.00, 0.78, 0.00, 0.00),
}
PUBLISHED = {model: {n: round(x / 100, 4) for n, x in zip(DOCUMENTS, row, strict=False)} for model, row in _PERCENT.items()}
"""model -> {documents: sub_em from 0 to 1}"""
