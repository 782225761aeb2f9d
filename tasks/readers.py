"""Read tasks from a file of any known form.

Holds: `Record`, one function per form, `read`, `read_passages`, `from_text`. Leaves out: `Task` (data.py), writers.
Exercise it: `python cli.py data look FILE`. Read next: tasks/writers.py.

A file has a container (parquet, a JSON array, JSON lines; the last two also as .gz) and a form (the fields of its
records). `_records` knows the containers, `FORMS` the forms; any form may come in any container. A file that cannot
be read is a `UserError` that names the file, the line (or row, or item) and the reason.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from config.errors import UserError
from config.files import is_file
from data import FRAMES, Pool, Task

Passage = tuple[str, str]  # title, text
Document = (
    str | list[Passage] | list[int]
)  # as read: a text, passages, or numbers of passages in a pool

# ---- Reading: records and their fields ----

KINDS = {
    str: "a text",
    list: "a list",
    dict: "an object",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


@dataclass(slots=True)
class Record:
    """One record of a file. A field is given if it is there, of its kind and not empty; else a `UserError` names the place."""

    where: str  # e.g. "FILE, line 3"
    position: int  # in the file, from 0
    fields: dict

    def error(self, reason: str) -> UserError:
        return UserError(f"{self.where}: {reason}.")

    def get(self, name: str, kind: type, value: object = None) -> object:
        """The field, or `value` (a part of it) checked in its place."""
        value = self.fields.get(name) if value is None else value
        if value is None:
            raise self.error(f"the field '{name}' is missing")
        if type(value) is not kind:
            raise self.error(
                f"'{name}' must be {KINDS[kind]}, this is {KINDS.get(type(value), 'something else')}"
            )
        if kind is not int and not (value.strip() if kind is str else value):
            raise self.error(f"'{name}' is empty")
        return value

    def maybe(self, name: str, kind: type):
        """The field if it is there and not empty, else nothing of its kind."""
        return self.get(name, kind) if self.fields.get(name) not in (None, "", [], {}) else kind()

    def text(self, name: str, value: object = None) -> str:
        try:
            (text := self.get(name, str, value)).encode()
        except UnicodeEncodeError:
            raise self.error(
                f"'{name}' holds half of a surrogate pair (\\ud800 to \\udfff), which is no text"
            ) from None
        return text

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, at least one."""
        return tuple(
            self.text(name, "" if value is None else value) for value in self.get(name, list)
        )

    def inside(self, name: str, value: object = None) -> Record:
        return Record(self.where, self.position, self.get(name, dict, value))

    def places(self, name: str, values: object, n: int) -> tuple[int, ...]:
        """Positions among n things, from 0; none at all is fine."""
        values = [] if values is None else values
        if not isinstance(values, list) or any(
            type(value) is not int or not 0 <= value < n for value in values
        ):
            raise self.error(f"'{name}' must be a list of whole numbers from 0 to {n - 1}")
        return tuple(values)

    def task(
        self, question: str, answers: Sequence[str], gold: Sequence[int] = (), **labels: object
    ) -> Task:
        """A task still without its document. The record's own id, kind, dataset, split and level go before `labels`; the last resort
        for an id is the position in the file, by which MemAgent's results count too."""
        own = {
            label: self.fields.get(label) for label in ("id", "kind", "dataset", "split", "level")
        }
        labels = {
            label: str(value)
            for label, value in chain(labels.items(), own.items())
            if value is not None
        }
        num_docs, tokens = (
            n if type(n := self.fields.get(name)) is int and n > 0 else 0
            for name in ("num_docs", "tokens")
        )
        # a label may be blank, an id may not
        known = {"id": str(self.position)} | {
            label: self.text(label, value) if value.strip() or (label == "id" and value) else value
            for label, value in labels.items()
        }
        return Task(
            question=question,
            answers=tuple(answers),
            gold=tuple(gold),
            num_docs=num_docs,
            tokens=tokens,
            **known,
        )


