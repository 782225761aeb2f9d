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

from pydantic import BaseModel, BeforeValidator, Field, StrictInt

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
    turns_as_memories,
)
from tasks.environments import FIRST, Text, checked, fault_of
from tasks.episodes import Metric
from tasks.readers import UNFIT, read_json

# ---------------------------------------------------------------- the file

PUBLISHED = "locomo reads locomo10.json as it was published"


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


class Turn(BaseModel):
    speaker: Text
    dia_id: Text
    text: Text
    blip_caption: str = ""

    @property
    def utterance(self) -> Utterance:
        """The turn, with the caption of its picture as a part of the text."""
        (name,) = turn_ids(self.dia_id)
        picture = f" (shares a picture: {self.blip_caption})" if self.blip_caption else ""
        return Utterance(name, self.speaker, self.text + picture)


class Question(BaseModel):
    question: Text
    category: Annotated[StrictInt, Field(ge=1, le=5)]
    answer: Text | StrictInt | None = None
    adversarial_answer: Text | None = None
    evidence: Annotated[list[str], FIRST] = []

    def probe(self, name: str) -> Probe:
        """Return the question. One of category 5 abstains, and its adversarial answer is the
        distractor: two of the 446 have an answer, which is not graded."""
        abstains = self.category == 5
        if (answer := self.adversarial_answer if abstains else self.answer) is None:
            raise ValueError(f"{name} has no answer")
        return Probe(
            id=name,
            question=self.question,
            answers=(NOT_MENTIONED if abstains else str(answer),),
            category=self.category,
            evidence=turn_ids(self.evidence),
            abstains=abstains,
            kind=CATEGORIES[self.category],
            distractor=str(answer) if abstains else "",
        )


def _few(fields: object) -> object:
    if isinstance(fields, dict) and len(fields) > 1000:  # each of which may be a mistake
        raise ValueError("there are more than 1,000 fields")
    return fields


FEW = BeforeValidator(_few)
Strings = Annotated[list[str], FIRST]
Facts = Annotated[list[tuple[Text, str | Strings]], FIRST]


class Sample(BaseModel):
    """An item of the published file, of whose sessions the fields have numbers in their names."""

    sample_id: Text
    conversation: Annotated[dict[str, str | Annotated[list[Turn], FIRST]], FEW]
    observation: Annotated[dict[str, Annotated[dict[str, Facts], FEW]], FEW]
    session_summary: Annotated[dict[str, Text], FEW]
    event_summary: Annotated[dict[str, Annotated[dict[str, str | Strings], FEW]], FEW]
    qa: Annotated[list[Question], Field(min_length=1), FIRST]

    def made(self) -> Conversation:
        keys = (re.fullmatch(r"session_(\d+)", key) for key in self.conversation)
        sessions, observations, summaries, events = [], [], [], []
        for n in sorted(int(key[1]) for key in keys if key):
            when, turns = (
                self.conversation[f"session_{n}_date_time"],
                self.conversation[f"session_{n}"],
            )
            day, whole = day_of(when), (f"S{n}",)
            sessions.append(Session(n, day, when, tuple(turn.utterance for turn in turns)))
            for who, facts in self.observation.get(f"session_{n}_observation", {}).items():
                observations += [Memory(text, who, day, n, turn_ids(ids)) for text, ids in facts]
            if summary := self.session_summary.get(f"session_{n}_summary"):
                summaries.append(Memory(summary, None, day, n, whole))
            for who, told in self.event_summary.get(f"events_session_{n}", {}).items():
                if who != "date":  # the session's own, once more; one of the 669 events is blank
                    events += [Memory(event, who, day, n, whole) for event in told if event]
        if not sessions:
            raise ValueError("there is no field session_1")
        memories = {
            "empty": (),
            "sessions": turns_as_memories(tuple(sessions)),
            "observations": tuple(observations),
            "summaries": tuple(summaries),
            "events": tuple(events),
        }
        probes = (asked.probe(f"{self.sample_id}-q{n}") for n, asked in enumerate(self.qa, 1))
        return Conversation(self.sample_id, tuple(sessions), tuple(probes), memories)


def load_locomo(path: Path) -> list[Conversation]:
    """Read LoCoMo's published file, .json or .json.gz.

    Dates without a session are passed over. Evidence is every D<number>:<number> of the field,
    whatever stands around it; ids that no turn has are kept, for the official recall counts them.
    UserError: the file is not as published.
    """
    found = {}
    for n, item in enumerate(checked(list, read_json(path), path, PUBLISHED), 1):
        sample = checked(Sample, item, f"{path}, item {n}", PUBLISHED)
        try:
            found[sample.sample_id] = sample.made()
        except UNFIT as error:
            raise UserError(f"{path}, item {n}: {fault_of(error)}; {PUBLISHED}.") from error
    if not found or len(found) < n:
        raise UserError(f"{path}: each item must have a sample_id of its own; {PUBLISHED}.")
    return [*found.values()]


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
