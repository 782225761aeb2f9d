"""The commands of `cli.py data`: look, build, filter.

Holds: `show_tasks`, `build_sets`, `filter_questions`.
Leaves out: forms of files (tasks/readers.py, tasks/writers.py).
Exercise it: `python cli.py data look FILE`. Read next: tasks/hqa.py.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from rich.text import Text as Styled

import suites
from agents import find
from config.errors import UserError, clean
from config.files import make_folder
from config.options import EMBEDDED, BuildConfig, EvalConfig, FilterConfig, GRPOConfig
from config.realmodels import base_of
from config.terminal import bar, console, next_step, say
from data import Task
from engines.open import fingerprint, open_reader
from models.packaged import ready
from suites import Suite
from tasks import episodes, hub, ledger, readers, worlds, writers
from tokens.codec import Codec

# ---------------------------------------------------------------- look


def show_tasks(file: str, pool: Path | None, n: int, kind: str, sections: int | None) -> None:
    """Print the first n tasks of a file, or of a generated source, and a count of all by kind.

    sections: of a generated document, or sessions; None: 2 or 6. Of conversations that are read
    from a file every question is a task.
    """
    if file == "world":
        sections = 2 if sections is None else sections
        if kind not in worlds.KINDS or sections < 1:
            known = ", ".join(worlds.KINDS)
            raise UserError(
                f"There are no questions {kind!r} about {sections} sections: a document has at "
                f"least 1, and questions are {known}."
            )
        tasks = list(worlds.make_tasks(0, n, sections, kind))
    elif file == ledger.KIND:
        tasks = list(ledger.make_questions(0, n, 6 if sections is None else sections))
    elif episodes.is_conversations(file):
        tasks = episodes.all_questions(episodes.conversations_of(file))
    else:
        tasks = readers.read(hub.pin(file, say), pool)
    for task in tasks[:n]:
        _print_task(task)
    if file not in ("world", ledger.KIND):
        counts = Counter(task.kind for task in tasks).most_common(8)
        kinds = ", ".join(f"{count} {kind or 'of no kind'}" for kind, count in counts)
        say(f"\n{len(tasks)} tasks: {kinds}")
    words = () if file == "world" else ("--data", file)
    if file not in ("world", ledger.KIND) and len(tasks) < GRPOConfig().tasks_per_step[0]:
        words += ("--tasks-per-step", len(tasks))
    next_step("train on them", "train", *words)


def _print_task(task: Task) -> None:
    document = clean(task.document)
    excerpt = f"{document[:600]} [...] {document[-600:]}" if len(document) >= 1200 else document
    console.rule(Styled(clean(task.id)))
    say(excerpt)
    answers = " | ".join(task.answers)
    say(f"\nquestion  {task.question}\nanswers   {answers}")
    facts = [f"kind {task.kind}"] if task.kind else []
    if task.order:
        titled = task.pool and task.pool.frame == "documents"
        facts.append(f"{len(task.order)} {'documents' if titled else 'passages'}")
    if task.gold:
        facts.append(f"evidence at {', '.join(str(k + 1) for k in task.gold)}")
    facts.append(f"{len(document):,} characters")
    say(f"about     {', '.join(facts)}")


# ---------------------------------------------------------------- build


def build_sets(data: Sequence[str], out: Path, config: BuildConfig, suite: Suite) -> None:
    """Write the tasks of a suite, one file per column: OUT/NAME_LENGTH.jsonl.gz.

    Tasks that share no pool of passages are written with their texts, as .json. data: the files of
    questions that the user names. Nothing is written unless all columns can be.
    """
    data = tuple(hub.pin(file, say) for file in data)
    suite = suites.pinned(suite, say)
    scope = suites.scope_of(suite, data, config, cache(partial(_codec, config)))
    tokenizer = {"tokenizer": config.tokenizer or "base_policy"} if suite.unit == "tokens" else {}
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    written: list[tuple[Path, str]] = []
    with tempfile.TemporaryDirectory(dir=place, prefix=".build-") as folder:
        for column in suites.columns(suite, scope):
            tasks = column.make()
            if any(type(task) is not Task for task in tasks):
                kind = f"the tasks of the suite {suite.label} are judged by code, which no file has"
                raise UserError(f"No set can be built: {kind}.")
            name = re.sub(r"[^\w.-]+", "-", suite.file_name or column.question)
            pool = tasks[0].pool
            pooled = pool is not None and all(task.pool is pool for task in tasks)
            path = Path(folder, f"{name}_{column.length}.json{'l.gz' if pooled else ''}")
            if path.exists():
                raise UserError(f"Two sets would be {path.name}: build them apart.")
            if pooled:
                writers.write_built(path, tasks, **tokenizer, **suite.about(scope, column))
            else:
                writers.write_eval_json(path, tasks)
            at = f"{'at' if suite.unit == 'tokens' else 'among'} {column.length:,} {suite.unit}"
            size = path.stat().st_size / 2**20
            written.append((path, f"{len(tasks)} questions {at}, {size:.1f} MiB"))
        make_folder(out)
        for path, about in written:
            path.replace(out / path.name)
            say(f"{out / path.name}: {about}")
    next_step("look at them", "data", "look", out / written[0][0].name)


def _codec(config: BuildConfig) -> Codec:
    model = ready(base_of(config.tokenizer or EMBEDDED))
    return Codec.load(model, trust_remote_code=config.trust_remote_code)


# ---------------------------------------------------------------- filter


def is_known(row: dict, rule: str) -> bool:
    r"""Tell whether a response without the document shows that its question is known.

    As in MemAgent's filter.py, the letters of the answer are sought unchanged but for case:
    normalised, `\boxed{Paris, France}` would be one word with its box.
    """
    if row["reward"] > 0:
        return True
    response = row["response"].lower()
    answers = (answer.lower() for answer in row["answers"] if answer.strip())
    return rule == "contains" and any(answer in response for answer in answers)


NO_CONTEXT = "none"  # the agent that is given the question alone


def filter_questions(file: Path, out: Path, config: FilterConfig) -> None:
    """Drop the questions that a model answers without the document.

    Its responses are kept beside OUT; a stopped call is resumed from them.
    """
    from report.summary import bootstrap

    file = Path(hub.pin(file, say))
    tasks = readers.read(file)
    pool = tasks[0].pool
    if pool is None or any(task.pool is not pool for task in tasks) or out.suffix == ".parquet":
        reason = f"{file} has no paragraphs to keep, or {out} is no name of JSON lines"
        raise UserError(f"{reason}: filter questions, before `data build`.")
    make_folder(out.parent)
    # greedy responses would be all the same
    samples = config.samples if config.temperature > 0 else 1
    rows = _ask_without_document(tasks, out, config, samples)
    known = {row["id"] for row in rows if is_known(row, config.rule)}
    failed = {row["id"] for row in rows if row["error"]} - known
    unknown = [task for task in tasks if task.id not in known]
    low, high = bootstrap([float(task.id in known) for task in tasks])
    share = (
        f"{len(known)} of {len(tasks)} questions ({len(known) / len(tasks):.1%}, "
        f"95 % interval {low:.1%} to {high:.1%})"
    )
    if not unknown:
        raise UserError(f"The model answers {share} without the document: none is left to write.")
    source = str(file) if hub.is_hub(file) else file.name
    about = {"source": source, "no_context": config.model or "base_policy", "rule": config.rule}
    writers.write_built(out, unknown, **about, samples=samples, dropped=len(known))
    failures = f" Of these {len(failed)} are there because asking failed." if failed else ""
    say(
        f"{share} are answered without the document and dropped; "
        f"{len(unknown)} are in {out}.{failures}"
    )
    next_step("make sets of them", "data", "build", out, out.with_suffix(""))


def _ask_without_document(
    tasks: Sequence[Task], out: Path, config: FilterConfig, samples: int
) -> list[dict]:
    """Return the graded rows of the responses, which are kept in OUT.rows.jsonl."""
    from eval import Conditions, evaluate
    from report.rows import Cell
    from rollout import Sampling

    settings = {"final_tokens": config.answer_tokens}
    _, agent = find.resolve("default", config.model or EMBEDDED, {}, settings, NO_CONTEXT)
    reader = EvalConfig(model=config.model, device=config.device, engine=config.engine)
    engine = open_reader(reader, [agent])
    with contextlib.closing(engine), engine.awake(), bar("questions") as progress:
        total = len(tasks) * samples
        line = progress.add_task("asking without the document", total=total, note="")
        return evaluate(
            engine,
            agent,
            tasks,
            Sampling(config.temperature, config.top_p),
            Cell(NO_CONTEXT, "", "", 0),
            out.with_name(f"{out.name}.rows.jsonl"),
            Conditions(model=fingerprint(config.model, engine.dtype), samples=samples),
            lambda row: progress.advance(line),
        )