def _records(path: Path) -> Iterator[Record]:
    """Every record of a parquet file, a JSON array or JSON lines.

    pyarrow reads parquet and decompresses. JSON is parsed line by line with the standard library: pyarrow.json (and `datasets` on
    top of it) cannot name the line of an error, turns answers such as "1994-05-01" into dates, and cannot hold HotpotQA's
    [title, [sentences]] pairs. Parquet does not go through `datasets` either: it reads with pyarrow too, into a copy on the disk,
    and would save none of the lines below.
    """
    import pyarrow as pa

    if not is_file(path):
        raise UserError(f"No file at {path}.")
    where = str(path)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = chain.from_iterable(
                batch.to_pylist() for batch in pq.ParquetFile(path).iter_batches(64)
            )
            for n, fields in enumerate(rows):
                yield Record(where := f"{path}, row {n + 1}", n, fields)
            return
        with io.BufferedReader(pa.input_stream(path)) as stream:
            start = stream.peek(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[":
                parsed = (
                    (f"{path}, item {n}", fields)
                    for n, fields in enumerate(_parse(stream.read(), path), 1)
                )
            elif SQUAD.match(start):
                parsed = _squad_items(_parse(stream.read(), path), path)
            else:
                parsed = (
                    (f"{path}, line {n}", _parse(line, path, n))
                    for n, line in enumerate(stream, 1)
                    if line.strip()
                )
            for n, (where, fields) in enumerate(parsed):  # `where` is for the error below, too
                if not isinstance(fields, dict):
                    raise UserError(
                        f"{where}: a record must be an object with named fields, this is {KINDS.get(type(fields), 'null')}."
                    )
                yield Record(where, n, fields)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last two: parquet
        raise UserError(
            f"{where}: the file cannot be read from here on, it may be damaged ({_one_line(error)})."
        ) from error


def _parse(raw: bytes, path: Path, line: int | None = None) -> object:
    """JSON of one line, or of a whole file when `line` is None (the error then finds its own)."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        line, reason = line or error.lineno, f"{error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        line, reason = (
            line or raw.count(b"\n", 0, error.start) + 1,
            f"not UTF-8, byte 0x{raw[error.start]:02x}",
        )
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, thousands of open brackets
        line, reason = line or 1, _one_line(error)
    raise UserError(f"{path}, line {line}: this is not JSON ({reason}).")


SQUAD = re.compile(
    rb'\{\s*"(version"\s*:\s*"[^"]*"\s*,\s*"data|data)"\s*:\s*\['
)  # one object that holds the whole file


def _squad_items(tree: object, path: Path) -> Iterator[tuple[str, dict]]:
    """SQuAD's tree of articles, paragraphs and questions as one record a question, with its paragraph."""
    file = Record(str(path), 0, tree if isinstance(tree, dict) else {})
    for n, article in enumerate(file.get("data", list), 1):
        article = Record(f"{path}, article {n}", 0, file.get("data", dict, article))
        for m, paragraph in enumerate(article.get("paragraphs", list), 1):
            where = f"{article.where}, paragraph {m}"
            of = Record(where, 0, article.get("paragraphs", dict, paragraph))
            for qa in of.get("qas", list):
                if of.get("qas", dict, qa).get("is_impossible"):
                    continue  # of SQuAD 2: its paragraph does not answer it
                yield (
                    where,
                    {
                        "title": article.fields.get("title") or f"Article {n}",
                        "context": of.text("context"),
                        **qa,
                    },
                )


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(". ")


# ---- Reading: forms. Each makes a task and its document out of one record ----


def _passage(r: Record) -> Passage:
    return r.text("title"), r.text("text")


def pool_of(passages: Iterable[Passage], frame: str = "documents") -> Pool:
    passages = list(passages)
    return Pool(
        [title for title, _ in passages] if frame == "documents" else [],
        [text for _, text in passages],
        frame,
    )


def _memagent(r: Record) -> tuple[Task, Document]:
    """MemAgent's training parquet: {prompt: [{role, content}], context, reward_model: {ground_truth: [..]}, extra_info}."""
    question = r.inside("prompt", r.get("prompt", list)[-1]).text("content")
    info = Record(r.where, r.position, r.maybe("extra_info", dict))
    answers = r.inside("reward_model").texts("ground_truth")
    return info.task(question, answers, dataset=r.fields.get("data_source")), r.text("context")


def _vime(r: Record) -> tuple[Task, Document]:
    """vime's training JSONL: {prompt: question, label: first answer, metadata: {context, ground_truth: [..], data_source}}."""
    m = r.inside("metadata")
    answers = m.texts("ground_truth") if m.maybe("ground_truth", list) else [r.text("label")]
    return m.task(r.text("prompt"), answers, dataset=m.fields.get("data_source")), m.text("context")


def _framed(text: str) -> list[Passage]:
    """The passages of a document in the frame "documents"; [] if it is not exactly that."""
    passages = [
        part.partition("\n")[::2] for part in re.split(r"(?:\A|\n\n)Document \d+:\n", text)[1:]
    ]
    shape, between = FRAMES["documents"]
    return (
        passages
        if between.join(shape(i, *passage) for i, passage in enumerate(passages, 1)) == text
        else []
    )


def _eval(r: Record) -> tuple[Task, Document]:
    """MemAgent's eval_N.json: {input, context, answers: [..]}. From 12,800 documents on the context is passage numbers. ReMemR1's
    eval_{data set}_N.json have {evidence_idx: positions of the evidence, from 0, in hop order, some twice; type; level} besides."""
    context = r.fields.get("context")
    if isinstance(context, list):  # some published files nest the numbers once more
        context = list(
            r.places(
                "context",
                context[0] if context and isinstance(context[0], list) else context,
                2**31,
            )
        )
    document = context if isinstance(context, list) and context else r.text("context")
    gold: tuple[int, ...] = ()
    if (
        (places := r.fields.get("evidence_idx"))
        and isinstance(document, str)
        and (passages := _framed(document))
    ):
        document, gold = (
            passages,
            tuple(dict.fromkeys(r.places("evidence_idx", places, len(passages)))),
        )
    named = re.match(r"eval_(\w*?[a-z]\w*?)_\d+", Path(r.where.rpartition(", ")[0]).name)
    labels = {"kind": r.fields.get("type"), "dataset": named and named[1]}
    return r.task(r.text("input"), r.texts("answers"), gold, **labels), document


def _ruler(r: Record) -> tuple[Task, Document]:
    """RULER's eval_{task}_{length}.json as MemAgent writes it: {input, context, outputs: [..], answer_prefix, length}."""
    name = Path(r.where.rpartition(", ")[0]).name.partition(".")[0].removeprefix("eval_")
    kind, _, length = name.rpartition("_")
    task = r.task(
        r.text("input"),
        r.texts("outputs"),
        kind=kind if length.isdecimal() else name,
        dataset="ruler",
    )
    return replace(task, tokens=int(length) if length.isdecimal() else 0), r.text("context")


def _own(r: Record) -> tuple[Task, Document]:
    """The user's own: {question, answers: [..] or answer: text, context: text} and, if wanted, id, kind, dataset, split."""
    answers = [r.text("answer")] if r.fields.get("answers") is None else r.texts("answers")
    return r.task(r.text("question"), answers), r.text("context")


def _glued(sentences: Iterable[str], dataset: str) -> str:
    """HotpotQA's sentences begin with their own blank; 2WikiMultiHopQA's have none, and are joined by one (spec rememr1.md 10)."""
    return ("" if dataset == "hotpotqa" else " ").join(sentences)


def _gold(titles: Sequence[str], named: Iterable[str]) -> list[int]:
    """Positions of the named titles, each once, in order; none where the document lacks one, as fullwiki's may: with a part of the
    evidence, nothing that is said of where it stands would be true."""
    named = [*dict.fromkeys(named)]
    return [titles.index(title) for title in named] if {*named} <= {*titles} else []


def _hotpotqa(r: Record) -> tuple[Task, Document]:
    """The official HotpotQA json: {_id, question, answer, supporting_facts: [[title, n]], context: [[title, [sentence]]], type}.

    2WikiMultiHopQA's has the same form, and `evidences` beside it. Their parquet on the hub has columns instead of pairs.
    """
    if isinstance(columns := r.fields.get("context"), dict) and "title" in columns:
        return _flashrag(r)  # the hub's columns
    document, dataset = [], "2wikimultihopqa" if "evidences" in r.fields else "hotpotqa"
    for pair in r.get("context", list):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], list)):
            raise r.error("'context' must hold pairs [title, [sentences]]")
        sentences = [r.text("context", sentence) for sentence in pair[1] if sentence != ""]
        document.append((r.text("context", pair[0]), _glued(sentences, dataset)))
    facts = r.maybe("supporting_facts", list)
    if not all(isinstance(fact, list) and fact for fact in facts):
        raise r.error("'supporting_facts' must hold pairs [title, sentence number]")
    titles = [title for title, _ in document]
    gold = _gold(titles, [r.text("supporting_facts", fact[0]) for fact in facts])
    labels = {"id": r.fields.get("_id"), "kind": r.fields.get("type"), "dataset": dataset}
    return r.task(r.text("question"), [r.text("answer")], gold, **labels), document


