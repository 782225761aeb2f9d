"""Tasks from files: records of any known form, in any container, become `Task`s.

    file --_values--> Record --function of a form--> Row --read--> Task

Containers are parquet, JSON lines and JSON that is one value (both also as .gz), and a split of
the hub (tasks/hub.py). The function of a form says where in a record things stand, `Row` checks
them, and a record that fails is one sentence with its file and line.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, Field, StrictInt, TypeAdapter, model_validator

from config.errors import UserError, clip, first_line
from config.files import is_file
from config.foreign import FREE, RATIO, flood, from_json, unpacked
from config.plugins import load_function
from config.terminal import say
from data import FRAMES, Pool, Task
from tasks import hub
from tasks.environments import FIRST, Text, Texts, Unicode, checked, fault_of

Passage = tuple[str, str]  # title, text

# ---------------------------------------------------------------- containers


@dataclass
class Record:
    """One record of a file, and where it stands there."""

    path: Path
    place: str  # such as "line 3"
    fields: dict

    @property
    def where(self) -> str:
        return f"{self.path}, {clip(self.place, 80)}"

    def error(self, reason: str) -> UserError:
        return UserError(f"{self.where}: {clip(reason, 500)}.")


def records_of(path: Path) -> Iterator[Record]:
    """Yield every record of a file, or of the files of a split of the hub."""
    if hub.is_hub(path):
        files = [(file.path, partial(hub.open_file, file)) for file in hub.data_files(path)]
    else:
        files = [(path, partial(existing(path).open, "rb"))]
    for file, opened in files:
        with _readable(file), opened() as source:
            for place, fields in _values(file, source):
                record = Record(Path(file), place, fields)
                if not isinstance(fields, dict):
                    raise record.error("a record must be an object with named fields")
                yield record


UNFIT = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What data raises whose fields are not those of its form."""


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Turn what a damaged file raises into one sentence."""
    import pyarrow as pa

    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, *UNFIT) as error:
        raise UserError(
            f"{path} may be damaged and cannot be read on ({fault_of(error)})."
        ) from error


def existing(path: str | Path) -> Path:
    """Return the path of a file. UserError: there is none, or the system takes no such path."""
    if is_file(path):
        return Path(path)
    raise UserError(
        f"No file at {path}. `python cli.py data get NAME` fetches questions to data/NAME, and "
        "`data build FILE OUT` makes sets of them."
    )


LARGEST = 1 << 30
"""Most bytes of a line, and of a file that is one value: HotpotQA's training split has .6 GB."""
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, and white space


