"""Memory-R1: four operations on a store, answers that distil it, and the two stages of training."""

import pytest
from conftest import counted
from test_memupdate import call, create

from agents.memoryr1 import MemoryR1, MemoryR1Config
from agents.store import Entry, Store
from config.errors import UserError
from config.options import GRPOConfig
from data import Task
from dev import keeper
from engines.scripted import ScriptedEngine
from grpo import training_rows
from memagent import Group
from rollout import rollout
from tasks.conversations import Memory, Probe
from tasks.episodes import Episode
from tokens.codec import Codec

SIZES = dict(chunk_tokens=8, final_tokens=64, call_tokens=200)
SECTIONS = (  # of eight tokens
    "Anna reached Rome. Ida reached Oslo.",
    "Anna reached Lima. Max reached Milan.",
    "Nils reached Nice. Emil reached Cork.",
    "Olga reached Graz. Rita reached Riga.",
)
TASK = Task("t", "Where is Anna?", ("Lima",), " ".join(SECTIONS))
EDITS = [
    create("Anna reached Rome.") + create("Ida reached Oslo."),
    call("manage_memory", operation="update", content="Anna reached Lima.", memory_id="m1"),
    call("delete_memory", memory_id="m2"),
    call("manage_memory", operation="noop"),
]
PROBES = (
    Probe("p1", "Where is Anna?", ("Lima",), 0),
    Probe("p2", "Where is Ida?", ("The Oslo",), 0),
)
MEMORIES = tuple(
    Memory(text, None, f"2024-01-0{k}", k, (f"S{k}",))
    for k, text in enumerate(("Anna reached Lima.", "Ida reached Oslo.", "Max reached Milan."), 1)
)
BUILT = Episode("built", "", (), text=TASK.text, probes=PROBES)
GIVEN = Episode("given", "", (), text="-", memories=MEMORIES, probes=PROBES)


@pytest.fixture(scope="module")
def codec():
    return Codec(keeper.make_tokenizer())


def agent_of(**settings):
    return MemoryR1(MemoryR1Config(**SIZES | settings))


def play(codec, agent, task, edits=(), answer=lambda prompt: "-", n=1):
    """Run the agent on a list of edits; other prompts are answered by a function."""

    def script(prompt):
        return edits[turns.pop(0)] if "<section>" in prompt.text else answer(prompt)

    done = []
    for k in range(n):
        turns = [*range(len(edits))]
        done += rollout(ScriptedEngine(codec, script), agent, [(task, k)])
    for trajectory in done:
        assert not trajectory.error, trajectory.error
        trajectory.reward = agent.reward(trajectory)
    return done


def place_of(prompt) -> str:
    """Answer with the place of the first memory about whom the question names."""
    question = next(piece for piece, constant in prompt.pieces[::-1] if not constant)
    return f"\\boxed{{{keeper.answer(question, prompt.memory).split('{')[-1].rstrip('}')}}}"


# ---------------------------------------------------------------- the manager


def test_it_adds_updates_deletes_and_leaves_one_turn_a_section(codec):
    agent = agent_of()
    copies = "Anna reached Lima.\n\\boxed{Lima}"
    (done,) = play(codec, agent, TASK, EDITS, lambda prompt: copies)
    assert [turn.prompt.section.strip() for turn in done.turns[:4]] == [*SECTIONS]
    assert [turn.prompt.memory.strip() for turn in done.turns] == [
        "No memories are stored.",
        "[m1] Anna reached Rome.\n[m2] Ida reached Oslo.",
        "[m1] Anna reached Lima.\n[m2] Ida reached Oslo.",
        "[m1] Anna reached Lima.",
        "Anna reached Lima.",
    ]
    n = counted(agent, done)
    names = ("op_create", "op_update", "op_delete_memory", "op_noop", "edit_turns", "valid_calls")
    assert [n[name] for name in names] == [2, 1, 1, 1, 4, 5]
    assert done.reward == 1.0 and (n["shown"], n["copied"]) == (1, 1)
    # the answer is the policy's before training: only the edits are trained
    assert [turn.trained for turn in done.turns] == [True] * 4 + [False]


def test_it_has_the_two_tools_of_its_four_operations_alone(codec):
    agent = agent_of()
    search = call("search_memory", query="Anna") + call("merge_memory", memory_ids=["m1", "m2"])
    (done,) = play(codec, agent, TASK, [search, "no call", '<tool_call>{"name"', create("x")])
    shown = done.turns[0].prompt.text
    for tool, there in (("manage_memory", True), ("delete_memory", True), ("search_memory", False),
                        ("sample_memory", False), ("split_memory", False)):  # fmt: skip
        assert (tool in shown) is there
    # what cannot be run or read leaves the store as it is, and is counted
    assert [turn.prompt.memory.strip() for turn in done.turns[:4]] == [
        "No memories are stored."
    ] * 4
    n = counted(agent, done)
    assert (n["error_unknown_tool"], n["error_cut"], n["stop_no_call"]) == (2, 1, 1)
    assert (n["calls"], n["valid_calls"], n["op_create"]) == (4, 1, 1)


