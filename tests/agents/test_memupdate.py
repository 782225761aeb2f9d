"""The agent that edits a store: what is sampled, when it stops, what it is paid, who is asked."""

import itertools
import json
import random
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from conftest import random_policy

from agents import memupdate, tools
from agents.store import Entry, Store
from config.options import GRPOConfig
from data import same_answer
from embedded import keeper
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from grpo import GRPO, advantages_of, training_rows
from memagent import Finish, Group
from models.logprobs import logprobs, pack
from report.metrics import describe
from rollout import Sampling, rollout
from tasks import ledger
from tasks.conversations import Memory, Probe
from tasks.episodes import Episode, questions_of
from tokens.codec import Codec


@pytest.fixture(scope="module")
def codec():
    return Codec(keeper.make_tokenizer())


@pytest.fixture(scope="module")
def chat_codec():
    """A tokenizer with roles and tools, whose model writes Hermes calls."""
    tokenizer = keeper.make_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        '{# <tool_call>{"name": "n", "arguments": {}}</tool_call> #}'
    )
    return Codec(tokenizer)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def create(text):
    return call("manage_memory", operation="create", content=text)


def reads(prompt):
    """Answer as a reader of the memories would: the place of the first entry about the person."""
    question = next(piece for piece, constant in prompt.pieces[::-1] if not constant)
    return keeper.answer(question, prompt.memory)


def play(codec, agent, task, script, n=1):
    """Run an agent on scripted calls; frozen prompts are answered from the memories they show."""

    def answer(prompt):
        return reads(prompt) if prompt.frozen else script(prompt)

    engine = ScriptedEngine(codec, answer, per_step=3)
    done = list(rollout(engine, agent, [(task, k) for k in range(n)]))
    for trajectory in done:
        assert not trajectory.error, trajectory.error
        trajectory.reward = agent.reward(trajectory)
    return sorted(done, key=lambda t: t.sample)


def noted(trajectory, phase="edit"):
    return [t.notes for t in trajectory.turns if t.notes is not None and t.notes.phase == phase]


def parts(trajectory):
    return next(n.parts for n in noted(trajectory)[::-1] if n.parts)


TASK = ledger.make_ledger(3, 8)
MEMORIES = tuple(
    Memory(f"{person} reached {place}.", None, f"2024-01-0{k}", k, (f"S{k}",))
    for k, (person, place) in enumerate([("Anna", "Oslo"), ("Boris", "Lima"), ("Carl", "Rome")], 1)
)
PROBES = (
    Probe("p1", "Where is Anna?", ("Oslo",), 0),
    Probe("p2", "Where is Dora?", ("Genoa",), 0),
)
REFINED = Episode("refined", "", (), text="-", memories=MEMORIES, probes=PROBES)


def editor(**settings):
    return keeper.agent(**settings)


def refiner(**settings):
    """The default, on a store that is there already."""
    own = dict(
        mode="refine",
        budget="soft",
        budget_entries=0,
        max_turns=30,
        max_calls=4,
        format_weight=0.05,
        call_tokens=200,
        show="relevant",
        history="bounded",
        templates="",
    )
    return editor(**(own | settings))  # fmt: skip


# ---------------------------------------------------------------- episodes


def test_a_perfect_editor_is_right_about_everybody_and_the_newest_sentences_are_not(codec):
    rng = random.Random(0)
    right, newest = [], []
    for k in range(40):
        task = ledger.make_ledger(k, 12)
        (done,) = play(codec, editor(), task, lambda p: keeper.demonstrate(rng, p, 1.0))
        right.append(parts(done)["score_after"])
        assert parts(done)["score_before"] == 0 and parts(done)["valid"] == 1
        assert noted(done)[-1].entries <= keeper.ENTRIES
        last = " ".join(m.text for m in task.memories[-6:][::-1])
        newest += [same_answer(keeper.answer(p.question, last)[-40:].partition("{ ")[2][:-1],
                               p.answers) for p in task.probes]  # fmt: skip
    assert sum(right) / len(right) == 1.0
    assert 0.5 < sum(newest) / len(newest) < 0.7


def test_sessions_are_read_in_order_with_their_dates_and_new_entries_have_them(codec):
    (done,) = play(codec, editor(), TASK, lambda p: create(f"{p.section[:10]} was a day."))
    prompts = [turn.prompt for turn in done.turns if not turn.prompt.frozen]
    sections = [p.section.replace("\n ", "\n") for p in prompts]  # a blank before a first word
    assert sections == [f"{s.when}\n{s.text}" for s in TASK.sessions]
    assert prompts[1].memory == f"[m1] 2024-01-01 {TASK.sessions[0].date} was a day."
    # hard budget of six entries: the seventh is refused, and the policy is told
    last = noted(done)[-1]
    assert last.ops[-1]["code"] == "full" and "6 of 6 memories" in last.ops[-1]["message"]