def _values(path: Path, file: IO[bytes]) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of every record.

    JSON is parsed line by line with the standard library: pyarrow.json (and `datasets` on top of
    it) cannot name the line of an error, turns answers such as "1994-05-01" into dates, and cannot
    represent HotpotQA's [title, [sentences]] pairs.
    """
    if path.suffix == ".parquet":
        rows = chain.from_iterable(batch.to_pylist() for batch in _batches(path, file))
        yield from ((f"row {n}", fields) for n, fields in enumerate(rows, 1))
        return
    stream = unpacked(file, path)
    numbered = enumerate(iter(lambda: stream.readline(LARGEST + 1), b""), 1)
    lines = ((n, line) for n, line in numbered if line.strip(BLANK))
    n, line = next(lines, (0, b""))
    begins = line.strip(BLANK)
    # A line that ends so goes on in the next one; any other is JSON lines', or all of the file
    if begins.startswith(b"[") or begins.endswith((b"{", b"[", b",")):
        whole = b"\n" * (n - 1) + line + stream.read(LARGEST + 1 - len(line))
        yield from _members(_parse(whole, path))
    elif n:
        first, second = _parse(line, f"{path}, line {n}"), next(lines, None)
        yield from _members(first) if second is None else [(f"line {n}", first)]
        for n, line in chain([second] if second else (), lines):
            yield f"line {n}", _parse(line, f"{path}, line {n}")


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


def _members(tree: object) -> Iterator[tuple[str, object]]:
    """Yield the records of a single value of JSON: an array; SQuAD's tree; an object with one or
    more lists of records, or with records by their ids; or one record."""
    if isinstance(tree, list):
        tree = {"item": tree}
    parts = tree if isinstance(tree, dict) and not form_of(tree) else {}
    lists = {name: part for name, part in parts.items() if isinstance(part, list) and part}
    if "item" in lists or (lists := {n: part for n, part in lists.items() if form_of(part[0])}):
        for name, part in lists.items():
            yield from ((f"{name} {n}", value) for n, value in enumerate(part, 1))
    elif isinstance(parts.get("data"), list):
        for n, article in enumerate(parts["data"], 1):
            about = {"title": article.get("title") or f"Article {n}"}
            for paragraph in article["paragraphs"]:
                about["context"] = paragraph["context"]
                yield from ((f"data {n}", about | question) for question in paragraph["qas"])
    elif parts and all(map(form_of, parts.values())):
        yield from ((f"'{name}'", {"id": name} | value) for name, value in parts.items())
    else:
        yield "line 1", tree


def _parse(raw: bytes, where: str | Path) -> object:
    _check_size(raw, where)
    try:
        return from_json(raw)
    except ValueError as error:  # no JSON, not UTF-8; a number, or a nesting, thousands long
        raise UserError(f"{where}: this is not JSON ({first_line(error)}).") from error


def read_json(path: str | Path) -> object:
    """Return the whole of a file (JSON, or .gz of it). UserError: it cannot be read."""
    return _parse(_content(path), path)


def _content(path: str | Path) -> bytes:
    path = existing(path)
    with _readable(path), path.open("rb") as file:
        raw = unpacked(file, path).read(LARGEST + 1)
    _check_size(raw, path)
    return raw


def _check_size(raw: bytes, where: str | Path) -> None:
    if len(raw) > LARGEST:
        largest = f"a value of more than {LARGEST >> 20:,} MiB"
        raise UserError(f"{where} has {largest}: save one record a line.")


# ---------------------------------------------------------------- what is read of a record

Index = Annotated[StrictInt, Field(ge=0)]
Label = Annotated[Unicode, BeforeValidator(str)]


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


class Row(BaseModel):
    """A question and its document, which is a text, passages, or indices into a pool of them."""

    id: Annotated[Text, BeforeValidator(str)]
    question: Text
    answers: Annotated[Texts, BeforeValidator(_accepted), Field(min_length=1)]
    text: Text | None = None
    passages: Annotated[list[tuple[Text, Unicode]], FIRST] = []  # HotpotQA has empty ones
    numbers: Annotated[list[Index], FIRST] = []
    gold: Annotated[
        tuple[Index, ...], FIRST
    ] = ()  # indices into the document's passages, in hop order
    kind: Label = ""
    dataset: Label = ""
    split: Label = ""
    level: Label = ""
    num_docs: int = 0
    tokens: int = 0

    @model_validator(mode="after")
    def _has_its_evidence(self) -> Self:
        n = len(self.passages or self.numbers)
        if not (n or self.text):
            raise ValueError("the document is empty")
        if max(self.gold, default=-1) >= n:
            raise ValueError(f"evidence is numbered from 0 to {n - 1}")
        return self


Sentences = Annotated[list[str], FIRST]
PAIRS = TypeAdapter(Annotated[list[tuple[str, Sentences]], FIRST])
PARTS = TypeAdapter(Annotated[list[tuple[str, Text]], FIRST])


def _document(value: object, blank: str) -> dict:
    """Return a document as the fields of a `Row`, by its shape.

    It may be a text; [title, [sentence]] pairs, or a table of them as on the hub; passage numbers;
    passages, which are texts or {title, text}. blank: stands between sentences.
    """
    if isinstance(value, dict):
        sentences = value["sentences" if "sentences" in value else "content"]
        value = [*map(list, zip(value["title"], sentences, strict=True))]
    if not isinstance(value, list) or not value:
        return {"text": value}
    if isinstance(value[0], list) and isinstance(value[0][0], int):
        (value,) = value  # as in some published files
    if isinstance(value[0], int):
        return {"numbers": value}
    if isinstance(value[0], list):
        pairs = PAIRS.validate_python(value)
        return {"passages": [(title, blank.join(filter(None, texts))) for title, texts in pairs]}
    parts = [part if isinstance(part, dict) else {"text": part} for part in value]
    texts = [part.get("paragraph_text", part.get("text")) for part in parts]
    titles = [part.get("title") or "" for part in parts]
    passages = PARTS.validate_python([*zip(titles, texts, strict=True)])
    if all(titles):
        return {"passages": passages}
    framed = (f"{title}\n{text}" if title else text for title, text in passages)
    return {"text": "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(framed, 1))}


# ---------------------------------------------------------------- forms
# A function returns what of a `Row` is not under the names that `Form` has: of the fields m of a
# record of the file `path`, with its document as `_document` returns it


def _eval(m: dict, document: dict, path: Path) -> dict:
    """MemAgent's eval_N.json, from 12,800 documents on with passage numbers as the context.
    ReMemR1's eval_{data set}_N.json have positions of the evidence in hop order, some twice."""
    named = re.match(r"eval_(\w*?[a-z]\w*?)_\d+", path.name)
    found = {"dataset": named[1]} if named else {}
    passages = _split_documents(document.get("text") or "") if m.get("evidence_idx") else []
    if not passages:
        return found | {"gold": ()}
    return found | document | {"passages": passages, "gold": [*dict.fromkeys(m["evidence_idx"])]}


