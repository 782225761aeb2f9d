"""LoCoMo (arXiv 2402.17753): ten conversations over months, with questions in five categories.

The file is read from the user's path and never shipped: its licence is CC BY-NC 4.0. Answers are
graded as LoCoMo's evaluation code does it (snap-research/locomo at 9228632).
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from config.errors import UserError
from suites._conversations import Conversations
from tasks.conversations import (
    CATEGORIES,
    NOT_MENTIONED,
    Conversation,
    Memory,
    Probe,
    Session,
    Utterance,
    fault_of,
    read_file,
    turns_as_memories,
)
from tasks.episodes import Metric

# ---------------------------------------------------------------- the file


def day_of(when: str) -> str:
    """Return the ISO day of a session's date and time; ValueError if it has another form.

    >>> day_of("4:05 pm on 3 June, 2024")
    '2024-06-03'
    """
    return datetime.strptime(when, "%I:%M %p on %d %B, %Y").date().isoformat()


def turn_ids(texts: str | list[str]) -> tuple[str, ...]:
    """Return all ids of turns in a text or a list of texts, numbers without leading zeros.

    >>> turn_ids(["D8:6; D9:17", "D", "D30:05"])
    ('D8:6', 'D9:17', 'D30:5')
    """
    texts = [texts] if isinstance(texts, str) else texts
    found = (match for text in texts for match in re.findall(r"D(\d+):(\d+)", text))
    return tuple(f"D{int(session)}:{int(turn)}" for session, turn in found)


def _one_id(text: str) -> str:
    if len(found := turn_ids(text)) != 1:
        raise ValueError("must be one id such as D1:3")
    return found[0]


def _when(text: str) -> str:
    day_of(text)
    return text


Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
Ids = Annotated[str | list[str], AfterValidator(turn_ids)]
When = Annotated[str, AfterValidator(_when)]


class _Part(BaseModel):
    """An object of the file; fields that are not asked for are passed over."""

    model_config = ConfigDict(strict=True)


class _Turn(_Part):
    dia_id: Annotated[str, AfterValidator(_one_id)]
    speaker: Text
    text: Text
    blip_caption: str = ""

    def utterance(self) -> Utterance:
        picture = f" (shares a picture: {self.blip_caption})" if self.blip_caption else ""
        return Utterance(self.dia_id, self.speaker, self.text + picture)


class _Question(_Part):
    question: Text
    category: int = Field(ge=1, le=5)
    answer: Text | int | None = None
    adversarial_answer: Text | int | None = None
    evidence: Ids = ()

    def probe(self, name: str) -> Probe:
        """Return the question. One of category 5 abstains, and its adversarial answer is the
        distractor: two of the 446 have an answer, which is not graded."""
        abstains = self.category == 5
        wanted = "adversarial_answer" if abstains else "answer"
        if (answer := getattr(self, wanted)) is None:
            raise ValueError(f"the field '{wanted}' of {name} is missing")
        return Probe(
            id=name,
            question=self.question,
            answers=(NOT_MENTIONED if abstains else str(answer),),
            category=self.category,
            evidence=self.evidence,
            abstains=abstains,
            kind=CATEGORIES[self.category],
            distractor=str(answer) if abstains else "",
        )


class _Talk(_Part):
    """The sessions, whose fields are numbered; dates without a session are passed over."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, list[_Turn] | When]

    speaker_a: Text
    speaker_b: Text

    def sessions(self) -> tuple[Session, ...]:
        fields = self.__pydantic_extra__
        numbers = sorted(int(k[8:]) for k in fields if re.fullmatch(r"session_\d+", k))
        if not numbers:
            raise ValueError("'conversation' has no field session_1, session_2, ...")
        found = []
        for number in numbers:
            when, turns = fields.get(f"session_{number}_date_time"), fields[f"session_{number}"]
            if not isinstance(when, str) or not isinstance(turns, list):
                raise ValueError(f"session_{number} is no list of turns with a date")
            turns = tuple(turn.utterance() for turn in turns)
            found.append(Session(number, day_of(when), when, turns))
        return tuple(found)


