"""InfMem: what a plan finds, where it stops, what that saves, and what its turns are paid."""

from collections import Counter

import pytest
from conftest import counted, slots_of

from agents.infmem import InfMem, InfMemConfig, read_plan
from agents.mem1 import DocumentSearch
from agents.retrieval import BM25
from commands.sft import demonstration
from config.options import GRPOConfig
from data import Task
from embedded import tiny
from engines.scripted import ScriptedEngine
from eval import evaluate
from grpo import training_rows
from memagent import NO_MEMORY, Group, MemAgent, MemAgentConfig
from report.records import record
from report.rows import Cell
from report.transcripts import n_sections, steps_of
from rollout import Sampling, rollout
from tasks import worlds

SIZES = dict(chunk_tokens=8, memory_tokens=12, final_tokens=24)
SECTIONS = (  # of eight tokens
    "Anna reached Rome. Ida reached Oslo.",
    "Nils reached Nice. Emil reached Cork.",
    "Olga reached Graz. Rita reached Riga.",
    "Otto reached Lima. Max reached Milan.",
)
TASK = Task("t", "Where is Otto?", ("Lima",), " ".join(SECTIONS))


def play(codec, script, task=TASK, n=1, **settings):
    """Run the agent on responses: a list, in their order, or a function of the prompt."""
    agent = InfMem(InfMemConfig(**SIZES | settings))
    if isinstance(script, list):
        left = iter(script)
        script = lambda prompt: next(left)  # noqa: E731
    done = [*rollout(ScriptedEngine(codec, script), agent, [(task, k) for k in range(n)])]
    assert not any(trajectory.error for trajectory in done)
    return agent, done if n > 1 else done[0]


# ---------------------------------------------------------------- one trajectory


def test_it_looks_ahead_writes_from_both_and_stops_after_one_of_four_sections(codec):
    responses = ["<recall> Otto</recall>", "Otto reached Lima.", "STOP", "\\boxed{Lima}"]
    agent, done = play(codec, responses)
    plan, write, stop, final = (turn.prompt for turn in done.turns)
    assert slots_of(plan) == [TASK.question, "0 of 4 sections read; looked for: -", NO_MEMORY]
    assert slots_of(write) == [SECTIONS[0], TASK.question, SECTIONS[3], NO_MEMORY]
    assert slots_of(stop) == [
        TASK.question, "1 of 4 sections read; looked for: Otto", "Otto reached Lima.",
    ]  # fmt: skip
    assert slots_of(final) == [TASK.question, "Otto reached Lima."] and final.final
    assert [bool(prompt.section) for prompt in (plan, write, stop, final)] == [0, 1, 0, 0]
    assert done.turns[0].notes.found == (4,) and done.turns[0].notes.query == "Otto"
    assert agent.reward(done) == 1.0
    n = counted(agent, done)
    assert n == Counter(
        plan_search=1, searches=1, hits=1, plan_stop=1, updates=1, writes=1, held=1, unfinished=0,
        ends=1, stopped=1, to_read=4, unread=3, saved=24,
    )  # fmt: skip
    # nothing is written again on its way: the memory's ids are those that were sampled
    assert final.memory.ids == tuple(done.turns[1].response.ids)


def test_without_a_call_it_reads_on_as_memagent_does_prompt_by_prompt(codec):
    def script(prompt):
        return prompt.section[:12] if prompt.section else "hm"

    agent, done = play(codec, script)
    reader = MemAgent(MemAgentConfig(**SIZES, empty="keep"))
    (plain,) = rollout(ScriptedEngine(codec, script), reader, [(TASK, 0)])
    own = [turn for turn in done.turns if turn.prompt.section or turn.prompt.final]
    assert [turn.prompt_ids for turn in own] == [turn.prompt_ids for turn in plain.turns]
    assert len(done.turns) == 9
    n = counted(agent, done)
    assert (n["plan_silent"], n["updates"], n["searches"]) == (4, 4, 0)
    assert (n["ends"], n["stopped"], n["unread"], n["saved"]) == (1, 0, 0, 0)


def test_a_section_that_is_being_read_is_not_found_but_one_read_before_is(codec):
    def script(prompt):
        return "-" if prompt.section else "<recall>Anna</recall>"

    _, done = play(codec, script)
    found = [turn.notes.found for turn in done.turns if not turn.prompt.section][:4]
    assert found == [(), (1,), (1,), (1,)]


