"""Tasks from files: records of any known form, in any container, become `Task`s.

    file --_items--> (place, fields) --Record--> FORMS[form] --> (Task, Document)

Containers are parquet, JSON lines and JSON that is one value (both also as .gz), and a split of
the hub (tasks/hub.py). Forms take the fields as they come; what they make of them is checked in one
place, `_task`, and a record that fails is one sentence with its file and line.
"""

from __future__ import annotations

import io
import math
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO

from config.errors import UserError, clip, first_line
from config.files import is_file
from config.foreign import FREE, RATIO, flood, from_json, read_data, unpacked
from config.plugins import load_function
from config.terminal import say
from data import FRAMES, Pool, Task
from tasks import hub

Passage = tuple[str, str]  # title, text
LABELS, COUNTS = ("kind", "dataset", "split", "level"), ("num_docs", "tokens")
Document = str | list[Passage] | list[int]  # a text, passages, or indices into a pool of passages

# ---------------------------------------------------------------- containers


@dataclass
class Record:
    """One record of a file, and where it stands there."""

    path: Path
    place: str  # within the file, such as "line 3"; "" for the whole of it
    position: int  # among the records of the file, from 0
    fields: dict
    left_out: Counter = field(default_factory=Counter)  # of the whole file: what -> how often

    @property
    def where(self) -> str:
        return f"{self.path}, {self.place}" if self.place else str(self.path)

    def error(self, reason: str) -> UserError:
        return UserError(f"{self.where}: {reason}.")


def records_of(path: Path) -> Iterator[Record]:
    """Yield every record of a file, or of the files of a split of the hub."""
    import pyarrow as pa

    if hub.is_hub(path):
        files = [(file.path, hub.open_file(file)) for file in hub.data_files(path)]
    else:
        files = [(path, existing(path).open("rb"))]
    position, left_out = 0, Counter()
    for file, opened in files:
        record = Record(file, "", position, {}, left_out)
        try:
            with opened as source:
                for place, fields in _items(file, source):
                    record = Record(file, place, position, fields, left_out)
                    if not isinstance(fields, dict):
                        raise record.error("a record must be an object with named fields")
                    yield record
                    position += 1
        except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
            damage = f"it may be damaged ({first_line(error)})"
            raise record.error(f"the file cannot be read from here on, {damage}") from error


def existing(path: str | Path) -> Path:
    """Return the path of a file. UserError: there is none, or the system takes no such path."""
    if is_file(path):
        return Path(path)
    from tasks.downloads import SOURCES

    path, advice = Path(path), ""
    if path.is_dir():
        advice = " It is a folder: name a file in it."
    elif name := next((part for part in path.parts if part in SOURCES), ""):
        advice = f" `python cli.py data get {name}` fetches its files to data/{name};"
        advice += " `data build FILE OUT` makes sets of questions."
    elif length := re.search(r"_(\d+)\.json(l\.gz)?$", path.name):
        advice = f" `python cli.py data build FILE {path.parent} --lengths {length[1]}` makes such"
        advice += " sets, of questions such as `data get hotpotqa` fetches."
    raise UserError(f"No file at {path}.{advice}")


LARGEST = 1 << 30
"""Most bytes of a line, and of a file that is one value: HotpotQA's training split has .6 GB."""
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, and white space


