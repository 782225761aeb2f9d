"""Tasks: what is read, what is asked, how an answer is graded; the readers and writers of every data form.

Holds: `Task`, `Pool`; readers and writers. Leaves out: graders and metrics (graders.py), generated English (worlds.py), RULER-HQA (hqa.py),
RULER's tasks (ruler.py), tokens (text.py). No torch.
Exercise it: `python cli.py data look FILE`. Read next: memagent.py.

A file has a container (parquet, a JSON array, JSON lines; the last two also as .gz) and a form (the fields of its records).
`_records` knows the containers, `FORMS` the forms; any form may come in any container. What cannot be read is a `UserError` that
names the file, the line (or row, or item) and the reason. Writers write beside the file and rename when all is well.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

from graders import normalize_answer
from text import UserError, is_file, replacing

FRAMES: dict[str, tuple[Callable[[int, str, str], str], str]] = {
    "documents": (lambda i, title, text: f"Document {i}:\n{title}\n{text}", "\n\n"),  # MemAgent's and RULER's (spec memagent.md 7)
    "lines": (lambda i, title, text: text, "\n"),
    "words": (lambda i, title, text: text, " "),
    "numbered": (lambda i, title, text: f"{i}. {text}", " "),
}
"""How passages become a document: the text of passage i (from 1) with its title, and what stands between two of them."""


@dataclass(slots=True)
class Pool:
    """Passages that documents are composed of, stored once and shared by many tasks. Only whole documents have titles; the passages
    of other frames are sentences or words."""

    titles: Sequence[str]
    texts: Sequence[str]
    frame: str = "documents"
    _digests: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    def document(self, order: Iterable[int]) -> str:
        shape, between = FRAMES[self.frame]
        if self.frame == "documents":
            return between.join(shape(i, self.titles[k], self.texts[k]) for i, k in enumerate(order, 1))
        return between.join(shape(i, "", self.texts[k]) for i, k in enumerate(order, 1))

    def digest(self, order: Iterable[int]) -> bytes:
        """What tells one document from another, without making either."""
        if not self._digests:
            titles = self.titles if self.frame == "documents" else repeat("")
            pairs = zip(titles, self.texts, strict=False)
            self._digests = [blake2b(repr(pair).encode(errors="surrogatepass"), digest_size=16).digest() for pair in pairs]
        return blake2b(self.frame.encode() + b"".join(self._digests[k] for k in order), digest_size=16).digest()


@dataclass(slots=True)
class Task:
    """One question about one document.

    The document is either `text`, or `order`: indices into `pool`, in reading order, expanded each time `document` is read.
    """

    id: str
    question: str
    answers: tuple[str, ...]  # accepted answers; the first is the gold one (RULER's own tasks: all of them are asked for)
    text: str | None = None
    pool: Pool | None = field(default=None, repr=False)
    order: Sequence[int] = ()
    gold: tuple[int, ...] = ()  # positions in `order`, from 0, of the passages that hold the evidence, in hop order
    kind: str = ""  # e.g. one_fact, two_hop, bridge, comparison
    dataset: str = ""
    split: str = ""  # the source's own split where it names one: train, validation
    level: str = ""  # how hard the source says it is: easy, medium, hard
    num_docs: int = field(default=0, compare=False)  # documents in `text` as the source counts them, 0 if it does not say
    tokens: int = field(default=0, compare=False)  # RULER's own tasks: the length in tokens that they were made for

    @property
    def document(self) -> str:
        if self.text is not None:
            return self.text
        assert self.pool is not None, f"task {self.id} has neither text nor pool"
        return self.pool.document(self.order)

    @property
    def n_documents(self) -> int:
        """Documents that `document` is made of: those in `order`, else what the source says, else those numbered in the text, at least 1."""
        if self.pool is not None:
            return len(self.order) if self.pool.frame == "documents" else 1
        return self.num_docs or max(1, len(re.findall(r"^Document \d+:", self.text or "", re.M)))

    @property
    def characters(self) -> int:
        """Length of the document, about: without making it."""
        if self.pool is None:
            return len(self.text or "")
        texts, titles = self.pool.texts, self.pool.titles if self.pool.frame == "documents" else ()
        return sum(len(texts[k]) + (len(titles[k]) + 16 if titles else 1) for k in self.order)

    @property
    def digest(self) -> str:
        """What tells one task from another: question, accepted answers and how they are graded, document and evidence."""
        document = self.pool.digest(self.order) if self.pool is not None else (self.text or "").encode(errors="surrogatepass")
        said = json.dumps([self.question, self.answers, self.gold, self.asks_for_all]).encode()
        return blake2b(said + b"\0" + document, digest_size=8).hexdigest()

    @property
    def question_digest(self) -> str:
        """What tells one question from another, whatever its id and its document: 8 bytes of its normalised text, as hex digits.

        RULER's own tasks ask in the same words again and again: of these the answers count too.
        """
        said = [normalize_answer(self.question) or self.question, *(sorted(self.answers) if self.asks_for_all else ())]
        return blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()

    @property
    def evidence(self) -> str | None:
        """The passages that hold the evidence, in reading order, framed like the document; None where it is not known which they are.

        RULER's cwe and fwe count words: all of their document is evidence.
        """
        if self.dataset == "ruler" and self.kind in ("cwe", "fwe"):
            return self.document
        if self.pool is None or not self.gold:
            return None
        return self.pool.document(self.order[k] for k in sorted({*self.gold}))

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each piece of evidence stands, as a share of the document's passages, in hop order; () where it is not known."""
        return tuple((k + 0.5) / len(self.order) for k in self.gold) if self.pool is not None else ()

    @property
    def clues(self) -> tuple[str, ...]:
        """What a memory with evidence in it is likely to name: the title of each passage that holds it or, of passages without titles, the
        passage; in hop order. () where it is not known which they are."""
        if self.pool is None:
            return ()
        names = self.pool.titles if self.pool.frame == "documents" else self.pool.texts
        return tuple(names[self.order[k]] for k in dict.fromkeys(self.gold))

    @property
    def asks_for_all(self) -> bool:
        """Whether every one of `answers` is asked for: RULER's own tasks but its questions, which accept any one (spec memagent.md 10)."""
        return self.dataset == "ruler" and not self.kind.startswith("qa")


