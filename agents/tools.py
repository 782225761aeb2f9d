"""The six tools by which a policy searches and rewrites a memory store.

A tool is a pydantic model of its arguments with a method `run`. The JSON schema that a model is
shown, the check of what it sends and the text of an error come from the same class:

    name, arguments --model_validate--> tool --run--> reply, entries --Store.record--> Op
                            |             |
                            +--- fault ---+-> "Error: FIELD: ...", nothing written, an Op as well

A faulty call never raises: it is an operation that failed, with a code. An optional argument that
is null counts as not given; an argument that would have no effect is refused.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError

from agents.search import Search
from agents.store import Entry, Op, Snapshot, Store
from config.errors import clean, clip
from data import seed_of
from tasks.conversations import ENTRY_ID, KINDS, check_day, check_text

MALFORMED = (
    *("unknown_tool", "bad_arguments", "missing", "too_long", "empty"),
    *("unreadable", "cut", "too_many"),
)
"""Codes of a call's form, which depends on nothing that is stored: it names no tool, its arguments
do not fit, it is no call (agents/calls.py), or it is one past the agent's limits."""
CODES = (*MALFORMED, "unknown_id", "deleted_id", "duplicate", "one_part", "full", "refused")
"""Why an operation failed: the codes of its record; "full" enlarges a store over a hard budget."""

MOST = 1000
"""Most characters of an entry's text that a tool writes."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a call may depend on besides the store and its own arguments."""

    search: Search
    measure: Callable[[str], int]  # tokens of a text
    session: int | None = None  # the one being read; a new entry belongs to it
    date: str | None = None  # its day, "2023-05-08": a new entry's, unless the call gives one
    seed: tuple = ()  # sample_memory draws from it and the number of the operation, nothing else
    # Hard budgets: what would leave a store over one, and larger than before, fails
    budget_tokens: int | None = None  # of the lines of all entries
    budget_entries: int | None = None
    reply_tokens: int = 512  # most tokens of a reply that lists entries
    without: tuple[str, ...] = ()  # of REMOVABLE


class _Refused(Exception):
    """A call that is not done: a code of CODES, and the reply without "Error: " and full stop."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


Done = tuple[str, Sequence[Entry]]  # the reply, and the versions to write

# ---------------------------------------------------------------- types of arguments


def _paragraph(text: str) -> str:
    """Return a text as one paragraph: line breaks and tabs become blanks."""
    return check_text(re.sub(r"[\t\r\n]+", " ", text))


def _text(longest: int) -> object:
    limits = StringConstraints(strip_whitespace=True, min_length=1, max_length=longest)
    return Annotated[str, limits, AfterValidator(_paragraph)]


def _key(text: str) -> str:
    """Return what two texts share if one is a duplicate of the other."""
    return " ".join(text.split()).casefold()


Content, Query, Name, Reason = map(_text, (MOST, 500, 100, 300))
Id = Annotated[str, Field(pattern=f"^{ENTRY_ID.pattern}$")]
Day = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), AfterValidator(check_day)]
Kind = Literal[KINDS]
SEVERAL = Field(min_length=2, max_length=5)
KIND = Field(None, description="kind of memory")


class Arguments(BaseModel):
    """The arguments of a tool, and what it does with them; the docstring is for the model."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @abstractmethod
    def run(self, store: Store, scope: Scope) -> Done:
        """Return the reply and the versions to write; raise _Refused if it cannot be done."""

    def _check(self, names: Sequence[str], what: str, needed: bool) -> None:
        """Raise unless the arguments that something needs are given, or the others are not."""
        for name in names:
            if needed and getattr(self, name) is None:
                raise PydanticCustomError("missing", f"{name}: required by {what}")
            if not needed and getattr(self, name) is not None:
                raise ValueError(f"{name}: not taken by {what}")


# ---------------------------------------------------------------- the tools


