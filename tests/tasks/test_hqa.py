"""The RULER-HQA generator: what stands in a document, where, and how far apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import combinations, permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_readers import EXTRA, FIELDS, SHARED, gold_titles, questions, real

from config.errors import UserError
from data import Pool, Task
from tasks.hqa import Evidence, make_tasks
from tasks.readers import read, read_passages
from tasks.writers import write_built


@pytest.mark.parametrize("compat", [False, True])
def test_build_keeps_own_paragraphs_and_gold(tmp_path, compat):
    source = {task.id: task for task in questions(tmp_path)}
    tasks = make_tasks(list(source.values()), 100, extra=EXTRA, seed=3, compat_seed4=compat)
    assert sorted(task.id for task in tasks) == sorted(source)
    for task in tasks:
        own = source[task.id]
        assert len(task.order) == len(set(task.order)) == 100 and task.pool is tasks[0].pool
        passages = [task.pool.titles[k] for k in task.order]
        assert {own.pool.titles[k] for k in own.order} <= set(passages)
        assert gold_titles(task) == gold_titles(own) == [f"T{task.id[1:]}-7", f"T{task.id[1:]}-2"]
        number = task.gold[0] + 1
        assert (
            f"Document {number}:\n{passages[number - 1]}\nText 7 of {task.id[1:]}." in task.document
        )
        assert [getattr(task, f) for f in FIELDS if f != "document"] == [
            getattr(own, f) for f in FIELDS if f != "document"
        ]
    # Only what is used
    assert len(tasks[0].pool.titles) == len({k for task in tasks for k in task.order})


def places(task: Task) -> list[int]:
    """Document numbers of a question's own paragraphs."""
    return [
        i for i, k in enumerate(task.order, 1) if task.pool.titles[k].startswith(f"T{task.id[1:]}-")
    ]


FIXED = {
    50: [11, 18, 27, 29, 37, 41, 42, 43, 44, 48],
    200: [7, 10, 17, 81, 88, 96, 109, 154, 177, 191],
    6400: [576, 2318, 2584, 3178, 3240, 3628, 4209, 4786, 5338, 5764],
}


@pytest.mark.parametrize("n", FIXED)
def test_fixed_places_under_compat_seed4_only(tmp_path, n):
    extra = Pool([f"E{k}" for k in range(n)], [f"Extra text {k}." for k in range(n)])
    source = questions(tmp_path, 4)
    assert [places(task) for task in make_tasks(source, n, extra=extra, compat_seed4=True)] == [
        FIXED[n]
    ] * 4
    ours = [tuple(places(task)) for task in make_tasks(source, n, extra=extra)]
    assert len({*ours, tuple(FIXED[n])}) == 5


def test_build_is_decided_by_its_seed(tmp_path):
    source = questions(tmp_path, 8)
    sets = [make_tasks(source, 60, extra=EXTRA, seed=seed) for seed in (1, 1, 2)]
    assert (
        [asdict(t) for t in sets[0]] == [asdict(t) for t in sets[1]] != [asdict(t) for t in sets[2]]
    )
    for name, tasks in zip("ab", sets[:2], strict=True):
        write_built(tmp_path / f"{name}.jsonl.gz", tasks, seed=1)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    # An item does not depend on its place among the others
    alone = make_tasks(source[::-1], 60, extra=EXTRA, seed=1)
    by_id = {t.id: t for t in sets[0]}
    assert all(t.document == by_id[t.id].document for t in alone)


def test_the_same_questions_at_every_length(tmp_path):
    source = questions(tmp_path, 8)
    ids = [
        [t.id for t in make_tasks(source, n, n_items=5, extra=EXTRA, seed=1)] for n in (20, 50, 200)
    ]
    assert ids[0] == ids[1] == ids[2] and len(set(ids[0])) == 5
    assert [t.id for t in make_tasks(source, 20, n_items=3, extra=EXTRA, seed=1)] == ids[0][:3]


def test_no_second_version_of_an_own_title(tmp_path):
    source = questions(tmp_path, 1)
    versions = Pool(
        ["T0-7", "t0-2", *EXTRA.titles[:5]], ["Other version.", "Other version.", *EXTRA.texts[:5]]
    )
    (task,) = make_tasks(source, 15, extra=versions)
    assert "Other version." not in task.document
    with pytest.raises(
        UserError, match="q0 needs 6 other passages for 16 documents and there are 5"
    ):
        make_tasks(source, 16, extra=versions)


