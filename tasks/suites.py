"""Suites: the kinds of question and the lengths of an evaluation, their tasks made on demand.

Holds: `Column`, `columns_of` (generated English, files, RULER-HQA, RULER, MemoryAgentBench,
passages, facts), `metric_of`, haystacks.
Leaves out: who answers (commands/). No torch.
Exercise it: `python cli.py eval --suite ruler-hqa --data FILE --lengths 50,200`.
Read next: commands/taskfiles.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError, clean
from config.options import EvalConfig, StreamConfig
from config.terminal import say
from data import Pool, Task
from tasks import episodes, facts, hqa, ledger, memoryagentbench, passages, readers, ruler, worlds
from tasks.environments import ENVIRONMENTS, OPTIONS, open_environment
from tasks.hqa import Evidence
from tokens.codec import Codec

ESSAY = tuple(kind for kind, settings in ruler.NIAH.items() if settings.haystack == "essay")
# suite -> default of --lengths
LENGTHS = {
    "": (4, 16, 64),
    "ruler-hqa": (50, 200, 800),
    "ruler": (4096, 8192, 16384),
    "passages": (1, 4, 16, 64),
    "facts": (1, 4),
    "locomo": (),
    "longmemeval": (),
    "own": (),
    "memoryagentbench": (),
}
# suite -> what lengths count; and without a suite, by --data, else documents, or tokens of RULER
UNITS = {
    "ruler-hqa": "documents",
    "ruler": "tokens",
    "passages": "documents",
    "facts": "documents",
    "locomo": "sessions",
    "longmemeval": "sessions",
    "own": "sessions",
    "memoryagentbench": "tokens",
} | dict.fromkeys(ENVIRONMENTS, "steps")
DATA_UNITS = {"world": "sections", ledger.KIND: "sessions"}


@dataclass(frozen=True, slots=True)
class Column:
    """Describe one column of the results: a kind of question at one length.

    `make` returns its tasks, the same ones at every call.
    """

    question: str
    length: int
    make: Callable[[], list[Task]]


def columns_of(config: EvalConfig, codec: Callable[[], Codec]) -> tuple[str, list[Column]]:
    """Return the unit of lengths and the columns of an evaluation.

    Sources are read now, so that mistakes show before a model is loaded.
    """
    lengths = config.lengths or LENGTHS.get(config.suite, ())
    if config.suite:
        return UNITS[config.suite], _of_suite(config, lengths, codec)
    if config.data == ("world",):
        return DATA_UNITS["world"], _world(config, lengths)
    if config.data == (ledger.KIND,):
        return DATA_UNITS[ledger.KIND], _ledger(config, lengths)
    return _files(config)


def _of_suite(
    config: EvalConfig, lengths: Sequence[int], codec: Callable[[], Codec]
) -> list[Column]:
    if config.suite == "ruler-hqa":
        return _ruler_hqa(config, lengths)
    if config.suite == "ruler":
        return _ruler(config, lengths, codec)
    if config.suite == "passages":
        return passage_columns(config, lengths)
    if config.suite == "facts":
        return fact_columns(config, lengths)
    if config.suite == "memoryagentbench":
        return _memoryagentbench(config, codec)
    if config.suite in ENVIRONMENTS:
        return _environment(config)
    return _conversations(config)


def unit_of(config: Mapping[str, object]) -> str:
    """Return what lengths count in an evaluation that has these settings, so far as they tell."""
    data = tuple(config.get("data") or ())
    return UNITS.get(config.get("suite")) or DATA_UNITS.get(*data[:1] or ("",), "documents")


def metric_of(unit: str, questions: Iterable[str]) -> str:
    """Return what answers are measured by. questions: the names of the columns."""
    if unit in ("sessions", "steps"):
        return "reward"  # their own metric
    return "em" if any(name.startswith(memoryagentbench.EXACT) for name in questions) else "sub_em"


# ---------------------------------------------------------------- generated English


def _world(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    for kind in config.kinds:
        if kind not in worlds.KINDS:
            known = ", ".join(worlds.KINDS)
            raise UserError(f"Unknown kind of question {kind!r}: choose among {known}.")
    if config.split not in worlds.SPLITS:
        known = ", ".join(worlds.SPLITS)
        raise UserError(f"Generated English has the splits {known}, not {config.split!r}.")

    def column(kind: str, length: int) -> Column:
        def make() -> list[Task]:
            return [*worlds.make_tasks(config.seed, config.n, length, kind, config.split)]

        return Column(kind, length, make)

    return [column(kind, length) for length in lengths for kind in config.kinds]


# ---------------------------------------------------------------- environments


def _environment(config: EvalConfig) -> list[Column]:
    """Make one column of all tasks of an environment; its cells are their kinds, its length the
    most steps of a task. Of each kind the first `n` are worked on."""
    if len(config.data) > 1:
        raise UserError(f"--suite {config.suite} wants one file: name it by --data.")
    given = {name: getattr(config, name) for name in OPTIONS}
    path = "" if config.data == ("world",) else config.data[0]
    environment = open_environment(StreamConfig(environment=config.suite, **given), path)

    def make() -> list[Task]:
        left = Counter()
        tasks = []
        for task in environment.tasks():
            left[task.kind] += 1
            tasks += [task] if left[task.kind] <= config.n else []
        return tasks

    return [Column("", environment.most_steps, make)]


# ---------------------------------------------------------------- MemoryAgentBench


def _memoryagentbench(config: EvalConfig, codec: Callable[[], Codec]) -> list[Column]:
    """Make a column of each source, as long as its longest context in tokens of the model."""
    if config.data == ("world",) or len(config.data) > 1:
        raise UserError(f"--suite {config.suite} wants one of its files: name it by --data.")
    (path,) = config.data
    tasks, said = memoryagentbench.choose(memoryagentbench.load(path), config.source_split)
    memoryagentbench.check_metric(tasks)
    for sentence in said:
        say(sentence, "yellow")

    def make(source: str) -> list[Task]:
        of_source = memoryagentbench.choose(memoryagentbench.load(path), source)[0]
        return memoryagentbench.some(of_source, config.n)

    lengths: dict[str, int] = {}
    for source, text in dict.fromkeys((task.kind, task.text) for task in tasks):
        lengths[source] = max(lengths.get(source, 0), len(codec().encode(text)))
    return [Column(name, n, partial(make, name)) for name, n in lengths.items()]


# ---------------------------------------------------------------- dated sessions


def _ledger(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    def make(length: int) -> list[Task]:
        return [*ledger.make_questions(config.seed, config.n, length, config.split)]

    return [Column(ledger.KIND, length, partial(make, length)) for length in lengths]


def _conversations(config: EvalConfig) -> list[Column]:
    """Make one column of all questions: its cells are the kinds, side by side, so that what an
    agent makes of a conversation serves all of them. Of each kind the first `n` are asked, but for
    those that the metric leaves out. Kinds without a question are said at once."""
    (source,) = config.data if len(config.data) == 1 else ("",)
    if not source or source == "world":
        raise UserError(f"--suite {config.suite} wants one file: name it by --data.")
    chosen = f"#{config.source_split}" if config.source_split else ""
    found = episodes.conversations_of(f"{config.suite}:{source}{chosen}")
    metric = episodes.metric_of(found.kind, config.metric)
    asked = [probe for c in found.conversations for probe in c.probes]
    split_off = "/" in config.source_split and not found.adversarial
    abstaining = not split_off and 5 not in metric.leaves_out
    found.say_missing(asked, abstaining, "is in it, none will be asked")

    def make() -> list[Task]:
        left = Counter()
        tasks = []
        for task in episodes.all_questions(found, metric):
            left[task.kind] += 1
            tasks += [task] if left[task.kind] <= config.n else []
        return tasks

    return [Column("", max(len(c.sessions) for c in found.conversations), make)]


# ---------------------------------------------------------------- files as they are


class _File(NamedTuple):
    path: str
    question: str
    length: int
    unit: str


def _files(config: EvalConfig) -> tuple[str, list[Column]]:
    """Make one column of each file; return their common unit of lengths too."""

    def read(path: str) -> list[Task]:
        return readers.read(path, n=config.n)

    files = [_describe(path, read(path)) for path in config.data]
    if len(units := {file.unit for file in files}) > 1:
        raise UserError(
            "RULER's sets are measured in tokens, the other files in documents: "
            "evaluate them apart."
        )
    times = Counter((file.question, file.length) for file in files)
    columns = []
    for file in files:
        name = file.question
        if times[name, file.length] > 1:
            name += f", {'/'.join(Path(file.path).parts[-2:])}"
        # Read again on demand: the texts of all files together may exceed the memory
        columns.append(Column(name, file.length, lambda path=file.path: read(path)))
    if len({(column.question, column.length) for column in columns}) < len(columns):
        raise UserError(
            "Two files of --data have one name and length, their results could not be told apart: "
            "rename one."
        )
    return units.pop(), columns


def _describe(path: str, tasks: Sequence[Task]) -> _File:
    """Name the questions of a file and measure its longest document, in tokens or documents."""
    if all(task.tokens for task in tasks):
        unit, names, sizes = "tokens", {t.kind for t in tasks}, {t.tokens for t in tasks}
    else:
        unit = "documents"
        names, sizes = {t.dataset for t in tasks}, {t.n_documents for t in tasks}
    question = (len(names) == 1 and clean(names.pop())) or "questions"
    if len(sizes) > 1:  # e.g. HotpotQA's own questions: 2 to 10 passages, still one column
        question += f", {min(sizes)} to {max(sizes)} {unit}"
    return _File(path, question, max(sizes), unit)


# ---------------------------------------------------------------- sources of the generated suites


def question_files(config: EvalConfig, standard: str) -> list[str]:
    """Return the files of --data; by default, the held-out ones that `data get` downloaded."""
    if config.data != ("world",):
        return list(config.data)
    files = sorted(
        str(path)
        for path in Path("data", standard).rglob("*")
        if path.suffix in (".json", ".jsonl", ".parquet")
    )
    held_out = [path for path in files if Path(path).name.startswith(("validation", "dev", "test"))]
    if not held_out:
        raise UserError(
            "Give --data, questions with their own paragraphs, or download some first: "
            f"python cli.py data get {standard}."
        )
    return held_out


def select_split(tasks: Sequence[Task], split: str) -> list[Task]:
    """Return the tasks of one split of the source, "" for all; UserError if there are none."""
    selected = [task for task in tasks if not split or task.split == split]
    if not selected:
        splits = ", ".join(sorted({task.split for task in tasks})) or "none"
        raise UserError(f"There is no split {split!r}; there are {splits}.")
    return selected


def read_filler(files: Sequence[str]) -> Pool | None:
    """Read further passages {title, text} into one pool of all files; None without files."""
    if not files:
        return None
    pools = [readers.read_passages(file) for file in files]
    titles = [title for pool in pools for title in pool.titles]
    return Pool(titles, [text for pool in pools for text in pool.texts])


# ---------------------------------------------------------------- RULER-HQA


def _ruler_hqa(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    """Make a column of each file and length; the questions of a file are the same at every
    length."""
    extra = read_filler(config.filler)
    evidence = Evidence(config.evidence_order, config.min_distance)
    columns = []
    for file in question_files(config, "hotpotqa"):
        questions = select_split(readers.read(file), config.source_split)
        n = min(config.n, len(questions))
        name = clean(questions[0].dataset or Path(file).name.partition(".")[0])
        if not evidence.anywhere:  # other questions than those of published numbers: another name
            name += f", evidence {evidence.order} {evidence.min_distance:g}"

        def column(length: int, questions=questions, n=n, name=name) -> Column:
            def make() -> list[Task]:
                return hqa.make_tasks(
                    questions, length, n, extra, config.seed, config.compat_seed4, evidence, lengths
                )

            return Column(name, length, make)

        columns += [column(length) for length in lengths]
    if len({(column.question, column.length) for column in columns}) < len(columns):
        raise UserError("Two files of --data hold questions of one dataset: evaluate them apart.")
    return sorted(columns, key=lambda column: column.length)


# ---------------------------------------------------------------- SQuAD's paragraphs among others


def passage_columns(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    """Make a column of each length; the questions are the same at every length."""
    if config.data == ("world",):
        raise UserError(
            "Give --data, a file of SQuAD's form: questions with the paragraph of each."
        )
    if len(config.data) > 1:
        raise UserError("Passages are made of one file of --data: evaluate several apart.")
    is_test = passages.article_rule(config.test_articles)
    questions = passages.split_by_article(readers.read(config.data[0]), is_test)
    name = clean(questions[0].dataset or "questions")
    if config.source_split:
        name += f", {config.source_split} articles"
    return _among_others(config, lengths, questions, name)


def fact_columns(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    """Make a column of each length of a file's one-fact questions (tasks/facts.py)."""
    if config.data == ("world",):
        raise UserError(
            "Give --data, a file of 2WikiMultiHopQA's or MuSiQue's questions with their paragraphs."
        )
    if len(config.data) > 1:
        raise UserError("Facts are made of one file of --data: take several apart.")
    questions = facts.read(config.data[0], config.source_split)
    name = clean(f"{questions[0].dataset or 'questions'}, one fact")
    return _among_others(config, lengths, questions, name)


