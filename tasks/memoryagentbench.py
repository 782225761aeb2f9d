"""MemoryAgentBench (arXiv 2507.05257): long texts, each with many questions, from several sources.

Holds: `load`, `choose`, `check_metric`, `some`, `EXACT`. Leaves out: the columns of an evaluation
(suites/), scores (data.py). No torch.
Exercise it: `pytest tests/tasks/test_memoryagentbench.py`. Read next: suites/__init__.py.

The files of the data set ai-hyz/MemoryAgentBench, one for each competence, are read from the user's
path: a record is a context, its questions, the accepted answers of each, and metadata that name the
source. How a source is graded is said in the authors' repository (HUST-AI-HYZ/MemoryAgentBench at
455306d). Sources that need another model as a judge, or a list of films, are left out and named.
Other than there, the answer is what our agents' form marks as the answer, not the whole response,
and the instructions for a source, without which its questions cannot be answered, are worded by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from config.errors import UserError
from data import Task
from tasks.readers import Record, records_of

EXACT = ("icl_", "detective_qa")  # sources graded by exact match; others by containment (sub_em)
LEFT_OUT = {  # why they are
    "longmemeval": "a language model has to judge it; --suite longmemeval reads its own file",
    "infbench_sum": "a language model has to judge it",
    "recsys_redial": "it needs a list of all films",
}
ASKED = {  # added to the questions of a source
    "factconsolidation": "The facts of the document are numbered. Where two contradict each other, "
    "the one with the larger number holds, whatever is true elsewhere.",
    "icl_": "Answer with the number of the label alone, as in the document's examples.",
    "eventqa": "Answer with the event that happens next, word for word.",
}  # fmt: skip


def load(path: str | Path) -> list[Task]:
    """Read one of the published files, parquet or JSON: a task for each question.

    `kind` and `split` are the source, such as factconsolidation_mh_6k. Questions about one context
    share its text. UserError: a field is not as published; it names file, record and field.
    """
    tasks = []
    for r in records_of(Path(path)):
        source, text = r.inside("metadata").text("source"), r.text("context")
        for number, (question, answers) in enumerate(_pairs(r), 1):
            name = f"{source}-{r.position + 1}-{number}"
            whole = f"{question}\n{_entry(source, ASKED)}".rstrip("\n")
            labels = dict(kind=source, split=source, dataset="memoryagentbench")
            tasks.append(Task(name, whole, answers, text, **labels))
    if not tasks:
        raise UserError(f"{path} is empty.")
    return tasks


def _pairs(r: Record) -> list[tuple[str, tuple[str, ...]]]:
    """Return each question with its accepted answers; of a single one, all answers are its own."""
    questions, given = r.texts("questions"), r.get("answers", list)
    if len(questions) == 1 and not isinstance(given[0], list):
        given = [given]
    answers = [each if isinstance(each, list) else [each] for each in given]
    if len(questions) != len(given) or not all(answers):
        counts = f"{len(questions)} 'questions' have {len(given)} 'answers'"
        raise r.error(f"{counts}, of which none may be empty")
    return [
        (question, tuple(r.text("answers", answer) for answer in each))
        for question, each in zip(questions, answers, strict=True)
    ]


def _entry(source: str, table: dict[str, str]) -> str:
    return next((text for name, text in table.items() if source.startswith(name)), "")


def choose(tasks: Sequence[Task], source: str) -> tuple[list[Task], list[str]]:
    """Return the tasks of a source, "" for all that can be graded, and why others are left out."""
    sources = list(dict.fromkeys(task.kind for task in tasks))
    if source and source not in sources:
        raise UserError(f"There is no source {source!r}; there are {', '.join(sources)}.")
    wanted = [source] if source else sources
    missing = [f"{name} is left out: {why}." for name in wanted if (why := _entry(name, LEFT_OUT))]
    chosen = [task for task in tasks if task.kind in wanted and not _entry(task.kind, LEFT_OUT)]
    if not chosen:
        raise UserError(f"No question of this file can be graded here: {' '.join(missing)}")
    return chosen, missing


def check_metric(tasks: Sequence[Task]) -> None:
    """Raise a UserError if these tasks are graded by two metrics."""
    by_exact = {task.kind: task.kind.startswith(EXACT) for task in tasks}
    if len({*by_exact.values()}) > 1:
        raise UserError(
            "Some of these sources are graded by exact match, others by containment: choose one "
            f"by --source-split ({', '.join(by_exact)})."
        )


def some(tasks: Sequence[Task], n: int) -> list[Task]:
    """Return n tasks, in turn of every context, in the order of the file."""
    seen: dict[str, int] = {}
    turns = []
    for place, task in enumerate(tasks):
        turns.append((seen.setdefault(task.text, 0), place))
        seen[task.text] += 1
    return [tasks[place] for place in sorted(place for _, place in sorted(turns)[:n])]
