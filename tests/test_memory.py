import contextlib
import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.retrieval import BM25, RETRIEVERS, Lucene, WordRecall, words
from memory import MemoryState, Recall

MEMORIES = [
    "Anna met Otto in Rome.",
    "Otto left for Lima.",
    "Anna met Ida in Rome.",
    "Nobody was there.",
]


# ---------------------------------------------------------------- retrievers


@pytest.mark.parametrize(
    ("query", "without", "found"),
    [
        ("Where did Otto go?", {}, [(1, 1 / 4), (0, 1 / 4)]),
        ("the OTTO, left", {0}, [(1, 1.0)]),  # articles, case and punctuation aside
        ("Otto Otto left", {0}, [(1, 1.0)]),  # each word once
        ("Otto", {1}, [(0, 1.0)]),
        ("Otto", {0, 1}, []),
    ],
)
def test_word_recall_is_the_share_of_the_querys_words_that_a_memory_has(query, without, found):
    assert WordRecall(MEMORIES).top_k(query, 4, without) == found


@pytest.mark.parametrize("name", RETRIEVERS)
def test_tags_and_boxes_join_no_words(name):
    items = ["<update>Lima</update>", r"<update>so \boxed{Oslo}</update>"]
    retriever = RETRIEVERS[name]([*items, "<update>Limassol</update>", "Otto:Rome;Ida:Nice"])
    wanted = {"Lima?": [0], "oslo": [1], "Rome": [3], "Nice": [3], "update": [], "boxed": []}
    for query, found in wanted.items():
        assert [i for i, _ in retriever.top_k(query, 4)] == found
    text = "The U.S.A., O'Brien and AT&T: 1,200 at 3:45."
    assert words(text) == ["usa", "obrien", "and", "att", "1200", "at", "345"]


@pytest.mark.parametrize("name", RETRIEVERS)
def test_ties_go_to_the_most_recent_and_nothing_in_common_is_not_found(name):
    retriever = RETRIEVERS[name]
    found = retriever(["Anna came.", "Otto left.", "Anna came."]).top_k("Anna", 3)
    assert [i for i, _ in found] == [2, 0]
    full = retriever(MEMORIES)
    for query in ("Boris", "", "the a an", "?!"):
        assert full.top_k(query) == [], query
    assert retriever().top_k("Anna") == retriever(["", "..."]).top_k("Anna") == []


@given(
    st.lists(st.lists(st.sampled_from("bcdefg"), max_size=4), max_size=9),
    st.lists(st.sampled_from("cdefgh"), min_size=1, max_size=4),
    st.sets(st.integers(0, 8)),
)
def test_the_index_of_words_finds_what_looking_at_every_item_finds(items, query, without):
    found = WordRecall(map(" ".join, items)).top_k(" ".join(query), 99, without)
    shares = [(i, len({*query} & {*item}) / len({*query})) for i, item in enumerate(items)]
    shares = [(i, share) for i, share in shares if share and i not in without]
    assert found == sorted(shares, key=lambda hit: (-hit[1], -hit[0]))


def test_bm25_is_lucenes_of_the_candidates_alone():
    items, query = [words(m) for m in MEMORIES], words("Anna in Lima")
    n, mean = len(items), sum(map(len, items)) / len(items)

    def score(item, word):
        df, tf = sum(word in other for other in items), item.count(word)
        idf = math.log(1 + (n - df + 0.5) / (df + 0.5))
        return idf * tf / (tf + 1.5 * (0.25 + 0.75 * len(item) / mean))

    found = dict(BM25(MEMORIES).top_k("Anna in Lima", 4))
    expected = [sum(score(item, word) for word in query) for item in items]
    assert [found.get(i, 0.0) for i in range(4)] == pytest.approx(expected, abs=1e-6)
    of_three = BM25(MEMORIES[1:]).top_k("Anna met Otto", 9)
    assert [(i + 1, x) for i, x in of_three] == BM25(MEMORIES).top_k("Anna met Otto", 9, {0})


def test_without_a_word_to_match_the_first_items_are_best():
    items = [["anna"], ["otto"], ["anna", "ida"], ["rosa"], []]
    assert Lucene(items).best(["ida"], 1) == [2]
    for query in ([], ["boris"]):
        assert Lucene(items).best(query, 3) == [0, 1, 2]


def test_what_is_found_does_not_depend_on_hashes():
    """In two processes, this one's hashes and others."""
    script = (
        "from agents.retrieval import *\n"
        "items = [f'{a} {b}' for a in ('Anna', 'Otto', 'Ida') for b in ('met', 'saw', 'left')]\n"
        "queries = ('Anna met Ida', 'Otto saw it', 'left', 'nothing')\n"
        "print([r(items).top_k(q, 4) for r in RETRIEVERS.values() for q in queries])\n"
    )
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(script, {})
    env = os.environ | {"PYTHONHASHSEED": str(hash("Anna") % 9 + 1)}
    how = dict(cwd=Path(__file__).parents[1], env=env, text=True, check=True)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, **how)
    assert done.stdout == here.getvalue() and "(" in done.stdout


# ---------------------------------------------------------------- the state


def state() -> MemoryState:
    return MemoryState("none yet", WordRecall(), "none yet")


def test_an_update_stores_the_memory_and_recalls_what_was_overwritten():
    s = state()
    s.update("Anna met Otto.", "Anna")  # the first recalls nothing
    assert (s.memory, s.recalled) == ("Anna met Otto.", Recall(query="Anna"))
    s.update("Ida left.", "Anna")
    assert s.recalled == Recall("Anna met Otto.", "Anna", (1,), 1.0, age=1)
    s.update("Nils left.", None)
    assert s.recalled == Recall()  # what was recalled is shown once
    s.update("Olga left.", "Otto met Ida")
    assert s.recalled == Recall("Anna met Otto.", "Otto met Ida", (1,), 2 / 3, age=3)
    written = ["Anna met Otto.", "Ida left.", "Nils left.", "Olga left."]
    assert s.history == [*enumerate(written, 1)]


def test_placeholders_are_never_stored():
    s = state()
    for memory in ("none yet", " none yet\n", "", "  "):
        s.update(memory, "none")
    s.update("Ida left.", "none yet")
    assert s.recalled.steps == () and s.history == [(5, "Ida left.")]


def test_several_memories_stand_in_the_order_in_which_they_were_written():
    s = state()
    for memory in ("Anna met Otto.", "Otto left.", "Anna met Ida.", "Nobody."):
        s.update(memory, None)
    s.update("Rome.", "Anna and Ida", k=2)
    both = "Anna met Otto.\n\nAnna met Ida."
    assert s.recalled == Recall(both, "Anna and Ida", (3, 1), 2 / 3, age=2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "e b", "b c", "c d", ""]),
            st.sampled_from([None, "e", "b", "d", "x"]),
        ),
        max_size=12,
    )
)
def test_whatever_is_recalled_was_written_earlier_and_is_not_shown_anyway(updates):
    s = MemoryState("", WordRecall(), "")
    last = {}  # memory -> when it was written last
    for number, (memory, query) in enumerate(updates, 1):
        s.update(memory, query)
        last |= {memory: number} if memory else {}
        assert dict((text, step) for step, text in s.history) == last
        rest = {text: step for text, step in last.items() if text != s.memory}
        if s.recalled.steps:
            (step,) = s.recalled.steps
            assert rest[s.recalled.text] == step and s.recalled.age == number - step > 0
            assert step == max(when for text, when in rest.items() if query in text.split())
        elif query:
            assert not any(query in text.split() for text in rest)
