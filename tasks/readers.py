"""Read tasks from a file of any known form.

Holds: `Record`, `read_json`, one function per form, `records_of`, `read`, `read_passages`,
`read_texts`.
Leaves out: `Task` (data.py), writers (tasks/writers.py). No torch.
Exercise it: `python cli.py data look FILE`. Read next: tasks/writers.py.

A file, or each file of a split of the hub (tasks/hub.py), has a container (parquet, JSON lines, one
value of JSON that holds all records; all but parquet also as .gz) and a form (the fields of its
records). Any form may come in any container:

    file --_items--> (place, fields) --records_of--> Record --FORMS[form]--> (Task, Document)
         container                        checked             form

`read` then gives all tasks of the file one pool of passages. A record with choices is refused, for
only open questions are graded. A file that cannot be read raises a `UserError` that names the file,
the line (or row, or item) and the reason; a line says how much of what was left out.
"""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
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
Document = str | list[Passage] | list[int]  # a text, passages, or indices into a pool of passages

# ---------------------------------------------------------------- records and their fields

# the names of a document and of a passage's text in files of the user's own
DOCUMENTS = (
    "context", "contexts", "ctxs", "passages", "documents", "document", "passage", "article",
    "story",
)  # fmt: skip
PASSAGE = ("text", "paragraph_text", "passage", "content", "contents")
LABELS = ("kind", "dataset", "split", "level")
KINDS = {
    str: "a text", list: "a list", dict: "an object", int: "a whole number", float: "a number",
    bool: "true or false",
}  # fmt: skip