def _items(path: Path, file: IO[bytes]) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of every record.

    JSON is parsed line by line with the standard library: pyarrow.json (and `datasets` on top of
    it) cannot name the line of an error, turns answers such as "1994-05-01" into dates, and cannot
    represent HotpotQA's [title, [sentences]] pairs.
    """
    if path.suffix == ".parquet":
        rows = chain.from_iterable(batch.to_pylist() for batch in _batches(path, file))
        yield from ((f"row {n}", fields) for n, fields in enumerate(rows, 1))
        return
    stream = unpacked(file, path) if path.suffix == ".gz" else file
    numbered = enumerate(iter(lambda: stream.readline(LARGEST + 1), b""), 1)
    lines = ((n, line) for n, line in numbered if line.strip(BLANK))
    n, line = next(lines, (0, b""))
    begins = line.strip(BLANK)
    # A line that ends so goes on in the next one; any other is JSON lines', or all of the file
    if begins.startswith(b"[") or begins.endswith((b"{", b"[", b",")):
        whole = b"\n" * (n - 1) + line + stream.read(LARGEST + 1 - len(line))
        yield from _members(_parse(whole, path), path)
    elif n:
        first, second = _parse(line, path, n), next(lines, None)
        yield from _members(first, path, n) if second is None else [(f"line {n}", first)]
        for n, line in chain([second] if second else (), lines):
            yield f"line {n}", _parse(line, path, n)


ROW = 256
"""Bytes that a row of parquet counts for beside its values: what holds them takes memory."""


def _batches(path: Path, file: IO[bytes]) -> Iterator:
    """Yield the record batches of a parquet file; UserError where it unpacks to a flood.

    A value may be written once and referred to by every row, so a batch has fewer rows where the
    file's own sizes are large, and what the batches hold is counted.
    """
    import pyarrow.parquet as pq

    most = max(FREE, RATIO * file.seek(0, io.SEEK_END))
    table = pq.ParquetFile(file)
    groups = range(table.metadata.num_row_groups)
    sizes = [table.metadata.row_group(group).total_byte_size for group in groups]
    if sum(sizes) > most:
        raise flood(path)
    held = 0
    for batch in table.iter_batches(min(64, max(1, (1 << 26) // max([1, *sizes])))):
        held += batch.nbytes + ROW * batch.num_rows
        if held > most:
            raise flood(path)
        yield batch


def _members(tree: object, path: Path, line: int = 1) -> Iterator[tuple[str, object]]:
    """Yield the records of a single value of JSON: an array; SQuAD's tree; an object with one or
    more lists of records, or with records by their ids; or one record."""
    if isinstance(tree, list):
        tree = {"item": tree}
    parts = tree if isinstance(tree, dict) and not form_of(tree) else {}
    lists = {name: part for name, part in parts.items() if isinstance(part, list) and part}
    if "item" in lists or (lists := {n: part for n, part in lists.items() if form_of(part[0])}):
        for name, part in lists.items():
            yield from ((f"{clip(name, 80)} {n}", value) for n, value in enumerate(part, 1))
    elif isinstance(parts.get("data"), list):
        yield from _squad_items(parts["data"], path)
    elif parts and all(map(form_of, parts.values())):
        yield from ((f"'{clip(name, 80)}'", {"id": name} | value) for name, value in parts.items())
    else:
        yield f"line {line}", tree


def _squad_items(articles: list, path: Path) -> Iterator[tuple[str, dict]]:
    """Flatten SQuAD's tree of articles, paragraphs and questions to one record per question."""
    for n, article in enumerate(articles, 1):
        place = f"data {n}"
        try:
            for m, paragraph in enumerate(article["paragraphs"], 1):
                place = f"data {n}, paragraphs {m}"
                title = article.get("title") or f"Article {n}"
                for question in paragraph["qas"]:
                    yield place, {"title": title, "context": paragraph["context"]} | question
        except UNFIT as error:
            raise UserError(f"{path}, {place}: {_reason(error)}.") from error


def _parse(raw: bytes, path: str | Path, line: int = 0) -> object:
    """Parse JSON: one line, or a whole file, of which the error tells the line itself."""
    where = f"{path}, line {line}" if line else str(path)
    if len(raw) > LARGEST:
        largest = f"a value of more than {LARGEST >> 20:,} MiB"
        raise UserError(f"{where} has {largest}: save one record a line.")
    try:
        return from_json(raw)
    except ValueError as error:  # no JSON, not UTF-8; a number, or a nesting, thousands long
        reason = first_line(error)
        reason = reason.replace("line 1 ", "") if line else reason
        raise UserError(f"{where}: this is not JSON ({reason}).") from error


def read_json(path: str | Path) -> object:
    """Return the whole of a file (JSON, or .gz of it). UserError: it cannot be read."""
    return _parse(_content(path), path)


