"""The metrics of a step, by hand."""

import math
from statistics import stdev

import pytest

from data import Task
from memagent import Group, Trajectory
from report.metrics import describe


def groups(*rewards):
    task = Task("a", "Where?", ("Lima",), text="x")
    return [
        Group(task, [Trajectory(task, [], k, reward) for k, reward in enumerate(of_group)])
        for of_group in rewards
    ]


def test_the_standard_error_is_over_groups_not_over_their_members():
    found = describe(groups((0, 1), (1, 1), (0, 0)), {})
    assert found["reward"] == 0.5
    assert found["reward_se"] == pytest.approx(stdev([0.5, 1, 0]) / math.sqrt(3))
    assert describe(groups((0.7, 0.7), (0.7, 0.7)), {})["reward_se"] == pytest.approx(0, abs=1e-8)
    assert math.isnan(describe(groups((0, 1)), {})["reward_se"])