@dataclass(slots=True)
class Record:
    """Give access to the fields of one record.

    A field counts as present if it exists, has the required type and is not empty; otherwise a
    `UserError` names the file and the place.
    """

    path: Path
    place: str  # within the file, e.g. "line 3"; "" for the whole of it
    position: int  # among the records of the file, from 0
    fields: dict
    left_out: Counter = field(default_factory=Counter)  # of the whole file: what -> how often

    @property
    def where(self) -> str:
        """The file and the place, for errors."""
        return f"{self.path}, {self.place}" if self.place else str(self.path)

    def error(self, reason: str) -> UserError:
        return UserError(f"{self.where}: {reason}.")

    def get(self, name: str, kind: type, value: object = None) -> object:
        """Return the field `name`, checked; or `value`, a part of that field, checked likewise."""
        value = self.fields.get(name) if value is None else value
        if value is None:
            raise self.error(f"the field '{name}' is missing")
        if type(value) is not kind:
            actual = KINDS.get(type(value), "something else")
            raise self.error(f"'{name}' must be {KINDS[kind]}, this is {actual}")
        if kind is not int and not (value.strip() if kind is str else value):
            raise self.error(f"'{name}' is empty")
        return value

    def maybe(self, name: str, kind: type):
        """Return the field, or an empty value of its type if it is missing or empty."""
        return self.get(name, kind) if self.fields.get(name) not in (None, "", [], {}) else kind()

    def text(self, name: str, value: object = None) -> str:
        try:
            (text := self.get(name, str, value)).encode()
        except UnicodeEncodeError:
            half = "half of a surrogate pair (\\ud800 to \\udfff), which is no text"
            raise self.error(f"'{name}' holds {half}") from None
        return text

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, at least one."""
        values = self.get(name, list)
        return tuple(self.text(name, "" if value is None else value) for value in values)

    def answers(self, name: str, value: object = None) -> tuple[str, ...]:
        """Return the accepted answers of a field: a text, a number, {text}, TriviaQA's {value,
        aliases}, or a list of those."""
        value = self.fields.get(name) if value is None else value
        if type(value) in (int, float) and math.isfinite(value):
            return (str(int(value) if value == int(value) else value),)
        if not isinstance(value, list | dict):
            return (self.text(name, value),)
        parts = self.get(name, type(value), value)
        if isinstance(parts, dict):
            parts = [parts[key] for key in ("value", "text", "aliases") if parts.get(key)]
            self.get(name, list, parts)
        found = (self.answers(name, "" if part is None else part) for part in parts)
        return tuple(chain.from_iterable(found))

    def document(self, name: str) -> Document:
        """Return a field that is a text, or the passages of a list: texts or {title, text}."""
        if not (parts := self.fields.get(name)) or not isinstance(parts, list):
            return self.text(name)
        passages = []
        for part in parts:
            r = self.inside(name, part if isinstance(part, dict) else {name: part or ""})
            key = next((key for key in (*PASSAGE, name) if key in r.fields), "text")
            passages.append((r.maybe("title", str), r.text(key)))
        if all(title.strip() for title, _ in passages):
            return passages
        texts = (f"{title}\n{text}" if title else text for title, text in passages)
        return "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(texts, 1))

    def inside(self, name: str, value: object = None) -> Record:
        """Return a nested object as a record of the same place."""
        return replace(self, fields=self.get(name, dict, value))

    def parts(self, name: str, least: int = 1) -> list[Record]:
        """Return the objects of a list as records that name their place: "line 3, qa 2".

        least: 0 = the list may be empty, or missing.
        """
        values = self.get(name, list) if least else self.maybe(name, list)
        places = (f"{self.place}, {name} {n}".removeprefix(", ") for n in range(1, len(values) + 1))
        return [
            replace(self, place=place).inside(name, value)
            for place, value in zip(places, values, strict=True)
        ]

    def indices(self, name: str, values: object, n: int) -> tuple[int, ...]:
        """Check that `values` are indices into n items, from 0; there may be none."""
        values = [] if values is None else values
        if not isinstance(values, list) or any(
            type(value) is not int or not 0 <= value < n for value in values
        ):
            raise self.error(f"'{name}' must be a list of whole numbers from 0 to {n - 1}")
        return tuple(values)

    def task(
        self, question: str, answers: Sequence[str], gold: Sequence[int] = (), **labels: object
    ) -> Task:
        """Make a task, still without its document.

        The record's own id, kind, dataset, split and level take precedence over `labels`. Without
        any id, the position in the file serves as one, as in MemAgent's results.
        """
        ids = (self.fields.get("id"), self.fields.get("_id"), self.position)
        texts = {"id": self.text("id", str(next(value for value in ids if value is not None)))}
        for name in LABELS:
            value = self.fields.get(name)
            text = str((labels.get(name) or "") if value is None else value)
            texts[name] = self.text(name, text) if text.strip() else text  # it may be blank
        counts = {
            name: n if type(n := self.fields.get(name)) is int and n > 0 else 0
            for name in ("num_docs", "tokens")
        }
        return Task(question=question, answers=tuple(answers), gold=tuple(gold), **counts, **texts)


# ---------------------------------------------------------------- containers


def records_of(path: Path) -> Iterator[Record]:
    """Yield every record of a file, or of the files of a split of the hub, whatever the
    container."""
    import pyarrow as pa

    position, left_out = 0, Counter()
    for file, opened in _sources(path):
        record = Record(file, "", position, {}, left_out)
        try:
            with opened() as source:
                for place, fields in _items(file, source):
                    record = Record(file, place, position, fields, left_out)
                    if not isinstance(fields, dict):
                        raise record.error("a record must be an object with named fields")
                    yield record
                    position += 1
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last two: parquet
            damage = f"it may be damaged ({first_line(error)})"
            raise record.error(f"the file cannot be read from here on, {damage}") from error


def _sources(path: Path) -> list[tuple[Path, Callable[[], AbstractContextManager[IO[bytes]]]]]:
    """Return the path of each file, and what opens it."""
    if hub.is_hub(path):
        return [(file.path, partial(hub.open_file, file)) for file in hub.data_files(path)]
    return [(path, partial(existing(path).open, "rb"))]


def existing(path: str | Path) -> Path:
    """Return the path of a file. UserError: there is none, or the system takes no such path."""
    if not is_file(path):
        raise UserError(f"No file at {path}.{_instead(Path(path))}")
    return Path(path)


def _instead(path: Path) -> str:
    """Say by which command a file comes that is not there, or that it is a folder; else ""."""
    if path.is_dir():
        return " It is a folder: name a file in it."
    from tasks.downloads import SOURCES

    if name := next((part for part in path.parts if part in SOURCES), ""):
        get = f"`python cli.py data get {name}` fetches its files to data/{name}"
        return f" {get}; `data build FILE OUT` makes sets of questions."
    if length := re.search(r"_(\d+)\.json(l\.gz)?$", path.name):
        build = f"python cli.py data build FILE {path.parent} --lengths {length[1]}"
        return f" `{build}` makes such sets, of questions such as `data get hotpotqa` fetches."
    return ""


LARGEST = 1 << 30
"""Most bytes of a line, and of a file that is one value: HotpotQA's training split has .6 GB."""
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, and white space
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def _items(path: Path, file: IO[bytes]) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of every record.

    pyarrow reads parquet and decompresses. JSON is parsed line by line with the standard library:
    pyarrow.json (and `datasets` on top of it) cannot name the line of an error, turns answers such
    as "1994-05-01" into dates, and cannot represent HotpotQA's [title, [sentences]] pairs.
    """
    import pyarrow as pa

    if path.suffix == ".parquet":
        rows = chain.from_iterable(batch.to_pylist() for batch in _batches(path, file))
        yield from ((f"row {n}", fields) for n, fields in enumerate(rows, 1))
        return
    if {".csv", ".tsv"} & {*path.suffixes}:
        raise UserError(f"{path} is a table of text, which is not read: save it as JSON lines.")
    packing = PACKED.get(path.suffix)
    plain = pa.input_stream(file, compression=packing)
    stream = unpacked(file, path, plain) if packing else io.BufferedReader(plain)
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
        yield from ((f"item {n}", value) for n, value in enumerate(tree, 1))
        return
    parts = tree if isinstance(tree, dict) and not _known(tree) else {}
    lists = {name: part for name, part in parts.items() if isinstance(part, list) and part}
    if lists := {name: part for name, part in lists.items() if _known(part[0])}:
        for name, part in lists.items():
            yield from ((f"{clip(name, 80)} {n}", value) for n, value in enumerate(part, 1))
    elif isinstance(parts.get("data"), list):
        yield from _squad_items(Record(path, "", 0, parts))
    elif parts and all(map(_known, parts.values())):
        yield from ((f"'{clip(name, 80)}'", {"id": name} | value) for name, value in parts.items())
    else:
        yield f"line {line}", tree


def _squad_items(root: Record) -> Iterator[tuple[str, dict]]:
    """Flatten SQuAD's tree of articles, paragraphs and questions to one record per question."""
    for n, article in enumerate(root.parts("data"), 1):
        title = article.fields.get("title") or f"Article {n}"
        for paragraph in article.parts("paragraphs"):
            shared = {"title": title, "context": paragraph.text("context")}
            for question in paragraph.parts("qas"):
                yield paragraph.place, shared | question.fields


