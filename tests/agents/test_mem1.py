"""MEM1: what a prompt still has of the turns before, what is read next, when it answers."""

from collections import Counter

import pytest
from conftest import counted, slots_of

from agents.mem1 import Mem1, Mem1Config
from commands.sft import demonstration
from config.options import GRPOConfig
from data import Task
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

SIZES = dict(chunk_tokens=8, memory_tokens=12, action_tokens=48, final_tokens=24)
SECTIONS = (  # of eight tokens
    "Nils reached Nice. Emil reached Cork.",
    "Boris toured Oslo. Rita reached Riga.",
    "Olga reached Graz. Max reached Milan.",
    "Anna joined Boris. Ida reached Rome.",
)
TASK = Task("t", "Where is Anna?", ("Oslo",), " ".join(SECTIONS))
HOPS = [
    "<update>Anna joined Boris.</update><recall>Boris</recall>",
    "<update>Anna joined Boris. Boris toured Oslo.</update><answer>Oslo</answer>",
    "\\boxed{Oslo}",
]


def play(codec, responses, task=TASK, **settings):
    agent, left = Mem1(Mem1Config(**SIZES | settings)), iter(responses)
    (done,) = rollout(ScriptedEngine(codec, lambda prompt: next(left)), agent, [(task, 0)])
    assert not done.error and not [*left], done.error
    return agent, done


# ---------------------------------------------------------------- what is read, kept and pruned


def test_it_reads_what_its_queries_find_and_answers_after_two_of_four_sections(codec):
    agent, done = play(codec, HOPS)
    first, second, final = (turn.prompt for turn in done.turns)
    question = TASK.question
    assert slots_of(first) == [SECTIONS[3], question, NO_MEMORY, question, "3"]
    assert slots_of(second) == [SECTIONS[1], question, "Anna joined Boris.", "Boris", "2"]
    state = "Anna joined Boris. Boris toured Oslo."
    assert slots_of(final) == [question, f"{state}\n\nAnswer: Oslo"] and final.final
    assert [turn.notes.read for turn in done.turns] == [(4,), (2,), ()]
    assert agent.reward(done) == 1.0 and agent.turn_rewards(done) is None
    assert counted(agent, done) == Counter(
        turns=2, no_state=0, memory_capped=0, queries=1, asked=2, hits=2,
        ends=1, stopped=1, to_read=4, unread=2, saved=16,
    )  # fmt: skip


def test_a_prompt_has_nothing_older_than_the_latest_state_query_and_find(codec):
    said = [("Ida.", "Nils"), ("Emil.", "Olga"), ("Max.", "Rita")]
    responses = [f"<update>{state}</update><recall>{query}</recall>" for state, query in said]
    agent, done = play(codec, [*responses, "<update>Rita.</update>", "\\boxed{Rome}"])
    # a prompt's slots are all that differs: section, question, state, query, turns left
    known = [(NO_MEMORY, TASK.question), *said]
    assert [slots_of(turn.prompt) for turn in done.turns[:4]] == [
        [SECTIONS[k], TASK.question, state, query, str(3 - n)]
        for n, (k, (state, query)) in enumerate(zip((3, 0, 2, 1), known, strict=True))
    ]
    assert slots_of(done.turns[-1].prompt) == [TASK.question, "Rita."]
    n = counted(agent, done)
    assert (n["stopped"], n["unread"], n["saved"], n["queries"]) == (0, 0, 0, 3)


def test_a_query_that_finds_nothing_unread_reads_on_in_order(codec):
    again = "<update>x</update><recall>Ida</recall>"  # in section 4, which is read first
    agent, done = play(codec, [again] * 4 + ["-"])
    assert [turn.notes.read for turn in done.turns[:4]] == [(4,), (1,), (2,), (3,)]
    n = counted(agent, done)
    assert (n["asked"], n["hits"], n["queries"]) == (4, 1, 4)


def test_several_pieces_come_in_reading_order_and_turns_are_limited(codec):
    silent = "<update>x</update>"
    agent, done = play(codec, [HOPS[0], silent, "-"], pieces_k=3, most_turns=2)
    first, second, _ = done.turns
    # one section matches the question; the query finds another one, and nothing else matches
    assert first.notes.read == (4,) and second.notes.read == (2,)
    assert agent.limits().shown == 12 + 48 + 2 * 8  # state, query and two more sections
    agent, done = play(codec, [silent, silent, "-"], pieces_k=3, most_turns=2)
    first, second, _ = done.turns
    assert first.notes.read == (4,) and second.notes.read == (1, 2, 3)
    expected = tuple(codec.encode(TASK.text)[:24])
    assert second.prompt.section.ids == expected  # their tokens, one after the other
    assert [slots_of(turn.prompt)[-1] for turn in (first, second)] == ["1", "0"]
    agent, done = play(codec, [silent, "-"], most_turns=1)
    n = counted(agent, done)
    assert (n["stopped"], n["unread"], n["saved"]) == (0, 3, 24)  # the limit, not the policy


