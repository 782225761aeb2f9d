"""An answer within a text: how much of it a memory holds, whatever stands around it."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from data import normalize_answer

# Tags of the agents' protocols and LaTeX around a box are not words of the text
MARKUP = re.compile(
    r"</?(?:update|recall|thinking|think)>"
    r"|\\(?:boxed|fbox|text(?:bf|it|rm)?|math(?:bf|it|rm))(?![a-z])"
)
# Punctuation within a word or a number, as in U.S.A., O'Brien, AT&T, 1,200 and 3:45; any other
# punctuation separates words
INNER = re.compile(r"(?<=[^\W_])['.&_-](?=[^\W_])|(?<=\d)[,:/](?=\d)")
BORDERS = str.maketrans(string.punctuation, " " * len(string.punctuation))


def separate_words(text: str) -> str:
    r"""Normalise as `normalize_answer` does, but split words at markup and punctuation.

    `normalize_answer` deletes punctuation, as the metrics must, and thereby joins words. A memory
    may be `<update>Lima</update>`, as ReMemR1's code keeps it, or end in a box.

    >>> separate_words(r"<update>See \boxed{Lima}</update>"), separate_words("O'Brien,Lima: 1,200")
    ('see lima', 'obrien lima 1200')
    """
    return normalize_answer(INNER.sub("", MARKUP.sub(" ", text)).translate(BORDERS))


def all_words(text: str) -> set[str]:
    """Return the words of the text under both normalisations: the metrics' and `separate_words`."""
    return {*normalize_answer(MARKUP.sub(" ", text)).split(), *separate_words(text).split()}


def answer_recall(
    answers: Iterable[str],
    text: str,
    question: str = "",
    all_asked: bool = False,
) -> float | None:
    """Return recall(y, text) of ReMemR1 (arXiv 2509.23040): the share of an answer's words in it.

    Whole words, normalised, without markup; the best answer counts, or the mean if `all_asked`.
    None: no answer has a word to look for. The words of the question, which say nothing about
    reading, and the answers yes and no are not looked for.

    >>> answer_recall(["Old Lima", "Rome"], "in Lima")
    0.5
    """
    present, asked = all_words(text), all_words(question)
    plain = [normalize_answer(answer) for answer in answers]
    golds = [gold for a in plain if a not in ("yes", "no") and (gold := {*a.split()} - asked)]
    shares = [len(gold & present) / len(gold) for gold in golds]
    return sum(shares) / len(shares) if all_asked and shares else max(shares, default=None)


def phrases(answers: Iterable[str]) -> list[str]:
    """Normalise the answers for `count_phrases`, without yes and no, which occur everywhere."""
    normal = {normalize_answer(answer) for answer in answers} - {"", "yes", "no"}
    return sorted(f" {words} " for words in normal)


def count_phrases(golds: Sequence[str], text: str) -> int:
    """Count the `phrases` in the text: whole words, normalised, apart from tags and boxes."""
    if not golds:
        return 0
    joined = f" {normalize_answer(MARKUP.sub(' ', text))} "
    present = {gold for gold in golds if gold in joined}
    # Sections are long: `separate_words` runs only if all words of a missing phrase occur
    missing = [gold for gold in golds if gold not in present]
    if candidates := [gold for gold in missing if all(word in joined for word in gold.split())]:
        separated = f" {separate_words(text)} "
        present.update(gold for gold in candidates if gold in separated)
    return sum(gold in present for gold in golds)
