"""What ranks compute of an update: loads, and that no row is lost on its way."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import loads, ranks
from models.logprobs import Row

SECTION = 30  # tokens that the turns of a group have in common, section by section


def trajectory(group: int, number: int, turns: int = 3) -> list[Row]:
    """Rows of one trajectory: the section first, then what is its own."""
    own = [[10_000 + 100 * number + k] * 10 for k in range(turns)]
    return [
        Row([100 * group + k] * SECTION, own[k], [0.0] * 10, trajectory=number)
        for k in range(turns)
    ]


def balance_all(homes: list[list[Row]]) -> list[list[Row]]:
    """Return what `balance` does on each of several ranks, which are threads here."""
    place, gate, slots = threading.local(), threading.Barrier(len(homes)), [None] * len(homes)

    def gather(own):
        slots[place.rank] = own
        gate.wait()
        found = [*slots]
        gate.wait()
        return found

    def one(rank):
        place.rank = rank
        return loads.balance(homes[rank])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(homes)) as pool:
        patch.setattr(ranks, "world", lambda: len(homes))
        patch.setattr(ranks, "rank", lambda: place.rank)
        patch.setattr(ranks, "all_gather_object", gather)
        return [*pool.map(one, range(len(homes)))]


def computed(rows: list[Row]) -> int:
    return sum(loads.new_tokens(rows)[1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5))
def test_whole_trajectories_move_until_no_rank_has_much_more_than_another(sizes):
    """sizes: by rank and group, how many trajectories have a signal."""
    homes, n = [], 0
    for rank, groups in enumerate(sizes):
        homes.append([])
        for g, size in enumerate(groups):
            for _ in range(size):
                homes[-1] += trajectory(10 * rank + g, n)
                n += 1
    parts = balance_all(homes)
    rows, there = ([id(row) for part in of for row in part] for of in (homes, parts))
    assert Counter(rows) == Counter(there)  # each row once
    owners = [{row.trajectory for row in part} for part in parts]
    assert sum(map(len, owners)) == n  # whole trajectories
    # a group is torn at borders alone: what it shares is computed once more at each
    total = sum(map(computed, homes))
    assert sum(map(computed, parts)) <= total + (len(parts) - 1) * 3 * SECTION
    if n:  # half a trajectory that begins a group at either end, and the torn section
        most = max(map(computed, parts))
        assert most <= total / len(parts) + 3 * (2 * SECTION + 10)


def test_what_is_level_already_stays_where_it_is():
    homes = [[*trajectory(2 * r, 2 * r), *trajectory(2 * r + 1, 2 * r + 1)] for r in range(4)]
    assert balance_all(homes) == homes


@pytest.mark.parametrize(("sizes", "n", "parts"), [
    ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]), ([9, 1], 2, [[0], [1]]), ([1], 3, [[], [0], []]),
    ([0, 0], 2, [[0, 1], []]), ([2, 0], 2, [[], [0, 1]]), ([], 2, [[], []]),
])  # fmt: skip
def test_stretches(sizes, n, parts):
    assert loads.stretches(sizes, n) == parts