def _among_others(
    config: EvalConfig, lengths: Sequence[int], questions: Sequence[Task], name: str
) -> list[Column]:
    """Make a column of each length of questions that come with one paragraph each."""
    n = min(config.n, len(select_split(questions, config.source_split)))
    extra = read_filler(config.filler)

    def column(length: int) -> Column:
        def make() -> list[Task]:
            return passages.make_tasks(
                questions,
                length,
                n,
                extra,
                config.seed,
                config.source_split,
                lengths,
                config.together,
            )

        return Column(name, length, make)

    return [column(length) for length in lengths]


# ---------------------------------------------------------------- RULER


def haystack_texts(files: Sequence[str], tasks: Sequence[Task], extra: Pool | None) -> list[str]:
    """Return running text for RULER's essay tasks: of the files, else of the passages at hand."""
    if files:
        return [text for file in files for text in readers.read_texts(file)]
    pools = {id(task.pool): task.pool for task in tasks if task.pool}
    pools |= {id(extra): extra} if extra else {}
    return [text for pool in pools.values() for text in pool.texts]


def haystack_name(config: EvalConfig) -> str:
    """Name the sources of `haystack_texts`."""
    if config.haystack:
        return ", ".join(Path(file).name for file in config.haystack)
    sources = [*(config.data if config.data != ("world",) else ()), *config.filler]
    return f"passages of {', '.join(Path(file).name for file in sources)}"


