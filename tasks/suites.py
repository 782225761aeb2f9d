"""Suites: which questions an evaluation asks, at which lengths, made when it gets to them.

Holds: `Column`, `columns_of` (generated English, files, RULER-HQA, RULER), haystacks. Leaves out: who answers (commands/).
No torch. Exercise it: `python cli.py eval --suite ruler-hqa --data FILE --lengths 50,200`. Read next: commands/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from config.errors import UserError, clean
from config.options import EvalConfig
from data import Pool, Task
from tasks import hqa, readers, ruler, worlds
from tasks.hqa import Evidence
from tokens.codec import Codec

ESSAY = tuple(kind for kind, settings in ruler.NIAH.items() if settings.haystack == "essay")
LENGTHS = {
    "": (4, 16, 64),
    "ruler-hqa": (50, 200, 800),
    "ruler": (4096, 8192, 16384),
}  # where --lengths does not say


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the result: a kind of question at one length. `make` gives its tasks, the same ones every time."""

    question: str
    length: int
    make: Callable[[], list[Task]]


def columns_of(config: EvalConfig, codec: Callable[[], Codec]) -> tuple[str, list[Column]]:
    """What is asked: (unit of lengths, columns). Sources are read now, so that mistakes show before a model is loaded."""
    lengths = config.lengths or LENGTHS[config.suite]
    if config.suite == "ruler-hqa":
        return "documents", _ruler_hqa(config, lengths)
    if config.suite == "ruler":
        return "tokens", _ruler(config, lengths, codec)
    if config.data == ("world",):
        return "sections", _world(config, lengths)
    return _files(config)