def test_passages_are_smaller_than_sections_and_the_best_come_first(codec):
    def script(prompt):
        return "-" if prompt.section else "<recall>Max or Milan, Rita, Anna</recall>"

    settings = dict(passage_tokens=4, passages_k=2)  # one sentence
    _, done = play(codec, script, **settings)
    plans = [turn for turn in done.turns if not turn.prompt.section][:4]
    # Anna is in passage 1, Rita in 6, Max and Milan in 8; two of them are read at a time
    assert plans[0].notes.found == (8, 6) and plans[3].notes.found[0] != 8
    for k, turn in enumerate(plans):
        assert set(turn.notes.found) <= {1, 6, 8} - {2 * k + 1, 2 * k + 2}
        assert len(turn.notes.found) == 2
    write = done.turns[1].prompt
    assert slots_of(write)[2] == "Max reached Milan.\n\n Rita reached Riga."


@pytest.mark.parametrize("texts", [SECTIONS, ("a a b", "b", ""), ("",), ()])
def test_the_search_in_a_document_ranks_as_bm25_over_all_of_it(texts):
    for query in ("Anna", "Where is Otto?", "b a", "nobody", ""):
        assert DocumentSearch(texts).top_k(query, 3) == BM25(texts).top_k(query, 3)


# ---------------------------------------------------------------- malformed responses


@pytest.mark.parametrize(("response", "plan"), [
    ("<recall>Otto's\n place</recall>", ("Otto's place", "search")),
    ("<recall>a</recall><recall>b</recall> STOP", ("a", "search")),  # a call goes before STOP
    ("<recall>Otto", ("Q", "fault")),
    ("<recall> </recall>", ("Q", "fault")),
    ("All is known: STOP.", ("", "stop")),
    ("STOPPED", ("", "silent")),
    ("<think>I may STOP</think>no", ("", "silent")),
    ("<think>x</think>STOP", ("", "stop")),
    ("", ("", "silent")),
])  # fmt: skip
def test_what_a_plan_says(response, plan):
    assert read_plan(response, "Q") == plan


def test_a_faulty_call_looks_for_the_question_and_is_counted(codec):
    responses = ["<recall>Lima", "x", "", "", *["no", ""] * 2, "\\boxed{Rome}"]
    agent, done = play(codec, responses)
    assert done.turns[0].notes.query == TASK.question and done.turns[0].notes.found == (4,)
    n = counted(agent, done)
    assert (n["plan_fault"], n["plan_silent"], n["searches"]) == (1, 3, 1)
    # empty responses keep the memory; it was written once
    memories = [turn.prompt.memory.strip() for turn in done.turns]
    assert memories == [NO_MEMORY] * 2 + ["x"] * 7 and n["writes"] == 1
    # a query that was none of the policy's is not shown as its own
    assert slots_of(done.turns[2].prompt)[1].endswith("looked for: -")
    assert agent.turn_rewards(done)[0]["calls"] == 0.0 and agent.reward(done) == 0.0


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(("memories", "stops", "stop"), [
    # memories after the sections that are read; whether STOP follows
    (["Anna " * 20], True, 0.0),  # cut: not paid for its memory either
    (["Lima"], True, 0.6),  # at once: 0.6 * 0.6 ** 0
    (["x", "Lima"], True, 0.6),
    (["x", "Lima", "Lima"], True, 0.36),
    (["Lima", "x", "x"], True, 0.216),  # it has held the answer, whatever came of it
    (["Lima", "x", "x", "x"], False, 0.1296),  # without STOP the end of the document stops it
    (["x", "x", "x", "Lima"], False, 0.6),
    (["x", "Limabean"], True, 0.0),  # never, as a word
    ([], True, 0.0),
])  # fmt: skip
def test_the_reward_of_a_stop_falls_with_every_section_past_the_answer(
    codec, memories, stops, stop
):
    responses = [word for memory in memories for word in ("no", memory)]
    agent, done = play(codec, [*responses, *["STOP"] * stops, "\\boxed{Rome}"])
    own = agent.turn_rewards(done)
    assert len(own) == len(done.turns)
    for rewards in own:
        whole = all(len(memory) < 20 for memory in memories)
        assert rewards == {"stop": pytest.approx(stop), "calls": 0.5, "memories": 0.5 * whole}
    assert counted(agent, done)["unfinished"] == (not whole)


