"""Conversations of the user's own: JSON lines with sessions, memories and questions.

Holds: `load_own`. Leaves out: what a conversation is (tasks/conversations.py), a store's entries
(agents/store.py). No torch.
Exercise it: `pytest tests/tasks/test_own.py`. Read next: tasks/episodes.py.

One conversation a line (.gz too):

    {"id": "talk-1",
     "sessions": [{"date": "2024-01-03", "when": "in the evening of 3 January 2024",
                   "turns": [{"speaker": "Ada", "text": "I moved to Oslo."}, ...]}, ...],
     "memories": [{"id": "m1", "text": "Ada moved to Oslo.", "kind": "episodic", "speaker": "Ada",
                   "date": "2024-01-03", "session": 1, "evidence": ["D1:1"]}, ...],
     "qa": [{"question": "Where does Ada live?", "answer": "Oslo", "category": "where",
             "evidence": ["D1:1"]},
            {"question": "Where does Bo live?", "abstains": true, "distractor": "Oslo"}, ...]}

docs/evaluation.md says which fields may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from config.errors import UserError, clip
from tasks.conversations import (
    ENTRY_ID,
    KINDS,
    NOT_MENTIONED,
    Conversation,
    Memory,
    Probe,
    Session,
    Utterance,
    is_day,
    session_of,
    text_fault,
    text_or_number,
    turns_as_memories,
)
from tasks.locomo import CATEGORIES
from tasks.longmemeval import ABSTENTION
from tasks.readers import Record, records_of

QUESTIONS = "questions"  # the kind of those that name none


def load_own(path: str | Path) -> list[Conversation]:
    """Read the user's own conversations.

    Sessions are numbered from 1, and the turns of each: D3:12 is the 12th turn of session 3.

    UserError, with file, line and field, for anything that is wrong: nothing is half loaded.
    """
    conversations, lines = [], dict[str, str]()
    for r in records_of(Path(path)):
        conversation = _conversation(r)
        if conversation.id in lines:
            raise r.error(f"'id' is {conversation.id!r}, as in {lines[conversation.id]}")
        lines[conversation.id] = r.place
        conversations.append(conversation)
    if not conversations:
        raise UserError(f"{path} is empty: it holds no conversations.")
    return conversations


def _conversation(r: Record) -> Conversation:
    _only(r, "id", "sessions", "memories", "qa")
    name = _paragraph(r, "id")
    sessions = _sessions(r)
    if not sessions and not r.maybe("memories", list):
        raise r.error("there must be 'sessions' or 'memories'")
    known = {said.id for session in sessions for said in session.utterances}
    known |= {f"S{session.number}" for session in sessions}
    memories = tuple(_memory(part, known) for part in _parts(r, "memories"))
    places = dict[str, int]()
    for n, one in enumerate(memories, 1):
        if one.id and (first := places.setdefault(one.id, n)) < n:
            again = replace(r, place=f"{r.place}, memories {n}")
            raise again.error(f"'id' is {one.id!r}, as in memories {first}")
    r.get("qa", list)
    probes = (_probe(part, f"{name}-q{n}", known) for n, part in enumerate(_parts(r, "qa"), 1))
    speakers = dict.fromkeys(said.speaker for s in sessions for said in s.utterances)
    starts = {"empty": (), "sessions": turns_as_memories(sessions), "memories": memories}
    return Conversation(name, (*filter(None, speakers),), sessions, tuple(probes), starts)


def _sessions(r: Record) -> tuple[Session, ...]:
    sessions: list[Session] = []
    for number, part in enumerate(_parts(r, "sessions"), 1):
        _only(part, "date", "when", "turns")
        day = _day(part)
        if day is None:
            raise part.error("the field 'date' is missing")
        if sessions and day < sessions[-1].date:
            raise part.error(f"'date' is before {sessions[-1].date}, that of the session before it")
        part.get("turns", list)
        turns = tuple(
            _utterance(turn, f"D{number}:{n}") for n, turn in enumerate(_parts(part, "turns"), 1)
        )
        sessions.append(Session(number, day, _paragraph(part, "when", day), turns))
    return tuple(sessions)


def _utterance(r: Record, name: str) -> Utterance:
    _only(r, "speaker", "text")
    text = r.text("text")
    if why := text_fault(text.replace("\n", " ").replace("\t", " ")):  # a turn has paragraphs
        raise r.error(f"'text' {why.partition(', and')[0]}")
    return Utterance(name, _paragraph(r, "speaker", ""), text)


def _memory(r: Record, known: set[str]) -> Memory:
    _only(r, "id", "text", "kind", "speaker", "date", "session", "evidence")
    evidence = _evidence(r, known)
    session = r.maybe("session", int) if r.fields.get("session") is not None else None
    if session is not None and (session < 1 or (known and f"S{session}" not in known)):
        raise r.error(f"'session' is {session}, and there is no such session")
    if session is None:  # it is known once all of its evidence has been said
        session = max({*map(session_of, evidence)} - {None}, default=None)
    speaker = _paragraph(r, "speaker", "") or None
    name, kind = r.fields.get("id"), r.fields.get("kind")
    if name is not None and not (isinstance(name, str) and ENTRY_ID.fullmatch(name)):
        raise r.error(f"'id' must be an id such as m17, not {clip(repr(name), 80)}")
    if kind is not None and kind not in KINDS:
        raise r.error(f"'kind' must be one of {', '.join(KINDS)}, not {clip(repr(kind), 80)}")
    text = _paragraph(r, "text")
    return Memory(text, speaker, _day(r), session, evidence, kind, name or "")


def _probe(r: Record, name: str, known: set[str]) -> Probe:
    _only(r, "question", "answer", "category", "evidence", "abstains", "distractor")
    category = r.fields.get("category")
    number = category if type(category) is int else 0
    if type(category) is int and category not in CATEGORIES:
        raise r.error(f"'category' must be 1 to 5 or a name of yours, this is {category}")
    abstains = r.fields.get("abstains", number == 5)
    if type(abstains) is not bool:
        raise r.error("'abstains' must be true or false")
    if number == 5 and not abstains:
        raise r.error("'abstains' is false, and questions of category 5 have no answer")
    kind = CATEGORIES[number] if number else _paragraph(r, "category", QUESTIONS)
    answers = (NOT_MENTIONED,) if abstains else _answers(r)
    return Probe(
        id=name,
        question=_paragraph(r, "question"),
        answers=answers,
        category=number,
        evidence=_evidence(r, known),
        abstains=abstains,
        kind=f"{kind}, {ABSTENTION}" if abstains and not number else kind,
        distractor=_paragraph(r, "distractor", "") if abstains else "",
    )


def _answers(r: Record) -> tuple[str, ...]:
    """Return the accepted answers: one, or a list of them."""
    if isinstance(r.fields.get("answer"), list):
        return tuple(_paragraph(r, "answer", value=text) for text in r.texts("answer"))
    answer = text_or_number(r, "answer")
    return (_paragraph(r, "answer", value=answer),)


# ---------------------------------------------------------------- fields


def _parts(r: Record, name: str) -> Iterator[Record]:
    """Yield the objects of a list as records that name their place: "line 3, qa 2"."""
    for n, value in enumerate(r.maybe(name, list), 1):
        part = replace(r, place=f"{r.place}, {name} {n}")
        if not isinstance(value, dict):
            raise part.error("this must be an object with named fields")
        yield replace(part, fields=value)


def _only(r: Record, *names: str) -> None:
    """Refuse fields that are misspelt: they would be passed over."""
    if unknown := [name for name in r.fields if name not in names]:
        raise r.error(
            f"{clip(repr(unknown[0]), 80)} is no field here; there are {', '.join(names)}"
        )


def _paragraph(r: Record, name: str, default: str | None = None, value: object = None) -> str:
    """Return a text without control characters; `default` where the field is missing."""
    value = r.fields.get(name) if value is None else value
    if value is None and default is not None:
        return default
    text = r.text(name, value)
    if why := text_fault(text):
        raise r.error(f"'{name}' {why}")
    return text


def _day(r: Record) -> str | None:
    day = r.fields.get("date")
    if day is not None and not is_day(day):
        raise r.error(f"'date' must be a day such as 2024-01-03, not {clip(repr(day), 80)}")
    return day


def _evidence(r: Record, known: Iterable[str]) -> tuple[str, ...]:
    """Return ids of turns and sessions; any texts where there are no sessions."""
    ids: Sequence[object] = r.maybe("evidence", list)
    evidence = tuple(_paragraph(r, "evidence", value=one) for one in ids)
    if known and (missing := [one for one in evidence if one not in known]):
        raise r.error(
            f"'evidence' names {clip(repr(missing[0]), 80)}, and there is no such turn or session"
        )
    return evidence