Passage = tuple[str, str]  # title, text
Document = str | list[Passage] | list[int]  # as read: a text, passages, or numbers of passages in a pool

# ---- Reading: records and their fields ----

KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number", float: "a number", bool: "true or false"}


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
            raise self.error(f"'{name}' must be {KINDS[kind]}, this is {KINDS.get(type(value), 'something else')}")
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
            raise self.error(f"'{name}' holds half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
        return text

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, at least one."""
        return tuple(self.text(name, "" if value is None else value) for value in self.get(name, list))

    def inside(self, name: str, value: object = None) -> Record:
        return Record(self.where, self.position, self.get(name, dict, value))

    def places(self, name: str, values: object, n: int) -> tuple[int, ...]:
        """Positions among n things, from 0; none at all is fine."""
        values = [] if values is None else values
        if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < n for value in values):
            raise self.error(f"'{name}' must be a list of whole numbers from 0 to {n - 1}")
        return tuple(values)

    def task(self, question: str, answers: Sequence[str], gold: Sequence[int] = (), **labels: object) -> Task:
        """A task still without its document. The record's own id, kind, dataset, split and level go before `labels`; the last resort
        for an id is the position in the file, by which MemAgent's results count too."""
        own = {label: self.fields.get(label) for label in ("id", "kind", "dataset", "split", "level")}
        labels = {label: str(value) for label, value in chain(labels.items(), own.items()) if value is not None}
        num_docs, tokens = (n if type(n := self.fields.get(name)) is int and n > 0 else 0 for name in ("num_docs", "tokens"))
        # a label may be blank, an id may not
        known = {"id": str(self.position)} | {
            label: self.text(label, value) if value.strip() or (label == "id" and value) else value
            for label, value in labels.items()
        }
        return Task(question=question, answers=tuple(answers), gold=tuple(gold), num_docs=num_docs, tokens=tokens, **known)


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

            rows = chain.from_iterable(batch.to_pylist() for batch in pq.ParquetFile(path).iter_batches(64))
            for n, fields in enumerate(rows):
                yield Record(where := f"{path}, row {n + 1}", n, fields)
            return
        with io.BufferedReader(pa.input_stream(path)) as stream:
            start = stream.peek(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[":
                parsed = ((f"{path}, item {n}", fields) for n, fields in enumerate(_parse(stream.read(), path), 1))
            elif SQUAD.match(start):
                parsed = _squad_items(_parse(stream.read(), path), path)
            else:
                parsed = ((f"{path}, line {n}", _parse(line, path, n)) for n, line in enumerate(stream, 1) if line.strip())
            for n, (where, fields) in enumerate(parsed):  # `where` is for the error below, too
                if not isinstance(fields, dict):
                    raise UserError(
                        f"{where}: a record must be an object with named fields, this is {KINDS.get(type(fields), 'null')}."
                    )
                yield Record(where, n, fields)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last two: parquet
        raise UserError(f"{where}: the file cannot be read from here on, it may be damaged ({_one_line(error)}).") from error


def _parse(raw: bytes, path: Path, line: int | None = None) -> object:
    """JSON of one line, or of a whole file when `line` is None (the error then finds its own)."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        line, reason = line or error.lineno, f"{error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        line, reason = line or raw.count(b"\n", 0, error.start) + 1, f"not UTF-8, byte 0x{raw[error.start]:02x}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of open brackets
        line, reason = line or 1, _one_line(error)
    raise UserError(f"{path}, line {line}: this is not JSON ({reason}).")


SQUAD = re.compile(rb'\{\s*"(version"\s*:\s*"[^"]*"\s*,\s*"data|data)"\s*:\s*\[')  # one object that holds the whole file


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
    return Pool([title for title, _ in passages] if frame == "documents" else [], [text for _, text in passages], frame)


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
    passages = [part.partition("\n")[::2] for part in re.split(r"(?:\A|\n\n)Document \d+:\n", text)[1:]]
    shape, between = FRAMES["documents"]
    return passages if between.join(shape(i, *passage) for i, passage in enumerate(passages, 1)) == text else []


def _eval(r: Record) -> tuple[Task, Document]:
    """MemAgent's eval_N.json: {input, context, answers: [..]}. From 12,800 documents on the context is passage numbers. ReMemR1's
    eval_{data set}_N.json have {evidence_idx: positions of the evidence, from 0, in hop order, some twice; type; level} besides."""
    context = r.fields.get("context")
    if isinstance(context, list):  # some published files nest the numbers once more
        context = list(r.places("context", context[0] if context and isinstance(context[0], list) else context, 2**31))
    document = context if isinstance(context, list) and context else r.text("context")
    gold: tuple[int, ...] = ()
    if (places := r.fields.get("evidence_idx")) and isinstance(document, str) and (passages := _framed(document)):
        document, gold = passages, tuple(dict.fromkeys(r.places("evidence_idx", places, len(passages))))
    named = re.match(r"eval_(\w*?[a-z]\w*?)_\d+", Path(r.where.rpartition(", ")[0]).name)
    labels = {"kind": r.fields.get("type"), "dataset": named and named[1]}
    return r.task(r.text("input"), r.texts("answers"), gold, **labels), document


def _ruler(r: Record) -> tuple[Task, Document]:
    """RULER's eval_{task}_{length}.json as MemAgent writes it: {input, context, outputs: [..], answer_prefix, length}."""
    name = Path(r.where.rpartition(", ")[0]).name.partition(".")[0].removeprefix("eval_")
    kind, _, length = name.rpartition("_")
    task = r.task(r.text("input"), r.texts("outputs"), kind=kind if length.isdecimal() else name, dataset="ruler")
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
        document.append((title, _glued([m.text("context", s) for s in sentences if s != ""], dataset)))
    facts = Record(r.where, r.position, m.maybe("supporting_facts", dict)).maybe("title", list)
    gold = _gold([title for title, _ in document], [m.text("supporting_facts", title) for title in facts])
    answers = r.texts("golden_answers") if r.maybe("golden_answers", list) else [r.text("answer")]
    return r.task(
        r.text("question"), answers, gold, kind=m.fields.get("type"), dataset=dataset, level=m.fields.get("level")
    ), document


def _musique(r: Record) -> tuple[Task, Document]:
    """MuSiQue's JSONL: {id, question, answer, answer_aliases: [..], paragraphs: [{title, paragraph_text}], question_decomposition:
    [{paragraph_support_idx}]}."""
    paragraphs = [r.inside("paragraphs", paragraph) for paragraph in r.get("paragraphs", list)]
    steps = [r.inside("question_decomposition", step) for step in r.maybe("question_decomposition", list)]
    places = [place for step in steps if (place := step.fields.get("paragraph_support_idx")) is not None]
    gold = tuple(dict.fromkeys(r.places("paragraph_support_idx", places, len(paragraphs))))
    answers = [r.text("answer"), *(r.texts("answer_aliases") if r.maybe("answer_aliases", list) else ())]
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
        raise r.error("'answers' is empty: a question without an answer in its paragraph cannot be graded")
    answers = list(dict.fromkeys(r.text("answers", text) for text in said))
    return r.task(r.text("question"), answers, [0], kind="squad", dataset="squad"), [(r.text("title"), r.text("context"))]


def _shared(r: Record) -> tuple[Task, Document]:
    """../shared/data's JSONL: {id, question, answers: [..], hops: [paragraph number], paragraphs: [{title, text}], type, ..}."""
    paragraphs = [r.inside("paragraphs", paragraph) for paragraph in r.get("paragraphs", list)]
    gold = r.places("hops", r.fields.get("hops"), len(paragraphs))
    labels = {"kind": r.fields.get("type"), "split": r.fields.get("orig_split")}
    return r.task(r.text("question"), r.texts("answers"), gold, **labels), [_passage(p) for p in paragraphs]


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
        form = next((name for name, (_, names) in FORMS.items() if all(n in first.fields for n in names)), "?")
    if form not in FORMS:
        known = "; ".join(f"{name} ({', '.join(names)})" for name, (_, names) in FORMS.items())
        raise first.error(f"no form is known with the fields {', '.join(first.fields)}. Known are {known}")
    records, numbered = chain([first], records), None
    if form == "built":
        n, m, (_, *lines) = first.get("passages", int), first.get("tasks", int), records
        if min(n, m) < 0 or len(lines) != n + m:
            raise first.error(f"{n} passages and {m} tasks are announced and {len(lines)} lines follow; build the set again")
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
            task.pool, task.order = shared, tuple(place.setdefault(passage, len(place)) for passage in document)
        else:
            if numbered is None and pool is None:
                raise record.error("the context is passage numbers; name the HotpotQA json that they count in as well")
            if numbered is None:  # MemAgent numbers the passages in this order
                source = read(pool, "hotpotqa")[0].pool
                numbered = pool_of(sorted(zip(source.titles, source.texts, strict=True), key="\n".join))
            task.pool, task.order = numbered, record.places("passage numbers", document, len(numbered.texts))
    shared.titles, shared.texts = [title for title, _ in place], [text for _, text in place]
    return list(tasks.values())


def read_passages(path: str | Path) -> Pool:
    """Further passages {title, text}, to fill documents with."""
    return pool_of(map(_passage, _records(Path(path))))


def read_texts(path: str | Path) -> list[str]:
    """Running text: the texts of passages {text} (JSON), or a whole text file; of a folder, all of its files in order of their names."""
    path = Path(path)
    if not is_file(path) and path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
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


# ---- The questions that a policy was trained on ----

TRAINED_ON = "trained_on.csv"


def trained_on(folder: str | Path, before: int | None = None) -> dict[str, tuple[int, str]]:
    """The questions that a run, or the policy in a model's folder, was trained on: `Task.question_digest` -> (step, id).

    Empty where the folder does not say, as of a model that somebody else has trained. before: only those of earlier steps. An export
    keeps the digests alone (step 0, no id). UserError if the file is damaged.
    """
    path = Path(folder, TRAINED_ON)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(row["digest"], int(row.get("step") or 0), row.get("id") or "") for row in csv.DictReader(file)]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a list of questions ({_one_line(error)}).") from error
    return {digest: (step, name) for digest, step, name in rows if digest and (before is None or step < before)}


def write_trained_on(folder: Path, questions: Iterable[tuple[str, int, str]] | Iterable[str]) -> None:
    """Write `TRAINED_ON`, whole or not at all: (digest, step, id) of a run, or the digests alone of an export."""
    rows = [[q] if isinstance(q, str) else q for q in questions]
    with _replacing(folder / TRAINED_ON) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["digest", "step", "id"][: len(rows[0])] if rows else ["digest"], *rows])


