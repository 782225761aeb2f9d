"""Where training tasks come from: passes, mixtures, and tasks of one document side by side."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from agents.find import beginning
from config.errors import UserError
from config.options import GRPOConfig, RunConfig, SFTConfig, TrainConfig
from data import Pool, Task
from embedded import tiny
from suites._training import (
    FileTasks,
    MixedTasks,
    WorldTasks,
    by_document,
    never_trained,
    training_tasks,
    validation_tasks,
)

POOL = Pool([f"T{k}" for k in range(12)], [f"Text {k}." for k in range(12)])


def tasks_of(sizes, pool=POOL, name=""):
    """Make so many tasks of each document."""
    return [
        Task(f"{name}{k}.{n}", "Which?", ("a",), pool=pool, order=(k, 0), gold=(0,))
        for k, size in enumerate(sizes)
        for n in range(size)
    ]


def documents(tasks):
    return [task.order for task in tasks]


def n_runs(tasks):
    return sum(1 for _ in groupby(documents(tasks)))


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
        assert len({task.id for task in one_pass}) == 12 and n_runs(one_pass) == 5
    assert len({tuple(dict.fromkeys(documents(p))) for p in passes}) > 10  # documents move
    assert len({tuple(t.id for t in p if t.order == (2, 0)) for p in passes}) > 5  # and their tasks
    again = FileTasks(tasks_of(sizes), seed=5)
    assert [t.id for t in again.batch(9, 0, 3)] == [t.id for t in source.batch(9, 0, 3)]
    plain = FileTasks(tasks_of(sizes), seed=5, shuffle=False)
    in_order = [task.id for step in range(4) for task in plain.batch(step, 0, 3)]
    assert in_order == [task.id for task in tasks_of(sizes)]


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
    by_size = {
        size: sum(per_task[f"1.{t.id}"] for t in lists[1] if (1, 5, 2, 8)[t.order[0] % 4] == size)
        for size in (1, 5, 2, 8)
    }
    for size, drawn in by_size.items():  # within 6 %, three deviations of the smallest
        assert drawn == pytest.approx(3 * size * 3 * steps / 48, rel=0.15 if size < 3 else 0.06)
    again = MixedTasks(lists, [3.0, 1.0], seed=0)
    assert [t.id for t in again.batch(7, 0, 12)] == [t.id for t in mixed.batch(7, 0, 12)]


def test_a_mixture_may_need_all_of_a_list_and_no_more():
    mixed = MixedTasks([tasks_of((2, 3))], [1.0], seed=0)
    assert {task.id for task in mixed.batch(0, 0, 5)} == {f"0.{t.id}" for t in tasks_of((2, 3))}
    with pytest.raises(UserError, match="6 tasks"):
        mixed.batch(0, 0, 6)


A, B, WORLD = tasks_of((2,) * 5), tasks_of((1, 4), name="b"), ("one_fact",)
SHARE = "{} train on at most {}, never on the others."


@pytest.mark.parametrize("tasks, data, config, said", [
    (FileTasks(A, 0), "a.jsonl", GRPOConfig(steps=2, tasks_per_step=(4,)),
     SHARE.format("2 steps of 4", "8 of the 10 tasks of a.jsonl")),
    (FileTasks(A, 0), "a.jsonl", GRPOConfig(steps=9, tasks_per_step=(4,)), ""),  # shuffled anew
    (FileTasks(A, 0, False), "a.jsonl", GRPOConfig(steps=9, tasks_per_step=(4,)),  # a remainder
     SHARE.format("9 steps of 4", "8 of the 10 tasks of a.jsonl")),
    (MixedTasks([A, B], [1e9, 1], 0), "a.jsonl=1e9,b.jsonl",
     SFTConfig(steps=1, tasks_per_step=(6,)),
     SHARE.format("1 step of 6", "6 of the 10 tasks of a.jsonl, 0 of the 5 tasks of b.jsonl")),
    (MixedTasks([A, B], [1, 1], 0), "a.jsonl,b.jsonl", GRPOConfig(steps=50), ""),
    (WorldTasks((2, 4, 8), WORLD, 0), "world", GRPOConfig(steps=6, grow_steps=5),
     SHARE.format("6 steps of 8", "2 of the 3 lengths")),
    (WorldTasks((2, 4, 8), WORLD, 0), "world", GRPOConfig(steps=11, grow_steps=5), ""),
    (WorldTasks((2, 4), WORLD, 0), "world", SFTConfig(steps=2), ""),
])  # fmt: skip
def test_what_no_step_trains_on_is_said(tasks, data, config, said):
    assert never_trained(tasks, data, config) == said
    if isinstance(tasks, FileTasks | MixedTasks):  # what really comes
        n = config.tasks_per_step[0]
        met = {task.id for step in range(config.steps) for task in tasks.batch(step, 0, n)}
        names = ["0.", "1."] if isinstance(tasks, MixedTasks) else [""]
        found = [sum(id.startswith(name) for id in met) for name in names]
        most = [reached for reached, _ in tasks.reached(config.steps, n)]
        assert found == most


def test_a_text_stands_between_the_facts_in_training_and_validation(tmp_path):
    (tmp_path / "a.txt").write_text("It rained. It snowed.")
    run = RunConfig(
        lengths=(2, 5), kinds=("changed", "two_hop"), filler=(str(tmp_path / "a.txt"),),
        validation="world", validation_n=3,
    )  # fmt: skip
    training, validation = training_tasks(run, TrainConfig()), validation_tasks(run)
    tasks = [*training.batch(0, 1, 4), *validation]
    assert [task.kind for task in tasks] == ["changed", "two_hop"] * 2 + ["changed"] * 2 + [
        "two_hop"
    ]
    for task in tasks:
        assert len(task.order) == 10 and {*task.pool.texts[1::2]} == {"It rained.", "It snowed."}
    assert all("-dev-5-" in task.id for task in validation)


def test_a_text_that_is_not_there_is_told_before_a_training_begins():
    said = []
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        beginning(RunConfig(filler=("nowhere.txt",)), tiny.agent(), False, said.append)
    assert not said
