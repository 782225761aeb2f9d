"""Two-level advantages: outcomes of trajectories, rewards of turns.

Spec rememr1.md 8 and its golden vectors.
"""

import pytest

from agents import find
from config import options
from config.options import GRPOConfig
from data import Task
from grpo import advantages, advantages_of, token_weights, training_rows
from memagent import Finish, Group, MemAgent, Prompt, Trajectory, Turn
from report.metrics import describe, describe_turns

TASK = Task("t", "Where is Otto?", ("Lima",), "Otto reached Lima.")
OUTCOMES = [1, 0, 0, 1]
TURN_REWARDS = [[2, 1, 0, 1], [1, 2, 1, 0], [1, 1, 0, 1]]  # step 0, step 1, final
GOLDEN = [[0.6, -0.4, -0.6, 0.4], [0.4, -0.2, -0.4, 0.2], [0.45, -0.35, -0.55, 0.45]]


def group(outcomes=OUTCOMES, turn_rewards=TURN_REWARDS) -> Group:
    trajectories = []
    for i, outcome in enumerate(outcomes):
        turns = []
        for k, by_step in enumerate(turn_rewards):
            prompt = Prompt((), 8, final=k == len(turn_rewards) - 1)
            turns.append(Turn(prompt, [2], [3], [-1.0], Finish.STOP, ""))
            turns[-1].rewards = {"memory": by_step[i] - 1.0, "format": 1.0}  # their sum trains
        trajectories.append(Trajectory(TASK, turns, i, float(outcome)))
    return Group(TASK, trajectories)


@pytest.mark.parametrize("preset", ["default", "rememr1"])
def test_golden_advantages(preset):
    """By the settings as commands resolve them."""
    config, _ = find.resolve(preset, options.EMBEDDED, {}, {}, "rememr1")
    each = advantages_of(group(), config)
    for step, wanted in enumerate(GOLDEN):
        assert [of_turns[step] for of_turns in each] == pytest.approx(wanted)
    by_mean = GRPOConfig(alpha=0.8, normalisation="mean", group_size=4)
    wanted = [GOLDEN[k][i] for i in range(4) for k in range(3)]
    assert [row.advantage for row in training_rows([group()], by_mean)] == pytest.approx(wanted)


def each_of(found: Group, **fields) -> list[list[float]]:
    return advantages_of(found, GRPOConfig(**{"normalisation": "mean"} | fields))


def test_alpha_weighs_the_outcome_and_the_turns_and_a_group_of_one_has_no_baseline():
    assert each_of(group(), alpha=1.0) == [[0.5] * 3, [-0.5] * 3, [-0.5] * 3, [0.5] * 3]
    assert [of_turns[0] for of_turns in each_of(group(), alpha=0.0)] == [1, 0, -1, 0]
    (alone,) = each_of(group([1], [[2], [1], [1]]), alpha=0.8)
    assert alone == pytest.approx([0.8 + 0.4, 0.8 + 0.2, 0.8 + 0.2])
    assert each_of(group([1], [[2]]), alpha=0.0) == [[2.0]]


@pytest.mark.parametrize("normalisation", ["mean", "std"])
def test_a_turn_that_one_trajectory_alone_has_reached_earns_nothing_of_its_own(normalisation):
    g = group()
    for trajectory in g.trajectories[1:]:
        del trajectory.turns[1]
    each = each_of(g, alpha=0.0, normalisation=normalisation)
    assert each[0][1] == 0 and each[0][0] > 0
    outcome = each_of(g, alpha=1.0, normalisation=normalisation)[0][1]
    each = each_of(g, alpha=0.8, normalisation=normalisation)
    assert each[0][1] == pytest.approx(0.8 * outcome)  # what is left is the outcome's part


def test_final_turns_are_compared_with_final_turns_wherever_they_stand():
    g = group()
    failed = g.trajectories[0]  # ended after its first turn
    failed.turns = failed.turns[:1]
    short = g.trajectories[1]  # and one that had a section less
    del short.turns[1]
    each = each_of(g, alpha=0.0)
    assert [of_turns[0] for of_turns in each] == [1, 0, -1, 0]
    assert len(each[0]) == 1 and [each[2][1], each[3][1]] == pytest.approx([0.5, -0.5])
    assert [each[i][-1] for i in (1, 2, 3)] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_a_group_whose_outcomes_agree_still_learns_from_its_turns():
    agreed, by_mean = group([1, 1, 1, 1]), GRPOConfig(normalisation="mean")
    assert not agreed.signal and len(training_rows([agreed], by_mean)) == 12
    assert training_rows([agreed], GRPOConfig(normalisation="mean", alpha=1.0)) == []
    assert training_rows([group([1, 1], [[1, 1], [0, 0]])], by_mean) == []
    # rewards that are the same are no signal, however they are rounded
    for value in (1 / 3, 0.1, 0.2, 0.7):
        same = group([value] * 16, [[0.1 + 0.2] * 8 + [0.3] * 8] * 3)
        assert training_rows([same], by_mean) == training_rows([same], GRPOConfig()) == []
        for turn in (turn for trajectory in same.trajectories for turn in trajectory.turns):
            turn.rewards = {}
        assert training_rows([same], by_mean) == []


@pytest.mark.parametrize("a, b, differ", [
    (0.3, 0.1 + 0.2, False), (0.0, 9e-10, False), (4.9e-10, 5.1e-10, False), (-0.0, 0.0, False),
    (0.0, 1.1e-9, True), (0.3, 0.31, True), (1e9, 1e9 + 1, True),
])  # fmt: skip
def test_one_rule_says_what_a_signal_is(a, b, differ):
    """For advantages, for what is trained, for the share of groups without, and for turns."""
    for by_outcome in (True, False):
        rewards, config = [a, b, a], GRPOConfig(alpha=1.0 if by_outcome else 0.0)
        others = [0.5] * 3
        found = group(rewards, [others]) if by_outcome else group(others, [rewards])
        assert found.signal is (differ and by_outcome)
        assert any(advantages(rewards)) is any(map(any, advantages_of(found, config))) is differ
        assert bool(training_rows([found], config)) is differ
        metrics = describe([found], {}) | describe_turns([found], MemAgent())
        assert metrics["groups_without_signal"] == (not found.signal)
        assert metrics["turn_groups_without_signal"] == (by_outcome or not differ)


def test_split_credit_divides_the_outcome_and_not_what_is_a_turns_own():
    share, split = (each_of(group(), alpha=0.8, credit=credit) for credit in ("share", "split"))
    for a, both, divided in zip([0.5, -0.5, -0.5, 0.5], share, split, strict=True):
        less = [x - y for x, y in zip(both, divided, strict=True)]
        assert less == pytest.approx([0.8 * (a - a / 3)] * 3)


def test_state_mean_is_the_mean_over_trajectories_of_the_mean_over_their_turns():
    g = group()
    for n, turn in enumerate(turn for t in g.trajectories for turn in t.turns):
        turn.response_ids, turn.logprobs = [3] * (1 + n % 5), [-1.0] * (1 + n % 5)
    del g.trajectories[1].turns[1]
    config = GRPOConfig(normalisation="mean", aggregation="trajectory_mean", group_size=4)
    rows = training_rows([g], config)
    for row, weight in zip(rows, token_weights(rows, config), strict=True):
        n_turns = 2 if row.trajectory == 1 else 3
        assert weight == pytest.approx(1 / (len(row.response_ids) * n_turns * 4))
