"""The commands of `cli.py data`: look, build, build-ruler, filter.

Holds: their bodies. Leaves out: forms of files (tasks/readers.py, tasks/writers.py).
Exercise it: `python cli.py data look FILE`. Read next: tasks/hqa.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

from rich.text import Text as Styled

from agents import find
from config.errors import UserError, clean
from config.files import make_folder
from config.options import EMBEDDED, EvalConfig
from config.terminal import bar, console
from engines.open import codec_of, fingerprint, open_engine
from tasks import hqa, readers, suites, worlds, writers
from tasks.hqa import Evidence

# ---------------------------------------------------------------- data


def show_tasks(
    file: str, form: str | None, pool: Path | None, n: int, kind: str, sections: int
) -> None:
    """The first n tasks and what there is in all."""
    if file == "world":
        if kind not in worlds.KINDS:
            raise UserError(
                f"Unknown kind of question {kind!r}: choose one of {', '.join(worlds.KINDS)}."
            )
        if sections < 1:
            raise UserError(f"A document has at least 1 section, not {sections}.")
        tasks = list(worlds.make_tasks(0, n, sections, kind))
    else:
        tasks = readers.read(file, form, pool)
    for task in tasks[:n]:
        document = clean(task.document)
        console.rule(Styled(clean(task.id)))
        console.print(
            Styled(
                document if len(document) < 1200 else f"{document[:600]} [...] {document[-600:]}"
            )
        )
        console.print(
            Styled(clean(f"\nquestion  {task.question}\nanswers   {' | '.join(task.answers)}"))
        )
        about = [
            f"kind {task.kind}" * bool(task.kind),
            f"{len(task.order)} {'documents' if task.pool and task.pool.frame == 'documents' else 'passages'}"
            * bool(task.order),
        ]
        about += [
            f"evidence at {', '.join(str(k + 1) for k in task.gold)}" * bool(task.gold),
            f"{len(document):,} characters",
        ]
        console.print(Styled(clean("about     " + ", ".join(filter(None, about)))))
    if file != "world":
        kinds = ", ".join(
            f"{count} {kind or 'of no kind'}"
            for kind, count in Counter(t.kind for t in tasks).most_common(8)
        )
        console.print(Styled(clean(f"\n{len(tasks)} tasks: {kinds}")))


def build_hqa(
    file: Path,
    out: Path,
    documents: tuple[int, ...],
    n: int,
    extra: Path | None,
    split: str,
    seed: int,
    compat_seed4: bool,
    evidence: Evidence = Evidence(),
) -> None:
    """RULER-HQA sets, one file per length, the same questions in each; nothing is written unless all lengths can be."""
    if not documents:
        raise UserError(
            "No length is given: --documents takes numbers of documents, such as 50,200."
        )
    questions = suites.select_split(readers.read(file), split)
    pool = readers.read_passages(extra) if extra else None
    n = min(n, len(questions))
    sets = {
        d: hqa.make_tasks(questions, d, n, pool, seed, compat_seed4, evidence, documents)
        for d in documents
    }
    make_folder(out)
    asked = (
        {}
        if evidence.anywhere
        else {"evidence_order": evidence.order, "min_distance": evidence.min_distance}
    )
    for d, tasks in sets.items():
        path = out / f"hqa_{d}.jsonl.gz"
        writers.write_built(
            path, tasks, source=file.name, seed=seed, compat_seed4=compat_seed4, **asked
        )
        console.print(
            f"{path}: {len(tasks)} questions among {d} documents, {path.stat().st_size / 2**20:.1f} MiB"
        )


def build_ruler(out: Path, config: EvalConfig, tokenizer: str, trust_remote_code: bool) -> None:
    """RULER's tasks, one file a task and length; `config` says which, as for `eval --suite ruler`."""
    codec = codec_of(tokenizer, False, trust_remote_code)
    _, columns = suites.columns_of(config, lambda: codec)
    make_folder(out)
    for column in columns:
        path, tasks = out / f"{column.question}_{column.length}.jsonl.gz", column.make()
        about = {"tokenizer": tokenizer or "base_policy", "seed": config.seed}
        if column.question in suites.ESSAY:
            about["haystack"] = suites.haystack_name(config)
        writers.write_built(path, tasks, **about)
        console.print(
            f"{path}: {len(tasks)} questions at {column.length:,} tokens, {path.stat().st_size / 2**20:.1f} MiB"
        )


def is_known(row: dict, rule: str) -> bool:
    r"""Whether an answer without the document is right. rule: right = its box is; contains = or an
    accepted answer stands in it.

    As in MemAgent's filter.py, the answer's letters are looked for as they are, whatever the case:
    normalised, `\boxed{Paris, France}` would be one word with its box.
    """
    said = row["response"].lower()
    return row["reward"] > 0 or (
        rule == "contains" and any(gold.lower() in said for gold in row["answers"] if gold.strip())
    )


def filter_questions(
    file: Path,
    out: Path,
    model: str,
    samples: int,
    temperature: float,
    top_p: float,
    answer_tokens: int,
    rule: str,
    device: str,
    engine_name: str,
) -> None:
    """Drop the questions that a model answers without the document; which ones, and what it said, is kept beside OUT."""
    from agents.baselines import no_context
    from eval import evaluate
    from report.summary import bootstrap
    from rollout import Sampling

    tasks = readers.read(file)
    if rule not in ("right", "contains"):
        raise UserError(f"The rule must be right or contains, not {rule!r}.")
    if (
        tasks[0].pool is None
        or any(task.pool is not tasks[0].pool for task in tasks)
        or out.suffix == ".parquet"
    ):
        raise UserError(
            f"{file} has no paragraphs to keep, or {out} is no name of JSON lines: filter questions, before `data build`."
        )
    samples = samples if temperature > 0 else 1
    make_folder(out.parent)
    _, config = find.resolve("default", model or EMBEDDED, {}, {"final_tokens": answer_tokens})
    engine = open_engine(
        model, device, "auto", False, 256, config.thinking, engine_name, 1024 + answer_tokens
    )
    with contextlib.closing(engine), engine.awake(), bar("questions") as progress:
        shown = progress.add_task(
            "asking without the document", total=len(tasks) * samples, note=""
        )
        rows = evaluate(
            engine,
            no_context,
            tasks,
            config,
            Sampling(temperature, top_p),
            name="none",
            length=0,
            rows=out.with_name(f"{out.name}.rows.jsonl"),
            model=fingerprint(model, engine.dtype),
            samples=samples,
            progress=lambda row: progress.advance(shown),
        )
    known = {row["id"] for row in rows if is_known(row, rule)}
    failed = len({row["id"] for row in rows if row["error"]} - known)
    kept = [task for task in tasks if task.id not in known]
    low, high = bootstrap([float(task.id in known) for task in tasks])
    share = f"{len(known)} of {len(tasks)} questions ({len(known) / len(tasks):.1%}, 95 % interval {low:.1%} to {high:.1%})"
    if not kept:
        raise UserError(f"The model answers {share} without the document: none is left to write.")
    writers.write_built(
        out,
        kept,
        source=file.name,
        no_context=str(model or "base_policy"),
        rule=rule,
        samples=samples,
        dropped=len(known),
    )
    unasked = f" Of these {failed} are there because asking failed." if failed else ""
    console.print(
        f"{share} are answered without the document and dropped; {len(kept)} are in {out}.{unasked}"
    )
