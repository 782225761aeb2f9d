"""GRU-Mem: what a turn's gates do to memory and reading, and what right ones are paid."""

from collections import Counter

import pytest
from conftest import counted, slots_of

from agents import find
from agents.grumem import GRUMem, GRUMemConfig, read_gates
from agents.rewards import grade
from commands.sft import demonstration
from data import NOT_FOUND, Pool, Task
from embedded import tiny
from engines.scripted import ScriptedEngine
from eval import evaluate
from grpo import training_rows
from memagent import NO_MEMORY, Group
from report.records import record
from report.rows import Cell
from report.transcripts import steps_of
from rollout import Sampling, rollout
from tasks import worlds

SIZES = dict(chunk_tokens=8, memory_tokens=16, final_tokens=48)
FACTS = (  # two in a section of eight tokens
    "Anna reached Rome.", "Ida reached Oslo.", "Nils joined Otto.", "Emil reached Cork.",
    "Olga reached Graz.", "Otto reached Lima.", "Vera reached Riga.", "Max reached Milan.",
)  # fmt: skip
SECTIONS = [f"{a} {b}" for a, b in zip(FACTS[::2], FACTS[1::2], strict=True)]
ONE, BOTH = "Nils joined Otto.", "Nils joined Otto. Otto reached Lima."
WRITE_ONE, WRITE_BOTH = f"<update>{ONE}</update>", f"<update>{BOTH}</update>"
ANSWER = "\\boxed{Lima}"
U = 1 / 9


def task_of(gold=(2, 5), answers=("Lima",), **fields) -> Task:
    """The evidence of "Where is Nils?" stands in the second and the third of four sections."""
    pool = Pool([], [*FACTS], "words")
    return Task("t", "Where is Nils?", answers, pool=pool, order=range(8), gold=gold, **fields)


def play(codec, responses, task=None, **settings):
    agent = GRUMem(GRUMemConfig(**SIZES | settings)).on(codec)
    left = iter(responses)
    engine = ScriptedEngine(codec, lambda prompt: next(left))
    (done,) = rollout(engine, agent, [(task or task_of(), 0)])
    assert not done.error and next(left, None) is None
    return agent, done


# ---------------------------------------------------------------- gates


@pytest.mark.parametrize(("response", "gates"), [
    ("no", (None, False, True)),
    (" No. STOP.\n", (None, True, True)),
    ("<update>a</update>", ("a", False, True)),
    ("<update>a\nno STOP </update>\nSTOP", ("a\nno STOP ", True, True)),
    ("<update></update>", ("", False, True)),
    # whatever has not the form leaves both gates closed
    ("", (None, False, False)),
    ("STOP", (None, False, False)),
    ("none", (None, False, False)),
    ("no, STOP", (None, False, False)),
    ("no <update>a</update>", (None, False, False)),
    ("<update>a", (None, False, False)),
    ("<update>a</update> STOPPED", (None, False, False)),
    ("<update>a</update><update>b</update>", (None, False, False)),
    ("<update>a<update>b</update>", (None, False, False)),
    ("<update>a</update>b</update>", (None, False, False)),
    ("<update>a</update> as STOP", (None, False, False)),
])  # fmt: skip
def test_what_a_turn_says_of_its_gates(response, gates):
    assert read_gates(response) == gates


def test_a_closed_gate_keeps_the_memory_and_an_open_exit_ends_the_reading(codec):
    agent, done = play(codec, ["no", WRITE_ONE, f"{WRITE_BOTH} STOP", ANSWER])
    prompts = [turn.prompt for turn in done.turns]
    question = done.task.question
    assert [slots_of(prompt) for prompt in prompts] == [
        [SECTIONS[0], question, NO_MEMORY],
        [SECTIONS[1], question, NO_MEMORY],
        [SECTIONS[2], question, ONE],
        [question, BOTH],
    ]  # the last section is never read
    assert prompts[-1].final and agent.reward(done) == 1.0
    assert counted(agent, done) == Counter(
        updates=3, malformed=0, writes=2, updates_known=3, updates_right=3, ends=1, stopped=1,
        to_read=4, unread=1, saved=8, exits_known=1, early=0, late=0,
    )  # fmt: skip


def test_what_has_not_the_form_changes_nothing_and_is_counted(codec):
    agent, done = play(codec, [WRITE_ONE, "<update>x", "STOP", f"I think {WRITE_BOTH} STOP", "-"])
    assert [turn.prompt.memory.strip() for turn in done.turns] == [NO_MEMORY, *[ONE] * 4]
    n = counted(agent, done)
    assert (n["malformed"], n["updates"], n["writes"], n["unread"]) == (3, 4, 1, 0)