def test_an_answer_of_yes_is_not_looked_for_and_all_are_where_all_are_asked_for(codec):
    def stop(answers, memory, **fields):
        task = Task("t", "Who?", answers, TASK.text, **fields)
        agent, done = play(codec, ["no", memory, "STOP", "-"], task)
        return agent.turn_rewards(done)[0]["stop"]

    assert stop(("yes",), "yes") == 0.0
    asked = dict(dataset="ruler", kind="niah")
    assert stop(("Lima", "Rome"), "Lima", **asked) == 0.0
    assert stop(("Lima", "Rome"), "Lima, Rome", **asked) == pytest.approx(0.6)
    assert stop(("Lima", "Rome"), "Rome") == pytest.approx(0.6)


def test_every_sampled_token_of_every_turn_is_trained_and_early_stops_are_compared(codec):
    look, final = ["<recall>Otto</recall>", "Otto reached Lima."], "\\boxed{Lima}"
    trajectories = []
    for k, script in enumerate(([*look, "STOP", final], [*look, *["no", look[1]] * 3, final])):
        agent, done = play(codec, script)
        done.sample, done.reward = k, agent.reward(done)
        for turn, rewards in zip(done.turns, agent.turn_rewards(done), strict=True):
            turn.rewards = rewards
        trajectories.append(done)
    config = GRPOConfig(normalisation="mean", alpha=0.375, turns_per_trajectory=0)
    rows = training_rows([Group(TASK, trajectories)], config)
    turns = [turn for done in trajectories for turn in done.turns]
    assert [list(row.response_ids) for row in rows] == [turn.response_ids for turn in turns]
    # both are right; a stop of 0.6 in 4 turns, of 0.6 ** 4 in 9: less the mean of the 13
    assert [row.advantage for row in rows[:4]] == pytest.approx([0.625 * 0.4704 * 9 / 13] * 4)
    assert [row.advantage for row in rows[4:]] == pytest.approx([-0.625 * 0.4704 * 4 / 13] * 9)


# ---------------------------------------------------------------- demonstrations, rows, commands


def test_its_demonstrations_find_the_evidence_and_stop_there(codec):
    shown, saved = 0, 0
    for k in range(6):
        task = worlds.make_task(k, 6, "two_hop")
        agent = tiny.agent("infmem").on(codec)
        agent = agent.with_settings(plan_tokens=40)
        done = demonstration(agent, task)
        if done is None:  # the end of a section cuts the evidence
            continue
        assert agent.reward(done) == 1.0
        n = counted(agent, done)
        assert n["plan_fault"] == n["plan_silent"] == 0
        shown, saved = shown + 1, saved + n["saved"]
    assert shown >= 3 and saved > 0


def test_rows_rates_and_transcripts_of_an_evaluation_report_what_stopping_saves(codec, tmp_path):
    def script(prompt):
        if prompt.final:
            return "\\boxed{Lima}"
        return "Otto reached Lima." if prompt.section else (
            "STOP" if "Lima" in prompt.memory else "<recall>Otto</recall>")  # fmt: skip

    agent = InfMem(InfMemConfig(**SIZES))
    engine = ScriptedEngine(codec, script)
    (row,) = evaluate(engine, agent, [TASK], Sampling(), Cell("a", "", "", 4), tmp_path / "rows")
    assert row["em"] == 1.0 and row["document_tokens"] == 8 and row["model_calls"] == 4
    counts = row["counts"]
    assert (counts["unread"], counts["to_read"], counts["saved"]) == (3, 4, 24)
    # a plan is no section, and what it says no memory
    assert (row["sections"], row["held"]) == (1, [[1, 1]])
    assert row["memory"].strip() == "Otto reached Lima."
    assert row["memory_tokens"] == len(codec.encode("Otto reached Lima.")) and not row["memory_cut"]
    _, done = play(codec, script)
    shown = steps_of(record(done, agent))
    lines = [line for step in shown if not isinstance(step, str) for line in step.lines]
    assert [(line.label, line.text) for line in lines] == [("looks for", "Otto")]
    (step,) = shown
    assert (step.number, step.after.strip()) == (1, "Otto reached Lima.") and step.lines[0].before
    assert n_sections(record(done, agent)) == 1
