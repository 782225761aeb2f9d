"""Humanity's Last Exam (arXiv 2501.14249): one response to a hard question, read by a judge.

Holds: `HLE`, `read`, `Item`, `confidence`. Leaves out: the judge (tasks/judge.py), accuracy and
calibration of a run (report/summary.py).
Exercise it: `pytest tests/tasks/test_hle.py`. Read next: tasks/judge.py.

The form is that of the data set cais/hle, parquet or JSON lines {id, question, answer, category,
answer_type, image}. Access to it is granted to each user by its authors, who ask that it be not
published again: it is read from the user's path, and without one there are six questions of ours,
which are easy. Questions with a picture are left out and counted, or their pictures kept as data
URLs, for a server whose model sees them.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from config.errors import UserError, clean, clip
from tasks.environments import Environment, Episode, Step, Text, Work, checked, fingerprint
from tasks.judge import Judge, Verdict, judge_of
from tasks.readers import records_of

SHOWN = 300  # characters of an answer in an observation
OWN = Path(__file__).with_name("hle_own.jsonl")
INSTRUCTIONS = """\
Answer the question. Write three parts, each of which begins on a line of its own:
Explanation: what your answer rests on, in a few sentences
Answer: the final answer, and nothing else
Confidence: how sure you are that it is right, from 0% to 100%
There is one response."""


def _data_url(image: object) -> str:
    """Return a picture as a data URL; "" if there is none. ValueError: it is no picture."""
    if image in (None, ""):
        return ""
    if isinstance(image, dict) and isinstance(raw := image.get("bytes"), bytes):
        forms = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
        form = next((form for start, form in forms.items() if raw.startswith(start)), "")
        image = f"data:image/{form};base64,{b64encode(raw).decode()}" if form else ""
    if isinstance(image, str) and re.match(r"data:image/[\w.+-]+;base64,", image):
        return image
    raise ValueError("it must be empty or a picture as a data URL, data:image/...;base64,")


class Item(BaseModel):
    """One question as the file has it."""

    id: Text
    question: Text
    answer: Text
    category: Text
    answer_type: Literal["exactMatch", "multipleChoice"]
    image: Annotated[str, BeforeValidator(_data_url)] = ""


def read(path: str | Path) -> list[Item]:
    """Read the questions of a file, parquet or JSON lines, in its order.

    UserError: there is none, or it is not of this form; it names the file, the record, the field.
    """
    items: dict[str, Item] = {}
    for record in records_of(Path(path)):
        item = checked(Item, record.fields, record.where, "hle reads the form of cais/hle")
        if item.id in items:
            raise record.error(f"the id '{item.id}' was there before; results are kept by id")
        items[item.id] = item
    if not items:
        raise UserError(f"{path} is empty: it holds no questions.")
    return [*items.values()]


class HLE(Environment):
    """Questions with one response each, which a judge calls right or wrong.

    path: "" = our own six. judge: openai:URL#MODEL, or a function. images: keep the questions with
    a picture (their data URLs are with the tasks) instead of leaving them out (`skipped`).
    UserError: the file is of another form, the judge is not there, no question is left.
    """

    name, most_steps = "hle", 1
    instructions = INSTRUCTIONS

    def __init__(self, path: str | Path = "", judge: str | Judge = "", images: bool = False):
        if not judge:
            raise UserError(
                "hle needs a judge, a model that reads the responses: give --judge "
                "openai:URL#MODEL."
            )
        items = read(path or OWN)
        kept = [item for item in items if images or not item.image]
        if not kept:
            raise UserError(f"All questions of {path} have a picture: --images sends them.")
        self.skipped = len(items) - len(kept)
        self._items = {item.id: item for item in kept}
        self.judge = judge_of(judge) if isinstance(judge, str) else judge

    def tasks(self) -> Sequence[Work]:
        """Return the questions, in the order of the file."""
        return [
            Work(
                id=item.id,
                question=item.question,
                answers=(item.answer,),
                text="",
                kind=item.category,
                dataset=self.name,
                environment=self,
                solution=(item.answer,),
                skills=(item.category,),
                images=(item.image,) if item.image else (),
                content=fingerprint((item.answer_type, item.image)),
            )
            for item in self._items.values()
        ]

    def intent(self, id: str) -> str:
        """Return the question."""
        return self._items[id].question

    def reset(self, id: str) -> Answering:
        """Begin a question; nobody is asked yet."""
        return Answering(self._items[id], self.judge)

    def close(self) -> None:
        """Close the connections to the judge."""
        getattr(self.judge, "close", lambda: None)()


@dataclass(slots=True)
class Answering(Episode):
    """One try of a question: one response."""

    item: Item
    judge: Judge
    verdict: Verdict | None = None

    @property
    def observation(self) -> str:
        return self.item.question

    def step(self, action: str) -> Step:
        """Have a response judged. The right answer and the judge's reasons are not told.

        ServerFailed: the judge gives no verdict; it is unknown then whether the response is right.
        """
        if not action.strip():
            return Step("There is no response.", True, -1.0, "empty")
        verdict = self.verdict = self.judge(self.item.question, self.item.answer, action)
        read = clip(" ".join(clean(verdict.answer).split()), SHOWN)
        word = "right" if verdict.correct else "wrong"
        reward = 1.0 if verdict.correct else -1.0
        return Step(f"The answer is {word}: {read}", True, reward, "", confidence(action))


def confidence(response: str) -> float | None:
    """Return how sure of its answer a response says it is, in percent; None: it does not say.

    >>> confidence("Answer: 7\\nConfidence: 85%"), confidence("**Confidence:** 7.5 %.")
    (85.0, 7.5)
    """
    shares = re.findall(r"confidence\W{0,8}?(\d{1,3}(?:\.\d+)?)(?!\d)", response, re.IGNORECASE)
    return float(shares[-1]) if shares and float(shares[-1]) <= 100 else None