def test_thoughts_open_no_gate_and_a_blank_memory_becomes_what_the_setting_says(codec):
    responses = [f"<think>STOP</think>{WRITE_ONE}", "<update> </update>", "no", "no", "-"]
    for empty, memory in (("placeholder", NO_MEMORY), ("keep", ONE)):
        _, done = play(codec, responses, empty=empty, memory_tokens=64)
        assert [t.prompt.memory.strip() for t in done.turns[1:]] == [ONE, *[memory] * 3]


def test_an_exit_gate_that_is_switched_off_ends_nothing_and_is_not_paid(codec):
    agent, done = play(codec, [*["no STOP"] * 4, ANSWER], exit_gate=False)
    assert len(done.turns) == 5 and counted(agent, done)["exits_known"] == 0
    assert agent.turn_rewards(done)[-1] == {"format": 1.0}


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(("responses", "update", "exit", "form"), [
    (["no", WRITE_ONE, f"{WRITE_BOTH} STOP"], [U, U, U], 0.0, 1.0),
    (["no STOP"], [U], -0.75, 1.0),
    (["no", f"{WRITE_ONE} STOP"], [U, U], -0.75, 1.0),
    (["no", WRITE_ONE, WRITE_BOTH, "no STOP"], [U] * 4, -0.5, 1.0),  # it stops with the document
    (["no", WRITE_ONE, WRITE_BOTH, "no"], [U] * 4, -0.5, 1.0),
    # opened for nothing; closed where there is evidence, which the memory lacks; not of the form
    (["<update>x</update>", "no", "no STOP"], [-U] * 3, 0.0, 1.0),
    (["<update>x</update>", WRITE_ONE, "STOP", "no"], [-U, U, -U, U], -0.5, 0.0),
    # evidence that the memory has is no reason to update
    ([f"<update>{ONE}</update>", WRITE_ONE, f"{WRITE_BOTH} STOP"], [-U, -U, U], 0.0, 1.0),
])  # fmt: skip
def test_each_turn_is_paid_for_its_gate_and_all_for_exit_and_form(
    codec, responses, update, exit, form
):
    agent, done = play(codec, [*responses, ANSWER])
    *turns, final = agent.turn_rewards(done)
    assert turns == [{"format": form, "exit": exit, "update": pytest.approx(u)} for u in update]
    assert final == {"format": form, "exit": exit}
    n = counted(agent, done)
    assert (n["early"], n["late"]) == (exit == -0.75, exit == -0.5)
    assert n["updates_right"] == sum(u > 0 for u in update)


@pytest.mark.parametrize(("task", "responses", "exit"), [
    (task_of((7,)), ["no", "no", "no", "<update>x</update>"], 0.0),  # the last section has it
    (task_of((), (NOT_FOUND,)), ["no", "no", "no", "no"], 0.0),  # no section has it
    (task_of((), (NOT_FOUND,)), ["no", "no", "no STOP"], -0.75),
    (task_of(()), ["no", "<update>x</update>", "no STOP"], None),  # where is not known
])  # fmt: skip
def test_reading_to_the_end_is_right_where_the_evidence_is_last_or_missing(
    codec, task, responses, exit
):
    agent, done = play(codec, [*responses, "-"], task)
    whole = {"format": 1.0} | ({} if exit is None else {"exit": exit})
    update = {} if exit is None else {"update": U}
    assert agent.turn_rewards(done) == [*[whole | update] * len(responses), whole]


def test_evidence_that_a_sections_end_cuts_asks_for_reading_to_the_end(codec):
    _, done = play(codec, ["no"] * 6 + ["-"], task_of((1,)), chunk_tokens=6)
    assert done.turns[-1].notes.exit == 0.0  # "Ida reached | Oslo."


def test_a_reading_that_failed_is_paid_for_its_form_alone(codec):
    agent, done = play(codec, ["no", WRITE_ONE, f"{WRITE_BOTH} STOP", ANSWER])
    done.turns = done.turns[:2]
    done.turns[-1].notes = None
    assert agent.turn_rewards(done) == [{"format": 1.0, "update": U}, {"format": 1.0}]


