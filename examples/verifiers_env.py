"""Any agent and suite of this project as an environment of the library `verifiers` (0.4).

Who outgrows one machine trains the very same agent with prime-rl, which takes such environments;
docs/train.md has the commands. The harness drives the agent's generator in the worker's process,
so nothing needs a sandbox, and each prompt is a request. Where one does not go on from the last
response, as a memory agent's, it begins a branch of the trace, and prime-rl takes each branch as a
sample with the reading's reward. Rewards of single turns, and seeds, are not passed on.
"""

from __future__ import annotations

from functools import cache, cached_property, partial

import verifiers.v1 as vf
from openai import AsyncOpenAI

import suites
from agents import find
from config.options import EMBEDDED
from data import Task
from engines.endpoint import worded
from engines.open import give_embedder
from memagent import Agent, Finish, Prompt, Trajectory, Turn
from rollout import advance, given, start
from tasks.served import Completion
from tokens.codec import Codec

__all__ = ["Reader", "Suite"]  # by this list verifiers finds a module's taskset and harness


class SuiteConfig(vf.TasksetConfig):
    """What is asked: fields mean what the flags of `eval` do."""

    suite: str = ""
    data: list[str] = ["world"]
    lengths: list[int] = []
    n: int = 64
    seed: int = 0
    settings: dict = {}  # the suite's own
    tokenizer: str = str(EMBEDDED)
    """folder or hub name, for a suite whose lengths are tokens"""


class Question(vf.TaskData):
    """What travels to the workers, each of which makes the suite's tasks anew."""

    source: str  # the suite's settings, as JSON
    place: int  # among the suite's tasks
    digest: str  # of question, answers and document


class State(vf.State):
    """What the harness leaves to the grading."""

    reward: float | None = None


class Asked(vf.Task[Question, State]):
    """A task of ours, graded by the agent."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if trace.state.reward is None:
            raise vf.TaskError("Nothing was graded: the harness has to be this module's.")
        return trace.state.reward


class Suite(vf.Taskset[Asked, SuiteConfig]):
    """The tasks of a suite, column by column."""

    def load(self) -> list[Asked]:
        source = self.config.model_dump_json(exclude={"task", "system_prompt"})
        return [
            Asked(
                Question(prompt=t.question, name=t.id, source=source, place=k, digest=t.digest),
                self.config.task,
            )
            for k, t in enumerate(tasks_of(source))
        ]


@cache
def tasks_of(source: str) -> list[Task]:
    """Make the tasks of a suite, once in a process."""
    config = SuiteConfig.model_validate_json(source)
    suite = suites.from_config(config, config.settings)
    codec = partial(Codec.load, config.tokenizer)
    scope = suites.scope_of(suite, tuple(config.data), config, codec)
    return [task for column in suites.columns(suite, scope) for task in column.make()]


class ReaderConfig(vf.HarnessConfig):
    """Who reads, and how."""

    agent: str = ""
    """a name in agents/ or a file; empty = the model's own, or memagent"""
    preset: str = "default"
    settings: dict = {}
    """the agent's own, such as chunk_tokens"""
    tokenizer: str = str(EMBEDDED)
    """folder or hub name of the model, whose tokens a section counts"""
    window: int | None = None
    """most tokens of a prompt and its response, for agents that are shown as much as fits"""
    outcome: str = "exact"
    """what an answer earns, as in training: exact, em, f1 or sub_em"""


class Reader(vf.Harness[ReaderConfig]):
    """Drive an agent's generator against the client that is given."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    @cached_property
    def agent(self) -> Agent:
        c = self.config
        _, agent = find.resolve(c.preset, c.tokenizer, {}, c.settings, c.agent)
        give_embedder([agent])
        return agent.on(Codec.load(c.tokenizer, thinking=agent.config.thinking), c.window)

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data: Question):
        agent, task = self.agent, tasks_of(data.source)[data.place]
        if task.digest != data.digest:
            raise vf.HarnessError(f"The task {task.id} is another one here: its file differs.")
        trajectory, steps = Trajectory(task), start(agent, task)
        prompt, training = advance(agent, steps), ctx.client.type == "train"
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            while prompt is not None:
                if prompt.frozen or (training and not prompt.trained):
                    raise vf.HarnessError(f"{agent.label} has turns that are not the policy's.")
                turn = given(prompt, agent.codec) or await self.ask(client, ctx.model, prompt)
                prompt = advance(agent, steps, turn)
                trajectory.turns.append(turn)
        trace.state.reward = agent.reward(trajectory, self.config.outcome)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def ask(self, client: AsyncOpenAI, model: str, prompt: Prompt) -> Turn:
        """Send a prompt as messages, to which the server applies the model's chat template."""
        codec, most = self.agent.codec, prompt.max_tokens
        about = {"tools": [*prompt.all_tools()]} if prompt.all_tools() else {}
        reply = await client.chat.completions.create(
            model=model, messages=prompt.messages(), max_tokens=most, **about
        )
        answer = Completion.of(reply.model_dump())
        if (n := answer.usage.get("completion_tokens", 0)) > most:  # a client that trains sets it
            raise vf.HarnessError(f"{n} tokens of at most {most}: lower the sampling's max_tokens.")
        response = worded(answer, codec)
        finish = Finish(answer.reason)
        return Turn(prompt, prompt.ids(codec), [*response.ids], [], finish, response)