@pytest.mark.parametrize(
    ("settings", "says", "stop", "ops"),
    [
        (dict(max_turns=5), "", "no_call", 0),
        (dict(max_turns=5, max_ops=3), create("a") + create("b"), "ops", 3),
        (dict(max_turns=2, max_calls=1), create("a"), "turns", 2),
        (dict(max_turns=9, max_invalid=3), "<tool_call>{", "invalid", 3),
    ],
)
def test_why_editing_stops(codec, settings, says, stop, ops):
    agent = editor(call_tokens=400, budget="none", **settings)
    task = replace(TASK, sessions=TASK.sessions[:1])
    (done,) = play(codec, agent, task, lambda p: says)
    notes = noted(done)
    assert [n.stop for n in notes][-1] == stop and not any(n.stop for n in notes[:-1])
    assert sum(len(n.ops) for n in notes) == ops
    assert agent.count(task, done.turns[len(notes) - 1])[f"stop_{stop}"] == 1


def test_the_calls_of_the_last_turn_run_and_those_past_the_limit_get_an_error_each(codec):
    agent = editor(call_tokens=400, max_turns=1, max_calls=2, budget="none")
    task = replace(TASK, sessions=TASK.sessions[:1])
    says = create("a") + create("b") + create("c")
    (done,) = play(codec, agent, task, lambda p: says)
    (notes,) = noted(done)
    assert [op["ok"] for op in notes.ops] == [True, True, False] and notes.entries == 2
    assert notes.ops[2]["code"] == "too_many"


def test_a_conversation_that_fills_the_window_stops_and_is_paid_all_the_same(codec):
    agent = refiner(history="append", call_tokens=120)
    engine = ScriptedEngine(codec, lambda p: reads(p) if p.frozen else call("sample_memory", k=3))
    first = next(agent.on(codec).run(REFINED))
    engine.window = len(first.ids(codec)) + 600
    (done,) = rollout(engine, agent, [(REFINED, 0)])
    assert not done.error and noted(done)[-1].stop == "context"
    assert agent.reward(done) == pytest.approx(0.05)  # every call was valid, nothing was won


def test_members_of_a_group_share_the_start_and_nothing_else(codec):
    says = {}

    def script(prompt):
        said = (
            ""
            if "[m4]" in prompt.memory
            else create(f"Dora reached {says.setdefault(len(says), 0) or 'Genoa'}.")
        )
        return said

    done = play(codec, refiner(), REFINED, script, n=4)
    for trajectory in done:
        first, *_ = [t for t in trajectory.turns if t.notes and t.notes.phase == "edit"]
        assert "[m4]" not in first.prompt.memory and "[m3]" in first.prompt.memory
        assert noted(trajectory)[-1].entries == 4  # one more, not four


