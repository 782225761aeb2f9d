"""Questions that offer choices: which ones a record has, and which one an answer chooses.

Holds: `Choice`, `offered`, `labels_of`. Leaves out: the other fields of records (tasks/readers.py).
No torch.
Exercise it: `pytest tests/tasks/test_choices.py`. Read next: tasks/readers.py.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from data import STYLE, Task, exact_match, f1, sub_em, unwrapped

if TYPE_CHECKING:
    from tasks.readers import Record

# choices, options, answer_choices; choice_A, option1, opa (MedMCQA's); A, B, C, D alone
NAMES = re.compile(
    r"(?:answer_?)?(?:choices?|options?|candidates|alternatives|endings|distractors?)"
    r"[_ ]?([A-J]|\d\d?)?|op([a-j])",
    re.I,
)
BESIDE = ("metadata", "extra_info", "info")  # where forms keep further fields


@dataclass(slots=True)
class Choice(Task):
    """Hold a question whose answer is one of several that it shows.

    An answer is right by the letter ("B", "(B)", "B. Boris") or by the text, whole, of the right
    choice. `sub_em` is 1 as well for a text that contains the right choice's and no other's.
    """

    choices: tuple[tuple[str, str], ...] = ()  # label, text

    def chosen(self, prediction: str | None) -> int | None:
        """Return which choice an answer is, by its text or its label; None: it is none of them; -1:
        it has the label of one and the text of another."""
        answer = unwrapped(re.sub(STYLE, "", prediction or "")).strip("{}")
        if answer.lower() in (text.lower() for _, text in self.choices):
            return _same(answer, self.choices)
        lead = re.match(r"\W*(?:(?:option|choice|answer)\W+)?(\w+)(.*)", answer, re.I | re.S)
        for n, (label, text) in enumerate(self.choices if lead else ()):
            if lead[1].lower() == label.lower():
                alone = not lead[2].strip(string.punctuation + string.whitespace)
                if alone or exact_match(lead[2], [text]):
                    return n
                if lead[2][0] in ").:]":
                    return -1
        return _same(answer, self.choices)

    def score(self, prediction: str | None) -> float:
        """Return 1.0 for the right choice, else 0.0."""
        n = self.chosen(prediction)
        return float(n not in (None, -1) and self.choices[n][1] == self.answers[0])

    def beside(self, prediction: str | None) -> dict[str, float]:
        """Return the metrics, of which those of words take a letter for a part of any word."""
        right, answer = self.score(prediction), unwrapped(prediction or "")
        if right or self.chosen(answer) is not None:
            return dict.fromkeys(("em", "f1", "sub_em"), right)
        among = [text for _, text in self.choices if sub_em(answer, [text])]
        contains = float(among == [self.answers[0]])
        return {"em": 0.0, "f1": f1(answer, self.answers[:1]), "sub_em": contains}


def _same(answer: str, choices: Sequence[tuple[str, str]]) -> int | None:
    """Return the one choice whose text this is: as it stands (C++ is not C#), else normalised."""
    letters = [n for n, (_, text) in enumerate(choices) if text.lower() == answer.strip().lower()]
    words = letters or [n for n, (_, text) in enumerate(choices) if exact_match(answer, [text])]
    return words[0] if len(words) == 1 else None


def offered(r: Record, task: Task) -> Task:
    """Return the task with the choices of its record, shown behind the question; or as it is.

    UserError: a field looks like choices and cannot be read as such; the answer is none of them.
    """
    choices = _choices(r)
    if not choices:
        return task
    right = [n for answer in task.answers if (n := _same(answer, choices)) is not None]
    right += [n for n, (label, _) in enumerate(choices) if label in task.answers]
    if len({*right}) != 1:
        listed = " | ".join(f"({label}) {text:.40}" for label, text in choices)
        which = "more than one" if right else "none"
        raise r.error(
            f"the answer {task.answers[0]!r:.80} names {which} of the choices {listed}: "
            "give the letter or the text of the right one"
        )
    label, text = choices[right[0]]
    lines = [f"({label}) {text}" for label, text in choices]
    shown = all(
        re.search(rf"^\W*{re.escape(label)}\W+{re.escape(text)}\s*$", task.question, re.M)
        for label, text in choices
    )
    question = task.question if shown else "\n".join((task.question, *lines))
    known = {field.name: getattr(task, field.name) for field in fields(Task)}
    known |= {"question": question, "answers": (text, label)}
    return Choice(**known, choices=choices)


def labels_of(task: Task) -> dict[str, dict[str, list[str]]]:
    """Return the field by which `offered` finds a task's choices again."""
    if not isinstance(task, Choice):
        return {}
    names, texts = zip(*task.choices, strict=True)
    return {"choices": {"label": list(names), "text": list(texts)}}


def _choices(r: Record) -> tuple[tuple[str, str], ...]:
    """Return (label, text) of a record's choices, in their order; () if it has none."""
    levels = (r.fields, *(r.fields.get(name) for name in BESIDE))
    for level in (level for level in levels if isinstance(level, Mapping)):
        found = [
            (name, match, value)
            for name, value in level.items()
            if (match := NAMES.fullmatch(name)) and value not in (None, "", [], {})
        ]
        single = [(match[1] or match[2], value) for _, match, value in found if match.lastindex]
        if whole := [(name, value) for name, match, value in found if not match.lastindex]:
            return _listed(r, *whole[0])
        letters = [(name, level[name]) for name in "ABCDEFGHIJ" if level.get(name)]
        if pairs := single or (letters if len(letters) > 1 and "A" in level else []):
            pairs = sorted(((label.upper(), text) for label, text in pairs), key=lambda x: x[0])
            return _checked(r, "choices", pairs)
    return ()


def _listed(r: Record, name: str, value: object) -> tuple[tuple[str, str], ...]:
    """Return the choices of one field: [text], {label: text}, {label: [..], text: [..]}, or
    [{label, text}]."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        labels = value.get("label") or string.ascii_uppercase
        value = dict(zip(labels, value["text"], strict=False))
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        pairs = [(part.get("label", part.get("key")), part.get("text")) for part in value]
    elif isinstance(value, dict):
        pairs = [*value.items()]
    else:
        pairs = [
            *zip(string.ascii_uppercase, value if isinstance(value, list) else (), strict=False)
        ]
        pairs = pairs if isinstance(value, list) and len(pairs) == len(value) else []
    return _checked(r, name, pairs)


def _checked(r: Record, name: str, pairs: list) -> tuple[tuple[str, str], ...]:
    pairs = [(label, str(text) if type(text) in (int, float) else text) for label, text in pairs]
    texts = [part for pair in pairs for part in pair]
    if len(pairs) < 2 or not all(isinstance(part, str) and part.strip() for part in texts):
        raise r.error(f"'{name}' looks like choices, but it is no list of two or more texts")
    return tuple((label.strip(), text.strip()) for label, text in pairs)
