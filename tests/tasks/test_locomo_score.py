"""LoCoMo's official metric rule by rule, and against a plain second version; recall."""

from __future__ import annotations

import random
import string

import nltk
import pytest
from nltk.stem import PorterStemmer

from tasks import locomo_score
from tasks.conversations import Probe
from tasks.locomo import NOT_MENTIONED
from tasks.locomo_score import normalize, official_em, official_score


def probe(gold: str | tuple[str, ...], category: int = 4, **other) -> Probe:
    golds = (gold,) if isinstance(gold, str) else gold
    return Probe("q", "What?", golds, category, **other)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Cat\tand\na dog", "cat dog"),
        ("1,200 pears", "1200 pears"),
        ("x,y", "xy"),  # commas and other punctuation leave no space
        ("O'Brien's U.S. co-op!", "obriens us coop"),
        ("and Andes, an anthem", "andes anthem"),  # whole words only
        ("a the an and", ""),
        ("Müller", "müller"),
    ],
)
def test_normalisation(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    "prediction, gold, expected",
    [
        ("red pears", "red pears", 1),
        ("pears red", "red pears", 1),  # order is nothing
        ("red", "red pears", 2 / 3),
        ("red red", "red pears", 1 / 2),  # each occurrence counts once
        ("red red", "red red pears", 4 / 5),
        ("plums", "red pears", 0),
        ("", "red pears", 0),
        ("the", "a", 0),  # nothing in common, though both are empty
        ("running runners", "runs runner", 1),  # stems
        ("dies", "die", 1),  # only by NLTK's extension of Porter's rules
        ("The Red PEARS.", "red, pears", 1),
    ],
)
@pytest.mark.parametrize("category", [2, 4, 0])
def test_f1_of_categories_2_and_4_and_of_other_data(category, prediction, gold, expected):
    assert official_score(prediction, probe(gold, category)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "prediction, gold, expected",
    [
        ("x", "x, y", 1 / 2),
        ("x, y", "x, y", 1),
        ("y, x", "x, y", 1),
        ("x y", "x, y", 2 / 3),  # one part that shares a word with each
        ("x, q, r, s", "x, y", 1 / 2),  # more parts cost nothing
        ("x", "x", 1),
        ("x", "x,", 1 / 2),  # the part after the last comma is one too
        ("red pears, plums", "pears, plums", (2 / 3 + 1) / 2),
    ],
)
def test_category_1_compares_parts_between_commas(prediction, gold, expected):
    assert official_score(prediction, probe(gold, 1)) == pytest.approx(expected)


def test_only_category_1_cuts_at_commas():
    scores = [official_score("x", probe("x, y", category)) for category in (1, 2, 3, 4)]
    assert scores == pytest.approx([1 / 2, 2 / 3, 2 / 3, 2 / 3])


def test_only_category_3_cuts_the_gold_at_a_semicolon():
    gold = "Yes; she likes them; often"
    scores = [official_score("yes", probe(gold, category)) for category in (2, 3, 4)]
    assert scores == pytest.approx([2 / 6, 1, 2 / 6])
    assert official_score("Yes; she", probe(gold, 3)) == pytest.approx(2 / 3)  # it alone is cut


@pytest.mark.parametrize(
    "prediction, expected",
    [
        ("No information available", 1),
        ("There is no INFORMATION available on that.", 1),
        ("It is not mentioned.", 1),
        (NOT_MENTIONED, 1),
        ("Nothing is known", 0),
        ("no information is available", 0),  # two fixed phrases
        ("plums", 0),
        ("", 0),
    ],
)
def test_category_5_wants_a_refusal_in_one_of_two_phrases(prediction, expected):
    asked = probe(NOT_MENTIONED, 5, abstains=True, distractor="plums")
    assert official_score(prediction, asked) == official_em(prediction, asked) == expected
    elsewhere = probe("You did not say.", 0, abstains=True)
    assert official_score(prediction, elsewhere) == expected


def test_a_refusal_is_an_ordinary_answer_elsewhere():
    assert official_score("not mentioned", probe("pears")) == 0


def test_of_several_accepted_answers_the_best_counts():
    assert official_score("pears", probe(("plums", "red pears", "pears"))) == 1


@pytest.mark.parametrize(
    "prediction, gold, category, expected",
    [
        ("red pears", "pears, red", 4, 1),  # a set of words
        ("red red pears", "The red pears", 4, 1),
        ("red pear", "red pears", 4, 0),  # not stemmed
        ("red", "red pears", 4, 0),
        ("x", "x, y", 1, 0),  # the whole gold, also in category 1
        ("yes", "Yes; she likes them", 3, 1),
        ("yes", "Yes; she likes them", 4, 0),
    ],
)
def test_exact_match(prediction, gold, category, expected):
    assert official_em(prediction, probe(gold, category)) == expected


def plain(prediction: str, gold: str, category: int) -> float:
    """Score as the rules say, one obvious step after the other."""

    def stems(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        words = [word for word in kept.split() if word not in ("a", "an", "the", "and")]
        return [PorterStemmer().stem(word) for word in words]

    def f1(prediction: str, gold: str) -> float:
        left, wanted, hits = stems(prediction), stems(gold), 0
        n = len(left)
        for stem in wanted:
            if stem in left:
                left.remove(stem)
                hits += 1
        return 2 / (n / hits + len(wanted) / hits) if hits else 0

    if category == 3:
        gold = gold.split(";")[0]
    if category != 1:
        return f1(prediction, gold)
    best = [max(f1(part, wanted) for part in prediction.split(",")) for wanted in gold.split(",")]
    return sum(best) / len(best)


def test_both_versions_agree():
    rng = random.Random(0)
    words = "a the and pears pear Running runs red, plums, 3,000 co-op; U.S. dies , ;".split()
    scores = []
    for _ in range(300):
        prediction, gold = (" ".join(rng.choices(words, k=rng.randrange(7))) for _ in range(2))
        for category in (1, 2, 3, 4):
            score = official_score(prediction, probe(gold, category))
            assert score == pytest.approx(plain(prediction, gold, category)), (prediction, gold)
            scores.append(score)
    assert sum(0 < score < 1 for score in scores) > 300


def test_no_data_of_nltk_is_needed(monkeypatch):
    def find(*_, **__):
        raise AssertionError("NLTK looks for data that would have to be downloaded")

    monkeypatch.setattr(nltk.data, "find", find)
    monkeypatch.setattr(nltk.data, "path", [])
    locomo_score._stemmer.cache_clear()
    locomo_score._stem.cache_clear()
    assert official_score("the runners ran home", probe("a runner ran")) > 0