def _parse(raw: bytes, path: Path, line: int | None = None) -> object:
    """Parse JSON: one line, or a whole file if `line` is None (the error then locates itself)."""
    if len(raw) > LARGEST:
        place = f", line {line}," if line else ""
        largest = f"a value of more than {LARGEST >> 20:,} MiB"
        raise UserError(f"{path}{place} has {largest}: save one record a line.")
    try:
        return from_json(raw)
    except json.JSONDecodeError as error:
        line, reason = line or error.lineno, f"{error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        line = line or raw.count(b"\n", 0, error.start) + 1
        reason = f"not UTF-8, byte 0x{raw[error.start]:02x}"
    except ValueError as error:  # a number, or a nesting, thousands long
        line, reason = line or 1, first_line(error)
    raise UserError(f"{path}, line {line}: this is not JSON ({reason}).")


def read_json(path: str | Path) -> object:
    """Return the whole of a file (JSON, or .gz of it).

    UserError: there is no such file, it cannot be read, it is not JSON.
    """
    content = _content(path)
    try:
        return from_json(content)
    except ValueError as error:  # JSON, UTF-8, numbers without end
        raise UserError(f"{path}: this is not JSON ({first_line(error)}).") from error


def _content(path: str | Path) -> bytes:
    """Return the bytes of a file, of a .gz what it unpacks to. UserError: it cannot be read."""
    try:
        return read_data(existing(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}).") from error


