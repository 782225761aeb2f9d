"""`cli.py data`: download data sets, write the tasks of a suite as files, look at tasks."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from rich.text import Text as Styled

import suites
from config.errors import UserError, clean
from config.files import make_folder
from config.options import EMBEDDED, BuildConfig, GRPOConfig
from config.realmodels import base_of
from config.terminal import console, next_step, say
from data import Task
from models.packaged import ready
from suites import Suite, ledger
from suites._conversations import all_questions, conversations_of, is_conversations
from tasks import downloads, hub, readers, worlds, writers
from tokens.codec import Codec


def get(name: str, out: Path) -> None:
    """Download a data set and say what can be done with it."""
    if name == "embedder":
        from models.embedder import fetch_embedder

        place = f"hf:{fetch_embedder(out)}"
        say(f"The embedder: --embedder {place}")
        return next_step("find experiences by it", "stream", "--embedder", place)
    if name == "os-root":
        from tasks.sandbox import make_system

        make_system(say)
        return next_step("work in it", "stream", "--suite", "llb-os")
    downloads.get(name, out, say)
    first, *more = (out / name / file.name for file in downloads.SOURCES[name][2])
    if name != "ruler-assets":
        return next_step("look at it", "data", "look", first)
    questions, essays = more
    words = questions, "ruler", "--suite", "ruler", "--squad", first, "--haystack", essays
    next_step("make sets of it", "data", "build", *words)


def show_tasks(file: str, n: int, sections: int | None = None) -> None:
    """Print the first n tasks of a file, or of a generated source, and a count of all by kind.

    sections: of a generated document, or sessions; None: 2 or 6. Of conversations that are read
    from a file every question is a task.
    """
    generated = file in ("world", ledger.KIND)
    if file == "world":
        sections = 2 if sections is None else sections
        if sections < 1:
            raise UserError(f"There are no questions about {sections} sections: give at least 1.")
        tasks = list(worlds.make_tasks(0, n, sections, "two_hop"))
    elif generated:
        tasks = list(ledger.make_questions(0, n, 6 if sections is None else sections))
    elif is_conversations(file):
        tasks = all_questions(conversations_of(file))
    else:
        tasks = readers.read(hub.pin(file, say))
    for task in tasks[:n]:
        _print_task(task)
    words = () if file == "world" else ("--data", file)
    if not generated:
        counts = Counter(task.kind for task in tasks).most_common(8)
        kinds = ", ".join(f"{count} {kind or 'of no kind'}" for kind, count in counts)
        say(f"\n{len(tasks)} tasks: {kinds}")
        if len(tasks) < GRPOConfig().tasks_per_step[0]:
            words += ("--tasks-per-step", len(tasks))
    next_step("train on them", "train", *words)


def _print_task(task: Task) -> None:
    document = clean(task.document)
    excerpt = f"{document[:600]} [...] {document[-600:]}" if len(document) >= 1200 else document
    console.rule(Styled(clean(task.id)))
    say(excerpt)
    facts = [f"kind {task.kind}"] if task.kind else []
    if task.order:
        titled = task.pool and task.pool.frame == "documents"
        facts.append(f"{len(task.order)} {'documents' if titled else 'passages'}")
    if task.gold:
        facts.append(f"evidence at {', '.join(str(k + 1) for k in task.gold)}")
    facts.append(f"{len(document):,} characters")
    say(f"\nquestion  {task.question}\nanswers   {' | '.join(task.answers)}")
    say(f"about     {', '.join(facts)}")


def build_sets(data: Sequence[str], out: Path, config: BuildConfig, suite: Suite) -> None:
    """Write the tasks of a suite, one file per column: OUT/NAME_LENGTH.jsonl.gz.

    Tasks that share no pool of passages are written with their texts, as .json. data: the files of
    questions that the user names. Nothing is written unless all columns can be.
    """
    data = tuple(hub.pin(file, say) for file in data)
    suite = hub.pinned(suite, say)
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
