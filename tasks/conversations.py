"""Conversations as data: dated sessions, and questions that are asked about them afterwards.

A loader of another data set returns a list of `Conversation`; nothing else has to know its files.
Ids tell where something was said: D3:12 is the 12th turn of session 3, S3 the whole session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictInt

from data import seed_of

# The accepted answer of a question that is not answered in the conversation
NOT_MENTIONED = "Not mentioned in the conversation"
CHOOSE = "Choose one of the two answers"  # what comes after it in a question are the answers
LETTER = re.compile(r"\(?([ab])\)?[.:]?")  # a response that names an answer by its letter
# LoCoMo's, by their official names; papers that swap them are why the number is printed too
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
ANSWERED = (1, 2, 3, 4)  # those whose questions have an answer
KINDS = ("episodic", "semantic", "procedural")  # of memories
ENTRY_ID = re.compile(r"m[1-9][0-9]{0,11}")


def session_of(name: str) -> int | None:
    """Return the session's number in the id of a turn or a session; None if it is neither.

    >>> session_of("D3:12"), session_of("S3"), session_of("q12")
    (3, 3, None)
    """
    match = re.fullmatch(r"D(\d+):\d+|S(\d+)", name)
    return int(match[1] or match[2]) if match else None


# ---------------------------------------------------------------- what an entry may hold


# A line break is one too: each entry is shown on one line
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_text(text: str) -> str:
    """Return a text that an entry may hold. ValueError: it may not, and why."""
    if not text.strip():
        raise ValueError("is blank")
    if found := CONTROL.search(text):
        raise ValueError(f"holds U+{ord(found[0]):04X}, and a text is one paragraph")
    return text


def check_day(value: str) -> str:
    """Return an ISO day of the calendar, 2023-05-08. ValueError: it is none."""
    if date.fromisoformat(value).isoformat() != value:  # which takes other forms too
        raise ValueError("must be a day such as 2023-05-08")
    return value


FORM = ConfigDict(extra="forbid")  # of what comes from a file
Text = Annotated[str, AfterValidator(check_text)]
Day = Annotated[str, AfterValidator(check_day)]
Id = Annotated[str, Field(pattern=f"^{ENTRY_ID.pattern}$")]


# ---------------------------------------------------------------- conversations


@dataclass(frozen=True, slots=True)
class Utterance:
    """What one speaker said in one turn."""

    id: str  # D3:12
    speaker: str
    text: str  # with a caption of the picture that was shared, if there was one

    @property
    def line(self) -> str:
        """The text under its speaker, where there is one."""
        return f"{self.speaker}: {self.text}" if self.speaker else self.text


@dataclass(frozen=True, slots=True)
class Session:
    """One sitting of a conversation."""

    number: int  # from 1, in order of time
    date: str  # ISO day
    when: str  # date and time in the source's own words
    utterances: tuple[Utterance, ...]

    @property
    def text(self) -> str:
        """The lines SPEAKER: TEXT."""
        return "\n".join(turn.line for turn in self.utterances)


@dataclass(frozen=True, slots=True)
class Memory:
    """An entry that a store can start with. The types are what a file may hold."""

    __pydantic_config__ = FORM

    text: Text
    speaker: Text | None = None
    date: Day | None = None  # ISO day of its session
    session: Annotated[StrictInt, Field(ge=1)] | None = None
    # ids of the turns, or of the session, that it was made from
    evidence: Annotated[tuple[Text, ...], Field(fail_fast=True)] = ()
    kind: Literal[KINDS] | None = None
    id: Id | Literal[""] = ""  # that the entry gets, such as m17; "" = the next free one


@dataclass(frozen=True, slots=True)
class Probe:
    """One question about a conversation."""

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
    def heading(self) -> str:
        """The kind as it stands in tables, as in "4 single-hop"."""
        return f"{self.category} {self.kind}" if self.category else self.kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The right answer and the distractor, in an order drawn by the id; () if it is open."""
        if not (self.abstains and self.distractor):
            return ()
        both = NOT_MENTIONED, self.distractor
        return both[::-1] if seed_of("choices", self.id) % 2 else both

    @property
    def problem(self) -> str:
        """The question as it is asked: below one that abstains stand the two answers.

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
        """The numbers of the sessions with evidence, in order.

        >>> Probe("q", "Who?", ("Ada",), 4, evidence=("D3:12", "S1", "D3:2")).sessions
        (1, 3)
        """
        return tuple(sorted({*map(session_of, self.evidence)} - {None}))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Sessions, the questions about them, and ready-made memories."""

    id: str
    sessions: tuple[Session, ...]
    probes: tuple[Probe, ...]
    # what a store can start with -> its entries: "empty" and "sessions" (an entry for each turn),
    # and where the data has them "observations", "summaries", "events"
    memories: Mapping[str, tuple[Memory, ...]]

    @property
    def text(self) -> str:
        """All sessions, each under its number and date."""
        parts = (f"Session {s.number}, {s.when}\n{s.text}" for s in self.sessions)
        return "\n\n".join(parts)


def turns_as_memories(sessions: tuple[Session, ...]) -> tuple[Memory, ...]:
    """Make a memory of each turn that has a text."""
    return tuple(
        Memory(turn.text, turn.speaker, session.date, session.number, (turn.id,))
        for session in sessions
        for turn in session.utterances
        if turn.text
    )
