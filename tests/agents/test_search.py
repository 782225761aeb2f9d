"""Search in memories: BM25 and cosines by hand, ties, filters, caches, and LoCoMo's facts."""

import gzip
import json
import math
import re
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.retrieval import tokens
from agents.search import Search, recall
from agents.store import Entry, Store

LOCOMO = Path(__file__).parents[3] / "shared" / "data" / "locomo10.json.gz"
BOTH = ("bm25", "dense")
WORDS = "ida otto ann lima rome oslo dog cat went came to the in 2023".split()
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join)


class Letters:
    """An embedder that counts letters; `asked` is what it was given."""

    name, dim = "letters", 26

    def __init__(self):
        self.asked = []

    def embed(self, texts, query=False):
        self.asked += [(text, query) for text in texts]
        rows = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        rows = np.array(rows, np.float32) + 1e-3
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def entries(*texts):
    return Store([Entry("", text) for text in texts]).snapshot().entries


def found(hits):
    return [entry.id for entry, _ in hits]


def plain_bm25(texts, query, k1=1.5, b=0.75):
    """The textbook's formula with Lucene's logarithm."""
    docs, scores = [text.split() for text in texts], []
    mean = sum(map(len, docs)) / len(docs)
    for doc in docs:
        score = 0.0
        for word in query.split():
            n = sum(word in other for other in docs)
            tf = Counter(doc)[word]
            idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
            score += idf * tf / (tf + k1 * (1 - b + b * len(doc) / mean))
        scores.append(score)
    return scores


@given(st.lists(TEXT, min_size=1, max_size=8), TEXT, st.sets(st.integers(1, 8)), st.booleans())
def test_the_best_by_the_formula_of_those_that_may_be_found(texts, query, without, dense):
    """A filter changes no weights; of equals the lower id comes first, whatever their order."""
    memories, scores = entries(*texts), plain_bm25(texts, query)
    if dense:
        scores = (Letters().embed(texts) @ Letters().embed([query], True)[0]).tolist()
    expected = {
        f"m{k}": score
        for k, score in enumerate(scores, 1)
        if k not in without and (dense or score > 0)
    }
    search = Search(BOTH[dense], Letters())
    for given_order in (memories, memories[::-1]):
        hits = search.top(given_order, query, 20, lambda entry: int(entry.id[1:]) not in without)
        assert {entry.id: score for entry, score in hits} == pytest.approx(expected, abs=1e-5)
        order = [(-score, int(entry.id[1:])) for entry, score in hits]
        assert order == sorted(order)
        assert search.top(given_order, query, 2, lambda e: e.id in expected) == hits[:2]


def test_what_shares_no_word_is_not_found():
    memories = entries("Ida is in Lima.", "Otto has a dog.", "世界", "!?")
    assert tokens("On 8 May, Zoë's DOG-house") == ["on", "8", "may", "zoë", "s", "dog", "house"]
    assert found(Search().top(memories, "Where is Ida?", 10)) == ["m1"]
    assert found(Search().top(memories, "这个世界", 10)) == ["m3"]
    for query in ("nothing", "", "?!", "天地", "\ud800"):
        assert Search().top(memories, query, 10) == []
    assert Search().top(memories[2:], "Ida", 10) == []
    assert all(Search(how, Letters()).top((), "Ida", 10) == [] for how in BOTH)
    first, second = entries("She left.", "She left.")  # date and speaker are searched too
    memories = (replace(first, date="2023-05-08"), replace(second, speaker="Ida"))
    assert found(Search().top(memories, "in May", 5)) == ["m1"]
    assert found(Search().top(memories, "ida", 5)) == ["m2"]


def test_an_embedding_is_made_once_and_only_so_many_are_kept(monkeypatch):
    embedder, memories = Letters(), entries("only here ida", "only here otto", "only here ann")
    search = Search("dense", embedder)
    for query in ("ida 1", "ida 2", "z\ud800"):
        search.top(memories, query, 2)
    assert len(embedder.asked) == 3 + 3 and embedder.asked[-1] == ("z?", True)
    changed = (*memories[:2], replace(memories[2], text="ann lima"))  # the id is the same
    search.top(changed, "ida 1", 2)
    search.top(memories, "only here ida", 2)  # as a query the text is another one
    assert embedder.asked[6:] == [("ann lima", False), ("only here ida", True)]
    monkeypatch.setattr("agents.search.EMBEDDINGS", 10)
    for k in range(3):
        assert len(search.top(entries(*(f"{k} {n}" for n in range(12))), "ida", 20)) == 12
        assert len(search._known) <= 10