# ---------------------------------------------------------------- forms
# Each function makes a task, and its document, out of one record


def _passage(r: Record) -> Passage:
    return r.text("title"), r.text("paragraph_text" if "paragraph_text" in r.fields else "text")


def pool_of(passages: Iterable[Passage], frame: str = "documents") -> Pool:
    """Make a pool of passages; titles are dropped in frames without titles."""
    passages = list(passages)
    titles = [title for title, _ in passages] if frame == "documents" else []
    return Pool(titles, [text for _, text in passages], frame)


def distinct_passages(pools: Iterable[Pool]) -> list[Passage]:
    """Return the different passages of all pools, sorted by title and text."""
    pairs = (zip(pool.titles, pool.texts, strict=True) for pool in pools)
    return sorted({passage for passages in pairs for passage in passages})


def _chat(r: Record) -> tuple[Task, Document]:
    """Read forms with a `prompt`, a text or a chat: MemAgent's training parquet and verl's
    {prompt, context, reward_model: {ground_truth}, extra_info}, verifiers' {prompt, answer,
    info: {context}}, vime's {prompt, label, metadata: {context, ground_truth, data_source}}."""
    name = "info" if {"answer", "info"} <= r.fields.keys() else "metadata"
    about = replace(r, fields=r.maybe("extra_info" if "reward_model" in r.fields else name, dict))
    if "reward_model" in r.fields:
        answers = r.inside("reward_model").answers("ground_truth")
    elif name == "metadata" and about.fields.get("ground_truth"):
        answers = about.answers("ground_truth")
    else:
        answers = r.answers("answer" if name == "info" else "label")
    dataset = r.fields.get("data_source", about.fields.get("data_source"))
    document = (r if "context" in r.fields else about).document("context")
    return about.task(_question(r), answers, dataset=dataset), document


def _question(r: Record) -> str:
    """Return the user's question of `prompt`, a text or the last message of a chat; messages before
    it, which an agent's own prompts have no place for, are counted."""
    if isinstance(r.fields.get("prompt"), str):
        return r.text("prompt")
    *before, last = r.parts("prompt")
    if (role := last.fields.get("role", "user")) != "user":
        raise r.error(f"the last message of 'prompt' must be the user's question, not {role!r:.40}")
    for message in before:
        role = clip(str(message.fields.get("role")), 40)
        r.left_out[f"messages of 'prompt' before the question (role {role})"] += 1
    return last.text("content")


def _split_documents(text: str) -> list[Passage]:
    """Split a text in the frame "documents" into its passages; [] if it is not exactly that."""
    parts = re.split(r"(?:\A|\n\n)Document \d+:\n", text)[1:]
    passages = [part.partition("\n")[::2] for part in parts]
    form, separator = FRAMES["documents"]
    framed = separator.join(form(i, *passage) for i, passage in enumerate(passages, 1))
    return passages if framed == text else []


def _eval(r: Record) -> tuple[Task, Document]:
    """Read MemAgent's eval_N.json: {input, context, answers: [..]}.

    From 12,800 documents on the context is passage numbers. ReMemR1's eval_{data set}_N.json have
    {evidence_idx: positions of the evidence, from 0, in hop order, some twice; type; level} too.
    """
    context, gold = r.fields.get("context"), ()
    if isinstance(context, list) and context and isinstance(context[0], int | list):
        # Some published files wrap the numbers in one more list
        numbers = context[0] if isinstance(context[0], list) else context
        document = list(r.indices("context", numbers, 2**31)) or r.text("context")
    else:
        document = r.document("context")
    indices = r.fields.get("evidence_idx")
    if indices and isinstance(document, str) and (passages := _split_documents(document)):
        gold = dict.fromkeys(r.indices("evidence_idx", indices, len(passages)))
        document = passages
    dataset = re.match(r"eval_(\w*?[a-z]\w*?)_\d+", r.path.name)
    labels = {"kind": r.fields.get("type"), "dataset": dataset and dataset[1]}
    return r.task(r.text("input"), r.answers("answers"), [*gold], **labels), document


