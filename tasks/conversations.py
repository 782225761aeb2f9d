"""Conversations as data: dated sessions, and questions that are asked about them afterwards.

Holds: `Conversation`, `Session`, `Utterance`, `Memory`, `Probe`, `KINDS`, `ENTRY_ID`, `session_of`,
`turns_as_memories`, `text_fault`, `is_day`, `text_or_number`.
Leaves out: the files of each data set (tasks/locomo.py, tasks/own.py), grading
(tasks/locomo_score.py). No torch.
Exercise it: `pytest tests/tasks/test_locomo.py`. Read next: tasks/locomo.py.

A loader of another data set returns a list of `Conversation`; nothing else has to know its files.
Ids tell where something was said: D3:12 is the 12th turn of session 3, S3 the whole session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from config.errors import clip
from data import seed_of
from tasks._record import Record

# The accepted answer of a question that is not answered in the conversation
NOT_MENTIONED = "Not mentioned in the conversation"
CHOOSE = "Choose one of the two answers"  # what comes after it in a question are the answers
LETTER = re.compile(r"\(?([ab])\)?[.:]?")  # a response that names an answer by its letter


KINDS = ("episodic", "semantic", "procedural")  # of memories
ENTRY_ID = re.compile(r"m[1-9][0-9]{0,11}")


def session_of(name: str) -> int | None:
    """Return the session's number in the id of a turn or a session; None if it is neither.

    >>> session_of("D3:12"), session_of("S3"), session_of("q12")
    (3, 3, None)
    """
    match = re.fullmatch(r"D(\d+):\d+|S(\d+)", name)
    return int(match[1] or match[2]) if match else None


@dataclass(frozen=True, slots=True)
class Utterance:
    """Hold what one speaker said in one turn."""

    id: str  # D3:12
    speaker: str
    text: str  # with a caption of the picture that was shared, if there was one

    @property
    def line(self) -> str:
        """The text under its speaker, where there is one."""
        return f"{self.speaker}: {self.text}" if self.speaker else self.text


@dataclass(frozen=True, slots=True)
class Session:
    """Hold one sitting of a conversation."""

    number: int  # from 1, in order of time
    date: str  # ISO day
    when: str  # date and time in the source's own words
    utterances: tuple[Utterance, ...]

    @property
    def text(self) -> str:
        """Compose the lines SPEAKER: TEXT."""
        return "\n".join(turn.line for turn in self.utterances)

    @property
    def dated(self) -> str:
        """Compose the text under its date and time."""
        return f"{self.when}\n{self.text}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold an entry that a store can start with."""

    text: str
    speaker: str | None = None
    date: str | None = None  # ISO day of its session
    session: int | None = None
    evidence: tuple[str, ...] = ()  # ids of the turns, or of the session, that it was made from
    kind: str | None = None  # of KINDS
    id: str = ""  # that the entry gets, such as m17; "" = the next free one


@dataclass(frozen=True, slots=True)
class Probe:
    """Hold one question about a conversation."""

    id: str
    question: str
    answers: tuple[str, ...]  # accepted answers, the gold one first
    category: int  # LoCoMo's number, 1 to 5; 0 = of another data set
    evidence: tuple[str, ...] = ()  # ids as the source names them; some may not exist
    abstains: bool = False  # the right answer is that nothing is known
    kind: str = ""  # the category's name
    distractor: str = ""  # a wrong answer that suggests itself
    when: str = ""  # always empty: the digests in earlier rows hold it

    @property
    def choices(self) -> tuple[str, ...]:
        """The right answer and the distractor, in an order drawn by the id; () if it is open."""
        if not (self.abstains and self.distractor):
            return ()
        both = NOT_MENTIONED, self.distractor
        return both[::-1] if seed_of("choices", self.id) % 2 else both

    @property
    def problem(self) -> str:
        """Compose the question as it is asked: below one that abstains stand the two answers.

        >>> print(Probe("q1", "Who?", ("-",), 5, abstains=True, distractor="Ada").problem)
        Who?
        Choose one of the two answers:
        (a) Ada
        (b) Not mentioned in the conversation
        """
        if not self.choices:
            return self.question
        a, b = self.choices
        return f"{self.question}\n{CHOOSE}:\n(a) {a}\n(b) {b}"

    def chosen(self, prediction: str) -> str:
        """Return an answer in words: of a letter alone, (a) or b, the answer that it stands for."""
        found = LETTER.fullmatch(prediction.strip().lower())
        return self.choices["ab".index(found[1])] if found and self.choices else prediction

    @property
    def sessions(self) -> tuple[int, ...]:
        """Return the numbers of the sessions with evidence, in order.

        >>> Probe("q", "Who?", ("Ada",), 4, evidence=("D3:12", "S1", "D3:2")).sessions
        (1, 3)
        """
        return tuple(sorted({*map(session_of, self.evidence)} - {None}))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the sessions of a few speakers, the questions about them, and ready-made memories."""

    id: str
    speakers: tuple[str, ...]
    sessions: tuple[Session, ...]
    probes: tuple[Probe, ...]
    # what a store can start with -> its entries: "empty" and "sessions" (an entry for each turn),
    # and where the data has them "observations", "summaries", "events"
    memories: Mapping[str, tuple[Memory, ...]]

    @property
    def text(self) -> str:
        """Compose all sessions, each under its number and date."""
        parts = (f"Session {s.number}, {s.dated}" for s in self.sessions)
        return "\n\n".join(parts)


def turns_as_memories(sessions: tuple[Session, ...]) -> tuple[Memory, ...]:
    """Make a memory of each turn that has a text."""
    return tuple(
        Memory(turn.text, turn.speaker, session.date, session.number, (turn.id,))
        for session in sessions
        for turn in session.utterances
        if turn.text
    )


# ---------------------------------------------------------------- what an entry may hold

DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# A line break is one too: each entry is shown on one line
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def text_fault(text: object) -> str:
    """Say why a value is no text of an entry ("holds the control character U+0007"), "" if it is.

    >>> text_fault("It rains."), text_fault(" ")
    ('', 'is blank')
    """
    if not isinstance(text, str):
        return f"must be a text, not {clip(repr(text), 80)}"
    if not text.strip():
        return "is blank"
    if not (found := CONTROL.search(text)):
        return ""
    code = f"U+{ord(found[0]):04X}"
    if found[0] >= "\ud800":
        return f"holds {code}, half of a surrogate pair, which is no text"
    return f"holds the control character {code}, and a text is one paragraph"


def is_day(value: object) -> bool:
    """Tell whether a value is an ISO day of the calendar, 2023-05-08."""
    try:
        return isinstance(value, str) and bool(DAY.fullmatch(value) and date.fromisoformat(value))
    except ValueError:  # 2023-02-30
        return False


# ---------------------------------------------------------------- files


def text_or_number(record: Record, name: str) -> str:
    """Return a field that is a text or, as some answers are, a whole number."""
    value = record.fields.get(name)
    return str(value) if type(value) is int else record.text(name)