def _split_documents(text: str) -> list[Passage]:
    """Split a text in the frame "documents" into its passages; [] if it is not exactly that."""
    parts = re.split(r"(?:\A|\n\n)Document \d+:\n", text)[1:]
    passages = [part.partition("\n")[::2] for part in parts]
    form, separator = FRAMES["documents"]
    framed = separator.join(form(i, *passage) for i, passage in enumerate(passages, 1))
    return passages if framed == text else []


def _ruler(m: dict, document: dict, path: Path) -> dict:
    """RULER's eval_{task}_{length}.json, as MemAgent writes it."""
    name = path.name.partition(".")[0].removeprefix("eval_")
    kind, length = re.fullmatch(r"(.*?)(?:_(\d+))?", name).groups("0")
    return {"kind": kind, "dataset": "ruler", "tokens": int(length)}


def _hotpotqa(m: dict, document: dict, path: Path) -> dict:
    """HotpotQA's questions and 2WikiMultiHopQA's, which have `evidences` beside, with supporting
    facts as [title, n] or a table: the official json, the hub's, and what `data get 2wiki` has."""
    if "metadata" in m and not any(part.startswith("2wiki") for part in path.parts[-2:]):
        raise ValueError("this form is read of 2wiki alone, in a file or folder of that name")
    facts = m.get("supporting_facts", ())
    named = dict.fromkeys(facts["title"] if isinstance(facts, dict) else [t for t, _ in facts])
    titles = [title for title, _ in document["passages"]]
    # Of a document that lacks some, as fullwiki's may, depths and order would be wrong
    gold = [titles.index(title) for title in named] if {*named} <= {*titles} else ()
    return {"gold": gold, "dataset": "2wikimultihopqa" if _is_2wiki(m) else "hotpotqa"}


def _is_2wiki(m: dict) -> bool:
    return "metadata" in m or "evidences" in m


def _musique(m: dict, document: dict, path: Path) -> dict:
    """MuSiQue's; and questions that have all `answers`, with numbered paragraphs and `hops`."""
    if "answers" in m:
        return {}
    steps = m.get("question_decomposition", ())
    hops = dict.fromkeys(step.get("paragraph_support_idx") for step in steps)
    return {
        "answers": [m["answer"], *m.get("answer_aliases", ())],
        "gold": [hop for hop in hops if hop is not None],
        "dataset": "musique",
        "kind": f"{len(steps)}hop" if steps else "",
    }