def _ruler(config: EvalConfig, lengths: Sequence[int], codec: Callable[[], Codec]) -> list[Column]:
    """Make a column of each of RULER's tasks and length, in tokens of the evaluated model."""
    questions: list[Task] = []
    if config.data != ("world",):
        everything = [task for file in config.data for task in readers.read(file)]
        questions = select_split(everything, config.source_split)
    squad = readers.read(config.squad) if config.squad else []
    extra = read_filler(config.filler)
    texts = haystack_texts(config.haystack, questions, extra)
    kinds = select_ruler_tasks(config.ruler_tasks, texts, squad, questions)
    sentences = lru_cache(1)(lambda: ruler.sentences(texts))
    questions_of = {"qa_1": squad, "qa_2": questions}

    def column(kind: str, length: int) -> Column:
        def make() -> list[Task]:
            is_qa = kind in questions_of
            return ruler.make_tasks(
                kind,
                length,
                min(config.n, len(questions_of[kind])) if is_qa else config.n,
                codec(),
                config.seed,
                haystack=sentences() if kind in ESSAY else (),
                questions=questions_of[kind] if is_qa else (),
                extra=extra if is_qa else None,
            )

        return Column(kind, length, make)

    return [column(kind, length) for length in lengths for kind in kinds]


def select_ruler_tasks(
    names: Sequence[str], texts: Sequence[str], squad: Sequence[Task], questions: Sequence[Task]
) -> list[str]:
    """Return the requested tasks; by default, those whose sources are given.

    UserError: an unknown task, or one whose source is missing.
    """
    for kind in names:
        if kind not in (*ruler.KINDS, "all"):
            known = ", ".join(ruler.KINDS)
            raise UserError(f"Unknown task of RULER {kind!r}: choose among all, {known}.")
    missing = {kind: "--haystack, essays or other running text" for kind in ESSAY if not texts}
    missing |= {} if squad else {"qa_1": "--squad, a file of SQuAD's form"}
    missing |= {} if questions else {"qa_2": "--data, HotpotQA's questions with their paragraphs"}
    requested = list(ruler.KINDS) if "all" in names else list(names)
    for kind in requested:
        if kind in missing:
            raise UserError(f"{kind} needs {missing[kind]}.")
    return requested or [kind for kind in ruler.KINDS if kind not in missing]