def _ruler(r: Record) -> tuple[Task, Document]:
    """Read RULER's eval_{task}_{length}.json as MemAgent writes it: {input, context,
    outputs: [..], answer_prefix, length}."""
    name = r.path.name.partition(".")[0].removeprefix("eval_")
    kind, _, length = name.rpartition("_")
    if not length.isdecimal():
        kind, length = name, "0"
    task = r.task(r.text("input"), r.answers("outputs"), kind=kind, dataset="ruler")
    return replace(task, tokens=int(length)), r.text("context")


def _own(r: Record) -> tuple[Task, Document]:
    """Read the user's own records: {question, answers or answer, context: text or passages, or what
    else `DOCUMENTS` names} and, optionally, id, kind, dataset, split."""
    if isinstance(context := r.fields.get("context"), dict) or (
        isinstance(context, list) and context and isinstance(context[0], list)
    ):
        return _hotpotqa(r)
    name, *others = [name for name in DOCUMENTS if r.fields.get(name)] or ["context"]
    if others:
        raise r.error(f"both {name!r} and {others[0]!r} look like the document: leave one out")
    return r.task(r.text("question"), _answers(r)), r.document(name)


def _answers(r: Record) -> tuple[str, ...]:
    names = ("golden_answers", "answers")
    return r.answers(next((name for name in names if r.fields.get(name) is not None), "answer"))


def _gold_positions(titles: Sequence[str], evidence: Iterable[str]) -> list[int]:
    """Return the positions of the evidence titles, without repetition; [] if the document lacks
    one, as fullwiki's may: depths and order of incomplete evidence would be wrong."""
    evidence = [*dict.fromkeys(evidence)]
    return [titles.index(title) for title in evidence] if {*evidence} <= {*titles} else []


def _hotpotqa(r: Record) -> tuple[Task, Document]:
    """Read HotpotQA's questions and 2WikiMultiHopQA's, which have `evidences` beside.

    The official json: {_id, question, answer, context: [[title, [sentence]]],
    supporting_facts: [[title, n]], type}. On the hub tables stand for the pairs, context: {title:
    [..], sentences or content: [[..]]} and supporting_facts: {title: [..]}; FlashRAG has the same
    in `metadata`, and golden_answers.
    """
    m = r if "context" in r.fields else r.inside("metadata")
    # FlashRAG's two data sets differ in nothing but the path
    names = r.path.parent.name, r.path.name
    is_2wiki = names[0] in ("2wiki", "2wikimultihopqa") or names[1].startswith("2wiki")
    is_2wiki = "evidences" in r.fields or (is_2wiki and isinstance(m.fields.get("context"), dict))
    document = []
    for title, sentences in _pairs(m, "context", "sentences", "content"):
        if not isinstance(sentences, list):
            raise r.error("'context' must hold a list of sentences for every title")
        texts = [m.text("context", sentence) for sentence in sentences if sentence != ""]
        # HotpotQA's sentences begin with their own blank
        document.append((m.text("context", title), (" " if is_2wiki else "").join(texts)))
    if isinstance(facts := m.fields.get("supporting_facts") or [], dict):
        evidence = m.inside("supporting_facts").maybe("title", list)
    else:
        evidence = [title for title, _ in _pairs(m, "supporting_facts")] if facts else []
    evidence = [m.text("supporting_facts", title) for title in evidence]
    gold = _gold_positions([title for title, _ in document], evidence)
    labels = {"kind": m.fields.get("type"), "level": m.fields.get("level")}
    labels["dataset"] = "2wikimultihopqa" if is_2wiki else "hotpotqa"
    return r.task(r.text("question"), _answers(r), gold, **labels), document


def _pairs(r: Record, name: str, *columns: str) -> list[Sequence]:
    """Return the pairs (title, value) of a list of pairs, or of a table {title: [..], column: [..]}
    whose values are the first of `columns` that exists."""
    if isinstance(r.fields.get(name), dict):
        table = r.inside(name)
        second = next((column for column in columns if column in table.fields), columns[0])
        titles, values = table.texts("title"), table.get(second, list)
        if len(titles) != len(values):
            raise r.error(f"'{name}' has {len(titles)} titles and {len(values)} {second}")
        return [*zip(titles, values, strict=True)]
    pairs = r.get(name, list)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise r.error(f"'{name}' must hold pairs that begin with a title")
    return pairs