def _squad(m: dict, document: dict, path: Path) -> dict:
    """SQuAD's, a question and the one paragraph that answers it."""
    passages, answers = [(m["title"], document.pop("text"))], dict.fromkeys(_accepted(m["answers"]))
    labels = {"kind": "squad", "dataset": "squad"}
    return {"passages": passages, "answers": [*answers], "gold": [0]} | labels


class Form(NamedTuple):
    """A form of records: where things stand."""

    recognised: tuple[str, ...]  # the fields of a file's first record
    more: Callable[[dict, dict, Path], dict] | None = None
    question: str = "question"
    answers: str = "answers"  # or answer
    document: str = "context"
    gold: str = "gold"
    within: tuple[str, ...] = ()  # fields whose own fields count too


FORMS = {  # the first that fits
    "built": Form(("form", "passages", "tasks"), document="order"),
    "memagent": Form(("prompt", "reward_model"), None, "prompt", "ground_truth",
                     within=("reward_model", "extra_info")),
    "eval": Form(("input", "context", "answers"), _eval, "input"),
    "ruler": Form(("input", "context", "outputs"), _ruler, "input", "outputs"),
    "2wiki": Form(("question", "golden_answers", "metadata"), _hotpotqa,
                  answers="golden_answers", within=("metadata",)),
    "hotpotqa": Form(("question", "context", "supporting_facts"), _hotpotqa),
    "musique": Form(("question", "paragraphs"), _musique, document="paragraphs", gold="hops"),
    "squad": Form(("question", "title", "context", "answers"), _squad),
    "own": Form(("question", "context")),
}  # fmt: skip


def form_of(fields: object) -> str:
    """Return the form of a record, by its fields; "" if none is known."""
    present = {*fields} if isinstance(fields, dict) else set()
    return next((name for name, form in FORMS.items() if {*form.recognised} <= present), "")


# choices, options, answer_choices; choice_A, option1, opa (MedMCQA's), A
CHOICES = re.compile(r"(?:answer_?)?(?:choices?|options?)(?:[_ ]?(?:[A-J]|\d\d?))?|op[a-j]|[A-E]")


def _filled(fields: dict) -> dict:
    """Return the fields that hold something: in parquet every row has all."""
    return {name: value for name, value in fields.items() if value is not None}


def _row(record: Record, form: Form, position: int, left_out: Counter) -> Row | None:
    """Read a record. None: its document does not answer the question, so no answer would be right.

    Without any id, the position in the file serves as one, as in MemAgent's results. What the
    record itself says of its kind, data set, split and level goes before what the form tells.
    """
    m = _filled(record.fields)
    if choices := [name for name in m if CHOICES.fullmatch(name) and m[name] not in ("", [], {})]:
        raise record.error(f"{choices[0]!r} holds choices, and only open questions can be asked")
    try:
        for name in form.within:
            m = _filled(m.get(name, {})) | m
        answers = m.get(form.answers, m.get("answer"))
        nothing = isinstance(answers, dict) and "answer_start" in answers and not answers["text"]
        impossible = m.get("is_impossible") is True or m.get("unanswerable") is True
        if nothing or impossible or m.get("answerable") is False:
            left_out["questions that their document does not answer"] += 1
            return None
        question = m[form.question]
        if isinstance(question, list):
            *before, last = question
            if (role := last.get("role", "user")) != "user":
                raise ValueError(f"a chat must end with the user's question, not {role!r:.40}")
            left_out["messages before the question"] += len(before)
            question = last["content"]
        document = _document(m[form.document], " " if _is_2wiki(m) else "")
        row = {"question": question, "answers": answers, "gold": m.get(form.gold, ())}
        row |= {"kind": m.get("type", ""), "split": m.get("orig_split", "")}
        row |= {"dataset": m.get("data_source", "")}
        row |= form.more(m, document, record.path) if form.more else {}
        own = {name: m[name] for name in ("kind", "dataset", "split", "level") if name in m}
        own |= {n: k for n in ("num_docs", "tokens") if type(k := m.get(n)) is int and k > 0}
        id = m.get("id", m.get("_id", position))
        return Row.model_validate(document | row | own | {"id": id})
    except UNFIT as error:
        raise record.error(fault_of(error)) from error


