"""Sources of training tasks: generated English, conversations, files, or several by weight."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from config.errors import UserError
from config.options import GRPOConfig, RunConfig, TrainConfig
from data import Task, Tasks, seed_of
from suites import ledger
from suites._conversations import ConversationTasks, is_conversations, validation_episodes
from suites._sources import read_sentences
from tasks import readers, worlds
from tasks.hub import is_hub

GENERATED = ("", "world", ledger.KIND)  # sources that are no file


class WorldTasks:
    """Generate English anew for every step; each level has one of the given lengths in sections."""

    def __init__(
        self, lengths: Sequence[int], kinds: Sequence[str], seed: int, filler: Sequence[str] = ()
    ):
        if unknown := {*kinds} - {*worlds.KINDS}:
            known = ", ".join(worlds.KINDS)
            raise UserError(f"Unknown kind of question {min(unknown)!r}: choose among {known}.")
        self.lengths, self.kinds, self.seed, self.filler = lengths, kinds, seed, filler
        self.levels = len(lengths) - 1

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        kinds = [self.kinds[(step * n + i) % len(self.kinds)] for i in range(n)]
        return [
            worlds.make_task(
                f"{self.seed}.{step}.{i}", self.lengths[level], kind, filler=self.filler
            )
            for i, kind in enumerate(kinds)
        ]


def by_document(tasks: Sequence[Task]) -> list[list[Task]]:
    """Split a list where the document changes: each part is of one pool and order.

    A text that is not composed of passages is a part of its own.
    """

    def key(place: tuple[int, Task]) -> tuple:
        n, task = place
        return (id(task.pool), *task.order) if task.pool else (None, n)

    return [[task for _, task in part] for _, part in groupby(enumerate(tasks), key)]


class FileTasks:
    """Serve the tasks of a file, in an order shuffled anew for every pass, or in the file's
    order.

    Documents are shuffled, and the tasks of each among themselves: neighbours with one document
    stay neighbours, so that its sections are computed once for all of them (models/logprobs.py).
    The end of a step may part them.
    """

    levels = 0

    def __init__(self, tasks: list[Task], seed: int, shuffle: bool = True):
        self.tasks, self.seed, self.shuffle = tasks, seed, shuffle
        self.documents = by_document(tasks)

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        check_step(n, len(self.tasks), "the file has")
        # The remainder of a pass is skipped, so that no task occurs twice in a step
        per_pass = len(self.tasks) // n
        start = step % per_pass * n
        return self._order(step // per_pass)[start : start + n]

    def _order(self, number: int) -> list[Task]:
        """Return the tasks in the order of a pass."""
        if not self.shuffle:
            return self.tasks
        return _shuffled(self.documents, random.Random(seed_of(self.seed, number)))

    def reached(self, steps: int, n: int) -> list[tuple[int, int]]:
        """Return how many tasks steps of n train on, and how many there are."""
        per_pass, met = len(self.tasks) // n, set[str]()
        for number in range(-(-steps // per_pass)):
            taken = min(per_pass, steps - number * per_pass) * n
            met.update(task.id for task in self._order(number)[:taken])
            if len(met) == len(self.tasks):
                break
        return [(len(met), len(self.tasks))]


def check_step(n: int, most: int, source: str) -> None:
    if n > most:
        raise UserError(f"A step wants {n} tasks and {source} {most}; lower --tasks-per-step.")


def _shuffled(documents: Sequence[Sequence[Task]], rng: random.Random) -> list[Task]:
    """Return the tasks of documents in random order, those of one document side by side."""
    return [
        t for part in rng.sample(documents, len(documents)) for t in rng.sample(part, len(part))
    ]


class MixedTasks:
    """Draw each task of a step from one of several lists, as often as its weight says.

    The part of a list in a step is a stretch of its tasks, shuffled as by `FileTasks` and laid in a
    circle: every task is as likely as another, none occurs twice, and documents are whole but for
    the first and the last of the stretch. What a short list lacks comes from the others. Ids get
    the number of their list: those of several files may be the same.
    """

    levels = 0

    def __init__(self, lists: list[list[Task]], weights: list[float], seed: int):
        self.lists = [
            [replace(task, id=f"{k}.{task.id}") for task in tasks] for k, tasks in enumerate(lists)
        ]
        self.documents = [by_document(tasks) for tasks in self.lists]
        self.weights, self.seed = weights, seed

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        rng = self._rng(step)
        check_step(n, sum(map(len, self.lists)), "the files have")
        drawn = self._counts(rng, n)
        parts = []
        for k, (tasks, count) in enumerate(zip(self.lists, drawn, strict=True)):
            circle = 2 * _shuffled(self.documents[k], rng)
            start = rng.randrange(len(tasks))
            parts += by_document(circle[start : start + count])
        return [task for part in rng.sample(parts, len(parts)) for task in part]

    def reached(self, steps: int, n: int) -> list[tuple[int, int]]:
        """Return how many tasks of each list steps of n train on at most, and how many it has."""
        drawn = [self._counts(self._rng(step), n) for step in range(steps)]
        sizes = [len(tasks) for tasks in self.lists]
        return [(min(sum(each[k] for each in drawn), size), size) for k, size in enumerate(sizes)]

    def _rng(self, step: int) -> random.Random:
        return random.Random(seed_of(self.seed, "mixture", step))

    def _counts(self, rng: random.Random, n: int) -> list[int]:
        """Draw how many of n tasks come from each list: no more than it has, then from others."""
        counts = [0] * len(self.lists)
        while missing := n - sum(counts):
            room = [len(tasks) - count for tasks, count in zip(self.lists, counts, strict=True)]
            weights = [w if left else 0.0 for w, left in zip(self.weights, room, strict=True)]
            drawn = rng.choices(range(len(counts)), weights, k=missing)
            counts = [
                count + min(drawn.count(k), left)
                for k, (count, left) in enumerate(zip(counts, room, strict=True))
            ]
        return counts


def parts_of(data: str) -> list[tuple[str, float]]:
    """Split `--data FILE=WEIGHT,FILE=WEIGHT` into files and weights; one file alone has weight 1.

    UserError for a weight that is no positive number.
    """
    if "," not in data or is_conversations(data):
        return [(data, 1.0)]
    parts = []
    for entry in filter(None, data.split(",")):
        source, found, weight = entry.rpartition("=")
        try:
            parts.append((source, float(weight)) if found else (entry, 1.0))
        except ValueError:
            parts.append((entry, 1.0))  # the name of the file has an equals sign
        if not 0 < parts[-1][1] < float("inf"):
            raise UserError(f"--data: the weight of {source} must be a positive number.")
    return parts


def check_sources(sources: Iterable[str]) -> None:
    """Raise a UserError for a source that names a file which is not there."""
    for source in sources:
        if is_conversations(source):
            source = source.partition(":")[2].partition("#")[0]
        if not (source in GENERATED or is_hub(source) or readers.is_function(source)):
            readers.existing(source)


def never_trained(tasks: Tasks, data: str, config: TrainConfig) -> str:
    """Say of which tasks of files, or of which lengths, all the steps reach only a part; "" where
    they may reach everything."""
    steps, n = config.steps, config.tasks_per_step[0]
    if isinstance(tasks, FileTasks | MixedTasks):
        found = zip(parts_of(data), tasks.reached(steps, n), strict=True)
        parts = [
            f"{most:,} of the {size:,} tasks of {source}"
            for (source, _), (most, size) in found
            if most < size
        ]
    else:
        each = max(1, config.grow_steps) if isinstance(config, GRPOConfig) else 1
        reached = 1 + (steps - 1) // each
        parts = [f"{reached} of the {tasks.levels + 1} lengths"] if reached <= tasks.levels else []
    every = f"{steps:,} step{'s' * (steps > 1)} of {n:,}"
    return f"{every} train on at most {', '.join(parts)}, never on the others." if parts else ""


def training_tasks(run: RunConfig, config: TrainConfig) -> Tasks:
    """Open the source of training tasks: generated English, files, or a function of the user's."""
    if run.data == "world":
        return WorldTasks(run.lengths, run.kinds, config.seed, read_sentences(run.filler))
    if run.data == ledger.KIND:
        return ledger.LedgerTasks(run.lengths, config.seed)
    if is_conversations(run.data):
        return ConversationTasks(run.data, run.lengths, config.seed)
    lists, weights = zip(*((readers.read(s), w) for s, w in parts_of(run.data)), strict=True)
    if len(lists) == 1:
        return FileTasks(lists[0], config.seed, run.shuffle)
    return MixedTasks([*lists], [*weights], config.seed)


def validation_tasks(run: RunConfig) -> list[Task]:
    """Return the validation tasks.

    Of generated English the longest documents, facts of split dev; of conversations one episode
    each, whole, with about `validation_n` questions in all.
    """
    if run.validation == ledger.KIND:
        n, most = run.validation_n, run.lengths[-1]
        return [ledger.make_ledger(f"validation.{i}", most, "dev") for i in range(n)]
    if is_conversations(run.validation):
        return [*validation_episodes(run.validation, run.validation_n)]
    if run.validation != "world":
        return readers.read(run.validation, n=run.validation_n) if run.validation else []
    per_kind, filler = -(-run.validation_n // len(run.kinds)), read_sentences(run.filler)
    tasks = [
        task
        for kind in run.kinds
        for task in worlds.make_tasks(0, per_kind, run.lengths[-1], kind, "dev", filler)
    ]
    return tasks[: run.validation_n]