class _Events(_Part):
    """What happened to each speaker, and the session's date once more."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, list[str]]

    date: str = ""


class _Sample(_Part):
    sample_id: Text
    conversation: _Talk
    observation: dict[str, dict[str, list[tuple[Text, Ids]]]]
    session_summary: dict[str, str]
    event_summary: dict[str, _Events]
    qa: list[_Question] = Field(min_length=1)

    def conversation_of(self) -> Conversation:
        sessions = self.conversation.sessions()
        memories: dict[str, list[Memory]] = {"observations": [], "summaries": [], "events": []}
        for s in sessions:
            whole = (f"S{s.number}",)
            told = self.observation.get(f"session_{s.number}_observation", {})
            for speaker, facts in told.items():
                memories["observations"] += [
                    Memory(fact, speaker, s.date, s.number, ids) for fact, ids in facts
                ]
            if summary := self.session_summary.get(f"session_{s.number}_summary"):
                memories["summaries"].append(Memory(summary, None, s.date, s.number, whole))
            events = self.event_summary.get(f"events_session_{s.number}", _Events())
            memories["events"] += [
                Memory(event, speaker, s.date, s.number, whole)
                for speaker, told in events.__pydantic_extra__.items()
                for event in told
                if event  # one of the published 669 is blank
            ]
        return Conversation(
            self.sample_id,
            (self.conversation.speaker_a, self.conversation.speaker_b),
            sessions,
            tuple(q.probe(f"{self.sample_id}-q{n}") for n, q in enumerate(self.qa, 1)),
            {"empty": (), "sessions": turns_as_memories(sessions)}
            | {start: tuple(entries) for start, entries in memories.items()},
        )


SAMPLES = TypeAdapter(list[_Sample])


def load_locomo(path: Path) -> list[Conversation]:
    """Read LoCoMo's published file, .json or .json.gz.

    A caption of a picture becomes part of the turn's text. Evidence is every D<number>:<number> of
    the field, whatever stands around it; ids that no turn has are kept, for the official recall
    counts them. UserError: the file is not as published.
    """
    try:
        found = [sample.conversation_of() for sample in SAMPLES.validate_json(read_file(path))]
    except ValueError as error:
        raise UserError(f"{path}: {fault_of(error)}.") from None
    if not found or len({c.id for c in found}) < len(found):
        raise UserError(f"{path} must hold conversations, each with a 'sample_id' of its own.")
    return found


# ---------------------------------------------------------------- splits


# rule -> what it does; no official split exists, and both keep each conversation whole
SPLITS = {
    "seven-three": "seven conversations train, three test, shuffled by Python's random.Random(42)",
    "memory-r1": "conv-26 trains, conv-30 validates, the others test",
}
# the name under which this rule was published: that of the project, which is an agent's here
SPLITS["memupdate"] = SPLITS["seven-three"]


def split(
    conversations: Sequence[Conversation], rule: str, adversarial: bool = False
) -> dict[str, list[Conversation]]:
    """Divide conversations by one of `SPLITS` into "train", "validation" and "test".

    adversarial: False leaves out the questions of category 5, as both published splits do.
    seven-three, of other than ten conversations: seven tenths of them train, rounded down.

    UserError: the conversations that it needs are not there.
    """
    order, parts = [*conversations], {"train": [], "validation": [], "test": []}
    if rule == "memory-r1":
        names = {"conv-26": "train", "conv-30": "validation"}
        if missing := names.keys() - {c.id for c in conversations}:
            raise UserError(f"The split memory-r1 needs {min(missing)}, which is not there.")
    else:
        if len(order) < 2:
            raise UserError("The split seven-three needs at least two conversations.")
        random.Random(42).shuffle(order)
        names = {c.id: "train" for c in order[: 7 * len(order) // 10]}
    for c in order:
        probes = tuple(probe for probe in c.probes if adversarial or probe.category != 5)
        parts[names.get(c.id, "test")].append(replace(c, probes=probes))
    return parts


# ---------------------------------------------------------------- the official metric

REFUSALS = ("no information available", "not mentioned")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower a text and drop punctuation, the words a, an, the, and, and superfluous spaces.

    >>> normalize("The cat, and 1,200 dogs!")
    'cat 1200 dogs'
    """
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the|and)\b", " ", text).split())