def test_sampling_is_the_same_for_the_whole_group(codec):
    done = play(codec, refiner(max_turns=2), REFINED, lambda p: call("sample_memory", k=2), n=3)
    replies = [[op["message"] for n in noted(t) for op in n.ops] for t in done]
    assert replies[0] == replies[1] == replies[2] and len(replies[0]) == 2


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("history", ["bounded", "append"])
def test_exactly_the_sampled_tokens_are_trained_and_a_growing_chat_is_computed_once(
    chat_codec, history
):
    """The policy is random, so most calls are faults; replies are templated, never trained."""
    policy = random_policy(chat_codec)
    agent = editor(history=history, max_turns=3, max_invalid=9, call_tokens=12, templates="")
    agent = agent.on(chat_codec)
    task = replace(TASK, sessions=TASK.sessions[:2])
    engine = TransformersEngine(policy, chat_codec)
    done = list(rollout(engine, agent, [(task, k) for k in range(3)], Sampling(1.0), seed=1))
    for k, trajectory in enumerate(done):
        trajectory.reward = float(k)
        assert any(t.prompt.frozen for t in trajectory.turns)
    rows = training_rows([Group(task, done)], GRPOConfig(without_signal="keep"))
    sampled = [t for d in done for t in d.turns if not t.prompt.frozen]
    assert [r.response_ids for r in rows] == [t.response_ids for t in sampled]
    # a step's metrics are of these turns: an answer of the frozen policy, greedy and often cut, is
    # neither its surprisal nor its memory
    metrics = describe([Group(task, done)], {})
    written = sum(len(turn.response_ids) for turn in sampled)
    assert metrics["written_tokens"] == written
    assert metrics["memory_tokens"] == pytest.approx(written / len(sampled))
    assert metrics["memory_cut"] == fmean(turn.finish is Finish.LENGTH for turn in sampled)
    logprobs_sampled = [lp for turn in sampled for lp in turn.logprobs]
    assert metrics["surprisal"] == pytest.approx(-fmean(logprobs_sampled))
    if history == "append":
        for trajectory in done:
            edits = [t for t in trajectory.turns if not t.prompt.frozen]
            for before, turn in itertools.pairwise(edits):
                whole = before.prompt_ids + before.response_ids
                assert turn.prompt_ids[: len(whole)] == whole  # as sampled, never encoded again
    (batch,) = pack(rows, 1 << 20)
    ordered = [rows[i] for i in batch.index]
    packed = logprobs(policy, batch)
    packed.sum().backward()
    gradient = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    alone = []
    for row in ordered:  # one turn at a time, by the library
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        scores = policy(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        alone.append(scores.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0])
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)
    torch.cat(alone).sum().backward()
    for one, other in zip(gradient, [p.grad for p in policy.parameters() if p.grad is not None],
                          strict=True):  # fmt: skip
        assert torch.allclose(one, other, atol=1e-5 * max(1.0, other.abs().max().item()))


def test_frozen_questions_are_answered_greedily_and_known_answers_are_not_asked_again(codec):
    asked = []

    class Listening(ScriptedEngine):
        def add(self, prompt, sampling=Sampling(), seed=0):
            if prompt.frozen:
                asked.append((prompt.memory, prompt.text))
                assert sampling.temperature == 0
            else:
                assert sampling.temperature == 0.7
            return ScriptedEngine.add(self, prompt, sampling, seed)

    engine = Listening(codec, lambda p: reads(p) if p.frozen else "", per_step=1)
    agent = refiner().on(codec, None)
    list(rollout(engine, agent, [(REFINED, k) for k in range(4)], Sampling(0.7), in_flight=1))
    assert len(asked) == len(REFINED.probes)  # nothing was changed: one answer to each probe


# ---------------------------------------------------------------- rewards


def worth(codec, script, agent=None):
    (done,) = play(codec, agent or refiner(), REFINED, script)
    return done.reward, parts(done)


def once(*calls):
    """Make calls in the first turn, and none in the second."""
    return lambda prompt: "" if "None yet." not in prompt.text else "".join(calls)


def test_the_reward_is_what_the_probes_have_won_and_its_parts(codec):
    nothing, idle = worth(codec, lambda p: "")
    assert nothing == 0 and idle["valid"] == 0 and idle["score_before"] == 0.5
    honest, won = worth(codec, once(create("Dora reached Genoa.")))
    start = Store(memupdate.entries_of(MEMORIES)).snapshot()
    agent = refiner().on(codec)
    before = agent.tokens_of(start)
    after = before + agent.measure("[m4] Dora reached Genoa.")
    over = 0.1 * (after / before - 1)
    assert won["score_after"] == 1.0 and won["delta"] == 0.5
    assert won["size"] == pytest.approx(-over)
    assert honest == pytest.approx(0.5 + 0.05 - over)


@pytest.mark.parametrize(
    "calls",
    [
        [call("delete_memory", memory_id=f"m{k}") for k in (1, 2, 3)],  # wipe
        [call("delete_memory", memory_id=f"m{k}") for k in (1, 2, 3)]
        + [create("January February 1 2 3 2023 yes no blue red Rome Lima")],  # a cheat sheet
        [create("Where is Dora? Where is Anna?")],  # quotes the probes
        ["<tool_call>{", "<tool_call>[]</tool_call>"],  # invalid calls alone
        [call("search_memory", query="Dora")] * 4,  # looks, and changes nothing
        [call("manage_memory", operation="noop")] * 4,
    ],
    ids=["wipe", "cheat sheet", "quotes", "invalid", "search", "noop"],
)
def test_no_exploit_earns_more_than_doing_nothing_and_the_term_for_valid_calls(codec, calls):
    reward, won = worth(codec, once(*calls))
    assert reward <= 0.05 + 1e-9
    assert won["delta"] <= 0
    if "Error" in str(calls) or calls[0] == "<tool_call>{":
        assert reward <= 0