# ---------------------------------------------------------------- files


def is_function(path: str | Path) -> bool:
    """Tell whether a path names a function of a user's file, own.py:function."""
    return ".py:" in str(path)


def _made(place: str) -> list[Task]:
    made = load_function(place, "--data")()
    tasks = list(made) if isinstance(made, Iterable) else []
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
        return _made(str(path))[:n]
    records = records_of(Path(path))
    if (first := next(records, None)) is None:
        raise UserError(f"{path} is empty: it holds no tasks.")
    if not (form := form_of(first.fields)):
        known = "; ".join(f"{n} ({', '.join(form.recognised)})" for n, form in FORMS.items())
        fields = clip(", ".join(first.fields), 200)
        raise first.error(f"no form is known with the fields {fields}. Known are {known}")
    records, numbered = chain([first], records), None  # a pool that a document of indices refers to
    if form == "built":
        records, numbered = _built_parts(first, records)
    tasks: dict[str, Task] = {}
    shared, index, left_out = Pool([], []), {}, Counter()
    for position, record in enumerate(records):
        if (row := _row(record, FORMS[form], position, left_out)) is None:
            continue
        if row.id in tasks:
            raise record.error(f"the id '{row.id}' was there before; results are kept by id")
        task = tasks[row.id] = Task(**row.model_dump(exclude={"passages", "numbers"}))
        if row.passages:
            task.pool = shared
            task.order = tuple(index.setdefault(passage, len(index)) for passage in row.passages)
        elif row.numbers:
            numbered = _numbered_pool(record, pool) if numbered is None else numbered
            if max(row.numbers) >= len(numbered.texts):
                raise record.error(f"passages are numbered from 0 to {len(numbered.texts) - 1}")
            task.pool, task.order = numbered, tuple(row.numbers)
        if len(tasks) == n:
            break
    shared.titles, shared.texts = [title for title, _ in index], [text for _, text in index]
    for what, count in (+left_out).items():
        say(f"{path}: left out, {what}: {count:,}.")
    if not tasks:
        raise UserError(f"{path} holds no question that its document answers.")
    return list(tasks.values())


class Head(BaseModel):
    """The first line of a set of our own."""

    passages: Index
    tasks: Index
    frame: Literal[tuple(FRAMES)] = "documents"


def _built_parts(first: Record, records: Iterator[Record]) -> tuple[list[Record], Pool]:
    """Separate a set of our own, after its first line, into the records of tasks and the pool."""
    _, *lines = records
    head = checked(Head, _filled(first.fields), first.where, "build the set again")
    if len(lines) != head.passages + head.tasks:
        announced = f"{head.passages} passages and {head.tasks} tasks are announced"
        raise first.error(f"{announced} and {len(lines)} lines follow; build the set again")
    passages, titled = lines[: head.passages], head.frame == "documents"
    return lines[head.passages :], pool_of(_passages(passages, titled), head.frame)


def _passages(records: Iterable[Record], titled: bool = True) -> Iterator[Passage]:
    """Yield the passages {title, text} of records. titled: whether they need a title."""
    for record in records:
        passage = record.fields.get("title") if titled else "-", record.fields.get("text")
        yield checked(tuple[Text, Text], passage, record.where, "a passage has a title and a text")


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
        return [text for _, text in _passages(records_of(path), titled=False)]
    with _readable(path):
        text = _content(path).decode("utf-8-sig")
    if not text.strip():
        raise UserError(f"{path} is empty.")
    return [text]