# ---- Writing ----


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """`text.replacing` for a path of the user's: what the system refuses is a UserError."""
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise UserError(f"{path} cannot be written: {_one_line(error)}.") from error


def _write_json(path: str | Path, lines: Iterable[dict], before: str = "", between: str = "\n", after: str = "\n") -> None:
    """Each of `lines` as one line of JSON, compressed if the name ends in .gz."""
    import pyarrow as pa

    if (path := Path(path)).suffix == ".parquet":
        raise UserError(f"{path} cannot be written: this form is JSON, its name must not end in .parquet.")
    compression = "gzip" if path.suffix == ".gz" else None
    with _replacing(path) as temporary, pa.output_stream(temporary, compression=compression) as stream:
        for n, line in enumerate(lines):
            stream.write(((between if n else before) + json.dumps(line, ensure_ascii=False)).encode())
        stream.write(after.encode())


def _labels(task: Task) -> dict[str, str]:
    """Fields beyond the published forms, so that a task comes back as it went."""
    labels = {"id": task.id, "kind": task.kind, "dataset": task.dataset, "split": task.split}
    return labels | {name: value for name in ("level", "tokens") if (value := getattr(task, name))}


def _checked(tasks: Sequence[Task]) -> Sequence[Task]:
    """Refuses what no reader would take back."""
    if not tasks:
        raise UserError("There are no tasks to write.")
    for task in tasks:
        if not (task.question.strip() and task.answers and all(answer.strip() for answer in task.answers)):
            raise UserError(f"Task {task.id} has no question or no accepted answer; only tasks that can be graded are written.")
    return tasks