class SearchMemory(Arguments):
    """Find the memories that match a query, the best first."""

    query: Query = Field(description="words to look for")
    top_k: int = Field(5, ge=1, le=20, description="most memories to show")
    kind: Kind | None = KIND
    speaker: Name | None = Field(None, description="only memories of this speaker")
    since: Day | None = Field(None, description="first day, YYYY-MM-DD")
    until: Day | None = Field(None, description="last day, YYYY-MM-DD")

    @model_validator(mode="after")
    def _in_order(self) -> SearchMemory:
        if self.since and self.until and self.since > self.until:
            raise ValueError("since: must not be later than until")
        return self

    def run(self, store: Store, scope: Scope) -> Done:
        entries = store.snapshot().entries
        found = scope.search.top(entries, self.query, self.top_k, self._keeps)
        if not found:
            return f"No memory matches. {len(entries)} stored.", ()
        head = [f"{len(found)} of {len(entries)} memories:"]
        return _list([entry for entry, _ in found], scope, head), ()

    def _keeps(self, entry: Entry) -> bool:
        """Tell whether an entry may be found; without a date it lies in no stretch of time."""
        if self.kind and entry.kind != self.kind:
            return False
        if self.speaker and _key(entry.speaker or "") != _key(self.speaker):
            return False
        if not (self.since or self.until):
            return True
        return bool(entry.date) and (self.since or "") <= entry.date <= (self.until or "9999-12-31")


class ManageMemory(Arguments):
    """Create a memory, update one (its text is replaced), or change nothing (noop)."""

    operation: Literal["create", "update", "noop"]
    content: Content | None = Field(None, description="the text; not for noop")
    memory_id: Id | None = Field(None, description="which one to update, such as m12")
    kind: Kind | None = KIND
    date: Day | None = Field(None, description="its day, YYYY-MM-DD")

    @model_validator(mode="after")
    def _complete(self) -> ManageMemory:
        does = self.operation
        self._check(["content"], does, needed=does != "noop")
        self._check(["memory_id"], does, needed=does == "update")
        if does == "noop":
            self._check(["kind", "date"], does, needed=False)
        return self

    def run(self, store: Store, scope: Scope) -> Done:
        if self.operation == "noop":
            return "No change.", ()
        snapshot = store.snapshot()
        read = () if scope.session is None else (f"S{scope.session}",)
        if self.operation == "create":
            (id,), date = store.new_ids(1), self.date or scope.date
            new = Entry(id, self.content, self.kind, None, date, scope.session, read)
            done = f"Created {id}."
        else:
            if "update" in scope.without:
                raise _Refused("refused", "operation: update is not allowed here")
            old = _live(snapshot, self.memory_id, "memory_id")
            kind, date = self.kind or old.kind, self.date or old.date
            if (self.content, kind, date) == (old.text, old.kind, old.date):
                raise _Refused("duplicate", f"duplicate of {old.id}")
            evidence, version = tuple(dict.fromkeys((*old.evidence, *read))), old.version + 1
            new = replace(old, text=self.content, kind=kind, date=date, evidence=evidence,
                          version=version)  # fmt: skip
            done = f"Updated {old.id} (v{version})."
        _refuse_duplicate(snapshot, new.text, but=(new.id,))
        _refuse_full(snapshot, [new], scope)
        return done, [new]


class DeleteMemory(Arguments):
    """Delete a memory."""

    memory_id: Id = Field(description="which one, such as m12")
    reason: Reason | None = Field(None, description="why, for the log")

    def run(self, store: Store, scope: Scope) -> Done:
        old = _live(store.snapshot(), self.memory_id, "memory_id")
        return f"Deleted {old.id}.", [_delete(old)]