def _content(path: str | Path) -> bytes:
    try:
        return read_data(existing(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}).") from error


# ---------------------------------------------------------------- fields

UNFIT = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What a record raises whose fields are not those of its form."""


def _reason(error: Exception) -> str:
    if type(error) is KeyError:
        return f"the field {error} is missing"
    return first_line(error) or type(error).__name__


def _text(name: str, value: object, blank: bool = False) -> str:
    """Return a text, as a rule one that is not blank. ValueError: it is none."""
    if not isinstance(value, str) or not (blank or value.strip()):
        raise ValueError(f"'{name}' must be a text, not {reprlib.repr(value)}")
    if re.search("[\ud800-\udfff]", value):
        raise ValueError(f"'{name}' holds half of a surrogate pair, which is no text")
    return value


def _list(name: str, value: object) -> list:
    if not isinstance(value, list):
        raise ValueError(f"'{name}' must be a list, not {reprlib.repr(value)}")
    return value


def _indices(name: str, values: object, n: int) -> tuple[int, ...]:
    """Return indices into n items, from 0; there may be none."""
    values = _list(name, [] if values is None else values)
    if any(type(value) is not int or not 0 <= value < n for value in values):
        raise ValueError(f"'{name}' must be whole numbers from 0 to {n - 1}")
    return tuple(values)


def _accepted(value: object) -> list:
    """Return the answers in a text, a number, SQuAD's {text}, TriviaQA's {value, aliases}, or a
    list of those."""
    if isinstance(value, list):
        return [answer for part in value for answer in _accepted(part)]
    if isinstance(value, dict):
        return _accepted([value[key] for key in ("value", "text", "aliases") if value.get(key)])
    if type(value) in (int, float) and math.isfinite(value):
        return [str(int(value) if value == int(value) else value)]
    return [value]


def _context(value: object) -> Document:
    """Return a document that is a text, or a list of passages: texts or {title, text}."""
    if not isinstance(value, list):
        return value
    parts = [part if isinstance(part, dict) else {"text": part} for part in value]
    titles = [_text("title", part.get("title") or "", blank=True) for part in parts]
    passages = [*zip(titles, (_text("text", part.get("text")) for part in parts), strict=True)]
    if all(title.strip() for title in titles):
        return passages
    texts = (f"{title}\n{text}" if title else text for title, text in passages)
    return "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(texts, 1))


def _task(
    r: Record, question: object, answers: object, document: Document, gold: Iterable = (), **labels
) -> tuple[Task, Document]:
    """Make a task, still without its document, of fields that are checked here.

    The record's own id, kind, dataset, split and level take precedence over `labels`. Without any
    id, the position in the file serves as one, as in MemAgent's results.
    """
    if isinstance(document, str) or not document:
        _text("context", document)
    for title, text in document if isinstance(document[0], tuple) else ():
        _text("title", title), _text("text", text, blank=True)  # HotpotQA has empty paragraphs
    accepted = tuple(_text("answers", answer) for answer in _accepted(answers))
    if not accepted:
        raise ValueError("'answers' is empty")
    own = {name: value for name, value in r.fields.items() if value is not None}
    labels = {name: own.get(name, labels.get(name) or "") for name in LABELS}
    counts = {name: n for name in COUNTS if type(n := own.get(name)) is int and n > 0}
    return Task(
        id=_text("id", str(own.get("id", own.get("_id", r.position)))),
        question=_text("question", question),
        answers=accepted,
        gold=_indices("gold", list(gold), len(document)),
        **{name: _text(name, str(value), blank=True) for name, value in labels.items()},
        **counts,
    ), document


# ---------------------------------------------------------------- forms
# Each function makes a task, and its document, out of one record


def _memagent(r: Record) -> tuple[Task, Document]:
    """Read MemAgent's training parquet and verl's: {prompt: a text or a chat, context,
    reward_model: {ground_truth}, extra_info}."""
    about = replace(r, fields=r.fields.get("extra_info") or {})
    question = r.fields["prompt"]
    if not isinstance(question, str):
        *before, last = question
        if (role := last.get("role", "user")) != "user":
            raise ValueError(f"'prompt' must end with the user's question, not {role!r:.40}")
        for message in before:  # which an agent's own prompts have no place for
            role = clip(str(message.get("role")), 40)
            r.left_out[f"messages of 'prompt' before the question (role {role})"] += 1
        question = last["content"]
    context = (r.fields if "context" in r.fields else about.fields)["context"]
    answers = r.fields["reward_model"]["ground_truth"]
    dataset = r.fields.get("data_source", about.fields.get("data_source"))
    return _task(about, question, answers, _context(context), dataset=dataset)


def _eval(r: Record) -> tuple[Task, Document]:
    """Read MemAgent's eval_N.json: {input, context, answers: [..]}.

    From 12,800 documents on the context is passage numbers. ReMemR1's eval_{data set}_N.json have
    {evidence_idx: positions of the evidence, from 0, in hop order, some twice; type; level} too.
    """
    document, gold = r.fields["context"], ()
    if isinstance(document, list) and document and isinstance(document[0], list):
        (document,) = document  # as in some published files
    if isinstance(document, list) and document and isinstance(document[0], int):
        document = [*_indices("context", document, 2**31)]
    else:
        document = _context(document)
    indices = r.fields.get("evidence_idx")
    if indices and isinstance(document, str) and (passages := _split_documents(document)):
        gold = dict.fromkeys(_indices("evidence_idx", indices, len(passages)))
        document = passages
    dataset = re.match(r"eval_(\w*?[a-z]\w*?)_\d+", r.path.name)
    labels = {"kind": r.fields.get("type"), "dataset": dataset and dataset[1]}
    return _task(r, r.fields["input"], r.fields["answers"], document, gold, **labels)


def _split_documents(text: str) -> list[Passage]:
    """Split a text in the frame "documents" into its passages; [] if it is not exactly that."""
    parts = re.split(r"(?:\A|\n\n)Document \d+:\n", text)[1:]
    passages = [part.partition("\n")[::2] for part in parts]
    form, separator = FRAMES["documents"]
    framed = separator.join(form(i, *passage) for i, passage in enumerate(passages, 1))
    return passages if framed == text else []


def _ruler(r: Record) -> tuple[Task, Document]:
    """Read RULER's eval_{task}_{length}.json as MemAgent writes it: {input, context,
    outputs: [..], answer_prefix, length}."""
    name = r.path.name.partition(".")[0].removeprefix("eval_")
    kind, _, length = name.rpartition("_")
    if not length.isdecimal():
        kind, length = name, "0"
    labels = {"kind": kind, "dataset": "ruler"}
    task, text = _task(r, r.fields["input"], r.fields["outputs"], r.fields["context"], **labels)
    return replace(task, tokens=int(length)), _text("context", text)


def _own(r: Record) -> tuple[Task, Document]:
    """Read the user's own records: {question, answers or answer, context: text or passages} and,
    optionally, id, kind, dataset, split."""
    context = r.fields["context"]
    if isinstance(context, dict) or (context and isinstance(context[0], list)):
        return _hotpotqa(r)
    return _task(r, r.fields["question"], _answer(r.fields), _context(context))


def _answer(fields: dict) -> object:
    names = [name for name in ("golden_answers", "answers") if fields.get(name) is not None]
    return fields[names[0] if names else "answer"]


def _hotpotqa(r: Record) -> tuple[Task, Document]:
    """Read HotpotQA's questions and 2WikiMultiHopQA's, which have `evidences` beside.

    The official json: {_id, question, answer, context: [[title, [sentence]]],
    supporting_facts: [[title, n]], type}. On the hub tables stand for the pairs, context: {title:
    [..], sentences: [[..]]} and supporting_facts: {title: [..]}. `data get 2wiki` has the same in
    `metadata`, with the column content, and golden_answers.
    """
    m = r.fields if "context" in r.fields else r.fields["metadata"]
    is_2wiki = "evidences" in r.fields or m is not r.fields
    if m is not r.fields and not any(n.startswith("2wiki") for n in r.path.parts[-2:]):
        raise ValueError("this form is read of 2wiki alone, in a file or folder of that name")
    document = []
    for title, sentences in _pairs("context", m["context"], "sentences", "content"):
        texts = [_text("context", text) for text in _list("context", sentences) if text != ""]
        # HotpotQA's sentences begin with their own blank
        document.append((title, (" " if is_2wiki else "").join(texts)))
    facts = _pairs("supporting_facts", m.get("supporting_facts") or [], "title")
    evidence = dict.fromkeys(_text("supporting_facts", title) for title, _ in facts)
    titles = [title for title, _ in document]
    # Of a document that lacks some, as fullwiki's may, depths and order would be wrong
    gold = [titles.index(title) for title in evidence] if {*evidence} <= {*titles} else []
    labels = {"kind": m.get("type"), "level": m.get("level")}
    labels["dataset"] = "2wikimultihopqa" if is_2wiki else "hotpotqa"
    return _task(r, r.fields["question"], _answer(r.fields), document, gold, **labels)


def _pairs(name: str, value: object, *columns: str) -> list:
    """Return the pairs (title, value) of a list of pairs, or of a table {title: [..], column: [..]}
    whose values are the first of `columns` that exists."""
    if isinstance(value, dict):
        second = next((column for column in columns if column in value), columns[0])
        return [*zip(_list(name, value["title"]), _list(name, value[second]), strict=True)]
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in _list(name, value)):
        raise ValueError(f"'{name}' must hold pairs that begin with a title")
    return value


def _passage(fields: dict) -> Passage:
    text = fields.get("paragraph_text", fields.get("text"))
    return _text("title", fields["title"]), _text("text", text)


def _paragraphs(r: Record) -> tuple[Task, Document]:
    """Read questions with numbered paragraphs {title, text}: {id, question, answers: [..],
    hops: [index of a paragraph], paragraphs, type, orig_split}; or MuSiQue's {id, question, answer,
    answer_aliases: [..], paragraphs: [{title, paragraph_text}],
    question_decomposition: [{paragraph_support_idx}]}."""
    m, question = r.fields, r.fields["question"]
    passages = [_passage(paragraph) for paragraph in _list("paragraphs", m["paragraphs"])]
    labels = {"kind": m.get("type"), "split": m.get("orig_split")}
    if m.get("answers") is not None:
        gold = _indices("hops", m.get("hops"), len(passages))
        return _task(r, question, m["answers"], passages, gold, **labels)
    steps = _list("question_decomposition", m.get("question_decomposition") or [])
    hops = [step.get("paragraph_support_idx") for step in steps]
    hops = [hop for hop in hops if hop is not None]
    gold = dict.fromkeys(_indices("paragraph_support_idx", hops, len(passages)))
    answers = [m["answer"], *_list("answer_aliases", m.get("answer_aliases") or [])]
    labels = {"kind": f"{len(steps)}hop" if steps else None, "dataset": "musique"}
    return _task(r, question, answers, passages, gold, **labels)


def _squad(r: Record) -> tuple[Task, Document]:
    """Read SQuAD, a question and the one paragraph that answers it: {question, title, context,
    answers: [{text}] or {text: [..]}}."""
    answers = [*dict.fromkeys(_text("answers", x) for x in _accepted(r.fields["answers"]))]
    document = [(r.fields["title"], _text("context", r.fields["context"]))]
    return _task(r, r.fields["question"], answers, document, [0], kind="squad", dataset="squad")


def _built(r: Record) -> tuple[Task, Document]:
    """Read a task line of our own sets (`write_built`), which follow a first line
    {form, passages: n, tasks: m} and n lines {title, text}."""
    order = _list("order", r.fields["order"])
    gold = _indices("gold", r.fields.get("gold"), len(order))
    return _task(r, r.fields["question"], r.fields["answers"], order, gold)


# form -> its reader, and the fields by which a file's first record is recognised (first match wins)
FORMS: dict[str, tuple[Callable[[Record], tuple[Task, Document]], tuple[str, ...]]] = {
    "built": (_built, ("form", "passages", "tasks")),
    "memagent": (_memagent, ("prompt", "reward_model")),
    "eval": (_eval, ("input", "context", "answers")),
    "ruler": (_ruler, ("input", "context", "outputs")),
    "2wiki": (_hotpotqa, ("question", "golden_answers", "metadata")),
    "hotpotqa": (_hotpotqa, ("question", "context", "supporting_facts")),
    "musique": (_paragraphs, ("question", "paragraphs")),
    "squad": (_squad, ("question", "title", "context", "answers")),
    "own": (_own, ("question", "context")),
}


def form_of(fields: object) -> str:
    """Return the form of a record, by its fields; "" if none is known."""
    present = {*fields} if isinstance(fields, dict) else set()
    return next((name for name, (_, names) in FORMS.items() if {*names} <= present), "")


# choices, options, answer_choices; choice_A, option1, opa (MedMCQA's)
CHOICES = re.compile(
    r"(?:answer_?)?(?:choices?|options?|candidates|alternatives|endings|distractors?)"
    r"(?:[_ ]?(?:[A-J]|\d\d?))?|op[a-j]",
    re.I,
)


def _choices(fields: dict) -> str:
    """Return the name of a field that holds the choices of a question; "" of an open one."""
    about = fields.get("extra_info")
    fields = fields | about if isinstance(about, dict) else fields
    filled = [name for name, value in fields.items() if value not in (None, "", [], {})]
    found = next(filter(CHOICES.fullmatch, filled), "")
    return found or ("A" if {"A", "B"} <= {*filled} else "")


def _is_answerable(fields: dict) -> bool:
    """Tell whether a record's question is answered: MuSiQue's, SQuAD 2's, also of the hub."""
    answers = fields.get("answers")
    none = isinstance(answers, dict) and "answer_start" in answers and not answers.get("text")
    impossible = fields.get("is_impossible") is True or fields.get("unanswerable") is True
    return not (none or impossible or fields.get("answerable") is False)


