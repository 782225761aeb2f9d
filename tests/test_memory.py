import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory import BM25, RETRIEVERS, MemoryState, Recall, Tfidf, WordRecall, words

MEMORIES = ["Anna met Otto in Rome.", "Otto left for Lima.", "Anna met Ida in Rome.", "Nobody was there."]


# ---------------------------------------------------------------- retrievers


def test_word_recall_is_the_share_of_the_querys_words_that_a_memory_has():
    assert WordRecall().top_k("Where did Otto go?", MEMORIES, 4) == [(1, 1 / 4), (0, 1 / 4)]
    assert WordRecall().top_k("the OTTO, left", MEMORIES) == [(1, 1.0)]  # articles, case and punctuation aside
    assert WordRecall().top_k("Otto Otto left", MEMORIES) == [(1, 1.0)]  # each word once


@pytest.mark.parametrize("name", RETRIEVERS)
def test_ties_go_to_the_most_recent_and_nothing_in_common_is_not_found(name):
    retriever = RETRIEVERS[name]()
    assert [i for i, _ in retriever.top_k("Anna", ["Anna came.", "Otto left.", "Anna came."], 3)] == [2, 0]
    for query in ("Boris", "", "the a an", "?!"):
        assert retriever.top_k(query, MEMORIES) == [], query
        assert [i for i, _ in retriever.top_k(query, MEMORIES, 2, at_zero=True)] == [3, 2], query
    assert retriever.top_k("Anna", []) == [] and retriever.top_k("Anna", [], at_zero=True) == []
    assert retriever.top_k("Anna", ["", "..."]) == [] and len(retriever.top_k("Anna", ["", "..."], 5, at_zero=True)) == 2


def test_tfidf_is_the_cosine_that_the_textbook_says():
    items, query = [words(m) for m in MEMORIES], words("Anna in Lima, Anna")
    df = Counter(word for item in items for word in set(item))

    def vector(item):
        weights = {w: n * (math.log((1 + len(items)) / (1 + df[w])) + 1) for w, n in Counter(item).items() if w in df}
        length = math.sqrt(sum(x * x for x in weights.values()))
        return {w: x / length for w, x in weights.items()}

    asked = vector(query)
    for item, score in zip(items, Tfidf().scores(query, items), strict=True):
        assert score == pytest.approx(sum(x * vector(item).get(w, 0.0) for w, x in asked.items()), abs=1e-12)


def test_bm25_is_lucenes():
    items, query = [words(m) for m in MEMORIES], words("Anna in Lima")
    n, mean = len(items), sum(map(len, items)) / len(items)

    def score(item):
        total = 0.0
        for word in query:
            df, tf = sum(word in other for other in items), item.count(word)
            if tf:
                total += math.log(1 + (n - df + 0.5) / (df + 0.5)) * tf / (tf + 1.5 * (0.25 + 0.75 * len(item) / mean))
        return total

    assert BM25().scores(query, items) == pytest.approx([score(item) for item in items], abs=1e-6)


def test_d10_what_is_found_does_not_depend_on_hashes():
    script = (
        "from memory import *\n"
        "items = [f'{a} {b}' for a in ('Anna', 'Otto', 'Ida') for b in ('met', 'saw', 'left')]\n"
        "print([r().top_k(q, items, 4) for r in RETRIEVERS.values() for q in ('Anna met Ida', 'Otto saw it', 'left', 'nothing')])\n"
    )
    root = Path(__file__).parent.parent
    said = {
        subprocess.run([sys.executable, "-c", script], cwd=root, env=os.environ | {"PYTHONHASHSEED": str(seed)}, text=True,
                       capture_output=True, check=True, timeout=120).stdout
        for seed in (0, 1, 2)
    }  # fmt: skip
    assert len(said) == 1 and "(" in said.pop()


def test_the_words_of_an_item_are_taken_once():
    asked = []
    retriever = WordRecall(lambda text: asked.append(text) or words(text))
    for n in range(1, 5):
        retriever.top_k("Anna", MEMORIES[:n])
    assert Counter(asked) == {"Anna": 4} | dict.fromkeys(MEMORIES, 1)


# ---------------------------------------------------------------- the state


def state(**other) -> MemoryState:
    return MemoryState("none yet", WordRecall(), "none yet", **other)


def test_the_first_update_recalls_nothing_and_the_second_what_was_overwritten():
    s = state()
    s.update("Anna met Otto.", "Anna")
    assert (s.memory, s.recalled) == ("Anna met Otto.", Recall(query="Anna"))
    s.update("Ida left.", "Anna")
    assert s.recalled == Recall("Anna met Otto.", "Anna", (1,), 1.0, age=1)
    s.update("Nils left.", None)
    assert s.recalled == Recall()  # what was recalled is shown once
    s.update("Olga left.", "Otto met Ida")
    assert s.recalled == Recall("Anna met Otto.", "Otto met Ida", (1,), 2 / 3, age=3)
    assert s.history == [(1, "Anna met Otto."), (2, "Ida left."), (3, "Nils left."), (4, "Olga left.")]


def test_the_memory_of_the_next_prompt_is_a_candidate_only_if_it_is_asked_for():
    for include, found in ((False, ""), (True, "Anna met Otto.")):
        s = state()
        s.update("Anna met Otto.", "Anna", include_current=include)
        assert s.recalled.text == found
        s.update(None, "Anna", include_current=include)  # the memory is kept: it is still the one that is shown
        assert s.recalled.text == found and len(s.history) == 1
        s.update("Ida left.", None)
        s.update("Anna met Otto.", "Anna", include_current=include)  # written anew: the older, equal one is the same text
        assert s.recalled.text == found


def test_placeholders_are_never_stored():
    s = state()
    for memory in ("none yet", " none yet\n", "", "  "):
        s.update(memory, "none")
    s.update("Ida left.", "none yet", at_zero=True)
    assert s.recalled.steps == () and s.history == [(5, "Ida left.")]


def test_several_memories_stand_in_the_order_in_which_they_were_written():
    s = state()
    for memory in ("Anna met Otto.", "Otto left.", "Anna met Ida.", "Nobody."):
        s.update(memory, None)
    s.update("Rome.", "Anna and Ida", k=2)
    assert s.recalled == Recall("Anna met Otto.\n\nAnna met Ida.", "Anna and Ida", (3, 1), 2 / 3, age=2)


@given(st.lists(st.tuples(st.sampled_from([None, "a b", "b c", "c d", ""]), st.sampled_from([None, "a", "b", "d", "x"])), max_size=12),
       st.booleans())  # fmt: skip
def test_whatever_is_recalled_was_written_earlier_and_is_not_shown_anyway(updates, at_zero):
    s = MemoryState("", WordRecall(words), "")
    written = []
    for memory, query in updates:
        s.update(memory, query, at_zero=at_zero)
        written += [memory] if memory else []
        assert [text for _, text in s.history] == written
        if s.recalled.steps:
            (step,) = s.recalled.steps
            assert s.recalled.text == dict(s.history)[step] != s.memory and s.recalled.age == s.step - step > 0
            assert at_zero or query in s.recalled.text
        elif query:
            rest = [text for text in written if text != s.memory]
            assert not (rest if at_zero else [text for text in rest if query in words(text)])
