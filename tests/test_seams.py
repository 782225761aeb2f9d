"""The seams of the agent interface, each with a small agent of its own: what the systems to come
need."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import random_policy

from agents import find
from commands import train
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from data import Task
from embedded import tiny
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from eval import evaluate
from grpo import advantages_of, training_rows
from memagent import Agent, Group, Line, MemAgent, MemAgentConfig, ReadConfig
from models.load import with_lora
from models.logprobs import logprobs, pack
from report.records import record
from report.rows import Cell
from report.transcripts import steps_of
from rollout import AgentError, Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

CONFIG = ReadConfig(chunk_tokens=24, memory_tokens=6, final_tokens=6)
CHATML = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool['name'] }} {% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor "
    "%}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def chat_codec():
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = CHATML
    return Codec(tokenizer)


def task(k=0):
    return worlds.make_task(k, 2, "one_fact")


def jobs(n=1, group=4):
    return [(task(k), g) for k in range(n) for g in range(group)]


class Conversation(Agent):
    """Goes on in one conversation: each section is a message after the very tokens of the last
    turn."""

    prompts = {"first": "{problem} {section}", "next": "{section}", "last": "{answer}"}

    def run(self, task):
        turn = None
        for section in self.sections(task):
            name = "next" if turn else "first"
            prompt = self.prompt(name, 6, problem=task.question, section=section)
            turn = yield replace(prompt, after=turn)
        yield replace(self.prompt("last", 6, final=True), after=turn, role="tool")


def test_a_conversation_goes_on_from_the_very_tokens_and_the_trie_computes_them_once(chat_codec):
    policy = random_policy(chat_codec)
    engine = TransformersEngine(policy, chat_codec)
    done = list(rollout(engine, Conversation(CONFIG), jobs(2), Sampling(1.0)))
    for trajectory in done:
        assert not trajectory.error and len(trajectory.turns) == 3
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            start = before.prompt_ids + before.response_ids
            assert turn.prompt_ids[: len(start)] == start  # as sampled, never encoded again
        last = trajectory.turns[-1]
        text = chat_codec.tokenizer.decode(last.prompt_ids)
        assert text.count("<|user|>") == 2 and text.count("<|tool|>") == 1
        # one end of sequence per message, whether the model sampled it or was cut off
        assert text.count("<eos>") == text.count("<|assistant|>") - 1 + 3
        assert last.prompt.messages()[0]["content"].strip().startswith("Where")
    groups = [Group(t.task, [t]) for t in done]
    for k, group in enumerate(groups):
        group.trajectories[0].reward = float(k % 2)
    rows = training_rows(groups, GRPOConfig(without_signal="keep"))
    (batch,) = pack(rows, 1 << 20)
    assert len(batch.trie) < sum(map(len, rows)) / 1.5  # merged: a conversation is in it once
    ordered = [rows[i] for i in batch.index]
    sizes = [len(row.response_ids) for row in ordered]
    for row, logp in zip(ordered, torch.split(logprobs(policy, batch), sizes), strict=True):
        assert torch.allclose(logp, torch.tensor(row.sampler), atol=1e-5)


class WithTools(Agent):
    prompts = {"ask": "{problem}"}

    def run(self, task):
        prompt = self.prompt("ask", 4, final=True, problem=task.question)
        tools = ({"name": "search", "parameters": {}}, {"name": "write", "parameters": {}})
        yield replace(prompt, tools=tools, system="Be brief.")


def test_roles_and_tools_go_through_the_models_chat_template(chat_codec, codec):
    engine = ScriptedEngine(chat_codec, lambda prompt: "Lima")
    (done,) = rollout(engine, WithTools(CONFIG), jobs(1, 1))
    text = chat_codec.tokenizer.decode(done.turns[0].prompt_ids).replace("> <", "><").strip()
    assert text.startswith("<tools>search write </tools><|system|>Be brief.<eos><|user|>")
    assert text.endswith("<eos><|assistant|>")
    # a template that knows no tools is refused, not passed over
    with pytest.raises(UserError, match="knows no tools"):
        list(rollout(ScriptedEngine(codec, str), WithTools(CONFIG), jobs(1, 1)))


class Probes(Agent):
    """Writes a memory, asks the frozen policy about it, and takes a note that is not trained."""

    frozen_turns = True
    prompts = {
        "write": "{section}",
        "probe": "{problem} {memory}",
        "note": "{memory}",
        "final": "{problem}",
    }

    def run(self, task):
        for section in self.sections(task):
            turn = yield self.prompt("write", 6, section=section)
            probe = self.prompt("probe", 6, problem=task.question, memory=turn.response)
            answer = yield replace(probe, frozen=True)
            turn.notes = {"probe": str(answer.response)}
            yield replace(self.prompt("note", 6, memory=turn.response), trained=False)
        yield self.prompt("final", 6, final=True, problem=task.question)

    def turn_rewards(self, trajectory):
        return [{"long": float(len(turn.response_ids))} for turn in trajectory.turns]


def test_untrained_and_frozen_turns_are_sampled_and_enter_rewards_only(codec, policy):
    engine = TransformersEngine(policy, codec)
    done = list(rollout(engine, Probes(CONFIG), jobs(1, 4), Sampling(1.0)))
    for k, trajectory in enumerate(done):
        trajectory.reward = float(k % 2)
        rewards = Probes(CONFIG).turn_rewards(trajectory)
        for turn, each in zip(trajectory.turns, rewards, strict=True):
            turn.rewards = each
    group = Group(done[0].task, done)
    rows = training_rows([group], GRPOConfig(credit="split"))
    assert len(rows) == sum(turn.trained for t in done for turn in t.turns) == 4 * 3
    assert [turn.trained for turn in done[0].turns] == [True, False, False] * 2 + [True]
    # the share of a turn counts the turns that are trained, and only these are compared
    split, whole = (
        advantages_of(group, GRPOConfig(alpha=1.0, credit=credit)) for credit in ("split", "share")
    )
    assert [turns[0] for turns in split] == pytest.approx([turns[0] / 3 for turns in whole])


@pytest.mark.parametrize("rank", [0, 4])
def test_frozen_turns_are_answered_by_the_policy_before_training(codec, rank):
    """With adapters: by the base weights; without: by a copy.

    The trained policy answers all others.
    """
    policy = random_policy(codec)
    before = TransformersEngine(random_policy(codec), codec)  # the same weights, never changed
    if rank:
        policy = with_lora(policy, GRPOConfig(lora_rank=rank))
        ours, frozen = (TransformersEngine(policy.get_base_model(), codec) for _ in range(2))
        engine = WithFrozen(ours, frozen, policy.disable_adapter)
    else:
        ours, frozen = (TransformersEngine(p, codec) for p in (policy, random_policy(codec)))
        engine = WithFrozen(ours, frozen)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.requires_grad and (not rank or "lora_B" in name):
                p.add_(0.3 * torch.randn_like(p))
    (mixed,) = rollout(engine, Probes(CONFIG), jobs(1, 1), Sampling(0.0))
    assert len(mixed.turns) == 7 and engine.counts()["generated_tokens"] > 0
    for turn in mixed.turns:
        before.add(turn.prompt, Sampling(0.0), 0)
        while not (finished := before.step()):
            pass
        ((_, expected),) = finished
        same = turn.response_ids == expected.response_ids
        close = same and max(map(lambda a, b: abs(a - b), turn.logprobs, expected.logprobs)) < 1e-5
        assert close == turn.prompt.frozen


@pytest.mark.parametrize("rank", [0, 2])
def test_a_training_keeps_the_policy_before_training_for_an_agent_that_asks_it(tmp_path, rank):
    run = RunConfig(name="a", runs=str(tmp_path), device="cpu", lengths=(1,), kinds=("one_fact",))
    config = GRPOConfig(steps=2, tasks_per_step=(2,), group_size=3, lora_rank=rank, lr=1e-2)
    module = train.build(run, config, Probes(CONFIG), reward=lambda t: len(t.answer) % 3 / 3)
    assert isinstance(module.engine, WithFrozen)
    assert not isinstance(train.build(run, config, tiny.agent()).engine, WithFrozen)


class Planner(MemAgent):
    """MemAgent with a plan before each section: a turn aside, which reads nothing."""

    prompts = MemAgent.prompts | {"plan": "{problem} {memory}"}

    def run(self, task):
        steps, turn = super().run(task), None
        with suppress(StopIteration):
            while True:
                prompt = steps.send(turn)
                if not prompt.final:
                    plan = self.prompt("plan", 16, problem=task.question, memory=prompt.memory)
                    yield replace(plan, aside=True)
                turn = yield prompt

    def lines(self, turn):
        return [Line("plan", turn["response"])] if turn.get("aside") else []


def test_a_plan_is_no_section_and_what_it_says_no_memory(codec, tmp_path):
    def script(prompt):
        if prompt.final:
            return "\\boxed{Lima}"
        return "Otto reached Lima." if prompt.section else "I look for Otto."

    agent, engine = Planner(MemAgentConfig(24, 24, 24)), ScriptedEngine(codec, script)
    plain = MemAgent(agent.config)
    n = len(agent.on(codec).sections(task()))
    (row,), (other,) = (
        evaluate(engine, each, [task()], Sampling(), Cell(name, "", "", n), tmp_path / name)
        for name, each in (("planner", agent), ("plain", plain))
    )
    assert row["model_calls"] == 2 * n + 1 == other["model_calls"] + n and n > 1
    for name in ("sections", "memory", "memory_tokens", "memory_cut", "document_tokens"):
        assert row[name] == other[name], name
    (done,) = rollout(engine, agent, jobs(1, 1))
    made = record(done, agent)
    steps = steps_of(made, agent=Planner)
    assert (
        len(steps) == n
        and [turn["memory"].strip() for turn in made["turns"][2::2]] == ["Otto reached Lima."] * n
    )
    for step in steps:
        assert [(line.text.strip(), line.before) for line in step.lines] == [
            ("I look for Otto.", True)
        ]
    # a last turn that does not answer: the memory that it leaves is recorded with it
    done.turns = done.turns[:2]
    assert record(done, agent)["turns"][-1]["memory_after"].strip() == "Otto reached Lima."


class Counting(Agent):
    """Remembers the groups that it has seen: a memory that outlives a task."""

    prompts = {"final": "{problem}"}

    def __init__(self, *args):
        super().__init__(*args)
        self.seen: list[str] = []

    def run(self, task):
        yield self.prompt("final", 6, final=True, problem=task.question)

    def after_group(self, group):
        self.seen.append(
            f"{group.task.id} {len(group.trajectories)} "
            f"{sum(t.reward for t in group.trajectories):.3f}"
        )

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen[:] = state["seen"]


def test_a_state_that_outlives_a_task_learns_from_every_group_and_is_saved_with_the_run(tmp_path):
    path = tmp_path / "counting.py"
    path.write_text("from test_seams import Counting as AGENT\n")
    name, settings = str(path), dict(chunk_tokens=24, final_tokens=6)
    where = dict(runs=str(tmp_path), device="cpu", lengths=(1,), agent=name, keep_checkpoints=9)
    config = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=3)

    def run(folder, steps, resume=False):
        def reward(trajectory):
            return sum(map(ord, trajectory.answer)) % 7 / 7

        agent, how = find.make(name, settings), RunConfig(name=folder, save_every=1, **where)
        return train.train(how, replace(config, steps=steps), agent, resume=resume, reward=reward)

    def seen(folder, step):
        state = json.loads((folder / "checkpoints" / f"step-{step}" / "state.json").read_text())
        return state["agent"]["seen"]

    whole, part = run("whole", 2), run("part", 1)
    assert [len(seen(whole, step)) for step in (1, 2)] == [2, 4]
    run("part", 2, resume=True)
    assert seen(part, 2) == seen(whole, 2)
    # the exported policy brings it
    agent = find.with_state(find.resolve("default", part / "model", {}, {})[1], part / "model")
    assert agent.name == name and agent.state()["seen"] == seen(whole, 2)


@pytest.mark.parametrize(("body", "what"), [
    ("yield 'Lima'", "yielded str, which is no prompt"),
    ("yield None", "yielded NoneType, which is no prompt"),
    ("return iter(())", "run that is no generator"),
    ("if False: yield", "ended without a prompt"),
])  # fmt: skip
def test_a_mistake_in_an_agents_code_is_one_sentence_with_file_and_line(
    tmp_path, codec, body, what
):
    path = tmp_path / "wrong.py"
    path.write_text(
        "from memagent import Agent\n\nclass Wrong(Agent):\n    def run(self, task):\n        "
        f"{body}\n"
    )
    agent = find.make(str(path), {})
    with pytest.raises(AgentError, match=what) as error:
        list(rollout(ScriptedEngine(codec, str), agent, jobs(1, 1)))
    if "no generator" not in what:
        assert "wrong.py, line 5" in str(error.value) or "wrong.py, line 4" in str(error.value)


@dataclass(frozen=True, slots=True)
class Wide(ReadConfig):
    width: int = 3
    """how wide"""


def test_every_member_but_run_has_a_default(codec):
    class Bare(Agent):
        Config = Wide
        prompts = {"final": "{problem} {answer}"}

        def run(self, task):
            yield self.prompt("final", 4, final=True, problem=task.question)

    (done,) = rollout(
        ScriptedEngine(codec, lambda prompt: "\\boxed{Lima}"),
        Bare(),
        [(Task("a", "Where?", ("Lima",), text=""), 0)],
    )
    agent = Bare()
    assert agent.reward(done) == 1.0 and agent.turn_rewards(done) is None
    assert agent.count(done.task, done.turns[0]) == {} and agent.state() is None
    assert agent.limits().written == 512 and agent.with_settings(width=5).config.width == 5