def _columns(r: Record, name: str, *columns: str) -> list[tuple]:
    """A table {column: [..]}, row by row; the first of `columns` that is there is the second member of the rows."""
    table = r.inside(name)
    second = next((column for column in columns if column in table.fields), columns[0])
    titles, values = table.texts("title"), table.get(second, list)
    if len(titles) != len(values):
        raise r.error(f"'{name}' has {len(titles)} titles and {len(values)} {second}")
    return list(zip(titles, values, strict=True))


def _flashrag(r: Record) -> tuple[Task, Document]:
    """FlashRAG's JSONL, with the document in `metadata`, and HotpotQA's parquet on the hub, with the same beside the question: {question, answer or golden_answers, context:
    {title: [..], sentences or content: [[..]]}, supporting_facts: {title: [..]}, type}."""
    m = r if "context" in r.fields else r.inside("metadata")
    path = Path(r.where.rpartition(", ")[0])  # nothing in a record tells them apart
    two = path.parent.name in ("2wiki", "2wikimultihopqa") or path.name.startswith("2wiki")
    dataset = "2wikimultihopqa" if two else "hotpotqa"
    document = []
    for title, sentences in _columns(m, "context", "sentences", "content"):
        if not isinstance(sentences, list):
            raise r.error("'context' must hold a list of sentences for every title")
        document.append(
            (title, _glued([m.text("context", s) for s in sentences if s != ""], dataset))
        )
    facts = Record(r.where, r.position, m.maybe("supporting_facts", dict)).maybe("title", list)
    gold = _gold(
        [title for title, _ in document], [m.text("supporting_facts", title) for title in facts]
    )
    answers = r.texts("golden_answers") if r.maybe("golden_answers", list) else [r.text("answer")]
    return r.task(
        r.text("question"),
        answers,
        gold,
        kind=m.fields.get("type"),
        dataset=dataset,
        level=m.fields.get("level"),
    ), document


