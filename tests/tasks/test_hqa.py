"""The RULER-HQA generator: what stands in a document, where, and how far apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import permutations, product
from random import Random

import pytest
from test_readers import EXTRA, FIELDS, gold_titles, questions

from config.errors import UserError
from data import Pool, Task
from suites.ruler_hqa import EvidenceRule
from suites.ruler_hqa import make_tasks as make
from tasks.readers import read
from tasks.writers import write_built


def make_tasks(source, n, n_items=None, extra=None, seed=0, compat_seed4=False, **how):
    """Make tasks of all questions, or of so many."""
    n_items = len(source) if n_items is None else n_items
    return make(source, n, n_items, extra, seed, compat_seed4, **how)


@pytest.mark.parametrize("compat", [False, True])
def test_build_keeps_own_paragraphs_and_gold(tmp_path, compat):
    source = {task.id: task for task in questions(tmp_path)}
    tasks = make_tasks(list(source.values()), 100, extra=EXTRA, seed=3, compat_seed4=compat)
    assert sorted(task.id for task in tasks) == sorted(source)
    for task in tasks:
        own, i = source[task.id], task.id[1:]
        assert len({*task.order}) == 100 and task.pool is tasks[0].pool
        titles = [task.pool.titles[k] for k in task.order]
        assert {own.pool.titles[k] for k in own.order} <= {*titles}
        assert gold_titles(task) == gold_titles(own) == [f"T{i}-7", f"T{i}-2"]
        number = task.gold[0] + 1
        assert f"Document {number}:\n{titles[number - 1]}\nText 7 of {i}." in task.document
        same = [name for name in FIELDS if name != "document"]
        assert [getattr(task, f) for f in same] == [getattr(own, f) for f in same]
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


def test_build_is_decided_by_its_seed_and_comes_back(tmp_path):
    source = questions(tmp_path, 8)
    one, again, other = (make_tasks(source, 60, None, EXTRA, seed) for seed in (1, 1, 2))
    assert [*map(asdict, one)] == [*map(asdict, again)] != [*map(asdict, other)]
    # An item does not depend on its place among the others
    alone = make_tasks(source[::-1], 60, None, EXTRA, 1)
    assert {t.id: t.document for t in alone} == {t.id: t.document for t in one}
    write_built(tmp_path / "set.jsonl", one, seed=1, n_documents=60)
    assert read(tmp_path / "set.jsonl") == one


def test_the_same_questions_at_every_length(tmp_path):
    """And a longer document has all of a shorter one."""
    source = questions(tmp_path, 8)
    sets = [make_tasks(source, n, n_items=5, extra=EXTRA, seed=1) for n in (20, 50, 200)]
    names = [t.id for t in sets[0]]
    assert len({*names}) == 5
    assert [t.id for t in make_tasks(source, 20, n_items=3, extra=EXTRA, seed=1)] == names[:3]
    others = set()
    for group in zip(*sets, strict=True):
        short, middle, long = (
            {(t.pool.titles[k], t.pool.texts[k]) for k in t.order} for t in group
        )
        assert short < middle < long and len({t.id for t in group}) == 1
        others.add(frozenset(title for title, _ in short if title[0] == "E"))
    assert len(others) == 5  # each question has others of its own


def test_no_second_version_of_an_own_title(tmp_path):
    source, other = questions(tmp_path, 1), "Other version."
    versions = Pool(["T0-7", "t0-2", *EXTRA.titles[:5]], [other, other, *EXTRA.texts[:5]])
    for seed in range(5):
        (task,) = make_tasks(source, 15, extra=versions, seed=seed)
        assert other not in task.document
    with pytest.raises(UserError, match="5"):
        make_tasks(source, 16, extra=versions)


def test_build_refuses(tmp_path):
    for tasks, n in ((questions(tmp_path, 3), 9), ([Task("x", "Q?", ("A",), text="C")], 20)):
        with pytest.raises(UserError):  # fewer documents than are its own; no paragraphs
            make_tasks(tasks, n)


RULES = {
    # ReMemR1's paper: reverse order, successive hops more than N/2 apart
    "paper": EvidenceRule("reverse", 0.5),
    "code": EvidenceRule(
        "reverse", 30
    ),  # ReMemR1's code: reverse order, at least D documents apart
    "forward": EvidenceRule("forward"),
    "apart": EvidenceRule("any", 0.25),
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
    free = make_tasks(source, n, extra=EXTRA, seed=1)
    placed = make_tasks(source, n, extra=EXTRA, seed=1, evidence=RULES[rule])
    for before, task in zip(free, placed, strict=True):
        assert plainly(rule, task.gold, n) and gold_titles(task) == gold_titles(before)
        shown = [sorted(t.pool.titles[k] for k in t.order) for t in (before, task)]
        assert shown[0] == shown[1]  # the same passages
        # What stood right already was not moved
        assert not plainly(rule, before.gold, n) or task.order == before.order
    assert len({task.gold for task in placed}) > 4


@pytest.mark.parametrize("rule", RULES)
def test_the_fast_check_of_evidence_places_equals_the_definition(rule):
    for n in (40, 41):
        for places in permutations(range(n), 2):
            assert RULES[rule].holds(places, n) == plainly(rule, places, n)


@pytest.mark.parametrize(
    ("order", "gap"), [*product(("any", "forward", "reverse"), (0.0, 3.0, 0.3))]
)
def test_every_possible_choice_is_drawn_alike(order, gap):
    evidence, n = EvidenceRule(order, gap), 7
    possible = {p for p in permutations(range(n), 2) if evidence.holds(p, n)}
    rng, times = Random(0), 300 * len(possible)
    drawn = Counter(tuple(evidence.draw(rng, 2, n)) for _ in range(times))
    assert {*drawn} == possible and all(abs(k - 300) < 5 * 300**0.5 for k in drawn.values())


def test_three_pieces_fit_only_where_there_is_room():
    assert not EvidenceRule("reverse", 0.5).fits(3, 100)
    a, b, c = EvidenceRule("reverse", 0.4).draw(Random(0), 3, 100)
    assert a - b > 40 and b - c > 40
    shares = (0.29, 100), (0.5, 50), (0.5, 51), (0.07, 100)  # which are exceeded
    assert [EvidenceRule("any", x).gap(n) for x, n in shares] == [30, 26, 26, 8]


def test_questions_whose_evidence_cannot_stand_so_are_passed_over(tmp_path):
    source = questions(tmp_path, 6)
    source[2] = replace(source[2], gold=(7,))  # one piece of evidence has no distance
    source[3] = replace(source[3], gold=(7, 2, 5))
    source[4] = replace(source[4], gold=(7, 2, 7))  # one paragraph serves two hops
    built = make_tasks(source, 60, 4, EXTRA, evidence=RULES["paper"])
    assert {t.id for t in built} == {"q0", "q1", "q4", "q5"}
    (twice,) = [t for t in built if t.id == "q4"]
    assert twice.gold[0] == twice.gold[2] and plainly("paper", twice.gold[:2], 60)
    for n, n_items, evidence in ((60, 5, RULES["paper"]), (20, 1, EvidenceRule("reverse", 20))):
        with pytest.raises(UserError):
            make_tasks(source, n, n_items, EXTRA, evidence=evidence)


def test_questions_of_many_hops_are_the_same_at_every_length(tmp_path):
    hops = [tuple(range(2 + k % 3)) for k in range(9)]
    source = [replace(t, gold=g) for t, g in zip(questions(tmp_path, 9), hops, strict=True)]
    far, lengths = EvidenceRule("reverse", 30), (60, 90, 150)
    for together, different in (((), True), (lengths, False)):
        sets = [make_tasks(source, n, 3, EXTRA, evidence=far, lengths=together) for n in lengths]
        # at 60 documents three hops cannot stand so far apart
        assert (len({tuple(t.id for t in tasks) for tasks in sets}) > 1) == different


def test_under_compat_seed4_evidence_is_chosen_and_not_moved(tmp_path):
    gold = [(k % 10, (3 * k + 1) % 10) for k in range(8)]
    source = [
        replace(task, gold=g)
        for task, g in zip(questions(tmp_path, 8), gold, strict=True)
        if g[0] != g[1]
    ]
    free = make_tasks(source, 60, extra=EXTRA, compat_seed4=True)
    right = [t for t in free if plainly("code", t.gold, 60)]
    assert 0 < len(right) < len(free)
    chosen = make_tasks(source, 60, len(right), EXTRA, compat_seed4=True, evidence=RULES["code"])
    assert [(t.id, t.gold, t.document) for t in chosen] == [
        (t.id, t.gold, t.document) for t in right
    ]
    with pytest.raises(UserError):
        make_tasks(source, 60, len(right) + 1, EXTRA, compat_seed4=True, evidence=RULES["code"])
