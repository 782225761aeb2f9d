"""What an answer to LoCoMo's questions is worth: the official metric.

Holds: `official_score`, `official_em`, `normalize`, `refuses`.
Leaves out: the questions (tasks/locomo.py), recall (agents/search.py), means and intervals
(report/). No torch.
Exercise it: `pytest tests/tasks/test_locomo_score.py`. Read next: tasks/episodes.py.

It is that of LoCoMo's evaluation code; a probe of another data set (category 0) is graded like
category 4.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import lru_cache

from tasks.conversations import Probe

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


def refuses(prediction: str) -> bool:
    """Tell whether an answer says, in one of two phrases, that nothing is known."""
    return any(phrase in prediction.lower() for phrase in REFUSALS)


def _chosen(prediction: str, probe: Probe) -> str:
    """Return an answer in words, as the original reads a choice (task_eval, `get_cat_5_answer`).

    Of one character, "a" is the first of the two answers and any other the second; of three
    likewise "(a)" and any other; "a." and "a)" are no choice but text.
    """
    text = prediction.strip().lower()
    if not probe.choices or len(text) not in (1, 3):
        return prediction
    return probe.choices[text not in ("a", "(a)")]


def official_score(prediction: str, probe: Probe) -> float:
    """Grade an answer, 0 to 1, as LoCoMo's evaluation does (snap-research/locomo at 9228632).

    Categories 2, 3, 4: F1. Category 1: the parts between commas are compared one by one, so of the
    gold "x, y" the answer "x" has a half. Category 5, and any question that abstains: 1 if the
    answer refuses, else 0; a letter stands for the answer that it names (`_chosen`). Of several
    accepted answers the best one counts.
    """
    if probe.abstains or probe.category == 5:
        return float(refuses(_chosen(prediction, probe)))
    f1 = _parts_f1 if probe.category == 1 else _f1
    return max((f1(prediction, gold) for gold in _golds(probe)), default=0.0)


def official_em(prediction: str, probe: Probe) -> float:
    """Return 1 if answer and gold have the same set of words, not stemmed, in any order; else 0.

    A question that abstains is graded as in `official_score`.
    """
    if probe.abstains or probe.category == 5:
        return float(refuses(_chosen(prediction, probe)))
    words = {*normalize(prediction).split()}
    return float(any(words == {*normalize(gold).split()} for gold in _golds(probe)))
