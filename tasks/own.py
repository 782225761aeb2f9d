"""Conversations of the user's own: JSON lines with sessions, memories and questions.

Holds: `load_own`, `says_unknown`. Leaves out: what a conversation is (tasks/conversations.py), a
store's entries (agents/store.py). No torch.
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

import re
from itertools import pairwise
from pathlib import Path

from config.errors import UserError, clip
from tasks._record import Record
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
from tasks.readers import records_of

QUESTIONS = "questions"  # the kind of those that name none


def load_own(path: str | Path) -> list[Conversation]:
    """Read the user's own conversations.

    Sessions are numbered from 1, and the turns of each: D3:12 is the 12th turn of session 3.

    UserError, with file, line and field, for anything that is wrong: nothing is half loaded.
    """
    conversations = dict[str, Conversation]()
    for plain in records_of(Path(path)):
        r = Record(plain.path, plain.place, plain.position, plain.fields)
        conversation = _conversation(r)
        if conversation.id in conversations:
            raise r.error(f"'id' is {conversation.id!r}, as in a line before")
        conversations[conversation.id] = conversation
    if not conversations:
        raise UserError(f"{path} is empty: it holds no conversations.")
    return [*conversations.values()]


def _conversation(r: Record) -> Conversation:
    _only(r, "id", "sessions", "memories", "qa")
    name = _paragraph(r, "id")
    sessions = tuple(_session(part, n) for n, part in enumerate(r.parts("sessions", 0), 1))
    for before, session in pairwise(sessions):
        if session.date < before.date:
            raise r.error(f"'date' of sessions {session.number} is before that of the one before")
    turns = [turn for session in sessions for turn in session.utterances]
    known = {turn.id for turn in turns} | {f"S{session.number}" for session in sessions}
    parts, memories = r.parts("memories", 0), []
    for part in parts:
        memories.append(_memory(part, known))
        if memories[-1].id and memories[-1].id in [memory.id for memory in memories[:-1]]:
            raise part.error(f"'id' is {memories[-1].id!r}, as in one before")
    if not sessions and not memories:
        raise r.error("there must be 'sessions' or 'memories'")
    probes = (_probe(part, f"{name}-q{n}", known) for n, part in enumerate(r.parts("qa"), 1))
    speakers = dict.fromkeys(turn.speaker for turn in turns if turn.speaker)
    starts = {"empty": (), "sessions": turns_as_memories(sessions), "memories": tuple(memories)}
    return Conversation(name, (*speakers,), sessions, tuple(probes), starts)


def _session(r: Record, number: int) -> Session:
    _only(r, "date", "when", "turns")
    day = _day(r, r.get("date", str))
    turns = tuple(_utterance(turn, f"D{number}:{n}") for n, turn in enumerate(r.parts("turns"), 1))
    return Session(number, day, _paragraph(r, "when", day), turns)


def _utterance(r: Record, name: str) -> Utterance:
    _only(r, "speaker", "text")
    text = r.text("text")
    if why := text_fault(text.replace("\n", " ").replace("\t", " ")):  # a turn has paragraphs
        raise r.error(f"'text' {why.partition(', and')[0]}")
    return Utterance(name, _paragraph(r, "speaker", ""), text)


def _memory(r: Record, known: set[str]) -> Memory:
    _only(r, "id", "text", "kind", "speaker", "date", "session", "evidence")
    evidence, session = _evidence(r, known), r.fields.get("session")
    if session is None:  # it is known once all of its evidence has been said
        session = max({*map(session_of, evidence)} - {None}, default=None)
    elif r.get("session", int) < 1 or (known and f"S{session}" not in known):
        raise r.error(f"'session' is {session}, and there is no such session")
    name, kind = _paragraph(r, "id", ""), _paragraph(r, "kind", "")
    if name and not ENTRY_ID.fullmatch(name):
        raise r.error(f"'id' must be an id such as m17, not {clip(repr(name), 80)}")
    if kind and kind not in KINDS:
        raise r.error(f"'kind' must be one of {', '.join(KINDS)}, not {clip(repr(kind), 80)}")
    speaker, day = _paragraph(r, "speaker", "") or None, r.fields.get("date")
    text = _paragraph(r, "text")
    return Memory(text, speaker, day and _day(r, day), session, evidence, kind or None, name)


def _probe(r: Record, name: str, known: set[str]) -> Probe:
    _only(r, "question", "answer", "category", "evidence", "abstains", "distractor")
    category = r.fields.get("category")
    number = category if type(category) is int else 0
    if type(category) is int and category not in CATEGORIES:
        raise r.error(f"'category' must be 1 to 5 or a name of yours, this is {category}")
    abstains = r.fields.get("abstains", number == 5)
    if type(abstains) is not bool or (number == 5 and not abstains):
        raise r.error("'abstains' must be true or false, and true of category 5")
    kind = CATEGORIES[number] if number else _paragraph(r, "category", QUESTIONS)
    return Probe(
        id=name,
        question=_paragraph(r, "question"),
        answers=(NOT_MENTIONED,) if abstains else _answers(r),
        category=number,
        evidence=_evidence(r, known),
        abstains=abstains,
        kind=f"{kind}, abstention" if abstains and not number else kind,
        distractor=_paragraph(r, "distractor", "") if abstains else "",
    )


def _answers(r: Record) -> tuple[str, ...]:
    """Return the accepted answers: one, or a list of them."""
    listed = isinstance(r.fields.get("answer"), list)
    answers = r.texts("answer") if listed else (text_or_number(r, "answer"),)
    return tuple(_paragraph(r, "answer", value=answer) for answer in answers)


# ---------------------------------------------------------------- fields


def _only(r: Record, *names: str) -> None:
    """Refuse fields that are misspelt: they would be passed over."""
    if unknown := [name for name in r.fields if name not in names]:
        name = clip(repr(unknown[0]), 80)
        raise r.error(f"{name} is no field here; there are {', '.join(names)}")


def _paragraph(r: Record, name: str, default: str | None = None, value: object = None) -> str:
    """Return a text without control characters; `default` where the field is missing."""
    value = r.fields.get(name) if value is None else value
    if value is None and default is not None:
        return default
    text = r.text(name, value)
    if why := text_fault(text):
        raise r.error(f"'{name}' {why}")
    return text


def _day(r: Record, day: object) -> str:
    if not is_day(day):
        raise r.error(f"'date' must be a day such as 2024-01-03, not {clip(repr(day), 80)}")
    return day


def _evidence(r: Record, known: set[str]) -> tuple[str, ...]:
    """Return ids of turns and sessions; any texts where there are no sessions."""
    names = tuple(_paragraph(r, "evidence", value=x) for x in r.maybe("evidence", list))
    if known and (missing := [name for name in names if name not in known]):
        what = clip(repr(missing[0]), 80)
        raise r.error(f"'evidence' names {what}, and there is no such turn or session")
    return names


# ---------------------------------------------------------------- answers without an answer

# What an answer says that tells of no answer (`says_unknown`): a negation and, at most four words
# on, what is not told or known; information that is not enough; something that is unknown
NOT = "not|no|none|nobody|never|nothing|unable|impossible|lacks?|lacking|insufficient"
END = r"[.,;!?)]|$"
TOLD = (
    r"mention\w*|specif(?:y|ied|ies)|stated|state(?= (?:the|this|that|it|your|any|wh|how)\w*)|"
    r"indicat\w+|disclos\w+|discuss\w*|says?|said|tell|told|know\w*|answer\w*|determin\w+|"
    r"infer(?:red)?|identif\w+|confirm\w*|provided?|shared?|recall|remember|clear|recorded|"
    r"(?:talk|talked|spoken) about|references?|information|info|details?|evidence|"
    rf"(?:sure|certain|aware|records?|memory|given)(?= (?:of|about|in|if|how|wh\w+)\b|{END})|"
    rf"(?:enough|sufficient)(?= (?:information|info|details?|data|context|to)\b|{END})|"
    r"in (?:the|our|your|this|any)(?: \w+)? (?:conversations?|chats?|history|sessions?)"
)
SCARCE = "not|insufficient|incomplete|missing|unavailable|lacking"
UNKNOWN = "unknown|unclear|unspecified|undetermined|undisclosed|uncertain|unanswerable"
UNTOLD = re.compile(
    rf"(?<!called )(?<!named )(?<!titled )\b(?:(?:{NOT}) (?:[\w'-]+ ){{0,4}}?(?:{TOLD})|"
    rf"(?:information|info|details?|context|data) (?:[\w'-]+ ){{0,6}}?(?:{SCARCE})|"
    r"nothing (?:[\w'-]+ ){0,4}?about|no idea|unaware|only mentioned|mentioned [^.]*\bbut not|"
    rf"(?:is|are|was|were|be|it's|remains?|left)(?: still)? (?:{UNKNOWN})"
    rf"(?= (?:from|in|here)\b|{END}))\b"
)
ALONE = re.compile(rf"(?:answer: )?(?:{UNKNOWN}|not available|no data available|n/?a)\W*")


def says_unknown(answer: str) -> bool:
    """Tell whether an answer says that the conversation does not answer the question: our own rule.

    Words in capitals, in quotes or after "called" are a name, unless they are the whole answer.

    >>> says_unknown("You did not mention your hamster."), says_unknown("Unknown")
    (True, True)
    >>> says_unknown("Your hamster is called Unknown."), says_unknown("You have no hamster.")
    (False, False)
    """
    text = " ".join(answer.replace("’", "'").replace("*", "").split()).strip("\"'")
    text = text.lower() if text.isupper() or text.istitle() else text
    text = re.sub(r"^[A-Z]|(?<=[.!?:;] )[A-Z]", lambda first: first[0].lower(), text)
    text = re.sub('"[^"]*"', '""', text.replace("cannot", "can not").replace("can't", "can not"))
    text = text.replace("n't", " not")
    return bool(ALONE.fullmatch(text) or UNTOLD.search(text))