def _world(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    for kind in config.kinds:
        if kind not in worlds.KINDS:
            raise UserError(
                f"Unknown kind of question {kind!r}: choose among {', '.join(worlds.KINDS)}."
            )
    if config.split not in worlds.SPLITS:
        raise UserError(
            f"Generated English has the splits {', '.join(worlds.SPLITS)}, not {config.split!r}."
        )

    def column(kind: str, length: int) -> Column:
        return Column(
            kind,
            length,
            lambda: list(worlds.make_tasks(config.seed, config.n, length, kind, config.split)),
        )

    return [column(kind, length) for length in lengths for kind in config.kinds]


def _files(config: EvalConfig) -> tuple[str, list[Column]]:
    """Files as they are: one column each."""
    found: list[tuple[str, str, int, bool]] = []  # file, question, length, whether that is tokens

    def read(
        file: str,
    ) -> list[
        Task
    ]:  # again when it is asked: with their texts, files of all lengths may be more than the memory holds
        return readers.read(file)[: config.n]

    for file in config.data:
        tasks = read(file)
        in_tokens = all(task.tokens for task in tasks)
        names = {task.kind if in_tokens else task.dataset for task in tasks}
        sizes = {task.tokens if in_tokens else task.n_documents for task in tasks}
        question = (len(names) == 1 and clean(names.pop())) or "questions"
        if (
            len(sizes) > 1
        ):  # HotpotQA's own questions have 2 to 10 passages: one column, which says so
            question += f", {min(sizes)} to {max(sizes)} {'tokens' if in_tokens else 'documents'}"
        found.append((file, question, max(sizes), in_tokens))
    units = {"tokens" if in_tokens else "documents" for _, _, _, in_tokens in found}
    if len(units) > 1:
        raise UserError(
            "RULER's sets are measured in tokens, the other files in documents: evaluate them apart."
        )
    times = Counter((question, length) for _, question, length, _ in found)
    asked = []
    for file, question, length, _ in found:
        name = (
            question
            if times[question, length] == 1
            else f"{question}, {'/'.join(Path(file).parts[-2:])}"
        )
        asked.append(Column(name, length, lambda file=file: read(file)))
    if len({(a.question, a.length) for a in asked}) < len(asked):
        raise UserError(
            "Two files of --data have one name and length, their results could not be told apart: rename one."
        )
    return units.pop(), asked


def question_files(config: EvalConfig, standard: str) -> list[str]:
    """The files of --data; without any, the held-out ones of what `data get` has put into its folder."""
    if config.data != ("world",):
        return list(config.data)
    found = sorted(
        str(p)
        for p in Path("data", standard).rglob("*")
        if p.suffix in (".json", ".jsonl", ".parquet")
    )
    found = [path for path in found if Path(path).name.startswith(("validation", "dev", "test"))]
    if not found:
        raise UserError(
            f"Give --data, questions with their own paragraphs, or download some first: python cli.py data get {standard}."
        )
    return found


def select_split(tasks: Sequence[Task], split: str) -> list[Task]:
    """The tasks of one split of the source, "" for all."""
    kept = [task for task in tasks if not split or task.split == split]
    if not kept:
        raise UserError(
            f"There is no split {split!r}; there are {', '.join(sorted({t.split for t in tasks})) or 'none'}."
        )
    return kept


def read_filler(files: Sequence[str]) -> Pool | None:
    """Further passages {title, text}, one pool of all files."""
    pools = [readers.read_passages(file) for file in files]
    return (
        Pool([t for p in pools for t in p.titles], [t for p in pools for t in p.texts])
        if pools
        else None
    )


def _ruler_hqa(config: EvalConfig, lengths: Sequence[int]) -> list[Column]:
    """The same questions of each file at every length."""
    extra, evidence = (
        read_filler(config.filler),
        Evidence(config.evidence_order, config.min_distance),
    )
    columns = []
    for file in question_files(config, "hotpotqa"):
        questions = select_split(readers.read(file), config.source_split)
        n = min(config.n, len(questions))
        name = clean(questions[0].dataset or Path(file).name.partition(".")[0])
        if not evidence.anywhere:  # another kind of question, which published numbers are not about
            name += f", evidence {evidence.order} {evidence.min_distance:g}"

        def column(length: int, questions=questions, n=n, name=name) -> Column:
            return Column(
                name,
                length,
                lambda: hqa.make_tasks(
                    questions, length, n, extra, config.seed, config.compat_seed4, evidence, lengths
                ),
            )

        columns += [column(length) for length in lengths]
    if len({(a.question, a.length) for a in columns}) < len(columns):
        raise UserError("Two files of --data hold questions of one dataset: evaluate them apart.")
    return sorted(columns, key=lambda a: a.length)


def haystack_texts(files: Sequence[str], tasks: Sequence[Task], extra: Pool | None) -> list[str]:
    """Running text for RULER's essay tasks: of the files, else the passages that are there anyway."""
    if files:
        return [text for file in files for text in readers.read_texts(file)]
    pools = {id(task.pool): task.pool for task in tasks if task.pool} | (
        {id(extra): extra} if extra else {}
    )
    return [text for pool in pools.values() for text in pool.texts]


def haystack_name(config: EvalConfig) -> str:
    """What `haystack_texts` reads."""
    passages = [*(config.data if config.data != ("world",) else ()), *config.filler]
    return (
        ", ".join(Path(file).name for file in config.haystack)
        or f"passages of {', '.join(Path(file).name for file in passages)}"
    )


def _ruler(config: EvalConfig, lengths: Sequence[int], codec: Callable[[], Codec]) -> list[Column]:
    """RULER's tasks at lengths in tokens of the model that is asked."""
    questions = (
        select_split(
            [task for file in config.data for task in readers.read(file)], config.source_split
        )
        if config.data != ("world",)
        else []
    )
    squad, extra = readers.read(config.squad) if config.squad else [], read_filler(config.filler)
    texts = haystack_texts(config.haystack, questions, extra)
    kinds = select_ruler_tasks(config.ruler_tasks, texts, squad, questions)
    sentences = lru_cache(1)(lambda: ruler.sentences(texts))
    sources_of = {"qa_1": squad, "qa_2": questions}

    def column(kind: str, length: int) -> Column:
        def make() -> list[Task]:
            n = min(config.n, len(sources_of[kind])) if kind in sources_of else config.n
            return ruler.make_tasks(
                kind,
                length,
                n,
                codec(),
                config.seed,
                haystack=sentences() if kind in ESSAY else (),
                questions=sources_of.get(kind, ()),
                extra=extra if kind in sources_of else None,
            )

        return Column(kind, length, make)

    return [column(kind, length) for length in lengths for kind in kinds]


def select_ruler_tasks(
    asked: Sequence[str], texts: Sequence[str], squad: Sequence[Task], questions: Sequence[Task]
) -> list[str]:
    """The tasks asked for; without any, those whose sources are there. One whose source is missing is refused by name."""
    lacking = {kind: "--haystack, essays or other running text" for kind in ESSAY if not texts}
    lacking |= {} if squad else {"qa_1": "--squad, a file of SQuAD's form"}
    lacking |= {} if questions else {"qa_2": "--data, HotpotQA's questions with their paragraphs"}
    for kind in asked:
        if kind not in (*ruler.KINDS, "all"):
            raise UserError(
                f"Unknown task of RULER {kind!r}: choose among all, {', '.join(ruler.KINDS)}."
            )
    wanted = list(ruler.KINDS) if "all" in asked else list(asked)
    if missing := [kind for kind in wanted if kind in lacking]:
        raise UserError(f"{missing[0]} needs {lacking[missing[0]]}.")
    return wanted or [kind for kind in ruler.KINDS if kind not in lacking]
