"""Questions about conversations of the user's own: JSON lines with sessions, memories, questions.

docs/evaluation.md has an example of a line, and says which fields may be left out. The classes
below are the form: a field that is none of theirs, or of another type, is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter

from config.errors import UserError, clip
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
    fault_of,
    read_file,
    session_of,
    turns_as_memories,
)
from tasks.episodes import Metric

QUESTIONS = "questions"  # the kind of those that name none

# ---------------------------------------------------------------- the file


def _in_paragraphs(text: str) -> str:
    check_text(re.sub(r"[\n\t]", " ", text))
    return text


@dataclass
class Turn:
    __pydantic_config__ = FORM
    text: Annotated[str, AfterValidator(_in_paragraphs)]
    speaker: Text | None = None


@dataclass
class Sitting:
    __pydantic_config__ = FORM
    date: Day
    turns: Annotated[list[Turn], Field(min_length=1)]
    when: Text | None = None


@dataclass
class Question:
    __pydantic_config__ = FORM
    question: Text
    answer: Text | int | Annotated[list[Text], Field(min_length=1)] | None = None
    category: Annotated[int, Field(ge=1, le=5)] | Text | None = None
    evidence: tuple[Text, ...] = ()
    abstains: bool | None = None  # else whether the category is 5
    distractor: Text | None = None

    def probe(self, name: str) -> Probe:
        number = self.category if isinstance(self.category, int) else 0
        abstains = number == 5 if self.abstains is None else self.abstains
        if number == 5 and not abstains:
            raise ValueError(f"'abstains' of {name} must be true, as of all of category 5")
        if self.answer is None and not abstains:
            raise ValueError(f"the field 'answer' of {name} is missing")
        answers = self.answer if isinstance(self.answer, list) else [str(self.answer)]
        kind = CATEGORIES[number] if number else self.category or QUESTIONS
        return Probe(
            id=name,
            question=self.question,
            answers=(NOT_MENTIONED,) if abstains else tuple(answers),
            category=number,
            evidence=self.evidence,
            abstains=abstains,
            kind=f"{kind}, abstention" if abstains and not number else kind,
            distractor=self.distractor or "" if abstains else "",
        )


@dataclass
class Talk:
    __pydantic_config__ = FORM
    id: Text
    qa: Annotated[list[Question], Field(min_length=1)]
    sessions: list[Sitting] | None = None
    memories: list[Memory] | None = None

    def conversation(self) -> Conversation:
        sessions, known = [], set[str]()
        for n, sitting in enumerate(self.sessions or (), 1):
            turns = [
                Utterance(f"D{n}:{k}", turn.speaker or "", turn.text)
                for k, turn in enumerate(sitting.turns, 1)
            ]
            sessions.append(Session(n, sitting.date, sitting.when or sitting.date, tuple(turns)))
            known |= {f"S{n}", *(turn.id for turn in turns)}
        memories = tuple(map(_placed, self.memories or ()))
        probes = tuple(q.probe(f"{self.id}-q{n}") for n, q in enumerate(self.qa, 1))
        if not sessions and not memories:
            raise ValueError("there must be 'sessions' or 'memories'")
        if sessions != sorted(sessions, key=lambda session: session.date):
            raise ValueError("the 'date' of one of the 'sessions' is before that of the one before")
        ids = [memory.id for memory in memories if memory.id]
        if len({*ids}) < len(ids):
            raise ValueError("an 'id' of the 'memories' stands there twice")
        named = [name for part in (*memories, *probes) for name in part.evidence]
        named += [f"S{memory.session}" for memory in memories if memory.session]
        if sessions and (lost := [name for name in named if name not in known]):
            named = clip(repr(lost[0]), 80)
            raise ValueError(f"'evidence' or 'session' names {named}, which is not there")
        speakers = dict.fromkeys(u.speaker for s in sessions for u in s.utterances if u.speaker)
        sessions = tuple(sessions)
        starts = {"empty": (), "sessions": turns_as_memories(sessions), "memories": memories}
        return Conversation(self.id, (*speakers,), sessions, probes, starts)


def _placed(memory: Memory) -> Memory:
    """Return a memory with its session: it is known once all of its evidence has been said."""
    said = max({*map(session_of, memory.evidence)} - {None}, default=None)
    return replace(memory, session=memory.session or said)


TALK = TypeAdapter(Talk)


def load_own(path: Path) -> list[Conversation]:
    """Read the user's own conversations, .jsonl or .jsonl.gz.

    Sessions are numbered from 1, and the turns of each: D3:12 is the 12th turn of session 3.

    UserError, with file, line and field, for anything that is wrong: nothing is half loaded.
    """
    found: dict[str, Conversation] = {}
    for n, line in enumerate(read_file(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            conversation = TALK.validate_json(line).conversation()
            if conversation.id in found:
                raise ValueError(f"'id' is {conversation.id!r}, as in a line before")
        except ValueError as error:
            raise UserError(f"{path}, line {n}: {fault_of(error)}.") from None
        found[conversation.id] = conversation
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