def _expanded(tasks: Sequence[Task]) -> Iterator[tuple[Task, dict]]:
    """Each task with the fields that the three published forms share."""
    for task in _checked(tasks):
        yield task, {"context": task.document, "num_docs": task.n_documents}


def _evidence(task: Task) -> dict:
    """Where the evidence stands, in the fields of ReMemR1's eval files; {} where it is not known."""
    if task.pool is None or not task.gold:
        return {}
    gold = list(task.gold)
    distance = min((b - a for a, b in pairwise(sorted(gold))), default=None)
    forward, reverse = gold == sorted(gold), gold == sorted(gold, reverse=True)
    return {"evidence_idx": gold, "is_ordered": forward, "is_reverse_ordered": reverse, "min_distance": distance, "type": task.kind}


def write_eval_json(path: str | Path, tasks: Sequence[Task]) -> None:
    """MemAgent's eval form, with the full text; ReMemR1's, where the evidence is known."""
    rows = (
        {"input": task.question, "answers": list(task.answers), "index": index} | shared | _evidence(task) | _labels(task)
        for index, (task, shared) in enumerate(_expanded(tasks))
    )
    _write_json(path, rows, before="[\n", between=",\n", after="\n]\n")


def write_vime_jsonl(path: str | Path, tasks: Sequence[Task]) -> None:
    """vime's training form, with the full text. `data_source` names the grader there, hence always hotpotqa."""
    rows = (
        {
            "prompt": task.question,
            "label": task.answers[0],
            "metadata": {"ground_truth": list(task.answers), "data_source": "hotpotqa"} | shared | _labels(task),
        }
        for task, shared in _expanded(tasks)
    )
    _write_json(path, rows)


