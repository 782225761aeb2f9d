"""What ranks compute of an update: loads, and that no row is lost on its way."""

from __future__ import annotations

import random

import pytest

from models import loads, ranks
from models.logprobs import Row

SECTION = 200  # tokens that the turns of a group have in common, section by section


def trajectory(rng, group, number, turns=4):
    """Rows of one trajectory: section first, then what is its own."""
    return [
        Row([1000 * group + k] * SECTION, [rng.randrange(10**6) for _ in range(60)], [0.0] * 60,
            trajectory=number)
        for k in range(turns)
    ]  # fmt: skip


def step(rng, world, groups_of_a_rank, size, with_signal):
    """The rows of every rank where a group has a signal with a probability."""
    return [
        [
            row
            for g in range(groups_of_a_rank)
            if rng.random() < with_signal
            for k in range(size)
            for number in [rank * groups_of_a_rank + g]
            for row in trajectory(rng, number, number * size + k)
        ]
        for rank in range(world)
    ]


def on_all(monkeypatch, homes):
    """What `levelled` returns on each of several ranks, which take turns at each collective."""
    sizes = [loads.trajectory_tokens(rows) for rows in homes]
    out = []
    for rank, rows in enumerate(homes):
        parts = loads.destinations(sizes)
        answers = iter([sizes, [loads.leaving(home, parts[r]) for r, home in enumerate(homes)]])
        monkeypatch.setattr(ranks, "world", lambda: len(homes))
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(ranks, "all_gather_object", lambda own, a=answers: next(a))
        out.append(loads.levelled(rows))
    return out


def computed(rows):
    return sum(loads.new_tokens(rows)[1])


def slowest(parts):
    """The slowest rank over the mean one, by computed tokens."""
    tokens = [computed(rows) for rows in parts]
    return max(tokens) * len(tokens) / sum(tokens)


@pytest.mark.parametrize("with_signal", [0.3, 0.5, 0.7])
def test_eight_ranks_have_about_as_much_to_compute(monkeypatch, with_signal):
    rng, before, after = random.Random(0), [], []
    for _ in range(10):
        homes = step(rng, 8, 2, 16, with_signal)
        if not any(homes):
            continue
        parts = on_all(monkeypatch, homes)
        here, there = (sorted(id(row) for rows in of for row in rows) for of in (homes, parts))
        assert here == there  # each row once
        owners = {}
        for rank, rows in enumerate(parts):
            for row in rows:
                assert owners.setdefault(row.trajectory, rank) == rank  # whole trajectories
        # a group is torn at borders alone: what it shares is computed once more at each
        assert sum(map(computed, parts)) <= sum(map(computed, homes)) + 7 * 4 * SECTION
        before.append(slowest(homes))
        after.append(slowest(parts))
    assert sum(before) / len(before) > 1.3
    assert sum(after) / len(after) < 1.2 and max(after) < 1.4  # of a step with one group


def test_what_is_level_already_stays_where_it_is(monkeypatch):
    rng = random.Random(0)
    homes = [[*trajectory(rng, 2 * r, 2 * r), *trajectory(rng, 2 * r + 1, 2 * r + 1)]
             for r in range(4)]  # fmt: skip
    assert on_all(monkeypatch, homes) == homes


def test_ranks_without_rows_get_some_and_nothing_is_nothing(monkeypatch):
    rng = random.Random(0)
    rows = [row for k in range(6) for row in trajectory(rng, k, k)]
    parts = on_all(monkeypatch, [[], rows, []])
    assert [len(part) for part in parts] == [8, 8, 8]
    assert on_all(monkeypatch, [[], []]) == [[], []]