def _musique(r: Record) -> tuple[Task, Document]:
    """MuSiQue's JSONL: {id, question, answer, answer_aliases: [..], paragraphs: [{title, paragraph_text}], question_decomposition:
    [{paragraph_support_idx}]}."""
    paragraphs = [r.inside("paragraphs", paragraph) for paragraph in r.get("paragraphs", list)]
    steps = [
        r.inside("question_decomposition", step) for step in r.maybe("question_decomposition", list)
    ]
    places = [
        place for step in steps if (place := step.fields.get("paragraph_support_idx")) is not None
    ]
    gold = tuple(dict.fromkeys(r.places("paragraph_support_idx", places, len(paragraphs))))
    answers = [
        r.text("answer"),
        *(r.texts("answer_aliases") if r.maybe("answer_aliases", list) else ()),
    ]
    kind = f"{len(steps)}hop" if steps else None
    task = r.task(r.text("question"), answers, gold, kind=kind, dataset="musique")
    return task, [(p.text("title"), p.text("paragraph_text")) for p in paragraphs]


def _squad(r: Record) -> tuple[Task, Document]:
    """SQuAD: {question, title, context, answers: [{text}] or {text: [..]}}: a question and the one paragraph that answers it."""
    if isinstance(r.fields.get("answers"), dict):
        said = r.inside("answers").maybe("text", list) if r.fields["answers"] else []
    else:
        said = [r.inside("answers", answer).text("text") for answer in r.maybe("answers", list)]
    if not said:
        raise r.error(
            "'answers' is empty: a question without an answer in its paragraph cannot be graded"
        )
    answers = list(dict.fromkeys(r.text("answers", text) for text in said))
    return r.task(r.text("question"), answers, [0], kind="squad", dataset="squad"), [
        (r.text("title"), r.text("context"))
    ]


def _shared(r: Record) -> tuple[Task, Document]:
    """../shared/data's JSONL: {id, question, answers: [..], hops: [paragraph number], paragraphs: [{title, text}], type, ..}."""
    paragraphs = [r.inside("paragraphs", paragraph) for paragraph in r.get("paragraphs", list)]
    gold = r.places("hops", r.fields.get("hops"), len(paragraphs))
    labels = {"kind": r.fields.get("type"), "split": r.fields.get("orig_split")}
    return r.task(r.text("question"), r.texts("answers"), gold, **labels), [
        _passage(p) for p in paragraphs
    ]


def _built(r: Record) -> tuple[Task, Document]:
    """A line of our own sets (`write_built`), after the first line {form, passages: n, tasks: m} and n lines {title, text}."""
    order = r.get("order", list)
    gold = r.places("gold", r.fields.get("gold"), len(order))
    return r.task(r.text("question"), r.texts("answers"), gold), order


