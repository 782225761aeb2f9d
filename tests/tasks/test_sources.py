"""Where training tasks come from: passes, mixtures, and tasks of one document side by side."""

from collections import Counter
from itertools import groupby

import pytest

from config.errors import UserError
from data import Pool, Task
from suites._training import FileTasks, MixedTasks, by_document, check_sources, parts_of

POOL = Pool([f"T{k}" for k in range(12)], [f"Text {k}." for k in range(12)])


def tasks_of(sizes, pool=POOL):
    """Make so many tasks of each document."""
    return [
        Task(f"{k}.{n}", "Which?", ("a",), pool=pool, order=(k, 0), gold=(0,))
        for k, size in enumerate(sizes)
        for n in range(size)
    ]


def documents(tasks):
    return [task.order for task in tasks]


def test_parts_are_of_one_pool_and_order():
    tasks = [*tasks_of((2, 1)), *tasks_of((1,)), *tasks_of((1,), Pool(POOL.titles, POOL.texts))]
    tasks += [Task(f"t{k}", "Which?", ("a",), text="one") for k in range(2)]
    assert [len(part) for part in by_document(tasks)] == [2, 1, 1, 1, 1, 1]


def test_a_pass_has_each_document_once_and_whole():
    sizes = (3, 1, 4, 2, 2)
    source = FileTasks(tasks_of(sizes), seed=5)
    passes = [
        [task for step in range(p * 4, p * 4 + 4) for task in source.batch(step, 0, 3)]
        for p in range(20)
    ]
    for one_pass in passes:
        assert len({task.id for task in one_pass}) == 12
        assert sum(1 for _ in groupby(documents(one_pass))) == 5
    assert len({tuple(dict.fromkeys(documents(p))) for p in passes}) > 10  # documents move
    assert len({tuple(t.id for t in p if t.order == (2, 0)) for p in passes}) > 5  # and their tasks
    again = FileTasks(tasks_of(sizes), seed=5)
    assert [t.id for t in again.batch(9, 0, 3)] == [t.id for t in source.batch(9, 0, 3)]
    plain = FileTasks(tasks_of(sizes), seed=5, shuffle=False)
    assert [t.id for step in (4, 1, 2, 3) for t in plain.batch(step, 0, 3)] == [
        task.id for task in tasks_of(sizes)
    ]
    assert len(source.batch(0, 0, 12)) == 12
    with pytest.raises(UserError, match="12"):
        source.batch(0, 0, 13)


def test_a_mixture_draws_stretches_of_documents_by_weight():
    lists = [tasks_of((4,) * 12), tasks_of((1, 5, 2, 8) * 3)]
    mixed = MixedTasks(lists, [3.0, 1.0], seed=0)
    n_drawn, runs, per_task = Counter(), [], Counter()
    steps = 3000
    for step in range(steps):
        batch = mixed.batch(step, 0, 12)
        assert len(batch) == len({task.id for task in batch}) == 12
        n_drawn.update(task.id[0] for task in batch)
        first = [task for task in batch if task.id[0] == "0"]
        # whole but for the first and the last: n of 4 each are at most (n + 6) // 4 documents
        assert len({*documents(first)}) <= (len(first) + 6) // 4
        runs.append(sum(1 for _ in groupby((t.id[0], t.order) for t in batch)))
        per_task.update(task.id for task in batch)
    assert abs(n_drawn["0"] / (12 * steps) - 0.75) < 0.01
    assert sum(runs) / steps < 6  # twelve tasks drawn one by one would be 10 or more
    # whatever the size of its document: each of the 48 about 187 times, deviation about 13
    rates = [per_task[f"1.{task.id}"] for task in lists[1]]
    assert len(rates) == 48 and all(abs(rate - 3 * steps / 48) < 60 for rate in rates)
    again = MixedTasks(lists, [3.0, 1.0], seed=0)
    assert [t.id for t in again.batch(7, 0, 12)] == [t.id for t in mixed.batch(7, 0, 12)]


def test_a_mixture_may_need_all_of_its_lists_and_no_more():
    mixed = MixedTasks([tasks_of((2, 3)), tasks_of((1,))], [1e9, 1.0], seed=0)
    everything = {f"0.{task.id}" for task in tasks_of((2, 3))} | {"1.0.0"}
    assert {task.id for task in mixed.batch(0, 0, 6)} == everything
    with pytest.raises(UserError, match="6"):
        mixed.batch(0, 0, 7)


@pytest.mark.parametrize(("data", "parts"), [
    ("a.json", [("a.json", 1.0)]), ("a=1.json", [("a=1.json", 1.0)]),
    ("a.json=2,b.json", [("a.json", 2.0), ("b.json", 1.0)]),
    ("a=b.json,c=.5,", [("a=b.json", 1.0), ("c", 0.5)]),
    ("locomo:a,b#x", [("locomo:a,b#x", 1.0)]),
])  # fmt: skip
def test_files_and_their_weights(data, parts):
    assert parts_of(data) == parts


@pytest.mark.parametrize("data", ["a=0,b", "a,b=-1", "a=inf,b", "a=nan,b"])
def test_a_weight_is_a_positive_number(data):
    with pytest.raises(UserError):
        parts_of(data)


def test_sources_that_are_no_file_need_not_be_there(tmp_path):
    check_sources(["", "world", "ledger", "hf:a/b", "own.py:tasks", __file__, f"own:{__file__}#x"])
    with pytest.raises(UserError, match="none"):
        check_sources([str(tmp_path / "none")])