def test_build_refuses(tmp_path):
    source = questions(tmp_path, 3)
    with pytest.raises(UserError, match="9 documents are too few"):
        make_tasks(source, 9)
    with pytest.raises(UserError, match="4 questions are wanted and there are 3"):
        make_tasks(source, 20, n_items=4)
    with pytest.raises(UserError, match="0 questions"):
        make_tasks(source, 20, n_items=0)
    with pytest.raises(UserError, match="no paragraphs"):
        make_tasks([Task("x", "Q?", ("A",), text="C")], 20)


@settings(max_examples=40)
@given(n=st.integers(10, 120), n_items=st.integers(1, 5), seed=st.integers(), compat=st.booleans())
def test_build_and_set_agree_for_any_numbers(tmp_path, n, n_items, seed, compat):
    tasks = make_tasks(questions(tmp_path, 5), n, n_items, EXTRA, seed, compat)
    for task in tasks:
        assert len(set(task.order)) == n and gold_titles(task) == [
            f"T{task.id[1:]}-7",
            f"T{task.id[1:]}-2",
        ]
    write_built(tmp_path / "set.jsonl", tasks, seed=seed, n_documents=n)
    assert read(tmp_path / "set.jsonl") == tasks


def test_a_longer_document_has_all_of_a_shorter_one(tmp_path):
    source = questions(tmp_path, 4)
    sets = [make_tasks(source, n, extra=EXTRA, seed=2) for n in (20, 50, 200)]
    for short, middle, long in zip(*sets, strict=True):
        passages = [
            {(t.pool.titles[k], t.pool.texts[k]) for k in t.order} for t in (short, middle, long)
        ]
        assert passages[0] < passages[1] < passages[2]
    others = [
        frozenset(t.pool.titles[k] for k in t.order if t.pool.titles[k][0] == "E") for t in sets[0]
    ]
    assert len({*others}) == 4  # each question has others of its own


# ---- where the evidence may stand ----

RULES = {
    # ReMemR1's paper: reverse order, successive hops more than N/2 apart
    "paper": Evidence("reverse", 0.5),
    "code": Evidence("reverse", 30),  # ReMemR1's code: reverse order, at least D documents apart
    "forward": Evidence("forward"),
    "apart": Evidence("any", 0.25),
}


def plainly(rule: str, places: tuple[int, ...], n: int) -> bool:
    """The definitions, word by word, for two pieces of evidence in hop order."""
    first, second = places
    return {
        "paper": second < first and first - second > n / 2,
        "code": second < first and first - second >= 30,
        "forward": first < second,
        "apart": abs(first - second) > n / 4,
    }[rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [60, 61, 100])
def test_evidence_stands_as_asked(tmp_path, rule, n):
    source = questions(tmp_path, 8)
    free, placed = (
        make_tasks(source, n, extra=EXTRA, seed=1),
        make_tasks(source, n, extra=EXTRA, seed=1, evidence=RULES[rule]),
    )
    for before, task in zip(free, placed, strict=True):
        assert plainly(rule, task.gold, n) and gold_titles(task) == gold_titles(before)
        # The same passages
        assert sorted(task.document) == sorted(before.document) or {*task.order} == {*before.order}
        assert sorted(task.pool.titles[k] for k in task.order) == sorted(
            before.pool.titles[k] for k in before.order
        )
        # What stood right already was not moved
        assert not plainly(rule, before.gold, n) or task.order == before.order
    assert len({task.gold for task in placed}) > 4


@pytest.mark.parametrize("rule", RULES)
def test_the_fast_check_of_evidence_places_equals_the_definition(rule):
    for n in (40, 41):
        for places in permutations(range(n), 2):
            assert RULES[rule].holds(places, n) == plainly(rule, places, n)


@pytest.mark.parametrize(("order", "gap"), product(("any", "forward", "reverse"), (0.0, 3.0, 0.3)))
def test_every_possible_choice_is_drawn_alike(order, gap):
    evidence, n = Evidence(order, gap), 7
    possible = {p for p in permutations(range(n), 2) if evidence.holds(p, n)}
    rng, times = Random(0), 300 * len(possible)
    drawn = Counter(tuple(evidence.draw(rng, 2, n)) for _ in range(times))
    assert {*drawn} == possible and all(abs(k - 300) < 5 * 300**0.5 for k in drawn.values())