# ---------------------------------------------------------------- files


def is_function(path: str | Path) -> bool:
    """Tell whether a path names a function of a user's file, own.py:function."""
    return ".py:" in str(path)


def made_tasks(place: str, tasks: Iterable[Task]) -> list[Task]:
    """Check the tasks that a user's function returned; UserError if they are none."""
    tasks = list(tasks) if isinstance(tasks, Iterable) else []
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise UserError(f"{place} must return tasks (data.Task), at least one.")
    return tasks


def read(path: str | Path, pool: str | Path | None = None, n: int | None = None) -> list[Task]:
    """Read the tasks of a file, in order; no id may occur twice.

    Tasks with paragraphs share one pool of the file's distinct passages.
    pool: the HotpotQA json whose passages the numbers of an eval set refer to. n: read no further
    than the first n tasks. A path of the form
    own.py:function is a function that returns the tasks; hf:ORG/NAME:SPLIT a split of the hub.
    """
    if is_function(path):
        return made_tasks(str(path), load_function(str(path), "--data")())[:n]
    if {".csv", ".tsv"} & {*Path(path).suffixes}:
        raise UserError(f"{path} is a table of text, which is not read: save it as JSON lines.")
    records = records_of(Path(path))
    if (first := next(records, None)) is None:
        raise UserError(f"{path} is empty: it holds no tasks.")
    if not (form := form_of(first.fields)):
        known = "; ".join(f"{name} ({', '.join(names)})" for name, (_, names) in FORMS.items())
        fields = ", ".join(first.fields)
        raise first.error(f"no form is known with the fields {fields}. Known are {known}")
    records, numbered = chain([first], records), None  # a pool that a document of indices refers to
    if form == "built":
        records, numbered = _built_parts(first, records)
    tasks: dict[str, Task] = {}
    shared, index = Pool([], []), {}
    for record, task, document in islice(_tasks_of(records, form), n):
        if task.id in tasks:
            raise record.error(f"the id '{task.id}' was there before; results are kept by id")
        tasks[task.id] = task
        if isinstance(document, str):
            task.text = document
        elif isinstance(document[0], tuple):
            task.pool = shared
            task.order = tuple(index.setdefault(passage, len(index)) for passage in document)
        else:
            numbered = _numbered_pool(record, pool) if numbered is None else numbered
            try:
                order = _indices("passage numbers", document, len(numbered.texts))
            except ValueError as error:
                raise record.error(str(error)) from error
            task.pool, task.order = numbered, order
    shared.titles, shared.texts = [title for title, _ in index], [text for _, text in index]
    for what, count in first.left_out.items():
        say(f"{path}: left out, {what}: {count:,}.")
    if not tasks:
        raise UserError(f"{path} holds no question that its document answers.")
    return list(tasks.values())