def write_parquet(path: str | Path, tasks: Sequence[Task]) -> None:
    """MemAgent's training form, with the full text. `data_source` names the grader there, hence always hotpotqa."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = (
        {
            "data_source": "hotpotqa",
            "prompt": [{"role": "user", "content": task.question}],
            "context": shared["context"],
            "ability": "memory",
            "reward_model": {"style": "rule", "ground_truth": list(task.answers)},
            "extra_info": {"index": index, "question": task.question, "num_docs": shared["num_docs"]} | _labels(task),
        }
        for index, (task, shared) in enumerate(_expanded(tasks))
    )
    if (path := Path(path)).suffix != ".parquet":
        raise UserError(f"{path} cannot be written: the name of a parquet file must end in .parquet.")
    with _replacing(path) as temporary:
        table = pa.Table.from_pylist(list(islice(rows, 32)))  # in parts: at 6,400 documents a row is 3.6 MB of text
        with pq.ParquetWriter(temporary, table.schema, compression="zstd") as writer:
            while table.num_rows:
                writer.write_table(table)
                table = pa.Table.from_pylist(list(islice(rows, 32)), table.schema)


def write_built(path: str | Path, tasks: Sequence[Task], **about: str | int | bool) -> None:
    """Our own form: each passage once, documents as indices. `about` (seed, n_documents, ..) is kept in the first line."""
    pool = _checked(tasks)[0].pool
    if pool is None or any(task.pool is not pool for task in tasks):
        raise UserError("Only tasks that share one pool of passages can be kept as a set: build it first.")
    documents = pool.frame == "documents"
    head = (
        {"form": "memagent-set", "passages": len(pool.texts), "tasks": len(tasks)}
        | ({} if documents else {"frame": pool.frame})
        | about
    )
    titles = pool.titles if documents else repeat(None)
    passages = (({"title": title} if documents else {}) | {"text": text} for title, text in zip(titles, pool.texts, strict=False))
    rows = (
        _labels(task) | {"question": task.question, "answers": task.answers, "order": list(task.order), "gold": task.gold}
        for task in tasks
    )
    _write_json(path, chain([head], passages, rows))


WRITERS = {"eval": write_eval_json, "memagent": write_parquet, "vime": write_vime_jsonl, "built": write_built}


def write(path: str | Path, tasks: Sequence[Task], form: str) -> None:
    """A form by its name."""
    if form not in WRITERS:
        raise UserError(f"'{form}' is no form that can be written; these are: {', '.join(WRITERS)}.")
    WRITERS[form](path, tasks)