def test_with_credit_by_turn_the_turns_sum_up_to_what_the_episode_has_won(codec):
    agent = refiner(turn_credit=True)
    said = iter([create("Dora reached Genoa."), call("delete_memory", memory_id="m1"), ""])
    (done,) = play(codec, agent, REFINED, lambda p: next(said))
    rewards = agent.turn_rewards(done)
    gains = [r["gain"] for r in rewards if r]
    assert gains == [0.5, -0.5, 0.0] and sum(gains) == parts(done)["delta"]
    for turn, of_turn in zip(done.turns, rewards, strict=True):
        turn.rewards = of_turn
        assert bool(of_turn) == (not turn.prompt.frozen)
    assert agent.with_settings(turn_credit=False).turn_rewards(done) is None
    group = Group(REFINED, [done, done])
    assert len(advantages_of(group, GRPOConfig())[0]) == len(done.turns)


def test_a_turn_pays_for_its_own_failed_calls_and_for_no_others(codec):
    bad = call("delete_memory", memory_id="m9")
    said = iter([create("Dora reached Genoa.") + bad, bad, create("Emil reached Paris."), ""])
    (done,) = play(codec, refiner(turn_format=True), REFINED, lambda p: next(said))
    rewards = refiner(turn_format=True).turn_rewards(done)
    assert [r["failed"] for r in rewards if r] == [-0.5, -1.0, 0.0, 0.0]
    both = refiner(turn_format=True, turn_credit=True)
    said = iter([bad, ""])
    (done,) = play(codec, both, REFINED, lambda p: next(said))
    assert both.turn_rewards(done)[:2] == [{"gain": 0, "failed": -1}, {"gain": 0, "failed": 0}]


def test_what_has_changed_an_answer_is_noted_beside_it(codec):
    calls = create("Dora reached Genoa.") + call("delete_memory", memory_id="m2")
    (done,) = play(codec, refiner(), REFINED, once(calls))
    anna, dora = noted(done)[-1].answers
    assert (anna["before"], anna["after"], anna["won"]) == ("Oslo", "Oslo", 0.0)
    assert anna["found_before"] == anna["found_after"] and not anna["caused"]
    assert (dora["expected"], dora["before"], dora["after"]) == ("Genoa", "unknown", "Genoa")
    assert dora["won"] == 1.0 and any("Genoa" in line for line in dora["found_after"])
    assert not any("Genoa" in line for line in dora["found_before"])
    ops = [op for notes in noted(done) for op in notes.ops]
    assert ops[0]["message"] in dora["caused"]


def test_every_part_of_the_reward_is_kept_apart(codec):
    probes = (
        Probe("p1", "Where is Anna?", ("Oslo",), 1),
        Probe("p2", "Where is Dora?", ("Genoa",), 2),
        Probe("p3", "Where is Carl?", ("Rome",), 2),
    )
    task = replace(REFINED, probes=probes)
    calls = create("Dora reached Genoa.") + call("delete_memory", memory_id="m3")
    (done,) = play(codec, refiner(), task, once(calls))
    won = parts(done)
    assert (won["delta_1"], won["delta_2"]) == (0.0, 0.0)  # one of category 2 won, one lost
    assert won["retained"] == 0.5  # of the two that were right at the start
    agent = refiner().on(codec)
    assert won["tokens_before"] == agent.tokens_of(Store(memupdate.entries_of(MEMORIES)).snapshot())
    counts = agent.count(task, next(t for t in done.turns if t.notes.ops))
    assert counts["op_create"] == 1 and counts["op_delete_memory"] == 1


# the vectors of the specification: (entries, characters) before and after -> efficiency
VECTORS = [
    ((50, 4000), (50, 4000), 1.0), ((184, 14720), (184, 14720), 0.16),
    ((254, 20320), (254, 20320), 0.1), ((250, 20000), (250, 20000), 0.1),
    ((184, 14720), (185, 14800), 0.1496), ((184, 14720), (100, 8000), 0.8),
    ((184, 14720), (100, 9600), 0.96), ((250, 20000), (100, 8000), 0.8),
    ((250, 20000), (100, 20000), 0.96), ((50, 4000), (0, 0), 0.1), ((0, 0), (1, 80), 0.8),
    ((0, 0), (50, 4000), 0.8), ((50, 4000), (49, 4000), 1.0102), ((50, 4000), (52, 4001), 0.9425),
    ((50, 4000), (100, 8000), 0.8), ((50, 4000), (25, 4000), 0.96), ((50, 4000), (100, 4000), 0.4),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "value"), VECTORS)