def _tasks_of(records: Iterable[Record], form: str) -> Iterator[tuple[Record, Task, Document]]:
    """Yield what is read of each record; questions that their document does not answer, which no
    answer would be right for, are counted instead."""
    for record in records:
        if name := _choices(record.fields):
            raise record.error(f"'{name}' holds choices, and only open questions can be asked")
        if not _is_answerable(record.fields):
            record.left_out["questions that their document does not answer"] += 1
            continue
        try:
            task, document = FORMS[form][0](record)
        except UNFIT as error:
            raise record.error(f"{_reason(error)} (form '{form}')") from error
        yield record, task, document


def _built_parts(first: Record, records: Iterator[Record]) -> tuple[list[Record], Pool]:
    """Separate a set of our own, after its first line, into the records of tasks and the pool."""
    _, *lines = records
    n, m, frame = (first.fields.get(k) for k in ("passages", "tasks", "frame"))
    if type(n) is not int or type(m) is not int or min(n, m) < 0 or len(lines) != n + m:
        announced = f"{n} passages and {m} tasks are announced"
        raise first.error(f"{announced} and {len(lines)} lines follow; build the set again")
    if frame not in [None, *FRAMES]:  # a list: the value may not be hashable
        raise first.error(f"'frame' must be one of {', '.join(FRAMES)}, not {frame!r}")
    passages = _passages(lines[:n], None if frame in (None, "documents") else "-")
    return lines[n:], pool_of(passages, frame or "documents")