@lru_cache(maxsize=1)
def _stemmer():
    from nltk.stem import PorterStemmer  # takes two seconds, mostly for what is not needed here

    return PorterStemmer()  # NLTK's own extension of Porter's algorithm, as in the original


@lru_cache(maxsize=100_000)
def _stem(word: str) -> str:
    return _stemmer().stem(word)


def _f1(prediction: str, gold: str) -> float:
    """Return the F1 of the stems, each counted as often as it occurs on both sides."""
    predicted = Counter(map(_stem, normalize(prediction).split()))
    wanted = Counter(map(_stem, normalize(gold).split()))
    common = (predicted & wanted).total()
    if common == 0:
        return 0.0
    precision, recall = common / predicted.total(), common / wanted.total()
    return 2 * precision * recall / (precision + recall)


def _parts_f1(prediction: str, gold: str) -> float:
    """Return the mean, over the gold's parts between commas, of the best F1 of a predicted part."""
    golds, predictions = gold.split(","), prediction.split(",")
    return sum(max(_f1(part, gold) for part in predictions) for gold in golds) / len(golds)


def _golds(probe: Probe) -> list[str]:
    """Return the accepted answers; of category 3 only what stands before the first semicolon."""
    if probe.category == 3:
        return [answer.partition(";")[0].strip() for answer in probe.answers]
    return [*probe.answers]


def _refuses(prediction: str, probe: Probe) -> bool:
    """Tell whether an answer says, in one of two phrases, that nothing is known.

    A choice is read as in the original (task_eval, `get_cat_5_answer`): of one character, "a" is
    the first of the two answers and any other the second; of three likewise "(a)" and any other;
    "a." and "a)" are no choice but text.
    """
    text = prediction.strip().lower()
    if probe.choices and len(text) in (1, 3):
        prediction = probe.choices[text not in ("a", "(a)")]
    return any(phrase in prediction.lower() for phrase in REFUSALS)


def official_score(prediction: str, probe: Probe) -> float:
    """Grade an answer, 0 to 1, as LoCoMo's evaluation does.

    Categories 2, 3, 4: F1. Category 1: the parts between commas are compared one by one, so of the
    gold "x, y" the answer "x" has a half. Category 5, and any question that abstains: 1 if the
    answer refuses, else 0. Of several accepted answers the best one counts.
    """
    if probe.abstains or probe.category == 5:
        return float(_refuses(prediction, probe))
    f1 = _parts_f1 if probe.category == 1 else _f1
    return max((f1(prediction, gold) for gold in _golds(probe)), default=0.0)


def official_em(prediction: str, probe: Probe) -> float:
    """Return 1 if answer and gold have the same set of words, not stemmed, in any order; else 0.

    A question that abstains is graded as in `official_score`.
    """
    if probe.abstains or probe.category == 5:
        return float(_refuses(prediction, probe))
    words = {*normalize(prediction).split()}
    return float(any(words == {*normalize(gold).split()} for gold in _golds(probe)))


# ---------------------------------------------------------------- the suite


@dataclass(frozen=True)
class LoCoMo(Conversations):
    """LoCoMo."""

    source_split: str = ""
    """RULE/PART/adversarial/START, each of which may be left out: RULE/PART = seven-three (also
    named memupdate) or memory-r1, and train, validation or test; adversarial = with category 5;
    START = what a store may begin with, such as observations"""

    grading = Metric("official metric", official_score, beside={"official_em": official_em})
    headings = tuple(f"{number} {name}" for number, name in CATEGORIES.items())
    rules = tuple(SPLITS)
    load, split = staticmethod(load_locomo), staticmethod(split)