@pytest.mark.parametrize(("edits", "reward", "after"), [
    (EDITS, 0.5, 0.5),  # Anna is right, Ida was deleted
    ([*EDITS[:2], "", ""], 1.0, 1.0),  # Oslo is The Oslo by the exact match
    (["", "", "", ""], 0.0, 0.0),
    ([EDITS[0], "", "", ""], 0.5, 0.5),  # an update that was missed: Rome
])  # fmt: skip
def test_the_manager_is_paid_for_exact_matches_from_its_store_and_nothing_else(
    codec, edits, reward, after
):
    agent = agent_of()
    (done,) = play(codec, agent, BUILT, edits, place_of)
    parts = next(t.notes.parts for t in done.turns[::-1] if t.notes.parts)
    assert parts["score_before"] == 0.0 and parts["score_after"] == after
    assert done.reward == reward and agent.turn_rewards(done) is None


# ---------------------------------------------------------------- the answerer


def test_an_answer_is_made_from_equally_many_memories_of_each_speaker():
    entries = [
        Entry("m1", "Anna sings in a choir.", speaker="Ann"),
        Entry("m2", "Anna sings.", speaker="Ann"),
        Entry("m3", "Anna has a dog.", speaker="Bob"),
        Entry("m4", "A dog barks.", speaker="Bob"),
    ]

    def found(k, **settings):
        agent = agent_of(answer_k=k, **settings)
        return [e.id for e in agent.context(Store(entries).snapshot(), "What does Anna sings?")]

    assert found(2) == ["m2", "m3"] and found(4) == ["m2", "m1", "m3"]
    entries = [Entry(e.id, e.text, speaker="Ann") for e in entries]
    assert found(2) == ["m2", "m1"]  # of one speaker alone the best
    assert MemoryR1Config().answer_k == 60


def test_what_an_answer_copies_of_the_memories_it_is_shown_is_counted(codec):
    agent = agent_of(stage="answerer")
    line = "2024-01-01 Anna reached Lima."
    (done,) = play(codec, agent, GIVEN, answer=lambda prompt: f"{line}\n\\boxed{{Lima}}")
    for turn in done.turns:
        n = agent.count(GIVEN, turn)
        shown = len(turn.prompt.memory.splitlines())
        assert (n["shown"], n["copied"]) == (shown, turn.prompt.memory.count(line)) and shown >= 1
    assert sum(agent.count(GIVEN, turn)["copied"] for turn in done.turns) >= 1


def test_the_answerer_is_trained_on_every_answer_by_its_own_exact_match(codec):
    agent = agent_of(stage="answerer")
    trajectories = play(codec, agent, GIVEN, answer=place_of)
    wrong = play(codec, agent, GIVEN, answer=lambda prompt: "\\boxed{Lima}")
    trajectories = [*trajectories, *wrong]
    own = [agent.turn_rewards(done) for done in trajectories]
    assert own == [[{"right": 1.0}] * 2, [{"right": 1.0}, {"right": 0.0}]]
    assert [done.reward for done in trajectories] == [1.0, 0.5]
    for k, (done, rewards) in enumerate(zip(trajectories, own, strict=True)):
        done.sample = k
        assert [turn.prompt.place for turn in done.turns] == ["p1", "p2"]
        assert [turn.trained for turn in done.turns] == [True, True]
        for turn, reward in zip(done.turns, rewards, strict=True):
            turn.rewards = reward
    config = GRPOConfig(normalisation="mean", alpha=0.0, turns_per_trajectory=0)
    rows = training_rows([Group(GIVEN, trajectories)], config)
    turns = [turn for done in trajectories for turn in done.turns]
    assert [list(row.response_ids) for row in rows] == [turn.response_ids for turn in turns]
    assert [row.advantage for row in rows] == [0.0, 0.5, 0.0, -0.5]  # question by question


def test_members_of_a_group_answer_side_by_side_each_for_itself(codec):
    agent = agent_of(stage="answerer")
    said = iter(f"\\boxed{{{name}}}" for name in ("Lima", "Rome", "Riga", "Oslo", "Nice", "Cork"))
    engine = ScriptedEngine(codec, lambda prompt: next(said), per_step=2)
    done = [*rollout(engine, agent, [(GIVEN, k) for k in range(3)])]
    assert [len(trajectory.turns) for trajectory in done] == [2, 2, 2]
    assert len({str(turn.response) for trajectory in done for turn in trajectory.turns}) == 6


def test_the_answerer_needs_memories_that_are_given(codec):
    agent = agent_of(stage="answerer").on(codec)
    agent.check(GIVEN)
    with pytest.raises(UserError, match="built gives the answerer no memories"):
        agent.check(BUILT)
    agent_of().on(codec).check(BUILT)


def test_where_the_response_is_the_answer_nothing_is_copied():
    assert "copy" in agent_of(form="boxed").wording("answer").head
    assert "copy" not in agent_of(form="plain").wording("answer").head