# ---------------------------------------------------------------- malformed responses


@pytest.mark.parametrize(("response", "errors"), [
    ("no tags", {"no_update"}),
    ("", {"no_update"}),
    ("<update> </update>", {"empty_update"}),
    ("<update>never closed <recall>Nils</recall>", {"no_update"}),
    ("<answer> </answer>", {"no_update"}),
])  # fmt: skip
def test_a_response_without_a_state_keeps_the_last_one_and_is_counted(codec, response, errors):
    agent, done = play(codec, [HOPS[0], response, *["<update>x</update>"] * 2, "-"])
    after = done.turns[2].prompt
    assert after.memory.strip() == "Anna joined Boris."
    n = counted(agent, done)
    assert n["no_state"] == 1 and {name for name in n if name.startswith("error_")} == {
        f"error_{error}" for error in errors
    }


def test_an_empty_state_may_reset_the_memory_and_a_state_ends_at_its_cap(codec):
    rest = ["<update>x</update>"] * 2
    _, done = play(codec, [HOPS[0], "no tags", *rest, "-"], empty="placeholder")
    assert done.turns[2].prompt.memory == NO_MEMORY
    said = "Anna joined Boris."  # four tokens
    agent, done = play(codec, [f"<update>{' '.join([said] * 5)}</update><answer>x</answer>", "-"])
    assert slots_of(done.turns[1].prompt)[1].split("\n")[0] == " ".join([said] * 3)
    assert counted(agent, done)["memory_capped"] == 1


def test_thoughts_hold_neither_state_nor_answer(codec):
    thought = "<think><update>y</update><answer>Rome</answer></think>"
    _, done = play(codec, [thought + HOPS[0], *HOPS[1:]])
    assert done.turns[1].prompt.memory.strip() == "Anna joined Boris." and len(done.turns) == 3


# ---------------------------------------------------------------- rewards, what is trained


def test_the_reward_is_the_exact_match_and_form_earns_nothing(codec):
    agent, done = play(codec, [*HOPS[:2], "\\boxed{Rome}"])
    assert agent.reward(done) == 0.0
    agent, done = play(codec, ["?", "?", "?", "?", "\\boxed{Oslo}"])
    assert agent.reward(done) == 1.0
    task = Task("t", "Who?", ("Oslo", "Riga"), TASK.text, dataset="ruler", kind="niah")
    agent, done = play(codec, ["<answer>Oslo; Riga</answer>", "\\boxed{Oslo}"], task)
    assert agent.reward(done) == 0.5  # of two objectives one


def test_every_sampled_token_is_trained_and_nothing_that_was_found(codec):
    trajectories = []
    for k, responses in enumerate((HOPS, [*HOPS[:2], "\\boxed{Rome}"])):
        agent, done = play(codec, responses)
        done.sample, done.reward = k, agent.reward(done)
        trajectories.append(done)
    config = GRPOConfig(normalisation="mean", turns_per_trajectory=0)
    rows = training_rows([Group(TASK, trajectories)], config)
    turns = [turn for done in trajectories for turn in done.turns]
    assert [list(row.response_ids) for row in rows] == [turn.response_ids for turn in turns]
    assert [list(row.prompt_ids) for row in rows] == [turn.prompt_ids for turn in turns]
    assert [row.advantage for row in rows] == [0.5] * 3 + [-0.5] * 3


# ---------------------------------------------------------------- demonstrations, rows, commands


def test_its_demonstrations_follow_the_evidence_and_answer(codec):
    shown = saved = 0
    for k in range(6):
        agent = tiny.agent("mem1", action_tokens=64).on(codec)
        done = demonstration(agent, worlds.make_task(k, 6, "two_hop"))
        if done is None:  # the end of a section cuts the evidence
            continue
        n = counted(agent, done)
        assert agent.reward(done) == 1.0 and n["no_state"] == n["memory_capped"] == 0
        shown, saved = shown + 1, saved + n["saved"]
    assert shown >= 3 and saved > 0


def test_rows_and_transcripts_of_an_evaluation(codec, tmp_path):
    def script(prompt):
        if prompt.final:
            return HOPS[2]
        return HOPS[0] if "Ida" in prompt.section else HOPS[1]

    agent = Mem1(Mem1Config(**SIZES))
    engine = ScriptedEngine(codec, script)
    (row,) = evaluate(engine, agent, [TASK], Sampling(), Cell("a", "", "", 4), tmp_path / "rows")
    assert row["em"] == 1.0 and (row["sections"], row["document_tokens"]) == (2, 16)
    assert (row["counts"]["unread"], row["counts"]["saved"]) == (2, 16)
    _, done = play(codec, HOPS)
    steps = steps_of(record(done, agent))
    assert [line.text for step in steps for line in step.lines] == ["Boris"]
    assert [step.section.strip() for step in steps] == [SECTIONS[3], SECTIONS[1]]