class SampleMemory(Arguments):
    """Show some memories without a query."""

    k: int = Field(3, ge=1, le=10, description="how many")
    strategy: Literal["random", "diverse", "recent"] = Field(
        "random", description="diverse: evenly spaced ids; recent: those updated most often"
    )
    kind: Kind | None = KIND

    def run(self, store: Store, scope: Scope) -> Done:
        entries = store.snapshot().entries
        entries = [entry for entry in entries if self.kind in (None, entry.kind)]
        if not entries:
            raise _Refused("refused", "there is no such memory")
        n, k = len(entries), min(self.k, len(entries))
        if self.strategy == "random":
            draw = random.Random(seed_of(*scope.seed, len(store.journal) + 1))
            at = sorted(draw.sample(range(n), k))
        elif self.strategy == "diverse":
            at = [i * n // k for i in range(k)]
        else:
            at = sorted(range(n), key=lambda i: (entries[i].version, i), reverse=True)[:k]
        return _list([entries[i] for i in at], scope), ()


class MergeMemory(Arguments):
    """Replace several memories by one; all but concatenate need its text."""

    memory_ids: Annotated[list[Id], SEVERAL] = Field(description="2 to 5 different ids")
    strategy: Literal["concatenate", "summarize", "extract_common"]
    content: Content | None = Field(None, description="the text; not for concatenate")

    @model_validator(mode="after")
    def _complete(self) -> MergeMemory:
        self._check(["content"], self.strategy, needed=self.strategy != "concatenate")
        if len({*self.memory_ids}) < len(self.memory_ids):
            raise ValueError("memory_ids: each of them may stand there once")
        return self

    def run(self, store: Store, scope: Scope) -> Done:
        snapshot = store.snapshot()
        old = [_live(snapshot, id, "memory_ids") for id in self.memory_ids]
        text = self.content or " ".join(entry.text for entry in old)
        if len(text) > MOST:
            over = f"a text would have {len(text)} characters of {MOST}"
            raise _Refused("refused", f"memory_ids: {over}")
        _refuse_duplicate(snapshot, text, but=self.memory_ids)
        new = Entry(
            store.new_ids(1)[0],
            text,
            _shared(entry.kind for entry in old),
            _shared(entry.speaker for entry in old),
            max((entry.date for entry in old if entry.date), default=None),
            _shared(entry.session for entry in old),
            tuple(dict.fromkeys(source for entry in old for source in entry.evidence)),
            parents=tuple(self.memory_ids),
        )
        after = [new, *map(_delete, old)]
        _refuse_full(snapshot, after, scope)
        return f"Merged {', '.join(self.memory_ids)} into {new.id}.", after


class SplitMemory(Arguments):
    """Replace a memory by several: by the given texts, or cut between its sentences."""

    memory_id: Id = Field(description="which one, such as m12")
    split_criteria: Literal["temporal", "thematic", "speaker"] = Field(
        description="where to cut: at dates and times, by theme (needs parts), by speaker"
    )
    parts: Annotated[list[Content], SEVERAL] | None = Field(None, description="2 to 5 texts")
    max_parts: int = Field(5, ge=2, le=5, description="most parts")

    @model_validator(mode="after")
    def _complete(self) -> SplitMemory:
        if self.split_criteria == "thematic":
            self._check(["parts"], "thematic", needed=True)
        if self.parts and len(self.parts) > self.max_parts:
            raise ValueError("parts: there are more than max_parts")
        return self

    def run(self, store: Store, scope: Scope) -> Done:
        snapshot = store.snapshot()
        old = _live(snapshot, self.memory_id, "memory_id")
        texts = self.parts or self._cut(old.text, snapshot)
        if len(texts) < 2:
            raise _Refused("one_part", "split_criteria: there is only one part")
        if len({*map(_key, texts)}) < len(texts):
            raise _Refused("duplicate", "two parts are the same")
        for text in texts:
            _refuse_duplicate(snapshot, text, but=(old.id,))
        # by speaker the parts say themselves whose they are
        speaker = None if self.split_criteria == "speaker" else old.speaker
        ids = store.new_ids(len(texts))
        new = [
            replace(old, id=id, text=text, speaker=speaker, origin="agent", version=1,
                    parents=(old.id,))
            for id, text in zip(ids, texts, strict=True)
        ]  # fmt: skip
        after = [*new, _delete(old)]
        _refuse_full(snapshot, after, scope)
        return f"Split {old.id} into {', '.join(ids)}.", after

    def _cut(self, text: str, snapshot: Snapshot) -> list[str]:
        """Cut a text between sentences, at the first places that the criterion finds."""
        sentences = SENTENCE_END.split(text)
        if self.split_criteria == "temporal":
            places = [i for i, text in enumerate(sentences) if i and TIME.search(text)]
        else:
            places = _new_speakers(sentences, snapshot)
        edges = [0, *places[: self.max_parts - 1], len(sentences)]
        return [" ".join(sentences[a:b]) for a, b in pairwise(edges)]


TOOLS: dict[str, type[Arguments]] = {
    "search_memory": SearchMemory,
    "manage_memory": ManageMemory,
    "delete_memory": DeleteMemory,
    "sample_memory": SampleMemory,
    "merge_memory": MergeMemory,
    "split_memory": SplitMemory,
}
REMOVABLE = (*TOOLS, "update")
"""What a run can do without: a tool, or updates by manage_memory."""

# ---------------------------------------------------------------- where a text may be cut

SENTENCE_END = re.compile(r"(?<=[.!?]) +")
MONTHS = (
    "January|February|March|April|May|June|July|August|September|October|November|December|"
    "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
)
WEEKDAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
TIMES = (
    "yesterday|today|tonight|tomorrow|now|then|later|ago|earlier|recently|afterwards|"
    "morning|noon|afternoon|evening|night|midnight|minutes?|hours?|days?|weeks?|weekends?|"
    "months?|years?|spring|summer|autumn|winter|[0-9]{1,2}(?::[0-9]{2})? ?[ap]m"
)
# A date or time word; months and days by their capital letter, for "may" and "march" are verbs
TIME = re.compile(
    rf"\b(?:{MONTHS}|{WEEKDAYS}|(?i:{TIMES})|(?:1[89]|20)[0-9]{{2}}|[0-9]{{1,2}}:[0-9]{{2}})\b"
)
LABEL = re.compile(r"([^\s:][^:]{0,39}):\s")  # "Ann: I moved."


def _new_speakers(sentences: Sequence[str], snapshot: Snapshot) -> list[int]:
    """Return the sentences that name another speaker than the last one named.

    A sentence names whom it begins with ("Ann: ..."), or else the first of the store's speakers
    that stands in it.
    """
    speakers = sorted({entry.speaker for entry in snapshot.entries if entry.speaker}, key=len)
    known = re.compile(rf"\b(?:{'|'.join(map(re.escape, reversed(speakers)))})\b")
    places, last = [], ""
    for i, sentence in enumerate(sentences):
        label = LABEL.match(sentence)
        found = label[1] if label else m[0] if speakers and (m := known.search(sentence)) else last
        if last and found != last:
            places.append(i)
        last = found
    return places


# ---------------------------------------------------------------- what the tools share


def _live(snapshot: Snapshot, id: str, field: str) -> Entry:
    entry = snapshot.get(id)
    if entry is None:
        raise _Refused("unknown_id", f"{field}: {id} is unknown")
    if entry.deleted:
        raise _Refused("deleted_id", f"{field}: {id} is already deleted")
    return entry


def _delete(entry: Entry) -> Entry:
    return replace(entry, version=entry.version + 1, deleted=True)


def _shared(values: Iterable) -> object:
    """Return the one value that all have, None if they differ."""
    first, *others = {*values}
    return None if others else first


def _refuse_duplicate(snapshot: Snapshot, text: str, but: Sequence[str]) -> None:
    """Refuse a text that a live entry has, other than those that the call replaces (but)."""
    key = _key(text)
    for entry in snapshot.entries:
        if entry.id not in but and _key(entry.text) == key:
            raise _Refused("duplicate", f"duplicate of {entry.id}")


def _refuse_full(snapshot: Snapshot, after: Sequence[Entry], scope: Scope) -> None:
    """Refuse versions that enlarge a store and leave it over a hard budget."""
    before = [old for entry in after if (old := snapshot.get(entry.id))]
    now = [entry for entry in after if not entry.deleted]

    def tokens(entries: Iterable[Entry]) -> int:
        return sum(scope.measure(entry.line) for entry in entries)

    budgets = (scope.budget_entries, len, "memories"), (scope.budget_tokens, tokens, "tokens")
    for most, size, unit in budgets:
        if most is not None and (more := size(now) - size(before)) > 0:
            if (stored := size(snapshot.entries)) + more > most:
                raise _Refused("full", f"memory full ({stored} of {most} {unit})")


def _list(entries: Sequence[Entry], scope: Scope, head: Sequence[str] = ()) -> str:
    """Return a reply of whole entries, as many as fit, and how many more there are."""
    lines = [entry.line for entry in entries]
    for shown in range(len(lines), -1, -1):
        left = len(lines) - shown
        reply = "\n".join([*head, *lines[:shown], *([f"(+{left} more)"] if left else [])])
        if scope.measure(reply) <= scope.reply_tokens:
            break
    return reply


# ---------------------------------------------------------------- one call


def apply(store: Store, name: str, arguments: object, scope: Scope) -> Op:
    """Run one call and return its record, the newest of the store's journal.

    arguments: any JSON value. A faulty call writes nothing; its reply begins with "Error: " and
    names the argument.
    """
    tools, kept = [tool for tool in TOOLS if tool not in scope.without], arguments
    try:
        if name not in tools:
            known = f"there are {', '.join(tools)}" if tools else "there is none"
            raise _Refused("unknown_tool", f"name: '{_quote(name)}' is no tool; {known}")
        call = _check(name, arguments)
        kept = call.model_dump(exclude_unset=True, exclude_none=True)
        message, after = call.run(store, scope)
    except _Refused as error:
        tool = "call" if error.code == "unknown_tool" else name
        return refuse(store, scope, error.code, str(error), kept, tool)
    return store.record(name, kept, message, after=after, session=scope.session)


def refuse(
    store: Store, scope: Scope, code: str, message: str, args: object = None, tool: str = "call"
) -> Op:
    """Enter a call that is not run into the journal.

    code: one of CODES. message: the reply without "Error: " and full stop. args: what was given,
    any JSON value. tool: "call" if it is not known which one was meant.
    """
    kept = args if isinstance(args, dict) else {} if args is None else {"given": args}
    return store.record(tool, kept, f"Error: {message}.", code=code, session=scope.session)


# pydantic's name for a fault -> our code; all others are bad arguments
CODE_OF = {"missing": "missing", "string_too_long": "too_long", "string_too_short": "empty"}


def _check(name: str, arguments: object) -> Arguments:
    """Return the arguments of a tool; raise _Refused with the first fault of their form."""
    if not isinstance(arguments, dict):
        what = _quote(arguments if isinstance(arguments, str) else type(arguments).__name__)
        message = f"arguments: '{what}' is not an object with named fields"
        raise _Refused("bad_arguments", message)
    try:
        return TOOLS[name].model_validate(arguments)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field, *inside = first["loc"] or ("",)
    where = _quote(field) + "".join(f"[{k}]" for k in inside)
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    code = CODE_OF.get(first["type"], "bad_arguments")
    raise _Refused(code, f"{where}: {reason}" if where else reason)


def _quote(text: str) -> str:
    """Return what a policy has written, short and safe to print."""
    return clip(" ".join(clean(text).split()), 60)


# ---------------------------------------------------------------- what a model is told


class _Schema(GenerateJsonSchema):
    """A schema without titles and nulls: fewer tokens, and nothing that a model need not know."""

    def field_title_should_be_set(self, schema) -> bool:
        return False

    def nullable_schema(self, schema):
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema):
        plain = schema.get("default", ...) is None
        return self.generate_inner(schema["schema"]) if plain else super().default_schema(schema)


@lru_cache
def schemas(without: tuple[str, ...] = ()) -> tuple[dict, ...]:
    """Return the schemas of the tools, as `apply_chat_template(tools=...)` takes them."""
    return tuple(_schema(name) for name in TOOLS if name not in without)


def _schema(name: str) -> dict:
    parameters = TOOLS[name].model_json_schema(schema_generator=_Schema)
    del parameters["title"]
    function = {"name": name, "description": parameters.pop("description")}
    return {"type": "function", "function": function | {"parameters": parameters}}


def is_text(tool: str, argument: str) -> bool:
    """Tell whether an argument is a text rather than another JSON value; one unknown is a text."""
    known = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas()}
    properties = known[tool]["properties"] if tool in known else {}
    return properties.get(argument, {"type": "string"}).get("type") == "string"