def _passages(records: Iterable[Record], title: str | None = None) -> Iterator[Passage]:
    """Yield the passages of records. title: of those that need none."""
    for record in records:
        try:
            yield _passage(({} if title is None else {"title": title}) | record.fields)
        except UNFIT as error:
            raise record.error(_reason(error)) from error


def _numbered_pool(record: Record, pool: str | Path | None) -> Pool:
    """Read the pool that passage numbers refer to, sorted by title and text as in MemAgent."""
    if pool is None:
        request = "name the HotpotQA json that they count in as well"
        raise record.error(f"the context is passage numbers; {request}")
    source = read(pool)[0].pool
    return pool_of(sorted(zip(source.titles, source.texts, strict=True), key="\n".join))


def pool_of(passages: Iterable[Passage], frame: str = "documents") -> Pool:
    """Make a pool of passages; titles are dropped in frames without titles."""
    passages = list(passages)
    titles = [title for title, _ in passages] if frame == "documents" else []
    return Pool(titles, [text for _, text in passages], frame)


def distinct_passages(pools: Iterable[Pool]) -> list[Passage]:
    """Return the different passages of all pools, sorted by title and text."""
    pairs = (zip(pool.titles, pool.texts, strict=True) for pool in pools)
    return sorted({passage for passages in pairs for passage in passages})


def read_passages(path: str | Path) -> Pool:
    """Read further passages {title, text}, to lengthen documents with."""
    return pool_of(_passages(records_of(Path(path))))


def read_texts(path: str | Path) -> list[str]:
    """Read running text: passages {text} (JSON), or a whole text file (UTF-8, or .gz of it)."""
    path = Path(path)
    if path.name.removesuffix(".gz").endswith((".json", ".jsonl", ".parquet")):
        return [text for _, text in _passages(records_of(path), "-")]
    try:
        text = _content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text ({first_line(error)}).") from error
    if not text.strip():
        raise UserError(f"{path} is empty.")
    return [text]