def test_the_efficiency_of_the_documented_formula(old, new, value):
    assert memupdate.efficiency(old, new) == pytest.approx(value, abs=6e-5)


def test_the_shared_words_of_the_documented_formula():
    score, nothing = memupdate.overlap_score, "No relevant information found."
    assert score("Oslo", memupdate.found([], "Where?")) == 0.1
    assert score("", "anything") == 0.5
    assert score("No relevant information found.", memupdate.found([], "Where?")) == 1.0
    entries = [Entry("m1", "Anna is in Oslo."), Entry("m2", "It rained.")]
    context = memupdate.found(entries, "Where is Anna ?")
    assert context == "Memory: Anna is in Oslo." and nothing not in context
    assert score("Oslo", context) == 0.1 and score("Oslo.", context) == 1.0  # glued punctuation


def test_compat_pays_an_insertion_and_nothing_for_looking(codec):
    agent = refiner(pay="compat")
    gained, won = worth(codec, once(create("Where is Dora? Genoa")), agent)
    # Genoa is found now: from .1 to 1, in one of two probes
    assert won["delta"] == pytest.approx(0.45) and gained == pytest.approx(0.45 * won["efficiency"])
    looked, _ = worth(codec, once(call("search_memory", query="Dora")), agent)
    assert looked == 0


def test_a_visible_question_is_shown_and_paid_for_beside_the_others(codec):
    seen = []

    def script(prompt):
        seen.append(prompt.text)
        return once(create("Dora reached Genoa."))(prompt)

    _, won = worth(codec, script, refiner(target="visible"))
    assert all("Where is Anna?" in text and "Where is Dora?" not in text for text in seen)
    assert won["delta"] == 0.0 + 0.5  # the first probe has won nothing, all of them half
    _, won = worth(codec, once(call("delete_memory", memory_id="m1")),
                        refiner(target="visible"))  # fmt: skip
    assert won["delta"] == -1.0 - 0.5


def test_a_growing_conversation_says_what_the_last_calls_have_brought(chat_codec):
    texts = []

    def script(prompt):
        texts.append((prompt.role, prompt.text))
        return create(f"entry {len(texts)}")

    agent = editor(history="append", max_turns=2, call_tokens=200, budget="none", templates="")
    task = replace(TASK, sessions=TASK.sessions[:2])
    play(chat_codec, agent, task, script)
    assert [role for role, _ in texts] == ["user", "tool", "user", "tool"]
    assert texts[1][1].strip() == "Created m1." and texts[3][1].strip() == "Created m3."
    assert texts[2][1].strip().startswith("Created m2.") and "2024-01-02" in texts[2][1]


# ---------------------------------------------------------------- questions


def test_a_store_serves_all_questions_about_its_sessions(codec):
    tasks = list(questions_of(TASK, TASK.probes))
    edits = []

    def script(prompt):
        if prompt.frozen:
            return reads(prompt)
        edits.append(prompt.section)
        return keeper.demonstrate(random.Random(0), prompt, 1.0)

    engine, agent = ScriptedEngine(codec, script), editor().on(codec)
    done = list(rollout(engine, agent, ((t, 0) for t in tasks), in_flight=1))
    assert len(edits) == len(TASK.sessions)  # read once
    assert [agent.reward(t) for t in done] == [1.0] * len(tasks)
    assert [len(t.turns) for t in done[1:]] == [1] * (len(tasks) - 1)


def test_every_tool_of_the_agent_is_there_and_an_ablation_takes_some_away(codec):
    assert set(memupdate.TOOLS) == set(tools.TOOLS)
    agent = editor(without=("delete_memory", "update"), call_tokens=400)
    task = replace(TASK, sessions=TASK.sessions[:1])
    update = call("manage_memory", operation="update", content="b", memory_id="m1")
    says = create("a") + update + call("delete_memory", memory_id="m1")
    (done,) = play(codec, agent, task, lambda p: says)
    assert [op["code"] for op in noted(done)[0].ops] == ["", "refused", "unknown_tool"]


def test_one_step_of_grpo_trains_on_episodes(codec):
    config = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=4, without_signal="keep")
    policy = random_policy(codec)
    agent = editor(call_tokens=8)
    engine = TransformersEngine(policy, codec)
    module = GRPO(policy, engine, agent, ledger.LedgerTasks((6,), 0), config)
    groups = module.sample_groups(module.tasks.batch(0, 0, 2), 0)
    assert len(groups) == 2 and all(len(g.trajectories) == 4 for g in groups)
    assert all(t.reward == parts(t)["reward"] for g in groups for t in g.trajectories)