# The first form whose fields a file's first record has is taken.
FORMS: dict[str, tuple[Callable[[Record], tuple[Task, Document]], tuple[str, ...]]] = {
    "built": (_built, ("form", "passages", "tasks")),
    "memagent": (_memagent, ("prompt", "context", "reward_model")),
    "vime": (_vime, ("prompt", "label", "metadata")),
    "eval": (_eval, ("input", "context", "answers")),
    "ruler": (_ruler, ("input", "context", "outputs")),
    "flashrag": (_flashrag, ("id", "question", "golden_answers", "metadata")),
    "hotpotqa": (_hotpotqa, ("question", "answer", "context", "supporting_facts")),
    "shared": (_shared, ("question", "answers", "paragraphs")),
    "musique": (_musique, ("question", "answer", "paragraphs")),
    "squad": (_squad, ("question", "title", "context", "answers")),
    "own": (_own, ("question", "context")),
}


def read(path: str | Path, form: str | None = None, pool: str | Path | None = None) -> list[Task]:
    """The tasks of a file, in order, no id twice. Tasks with paragraphs share one pool of the file's distinct passages.

    form: a name of FORMS; None looks at the first record. pool: the HotpotQA json that an eval set of passage numbers counts in.
    """
    path = Path(path)
    records = _records(path)
    first = next(records, None)
    if first is None:
        raise UserError(f"{path} is empty: it holds no tasks.")
    if form is None:
        form = next(
            (name for name, (_, names) in FORMS.items() if all(n in first.fields for n in names)),
            "?",
        )
    if form not in FORMS:
        known = "; ".join(f"{name} ({', '.join(names)})" for name, (_, names) in FORMS.items())
        raise first.error(
            f"no form is known with the fields {', '.join(first.fields)}. Known are {known}"
        )
    records, numbered = chain([first], records), None
    if form == "built":
        n, m, (_, *lines) = first.get("passages", int), first.get("tasks", int), records
        if min(n, m) < 0 or len(lines) != n + m:
            raise first.error(
                f"{n} passages and {m} tasks are announced and {len(lines)} lines follow; build the set again"
            )
        frame = first.fields.get("frame", "documents")
        if frame not in [*FRAMES]:  # a list: what a file has may not be hashable
            raise first.error(f"'frame' must be one of {', '.join(FRAMES)}, not {frame!r}")
        passage = _passage if frame == "documents" else lambda r: ("", r.text("text"))
        records, numbered = lines[n:], pool_of(map(passage, lines[:n]), frame)

    tasks: dict[str, Task] = {}
    shared, place = Pool([], []), {}
    for record in records:
        task, document = FORMS[form][0](record)
        if task.id in tasks:
            raise record.error(f"the id '{task.id}' was there before; results are kept by id")
        tasks[task.id] = task
        if isinstance(document, str):
            task.text = document
        elif isinstance(document[0], tuple):
            task.pool, task.order = (
                shared,
                tuple(place.setdefault(passage, len(place)) for passage in document),
            )
        else:
            if numbered is None and pool is None:
                raise record.error(
                    "the context is passage numbers; name the HotpotQA json that they count in as well"
                )
            if numbered is None:  # MemAgent numbers the passages in this order
                source = read(pool, "hotpotqa")[0].pool
                numbered = pool_of(
                    sorted(zip(source.titles, source.texts, strict=True), key="\n".join)
                )
            task.pool, task.order = (
                numbered,
                record.places("passage numbers", document, len(numbered.texts)),
            )
    shared.titles, shared.texts = [title for title, _ in place], [text for _, text in place]
    return list(tasks.values())


def read_passages(path: str | Path) -> Pool:
    """Further passages {title, text}, to fill documents with."""
    return pool_of(map(_passage, _records(Path(path))))


def read_texts(path: str | Path) -> list[str]:
    """Running text: the texts of passages {text} (JSON), or a whole text file; of a folder, all of its files in order of their names."""
    path = Path(path)
    if not is_file(path) and path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        )
        return [text for file in files for text in read_texts(file)]
    if path.name.removesuffix(".gz").endswith((".json", ".jsonl", ".parquet")):
        return [record.text("text") for record in _records(path)]
    return [from_text(path, "").text]


def from_text(path: str | Path, question: str, answers: Sequence[str] = ()) -> Task:
    """A question about a text file (UTF-8, or .gz of it)."""
    import pyarrow as pa

    path = Path(path)
    if not is_file(path):
        raise UserError(f"No file at {path}.")
    try:
        with pa.input_stream(path) as stream:
            text = stream.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({_one_line(error)}).") from error
    if not text.strip():
        raise UserError(f"{path} is empty.")
    return Task(id=path.stem, question=question, answers=tuple(answers), text=text)