@pytest.mark.parametrize("found, evidence, expected", [
    (["D1:1", "D2:2"], ["D1:1", "D2:2"], 1),
    (["D1:1", "D9:9"], ["D1:1", "D2:2"], 1 / 2),
    (["D1:1"], ["D1:1", "D1:1", "D2:2"], 2 / 3),  # as often as it is named
    (["D1:11"], ["D1:1"], 0),
    ([], ["D1:1"], 0),
    ([], [], 1),
    (["D1:1"], [], 1),
    (["S1"], ["D1:1", "D1:2", "D2:1"], 2 / 3),  # sessions
    (["S1"], ["D11:1"], 0),
    (["S2"], ["D1:2"], 0),
    (["D3:4"], ["S3", "S4"], 1 / 2),  # evidence of which only the session is known
    (["S3"], ["S3"], 1),
    (["S3", "x"], ["answer_7"], 0),  # an id that is neither
    (["Sx"], ["Sy"], 0),
])  # fmt: skip
def test_recall_is_the_share_of_the_evidence(found, evidence, expected):
    one = Entry("m1", "x", evidence=(*found,))
    each = [Entry("m1", "x", evidence=(name,)) for name in found]  # of one entry or of several
    assert recall([one], evidence) == recall(each, evidence) == pytest.approx(expected)


# ---------------------------------------------------------------- LoCoMo


def ids(text):
    return [f"D{int(a)}:{int(b)}" for a, b in re.findall(r"D(\d+):(\d+)", text)]


def recalls(search, form, at=(5, 10, 30)):
    """The mean recall at each cut by category, 0 of all: of the observations of each conversation
    for its questions of categories 1 to 4.

    form: what stands before a fact: nothing ("bare"), or day and speaker as an entry shows them.
    """
    rows: dict[int, list] = {}
    for sample in json.loads(gzip.decompress(LOCOMO.read_bytes())):
        memories = []
        for name in sorted(sample["observation"], key=lambda name: int(name.split("_")[1])):
            said = sample["conversation"][name.replace("observation", "date_time")]
            day = datetime.strptime(said, "%I:%M %p on %d %B, %Y").date().isoformat()
            for speaker, facts in sample["observation"][name].items():
                dated = {"date": day, "speaker": speaker} if form == "dated" else {}
                memories += [
                    Entry("", fact, evidence=tuple(ids(str(where))), **dated)
                    for fact, where in facts
                ]
        memories = Store(memories).snapshot().entries
        for one in [one for one in sample["qa"] if one["category"] < 5]:
            best = [entry for entry, _ in search.top(memories, one["question"], max(at))]
            row = [recall(best[:k], ids(" ".join(one["evidence"]))) for k in at]
            for category in (one["category"], 0):
                rows.setdefault(category, []).append(row)
    return {category: np.mean(found, axis=0).tolist() for category, found in rows.items()}


@pytest.mark.skipif(not LOCOMO.is_file(), reason=f"LoCoMo is not at {LOCOMO}")
def test_recall_on_locomo_is_the_published_one():
    """A question without evidence counts 1."""
    found = recalls(Search(), "bare")
    for category, published in {
        0: (0.462, 0.523, 0.599), 1: (0.183, 0.240, 0.373), 2: (0.594, 0.637, 0.704),
        3: (0.216, 0.263, 0.329), 4: (0.534, 0.604, 0.666),
    }.items():  # fmt: skip
        assert found[category] == pytest.approx(published, abs=0.001), category
    # with our date in words; an ISO day gives .470 and .530
    assert recalls(Search(), "dated", (5, 10))[0] == pytest.approx((0.4788, 0.5398), abs=0.001)