def _paragraphs(r: Record) -> tuple[Task, Document]:
    """Read questions with numbered paragraphs {title, text}: {id, question, answers: [..],
    hops: [index of a paragraph], paragraphs, type, orig_split}; or MuSiQue's {id, question, answer,
    answer_aliases: [..], paragraphs: [{title, paragraph_text}],
    question_decomposition: [{paragraph_support_idx}]}."""
    passages = [_passage(paragraph) for paragraph in r.parts("paragraphs")]
    labels = {"kind": r.fields.get("type"), "split": r.fields.get("orig_split")}
    if r.fields.get("answers") is not None:
        gold = r.indices("hops", r.fields.get("hops"), len(passages))
        return r.task(r.text("question"), r.answers("answers"), gold, **labels), passages
    steps = r.parts("question_decomposition", 0)
    indices = [step.fields.get("paragraph_support_idx") for step in steps]
    indices = [index for index in indices if index is not None]
    gold = dict.fromkeys(r.indices("paragraph_support_idx", indices, len(passages)))
    aliases = r.answers("answer_aliases") if r.fields.get("answer_aliases") else ()
    labels = {"kind": f"{len(steps)}hop" if steps else None, "dataset": "musique"}
    return r.task(r.text("question"), (*r.answers("answer"), *aliases), [*gold], **labels), passages


def _squad(r: Record) -> tuple[Task, Document]:
    """Read SQuAD, a question and the one paragraph that answers it: {question, title, context,
    answers: [{text}] or {text: [..]}}."""
    answers = dict.fromkeys(r.answers("answers"))
    task = r.task(r.text("question"), [*answers], [0], kind="squad", dataset="squad")
    return task, [(r.text("title"), r.text("context"))]


def _built(r: Record) -> tuple[Task, Document]:
    """Read a task line of our own sets (`write_built`), which follow a first line
    {form, passages: n, tasks: m} and n lines {title, text}."""
    order = r.get("order", list)
    gold = r.indices("gold", r.fields.get("gold"), len(order))
    return r.task(r.text("question"), r.texts("answers"), gold), order


# form -> its reader, and the fields by which a file's first record is recognised (first match wins)
FORMS: dict[str, tuple[Callable[[Record], tuple[Task, Document]], tuple[str, ...]]] = {
    "built": (_built, ("form", "passages", "tasks")),
    "memagent": (_chat, ("prompt", "reward_model")),
    "verifiers": (_chat, ("prompt", "answer", "info")),
    "vime": (_chat, ("prompt", "label", "metadata")),
    "eval": (_eval, ("input", "context", "answers")),
    "ruler": (_ruler, ("input", "context", "outputs")),
    "flashrag": (_hotpotqa, ("id", "question", "golden_answers", "metadata")),
    "hotpotqa": (_hotpotqa, ("question", "context", "supporting_facts")),
    "musique": (_paragraphs, ("question", "paragraphs")),
    "squad": (_squad, ("question", "title", "context", "answers")),
    "own": (_own, ("question", "context")),
}

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
    first, records, form = _opened(path)
    numbered = None  # the pool that a document of indices refers to
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
            task.pool = numbered
            task.order = record.indices("passage numbers", document, len(numbered.texts))
    shared.titles, shared.texts = [title for title, _ in index], [text for _, text in index]
    _say_left_out(path, first)
    if not tasks:
        raise UserError(f"{path} holds no question that its document answers.")
    return list(tasks.values())


def _opened(path: str | Path) -> tuple[Record, Iterator[Record], str]:
    """Return the first record of a file, all of them, and their form, recognised by the first."""
    records = records_of(Path(path))
    first = next(records, None)
    if first is None:
        raise UserError(f"{path} is empty: it holds no tasks.")
    if not (form := _known(first.fields)):
        known = "; ".join(f"{name} ({', '.join(names)})" for name, (_, names) in FORMS.items())
        fields = ", ".join(first.fields)
        raise first.error(f"no form is known with the fields {fields}. Known are {known}")
    return first, chain([first], records), form