def test_a_group_is_trained_on_answers_and_gates_with_the_published_weights(codec):
    """By hand: 0.5 * outcome and 0.5 * (update + exit + format), each less the mean of the group;
    by turn among the readings that came as far, 0 for one that did alone."""
    scripts = [
        ["no", WRITE_ONE, f"{WRITE_BOTH} STOP", ANSWER],  # right throughout
        ["no", f"{WRITE_ONE} STOP", "\\boxed{Rome}"],  # too early
        ["STOP", WRITE_ONE, WRITE_BOTH, "no", ANSWER],  # too late, and once without the form
    ]
    trajectories = []
    for k, script in enumerate(scripts):
        agent, done = play(codec, script)
        done.sample = k
        grade(agent, done)
        trajectories.append(done)
    config, _ = find.resolve("default", "", {"turns_per_trajectory": 0}, {}, "grumem")
    rows = training_rows([Group(task_of(), trajectories)], config)
    assert [list(r.response_ids) for r in rows] == [
        turn.response_ids for done in trajectories for turn in done.turns
    ]
    outcome = [1 / 3, -2 / 3, 1 / 3]
    first = [1 + 0 + U, 1 - 0.75 + U, 0 - 0.5 + U]  # what has not the form is closed
    second = [1 + 0 + U, 1 - 0.75 + U, 0 - 0.5 + U]
    third = {0: 1 + 0 + U, 2: 0 - 0.5 + U}
    final = [1 + 0, 1 - 0.75, 0 - 0.5]

    def less(values, k):
        values = values if isinstance(values, dict) else dict(enumerate(values))
        return 0.5 * outcome[k] + 0.5 * (values[k] - sum(values.values()) / len(values))

    expected = [
        *(less(turns, 0) for turns in (first, second, third, final)),
        *(less(turns, 1) for turns in (first, second, final)),
        *(less(turns, 2) for turns in (first, second, third)), 0.5 * outcome[2], less(final, 2),
    ]  # fmt: skip
    assert [row.advantage for row in rows] == pytest.approx(expected)


def test_its_preset_has_what_is_known_of_the_published_settings():
    grpo, agent = find.resolve("grumem", "", {}, {})
    assert agent.name == "grumem" and (grpo.alpha, grpo.normalisation) == (0.5, "mean")
    assert (grpo.group_size, agent.config.chunk_tokens, agent.config.memory_tokens) == (
        16, 5000, 1024,
    )  # fmt: skip


# ---------------------------------------------------------------- demonstrations, rows


def test_a_demonstration_opens_the_gates_where_it_is_right(codec):
    agent = GRUMem(GRUMemConfig(**SIZES)).on(codec)
    done = demonstration(agent, task_of())
    said = ["".join(turn.response.split()) for turn in done.turns]
    expected = ["no", WRITE_ONE, f"{WRITE_BOTH} STOP", ANSWER]
    assert said == ["".join(text.split()) for text in expected]
    grade(agent, done)
    assert done.reward == 1.0
    assert all(turn.rewards["exit"] == 0.0 and turn.rewards["format"] for turn in done.turns)
    assert {turn.rewards.get("update") for turn in done.turns} == {U, None}


def test_what_no_section_holds_is_demonstrated_to_the_end(codec):
    agent = GRUMem(GRUMemConfig(**SIZES)).on(codec)
    done = demonstration(agent, task_of((), (NOT_FOUND,)))
    assert [str(turn.response).strip() for turn in done.turns[:-1]] == ["no"] * 4
    assert demonstration(agent, task_of(())) is None  # where the evidence stands is not known


def test_all_kinds_of_the_generated_world_are_demonstrated(codec):
    agent = tiny.agent("grumem", memory_tokens=16).on(codec)
    for kind in worlds.KINDS:
        done = demonstration(agent, worlds.make_task(0, 6, kind))
        n = counted(agent, done)
        assert n["updates_right"] == n["updates"] and not n["late"] and not n["early"]


def test_rows_and_transcripts_have_the_memory_that_the_gates_leave(codec, tmp_path):
    responses = ["no", WRITE_ONE, f"{WRITE_BOTH} STOP", ANSWER]
    agent, done = play(codec, responses)
    left = iter(responses)
    engine = ScriptedEngine(codec, lambda prompt: next(left))
    cell = Cell("a", "", "", 4)
    (row,) = evaluate(engine, agent, [task_of()], Sampling(), cell, tmp_path / "rows")
    assert row["em"] == 1.0 and row["memory"].strip() == BOTH and row["sections"] == 3
    assert (row["counts"]["unread"], row["counts"]["saved"]) == (1, 8)
    steps = steps_of(record(done, agent))
    shown = [step.after.strip() for step in steps if not isinstance(step, str)]
    assert shown[-1] == BOTH
    # a last turn that does not answer: the memory it leaves is recorded with it
    for n, memory in ((2, ONE), (1, NO_MEMORY)):
        done.turns = done.turns[:n]
        assert record(done, agent)["turns"][-1]["memory_after"].strip() == memory
