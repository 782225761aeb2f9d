"""What agents are called, and what it means that nothing was right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from agents import find
from memagent import Agent


@cache
def reads_all(agent: str) -> bool:
    """Whether an agent is shown the whole document at once; of one that is not known it is not."""
    return "whole" in (find.known(agent) or Agent).extras


@cache
def reader(agent: str) -> str:
    """Return what an agent is called in a sentence, by the name that rows have.

    >>> reader("full"), reader("memagent@untrained"), reader("mine")
    ('whole document in the prompt', 'memagent before training', 'mine')
    """
    name, at, weights = agent.partition("@")
    words = (find.known(name) or Agent).in_words or name
    return f"{words} before training" if weights == "untrained" else words + at + weights


def lead_of(agents: Iterable[str]) -> str:
    """Return the leading agent: the one named trained, else the first; "" without any."""
    names = [*agents]
    return "trained" if "trained" in names else next(iter(names), "")


NOTHING = {
    "failed": "All readings failed, so this measures nothing: `show RUN` has their errors.",
    "empty": "All answers are empty: raise --final-tokens, or switch thinking off (--no-thinking).",
    "unformed": "No answer has the form that was asked for: ask for another one (--form plain), or "
    "give a --model that keeps to it.",
    "": "No answer was right: the model cannot do this kind of question (the embedded policy knows "
    "generated English alone). Give another --model, or train one on such tasks.",
}
"""What is said of an evaluation without a right answer: share that is nearly 1 -> the remedy."""


def nothing_right(summary: dict, rows: Sequence[dict]) -> str:
    """Say what it means that no answer of an evaluation was right; "" if one was, or of none."""
    if not rows or any((row.get(summary["metric"]) or 0) > 0 for row in rows):
        return ""
    records = summary["cells"]
    return next(
        words
        for name, words in NOTHING.items()
        if not name or all(record.get(name, 0) > 0.95 for record in records)
    )