def _known(fields: object) -> str:
    """Return the form of a record, by its fields; "" if none is known."""
    present = {*fields} if isinstance(fields, dict) else set()
    forms = (name for name, (_, names) in FORMS.items() if {*names} <= present)
    return next(forms, "own" if "question" in present and present & {*DOCUMENTS} else "")


def _tasks_of(records: Iterable[Record], form: str) -> Iterator[tuple[Record, Task, Document]]:
    """Yield what is read of each record; questions that their document does not answer, which no
    answer would be right for, are counted instead."""
    for record in records:
        if name := _choices(record):
            raise record.error(f"'{name}' holds choices, and only open questions can be asked")
        if _is_answerable(record):
            task, document = FORMS[form][0](record)
            yield record, task, document
        else:
            record.left_out["questions that their document does not answer"] += 1


# choices, options, answer_choices; choice_A, option1, opa (MedMCQA's)
CHOICES = re.compile(
    r"(?:answer_?)?(?:choices?|options?|candidates|alternatives|endings|distractors?)"
    r"(?:[_ ]?(?:[A-J]|\d\d?))?|op[a-j]",
    re.I,
)


def _choices(r: Record) -> str:
    """Return the name of a field that holds the choices of a question; "" of an open one."""
    beside = (r.fields.get(name) for name in ("metadata", "extra_info", "info"))
    for fields in (r.fields, *(each for each in beside if isinstance(each, dict))):
        filled = [name for name, value in fields.items() if value not in (None, "", [], {})]
        if found := [name for name in filled if CHOICES.fullmatch(name)]:
            return found[0]
        if {"A", "B"} <= {*filled}:
            return "A"
    return ""


def _is_answerable(r: Record) -> bool:
    """Tell whether a record's question is answered: MuSiQue's, SQuAD 2's, also of the hub."""
    answers = r.fields.get("answers")
    none = isinstance(answers, dict) and "answer_start" in answers and not answers.get("text")
    impossible = r.fields.get("is_impossible") is True or r.fields.get("unanswerable") is True
    return not (none or impossible or r.fields.get("answerable") is False)


def _say_left_out(path: str | Path, record: Record) -> None:
    for what, count in record.left_out.items():
        say(f"{path}: left out, {what}: {count:,}.")


def _built_parts(first: Record, records: Iterator[Record]) -> tuple[list[Record], Pool]:
    """Separate a set of our own, after its first line, into the records of tasks and the pool."""
    _, *lines = records
    n, m = first.get("passages", int), first.get("tasks", int)
    if min(n, m) < 0 or len(lines) != n + m:
        announced = f"{n} passages and {m} tasks are announced"
        raise first.error(f"{announced} and {len(lines)} lines follow; build the set again")
    frame = first.fields.get("frame", "documents")
    if frame not in [*FRAMES]:  # a list: the value may not be hashable
        raise first.error(f"'frame' must be one of {', '.join(FRAMES)}, not {frame!r}")
    passage = _passage if frame == "documents" else lambda r: ("", r.text("text"))
    return lines[n:], pool_of(map(passage, lines[:n]), frame)


def _numbered_pool(record: Record, pool: str | Path | None) -> Pool:
    """Read the pool that passage numbers refer to, sorted by title and text as in MemAgent."""
    if pool is None:
        request = "name the HotpotQA json that they count in as well"
        raise record.error(f"the context is passage numbers; {request}")
    source = read(pool)[0].pool
    return pool_of(sorted(zip(source.titles, source.texts, strict=True), key="\n".join))


def read_passages(path: str | Path) -> Pool:
    """Read further passages {title, text}, to lengthen documents with."""
    return pool_of(map(_passage, records_of(Path(path))))


def read_texts(path: str | Path) -> list[str]:
    """Read running text: passages {text} (JSON), or a whole text file (UTF-8, or .gz of it)."""
    path = Path(path)
    if path.name.removesuffix(".gz").endswith((".json", ".jsonl", ".parquet")):
        return [record.text("text") for record in records_of(path)]
    try:
        text = _content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text ({first_line(error)}).") from error
    if not text.strip():
        raise UserError(f"{path} is empty.")
    return [text]