def test_three_pieces_fit_only_where_there_is_room():
    assert Evidence("reverse", 0.5).draw(Random(0), 3, 100) is None
    places = Evidence("reverse", 0.4).draw(Random(0), 3, 100)
    assert (
        places == sorted(places, reverse=True)
        and min(a - b for a, b in combinations(places, 2) if a > b) > 40
    )


def test_questions_whose_evidence_cannot_stand_so_are_passed_over(tmp_path):
    source = questions(tmp_path, 6)
    source[2] = replace(source[2], gold=(7,))  # one piece of evidence has no distance
    source[3] = replace(source[3], gold=(7, 2, 5))
    source[4] = replace(source[4], gold=(7, 2, 7))  # one paragraph serves two hops
    built = make_tasks(source, 60, 4, EXTRA, evidence=RULES["paper"])
    assert {t.id for t in built} == {"q0", "q1", "q4", "q5"}
    (twice,) = [t for t in built if t.id == "q4"]
    assert twice.gold[0] == twice.gold[2] and plainly("paper", twice.gold[:2], 60)
    with pytest.raises(UserError, match="in 4 of 6 questions only, and 5 are wanted"):
        make_tasks(source, 60, 5, EXTRA, evidence=RULES["paper"])
    with pytest.raises(UserError, match="in 0 of 6"):
        make_tasks(source, 20, 1, EXTRA, evidence=Evidence("reverse", 20))


def test_questions_of_many_hops_are_the_same_at_every_length(tmp_path):
    source = [
        replace(task, gold=tuple(range(2 + k % 3))) for k, task in enumerate(questions(tmp_path, 9))
    ]
    far, lengths = Evidence("reverse", 30), (60, 90, 150)
    apart = [[t.id for t in make_tasks(source, n, 3, EXTRA, evidence=far)] for n in lengths]
    assert len({*map(tuple, apart)}) > 1  # at 60 documents three hops cannot stand so far apart
    sets = [
        [t.id for t in make_tasks(source, n, 3, EXTRA, evidence=far, lengths=lengths)]
        for n in lengths
    ]
    assert len({*map(tuple, sets)}) == 1


def test_a_share_of_the_documents_is_exceeded():
    assert [
        Evidence("any", x).gap(n) for x, n in ((0.29, 100), (0.5, 50), (0.5, 51), (0.07, 100))
    ] == [30, 26, 26, 8]


def test_under_compat_seed4_evidence_is_chosen_and_not_moved(tmp_path):
    source = [
        replace(task, gold=(k % 10, (3 * k + 1) % 10))
        for k, task in enumerate(questions(tmp_path, 8))
    ]
    source = [task for task in source if task.gold[0] != task.gold[1]]
    free = make_tasks(source, 60, extra=EXTRA, compat_seed4=True)
    right = [t for t in free if plainly("code", t.gold, 60)]
    assert 0 < len(right) < len(free)
    chosen = make_tasks(source, 60, len(right), EXTRA, compat_seed4=True, evidence=RULES["code"])
    assert [(t.id, t.gold, t.document) for t in chosen] == [
        (t.id, t.gold, t.document) for t in right
    ]


def test_nonsense_about_evidence_is_refused():
    for wrong in (
        dict(order="backwards"),
        dict(min_distance=-1.0),
        dict(min_distance=float("nan")),
    ):
        with pytest.raises(UserError, match="of evidence must be"):
            Evidence(**wrong)


# ---- the real data beside the checkout ----


@real
@pytest.mark.parametrize("n", [50, 800, 6400])
def test_sets_of_real_questions_come_back(tmp_path, n):
    source = [task for task in read(SHARED / "hotpotqa_dev.jsonl.gz") if task.split == "validation"]
    extra = read_passages(SHARED / "passages_extra.jsonl.gz")
    tasks = make_tasks(source, n, 16, extra, seed=1)
    path = tmp_path / "set.jsonl.gz"
    write_built(path, tasks)
    assert read(path) == tasks and path.stat().st_size < 7e6
    by_id = {task.id: task for task in source}
    assert all(gold_titles(task) == gold_titles(by_id[task.id]) for task in tasks)
    assert len({tuple(task.gold) for task in tasks}) > 8
    assert f"\n\nDocument {n}:\n" in tasks[0].document


@real
def test_real_passages_run_out():
    source = read(SHARED / "hotpotqa_tiny.jsonl.gz")
    with pytest.raises(
        UserError, match=r"6390 other passages for 6400 documents and there are 2\d\d; give more"
    ):
        make_tasks(source, 6400)
