"""Questions about conversations of the user's own: JSON lines with sessions, memories, questions.

docs/evaluation.md has an example of a line, and says which fields may be left out. The classes
below are the form: a field that is none of theirs, or of another type, is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, Field, StrictBool, StrictInt, model_validator

from config.errors import UserError
from data import exact_match, f1
from suites._conversations import Conversations
from tasks.conversations import (
    CATEGORIES,
    FORM,
    NOT_MENTIONED,
    Conversation,
    Day,
    Memory,
    Probe,
    Session,
    Text,
    Utterance,
    check_text,
    session_of,
    turns_as_memories,
)
from tasks.environments import FIRST, checked
from tasks.episodes import Metric
from tasks.readers import records_of

# ---------------------------------------------------------------- the file


def _in_paragraphs(text: str) -> str:
    check_text(re.sub(r"[\n\t]", " ", text))
    return text


Texts = Annotated[tuple[Text, ...], FIRST]


class Turn(BaseModel, **FORM):
    text: Annotated[str, AfterValidator(_in_paragraphs)]
    speaker: Text | None = None


class Sitting(BaseModel, **FORM):
    date: Day
    turns: Annotated[list[Turn], Field(min_length=1), FIRST]
    when: Text | None = None


class Question(BaseModel, **FORM):
    question: Text
    answer: Text | StrictInt | Annotated[Texts, Field(min_length=1)] | None = None
    category: Annotated[StrictInt, Field(ge=1, le=5)] | Text | None = None
    evidence: Texts = ()
    abstains: StrictBool | None = None  # else whether the category is 5
    distractor: Text | None = None

    @model_validator(mode="after")
    def _has_an_answer(self) -> Self:
        if self.abstains is None:
            self.abstains = self.category == 5
        if self.category == 5 and not self.abstains:
            raise ValueError("'abstains' must be true, as of all of category 5")
        if self.answer is None and not self.abstains:
            raise ValueError("'answer' is missing")
        return self

    def probe(self, name: str) -> Probe:
        number = self.category if isinstance(self.category, int) else 0
        answers = self.answer if isinstance(self.answer, tuple) else [str(self.answer)]
        kind = CATEGORIES[number] if number else self.category or "questions"
        return Probe(
            id=name,
            question=self.question,
            answers=(NOT_MENTIONED,) if self.abstains else tuple(answers),
            category=number,
            evidence=self.evidence,
            abstains=self.abstains,
            kind=f"{kind}, abstention" if self.abstains and not number else kind,
            distractor=self.distractor or "" if self.abstains else "",
        )


class Talk(BaseModel, **FORM):
    """A line of the file."""

    id: Text
    qa: Annotated[list[Question], Field(min_length=1), FIRST]
    sessions: Annotated[list[Sitting], FIRST] = []
    memories: Annotated[list[Memory], FIRST] = []

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.sessions and not self.memories:
            raise ValueError("there must be 'sessions' or 'memories'")
        if self.sessions != sorted(self.sessions, key=lambda sitting: sitting.date):
            raise ValueError("the 'date' of one of the 'sessions' is before that of the one before")
        ids = [memory.id for memory in self.memories if memory.id]
        if len({*ids}) < len(ids):
            raise ValueError("an 'id' of the 'memories' stands there twice")
        known = {f"S{n}" for n, _ in enumerate(self.sessions, 1)}
        known |= {turn.id for session in self._sessions() for turn in session.utterances}
        named = [name for part in (*self.memories, *self.qa) for name in part.evidence]
        named += [f"S{memory.session}" for memory in self.memories if memory.session]
        if self.sessions and (lost := {*named} - known):
            raise ValueError(f"'evidence' or 'session' names {min(lost)!r}, which is not there")
        return self

    def _sessions(self) -> tuple[Session, ...]:
        return tuple(
            Session(n, sitting.date, sitting.when or sitting.date, tuple(
                Utterance(f"D{n}:{k}", turn.speaker or "", turn.text)
                for k, turn in enumerate(sitting.turns, 1)
            ))
            for n, sitting in enumerate(self.sessions, 1)
        )  # fmt: skip

    def conversation(self) -> Conversation:
        sessions, memories = self._sessions(), tuple(map(_placed, self.memories))
        probes = tuple(q.probe(f"{self.id}-q{n}") for n, q in enumerate(self.qa, 1))
        starts = {"empty": (), "sessions": turns_as_memories(sessions), "memories": memories}
        return Conversation(self.id, sessions, probes, starts)


def _placed(memory: Memory) -> Memory:
    """Return a memory with its session: it is known once all of its evidence has been said."""
    said = max({*map(session_of, memory.evidence)} - {None}, default=None)
    return replace(memory, session=memory.session or said)


def load_own(path: Path) -> list[Conversation]:
    """Read the user's own conversations, .jsonl or .jsonl.gz.

    Sessions are numbered from 1, and the turns of each: D3:12 is the 12th turn of session 3.

    UserError, with file, line and field, for anything that is wrong: nothing is half loaded.
    """
    found: dict[str, Conversation] = {}
    for record in records_of(path):
        talk = checked(Talk, record.fields, record.where, "docs/evaluation.md shows a line")
        if talk.id in found:
            raise record.error(f"'id' is {talk.id!r}, as in a line before")
        found[talk.id] = talk.conversation()
    if not found:
        raise UserError(f"{path} is empty: it holds no conversations.")
    return [*found.values()]


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


def word_f1(prediction: str, probe: Probe) -> float:
    """Return the F1 of an answer's words; where nothing is known, whether the answer says so."""
    if probe.abstains:
        unknown = says_unknown(probe.chosen(prediction))
        return float(unknown or exact_match(prediction, probe.answers))
    return f1(prediction, probe.answers)


# ---------------------------------------------------------------- the suite


class Own(Conversations):
    """Conversations of one's own."""

    grading = Metric("word F1", word_f1)
    load = staticmethod(load_own)
